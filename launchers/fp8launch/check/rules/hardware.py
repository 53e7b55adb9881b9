"""Check each quantization recipe against the GPU and the CUDA version of the job."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import QuantizationRecipe, quantization_recipes
from fp8launch.megatron.versions import Release

_TE = "TransformerEngine pytorch/quantization.py"
LEAST_FP8 = (8, 9)


def _text(version: Release) -> str:
    return ".".join(map(str, version))


def _capability(run: ResolvedRun) -> str:
    return f"{run.gpu.name} (compute capability {run.gpu.capability[0]}.{run.gpu.capability[1]})"


def _needs_gpu(recipe: QuantizationRecipe) -> None:
    """Register the rule for a recipe that only some FP8 GPUs support."""
    able = [gpu.name.upper() for gpu in GPUS.values() if recipe.runs_on(gpu.capability)]
    unable = [gpu for gpu in GPUS.values() if gpu.capability >= LEAST_FP8 and not recipe.runs_on(gpu.capability)]
    if not unable:
        return
    generation = "blackwell" if recipe.least_capability >= (10, 0) else "hopper"

    @rule(
        f"{recipe.name}-needs-{generation}",
        "error",
        source=f"{_TE} _compute_*_support; hardware/quantization.py",
        scope="hardware",
    )
    def recipe_needs_its_gpu(run: ResolvedRun) -> Iterator[Finding]:
        capability = run.gpu.capability
        if run.precision == recipe.name and capability >= LEAST_FP8 and not recipe.runs_on(capability):
            message = f"{recipe.name} runs only on {', '.join(able)}, not on {_capability(run)}"
            fix = f"use precision.recipe tensorwise, or one of these GPUs (such as resources.gpu: {able[0].lower()})"
            yield Finding(message, run.where(recipe.recipe_flag, recipe.operands), fix)


def _is_emulated(recipe: QuantizationRecipe) -> None:
    """Register the rule for a recipe that newer GPUs only emulate."""
    if recipe.emulated_from is None:
        return
    least = recipe.emulated_from

    @rule(
        f"{recipe.name}-emulated",
        "warning",
        source="TransformerEngine common/gemm: emulated with MXFP8 from 10.0 on",
        scope="hardware",
    )
    def recipe_is_emulated(run: ResolvedRun) -> Iterator[Finding]:
        if run.precision == recipe.name and run.gpu.capability >= least:
            message = (
                f"{recipe.name} on {_capability(run)} is emulated with MXFP8 and power-of-two scales: "
                "it is slower than mxfp8, and its numerics differ from Hopper's"
            )
            fix = "use mxfp8 on this GPU, or silence this warning to compare with Hopper runs"
            yield Finding(message, run.where(recipe.recipe_flag), fix)


def _needs_cuda(recipe: QuantizationRecipe) -> None:
    """Register the rule for a recipe that needs a newer CUDA version than FP8 in general."""
    if recipe.least_cuda is None:
        return
    least = recipe.least_cuda

    @rule(
        f"{recipe.name}-needs-cuda",
        "error",
        source=f"{_TE} _compute_*_support; hardware/quantization.py",
        scope="hardware",
    )
    def recipe_needs_its_cuda(run: ResolvedRun) -> Iterator[Finding]:
        cuda = run.software.cuda
        if run.precision == recipe.name and recipe.runs_on(run.gpu.capability) and cuda is not None and cuda < least:
            message = f"{recipe.name} needs CUDA {_text(least)} or newer, but the job uses {_text(cuda)}"
            yield Finding(message, run.where(recipe.recipe_flag), "use a newer image, or tensorwise")


for _recipe in quantization_recipes().values():
    _needs_gpu(_recipe)
    _is_emulated(_recipe)
    _needs_cuda(_recipe)
