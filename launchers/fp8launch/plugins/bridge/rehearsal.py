"""Express a recipe of Bridge as Megatron-LM arguments, for rehearsals on machines without Bridge and for counts.

Both projects create the same configurations of Megatron-Core: a model's, DDP's and the optimizer's. What Bridge fills
in when it sets up a run is repeated here. Sources, release 0.6.0: `setup` of training/comm_overlap.py, `validate` of
training/config.py, `finalize` of models/transformer_config.py, `_benchmark_common` of perf_recipes/_common.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fp8launch.engines.base import EngineArguments, Layout, NotRehearsable, StepArguments
from fp8launch.megatron.arguments import FlagValue, as_parsed, attributes, emit_arguments
from fp8launch.megatron.flag_problems import check_values
from fp8launch.megatron.schema import Flag, FlagSchema, load_schema
from fp8launch.plugins.bridge.fields import pipeline_text
from fp8launch.plugins.bridge.index import BridgeRecipe
from fp8launch.plugins.bridge.own_program import NotHere, own_program

NOT_COVERED = "Megatron-Bridge's own code (model provider, data, training loop)"
# The container of Bridge 0.6 is not published. Recipes for experts with a fixed number of rows need cuBLAS 13.4
# (Transformer Engine 2.20: ops/basic/grouped_linear.py).
CUDA = "13.2.1"

# Models that the entry does not build, by a part of the recipe's name.
_NOT_BUILT = {
    "_vl_": "models with a vision encoder",
    "wan_": "diffusion models",
    "flux_": "diffusion models",
    "deepseek_v4_": "models with DeepSeek-V4's attention, which Megatron-Core 0.19 lacks,",
}
# Megatron-LM computes these from other arguments, or they tell Bridge where to read a model.
_COMPUTED = frozenset(
    (
        "params_dtype", "pipeline_dtype", "fp8_param", "fp4_param", "batch_p2p_comm", "should_pad_vocab",
        "cpu_offloading", "hf_model_id", "hf_model_revision", "moe_a2a_overlap", "cuda_graph_scope",
        "accumulate_allreduce_grads_in_fp32",
    )
)  # fmt: skip
# Megatron-LM's command line refuses values of these that Bridge and Megatron-Core accept, some of them only if a
# condition on other settings does not hold.
_PAST_THE_COMMAND_LINE: Mapping[str, str | None] = {
    "cross_entropy_fusion_impl": None,
    "overlap_param_gather_with_optimizer_step": None,
    "overlap_param_gather": "overlap_grad_reduce",
    "fp8_param_gather": "use_distributed_optimizer",
}


def step_arguments(
    args: EngineArguments, layout: Layout, recipe: BridgeRecipe, folder: str | None = None
) -> StepArguments:
    """Return the arguments of a step of Megatron-LM's command line with the same configuration of Megatron-Core.

    They come with Bridge's own program if this Python has Bridge; it reads the model from `folder`.

    Raises NotRehearsable for a model whose shape is not known here, or that the entry does not build.
    """
    if recipe.task != "pretrain":
        raise NotRehearsable("fine-tuning with Bridge cannot be rehearsed")
    for part, models in _NOT_BUILT.items():
        if part in recipe.name:
            raise NotRehearsable(f"{models} of Bridge cannot be rehearsed")
    if any(name not in args.attributes for name in ("num_layers", "hidden_size", "num_attention_heads")):
        raise NotRehearsable(f"the shape of {recipe.model} is not known here: Bridge reads it from the hub in the job")
    schema = load_schema(args.version)
    values: dict[str, FlagValue] = {}
    config: dict[str, Any] = {}
    run = _set_up(args.attributes, layout, recipe)
    for name, value in run.items():
        if name in _COMPUTED:
            continue
        flag_is_refused = name in _PAST_THE_COMMAND_LINE and not run.get(_PAST_THE_COMMAND_LINE[name] or "")
        found = _flag(name, value, schema)
        if found is None or flag_is_refused:
            config[name] = value
        elif found[1] is not None:
            values[found[0]] = found[1]
    step = EngineArguments(
        version=args.version,
        values=values,
        arguments=emit_arguments(values, schema),
        attributes=attributes(as_parsed(values, schema), schema),
        places={},
    )
    own = StepArguments(step, config, translated=True, cuda=CUDA)
    try:
        return replace(own, program=own_program(args, recipe, folder))
    except NotHere as reason:
        return replace(own, without=(f"{NOT_COVERED}: {reason}",))


def _set_up(stated: Mapping[str, Any], layout: Layout, recipe: BridgeRecipe) -> dict[str, Any]:
    """Return the attributes after the changes that Bridge makes when it sets up a run."""
    found = {**stated, **_graphs(stated), "bf16": True}
    # Defaults of performance recipes.
    found.setdefault("check_for_nan_in_loss_and_grad", False)
    found.setdefault("seq_length", recipe.sequence)
    found.setdefault("max_position_embeddings", found["seq_length"])
    # The optimizer also reads it if operands are in FP4 (MixedPrecisionConfig of training/mixed_precision.py).
    found.setdefault("fp8_recipe", "tensorwise")
    if not found.get("cpu_offloading"):  # Megatron-LM's switch is the number
        found["cpu_offloading_num_layers"] = None
    if layout.tp == 1:
        found["sequence_parallel"] = False
    if not found.get("sequence_parallel"):
        found["tp_comm_overlap"] = False
    if recipe.sections.get("comm_overlap") and found.get("use_distributed_optimizer") and layout.dp * layout.cp > 1:
        found = {"overlap_grad_reduce": True, "overlap_param_gather": True, **found}
    if found.get("use_megatron_fsdp"):
        found = _with_fsdp(found)
    fused = found.pop("bias_activation_fusion", None)
    if fused is not None:
        name = "bias_gelu_fusion"
        if found.get("swiglu"):
            name = "bias_swiglu_fusion"
        found[name] = fused
    stages = found.get("pipeline_model_parallel_layout")
    if stages:  # it says how many virtual stages there are
        found["num_virtual_stages_per_pipeline_rank"] = None
    if isinstance(stages, list):
        found["pipeline_model_parallel_layout"] = pipeline_text(stages)
    return found


def _with_fsdp(stated: Mapping[str, Any]) -> dict[str, Any]:
    found = {"ckpt_format": "fsdp_dtensor", **stated, "use_distributed_optimizer": True}
    found["reuse_grad_buf_for_mxfp8_param_ag"] = False
    if found.get("nccl_ub"):
        found["fsdp_manual_registration"] = True
    if not found.get("disable_symmetric_registration"):
        found["ddp_average_in_collective"] = False
    return found


def _graphs(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Rename the settings of CUDA graphs to the names of Megatron-Core 0.19, which still reads the older ones."""
    found = dict(stated)
    parts = [*_listed(found.pop("cuda_graph_scope", None)), *_listed(found.pop("cuda_graph_modules", None))]
    if "full_iteration" in parts:
        return {**found, "cuda_graph_impl": "full_iteration", "cuda_graph_modules": None}
    return {**found, "cuda_graph_modules": list(dict.fromkeys(parts)) or None}


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    if isinstance(value, list):
        return list(value)
    return [value]


def _flag(attribute: str, value: Any, schema: FlagSchema) -> tuple[str, FlagValue] | None:
    """Return the flag that sets an attribute, with its value; nothing if the parser's default is the same.

    Return None if no flag sets it.
    """
    for flag in schema.setting(attribute):
        if value is None or value == flag.default:
            return flag.name, None
        if flag.takes_value:
            stated = _of_type(flag, value, schema)
            if stated is not None:
                return flag.name, stated
        elif flag.action == "boolean" and isinstance(value, bool):
            return flag.name, value
        elif flag.const == value:
            return flag.name, True
    return None


def _of_type(flag: Flag, value: Any, schema: FlagSchema) -> FlagValue:
    """Return the value in the form that the flag takes, or None if it takes none."""
    if flag.nargs is not None:
        value = _listed(value)
    if flag.type == "int" and isinstance(value, float) and value.is_integer():
        value = int(value)
    stated: FlagValue = value
    if value == [] or check_values({flag.name: stated}, schema):
        return None
    return stated
