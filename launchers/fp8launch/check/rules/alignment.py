"""What dimensions the quantized matrix products can have, on each rank."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Finding, rule
from fp8launch.check.shape import Width, tokens, widths

_TE = "TransformerEngine"
# Multiples that a feature dimension must be, by recipe. Per tensor and blockwise: utils.py assert_dim_for_fp8_exec for
# inputs and weights, cublaslt_gemm.cu "Leading dimension requirement" for outputs, which lead in the backward pass.
FEATURES = {"delayed": 16, "tensorwise": 16, "blockwise": 16, "mxfp8": 32, "nvfp4": 16}


@rule(
    "fp8-dimension",
    "error",
    source=f"{_TE} pytorch/utils.py:614, common/gemm/cublaslt_gemm.cu:161, pytorch/csrc/quantizer.cpp:1514 and 1982",
)
def features_are_aligned(run: Facts) -> Iterator[Finding]:
    step = FEATURES.get(run.precision)
    if step is None or not run.uses_te:
        return
    for width in widths(run):
        if width.size is not None and width.size % step:
            yield _misaligned(run, width, step)


def _misaligned(run: Facts, width: Width, step: int) -> Finding:
    on_rank = f"{width.total} over {width.parts} ranks is {width.size}" if width.parts > 1 else f"is {width.total}"
    whole = step * width.parts
    below, above = width.total // whole * whole, (width.total // whole + 1) * whole
    fix = f"make it a multiple of {whole}, such as {f'{below} or ' if below else ''}{above}"
    message = f"{width.name} {on_rank}, no multiple of {step} as {run.precision} needs of every linear layer"
    return Finding(message, run.where(*width.dests), fix + (", or use less parallelism" if width.parts > 1 else ""))


@rule(
    "fp8-tokens",
    "error",
    source=f"{_TE} pytorch/utils.py:614 (8), common/gemm/cublaslt_gemm.cu:161 (16 in the weight gradient where only "
    "TN products exist), pytorch/csrc/quantizer.cpp:1514 (mxfp8 32) and 1982 (nvfp4 16)",
)
def tokens_are_aligned(run: Facts) -> Iterator[Finding]:
    found = tokens(run)
    if found is None or not run.quantized or not run.uses_te:
        return
    gathered, local = found
    step = {"mxfp8": 32, "nvfp4": 16}.get(run.precision, 8)
    # The weight gradient sums over tokens. Hopper multiplies FP8 with both operands' rows along that sum only, as
    # blockwise does everywhere, and rows must be multiples of 16 bytes.
    tn_only = run.precision == "blockwise" or run.gpu.capability < (10, 0)
    in_sum = 16 if tn_only and step == 8 and (run.precision != "delayed" or run.on("fp8_wgrad")) else step
    bad = next(((n, s) for n, s in ((gathered, in_sum), (local, step)) if n % s), None)
    if bad is None:
        return
    split = [f"/ {name} {n}" for name, n in (("CP", run.layout.cp), ("SP", gathered // local)) if n > 1]
    message = (
        f"a micro batch has {bad[0]} tokens on a rank ({run.value('seq_length')} x {run.layout.micro_batch} "
        f"{' '.join(split)}), no multiple of {bad[1]} as {run.precision} needs"
    ).replace(" )", ")")
    fix = f"choose batch.sequence x batch.micro as a multiple of {bad[1]} x context and sequence parallelism"
    yield Finding(message, run.where("seq_length", "micro_batch_size"), fix)


@rule("blockwise-ragged", "warning", source=f"{_TE} pytorch/tensor/float8_blockwise_tensor.py:235")
def blocks_are_full(run: Facts) -> Iterator[Finding]:
    """Ragged blocks are padded: they run, but cost a full block, and are gathered in bf16 where tensors are split."""
    if run.precision != "blockwise" or not run.uses_te:
        return
    plain = ("hidden_size", "ffn_hidden_size", "moe_ffn_hidden_size")
    for width in widths(run):
        if width.name in plain and width.size is not None and width.size % 128 and not width.size % 16:
            message = f"{width.name} is {width.size} on each rank, no multiple of blockwise's blocks of 128"
            yield Finding(message, run.where(*width.dests), f"make it a multiple of {128 * width.parts}")


@rule(
    "tp-overlap-dimension",
    "error",
    source=f"{_TE} common/comm_gemm_overlap/comm_gemm_overlap.cpp:262-265: Userbuffers needs MXFP8 dims % 128",
)
def overlapped_mxfp8_is_aligned(run: Facts) -> Iterator[Finding]:
    if run.precision != "mxfp8" or not run.on("tp_comm_overlap") or not run.uses_te or run.layout.tp < 2:
        return
    for width in widths(run):
        if width.name in ("hidden_size", "ffn_hidden_size") and width.size is not None and width.size % 128:
            message = (
                f"{width.name} is {width.size} on each rank, no multiple of 128 as tp_comm_overlap with mxfp8 needs"
            )
            yield Finding(message, run.where(*width.dests), f"make it a multiple of {128 * width.parts}")
    found = tokens(run)
    if found is not None and found[1] % 128:
        message = (
            f"a rank holds {found[1]} tokens of a micro batch, no multiple of 128 as tp_comm_overlap with mxfp8 needs"
        )
        yield Finding(message, run.where("seq_length"), f"make batch.sequence a multiple of {128 * run.layout.tp}")


@rule(
    "tp-overlap-recipe",
    "error",
    source=f"{_TE} common/comm_gemm_overlap/comm_gemm_overlap.cpp:225: per-tensor and MXFP8 only",
)
def overlap_knows_the_recipe(run: Facts) -> Iterator[Finding]:
    if run.precision in ("blockwise", "nvfp4") and run.on("tp_comm_overlap") and run.layout.tp > 1:
        message = f"tp_comm_overlap moves per-tensor FP8 and mxfp8 only, not {run.precision}"
        yield Finding(message, run.where("tp_comm_overlap"), "drop tp_comm_overlap, or use tensorwise or mxfp8")
