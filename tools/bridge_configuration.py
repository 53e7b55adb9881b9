"""Build the configurations of recipes of Megatron-Bridge, and of the pack's recipes for the same runs.

    python tools/bridge_configuration.py CHECKOUT [--write]     recipes of Bridge; --write updates the tests' file
    python tools/bridge_configuration.py                        recipes of the pack

A CHECKOUT is a folder with Bridge's source of RELEASE (`src/`), or its unpacked wheel. Recipes of Bridge are built as a
run builds them: by the in-job program's `configuration` with the arguments that `fp8launch render bridge:NAME` shows,
then by Bridge's own `runtime_config_update` for the GPUs of the recipe. Recipes of the pack are built by Megatron-LM's
parser, validators and `core_transformer_config_from_args`. The result has the fields of TransformerConfig,
DistributedDataParallelConfig and OptimizerConfig that differ from Megatron-Core's defaults, as far as JSON can hold
them. The models' published configurations (hub_models.json) stand in for the Hugging Face hub. Needs torch and
megatron-core, for Bridge also transformers, omegaconf and hydra-core; nothing is trained and no network is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import lzma
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "tests" / "plugins" / "bridge" / "bridge_configurations.json.xz"
RELEASE = "0.6.2"
# Both are built with the Megatron-Core of this release.
MEGATRON = ("software.megatron='0.19'",)
Built: TypeAlias = "dict[str, dict[str, dict[str, Any]]]"
# Recipes of Bridge, and the pack's recipes for the same runs.
TWINS = {
    "llama3_8b_pretrain_8gpu_h100_fp8cs_config": "llama8b_fp8",
    "llama31_405b_pretrain_1024gpu_h100_fp8cs_config": "llama405b_tensorwise_h100",
    "qwen3_30b_a3b_pretrain_8gpu_gb200_fp8mx_config": "qwen3_30b_a3b_mxfp8_gb200",
    "deepseek_v3_pretrain_256gpu_gb300_fp8mx_config": "deepseek_v3_mxfp8_gb300",
    "gpt_oss_120b_pretrain_64gpu_gb200_fp8mx_config": "gpt_oss_120b_mxfp8_gb200",
}
TE_VERSION = "2.20.2"


def of_bridge(checkout: Path) -> Built:
    """Build each recipe of TWINS with Bridge."""
    sys.path.insert(0, str(importlib.import_module("bridge_source").source_folder(checkout)))
    stubs = importlib.import_module("bridge_stubs")
    stubs.install()
    from fp8launch.job.prepared import prepare
    from fp8launch.plugins.bridge.index import find
    from fp8launch.plugins.bridge.injob import bridge
    from fp8launch.plugins.bridge.own_program import hub_models

    built: Built = {}
    with tempfile.TemporaryDirectory() as folder:
        hub = {model: Path(folder) / str(number) for number, model in enumerate(hub_models())}
        for model, stated in hub_models().items():
            hub[model].mkdir()
            (hub[model] / "config.json").write_text(json.dumps(stated))
        for name in TWINS:
            recipe = find(name, RELEASE)
            ours = bridge.arguments(prepare(f"bridge:{name}").args.argv)
            if not built:
                os.environ["RANK"] = "0"
                bridge.import_bridge(ours)
                read_from(hub)
                megatron = validate_worker().Megatron(None)
            # Megatron looks for its kernels when it permutes tokens.
            with megatron.target(machine(recipe.gpu, recipe.gpus, ["--moe-permute-fusion"], dict(os.environ))):
                stubs.answer_as(recipe.gpu)
                config = bridge.configuration(ours.recipe, ours.overrides, ours.arguments)
                importlib.import_module("megatron.bridge.training.config").runtime_config_update(config)
            built[name] = {section: stated_fields(getattr(config, section), cls) for section, cls in classes().items()}
    return built


def of_the_pack() -> Built:
    """Build the twins with Megatron-LM: its parser, `validate_args` and `core_transformer_config_from_args`."""
    from fp8launch.injob.rank.compat import python311, triton_stub

    python311.install()
    triton_stub.install(("megatron.",), launches_do_nothing=True)
    from fp8launch.job.prepared import prepare

    megatron = validate_worker().Megatron(None)
    built: Built = {}
    for name in TWINS.values():
        one = prepare(name, MEGATRON)
        recipe = one.loaded.recipe
        argv = list(one.args.argv)
        made: dict[str, Any] = {}
        environment = {**recipe.environment, "FP8LAUNCH_CONFIG": json.dumps(recipe.launch.config)}
        with megatron.target(machine(recipe.resources.gpu, recipe.resources.world_size, argv, environment)):
            for _, run in megatron.stages(argv, made):
                run()
        made["model"] = made["config"]
        built[name] = {section: stated_fields(made[section], cls) for section, cls in classes().items()}
    return built


def validate_worker() -> Any:
    """Import the module that describes another machine to Megatron; its package does not import it."""
    sys.path.append(str(ROOT / "launchers" / "fp8launch" / "plugins" / "validators"))
    return importlib.import_module("validate_worker")


def machine(gpu: str, gpus: int, argv: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Describe a machine with GPUs of this type and Transformer Engine."""
    from fp8launch.hardware.gpus import GPUS

    return {
        "compute_capability": GPUS[gpu].capability,
        "te_version": TE_VERSION,
        "argv": argv,
        "world_size": gpus,
        "env": environment,
    }


def classes() -> dict[str, type]:
    """Return Megatron-Core's class for each section."""
    core: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    return {
        "model": core.MLATransformerConfig,
        "ddp": importlib.import_module("megatron.core.distributed").DistributedDataParallelConfig,
        "optimizer": importlib.import_module("megatron.core.optimizer").OptimizerConfig,
    }


def read_from(hub: Mapping[str, Path]) -> None:
    """Let Bridge read models of the hub from folders."""
    bridge: Any = importlib.import_module("megatron.bridge.models.conversion.auto_bridge").AutoBridge
    read = bridge.from_hf_pretrained.__func__
    bridge.from_hf_pretrained = classmethod(lambda cls, path, **kwargs: read(cls, str(hub.get(path, path)), **kwargs))


def stated_fields(section: Any, cls: type) -> dict[str, Any]:
    """Return the fields that differ from the defaults of Megatron's class, as far as JSON can hold them."""
    plain = validate_worker()._plain_attributes
    defaults = types.SimpleNamespace(
        **{
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(cls)
        }
    )
    stated, default = plain(section), plain(defaults)
    return {name: stated[name] for name in stated if name in vars(defaults) and stated[name] != default.get(name)}


def main() -> None:
    words = [word for word in sys.argv[1:] if word != "--write"]
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "launchers")]
    os.environ |= {"HF_HUB_OFFLINE": "1", "NO_VCS_VERSION": "1", "TORCHDYNAMO_DISABLE": "1"}
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):
        built = of_bridge(Path(words[0]).resolve()) if words else of_the_pack()
    text = json.dumps(built, sort_keys=True)
    if "--write" not in sys.argv:
        print(text)
        return
    OUT.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
