"""Check quantization recipes: the multiples that each rank's dimensions must be, the format, parameter gather."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.gemm_shapes import Width, tokens, widths
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule

_TE = "TransformerEngine"


@rule(
    "fp8-dimension",
    "error",
    source=(
        "transformer_engine.utils:assert_dim_for_fp8_exec, and TransformerEngine "
        "common/gemm/cublaslt_gemm.cu, pytorch/csrc/quantizer.cpp"
    ),
)
def fp8_dimension(run: ResolvedRun) -> Iterator[Finding]:
    if run.quantization is None or not run.uses_te:
        return
    step = run.quantization.feature_multiple
    if step is None:
        return
    for width in widths(run):
        if width.size is not None and width.size > 0 and width.size % step:
            yield _misaligned(run, width, step)


def _misaligned(run: ResolvedRun, width: Width, step: int) -> Finding:
    whole = step * width.parts
    below, above = width.total // whole * whole, (width.total // whole + 1) * whole
    fix = f"make it a multiple of {whole}, such as {above}"
    if below:
        fix = f"make it a multiple of {whole}, such as {below} or {above}"
    on_rank = f"is {width.total}"
    if width.parts > 1:
        on_rank = f"{width.total} over {width.parts} ranks is {width.size}"
        fix += ", or use less parallelism"
    message = f"{width.name} {on_rank}, but {run.precision} needs a multiple of {step} in every linear layer"
    return Finding(message, run.where(*width.dests), fix)


@rule(
    "fp8-tokens",
    "error",
    source=(
        "transformer_engine.utils:assert_dim_for_fp8_exec (8), and TransformerEngine "
        "common/gemm/cublaslt_gemm.cu (16 in the weight gradient where only TN products exist), "
        "pytorch/csrc/quantizer.cpp (mxfp8 32, nvfp4 16)"
    ),
)
def fp8_tokens(run: ResolvedRun) -> Iterator[Finding]:
    found, recipe = tokens(run), run.quantization
    if found is None or recipe is None or not run.uses_te:
        return
    gathered, local = found
    step = recipe.token_multiple
    # The weight gradient sums over tokens. Hopper multiplies FP8 with both operands' rows along that sum only, as
    # blockwise does everywhere, and rows must be multiples of 16 bytes.
    tn_only = recipe.tn_only or run.gpu.capability < (10, 0)
    in_fp8 = run.precision != "delayed" or run.on("fp8_wgrad")
    in_sum = max(16, step) if tn_only and in_fp8 else step
    if gathered % in_sum:
        count, multiple = gathered, in_sum
    elif local % step:
        count, multiple = local, step
    else:
        return
    split = f"{run.value('seq_length')} x {run.layout.micro_batch}"
    for name, parts in (("CP", run.layout.cp), ("SP", gathered // local)):
        if parts > 1:
            split += f" / {name} {parts}"
    message = (
        f"a micro batch has {count} tokens on a rank ({split}), but {run.precision} needs a multiple of {multiple}"
    )
    fix = f"choose batch.sequence x batch.micro as a multiple of {multiple} x context and sequence parallelism"
    yield Finding(message, run.where("seq_length", "micro_batch_size"), fix)


@rule(
    "blockwise-ragged",
    "warning",
    source="transformer_engine.float8_blockwise_tensor:Float8BlockQuantizer.is_quantizable",
)
def blockwise_ragged(run: ResolvedRun) -> Iterator[Finding]:
    """Partial blocks are padded: they cost as much as full blocks, and are gathered in bf16 where tensors are split."""
    if run.quantization is None or run.quantization.block is None or not run.uses_te:
        return
    block = run.quantization.block
    plain = ("hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size")
    for width in widths(run):
        if width.name in plain and width.size is not None and width.size % block and not width.size % 16:
            message = (
                f"{width.name} is {width.size} on each rank, which is not a multiple of {run.precision}'s block "
                f"size, {block}: partial blocks are padded and cost time"
            )
            yield Finding(message, run.where(*width.dests), f"make it a multiple of {block * width.parts}")


@rule(
    "tp-overlap-dimension",
    "error",
    source=f"{_TE} common/comm_gemm_overlap/comm_gemm_overlap.cpp:262-265: Userbuffers needs MXFP8 dims % 128",
)
def tp_overlap_dimension(run: ResolvedRun) -> Iterator[Finding]:
    if run.quantization is None or not run.on("tp_comm_overlap") or not run.uses_te or run.layout.tp < 2:
        return
    step = run.quantization.overlap_multiple
    if step is None:
        return
    needs = f"but tp_comm_overlap with {run.precision} needs a multiple of {step}"
    for width in widths(run):
        if width.name in ("hidden_size", "ffn_hidden_size") and width.size is not None and width.size % step:
            message = f"{width.name} is {width.size} on each rank, {needs}"
            yield Finding(message, run.where(*width.dests), f"make it a multiple of {step * width.parts}")
    found = tokens(run)
    if found is not None and found[1] % step:
        message = f"a rank has {found[1]} tokens of a micro batch, {needs}"
        yield Finding(message, run.where("seq_length"), f"make batch.sequence a multiple of {step * run.layout.tp}")


@rule("fp8-format-unusual", "warning", source="TransformerEngine common/recipe/__init__.py; Megatron-Bridge PR 638")
def fp8_format_unusual(run: ResolvedRun) -> Iterator[Finding]:
    recipe = run.quantization
    if recipe is None or recipe.usual_format is None or run.value(recipe.operands) == recipe.usual_format:
        return
    message = f"{recipe.name} with format {run.value(recipe.operands)} is unusual: {recipe.unusual_because}"
    yield Finding(message, run.where(recipe.operands), f"use format {recipe.usual_format}")


@rule(
    "mxfp8-param-gather-buffer",
    "error",
    source=(
        "optimizer_config:OptimizerConfig.__post_init__ warns; "
        "param_and_grad_buffer:_ParamAndGradBuffer.__init__ then calls replace_raw_data, which raises "
        "NotImplementedError for an MXFP8Tensor"
    ),
)
def mxfp8_param_gather_buffer(run: ResolvedRun) -> Iterator[Finding]:
    recipe = run.quantization
    if recipe is None or run.fsdp or not run.on(recipe.gather_flag):
        return
    for flag in recipe.gather_flags:
        if not run.on(flag):
            message = f"{recipe.name} parameter gather needs {flag}: without it Megatron fails when it wraps the model"
            fix = f"add `{flag}: true`; `precision.param_gather` sets it automatically"
            yield Finding(message, run.where(recipe.gather_flag), fix)
