"""Rules of `check` about `launch.profile`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.cluster.images import catalogue
from fp8launch.untyped import as_int
from fp8launch.wording import counted, joined

_SOURCE = "plugins/measure/injob/profiled_range.py"
# Images with Nsight Systems, by the beginning of their URI: NVIDIA's release notes of PyTorch's container list it, and
# NeMo's is built on that.
_WITH_NSYS = ("nvcr.io/nvidia/nemo:", "nvcr.io/nvidia/pytorch:")


def _where(run: ResolvedRun, field: str) -> str:
    """Return the line of a field of `launch.profile`, or of its short form."""
    if run.loaded.recipe.launch.profile_iteration is not None:
        return run.loaded.where("launch", "profile_iteration")
    return run.loaded.where("launch", "profile", field)


@rule("profile-range", "error", source=_SOURCE, scope="hardware")
def profile_range(run: ResolvedRun) -> Iterator[Finding]:
    """Report a range that ends after the run, for which no profile is written."""
    profile, iterations = run.loaded.recipe.launch.profiled, as_int(run.value("train_iters"))
    if profile and iterations and profile.last > iterations:
        message = f"the profile ends with iteration {profile.last}, but the run has only {iterations}"
        yield Finding(message, _where(run, "end"), f"set `end` to at most {iterations}")


@rule("profile-ranks", "error", source=_SOURCE, scope="hardware")
def profile_ranks(run: ResolvedRun) -> Iterator[Finding]:
    profile, world = run.loaded.recipe.launch.profiled, run.layout.world
    outside = [rank for rank in profile.ranks if rank >= world] if profile else []
    if outside:
        named = ("rank " if len(outside) == 1 else "ranks ") + joined([str(rank) for rank in outside])
        message = f"the profile is for {named}, but the run has {counted(world, 'rank')}, numbered from 0"
        yield Finding(message, _where(run, "ranks"), f"set `ranks` to numbers below {world}")


@rule("profile-needs-gpu", "error", source=_SOURCE, scope="hardware")
def profile_needs_gpu(run: ResolvedRun) -> Iterator[Finding]:
    profile = run.loaded.recipe.launch.profiled
    if profile and profile.tool != "torch" and run.loaded.recipe.resources.gpu == "cpu":
        message = f"the profile by {profile.tool} needs a GPU, and this run has none"
        yield Finding(message, _where(run, "tool"), "use `tool: torch`, which also profiles a CPU")


@rule("profile-twice", "error", source="megatron/training/training.py: train", scope="megatron_lm")
def profile_twice(run: ResolvedRun) -> Iterator[Finding]:
    """Report a second profiler: only one can use the GPU's counters."""
    if run.loaded.recipe.launch.profiled and run.value("profile"):
        message = "launch.profile and Megatron's `profile` both start a profiler, and a GPU accepts only one"
        yield Finding(message, run.where("profile"), "remove one of them")


@rule("profile-nsys", "warning", source="the release notes of NVIDIA's PyTorch container", scope="hardware")
def profile_nsys(run: ResolvedRun) -> Iterator[Finding]:
    """Warn if it is not known whether the job has nsys."""
    recipe = run.loaded.recipe
    profile, image = recipe.launch.profiled, recipe.container.image
    if profile is None or profile.tool != "nsys" or recipe.resources.gpu == "cpu":
        return
    uri = catalogue().get(image or "", {}).get("uri", image or "").removeprefix("docker://").replace("#", "/", 1)
    named = any(PurePath(path).name == "nsys" for path in recipe.container.contains)
    if uri.startswith(_WITH_NSYS) or named:
        return
    place = f"the image {image}" if image else "a run without an image"
    message = f"{place} is not known to have nsys, without which the run trains unprofiled"
    fix = "use an image of NeMo or of PyTorch by NVIDIA, or `tool: torch`; or state container.contains: [/PATH/nsys]"
    yield Finding(message, _where(run, "tool"), fix)


@rule("profile-leaves-few", "warning", source="report/steady_state.py", scope="hardware")
def profile_leaves_few(run: ResolvedRun) -> Iterator[Finding]:
    """Warn if reports have too few iterations left for the throughput."""
    profile, iterations = run.loaded.recipe.launch.profiled, as_int(run.value("train_iters"))
    if profile is None or not iterations or profile.last > iterations:
        return
    # Only a recipe with a profile needs the reports.
    from fp8launch.report.steady_state import FEWEST, START_LINES

    first = 1 if profile.tool == "memory" else profile.start
    left = max(0, first - 1 - START_LINES) + max(0, iterations - max(profile.last + 1, START_LINES))
    if left < FEWEST:
        message = (
            f"reports exclude profiled iterations, the one after them and the first {START_LINES}, which leaves {left} "
            f"of {iterations} for the throughput"
        )
        yield Finding(message, _where(run, "end"), "profile fewer iterations, or train longer")
