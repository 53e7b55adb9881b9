"""Let Megatron's own layers do what Transformer Engine's do, so that a CPU trains layouts that are meant for GPUs."""
# mypy: disable-error-code="import-not-found, misc, unused-ignore"

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch


def install(like_te: bool) -> None:
    """Extend Megatron's own layers. With `like_te` they divide work as Transformer Engine's do, where that differs."""
    _mark_norms()
    _add_biases_of_experts()
    _recompute_without_fp8()
    _attend_across_ranks()
    if like_te:
        _duplicate_latent_projections()
        _keep_biases_of_experts_apart()


def _mark_norms() -> None:
    """Let PyTorch's norms serve sequence parallelism, as Transformer Engine's do.

    Megatron refuses them there, because nothing marks their weights: each rank has the gradient of its own part of the
    sequence only, and Megatron sums the gradients of marked weights over the ranks.
    """
    module: Any = importlib.import_module("megatron.core.transformer.torch_norm")
    make = module.WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *arguments: Any, **named: Any) -> Any:
        parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = make(cls, config, *arguments, **named)
        finally:
            config.sequence_parallel = parallel
        for weight in norm.parameters():
            weight.sequence_parallel = parallel
        return norm

    module.WrappedTorchNorm.__new__ = marked


def _add_biases_of_experts() -> None:
    """Let experts of a single tensor-parallel rank add their biases in place.

    Without a reduction Megatron's function returns its input, and torch refuses to change such an output in place.
    """
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    function = mappings._ReduceFromModelParallelRegion
    forward = function.forward

    def copied(context: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        result: torch.Tensor = forward(context, tensor, *rest)
        if result is tensor:
            return result.clone()
        return result

    function.forward = staticmethod(copied)


def _keep_biases_of_experts_apart() -> None:
    """Leave biases of experts unmarked for sequence parallelism, as Transformer Engine does.

    Megatron's own layers mark them, and then sum gradients over tensor-parallel ranks that hold different experts.
    """
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    initialize = layers.RowParallelLinear.__init__

    @functools.wraps(initialize)
    def unmarked(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        if self.explicit_expert_comm and self.bias is not None:
            self.bias.sequence_parallel = False

    layers.RowParallelLinear.__init__ = unmarked


def _recompute_without_fp8() -> None:
    """Let Megatron recompute without Transformer Engine, which it asks whether it trains in FP8."""
    module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not hasattr(module, "FP8GlobalStateManager"):
        module.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        module.activation_recompute_forward = module.fp8_autocast = lambda **named: nullcontext()


def _attend_across_ranks() -> None:
    """Let Megatron's own attention serve context parallelism, as Transformer Engine's does.

    Each rank has two chunks of every sequence, one from each end. Its queries attend to the keys of all ranks.
    """
    module: Any = importlib.import_module("megatron.core.transformer.dot_product_attention")
    masks: Any = importlib.import_module("megatron.core.transformer.utils")
    state: Any = importlib.import_module("megatron.core.parallel_state")
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    attention = module.DotProductAttention
    initialize, forward = attention.__init__, attention.forward

    @functools.wraps(initialize)
    def initialize_part(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            initialize(self, config, *arguments, **named)
        finally:
            config.context_parallel_size = size
        if size > 1:
            # Megatron would make the mask of a window for queries at the start of the sequence.
            self.window, self.scale_mask_softmax.window_size = self.scale_mask_softmax.window_size, None

    @functools.wraps(forward)
    def forward_part(self: Any, query: Any, key: Any, value: Any, mask: Any, *arguments: Any, **named: Any) -> Any:
        group = state.get_context_parallel_group()
        size = group.size()
        if size == 1:
            return forward(self, query, key, value, mask, *arguments, **named)
        chunks = _chunks(size)
        places = [chunks.index(chunk) for chunk in range(2 * size)]
        whole = []
        for part in (key, value):
            gathered = mappings.gather_from_sequence_parallel_region(part, True, group)
            pieces = gathered.chunk(2 * size)
            whole.append(torch.cat([pieces[place] for place in places]))
        if mask is None or self.window is not None:
            length = whole[0].shape[0]
            if self.window is None:
                every = masks.get_default_causal_mask(length)
            else:
                every = masks.get_sliding_window_causal_mask(length, length, self.window)
            rows = every.chunk(2 * size)
            own = chunks[2 * group.rank() : 2 * group.rank() + 2]
            mask = torch.cat([rows[chunk] for chunk in own])
        return forward(self, query, *whole, mask, *arguments, **named)

    attention.__init__, attention.forward = initialize_part, forward_part


def _chunks(size: int) -> list[int]:
    """Return which chunks of a sequence `size` ranks of context parallelism have, rank after rank."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def _duplicate_latent_projections() -> None:
    """Give every rank the whole down-projections of latent attention, as Transformer Engine's layers do.

    Megatron's own layers divide their columns, and leave a part out of a gradient (advisory mla-kpos-grad).
    """
    module: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    module.TELinear = DuplicatedLinear
    initialize = module.MLASelfAttention.__init__

    @functools.wraps(initialize)
    def with_duplicates(self: Any, config: Any, submodules: Any, *arguments: Any, **named: Any) -> None:
        whole = {"linear_kv_down_proj": DuplicatedLinear}
        if submodules.linear_q_down_proj is not None:
            whole["linear_q_down_proj"] = DuplicatedLinear
        initialize(self, config, replace(submodules, **whole), *arguments, **named)

    module.MLASelfAttention.__init__ = with_duplicates


class DuplicatedLinear(torch.nn.Linear):
    """A linear layer without tensor parallelism, with the interface of Megatron's."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and no bias."""
        return super().forward(tensor), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the weight as a tensor of which every tensor-parallel rank has a copy."""
        utils: Any = importlib.import_module("megatron.core.transformer.utils")
        state = self.state_dict(prefix="", keep_vars=True)
        return utils.make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets)
