"""Write the index of Megatron-Bridge's recipes, one release after the other.

    python tools/bridge_recipes.py RELEASE=CHECKOUT...

A CHECKOUT is a folder with the source of that release (`src/` and, up to 0.5, `scripts/performance/`), or an unpacked
wheel. Each recipe function is called with Bridge's own code, and its settings are recorded: GPUs, layout, batch,
precision, environment and the Hugging Face models that it reads. Other releases stay in the index as they are. Nothing
is trained and no network is used. Needs torch, megatron-core, transformers, omegaconf and hydra-core.

Up to 0.5 a recipe is a function of `scripts/performance/configs` that takes a precision and a variant; since 0.6 each
performance recipe is a function of `megatron.bridge.perf_recipes` without arguments. All of these get names in the
newer form. Since 0.6 the index also has the library, `megatron.bridge.recipes`: pre-training, fine-tuning and PEFT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import json
import logging
import lzma
import os
import re
import subprocess
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bridge_source import source_folder

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "launchers" / "fp8launch" / "plugins" / "bridge" / "recipes.json.xz"
NAME = re.compile(
    r"(?P<model>\w+?)_(?P<task>pretrain|sft|peft|lora)_(?P<gpus>\d+)gpu_(?P<gpu>[a-z]+\d+)_"
    r"(?P<precision>bf16|fp8cs|fp8mx|fp8sc|fp8ds|nvfp4)(?:_(?P<variant>\w+))?_config"
)
CONSTANT = re.compile(
    r"(?P<model>\w+?)_(?P<task>PRETRAIN|SFT|PEFT|LORA)_CONFIG_(?P<gpu>[A-Z]+\d+)_(?P<precision>\w+?)(?:_(?P<variant>V\d+))?$"
)
LAYOUT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "vp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
SIZES = ("num_layers", "hidden_size", "num_attention_heads")
SECTIONS = ("mixed_precision", "ddp", "optimizer", "comm_overlap")
# The type of tokenizers that a job reads from the hub, or from a folder.
HUB_TOKENIZER = "HuggingFaceTokenizer"
LIBRARY = "megatron.bridge.recipes"
# The type without words: the recipe states how many there are.
NULL_TOKENIZER = "NullTokenizer"
# Recipes of the library without a GPU in their name. They call one that has it.
UNNAMED = re.compile(r"(?P<model>\w+?)_(?P<task>pretrain|sft|peft)(?:_(?P<variant>\w+))?_config")
# The families of the library with a folder for each GPU.
GPU_FOLDER = re.compile(r"\.(?P<gpu>[a-z]+\d+)\.")
# Switches of the dataset that need caches.
DATASET = ("fast_cache_load", "defer_npy_index_mmap")


@dataclasses.dataclass(frozen=True)
class Source:
    """A recipe function and how it is called."""

    name: str
    module: str
    function: str
    arguments: dict[str, str]
    build: Callable[[], Any]
    parts: dict[str, Any]


def index(checkout: Path) -> dict[str, Any]:
    """Call every recipe function of a checkout. Names recipes that cannot be read on standard error."""
    package_folder = source_folder(checkout)
    sys.path[:0] = [
        str(ROOT / "tools"),
        str(ROOT / "launchers"),
        str(package_folder),
        str(checkout / "scripts/performance"),
    ]
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    stubs = importlib.import_module("bridge_stubs")
    stubs.install()
    aliases: dict[str, str] = {}

    def read() -> list[Source]:
        found = list(sources(checkout, package_folder, stubs.load))
        if found[0].module.startswith("megatron.bridge.perf_recipes."):
            found += library_sources(package_folder, stubs.load, {source.name for source in found}, aliases)
        return found

    found = stubs.settled(read)
    stubs.replace_hub()
    recipes = {}
    refused = {}
    for source in found:
        stubs.HubModels.read.clear()
        stubs.answer_as(source.parts["gpu"])
        missing: list[str] = []
        try:
            with without_missing_files(package_folder, missing):
                config = source.build()
        except NotImplementedError as failure:
            # Bridge has the function, which refuses to build the recipe.
            refused[source.name] = str(failure).splitlines()[0]
            continue
        except Exception as failure:
            print(f"{source.name}: not read: {type(failure).__name__}: {str(failure)[:200]}", file=sys.stderr)
            continue
        recipes[source.name] = record(source, config, sorted(set(stubs.HubModels.read)))
        if missing:
            recipes[source.name]["missing_files"] = sorted(set(missing))
    more = {"aliases": aliases, "refused": refused}
    return {"recipes": recipes, **{key: value for key, value in more.items() if value}}


@contextlib.contextmanager
def without_missing_files(package_folder: Path, missing: list[str]) -> Iterator[None]:
    """Let recipes read quantization files that the wheel lacks as files without layers; `missing` gets their names.

    The wheel of 0.6.2 has no file but Python's, and Nemotron 3's recipes for NVFP4 read `te_quant.cfg`.
    """
    recipe: Any = importlib.import_module("megatron.core.quantization.quant_config").RecipeConfig
    read = recipe.from_yaml_file

    def from_yaml_file(path: str) -> Any:
        if Path(path).is_file() or package_folder not in Path(path).parents:
            return read(path)
        missing.append(str(Path(path).relative_to(package_folder)))
        return recipe([], {})

    recipe.from_yaml_file = staticmethod(from_yaml_file)
    try:
        yield
    finally:
        recipe.from_yaml_file = staticmethod(read)


def sources(checkout: Path, package_folder: Path, load: Callable[[str], Any]) -> Iterator[Source]:
    """Find the recipe functions, in the older or the newer form."""
    flat = package_folder / "megatron/bridge/perf_recipes"
    if flat.is_dir():
        for file in sorted(flat.rglob("*.py")):
            if file.name == "__init__.py":
                continue
            module = "megatron.bridge.perf_recipes." + ".".join(file.relative_to(flat).with_suffix("").parts)
            for name, function in inspect.getmembers(load(module), inspect.isfunction):
                # A recipe of another GPU's module under its own name counts too (405B on B200 and B300).
                own = function.__module__ == module or function.__name__ != name
                parts = NAME.fullmatch(name)
                if own and parts:
                    yield Source(name, module, name, {}, function, parts.groupdict())
        return
    for file in sorted((checkout / "scripts/performance/configs").rglob("*_workload_base_configs.py")):
        yield from older_sources(file, load)


def library_sources(
    package_folder: Path, load: Callable[[str], Any], taken: set[str], aliases: dict[str, str]
) -> Iterator[Source]:
    """Find the recipe functions of the library. `aliases` gets their other names.

    Six functions have the name of a performance recipe with other settings. Bridge's runner takes the performance
    recipe under that name (BENCHMARK_RECIPE_PRECEDENCE_COLLISIONS of scripts/training/recipe_metadata.py, 0.6.0), and
    the library's under its alias, and so does the index.
    """
    found: dict[str, Source] = {}
    other_names: dict[str, str] = {}
    for file in sorted((package_folder / LIBRARY.replace(".", "/")).rglob("*.py")):
        module = ".".join(file.relative_to(package_folder).with_suffix("").parts)
        for name, function in inspect.getmembers(load(module), inspect.isfunction):
            parts = None if name.startswith("_") else parts_of(name, function)
            if parts is None or not function.__module__.startswith(f"{LIBRARY}."):
                continue
            if function.__name__ != name:
                other_names[name] = function.__name__
            elif function.__module__ == module:
                found[name] = Source(name, module, name, {}, function, parts)
    for name, own in sorted(other_names.items()):
        if own not in found or name in found:
            continue
        if own in taken:
            yield dataclasses.replace(found.pop(own), name=name)
        else:
            aliases[name] = own
    for name, source in sorted(found.items()):
        if name in taken:
            print(f"{source.module}.{name}: no name, a performance recipe has it", file=sys.stderr)
        else:
            yield source


def parts_of(name: str, function: Callable[..., Any]) -> dict[str, Any] | None:
    """Return what the name of a library recipe states, or else the recipe that it calls and its folder."""
    stated = NAME.fullmatch(function.__name__)
    if stated is not None:
        return stated.groupdict()
    own = UNNAMED.fullmatch(name)
    if own is None:
        return None
    for word in re.findall(r"\w+_config\b", inspect.getsource(function)):
        called = getattr(sys.modules[function.__module__], word, None)
        if not inspect.isfunction(called) or called is function:
            continue
        below = parts_of(word, called)
        if below is not None:
            folder = GPU_FOLDER.search(function.__module__)
            gpu = folder["gpu"] if folder else below["gpu"]
            return {**below, **own.groupdict(), "gpu": gpu}
    return None


def older_sources(file: Path, load: Callable[[str], Any]) -> Iterator[Source]:
    """Find the recipes of a file of `scripts/performance/configs`: constants state the layouts."""
    package = f"configs.{file.parent.name}"
    runner = (file.parents[2] / "run_script.py").read_text()
    constants = load(f"{package}.{file.stem}")
    functions: dict[str, tuple[str, Callable[..., Any]]] = {}
    for sibling in sorted(file.parent.glob("*.py")):
        if sibling.name == "__init__.py" or sibling == file:
            continue
        module = f"{package}.{sibling.stem}"
        for name, found in inspect.getmembers(load(module), inspect.isfunction):
            functions[name] = (module, found)
    for constant, workload in sorted(vars(constants).items()):
        parts = CONSTANT.fullmatch(constant)
        if not parts:
            continue
        model, task, gpu, variant = ((parts[part] or "").lower() for part in ("model", "task", "gpu", "variant"))
        function_name = f"{model}_{task}_config_{gpu}"
        if function_name not in functions:
            print(f"{constant}: no function {function_name}", file=sys.stderr)
            continue
        module, function = functions[function_name]
        precision = parts["precision"].lower()
        # A model with a single variant does not name it.
        arguments = {"precision": precision, **({"config_variant": variant} if variant else {})}
        words = [model, task, f"{workload.num_gpus}gpu", gpu, precision.replace("_", ""), variant, "config"]
        name = "_".join(word for word in words if word)
        stated = NAME.fullmatch(name)
        if stated:
            environment = older_environment(load, file.parent.name, model, gpu, precision, task, variant or "v1")
            build = functools.partial(with_environment, functools.partial(function, **arguments), environment, runner)
            yield Source(name, module, function_name, arguments, build, stated.groupdict())


def with_environment(build: Callable[[], Any], environment: dict[str, str], runner: str) -> Any:
    """The configuration of a recipe that does not state its environment; `runner` is the text of run_script.py."""
    config = build()
    config.env_vars = environment
    if config.ddp.nccl_ub and "NCCL_CTA_POLICY" in runner:  # since 0.5
        config.env_vars = {**environment, "NCCL_NVLS_ENABLE": "1", "NCCL_CTA_POLICY": "1"}
    return config


def older_environment(
    load: Callable[[str], Any], family: str, model: str, gpu: str, precision: str, task: str, variant: str
) -> dict[str, str]:
    """The environment that `setup_experiment.py` gives a job, by its own plugin; what only concerns the hub is left."""
    environment = dict(load("utils.executors").PERF_ENV_VARS)
    if gpu == "gb200":  # slurm_executor
        environment |= {"NCCL_NET_GDR_LEVEL": "PHB", "NCCL_NET_GDR_C2C": "1"}
    plugin = load("perf_plugins").PerfEnvPlugin(
        enable_manual_gc=False,
        model_family_name=family,
        model_recipe_name=model,
        gpu=gpu,
        compute_dtype=precision,
        train_task=task,
        config_variant=variant,
    )
    plugin.setup(None, types.SimpleNamespace(env_vars=environment))
    return {
        name: value for name, value in environment.items() if name not in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    }


def record(source: Source, config: Any, hub: list[str]) -> dict[str, Any]:
    """What the index keeps of one recipe."""
    parts = source.parts
    # Nemotron's recipes build a model configuration of Bridge's own: of that, too, what differs from the defaults.
    settings = config.model.settings() if hasattr(config.model, "settings") else dict(changed(config.model))
    layout = {short: settings.pop(name) for short, name in LAYOUT.items() if settings.get(name) is not None}
    entry: dict[str, Any] = {
        "module": source.module,
        "function": source.function,
        **({"arguments": source.arguments} if source.arguments else {}),
        "model": parts["model"],
        "task": parts["task"],
        "gpus": int(parts["gpus"]),
        "gpu": parts["gpu"],
        "precision": parts["precision"],
        **({"variant": parts["variant"]} if parts["variant"] else {}),
        "hub": hub,
        "layout": layout,
        "fsdp": bool(config.ddp.use_megatron_fsdp),
        "micro_batch": config.train.micro_batch_size,
        "global_batch": config.train.global_batch_size,
        "sequence": settings.get("seq_length") or getattr(config.dataset, "seq_length", None),
        "iterations": config.train.train_iters,
        "environment": {name: str(value) for name, value in (getattr(config, "env_vars", None) or {}).items()},
        "settings": {name: plain(value) for name, value in sorted(settings.items()) if plain(value) is not None},
    }
    missing = [] if hub else [name for name in SIZES if getattr(config.model, name, None) == 0]
    if missing:
        entry["missing_sizes"] = missing
    for section in SECTIONS:
        entry[section] = changed(getattr(config, section, None))
    tokenizer = config.tokenizer
    if tokenizer is not None and tokenizer.tokenizer_type == HUB_TOKENIZER and tokenizer.tokenizer_model:
        entry["tokenizer"] = str(tokenizer.tokenizer_model)
    if tokenizer is not None and tokenizer.tokenizer_type == NULL_TOKENIZER:
        entry["null_vocabulary"] = tokenizer.vocab_size
    if getattr(tokenizer, "use_tokenizer_vocab_size", False):  # since 0.6
        entry["takes_vocabulary"] = "always"
    elif getattr(config.model, "vocab_size", None) is None:
        entry["takes_vocabulary"] = "if unset"
    of_library = source.module.startswith(f"{LIBRARY}.")
    if of_library or (parts["task"] != "pretrain" and not source.arguments):
        entry |= data_of(config)
    if of_library and isinstance(config.mixed_precision, str):
        presets: Any = importlib.import_module("megatron.bridge.training.mixed_precision")
        entry["mixed_precision"] = changed(presets.get_mixed_precision_config(config.mixed_precision))
    dataset = {name: True for name in DATASET if getattr(config.dataset, name, False)}
    if dataset:
        entry["dataset"] = dataset
    return entry


def data_of(config: Any) -> dict[str, Any]:
    """What the index keeps of a recipe's data, and how fine-tuning adapts the weights."""
    data: dict[str, Any] = {"class": type(config.dataset).__name__}
    for field in ("hf_dataset", "source"):
        read = getattr(config.dataset, field, None)
        if read is not None:
            data["hub"] = str(read.dataset_name or read.path_or_dataset)
    if hasattr(config.dataset, "repo_id"):
        data["hub"] = config.dataset.repo_id
    if getattr(config.dataset, "dataset_root", None) is not None:
        data["folder"] = str(config.dataset.dataset_root)
    if getattr(config.dataset, "enable_offline_packing", False):
        data["packed"] = config.dataset.offline_packing_specs.packed_sequence_size
    entry: dict[str, Any] = {"data": data}
    if config.peft is not None:
        entry["peft"] = {"class": type(config.peft).__name__, **changed(config.peft)}
    return entry


def changed(section: Any) -> Any:
    """The fields of a dataclass that differ from its defaults; a string (the name of a preset) as it is."""
    if section is None or isinstance(section, str):
        return section
    result = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value != field.default and plain(value) not in (None, [], {}):
            result[field.name] = plain(value)
    return result


def plain(value: Any) -> Any:
    """A value as JSON can hold it; None for what it cannot."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    text = str(value)
    return text if text.startswith("torch.") else None


def main() -> None:
    if os.environ.get("BRIDGE_RELEASE_ONLY"):
        json.dump(index(Path(sys.argv[1]).resolve()), sys.stdout)
        return
    result: dict[str, Any] = json.loads(lzma.decompress(OUT.read_bytes())) if OUT.is_file() else {}
    for argument in sys.argv[1:]:
        release, _, folder = argument.partition("=")
        # Two releases of one package need a process each.
        environment = {**os.environ, "BRIDGE_RELEASE_ONLY": "1", "HF_HUB_OFFLINE": "1", "NO_VCS_VERSION": "1"}
        command = [sys.executable, __file__, folder]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        result[release] = json.loads(done.stdout[done.stdout.index('{"recipes"') :])
        print(f"{release}: {len(result[release]['recipes'])} recipes", file=sys.stderr)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(
        lzma.compress(
            json.dumps(result, sort_keys=True, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME
        )
    )
    print(f"{OUT.relative_to(ROOT)}: {OUT.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
