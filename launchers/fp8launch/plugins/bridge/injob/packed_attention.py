"""Packed sequences in Megatron's own attention, which refuses them, for fine-tuning on a CPU."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import itertools
from typing import Any

import torch


def install() -> None:
    """Let DotProductAttention attend within each packed sequence, one after the other."""
    attention: Any = importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    forward = attention.forward

    def forward_packed(
        self: Any,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        attn_mask_type: Any = None,
        attention_bias: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        if packed_seq_params is None:
            return forward(self, query, key, value, attention_mask, attn_mask_type, attention_bias)
        ends = packed_seq_params.cu_seqlens_q_padded
        if ends is None:
            ends = packed_seq_params.cu_seqlens_q
        parts = []
        for begin, end in itertools.pairwise(ends.flatten().tolist()):
            if begin < end:
                # (tokens, heads, width) to (tokens, batch of 1, heads, width). Without a mask, attention is causal.
                own = [tensor[begin:end].unsqueeze(1) for tensor in (query, key, value)]
                parts.append(forward(self, *own, None, attn_mask_type, attention_bias))
        return torch.cat(parts)

    attention.forward = forward_packed
