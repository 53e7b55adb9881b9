"""Check that a run fits on its GPUs: an error if it cannot, a warning if it may not. Fixes say how much they save.

The module `memory` has the estimate. benchmarks/h200/memory_bounds.md compares it with measured runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fp8launch.check.memory import CODES, MemoryModel
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.diagnostics import Problem
from fp8launch.megatron.architecture import division
from fp8launch.plugins.estimate.memory import MIB, MemoryEstimate, Term, estimate, microbatches, usable_bytes

# A run above the limit of `usable_bytes` is reported. An error also stops the submission, so it requires that the run
# would not fit even if the estimate were too high by this factor, as it may be for software and models that were not
# measured. NVIDIA publishes its 8B FP8 example for 8 x H100; by this estimate, it needs 3 % more memory than they have.
DOUBT = 1.1
SUGGESTIONS = 3


def problems(run: ResolvedRun) -> Iterator[Problem]:
    """Yield at most one problem: the run does not fit, or barely fits. CPUs and uncounted models have none."""
    found = covered_estimate(run)
    if found is None:
        return
    capacity = run.gpu.memory_gib * 1024 * MIB
    if found.least > DOUBT * capacity:
        yield _problem(run, found, capacity, "does-not-fit", "will not fit")
    elif not found.fits(run.gpu):
        verdict = "will probably not fit" if found.total > capacity else "may not fit"
        yield _problem(run, found, capacity, "tight-memory", verdict)


def summary(run: ResolvedRun) -> str:
    """Return the memory that a run needs on its GPUs, as a phrase."""
    found = covered_estimate(run)
    if found is None:
        return "not estimated for this run"
    certainty = f"estimated ± {found.uncertainty:.0%}" if run.gpu.measured else "estimated, never measured"
    return f"{found.total / 2**30:.1f} of {run.gpu.memory_gib:.1f} GiB per GPU, {certainty}"


MODEL = MemoryModel(problems, summary)


def covered_estimate(run: ResolvedRun) -> MemoryEstimate | None:
    """Return the estimate for a run that the memory model covers: none for CPUs, other layers and uncounted models."""
    return run_estimate(run) if run.gpu.memory_gib and run.is_estimated else None


def run_estimate(run: ResolvedRun, changes: Mapping[str, object] | None = None) -> MemoryEstimate | None:
    """Return the estimate for a run, with some arguments changed (by Megatron's attribute name)."""
    args = {**run.arguments, **(changes or {})}
    world = run.layout.world
    number = microbatches(args, division(args, world), run.layout.global_batch)
    return estimate(args, world, number, run.gpu)


def _problem(run: ResolvedRun, found: MemoryEstimate, capacity: float, code: str, verdict: str) -> Problem:
    stage = f" on pipeline stage {found.stage}" if found.stages > 1 else ""
    largest = sorted((t for t in found.terms if t.certainty != "reserve"), key=lambda t: -t.bytes)[:3]
    message = (
        f"the run {verdict} on {run.gpu.name}: it needs about {_gib(found.total)} of {_gib(capacity)} per GPU{stage} "
        f"(PyTorch allocates {_gib(found.peak)}; the largest parts are {', '.join(map(_term, largest))})"
    )
    where = run.where("micro_batch_size", "recompute_granularity", "gpu")
    return Problem(CODES[code], code, message, where, _fix(run, found, capacity))


def _fix(run: ResolvedRun, found: MemoryEstimate, capacity: float) -> str:
    """Return the changes that save memory, each with its estimate. Changes that suffice come first."""
    saved = []
    for order, (words, changes) in enumerate(_remedies(run)):
        other = run_estimate(run, changes)
        if other is not None and other.total < 0.99 * found.total:
            saved.append((other.total > usable_bytes(run.gpu), order, f"{words} ({_gib(other.total)})"))
    if not saved:
        return "divide the model over more GPUs (tensor, pipeline or context parallel), or use a GPU with more memory"
    return "; or ".join(words for _, _, words in sorted(saved)[:SUGGESTIONS])


def _remedies(run: ResolvedRun) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield possible changes, starting with those that cost the least time."""
    if not run.engine.covers("megatron_lm"):
        return  # the changes below are Megatron-LM flags; other engines have their own keys
    if not run.on("use_distributed_optimizer") and not run.fsdp:
        yield "use megatron.use_distributed_optimizer", {"use_distributed_optimizer": True}
    if not run.on("grad_reduce_in_bf16"):
        yield "reduce gradients in bf16 (optimizer.grad_reduce: bf16)", {"grad_reduce_in_bf16": True}
    recipe = run.quantization
    if recipe and recipe.gather_is_proven and not run.on(recipe.gather_flag):
        flags = (recipe.gather_flag, *recipe.gather_flags)
        yield (
            f"keep weights in {recipe.operands.upper()} only (precision.param_gather: true)",
            dict.fromkeys(flags, True),
        )
    if run.on("cross_entropy_loss_fusion") and run.value("cross_entropy_fusion_impl") != "te":
        yield (
            "remove cross_entropy_loss_fusion, which keeps a second fp32 copy of the logits",
            {"cross_entropy_loss_fusion": False},
        )
    if run.layout.micro_batch > 1:
        half = run.layout.micro_batch // 2
        yield f"batch.micro: {half}", {"micro_batch_size": half}
    if not run.on("recompute_granularity"):
        layers = max(run.integer("num_layers") // run.layout.pp // run.layout.vp // 4, 1)
        full: dict[str, object] = {"recompute_granularity": "full", "recompute_num_layers": layers}
        yield (
            f"recompute {layers} layers of each stage (recompute_granularity: full, recompute_method: block, "
            f"recompute_num_layers: {layers})",
            full | {"recompute_method": "block"},
        )
        yield (
            "recompute every layer (recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1)",
            full | {"recompute_method": "uniform", "recompute_num_layers": 1},
        )
    if run.precision != "fp32" and not run.on("use_precision_aware_optimizer") and run.on("use_distributed_optimizer"):
        moments = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
        yield (
            "keep Adam's moments in bf16 (optimizer.exp_avg and exp_avg_sq)",
            {"use_precision_aware_optimizer": True, **moments},
        )
    if run.layout.dp % 2 == 0 and run.layout.vp == 1:
        yield f"parallel.cp: {run.layout.cp * 2}", {"context_parallel_size": run.layout.cp * 2}
        yield (
            f"parallel.tp: {run.layout.tp * 2}",
            {"tensor_model_parallel_size": run.layout.tp * 2, "sequence_parallel": True},
        )


def _term(term: Term) -> str:
    return f"{term.name} {_gib(term.bytes)}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
