"""The differences between two resolved recipes, and what each affects.

numerics   the computed values: the model, the precision, the schedule, the data
speed      how fast they are computed; values change at most by the order of sums
neutral    neither: logging, saving, names, requests to the queue
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Literal

from fp8launch import schedulers
from fp8launch.cluster.images import software_in
from fp8launch.cluster.profile import Cluster
from fp8launch.job.build_job import plan
from fp8launch.job.prepared import Prepared

Effect = Literal["numerics", "speed", "neutral"]
Part = Literal["arguments", "topology", "environment", "launch", "image", "software", "slurm"]

# The first matching pattern decides. A flag without one is assumed to affect the numerics.
_FLAGS: tuple[tuple[str, Effect], ...] = (
    (r"(log|tensorboard|wandb|timing|one_logger|profile|straggler|config_logger)_?.*", "neutral"),
    (r"(save|load|ckpt|exit|eval|distributed_timeout|data_cache_path|async_save|no_save|dist_ckpt).*", "neutral"),
    (r"(rerun_mode|no_check_for_nan.*|check_weight_hash.*)", "neutral"),
    (r"(tensor|pipeline|context|expert|virtual|num_virtual|num_layers_per_virtual)_?.*parallel.*", "speed"),
    (r"(num_virtual_stages|sequence_parallel|use_tp_pp_dp|account_for_|decoder_(first|last)_pipeline).*", "speed"),
    (
        r"(micro_batch_size|num_workers|manual_gc.*|recompute.*|.*offload.*|ddp_(bucket|num|pad).*|(use_)?nccl_ub)",
        "speed",
    ),
    (r"(overlap|tp_comm|no_overlap|disable_tp_comm|no_align|defer_|delay_|cuda_graph|te_rng|high_priority).*", "speed"),
    (
        r"(.*fusion.*|.*fused.*|attention_backend|use_transformer_engine_op_fuser|use_te_activation_func|nccl.*|use_flash_attn)",
        "speed",
    ),
    (r"(use_distributed_optimizer|use_megatron_fsdp|use_torch_fsdp2|data_parallel_sharding.*|fsdp.*)", "speed"),
    (
        r"(keep_fp8_transpose_cache|reuse_grad_buf.*|suggested_communication.*|moe_.*dispatcher.*|moe_permute.*)",
        "speed",
    ),
    (
        r"(moe_grouped_gemm|init_model_with_meta.*|no_create_attention_mask.*|use_cpu_init.*|distributed_backend)",
        "speed",
    ),
)
# Most of Transformer Engine's variables affect the numerics, and each release adds some. The exceptions below time,
# build, print or overlap (the calls of os.getenv in transformer_engine 2.20.2).
_NEUTRAL_ENV = re.compile(
    r"NCCL_DEBUG.*|PYTHON.*|HF_.*|WANDB_.*|TOKENIZERS_.*|NVTE_(DEBUG.*|PRINT_.*|NVTX_.*|.*BUILD.*|FRAMEWORK|.*PICKLE.*)"
)
_SPEED_ENV = re.compile(
    r"NVTE_(.*SM_MARGIN|NORM_.*_CUDNN|BATCH_MHA_P2P_COMM|CPU_OFFLOAD.*|UB_.*|.*AUTOTUNING|TORCH_COMPILE)"
)
_NUMERIC_ENV = re.compile(
    r"NVTE_.*|CUBLAS_WORKSPACE_CONFIG|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32.*|MAMBA_DETERMINISTIC|FP4_RECIPE"
)


@dataclass(frozen=True)
class Difference:
    """A value that differs. `a` or `b` is None if that recipe does not set it."""

    part: Part
    name: str
    a: Any
    b: Any
    effect: Effect

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def differences(a: Prepared, b: Prepared, cluster: Cluster) -> list[Difference]:
    """Compare two recipes as they are resolved for a cluster.

    Phases are compared by name; a recipe without that phase is compared as a whole. The name of a difference that does
    not hold in all phases lists the phases in which it does.
    """
    names = list(dict.fromkeys(phase.name for phase in (*a.phases, *b.phases)))
    if not names:
        return _differences(a, b, cluster)
    each = {name: _differences(_part(a, name), _part(b, name), cluster) for name in names}
    found: list[Difference] = []
    for one in chain.from_iterable(each.values()):
        those = [name for name in names if one in each[name]]
        if len(those) < len(names):
            one = replace(one, name=f"{one.name} ({', '.join(those)})")
        if one not in found:
            found.append(one)
    return found


def _part(recipe: Prepared, phase: str) -> Prepared:
    """Return a phase of a recipe, its first phase if it has only others, or the recipe if it has none."""
    names = [one.name for one in recipe.phases]
    if phase not in names:
        return recipe.parts[0]
    return recipe.parts[names.index(phase)]


def _differences(a: Prepared, b: Prepared, cluster: Cluster) -> list[Difference]:
    recipe_a, recipe_b = a.loaded.recipe, b.loaded.recipe
    with_config = a.engine is b.engine  # else its fields are among the arguments
    found = _unequal("arguments", *_arguments(a, b), _of_flag)
    found += _unequal("topology", _sizes(a), _sizes(b), _of_size)
    found += _unequal("environment", recipe_a.environment, recipe_b.environment, _of_variable)
    found += _unequal("launch", _launch(a, with_config), _launch(b, with_config), _of_launch)
    images = {"image": recipe_a.container.image}, {"image": recipe_b.container.image}
    found += _unequal("image", *images, _of_software)
    found += _unequal("software", _software(a), _software(b), _of_software)
    found += _unequal("slurm", _request(a, cluster), _request(b, cluster), _of_request)
    return found


def _arguments(a: Prepared, b: Prepared) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the arguments of both recipes to compare, by name.

    For one engine these are the flags that the recipes set. Two engines name flags differently, so their resolved
    values are compared by Megatron's names, except defaults that only one of the engines has, and arguments that one of
    them does not record.
    """
    if a.engine is b.engine:
        return {**a.args.values, **a.args.own_values}, {**b.args.values, **b.args.own_values}
    stated_a = {**a.args.recorded, **a.loaded.recipe.launch.config}
    stated_b = {**b.args.recorded, **b.loaded.recipe.launch.config}
    resolved_a = {**a.engine.defaults(a.args), **stated_a}
    resolved_b = {**b.engine.defaults(b.args), **stated_b}
    comparable = resolved_a.keys() & resolved_b.keys() | stated_a.keys() | stated_b.keys()
    for one in (a, b):
        names = one.engine.compared(one.args)
        if names is not None:
            comparable &= set(names)
    return _only(resolved_a, comparable), _only(resolved_b, comparable)


def _only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _unequal(
    part: Part, a: Mapping[str, Any], b: Mapping[str, Any], effect: Callable[[str], Effect]
) -> list[Difference]:
    found = []
    for name in dict.fromkeys([*a, *b]):
        if a.get(name) != b.get(name):
            found.append(Difference(part, name, a.get(name), b.get(name), effect(name)))
    return found


def _of_flag(name: str) -> Effect:
    for pattern, effect in _FLAGS:
        if re.fullmatch(pattern, name):
            return effect
    return "numerics"


def _of_launch(name: str) -> Effect:
    if name.startswith("config."):
        # A field of the config affects what the flag of the same name would.
        return _of_flag(name.removeprefix("config."))
    if name in ("probe", "profile", "profile_iteration", "tensor_stats", "health_check"):
        return "neutral"
    return "numerics"


def _of_variable(name: str) -> Effect:
    if _NEUTRAL_ENV.fullmatch(name):
        return "neutral"
    if _NUMERIC_ENV.fullmatch(name) and not _SPEED_ENV.fullmatch(name):
        return "numerics"
    return "speed"


def _of_size(name: str) -> Effect:
    if name == "global_batch":
        return "numerics"
    return "speed"


def _of_software(name: str) -> Effect:
    return "numerics"


def _of_request(name: str) -> Effect:
    if name in schedulers.cluster().neutral_requests:
        return "neutral"
    return "speed"


def _sizes(one: Prepared) -> dict[str, Any]:
    need = one.loaded.recipe.resources
    return {**asdict(one.layout), "nodes": need.nodes, "gpus_per_node": need.gpus_per_node, "gpu": need.gpu}


def _launch(one: Prepared, with_config: bool) -> dict[str, Any]:
    """Return the launch section without the script's arguments and the launch mode, which are compared separately."""
    stated = one.loaded.recipe.launch.model_dump(exclude={"arguments", "mode", "config"})
    if not with_config:
        return stated
    return {**stated, **{f"config.{name}": value for name, value in one.loaded.recipe.launch.config.items()}}


def _software(one: Prepared) -> dict[str, Any]:
    recipe = one.loaded.recipe
    stated = {k: v for k, v in recipe.software.model_dump().items() if v is not None}
    return {**software_in(recipe.container.image), **stated, "megatron": one.args.version}


def _request(one: Prepared, cluster: Cluster) -> dict[str, Any]:
    """Return what the job requests from the cluster's scheduler. All phases share one job."""
    job = plan(replace(one, phases=()), cluster, None, check_paths=False)
    return {**schedulers.cluster().request(job), "processes": job.mode}
