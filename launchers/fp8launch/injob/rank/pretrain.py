"""GPT pre-training on `megatron.training` 0.17 to 0.19, dense and MoE, on mock or indexed data.

Megatron itself implements everything that its arguments set: model, parallelism, precision, optimizer, checkpoints and
logging. This file only starts it. Arguments that need another data path (packed sequences, fine-tuning, RL) are
refused: set `launch.script` to the Megatron-LM script that supports them.
"""

# mypy: disable-error-code="import-not-found, no-any-return"

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model, get_model_config
from megatron.training import argument_utils, get_args, get_timers, inprocess_restart, pretrain, set_startup_timestamps

from fp8launch.injob.rank import config_fields, gpt_data, leaving

NOT_HERE = {
    "--sft": "supervised fine-tuning",
    "--fim-data": "fill-in-the-middle data",
    "--hybrid-context-parallel": "hybrid context parallelism",
    "--dataloader-inter-document-masking": "masking between documents",
    "--perform-rl-step": "reinforcement learning",
    "--hybrid-layer-pattern": "hybrid (Mamba) models",
    "--yaml-cfg": "arguments from a YAML file",
}
SPIKE = 10.0  # A loss is a spike if it exceeds the largest loss so far by this factor (--check-for-spiky-loss).

straggler = StragglerDetector()


def loss(mask: torch.Tensor, per_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the token losses, the number of tokens, and both as the reported `lm loss`, a quotient.

    `per_token` and `mask` are [micro batch, sequence]; masked tokens count in neither.
    """
    weights = mask.reshape(-1).float()
    total = torch.dot(per_token.reshape(-1).float(), weights)
    tokens = weights.sum().detach().to(torch.int)
    _check(total)
    return total, tokens, {"lm loss": torch.stack([total.detach(), tokens.to(total.dtype)])}


def _check(total: torch.Tensor) -> None:
    """Pass a bad loss to Megatron's re-run machinery, which distinguishes hardware faults from divergence."""
    args = get_args()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for name, rejected in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            machine.validate_result(
                result=total,
                rejection_func=rejected,
                message=f"{name} in the loss of this rank's micro batch",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=total,
            rejection_func=functools.partial(machine.is_unexpectedly_large, threshold=SPIKE, context="loss"),
            message="loss spike",
            tolerance=0.0,
            fatal=False,
        )


def forward_step(samples: Iterator[dict[str, Any]] | None, model: Any, return_schedule_plan: bool = False) -> Any:
    """Run one micro batch through this stage. Return its output (or its schedule plan) and the loss function."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler(bdata=True):
        vp_stage = get_attr_wrapped_model(model, "vp_stage")
        batch = gpt_data.batch_for_this_rank(samples, get_model_config(model), vp_stage)
    timers("batch-generator").stop()

    with straggler:
        # --overlap-moe-expert-parallel-comm interleaves the layers of two micro batches by their schedule plans.
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, functools.partial(loss, batch["loss_mask"])


def embedding_ranks(pipeline_ranks: list[int]) -> list[int]:
    """Return the ranks with embeddings, which Megatron needs for its process groups before any model exists."""
    return gpt_data.embedding_ranks(config_fields.transformer_config(get_args()), pipeline_ranks)


def refused(argv: list[str]) -> list[str]:
    """Return a line for each argument that this entry does not support."""
    flags = {argument.split("=", 1)[0] for argument in argv}
    advice = "name Megatron-LM's pretrain_gpt.py as the script"
    return [
        f"{flag} ({what}) is not supported by fp8launch's own entry; {advice}"
        for flag, what in NOT_HERE.items()
        if flag in flags
    ]


def main(started: float) -> None:
    """Train with the arguments in sys.argv.

    `started` is when the process started (seconds since 1970), for Megatron's start-up report. Arguments of
    `pretrain()` are passed by name, because their order differs in each version.
    """
    set_startup_timestamps(program_start=started, main_entry=time.time())
    leave_out_help_texts()
    run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
    parameters = inspect.signature(pretrain).parameters
    arguments: dict[str, Any] = {
        "train_valid_test_dataset_provider": gpt_data.datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
        "get_embedding_ranks": embedding_ranks,
        "store": store,
    }
    if "cfg_container" in parameters:  # 0.18 on: the caller parses
        arguments |= _parsed()
    if parameters["model_provider"].default is inspect.Parameter.empty:  # 0.17, 0.18
        from fp8launch.injob.rank import gpt_model

        arguments["model_provider"] = gpt_model.build
    run(**arguments)
    leaving.everything_is_written()
    leaving.end_process_group()


def leave_out_help_texts() -> None:
    """Make Megatron's parser skip help texts, which this entry never prints.

    Megatron extracts them from its own source each time it parses its arguments, which it does three times.
    """
    factory: Any = getattr(argument_utils, "ArgumentGroupFactory", None)
    if hasattr(factory, "_get_field_docstrings"):
        factory._get_field_docstrings = lambda self, config: {}


def _parsed() -> dict[str, Any]:
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    config_fields.set_config_fields(args)
    # Hybrid models occur in rehearsals only.
    kind = "gpt" if getattr(args, "hybrid_layer_pattern", None) is None else "hybrid"
    model = getattr(argument_utils, f"{kind}_config_from_args", lambda _: None)(args)  # 0.19: Megatron builds the model
    return {"cfg_container": argument_utils.pretrain_cfg_container_from_args(args, model)}


if __name__ == "__main__":
    sys.exit("start worker.py, which prepares the process")
