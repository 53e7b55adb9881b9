"""Translate recipes to argument lists of Megatron-LM, for fp8launch's own GPT entry (injob/rank/pretrain.py).

Each section turns into the flags that it states; `megatron:` adds any other flag by its own name, and `megatron_extra:`
flags that only a fork of Megatron-LM has. A flag from two places is an error unless both values are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from fp8launch.cluster.images import software_in
from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError
from fp8launch.engines.base import (
    AttemptArguments,
    Engine,
    EngineArguments,
    EngineDescription,
    Entry,
    EntryTraits,
    Layout,
    Setting,
)
from fp8launch.engines.megatron_lm.flag_conflicts import fp8_on_cpu, incomplete_pairs, set_twice
from fp8launch.engines.megatron_lm.layout import layout
from fp8launch.hardware.quantization import BF16, FP16, quantization_recipes
from fp8launch.megatron.arguments import Argument, as_parsed, attributes, emit_arguments
from fp8launch.megatron.extra_flags import EXTRA, extra_arguments
from fp8launch.megatron.flag_map import CHOICES, FIELDS
from fp8launch.megatron.flag_problems import check_values
from fp8launch.megatron.schema import FlagSchema, load_schema, parser_defaults
from fp8launch.megatron.versions import DEFAULT
from fp8launch.recipe.field_types import FlagValue
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe
from fp8launch.recipe.sections import Data, Parallel, Precision, Section

# Flags for the first start. On a resume they would reset the iteration or drop the optimizer's state.
FIRST_START = frozenset({"load", "pretrained_checkpoint", "finetune", "no_load_optim", "no_load_rng", "ckpt_step"})
# Slurm sends SIGTERM before it ends or preempts a job. With this flag Megatron then saves and exits.
LEAVE_ON_SIGTERM = Argument("exit_signal_handler", ("--exit-signal-handler",))

# NOT_HERE of injob/rank/pretrain.py, which imports torch, so this is a copy; a test compares the two.
NOT_IN_ENTRY = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "perform_rl_step",
    "hybrid_layer_pattern",
    "yaml_cfg",
)


class MegatronLM(Engine):
    """Megatron-LM's command line, with fp8launch's own entry."""

    name: ClassVar[str] = "megatron_lm"
    description: ClassVar[EngineDescription] = EngineDescription(
        checks="megatron_lm",
        validators="megatron_lm",
        log_dialect="megatron",
        evidence=("module report", "kernel profile", "tensor statistics"),
        rehearsal=True,
    )
    packages: ClassVar[Mapping[str, str]] = {"torch": "torch", "megatron.core": "megatron-core"}

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        recipe = loaded.recipe
        version = _megatron_version(recipe)
        schema = load_schema(version, recipe.launch.script)
        values, places, problems = _collect(self.settings(recipe), loaded, schema)
        problems += check_values(values, schema, lambda flag: places.get(_canonical(flag, schema)))
        problems += incomplete_pairs(values, places)
        problems += fp8_on_cpu(recipe, values, places)
        extra, refused = extra_arguments(recipe.megatron_extra, schema, lambda name: loaded.where(EXTRA, name))
        problems += refused
        if problems:
            raise UserError(problems, ANSWER_IS_NO)
        if version.count(".") < 2:
            version = schema.version
        return EngineArguments(
            version=version,
            values=values,
            arguments=emit_arguments(values, schema),
            attributes=attributes(as_parsed(values, schema), schema),
            places=places,
            own=extra,
            attribute_places={flag.dest: place for name, place in places.items() if (flag := schema.find(name))},
        )

    def settings(self, recipe: Recipe) -> Iterator[Setting]:
        for flag, value in recipe.model.items():
            yield flag, value, ("model", flag)
        yield from _fields(recipe.batch, "batch")
        if "max_position_embeddings" not in recipe.model:
            yield "max_position_embeddings", recipe.batch.sequence, ("batch", "sequence")
        yield from _fields(recipe.train, "train")
        if recipe.precision is not None:
            yield from _precision(recipe.precision)
        yield from _parallel(recipe.parallel, recipe)
        yield from _optimizer(recipe)
        if recipe.data is not None:
            yield from _data(recipe.data)
        yield from _fields(recipe.checkpoint, "checkpoint")
        for flag, value in recipe.megatron.items():
            yield flag, value, ("megatron", flag)

    def defaults(self, args: EngineArguments) -> Mapping[str, Any]:
        return parser_defaults(args.version)

    def layout(self, args: EngineArguments, loaded: LoadedRecipe) -> Layout:
        return layout(args, loaded)

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        return Entry()

    def traits(self, recipe: Recipe) -> EntryTraits:
        return EntryTraits(
            # `defaults` of injob/rank/compat/python311.py
            fills_in={"eval_interval": 1000},
            refuses=NOT_IN_ENTRY,
            sets_config=True,
        )

    def environment(self, recipe: Recipe, begin: int) -> dict[str, str]:
        found = {"FP8LAUNCH_DEVICE": recipe.resources.device, **recipe.launch.measurements(begin)}
        if recipe.launch.config:
            found["FP8LAUNCH_CONFIG"] = json.dumps(recipe.launch.config)
        return found

    def attempts(self, args: EngineArguments) -> AttemptArguments | None:
        save = args.values.get("save")
        if not isinstance(save, str):
            return None
        more = list(args.own)
        if LEAVE_ON_SIGTERM.flag not in args.values:
            more.append(LEAVE_ON_SIGTERM)
        load = Argument("load", ("--load", save))
        return AttemptArguments.divided(save, args.arguments, FIRST_START, load, more, "--iterations-to-skip")


def _megatron_version(recipe: Recipe) -> str:
    """Return the version of the recipe, else of the image, else the default.

    If the recipe states the image's minor version, it is the release in the image.
    """
    stated, in_image = recipe.software.megatron, software_in(recipe.container.image).get("megatron")
    if stated is None:
        return in_image or DEFAULT
    if in_image is not None and in_image.split(".")[:2] == stated.removeprefix("v").split("."):
        return in_image
    return stated


def _fields(section: Section, *path: str) -> Iterator[Setting]:
    """Yield the fields of a section that set one flag each."""
    for field, flag in FIELDS[path].items():
        yield flag, section.field(field), (*path, field)


def _choice(value: str | None, *path: str) -> Iterator[Setting]:
    """Yield the flags that the value of a field sets."""
    for flag, setting in CHOICES[path].get(value or "", {}).items():
        yield flag, setting, path


def _precision(precision: Precision) -> Iterator[Setting]:
    stated = ("precision", "recipe")
    # Without bf16 and fp16 Megatron trains in fp32.
    if precision.quantized or precision.recipe == BF16:
        yield "bf16", True, stated
    if precision.recipe == FP16:
        yield "fp16", True, stated
    quantization = quantization_recipes().get(precision.recipe)
    if quantization is not None:
        yield quantization.format_flag, precision.format, ("precision", "format")
        yield quantization.recipe_flag, quantization.megatron_name, stated
        if quantization.factory is not None:
            yield quantization.factory_flag, quantization.factory, stated
        if precision.param_gather:
            for flag in (quantization.gather_flag, *quantization.gather_flags):
                yield flag, True, ("precision", "param_gather")
    if precision.bf16_layers is not None:
        here = ("precision", "bf16_layers")
        yield "first_last_layers_bf16", True, here
        yield "num_layers_at_start_in_bf16", precision.bf16_layers.start, here
        yield "num_layers_at_end_in_bf16", precision.bf16_layers.end, here
    yield from _fields(precision, "precision")


def _parallel(parallel: Parallel, recipe: Recipe) -> Iterator[Setting]:
    yield from (s for s in _fields(parallel, "parallel") if s[1:] != (1, ("parallel", "vp")))
    # With TP sequence parallelism costs nothing, but PyTorch's norms, which the CPU mode uses, lack it.
    automatic = parallel.sequence == "auto" and (parallel.tp or 1) > 1 and recipe.resources.gpu != "cpu"
    if automatic or parallel.sequence is True:
        yield "sequence_parallel", True, ("parallel", "sequence")
    yield from _choice(parallel.fsdp, "parallel", "fsdp")


def _optimizer(recipe: Recipe) -> Iterator[Setting]:
    dtypes = list(_fields(recipe.optimizer, "optimizer"))
    for _, dtype, where in dtypes:
        if dtype is not None:
            yield "use_precision_aware_optimizer", True, where
            break
    yield from dtypes
    yield from _choice(recipe.optimizer.grad_reduce, "optimizer", "grad_reduce")


def _data(data: Data) -> Iterator[Setting]:
    if data.kind == "mock":
        yield "mock_data", True, ("data", "kind")
    elif data.blend:
        yield "data_path", list(map(str, data.blend)), ("data", "blend")
    if data.tokenizer is not None:
        yield from _fields(data.tokenizer, "data", "tokenizer")
    elif data.kind == "mock":
        yield "tokenizer_type", "NullTokenizer", ("data", "kind")
    yield from _fields(data, "data")


def _canonical(flag: str, schema: FlagSchema) -> str:
    found = schema.find(flag)
    if found is None:
        return flag.lstrip("-").replace("-", "_")
    return found.name


def _collect(
    settings: Iterable[Setting], loaded: LoadedRecipe, schema: FlagSchema
) -> tuple[dict[str, FlagValue], dict[str, str], list[Problem]]:
    """Return values and places by canonical flag, and one problem for each pair of contradicting settings."""
    values: dict[str, FlagValue] = {}
    places: dict[str, str] = {}
    setter: dict[str, Setting] = {}
    problems: list[Problem] = []
    for flag, value, path in settings:
        if value is None:
            continue
        name = key = _canonical(flag, schema)
        found = schema.find(flag)
        if found:  # two names of one Megatron argument (--no-x and --disable-x) meet in its dest
            key = found.dest
        setting = (name, value, path)
        if key in setter:
            if setter[key][:2] != setting[:2]:
                problems.append(set_twice(loaded, setter[key], setting))
            continue
        setter[key] = setting
        values[name] = value
        places[name] = loaded.where(*path)
    return values, places, problems
