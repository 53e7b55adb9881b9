"""One process of a training by Megatron-Bridge: `python bridge.py -- OPTIONS... SECTION.FIELD=VALUE...`

Calls the named recipe function, applies the overrides with Bridge's own code, and starts Bridge's own `pretrain` or
`finetune`, in the order of Bridge's own runner (scripts/training/run_recipe.py of 0.6.0). Started like worker.py, after
the same preparation; exit codes and environment are the same. Requires no packages in addition to Bridge.

Options: --recipe MODULE:FUNCTION; --arguments NAME=VALUE,..., for the function (recipes up to 0.5 have arguments);
--step MODULE:NAME, the forward step; --release, the recipe's release; --model FOLDER, read instead of the hub; --task
sft|peft, for fine-tuning; --data FOLDER, with its `training.jsonl`, or `mock`; --resume FOLDER, the run's own
checkpoints.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by path: use the package's full names in imports, never bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[4])

from fp8launch.injob.rank import probe, training_loop, worker
from fp8launch.injob.supervisor import checkpoints
from fp8launch.plugins.bridge.injob import absent_packages, bridge_release, fine_tuning, local_files, packed_attention

_LOOP, _TRAIN = "megatron.bridge.training.pretrain", "megatron.bridge.training.train"
_FINE_TUNING = "megatron.bridge.training.finetune"
_HUB = "megatron.bridge.models.conversion.auto_bridge"
_PRECISION = "megatron.bridge.training.mixed_precision"
_OVERRIDES = "megatron.bridge.training.utils.omegaconf_utils"
_OF_SCRIPTS = "configs."
_PIPELINE = ("model.pipeline_model_parallel_size", "model.virtual_pipeline_model_parallel_size")
_LAYOUT = "model.pipeline_model_parallel_layout"
PROVIDER = "megatron.bridge.models.gpt_provider"
ON_CPU = {
    "transformer_impl": "local",
    "use_cpu_initialization": True,
    "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_fusion_impl": "native",
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
}
_MINUTES = "train.exit_duration_in_mins"


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The options and, as `overrides`, the words after them."""
    parser = argparse.ArgumentParser(prog="bridge.py", allow_abbrev=False)
    parser.add_argument("--recipe", required=True, metavar="MODULE:FUNCTION")
    parser.add_argument("--arguments", type=_arguments, default={}, metavar="NAME=VALUE,...")
    parser.add_argument("--step", required=True, metavar="MODULE:NAME")
    parser.add_argument("--release", default="")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--task", choices=("sft", "peft"))
    parser.add_argument("--data")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="SECTION.FIELD=VALUE")
    # torchrun's own parser removes the separator.
    return parser.parse_intermixed_args([word for word in words if word != "--"])


def _arguments(text: str) -> dict[str, str]:
    return dict(word.split("=", 1) for word in text.split(","))


def check_bridge(release: str) -> None:
    """Print Bridge's release. Stop where it is not installed; warn if it is another minor release than the recipe's."""
    found = bridge_release.installed()
    if found is None:
        worker.stop(
            worker.MACHINE_LACKS,
            f"Megatron-Bridge is not installed for {sys.executable}; run in an image of NeMo, or set PYTHONPATH",
        )
    there = found[1] or "of an unknown release"
    if os.environ["RANK"] != "0":
        return
    if found[1]:
        print(f" > Megatron-Bridge version ... {there}", flush=True)  # as Megatron prints its own, for reports
    if release and there.split(".")[:2] != release.split(".")[:2]:
        print(f"fp8launch: warning: the recipe is of Megatron-Bridge {release}, this is {there}", file=sys.stderr)


def import_bridge(ours: argparse.Namespace) -> None:
    """Import what a recipe uses."""
    recipes = ours.recipe.partition(":")[0]
    if recipes.startswith(_OF_SCRIPTS):
        find_scripts()
    modules = [_LOOP, _TRAIN, _HUB, _OVERRIDES, recipes, ours.step.partition(":")[0]]
    if ours.task:
        modules.append(_FINE_TUNING)
    if ours.data:
        modules.append(fine_tuning.DATASETS)
    import_modules(modules)


def import_modules(modules: Sequence[str]) -> None:
    """Import the parts of Bridge that the run uses, without packages for other models. Exits if an import fails."""
    absent_packages.install()
    try:
        absent_packages.load_together(modules)
    except ModuleNotFoundError as missing:
        worker.stop(worker.MACHINE_LACKS, f"Megatron-Bridge cannot be imported by {sys.executable}: {missing}")
    if os.environ["RANK"] == "0" and absent_packages.replaced():
        names = ", ".join(sorted(absent_packages.replaced()))
        print(f"fp8launch: not installed, and not used by this run: {names}", file=sys.stderr)


def find_scripts() -> None:
    """Make the recipes of releases up to 0.5 importable: they are next to the package. Exits if they are missing."""
    found = bridge_release.installed()
    assert found is not None, "check_bridge stops without it"
    folder = found[0].resolve().parents[2] / "scripts" / "performance"
    if not (folder / "configs").is_dir():
        worker.stop(
            worker.MACHINE_LACKS,
            f"the recipes of this Megatron-Bridge are not there: {folder} has no `configs`; run in an image of NeMo, "
            "or set PYTHONPATH to `src` of a source checkout",
        )
    sys.path.insert(0, str(folder))


def resume(folder: Path) -> list[str]:
    """Overrides for a start from the run's own checkpoint.

    The supervisor mends the tracker of Megatron's own name, which Bridge writes but reads last: the step goes by it.
    """
    overrides = [f"checkpoint.load={_quoted(folder)}"]
    step = checkpoints.latest(folder)
    if step:
        overrides.append(f"checkpoint.ckpt_step={step}")
    return overrides


def stop_in_time(overrides: Sequence[str]) -> list[str]:
    """The override that makes Bridge save and leave before the job ends."""
    minutes = worker.minutes_left()
    if minutes is None or any(word.startswith(f"{_MINUTES}=") for word in overrides):
        return []
    return [f"{_MINUTES}={minutes}"]


def _quoted(path: Path) -> str:
    return '"' + str(path).replace('"', '\\"') + '"'


def read_model_from(folder: Path) -> None:
    """Make recipes read this folder's config.json instead of the hub model that they name."""
    if not (folder / "config.json").is_file():
        worker.stop(worker.WRONG_REQUEST, f"bridge.model: {folder} has no config.json")
    bridge: Any = importlib.import_module(_HUB).AutoBridge
    read = bridge.from_hf_pretrained.__func__

    def from_folder(cls: Any, path: object, /, **kwargs: Any) -> Any:
        kwargs.pop("revision", None)
        return read(cls, str(folder), **kwargs)

    bridge.from_hf_pretrained = classmethod(from_folder)


def configuration(
    recipe: str,
    overrides: Sequence[str],
    given: Mapping[str, str],
    task: str | None = None,
    data: str | None = None,
    model: Path | None = None,
) -> Any:
    """The configuration that a recipe function makes of its arguments, with data, tokenizer and overrides."""
    module, _, function = recipe.partition(":")
    build = getattr(importlib.import_module(module), function, None)
    if build is None:
        worker.stop(worker.MACHINE_LACKS, f"{module} of this Megatron-Bridge has no recipe {function}")
    try:
        config = build(**given)
    except OSError as failure:
        found = bridge_release.installed()
        if found is not None and failure.filename and found[0] in Path(str(failure.filename)).parents:
            # The wheel of 0.6.2 has no file but Python's.
            worker.stop(
                worker.MACHINE_LACKS,
                f"this Megatron-Bridge lacks {failure.filename}, which the recipe reads and wheels do not contain; run "
                "in an image of NeMo, or set PYTHONPATH to `src` of a source checkout",
            )
        reason = (str(failure).strip().splitlines() or [repr(failure)])[0]
        worker.stop(
            worker.MACHINE_LACKS,
            f"the model's configuration could not be read from the hub: {reason}; name a local folder with its "
            "config.json as bridge.model, or pass HF_TOKEN by name: `secrets: [HF_TOKEN]`",
        )
    if data:
        fine_tuning.use_data(config, data)
    if model is not None:
        fine_tuning.use_tokenizer(config, model)
    if isinstance(config.mixed_precision, str) and any(word.startswith("mixed_precision.") for word in overrides):
        # Some recipes only name it, and Bridge looks it up after it has applied the overrides, which need its fields.
        named: Any = importlib.import_module(_PRECISION)
        config.mixed_precision = named.get_mixed_precision_config(config.mixed_precision)
    omegaconf: Any = importlib.import_module(_OVERRIDES)
    try:
        omegaconf.process_config_with_overrides(config, cli_overrides=list(overrides) or None)
    except omegaconf.OverridesError as refused:
        worker.stop(worker.WRONG_REQUEST, f"Megatron-Bridge refuses an override: {refused}")
    _rebuild_pipeline_layout(config, overrides)
    if task:
        fine_tuning.align(config)
    if data and data != local_files.MOCK:
        fine_tuning.use_template(config, data)
        fine_tuning.use_packed_files(config, data)
    length = getattr(config.dataset, "seq_length", None) or getattr(config.dataset, "sequence_length", None)
    if length is not None and hasattr(config.model, "seq_length"):
        config.model.seq_length = length
    return config


def configured(ours: argparse.Namespace) -> Any:
    """The configuration that a job trains with, of its options and overrides; call after `import_bridge`."""
    if ours.model is not None:
        read_model_from(ours.model)
    overrides = list(ours.overrides)
    if ours.resume:
        overrides += resume(ours.resume)
    overrides += stop_in_time(ours.overrides)
    return configuration(ours.recipe, overrides, ours.arguments, ours.task, ours.data, ours.model)


def train(config: Any, step: str, task: str | None = None, data: str | None = None) -> None:
    """Bridge's own training, with the forward step of this name.

    On random tokens Bridge's own runner measures the speed of fine-tuning with `pretrain`, without a checkpoint.
    """
    if task and data != local_files.MOCK:
        importlib.import_module(_FINE_TUNING).finetune(config, forward_step(step, "finetune"))
    else:
        importlib.import_module(_LOOP).pretrain(config, forward_step(step))


def _rebuild_pipeline_layout(config: Any, overrides: Sequence[str]) -> None:
    """A recipe's own layout of the pipeline belongs to its own sizes."""
    fields = {word.lstrip("+~").split("=", 1)[0] for word in overrides}
    build = getattr(config.model, "_pipeline_model_parallel_layout_builder", None)
    if build is not None and fields.intersection(_PIPELINE) and _LAYOUT not in fields:
        sizes = (config.model.pipeline_model_parallel_size, config.model.virtual_pipeline_model_parallel_size)
        config.model.pipeline_model_parallel_layout = build(*sizes)


def local_layers(model: Any) -> None:
    """Have a model's configuration build layers of torch's own modules, without Transformer Engine."""
    model.transformer_layer_spec = importlib.import_module(PROVIDER).local_layer_spec
    for name, value in ON_CPU.items():
        setattr(model, name, value)


def adapt_to_cpu(config: Any) -> None:
    """Set what only a GPU can do to what every machine can, as `compat.cpu_process.FLAGS` do for Megatron-LM."""
    config.dist.distributed_backend = "gloo"
    local_layers(config.model)
    config.optimizer.use_precision_aware_optimizer = False  # Transformer Engine's Adam
    if getattr(config.dataset, "enable_offline_packing", False):
        packed_attention.install()
    if config.peft is not None:
        # Bridge finds names for Transformer Engine's layers in Megatron-Core, but on a machine without it no classes.
        adapters: Any = importlib.import_module("megatron.bridge.peft.utils")
        adapters.HAVE_TE = False


def forward_step(name: str, mode: str = "pretrain") -> Any:
    """The forward step of a name; a class is made one of, for a mode that Bridge's runner names."""
    module, _, attribute = name.partition(":")
    step: Any = getattr(importlib.import_module(module), attribute)
    if not inspect.isclass(step):
        return step
    make: Any = step
    if "mode" in inspect.signature(make).parameters:
        return make(mode=mode)
    return make()


def asked_for(config: Any) -> Any:
    """Return the requested settings by Megatron's argument names, for the probe."""
    values: dict[str, Any] = {}
    for section in (config.ddp, config.mixed_precision, config.model):
        values |= getattr(section, "__dict__", {})
    return types.SimpleNamespace(**values)


def main() -> None:
    ours = arguments(sys.argv[1:])
    device = worker.begin()
    check_bridge(ours.release)
    if device == "cuda":
        worker.check_gpu()
    worker.announce()
    worker.prepare(device)
    import_bridge(ours)
    config = configured(ours)
    if device == "cpu":
        adapt_to_cpu(config)
    training_loop.install_measurements(_TRAIN)
    probe.install(_TRAIN, lambda: asked_for(config))
    worker.run_to_the_end(lambda: train(config, ours.step, ours.task, ours.data))


if __name__ == "__main__":
    main()
