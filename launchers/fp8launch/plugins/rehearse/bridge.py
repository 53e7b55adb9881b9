"""Rehearse Megatron-Bridge's own code with the configuration of the job, made small.

The in-job program (plugins/bridge/injob/bridge.py) builds the configuration and starts Bridge's `pretrain`, as in the
job.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import inspect
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from fp8launch.engines.base import Layout
from fp8launch.injob.rank import worker
from fp8launch.megatron.arguments import FlagValue
from fp8launch.plugins.bridge.injob import absent_packages, bridge
from fp8launch.plugins.rehearse import checkpoint_plan
from fp8launch.plugins.rehearse.failure import NotRehearsed
from fp8launch.plugins.rehearse.shrink import ENDS, shrink

# Megatron-LM's flags and Bridge's fields for the same setting. Flags that are not listed have the same name in `model`.
_FIELDS = {
    "num_experts": "model.num_moe_experts",
    "decoder_first_pipeline_num_layers": "model.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "model.num_layers_in_last_pipeline_stage",
    "global_batch_size": "train.global_batch_size",
    "train_iters": "train.train_iters",
}
_LENGTHS = ("seq_length", "sequence_length")
# Nothing is read or written outside the process, and nothing outlives the step. With these settings, the other folder
# settings of loggers, profilers and checkpoints have no effect.
_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "checkpoint.save", "checkpoint.load", "checkpoint.pretrained_checkpoint", "checkpoint.ckpt_step",
            "checkpoint.non_persistent_save_interval", "dataset.blend", "dataset.blend_per_split", "dataset.data_path",
            "dataset.path_to_cache", "logger.tensorboard_dir", "logger.wandb_project", "logger.mlflow_experiment",
            "logger.comet_project", "logger.save_config_filepath", "scheduler.lr_warmup_fraction",
            "scheduler.lr_decay_iters", "scheduler.lr_wsd_decay_iters", "tokenizer.tokenizer_model",
            "train.rampup_batch_size", "train.exit_interval", "train.exit_duration_in_mins",
            "train.check_weight_hash_across_dp_replicas_interval", "train.train_samples", "train.num_epochs",
            "train.step_batch_size_schedule", "validation.eval_global_batch_size", "scheduler.lr_decay_samples",
            "scheduler.lr_wsd_decay_samples",
        )
    ),
    **dict.fromkeys(
        (
            "checkpoint.finetune", "dataset.persistent_workers", "logger.log_energy", "profiling.use_nsys_profiler",
            "profiling.use_pytorch_profiler", "profiling.record_memory_history", "train.exit_signal_handler",
        ),
        False,
    ),
    **dict.fromkeys(
        ("dataset.num_workers", "validation.eval_iters", "scheduler.lr_warmup_iters", "scheduler.lr_warmup_samples"), 0
    ),
    "logger.log_interval": 1,
    "tokenizer.tokenizer_type": "NullTokenizer",
}  # fmt: skip


class MachineLacks(Exception):
    """The in-job program cannot run here, which says nothing about the recipe."""


class WrongRequest(Exception):
    """The in-job program rejects its arguments."""


def prepare(words: list[str]) -> Any:
    """Import everything that the program needs for these arguments, and return its parsed options."""
    worker.stop = _stop
    os.environ.setdefault("RANK", "0")
    os.environ["HF_HUB_OFFLINE"] = "1"
    ours = bridge.arguments(words)
    try:
        _hide_stand_ins()
        bridge.import_bridge(ours)
    except MachineLacks:
        raise
    except Exception as failure:
        raise MachineLacks(f"Megatron-Bridge cannot be imported: {failure!r}") from failure
    return ours


def _hide_stand_ins() -> None:
    """Make transformers treat the stand-ins in `packages` as missing: it checks versions, and its models do not run."""
    absent_packages.install()
    for module in absent_packages.load_together(("transformers.utils.import_utils", "transformers.utils")):
        for name in [name for name in vars(module) if name.startswith("is_flash") and name.endswith("_available")]:
            setattr(module, name, lambda *_, **__: False)


def train(request: Mapping[str, Any], sizes: dict[str, tuple[int, int]]) -> None:
    """Run two steps of the program, and add each changed size to `sizes`, in the format of `Shrunk`.

    `request["program"]` holds the `words` and the `model` of an OwnProgram, and the `layout` of its run.
    """
    program = request["program"]
    ours = prepare(program["words"])
    if program["model"] is not None:
        ours.model = Path(request["result"]).with_suffix(".model")
        ours.model.mkdir()
        (ours.model / "config.json").write_text(json.dumps(program["model"]))
    try:
        config = bridge.configured(ours)
    except (MachineLacks, WrongRequest):
        raise
    except Exception as failure:  # for example, this release of transformers does not know the model
        raise MachineLacks(f"Megatron-Bridge makes no configuration of the recipe here: {failure!r}") from failure
    save = config.checkpoint.save
    try:
        sizes.update(shrink_configuration(config, Layout(**program["layout"]), request["scale"]))
        _follow(config, save)
    except Exception as failure:
        raise NotRehearsed(f"the configuration of Megatron-Bridge could not be made small: {failure!r}") from failure
    bridge.train(config, ours.step)


def shrink_configuration(config: Any, layout: Layout, scale: int = 1) -> dict[str, tuple[int, int]]:
    """Shrink a configuration by the rules for Megatron-LM's flags, and return each changed size."""
    values = flags_of(config)
    small = shrink(values, layout, scale)
    for flag, value in small.values.items():
        if value != values.get(flag):
            _put(config, _FIELDS.get(flag, f"model.{flag}"), value)
    for field, value in _SETTINGS.items():
        _put(config, field, value)
    for name in _LENGTHS:
        _put(config, f"dataset.{name}", small.values.get("seq_length"))
    config.tokenizer.vocab_size = small.values["vocab_size"]
    return small.sizes


def flags_of(config: Any) -> dict[str, FlagValue]:
    """Return a configuration's sizes and structure under the names of Megatron-LM's flags."""
    model = vars(config.model)
    values: dict[str, Any] = {
        name: value for name, value in model.items() if isinstance(value, int | float | str | list)
    }
    for flag, field in _FIELDS.items():
        section, _, name = field.partition(".")
        values[flag] = getattr(getattr(config, section), name, None)
    if not any(getattr(one, "first_last_layers_bf16", False) for one in (config.model, config.mixed_precision)):
        for flag in ENDS:
            values.pop(flag, None)
    values.setdefault("vocab_size", getattr(config.tokenizer, "vocab_size", None))
    return {flag: value for flag, value in values.items() if value is not None}


def _put(config: Any, field: str, value: Any) -> None:
    """Set a field if the configuration has it."""
    section, _, name = field.partition(".")
    if hasattr(getattr(config, section, None), name):
        setattr(getattr(config, section), name, value)


def _follow(config: Any, save: str | None) -> None:
    """Let every rank train, verify that it did, and plan a checkpoint if the run saves any (`save` is the folder)."""
    loop: Any = importlib.import_module("megatron.bridge.training.pretrain")
    setup, steps, validate = loop.setup, loop.train, type(config).validate

    def validate_with_folder(self: Any) -> None:
        # Bridge checks its rules for checkpoints only if a folder is set. The rehearsal writes none.
        self.checkpoint.save = save
        validate(self)
        self.checkpoint.save = None

    def with_data(*arguments: Any, **named: Any) -> Any:
        # Rank 0 decides whether there is data to train with; ranks that read no data rely on it.
        output = setup(*arguments, **named)
        output.state.train_state.do_train = True
        return output

    def train_and_plan(*arguments: Any, **named: Any) -> None:
        given = inspect.signature(steps).bind(*arguments, **named).arguments
        steps(*arguments, **named)
        done = given["global_state"].train_state.step
        if done != config.train.train_iters:
            raise NotRehearsed(f"Megatron-Bridge trained {done} of {config.train.train_iters} iterations")
        if save is not None:
            checkpoint_plan.of_bridge(
                config, given["model"], given["optimizer"], given["scheduler"], given["pg_collection"]
            )

    loop.setup, loop.train, type(config).validate = with_data, train_and_plan, validate_with_folder


def _stop(code: int, message: str) -> NoReturn:
    raise (MachineLacks if code == worker.MACHINE_LACKS else WrongRequest)(message)
