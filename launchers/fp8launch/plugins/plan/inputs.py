"""Inputs of a plan: the recipe or model, its arguments in each precision, the GPUs and their links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import error
from fp8launch.engines import engine_of
from fp8launch.hardware.gpus import gpu
from fp8launch.hardware.quantization import precision_names
from fp8launch.megatron.architecture import architecture
from fp8launch.megatron.model_arithmetic import whole, why_not_counted
from fp8launch.plugins.plan.change import Change, Target
from fp8launch.plugins.plan.cluster_speeds import cluster_speeds
from fp8launch.plugins.plan.settings import timed_settings
from fp8launch.recipe.load import RecipeSource, is_of_engine, load_recipe, read_recipe
from fp8launch.recipe.validation_problems import precision_fix
from fp8launch.resources import pack_folder

# A model of the pack states no batch. It gets this many tokens per step.
TOKENS = 4 * 2**20
SEQUENCE = 8192


def precisions_of(text: str | None, gpu_name: str | None) -> tuple[str, ...]:
    """Split a list of precisions. Raises UserError for an unknown one, listing the precisions that the GPU supports."""
    if not text:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in precision_names():
            raise error("unknown-precision", f"no precision {name!r}", "--precision", precision_fix(name, gpu_name))
    return names


def is_model(name: str) -> bool:
    """Whether a name is a model of the pack, such as `llama3_8b` or `models/llama3_8b`."""
    model = _model_name(name)
    return "/" not in model and (pack_folder("recipes") / "models" / f"{model}.yaml").is_file()


def _model_name(name: str) -> str:
    return name.removeprefix("models/").removesuffix(".yaml")


def source_of(
    recipe: str, gpu_name: str | None, precisions: Sequence[str], folder: Path
) -> tuple[RecipeSource, tuple[str, ...]]:
    """Read a recipe, or compose one for a model of the pack in `folder`.

    Also returns the parents that a recipe needs to extend the result: one for a recipe, several for a model.
    """
    pack = pack_folder("recipes")
    if not is_model(recipe):
        source = read_recipe(recipe)
        if is_of_engine(recipe):
            return source, (recipe,)
        if source.path.is_relative_to(pack):
            return source, (source.path.relative_to(pack).with_suffix("").as_posix(),)
        return source, (str(source.path.resolve()),)
    name = _model_name(recipe)
    device = gpu(gpu_name or "h100")
    precision, hardware = "tensorwise", "h100"
    if precisions:
        precision = precisions[0]
    elif device.fp8 is None:
        precision = "bf16"
    if (pack / "hardware" / f"{device.name}.yaml").is_file():
        hardware = device.name
    parts = [f"models/{name}", "parts/pretrain", "parts/benchmark", "parts/distributed_optimizer"]
    parts += [f"precision/{precision}", f"hardware/{hardware}"]
    source = _of_parts(name, parts, folder)
    if "num_experts" in load_recipe(source).recipe.model:
        parts += ["moe/alltoall", "moe/layer_graphs"]
        source = _of_parts(name, parts, folder)
    return source, tuple(parts)


def _of_parts(name: str, parts: Sequence[str], folder: Path) -> RecipeSource:
    file = folder / f"{name}.yaml"
    batch = f"{{micro: 1, global: {TOKENS // SEQUENCE}, sequence: {SEQUENCE}}}"
    file.write_text(f"extends: [{', '.join(parts)}]\nname: {name}\nbatch: {batch}\n", encoding="utf-8")
    return read_recipe(str(file))


def resource_overrides(
    source: RecipeSource, overrides: Sequence[str], gpu_name: str | None, gpus: int | None, nodes: int | None
) -> list[str]:
    """Return the overrides that request these GPUs. Raises UserError if they do not fill whole nodes."""
    resources = load_recipe(source, overrides).recipe.resources
    each = resources.gpus_per_node
    found = []
    if gpu_name is not None and gpu_name != resources.gpu:
        found.append(f"resources.gpu={gpu_name}")
        each = gpu(gpu_name).per_node
    if gpus is not None:
        if gpus > each and gpus % each:
            message = f"{gpus} GPUs are not whole nodes of {each} {gpu_name or resources.gpu}"
            raise error("world-size", message, "--gpus", f"use {gpus // each * each} or {(gpus // each + 1) * each}")
        nodes, each = max(gpus // each, 1), min(gpus, each)
    if nodes is not None:
        found.append(f"resources.nodes={nodes}")
    if each != resources.gpus_per_node:
        found.append(f"resources.gpus_per_node={each}")
    return found


def base_of(
    source: RecipeSource, overrides: Sequence[str], precision: str | None, cluster: Cluster | None = None
) -> Change:
    """Return all of Megatron's arguments for a run on a cluster.

    They are in `precision` if given, with the override that selects it.
    """
    chosen = {}
    if precision:
        chosen["precision.recipe"] = precision
        overrides = [*overrides, f"precision.recipe={precision}"]
    loaded = load_recipe(source, overrides)
    if loaded.recipe.phases:
        raise error("phases", "a recipe with phases has no single layout", loaded.where("phases"), "--set phases=null")
    engine = engine_of(loaded)
    if not engine.description.covers("megatron_core"):
        message = f"speed and memory of recipes for the engine '{engine.name}' are not predicted"
        raise error(
            "plan-engine", message, loaded.where("engine"), "plan a recipe or a model of the pack: `fp8launch recipes`"
        )
    args = engine.translate(loaded)
    traits = engine.traits(loaded.recipe)
    values = {**engine.defaults(args), **traits.fills_in, **args.attributes}
    env = loaded.recipe.environment if cluster is None else {**cluster.environment, **loaded.recipe.environment}
    values.update(timed_settings(loaded.recipe, traits, env))
    if architecture(values) is None:
        reason = why_not_counted(values) or "a size of the model is missing"
        message = f"{reason}, so neither speed nor memory can be predicted"
        raise error("model-not-counted", message, loaded.where("model"), "plan a transformer (docs/speed_model.md)")
    return Change(values, chosen)


def target_of(
    source: RecipeSource,
    overrides: Sequence[str],
    own: Sequence[str],
    cluster: Cluster | None,
    say: Callable[[str], None] | None = None,
) -> Target:
    """Return the GPUs to plan for, their links, and the global batch that the recipe has on its own GPUs.

    `own` are the overrides without the requested GPUs: recipes of some engines change their batch with the GPUs. `say`
    gets a note if the cluster's network has to be assumed.
    """
    loaded = load_recipe(source, overrides)
    recipe, engine = loaded.recipe, engine_of(loaded)
    resources, device = recipe.resources, gpu(recipe.resources.gpu)
    known = cluster_speeds(device, resources.world_size, cluster, say)
    if known is None:
        raise error("no-speeds", f"the speed of {device.name} is not known", "resources.gpu", "pass --gpu")
    stated = recipe.batch.global_ or whole(base_of(source, own, None).args, "global_batch_size")
    batch = stated or max(TOKENS // (recipe.batch.sequence or SEQUENCE), 1)
    fixed = {}
    for word in overrides:
        key, _, value = word.partition("=")
        fixed[key] = value.strip()

    def writable(changed: Mapping[str, str]) -> bool:
        return engine.translate_overrides(changed) is not None

    return Target(resources.world_size, batch, device, known, fixed, writable, cluster)
