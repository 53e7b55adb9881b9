"""Quantization recipes against the GPU, CUDA and Transformer Engine that the job will find."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Finding, rule

_TE = "TransformerEngine pytorch/quantization.py"
_PRECISION = ("fp8_recipe", "fp8", "fp4")


def _capability(run: Facts) -> str:
    return f"{run.gpu.name} (compute capability {run.gpu.capability[0]}.{run.gpu.capability[1]})"


@rule("fp8-needs-newer-gpu", "error", source=f"{_TE} _compute_fp8_support: 8.9 or higher")
def fp8_needs_ada(run: Facts) -> Iterator[Finding]:
    if run.quantized and run.gpu.name != "cpu" and run.gpu.capability < (8, 9):
        message = f"{run.precision} runs on compute capability 8.9 and above, not on {_capability(run)}"
        yield Finding(message, run.where(*_PRECISION), "use `precision: {recipe: bf16}`, or an H100 or newer")


@rule("mxfp8-needs-blackwell", "error", source=f"{_TE} _compute_mxfp8_support: 10.0 and above, not 12.0 and above")
def mxfp8_needs_blackwell(run: Facts) -> Iterator[Finding]:
    if run.precision == "mxfp8" and run.gpu.capability >= (8, 9) and not (10, 0) <= run.gpu.capability < (12, 0):
        message = f"mxfp8 runs on B200, B300, GB200 and GB300 only, not on {_capability(run)}"
        yield Finding(message, run.where("fp8_recipe"), "use tensorwise, or a Blackwell data-centre GPU")


@rule("nvfp4-needs-blackwell", "error", source=f"{_TE} _compute_nvfp4_support: 10.0 and above")
def nvfp4_needs_blackwell(run: Facts) -> Iterator[Finding]:
    if run.precision == "nvfp4" and (8, 9) <= run.gpu.capability < (10, 0):
        message = f"nvfp4 runs on compute capability 10.0 and above, not on {_capability(run)}"
        yield Finding(message, run.where("fp4_recipe", "fp4"), "use an FP8 recipe, or a Blackwell GPU")


@rule("blockwise-emulated", "warning", source="TransformerEngine common/gemm: emulated with MXFP8 from 10.0 on")
def blockwise_is_emulated_on_blackwell(run: Facts) -> Iterator[Finding]:
    if run.precision == "blockwise" and run.gpu.capability >= (10, 0):
        message = (
            f"blockwise on {_capability(run)} is emulated with MXFP8 and power-of-two scales: "
            "slower than mxfp8, and other numerics than on Hopper"
        )
        yield Finding(message, run.where("fp8_recipe"), "use mxfp8 there, or silence this to compare with Hopper runs")


@rule("blockwise-needs-cuda", "error", source=f"{_TE} _compute_fp8_block_scaling_support: 9.0 and CUDA 12.9")
def blockwise_needs_cuda(run: Facts) -> Iterator[Finding]:
    cuda = run.software.cuda
    if run.precision != "blockwise":
        return
    if (8, 9) <= run.gpu.capability < (9, 0):
        yield Finding(f"blockwise needs Hopper, not {_capability(run)}", run.where("fp8_recipe"), "use tensorwise")
    elif cuda is not None and cuda < (12, 9):
        message = f"blockwise needs CUDA 12.9 or newer, and the job will find {'.'.join(map(str, cuda))}"
        yield Finding(message, run.where("fp8_recipe"), "use a newer image, or tensorwise")


@rule("cuda-too-old", "error", source="TransformerEngine README: CUDA 12.8 for Blackwell, 12.1 for FP8 at all")
def cuda_knows_the_gpu(run: Facts) -> Iterator[Finding]:
    cuda = run.software.cuda
    if cuda is None or run.gpu.name == "cpu" or not run.quantized:
        return
    least = (12, 8) if run.gpu.capability >= (10, 0) else (12, 1)
    if cuda < least:
        found, needed = ".".join(map(str, cuda)), ".".join(map(str, least))
        message = f"{run.precision} on {_capability(run)} needs CUDA {needed} or newer, and the job will find {found}"
        yield Finding(message, run.where(*_PRECISION), "use a newer image, or correct software.cuda")


# megatron/core/fp8_utils.py:730-766 and arguments.py:1073; the oldest release that has the recipe.
_FIRST_TE = {"tensorwise": (2, 2), "blockwise": (2, 3), "mxfp8": (2, 1), "nvfp4": (2, 7), "custom": (2, 9)}


@rule(
    "te-too-old",
    "error",
    source="megatron/core/fp8_utils.py:730-766 and 305, megatron/training/arguments.py:1073",
    says=r"--fp4-format requires Transformer Engine",
)
def te_has_the_recipe(run: Facts) -> Iterator[Finding]:
    te, least = run.software.transformer_engine, _FIRST_TE.get(run.precision)
    if te is not None and least is not None and te < least:
        found, needed = ".".join(map(str, te)), ".".join(map(str, least))
        message = f"{run.precision} needs Transformer Engine {needed} or newer, and the job will find {found}"
        yield Finding(message, run.where(*_PRECISION), "use a newer image, or correct software.transformer_engine")


# Kernels that Transformer Engine has since: megatron/core/transformer/moe/moe_utils.py:129, core/extensions/
# transformer_engine.py:917. Both are missed when the layer is built or first runs.
_FLAG_TE = {"moe_router_fusion": (2, 7), "delay_wgrad_compute": (2, 3)}


@rule("te-too-old-for-flag", "error", source="moe_utils.py:129; core/extensions/transformer_engine.py:917")
def te_has_the_kernel(run: Facts) -> Iterator[Finding]:
    te = run.software.transformer_engine
    for flag, least in _FLAG_TE.items():
        if te is not None and run.on(flag) and te < least:
            found, needed = ".".join(map(str, te)), ".".join(map(str, least))
            message = f"{flag} needs Transformer Engine {needed} or newer, and the job will find {found}"
            yield Finding(message, run.where(flag), "drop it, or use a newer image")
