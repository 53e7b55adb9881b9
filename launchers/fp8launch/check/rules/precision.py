"""FP8 that is silently off or half on, formats that do not belong, parameter gather, and flags without effect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Finding, rule

_FP8_UTILS = "megatron/core/fp8_utils.py"


@rule("fp8-off", "error", source="run: losses are bit-identical to bf16; megatron/core/fp8_utils.py get_fp8_context")
def local_layers_ignore_fp8(run: Facts) -> Iterator[Finding]:
    if run.quantized and run.value("transformer_impl") == "local":
        message = f"{run.precision} is asked for, and transformer_impl local ignores it: the run would train in bf16"
        fix = "use `transformer_impl: transformer_engine`, or `precision: {recipe: bf16}`"
        yield Finding(message, run.where("transformer_impl", "fp8_recipe"), fix)


@rule(
    "fp8-no-layers",
    "error",
    source="megatron/core/fp8_utils.py is_first_last_bf16_layer",
    says=r"num_layers_at_(start|end)_in_bf16 .* must be between",
)
def some_layers_are_quantized(run: Facts) -> Iterator[Finding]:
    if not run.quantized or not run.on("first_last_layers_bf16"):
        return
    first, last = run.integer("num_layers_at_start_in_bf16"), run.integer("num_layers_at_end_in_bf16")
    layers = run.integer("num_layers")
    if layers and first + last >= layers:
        message = f"{first} first and {last} last layers in bf16 are all {layers}: nothing would be in {run.precision}"
        where = run.where("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "first_last_layers_bf16")
        yield Finding(message, where, "keep fewer layers in bf16, or use `precision: {recipe: bf16}`")


@rule("fp8-without-bf16", "warning", source="megatron/training/arguments.py:1165: parameters are fp32 without --bf16")
def fp8_goes_with_bf16(run: Facts) -> Iterator[Finding]:
    if run.quantized and not run.on("bf16") and not run.on("fp16"):
        message = f"{run.precision} without bf16: everything that is not quantized would be computed in fp32"
        yield Finding(message, run.where("fp8", "fp4"), "add `bf16: true`, which a `precision:` section sets by itself")


# TransformerEngine common/recipe: defaults HYBRID for delayed and current scaling, E4M3 for MXFP8. Hybrid MXFP8 was
# seen to diverge (Megatron-Bridge PR 638). Blockwise is trained in both.
_BELONGS = {"delayed": "hybrid", "tensorwise": "hybrid", "mxfp8": "e4m3"}
_WHY = {
    "hybrid": "per-tensor scales leave the gradients too little range in e4m3",
    "e4m3": "scales of 32 values need no wider range for gradients, which lose a bit, and runs were seen to diverge",
}


@rule("fp8-format-unusual", "warning", source="TransformerEngine common/recipe/__init__.py; Megatron-Bridge PR 638")
def format_belongs_to_recipe(run: Facts) -> Iterator[Finding]:
    usual = _BELONGS.get(run.precision)
    if run.on("fp8") and usual is not None and run.value("fp8") != usual:
        message = f"{run.precision} with format {run.value('fp8')} is unusual: {_WHY[usual]}"
        yield Finding(message, run.where("fp8"), f"use format {usual}")


@rule(
    "mxfp8-param-gather-buffer",
    "error",
    source="megatron/core/optimizer/optimizer_config.py:414 warns; param_and_grad_buffer.py:1255 then calls "
    "replace_raw_data, which TransformerEngine has not for MXFP8Tensor (NotImplementedError)",
)
def mxfp8_gather_reuses_gradients(run: Facts) -> Iterator[Finding]:
    if (
        run.precision == "mxfp8"
        and run.on("fp8_param_gather")
        and not run.on("reuse_grad_buf_for_mxfp8_param_ag")
        and not run.fsdp
    ):
        message = "mxfp8 parameter gather needs reuse_grad_buf_for_mxfp8_param_ag: wrapping the model fails without it"
        fix = "add `reuse_grad_buf_for_mxfp8_param_ag: true`, which `precision.param_gather` sets by itself"
        yield Finding(message, run.where("fp8_param_gather"), fix)


@rule(
    "fp8-param-gather-states",
    "error",
    source="run on H200 with TransformerEngine 2.20.2: FusedAdam has no such pair of parameter and state types",
)
def gathered_weights_fit_the_optimizer(run: Facts) -> Iterator[Finding]:
    """Two combinations that every validator passes and that end in the first step."""
    if not run.on("fp8_param_gather") or not run.on("use_precision_aware_optimizer"):
        return
    master, moments = run.value("main_params_dtype"), {run.value("exp_avg_dtype"), run.value("exp_avg_sq_dtype")}
    if run.precision == "delayed" and master == "fp32" and moments & {"fp8", "fp16"}:
        message = (
            "delayed scaling with FP8 parameter gather, fp8 or fp16 moments and an fp32 master stops in the first step"
        )
        fix = "use main_params_dtype fp16, or precision recipe tensorwise, or leave fp8_param_gather off"
        yield Finding(message, run.where("exp_avg_dtype", "exp_avg_sq_dtype", "fp8_param_gather"), fix)
    if run.precision == "tensorwise" and master == "fp16":
        message = "tensorwise with FP8 parameter gather and an fp16 master stops in the first step"
        fix = "use main_params_dtype fp32, or precision recipe delayed, or leave fp8_param_gather off"
        yield Finding(message, run.where("main_params_dtype", "fp8_param_gather"), fix)


@rule("blockwise-param-gather", "warning", source="Megatron-LM issue 1863; Megatron-Bridge leaves it off for blockwise")
def blockwise_gather_is_unproven(run: Facts) -> Iterator[Finding]:
    if run.precision == "blockwise" and run.on("fp8_param_gather"):
        message = "parameter gather with blockwise is unproven: it was seen to fail with tensor parallelism on Hopper"
        yield Finding(message, run.where("fp8_param_gather"), "leave fp8_param_gather off with blockwise")


@rule("param-gather-off", "warning", source="megatron/training/arguments.py:1017: FSDP2 with TE 2 switches it off")
def fsdp2_gathers_in_bf16(run: Facts) -> Iterator[Finding]:
    if run.on("fp8_param_gather") and run.on("use_torch_fsdp2"):
        message = "torch FSDP2 gathers parameters in bf16: fp8_param_gather is switched off"
        yield Finding(message, run.where("fp8_param_gather"), "drop it, or use Megatron-FSDP (parallel.fsdp: megatron)")


@rule("delayed-short-history", "warning", source="megatron defaults 1 and most_recent; NVIDIA trains with 1024 and max")
def delayed_has_a_history(run: Facts) -> Iterator[Finding]:
    if run.precision != "delayed" or run.integer("fp8_amax_history_len", 1) > 1:
        return
    message = "delayed scaling with a history of one step scales each tensor by its last maximum only"
    fix = "use `amax_history: 1024` and `amax_algo: max`, as NVIDIA's recipes do"
    yield Finding(message, run.where("fp8_amax_history_len", "fp8_recipe", "fp8"), fix)


def _not_delayed(run: Facts) -> bool:
    return run.precision != "delayed"


# Argument, when it does nothing, why. Only what a recipe states is reported.
_IDLE: tuple[tuple[str, Callable[[Facts], Any], str], ...] = (
    ("fp8_amax_history_len", _not_delayed, "only delayed scaling has a history"),
    (
        "fp8_amax_history_len",
        lambda run: run.precision == "delayed" and run.value("fp8_amax_compute_algo") == "most_recent",
        "fp8_amax_compute_algo most_recent, Megatron's default, reads its last entry only; use max",
    ),
    ("fp8_amax_compute_algo", _not_delayed, "only delayed scaling has a history"),
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
        lambda run: run.precision != "mxfp8" or run.on("use_megatron_fsdp"),
        "it is for mxfp8 without Megatron-FSDP",
    ),
    ("keep_fp8_transpose_cache", lambda run: not run.on("use_megatron_fsdp"), "it is for Megatron-FSDP"),
    (
        "data_parallel_sharding_strategy",
        lambda run: not run.on("use_megatron_fsdp") and run.value("data_parallel_sharding_strategy") != "no_shard",
        "it is for Megatron-FSDP",
    ),
    ("fsdp_double_buffer", lambda run: not run.on("use_megatron_fsdp"), "it is for Megatron-FSDP"),
    (
        "sequence_parallel",
        lambda run: run.layout.tp == 1,
        "Megatron switches sequence parallelism off where tensors are not split",
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
    (
        "rampup_batch_size",
        lambda run: run.megatron >= (0, 18),
        "Megatron ignores it since 0.18: the batch is constant; use step_batch_size_schedule",
    ),
)


@rule("flag-without-effect", "warning", source="per flag: performance facts C.1 and C.5, megatron facts 2 (rows 11-67)")
def flags_do_something(run: Facts) -> Iterator[Finding]:
    for dest, idle, why in _IDLE:
        value = run.given.get(dest)
        # What is stated and equal to the default says nothing, and switches that are off do nothing anyway.
        if dest in run.given and value not in (None, run.defaults.get(dest)) and idle(run):
            shown = f"{dest}" if isinstance(value, bool) else f"{dest} {_short(value)}"
            yield Finding(f"{shown} has no effect: {why}", run.where(dest), "drop it")


def _short(value: object) -> str:
    text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) < 40 else text[:37] + "..."
