"""What `fp8launch plan` plans: a recipe or a model, its arguments in each precision, the GPUs and their links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8launch.cli.names import recipe_named
from fp8launch.cli.output import eprint
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import error
from fp8launch.engines import engine_of
from fp8launch.hardware.gpus import gpu
from fp8launch.hardware.quantization import PRECISIONS
from fp8launch.megatron.architecture import architecture
from fp8launch.megatron.flops import why_not_counted
from fp8launch.megatron.model_arithmetic import whole
from fp8launch.planning.change import Change, Target
from fp8launch.planning.speeds import DEVICES, Links, speeds
from fp8launch.recipe.load import RecipeSource, is_of_engine, load_recipe, read_recipe
from fp8launch.recipe.validation_problems import precision_fix
from fp8launch.resources import pack_folder

# A model alone has no batch: this many tokens a step.
TOKENS = 4 * 2**20
SEQUENCE = 8192


def precisions_of(text: str | None, gpu_name: str | None) -> tuple[str, ...]:
    """Split a list of precisions. An unknown one is answered with those that the GPU can compute."""
    if not text:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in PRECISIONS:
            raise error("unknown-precision", f"no precision {name!r}", "--precision", precision_fix(name, gpu_name))
    return names


def source_of(
    recipe: str, gpu_name: str | None, precisions: Sequence[str], folder: Path
) -> tuple[RecipeSource, tuple[str, ...]]:
    """The recipe, or one that is made of a model of the pack, and what a recipe that builds on it extends."""
    pack = pack_folder("recipes")
    name = recipe.removeprefix("models/").removesuffix(".yaml")
    if not (pack / "models" / f"{name}.yaml").is_file() or "/" in name:
        source = read_recipe(recipe_named(recipe))
        if is_of_engine(recipe):
            return source, (recipe,)
        if source.path.is_relative_to(pack):
            return source, (source.path.relative_to(pack).with_suffix("").as_posix(),)
        return source, (str(source.path.resolve()),)
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
    """Overrides for the GPUs that are asked for. Raises UserError for GPUs that are not whole nodes."""
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


def base_of(source: RecipeSource, overrides: Sequence[str], precision: str | None) -> Change:
    """All arguments of the run in a precision, and the override that chooses it."""
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
    values = {**engine.defaults(args), **engine.traits(loaded.recipe).fills_in, **args.attributes}
    if architecture(values) is None:
        reason = why_not_counted(values) or "a size of the model is missing"
        message = f"{reason}, so neither speed nor memory can be predicted"
        raise error("model-not-counted", message, loaded.where("model"), "plan a transformer (docs/speed_model.md)")
    return Change(values, chosen)


def target_of(source: RecipeSource, overrides: Sequence[str], own: Sequence[str], profile: Cluster | None) -> Target:
    """The GPUs to plan for, their links, and the global batch: that of the recipe on its own GPUs.

    `own` are the overrides without those for other GPUs, on which some engines' recipes have another batch.
    """
    loaded = load_recipe(source, overrides)
    recipe, engine = loaded.recipe, engine_of(loaded)
    resources, device = recipe.resources, gpu(recipe.resources.gpu)
    reference = DEVICES.get(device.name)
    if reference is None:
        raise error("no-speeds", f"nothing is known of the speed of {device.name}", "resources.gpu", "pass --gpu")
    links = _links(reference.links, resources.world_size, profile)
    known = speeds(device, links)
    assert known is not None
    stated = recipe.batch.global_ or whole(base_of(source, own, None).args, "global_batch_size")
    batch = stated or max(TOKENS // (recipe.batch.sequence or SEQUENCE), 1)
    fixed = {}
    for word in overrides:
        key, _, value = word.partition("=")
        fixed[key] = value.strip()

    def writable(changed: Mapping[str, str]) -> bool:
        return engine.spelled(changed) is not None

    return Target(resources.world_size, batch, device, known, fixed, writable)


def _links(reference: Links, world: int, profile: Cluster | None) -> Links:
    """The cluster's links; those of NVIDIA's reference system where its profile states none."""
    if profile is None or profile.network is None:
        if profile is not None and world > reference.domain:
            eprint(
                f"the cluster profile states no `network`; planned with {reference.network * 8:g} Gbit/s a GPU and "
                f"NVLink domains of {reference.domain}, as in NVIDIA's reference system"
            )
        return reference
    stated = profile.network
    network = (stated.gbit_per_gpu or 0) / 8 or reference.network
    return Links(reference.nvlink, network, stated.nvlink_domain or reference.domain)
