"""Stand-ins for DeepEP's and HybridEP's buffers, which assume that all ranks of the group route their tokens alike.

Interfaces: deepseek-ai/DeepEP, `deep_ep/buffer.py` on the branch main and `hybrid_ep_buffer.py` on hybrid-ep.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

from typing import Any

import torch

from fp8launch.plugins.rehearse.packages import rows, used

# Numbers of ranks for which DeepEP has a configuration (Buffer.get_dispatch_config).
RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)


class EventHandle:
    """A CUDA event that has already completed."""

    def current_stream_wait(self) -> None:
        """Do nothing: there is nothing to wait for."""


class EventOverlap(EventHandle):
    """An event that keeps tensors."""

    def __init__(self, event: Any = None, extra_tensors: Any = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors


class Config:
    """The sizes of DeepEP's buffers."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        """Return the bytes of the buffer for transfers over NVLink."""
        return hidden_bytes * ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        """Return the bytes of the buffer for transfers between nodes."""
        if ranks <= 8:
            return 0
        return hidden_bytes * ranks


class Buffer:
    """DeepEP's buffer for one group."""

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        **_: Any,
    ) -> None:
        used("deep_ep", "DeepEP's kernels")
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes

    @staticmethod
    def set_num_sms(number: int) -> None:
        """Check the number of multiprocessors for communication."""
        if number % 2:
            raise AssertionError("The SM count must be even")

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the configuration for this number of ranks."""
        if num_ranks not in RANKS:
            raise AssertionError(f"Unsupported number of EP ranks: {num_ranks}")
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Return token counts per rank, per node and per expert, and the ranks to which each token goes."""
        if topk_idx.dtype != torch.int64:
            raise AssertionError(f"topk_idx must be int64, not {topk_idx.dtype}")
        ranks = self.group.size()
        owner = torch.where(topk_idx < 0, topk_idx, topk_idx // (num_experts // ranks))
        to_rank = torch.stack([(owner == rank).any(-1) for rank in range(ranks)], -1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0].flatten(), minlength=num_experts).int()
        return to_rank.sum(0).int(), None, per_expert, to_rank, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: Any = None,
        num_tokens_per_rank: Any = None,
        num_tokens_per_rdma_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Return the tokens that this rank receives. With a handle, return as many rows as before."""
        if handle is not None:
            return rows(x, handle[1]), None, None, None, None, EventOverlap()
        ranks, rank = self.group.size(), self.group.rank()
        local = num_tokens_per_expert.numel() // ranks
        if topk_weights.dtype != torch.float32:
            raise AssertionError(f"topk_weights must be float32, not {topk_weights.dtype}")
        mine = is_token_in_rank[:, rank].nonzero().flatten()
        indices = topk_idx[mine] - rank * local
        outside = (indices < 0) | (indices >= local)
        indices = indices.masked_fill(outside, -1)
        weights = topk_weights[mine].masked_fill(outside, 0.0)
        received = len(mine) * ranks
        counts = [int(each) * ranks for each in num_tokens_per_expert[rank * local : (rank + 1) * local]]
        handle = (x.shape[0], received)
        return (
            rows(x[mine], received),
            rows(indices, received),
            rows(weights, received),
            counts,
            handle,
            EventOverlap(),
        )

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: Any = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, ...]:
        """Return one row per token of this rank."""
        if x.shape[0] != handle[1]:
            raise AssertionError(f"combine: {x.shape[0]} rows, {handle[1]} were dispatched")
        weights = None
        if topk_weights is not None:
            weights = rows(topk_weights, handle[0])
        return rows(x, handle[0]), weights, EventOverlap()


class HybridEPBuffer:
    """HybridEP's buffer, which dispatches and permutes in one call."""

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        num_blocks_permute_api: int | None = None,
        num_blocks_unpermute_api: int | None = None,
        use_shared_buffer: bool = True,
        **_: Any,
    ) -> None:
        used("hybrid_ep", "HybridEP's kernels")
        self.group, self.local_experts = group, num_local_experts

    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Any = None,
        probs: Any = None,
        scaling_factor: Any = None,
        handle: Any = None,
        num_dispatched_tokens_tensor: Any = None,
        num_dispatched_tokens: Any = None,
        num_permuted_tokens: Any = None,
        pad_multiple: int | None = None,
        non_blocking: bool = False,
        use_host_meta: bool = True,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[Any, ...]:
        """Return rows for this rank's experts, ordered by expert, each padded to a multiple of `pad_multiple`."""
        if handle is not None:
            return rows(hidden, handle[1]), None, None, handle[3], handle
        ranks, rank = self.group.size(), self.group.rank()
        local = num_of_experts_per_rank or self.local_experts
        if routing_map.shape[-1] != local * ranks:
            raise AssertionError(f"routing_map has {routing_map.shape[-1]} experts, not {local} on {ranks} ranks")
        mine = routing_map[:, rank * local : (rank + 1) * local].bool()
        counts = mine.sum(0).to(torch.int64) * ranks
        if pad_multiple:
            counts = (counts + pad_multiple - 1) // pad_multiple * pad_multiple
        total = int(counts.sum())
        if num_permuted_tokens is not None:
            # Drop tokens for which there is no room.
            total = int(num_permuted_tokens)
            ends = counts.cumsum(0).clamp(max=total)
            counts = ends.diff(prepend=ends.new_zeros(1))
        token, expert = mine.nonzero(as_tuple=True)
        weights = None
        if probs is not None:
            weights = rows(probs[token, rank * local + expert].float(), total)
        handle = (hidden.shape[0], total, routing_map.shape[-1], counts, torch.zeros(1, dtype=torch.int32))
        return rows(hidden[token], total), weights, None, counts, handle

    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: Any = None,
        handle: Any = None,
        num_dispatched_tokens_tensor: Any = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Any, Any]:
        """Return one row per token of this rank, and probabilities per token and expert."""
        if hidden.shape[0] != handle[1]:
            raise AssertionError(f"combine: {hidden.shape[0]} rows, {handle[1]} were dispatched")
        weights = None
        if probs is not None:
            weights = torch.zeros(handle[0], handle[2], dtype=torch.float32)
        return rows(hidden, handle[0]), weights
