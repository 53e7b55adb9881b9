"""Repairs of Megatron, without which some layouts cannot save what a proof compares."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


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
