"""Check for FP8 that is silently off, unusual formats, parameter gather, and flags without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.wording import shortened

_EMERGING = ("muon", "dist_muon", "soap", "adaptive_muon", "lion")


@rule("fp8-off", "error", source="run: losses are bit-identical to bf16; megatron/core/fp8_utils.py get_fp8_context")
def local_layers_ignore_fp8(run: ResolvedRun) -> Iterator[Finding]:
    if run.quantized and run.value("transformer_impl") == "local":
        message = f"{run.precision} is requested, but transformer_impl local ignores it: the run would train in bf16"
        fix = "use `transformer_impl: transformer_engine`, or `precision: {recipe: bf16}`"
        yield Finding(message, run.where("transformer_impl", "fp8_recipe"), fix)


@rule(
    "fp8-no-layers",
    "error",
    source="megatron/core/fp8_utils.py is_first_last_bf16_layer",
    says=r"num_layers_at_(start|end)_in_bf16 .* must be between",
)
def some_layers_are_quantized(run: ResolvedRun) -> Iterator[Finding]:
    if not run.quantized or not run.on("first_last_layers_bf16"):
        return
    first, last = run.integer("num_layers_at_start_in_bf16"), run.integer("num_layers_at_end_in_bf16")
    layers = run.integer("num_layers")
    if layers and first + last >= layers:
        message = (
            f"the first {first} and last {last} layers in bf16 are all {layers} layers: none would use {run.precision}"
        )
        where = run.where("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "first_last_layers_bf16")
        yield Finding(message, where, "keep fewer layers in bf16, or use `precision: {recipe: bf16}`")


@rule("fp8-without-bf16", "warning", source="megatron/training/arguments.py:1165: parameters are fp32 without --bf16")
def fp8_goes_with_bf16(run: ResolvedRun) -> Iterator[Finding]:
    if run.quantized and not run.on("bf16") and not run.on("fp16"):
        message = f"{run.precision} is set without bf16: all operations that are not quantized would run in fp32"
        yield Finding(
            message, run.where("fp8", "fp4"), "add `bf16: true`; a `precision:` section sets it automatically"
        )


@rule(
    "fp32-attention",
    "warning",
    source="TransformerEngine attention/dot_product_attention/utils.py get_attention_backend: 16 bits or FP8 only",
)
def attention_in_fp32_is_not_fused(run: ResolvedRun) -> Iterator[Finding]:
    if run.uses_te and run.precision == "fp32":
        message = (
            "fp32 has no fused attention: the scores of every head, sequence times sequence, are kept in memory; and "
            "Transformer Engine multiplies fp32 matrices in TF32"
        )
        fix = "use bf16, or silence this warning with `silence: {fp32-attention: reason}`"
        yield Finding(message, run.loaded.where("precision", "recipe"), fix)


@rule("fp16-optimizer", "error", source="megatron/core/optimizer/__init__.py:769")
def emerging_optimizers_take_bf16(run: ResolvedRun) -> Iterator[Finding]:
    name = str(run.value("optimizer"))
    if run.on("fp16") and name in _EMERGING:
        message = f"optimizer {name} does not support fp16"
        yield Finding(message, run.where("optimizer"), "use adam, or `precision: {recipe: bf16}`")


@rule("fp8-format-unusual", "warning", source="TransformerEngine common/recipe/__init__.py; Megatron-Bridge PR 638")
def format_belongs_to_recipe(run: ResolvedRun) -> Iterator[Finding]:
    recipe = run.quantization
    if recipe is None or recipe.usual_format is None or run.value(recipe.operands) == recipe.usual_format:
        return
    message = f"{recipe.name} with format {run.value(recipe.operands)} is unusual: {recipe.unusual_because}"
    yield Finding(message, run.where(recipe.operands), f"use format {recipe.usual_format}")


@rule(
    "mxfp8-param-gather-buffer",
    "error",
    source="megatron/core/optimizer/optimizer_config.py:414 warns; param_and_grad_buffer.py:1255 then calls "
    "replace_raw_data, which TransformerEngine has not for MXFP8Tensor (NotImplementedError)",
)
def gather_has_its_flags(run: ResolvedRun) -> Iterator[Finding]:
    recipe = run.quantization
    if recipe is None or run.fsdp or not run.on(recipe.gather_flag):
        return
    for flag in recipe.gather_flags:
        if not run.on(flag):
            message = f"{recipe.name} parameter gather needs {flag}: without it Megatron fails when it wraps the model"
            fix = f"add `{flag}: true`; `precision.param_gather` sets it automatically"
            yield Finding(message, run.where(recipe.gather_flag), fix)


def _outside_the_fp8_kernel(run: ResolvedRun) -> bool:
    if run.on("optimizer_cpu_offload"):
        return False
    moments = {run.value("exp_avg_dtype"), run.value("exp_avg_sq_dtype")}
    return run.value("main_params_dtype") == "fp32" or moments == {"bf16"}


@rule(
    "fp8-param-gather-states",
    "error",
    source="run on H200 with TransformerEngine 2.20.2: FusedAdam has no such pair of parameter and state types",
)
def gathered_weights_fit_the_optimizer(run: ResolvedRun) -> Iterator[Finding]:
    """Report combinations that pass all validators and fail in the first step.

    The kernel for weights under delayed scaling takes fp32 only: not the 16 bits that bf16 lacks, which stand for an
    fp32 master weight, and not moments in bf16, which are not unscaled before it where both are.
    """
    if not run.on("fp8_param_gather") or not run.on("use_precision_aware_optimizer"):
        return
    master = run.value("main_params_dtype")
    if run.precision == "delayed" and _outside_the_fp8_kernel(run):
        message = (
            "delayed scaling with FP8 parameter gather and the precision-aware optimizer fails in the first step with "
            "fp32 master weights, and with both moments in bf16"
        )
        fix = "use precision recipe tensorwise, or remove fp8_param_gather or use_precision_aware_optimizer"
        yield Finding(message, run.where("exp_avg_dtype", "main_params_dtype", "fp8_param_gather"), fix)
    if run.precision in ("tensorwise", "blockwise", "mxfp8") and master == "fp16":
        message = f"{run.precision} with FP8 parameter gather and fp16 master weights fails in the first step"
        fix = "use main_params_dtype fp32, or remove fp8_param_gather"
        yield Finding(message, run.where("main_params_dtype", "fp8_param_gather"), fix)


@rule(
    "fp8-param-gather-scales",
    "error",
    source="megatron 0.19.2: core/optimizer/distrib_optimizer.py:2812; H200, benchmarks/h200/layouts.md: NaN",
)
def gathered_weights_have_one_scale(run: ResolvedRun) -> Iterator[Finding]:
    """Megatron's own step reduces the largest FP8 weights over data parallel ranks; the one of this optimizer does not.

    Each rank then writes its shards under a scale of its own. Llama-3.1 8B on two GPUs did not learn and was NaN in the
    fifth iteration; on one GPU the same settings train.
    """
    if run.fsdp or run.precision != "delayed" or run.layout.dp * run.layout.cp == 1:
        return
    if not (run.on("fp8_param_gather") and run.on("use_precision_aware_optimizer")):
        return
    if _outside_the_fp8_kernel(run):
        return  # ends in the first step: fp8-param-gather-states
    message = (
        "delayed scaling with FP8 parameter gather and the precision-aware optimizer does not learn on several data "
        "parallel ranks: each quantizes its part of a weight under a scale of its own"
    )
    fix = "remove fp8_param_gather or use_precision_aware_optimizer, or use precision recipe tensorwise"
    yield Finding(message, run.where("fp8_param_gather", "use_precision_aware_optimizer"), fix)


@rule("fp4-param-gather-states", "error", source="megatron/core/optimizer/distrib_optimizer.py:410 and 2770")
def gathered_fp4_weights_fit_the_optimizer(run: ResolvedRun) -> Iterator[Finding]:
    if run.fsdp or not run.on("fp4_param_gather") or not run.on("use_precision_aware_optimizer"):
        return
    # optimizer_config.py:404 asks for the recipe of FP8, which Megatron-LM's command line always has.
    if (run.value("main_params_dtype") or "fp32") != "fp32" or run.value("fp8_recipe") in (None, "delayed"):
        message = (
            "the precision-aware optimizer keeps no master copy of weights gathered in FP4 and finds none in the first "
            "step"
        )
        fix = "set `precision: {param_gather: false}`, or remove use_precision_aware_optimizer and the types of states"
        yield Finding(message, run.where("fp4_param_gather", "use_precision_aware_optimizer"), fix)


@rule("blockwise-param-gather", "warning", source="Megatron-LM issue 1863; Megatron-Bridge leaves it off for blockwise")
def blockwise_gather_is_unproven(run: ResolvedRun) -> Iterator[Finding]:
    if run.precision == "blockwise" and run.on("fp8_param_gather"):
        message = "parameter gather with blockwise is not proven: it failed with tensor parallelism on Hopper"
        yield Finding(message, run.where("fp8_param_gather"), "remove fp8_param_gather, or use another recipe")


@rule(
    "blockwise-gather-buffer",
    "error",
    source="megatron 0.19.2: core/fp8_utils.py:226; TE 2.20.2: tensor/float8_blockwise_tensor.py:530 returns itself",
)
def blockwise_gathers_into_its_own_buffer(run: ResolvedRun) -> Iterator[Finding]:
    names = ("reuse_grad_buf_for_mxfp8_param_ag", "fp8_param_gather", "overlap_param_gather")
    if run.precision == "blockwise" and all(map(run.on, names)) and not run.fsdp and run.megatron[:2] >= (0, 19):
        message = f"{names[0]} cannot copy gathered weights of the blockwise recipe: the first step fails"
        yield Finding(message, run.where(*names), f"remove {names[0]}")


@rule(
    "param-gather-off",
    "warning",
    source="megatron/training/arguments.py:1017: FSDP2 with TE 2 switches it off",
    scope="megatron_lm",
)
def fsdp2_gathers_in_bf16(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("fp8_param_gather") and run.on("use_torch_fsdp2"):
        message = "torch FSDP2 gathers parameters in bf16, so Megatron switches fp8_param_gather off"
        yield Finding(
            message, run.where("fp8_param_gather"), "remove it, or use Megatron-FSDP (parallel.fsdp: megatron)"
        )


@rule("delayed-short-history", "warning", source="megatron defaults 1 and most_recent; NVIDIA trains with 1024 and max")
def delayed_has_a_history(run: ResolvedRun) -> Iterator[Finding]:
    if run.precision != "delayed" or run.integer("fp8_amax_history_len", 1) > 1:
        return
    message = "delayed scaling with a history of one step uses only each tensor's latest maximum"
    fix = "set `amax_history: 1024` and `amax_algo: max`, as NVIDIA's recipes do"
    yield Finding(message, run.where("fp8_amax_history_len", "fp8_recipe", "fp8"), fix)


def _gathers_with(run: ResolvedRun, flag: str) -> bool:
    """Return whether parameter gather with the run's quantization recipe needs this flag."""
    return run.quantization is not None and flag in run.quantization.gather_flags


def _not_delayed(run: ResolvedRun) -> bool:
    return run.precision != "delayed"


def _no_dynamic_scaling(run: ResolvedRun) -> bool:
    return not run.on("fp16") or run.on("loss_scale")


_OF_DYNAMIC_SCALING = "only dynamic loss scaling, of fp16, uses it"
# Argument, when it has no effect, why. Only arguments that a recipe sets are reported.
_IDLE: tuple[tuple[str, Callable[[ResolvedRun], Any], str], ...] = (
    ("fp8_amax_history_len", _not_delayed, "only delayed scaling has a history"),
    (
        "fp8_amax_history_len",
        lambda run: run.precision == "delayed" and run.value("fp8_amax_compute_algo") == "most_recent",
        "fp8_amax_compute_algo most_recent, Megatron's default, reads only the latest entry; use max",
    ),
    ("fp8_amax_compute_algo", _not_delayed, "only delayed scaling has a history"),
    ("initial_loss_scale", _no_dynamic_scaling, _OF_DYNAMIC_SCALING),
    ("min_loss_scale", _no_dynamic_scaling, _OF_DYNAMIC_SCALING),
    ("loss_scale_window", _no_dynamic_scaling, _OF_DYNAMIC_SCALING),
    ("hysteresis", _no_dynamic_scaling, _OF_DYNAMIC_SCALING),
    (
        "grad_reduce_in_bf16",
        lambda run: not run.on("bf16"),
        "it is for bf16; fp16 reduces gradients in fp16 unless optimizer.grad_reduce is fp32, and fp32 in fp32",
    ),
    ("fp8_margin", _not_delayed, "only delayed scaling has a margin"),
    ("fp8_wgrad", _not_delayed, "only delayed scaling computes weight gradients outside FP8; the others stay in FP8"),
    ("fp8_interval", lambda run: True, "Transformer Engine ignores it since 1.8"),
    ("fp8_quantizer_factory", lambda run: run.precision != "custom", "only the custom recipe has one"),
    (
        "num_layers_at_start_in_bf16",
        lambda run: not run.on("first_last_layers_bf16"),
        "it needs first_last_layers_bf16",
    ),
    ("num_layers_at_end_in_bf16", lambda run: not run.on("first_last_layers_bf16"), "it needs first_last_layers_bf16"),
    ("first_last_layers_bf16", lambda run: not run.quantized, "all layers are in bf16"),
    (
        "reuse_grad_buf_for_mxfp8_param_ag",
        lambda run: not _gathers_with(run, "reuse_grad_buf_for_mxfp8_param_ag") or run.on("use_megatron_fsdp"),
        "it has an effect only for mxfp8 without Megatron-FSDP",
    ),
    (
        "keep_fp8_transpose_cache",
        lambda run: not run.on("use_megatron_fsdp"),
        "it has an effect only with Megatron-FSDP",
    ),
    (
        "data_parallel_sharding_strategy",
        lambda run: not run.on("use_megatron_fsdp") and run.value("data_parallel_sharding_strategy") != "no_shard",
        "it has an effect only with Megatron-FSDP",
    ),
    ("fsdp_double_buffer", lambda run: not run.on("use_megatron_fsdp"), "it has an effect only with Megatron-FSDP"),
    (
        "sequence_parallel",
        lambda run: run.layout.tp == 1,
        "Megatron switches sequence parallelism off without tensor parallelism",
    ),
    (
        "num_query_groups",
        lambda run: not run.on("group_query_attention") and not run.on("multi_latent_attention"),
        "without group_query_attention every head has its own keys and values",
    ),
    (
        "recompute_method",
        lambda run: run.value("recompute_granularity") != "full",
        "it needs recompute_granularity full",
    ),
    (
        "recompute_num_layers",
        lambda run: run.value("recompute_granularity") != "full",
        "it needs recompute_granularity full",
    ),
    (
        "recompute_modules",
        lambda run: run.value("recompute_granularity") != "selective" and not run.on("recompute_activations"),
        "it needs recompute_granularity selective",
    ),
)


@rule(
    "flag-without-effect",
    "warning",
    source="per flag: performance facts C.1 and C.5, megatron facts 2 (rows 11-67)",
    scope="megatron_lm",
)
def flags_do_something(run: ResolvedRun) -> Iterator[Finding]:
    for dest, idle, why in _IDLE:
        value = run.given.get(dest)
        # A value equal to the default, or a switch that is off, is not worth a warning.
        if dest in run.given and value not in (None, run.defaults.get(dest)) and idle(run):
            yield Finding(f"{_shown(dest, value)} has no effect: {why}", run.where(dest), "remove it")


def _shown(dest: str, value: object) -> str:
    if isinstance(value, bool):
        return dest
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return f"{dest} {shortened(str(value), 40)}"


@rule("dense-grouped-mxfp8", "error", source="core/extensions/transformer_engine.py:3202 (0.19; 2972 in 0.18), H200")
def dense_layers_in_groups_multiply_in_mxfp8(run: ResolvedRun) -> Iterator[Finding]:
    if not (run.on("use_grouped_gemm_for_dense_mlp") and run.on("use_transformer_engine_op_fuser")):
        return
    divided = run.layout.tp > 1 or run.on("num_experts")
    if not divided and run.gpu.capability < (10, 0):
        message = f"use_grouped_gemm_for_dense_mlp computes in MXFP8, whatever the precision; {run.gpu.name} has none"
        yield Finding(message, run.where("use_grouped_gemm_for_dense_mlp"), "remove it")
