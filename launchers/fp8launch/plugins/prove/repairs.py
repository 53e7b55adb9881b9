"""Repairs of Megatron and gloo, without which some layouts of a proof do not train or save."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

_SUM = torch.distributed.ReduceOp.SUM


def save_empty_optimizers() -> None:
    """Let the distributed optimizer save a stage without experts, whose optimizer of experts has no parameters.

    With torch's Adam, which only a CPU uses, Megatron reads the step number from the state of a parameter, and an
    assertion fails if there is none. All optimizers of a rank have made the same number of steps.
    """
    chained: Any = importlib.import_module("megatron.core.optimizer.optimizer").ChainedOptimizer
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    synchronize, state_dict = chained._synchronize_steps, distributed.state_dict

    @functools.wraps(synchronize)
    def synchronize_all(self: Any) -> Any:
        steps = [state["step"] for part in self.chained_optimizers for state in part.optimizer.state.values()]
        for part in self.chained_optimizers:
            part.steps_of_rank = max(steps, default=0)
        return synchronize(self)

    @functools.wraps(state_dict)
    def state_dict_with_step(self: Any) -> Any:
        if any(group["params"] for group in self.optimizer.param_groups):
            return state_dict(self)
        content = self.optimizer.state_dict()
        step = torch.tensor(float(getattr(self, "steps_of_rank", 0)))
        self.optimizer.state_dict = lambda: {**content, "state": {0: {"step": step}}}
        try:
            return state_dict(self)
        finally:
            del self.optimizer.state_dict

    chained._synchronize_steps = synchronize_all
    distributed.state_dict = state_dict_with_step


def leave_out_unused_output_weights() -> None:
    """Let tied embeddings and multi-token prediction share a later pipeline stage.

    Megatron (0.17 to 0.19) gives the output layer there a weight that nothing reads, and fails an assertion when it
    saves it (Megatron-LM pull request 7577). Without that weight the model computes the same.
    """
    gpt_model: Any = importlib.import_module("megatron.core.models.gpt.gpt_model").GPTModel
    initialize = gpt_model.__init__

    @functools.wraps(initialize)
    def initialize_without(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        borrows = self.share_embeddings_and_output_weights and self.post_process and not self.pre_process
        if borrows and getattr(self, "mtp_process", False):
            self.output_layer.weight = None

    gpt_model.__init__ = initialize_without


def average_over_gloo() -> None:
    """Let gloo compute averages, for which it has no operation. Call this before Megatron is imported."""
    distributed: Any = torch.distributed
    reduce_scatter, all_reduce = distributed.reduce_scatter_tensor, distributed.all_reduce

    @functools.wraps(reduce_scatter)
    def average_parts(
        output: torch.Tensor, input: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        return reduce_scatter(output, *_as_sum(input, op, group), group, async_op)

    @functools.wraps(all_reduce)
    def average(tensor: torch.Tensor, op: Any = _SUM, group: Any = None, async_op: bool = False) -> Any:
        return all_reduce(*_as_sum(tensor, op, group), group, async_op)

    distributed.reduce_scatter_tensor, distributed.all_reduce = average_parts, average


def _as_sum(tensor: torch.Tensor, op: Any, group: Any) -> tuple[torch.Tensor, Any]:
    if op != torch.distributed.ReduceOp.AVG:
        return tensor, op
    return tensor.div_(torch.distributed.get_world_size(group)), _SUM


def exchange_uneven_parts() -> None:
    """Let tensor-parallel ranks exchange different numbers of tokens over gloo, which requires parts of one size."""
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather)
    def gather_uneven(part: torch.Tensor, group: Any, sizes: Any = None, *options: Any, **named: Any) -> torch.Tensor:
        sizes = named.pop("output_split_sizes", sizes)
        if sizes is None or len(set(sizes)) == 1 or group.size() == 1:
            result: torch.Tensor = gather(part, group, sizes, *options, **named)
            return result
        padded = part.new_zeros((max(sizes), *part.shape[1:]))
        padded[: part.shape[0]] = part
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([one[:size] for one, size in zip(parts, sizes, strict=True)])

    @functools.wraps(reduce_scatter)
    def reduce_uneven(whole: torch.Tensor, group: Any, sizes: Any = None, *options: Any, **named: Any) -> torch.Tensor:
        sizes = named.pop("input_split_sizes", sizes)
        if sizes is None or len(set(sizes)) == 1 or group.size() == 1:
            result: torch.Tensor = reduce_scatter(whole, group, sizes, *options, **named)
            return result
        total = whole.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split(sizes)[group.rank()].contiguous()

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = reduce_uneven
