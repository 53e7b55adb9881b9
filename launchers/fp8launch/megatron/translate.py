"""A recipe to the exact argument list of one Megatron-Core version.

Each section turns into the flags that it states; `megatron:` adds any other flag by its own name. The same flag from
two places is an error unless both say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from fp8launch.job.images import software_in
from fp8launch.megatron.argv import check_values, emit_argv
from fp8launch.megatron.schema import FlagSchema, load_schema, supported_versions
from fp8launch.megatron.sections import CHOICES, FIELDS
from fp8launch.problems import ANSWER_IS_NO, Problem, UserError
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Data, FlagValue, Parallel, Precision, Recipe, Section

Where = tuple[str, ...]
Setting = tuple[str, FlagValue, Where]


@dataclass(frozen=True)
class MegatronArgs:
    """The flags of a run. `values` is keyed by canonical name, in the order of `argv`; `places` says who set each."""

    version: str
    values: Mapping[str, FlagValue]
    argv: tuple[str, ...]
    places: Mapping[str, str]

    def integer(self, flag: str, default: int) -> int:
        value = self.values.get(flag)
        return value if isinstance(value, int) else default


@dataclass(frozen=True)
class Layout:
    """How the GPUs of a run are divided. `microbatches` is the number of micro batches of a step on each pipeline."""

    world: int
    tp: int
    pp: int
    vp: int
    cp: int
    ep: int
    dp: int
    micro_batch: int
    global_batch: int
    microbatches: int


def translate(loaded: LoadedRecipe) -> MegatronArgs:
    """The argument list that `loaded` means. Raises UserError with every problem that the flag schema shows."""
    recipe = loaded.recipe
    in_image = software_in(recipe.container.image).get("megatron")
    version = recipe.software.megatron or in_image or supported_versions()[-1]
    schema = load_schema(version)
    values, places, problems = _collect(flag_settings(recipe), loaded, schema)
    problems += check_values(values, schema, lambda flag: places.get(_canonical(flag, schema)))
    problems += _pairs(values, places)
    problems += _fp8_on_cpu(recipe, values, places)
    if problems:
        raise UserError(problems, ANSWER_IS_NO)
    return MegatronArgs(schema.version, values, emit_argv(values, schema), places)


def layout(args: MegatronArgs, loaded: LoadedRecipe) -> Layout:
    """The division of `world_size` GPUs. Raises UserError when they or the batch do not divide."""
    world = loaded.recipe.resources.world_size
    tp = args.integer("tensor_model_parallel_size", 1)
    pp = args.integer("pipeline_model_parallel_size", 1)
    cp = args.integer("context_parallel_size", 1)
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    batches = ("micro_batch_size", "global_batch_size")
    if no_sizes := [flag for flag in (*sizes, *batches) if args.integer(flag, 1) < 1]:
        raise UserError(
            (
                Problem("error", "size", f"{flag} is {args.values[flag]}", args.places[flag], "use 1 or more")
                for flag in no_sizes
            ),
            ANSWER_IS_NO,
        )
    if world % (tp * pp * cp):
        raise UserError(
            [
                Problem(
                    "error",
                    "world-size",
                    f"{world} GPUs cannot be divided into groups of TP {tp} x PP {pp} x CP {cp} = {tp * pp * cp}",
                    next((args.places[flag] for flag in sizes if args.integer(flag, 1) > 1), None),
                    f"use a multiple of {tp * pp * cp} GPUs (nodes x gpus_per_node), or less parallelism",
                )
            ],
            ANSWER_IS_NO,
        )
    dp = world // (tp * pp * cp)
    micro = args.integer("micro_batch_size", 1)
    batch = args.integer("global_batch_size", micro * dp)
    if batch % (micro * dp):
        step = micro * dp
        raise UserError(
            [
                Problem(
                    "error",
                    "batch-size",
                    f"global batch {batch} is no multiple of micro batch {micro} x data parallel {dp} = {step}",
                    args.places.get("global_batch_size"),
                    f"use {f'{batch // step * step} or ' if batch > step else ''}{(batch // step + 1) * step}",
                )
            ],
            ANSWER_IS_NO,
        )
    return Layout(
        world=world,
        tp=tp,
        pp=pp,
        vp=args.integer("num_virtual_stages_per_pipeline_rank", 1),
        cp=cp,
        ep=args.integer("expert_model_parallel_size", 1),
        dp=dp,
        micro_batch=micro,
        global_batch=batch,
        microbatches=batch // (micro * dp),
    )


def flag_settings(recipe: Recipe) -> Iterator[Setting]:
    """Every flag that the recipe states: its name, its value and the path that states it."""
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


def _fields(section: Section, *path: str) -> Iterator[Setting]:
    """The fields of a section that set one flag each."""
    for field, flag in FIELDS[path].items():
        yield flag, getattr(section, "global_" if field == "global" else field), (*path, field)


def _choice(value: str | None, *path: str) -> Iterator[Setting]:
    """The flags that a field's named choice stands for."""
    for flag, setting in CHOICES[path].get(value or "", {}).items():
        yield flag, setting, path


def _precision(precision: Precision) -> Iterator[Setting]:
    stated = ("precision", "recipe")
    yield "bf16", True, stated
    if precision.recipe == "nvfp4":
        yield "fp4_format", precision.format, ("precision", "format")
        yield "fp4_recipe", "nvfp4", stated
    elif precision.quantized:
        yield "fp8_format", precision.format, ("precision", "format")
        yield "fp8_recipe", precision.recipe, stated
    if precision.param_gather:
        here = ("precision", "param_gather")
        yield ("fp4_param_gather" if precision.recipe == "nvfp4" else "fp8_param_gather"), True, here
        if precision.recipe == "mxfp8":
            # Without it Megatron only warns, then fails when it wraps the model (replace_raw_data of an MXFP8Tensor).
            yield "reuse_grad_buf_for_mxfp8_param_ag", True, here
    if precision.bf16_layers is not None:
        here = ("precision", "bf16_layers")
        yield "first_last_layers_bf16", True, here
        yield "num_layers_at_start_in_bf16", precision.bf16_layers.start, here
        yield "num_layers_at_end_in_bf16", precision.bf16_layers.end, here
    yield from _fields(precision, "precision")


def _parallel(parallel: Parallel, recipe: Recipe) -> Iterator[Setting]:
    yield from (s for s in _fields(parallel, "parallel") if s[1:] != (1, ("parallel", "vp")))
    # Sequence parallelism costs nothing beside TP, but PyTorch's own norms, which the CPU mode uses, lack it.
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
        yield "data_path", [str(part) for part in data.blend], ("data", "blend")
    if data.tokenizer is not None:
        yield from _fields(data.tokenizer, "data", "tokenizer")
    elif data.kind == "mock":
        yield "tokenizer_type", "NullTokenizer", ("data", "kind")
    yield from _fields(data, "data")


def _canonical(flag: str, schema: FlagSchema) -> str:
    found = schema.find(flag)
    return found.name if found else flag.lstrip("-").replace("-", "_")


def _collect(
    settings: Iterable[Setting], loaded: LoadedRecipe, schema: FlagSchema
) -> tuple[dict[str, FlagValue], dict[str, str], list[Problem]]:
    """Values and places by canonical flag, and one problem for each pair of settings that disagree."""
    values: dict[str, FlagValue] = {}
    places: dict[str, str] = {}
    setter: dict[str, Setting] = {}
    problems: list[Problem] = []
    for flag, value, path in settings:
        if value is None:
            continue
        name = _canonical(flag, schema)
        found = schema.find(flag)
        # Two spellings of one Megatron argument (--no-x and --disable-x) meet in its dest.
        key = found.dest if found else name
        if key in setter:
            first_flag, first_value, first_path = setter[key]
            if (first_flag, first_value) != (name, value):
                problems.append(_clash(loaded, (first_flag, first_value, first_path), (name, value, path)))
            continue
        setter[key] = (name, value, path)
        values[name] = value
        places[name] = loaded.where(*path)
    return values, places, problems


def _clash(loaded: LoadedRecipe, first: Setting, second: Setting) -> Problem:
    return Problem(
        "error",
        "flag-set-twice",
        f"'{'.'.join(second[2])}: {second[1]}' contradicts '{'.'.join(first[2])}' at {loaded.where(*first[2])}, "
        f"which sets {first[0]} to {first[1]}",
        loaded.where(*second[2]),
        f"keep one of them; the section ({'.'.join(first[2])}) is the usual place",
    )


def _pairs(values: Mapping[str, FlagValue], places: Mapping[str, str]) -> Iterator[Problem]:
    """Format and recipe belong together: alone, the one means `delayed` and the other means bf16, both silently."""
    for kind in ("fp8", "fp4"):
        given, missing = f"{kind}_format", f"{kind}_recipe"
        if given in values and missing not in values:
            means = "delayed" if kind == "fp8" else "nvfp4"
            yield Problem(
                "error",
                "format-without-recipe",
                f"{given} is set and {missing} is not, which Megatron reads as {means}",
                places[given],
                f"state {missing} as well, or use `precision: {{recipe: ..., format: ...}}`",
            )
        if missing in values and given not in values:
            yield Problem(
                "error",
                "recipe-without-format",
                f"{missing} is set and {given} is not: Megatron then trains in bf16",
                places[missing],
                f"state {given} as well, or use `precision: {{recipe: ..., format: ...}}`",
            )


def _fp8_on_cpu(recipe: Recipe, values: Mapping[str, FlagValue], places: Mapping[str, str]) -> Iterator[Problem]:
    """Megatron on a CPU accepts FP8 flags and does nothing with them."""
    for flag in ("fp8_format", "fp4_format"):
        if recipe.resources.gpu == "cpu" and flag in values:
            yield Problem(
                "error",
                "fp8-on-cpu",
                f"{flag} is set and resources.gpu is cpu, where Megatron would silently train in bf16",
                places[flag],
                "use `precision: {recipe: bf16}` on CPUs, or name the GPU",
            )
