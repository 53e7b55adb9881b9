"""The search for the fastest layouts that fit: best first, by predicted time.

Every legal division is predicted without memory savings, which bounds its time from below, and queued by that time. The
division with the least time leaves the queue first. If it does not fit, its ways to save memory are predicted and
queued. A layout that leaves the queue and fits is therefore the fastest of all remaining ones.
"""

from __future__ import annotations

import bisect
import contextlib
import gc
import heapq
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from fp8launch.megatron.model_arithmetic import Arguments, hybrid_layers, whole
from fp8launch.plugins.estimate.memory import MemoryEstimate, usable_bytes
from fp8launch.plugins.plan.change import Change, Target
from fp8launch.plugins.plan.divisions import divisions
from fp8launch.plugins.plan.execution import layer_graphs
from fp8launch.plugins.plan.fitting import divides, fits_host, is_too_large, memory_of, parameters_of
from fp8launch.plugins.plan.layouts import Layout, Search, family_of
from fp8launch.plugins.plan.pipelines import lighter_last_stage
from fp8launch.plugins.plan.savings import (
    gathers,
    layer_recomputes,
    module_recomputes,
    no_savings,
    offloads,
    smaller_types,
)
from fp8launch.plugins.plan.step_time import LayerTimes, StepTime, least_pipeline_ms, stage_times, step_time_at

MISSES = 3
# Settings that some engines' recipes have no field for, with a recipe key of each.
_OPTIONAL = {
    "FSDP": "megatron.no_gradient_accumulation_fusion",
    "HybridEP": "megatron.moe_flex_dispatcher_backend",
    "CUDA graphs of layers": "megatron.cuda_graph_impl",
    "bf16 moments": "optimizer.exp_avg",
}


def search(
    bases: Sequence[Change],
    target: Target,
    top: int,
    by_memory: bool = False,
    every_split: bool = False,
    own: bool = False,
) -> Search:
    """Find the `top` best layouts of the runs `bases`, which have all their arguments and differ in precision.

    With `own` the layouts of `bases` themselves are searched too. `by_memory` ranks by peak memory instead of time. Of
    layouts that differ only in virtual stages and memory savings, the best is kept; with `every_split`, the fastest
    of each split of the layers.
    """
    with _no_garbage_collection():
        return _search(bases, target, top, by_memory, every_split, own)


def _search(bases: Sequence[Change], target: Target, top: int, by_memory: bool, every_split: bool, own: bool) -> Search:
    # Its own function, so that what the search reached is released before the collector would visit it.
    finder = _Finder(target, of_families=not (by_memory or every_split))
    for base in bases:
        if own:
            finder.add_own(base)
        finder.add_divisions(base)
    finder.run(None if by_memory else top)
    if by_memory:
        found = _smallest_of_families(finder.found.values())
    else:
        # The bounds by which the queue is ordered are not exact.
        found = sorted(finder.found.values(), key=lambda layout: layout.step.ms)
    misses = finder.nearest_misses({layout.family for layout in found})
    return Search(tuple(found[:top]), tuple(misses), finder.legal)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause the garbage collector: the search makes no reference cycles, but each collection visits all its objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def not_varied(args: Arguments, target: Target) -> list[str]:
    """Return what is not varied because recipes of this engine have no field for it."""
    keys = dict(_OPTIONAL)
    if whole(args, "num_experts"):
        del keys["FSDP"]
    else:
        del keys["HybridEP"]
    return [name for name, key in keys.items() if not target.writable({key: "true"})]


_Sized = TypeVar("_Sized", bound="Layout | _Miss")


def _smallest_of_families(layouts: Iterable[_Sized]) -> list[_Sized]:
    """Return the layout with the least memory of each family, the smallest first."""
    found: dict[Hashable, _Sized] = {}
    for layout in sorted(layouts, key=lambda one: (one.memory.total, whole(one.change.args, "micro_batch_size") or 1)):
        found.setdefault(layout.family, layout)
    return list(found.values())


# --- what the queue holds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Splits:
    """Divisions that differ only in the split of their pipeline."""

    key: Hashable
    splits: Sequence[Change]
    gathers: Sequence[Change]


@dataclass(frozen=True)
class _Division:
    """A division with the gathers of parameters to choose from.

    `saves` is set once its layouts without memory savings were queued.
    """

    key: Hashable
    change: Change
    gathers: Sequence[Change]
    saves: bool = False


@dataclass(frozen=True)
class _Timed:
    """A complete layout with its time. Whether it fits is not known yet."""

    key: Hashable
    change: Change
    step: StepTime


@dataclass(frozen=True)
class _Layers:
    """Recompute or offloading of as few layers as memory allows, not counted yet."""

    key: Hashable
    change: Change
    recomputes: Sequence[Change]


@dataclass(frozen=True)
class _Miss:
    """A division that does not fit, with all memory savings. Its time is predicted only if it is reported."""

    change: Change
    memory: MemoryEstimate

    @property
    def family(self) -> Hashable:
        return family_of(self.change)


@dataclass(frozen=True)
class _Unmeasured:
    """A division whose memory was not estimated, because a smaller or larger micro batch shows that it does not fit.

    It needs at least `least` bytes.
    """

    item: _Division
    least: float


_Queued: TypeAlias = _Splits | _Division | _Timed | _Layers


class _Finder:
    def __init__(self, target: Target, of_families: bool) -> None:
        self.found: dict[Hashable, Layout] = {}
        self._misses: list[_Miss] = []
        self._unmeasured: list[_Unmeasured] = []
        # Bytes by micro batch of divisions that do not fit, by everything but their micro batch.
        self._too_large: dict[frozenset[tuple[str, str]], dict[int, float]] = {}
        self.legal = 0
        self._target = target
        self._of_families = of_families
        self._shared = LayerTimes()
        self._steps: dict[frozenset[tuple[str, str]], tuple[Arguments, StepTime | None]] = {}
        self._memories: dict[frozenset[tuple[str, str]], tuple[Arguments, MemoryEstimate | None]] = {}
        self._queue: list[tuple[float, int, _Queued]] = []
        self._pushed = 0

    def add_own(self, base: Change) -> None:
        """Queue the unchanged layout of `base`."""
        if divides(base.args, self._target):
            self._push_timed(base, self._key(base), graphs=False)

    def add_divisions(self, base: Change) -> None:
        """Queue every division of a run."""
        target = self._target
        choices = self._writable(gathers(base.args, target.fixed))
        plain = base.then(no_savings(base.args))
        plain = Change({**plain.args, **choices[0].args}, plain.overrides)
        total, routed = parameters_of(base.args)
        split: dict[Hashable, list[Change]] = {}
        for divided in divisions(plain.args, target):
            change = plain.then(divided)
            if target.allows(divided.overrides):
                self.legal += 1
                if not is_too_large(change.args, target, total, routed):
                    # Virtual stages decide whether expert communication may be overlapped.
                    alike = family_of(change), change.args.get("overlap_moe_expert_parallel_comm")
                    split.setdefault(alike, []).append(change)
        for splits in split.values():
            self._push_splits(splits, choices)

    def _push_splits(self, splits: Sequence[Change], choices: Sequence[Change]) -> None:
        """Queue divisions that differ in the split of their pipeline by a lower bound of their times."""
        first = splits[0]
        if (whole(first.args, "pipeline_model_parallel_size") or 1) == 1:
            self._push_division(first, choices)
            return
        target = self._target
        least = least_pipeline_ms(first.args, target.gpus, target.global_batch, target.speeds, self._shared)
        if least is not None:
            self._push(least, _Splits(self._key(first), splits, choices))

    def _push_division(self, change: Change, choices: Sequence[Change]) -> None:
        step = self._step(change)
        if step is not None:
            ms = _least_ms(step, change, self._target, choices)
            self._push(ms, _Division(self._key(change), change, choices))

    def _lighter(self, change: Change) -> Change | None:
        """Return the division with a lighter last stage if that makes the slowest stage faster."""
        target = self._target
        if hybrid_layers(change.args):
            return None  # its layer pattern states where stages begin
        stages = stage_times(change.args, target.gpus, target.speeds, self._shared)
        if stages is None:
            return None
        lighter = lighter_last_stage(*stages)
        if lighter is None or not target.allows(lighter.overrides):
            return None
        return change.then(lighter)

    def run(self, top: int | None) -> None:
        """Take the fastest item from the queue until `top` layouts are found or the queue is empty."""
        while self._queue and (top is None or len(self.found) < top):
            ms, _, item = heapq.heappop(self._queue)
            if item.key in self.found:
                continue
            match item:
                case _Timed():
                    memory = self._memory(item.change)
                    if memory is not None and memory.fits(self._target.gpu):
                        self.found[item.key] = Layout(item.change, item.step, memory)
                case _Splits():
                    for change in item.splits:
                        self._push_division(change, item.gathers)
                        lighter = self._lighter(change)
                        if lighter is not None:
                            self._push_division(lighter, item.gathers)
                case _Division(saves=True):
                    self._save(item, ms)
                case _Division() if self._can_fit(item):
                    times = [self._push_timed(item.change.then(gather), item.key) for gather in item.gathers]
                    # Memory savings cost time, so no layout with savings is faster than these.
                    self._push(min(times), replace(item, saves=True))
                case _Layers():
                    fewest = self._fewest(item)
                    if fits_host(fewest.args, self._target):
                        self._push_timed(fewest, item.key)

    def _can_fit(self, item: _Division) -> bool:
        """Whether a division fits with all memory savings. If not, it is recorded as a miss."""
        micro = whole(item.change.args, "micro_batch_size") or 1
        alike = frozenset(pair for pair in item.change.overrides.items() if pair[0] != "batch.micro")
        others = self._too_large.setdefault(alike, {})
        # Activations grow with the micro batch at most in proportion, and the rest does not depend on it.
        least = max((total * min(micro / other, 1) for other, total in others.items()), default=0.0)
        if least > usable_bytes(self._target.gpu):
            self._unmeasured.append(_Unmeasured(item, least))
            return False
        miss = self._smallest(item)
        if miss is None or miss.memory.fits(self._target.gpu):
            return miss is not None
        others[micro] = miss.memory.total
        self._misses.append(miss)
        return False

    def _smallest(self, item: _Division) -> _Miss | None:
        """Return a division with all memory savings."""
        smallest = _deepest(item).then(self._types(item)[-1])
        memory = self._memory(smallest)
        return None if memory is None else _Miss(smallest, memory)

    def nearest_misses(self, known: Collection[Hashable]) -> list[Layout]:
        """Return the divisions that need the least memory of those that do not fit, without `known` families."""
        totals = [miss.memory.total for miss in _smallest_of_families(self._misses) if miss.family not in known]
        beyond = sorted(totals)[MISSES - 1] if len(totals) >= MISSES else math.inf
        for one in self._unmeasured:
            miss = self._smallest(one.item) if one.least <= beyond else None
            if miss is not None:
                self._misses.append(miss)
        nearest: list[Layout] = []
        for miss in _smallest_of_families(self._misses):
            step = self._step(miss.change) if miss.family not in known and len(nearest) < MISSES else None
            if step is not None:
                nearest.append(Layout(miss.change, step, miss.memory))
        return nearest

    def _types(self, item: _Division) -> list[Change]:
        return self._writable(smaller_types(item.change.args))

    def _writable(self, changes: Sequence[Change]) -> list[Change]:
        return [change for change in changes if self._target.writable(change.overrides)]

    def _save(self, item: _Division, ms: float) -> None:
        """Queue the memory savings of a division, with smaller types only if nothing else makes it fit."""
        args, deepest = item.change.args, _deepest(item)
        *larger, smallest = self._types(item)  # `_can_fit` found that it fits with the smallest types
        types = next((one for one in larger if self._fits(deepest.then(one))), smallest)
        modules, layers = module_recomputes(args), layer_recomputes(args)
        for gather in item.gathers:
            change = item.change.then(types).then(gather)
            for module in (Change(), *modules):
                self._push_timed(change.then(module), item.key)
            for numbers in (layers, offloads(args, self._target)):
                if numbers and self._target.allows(numbers[0].overrides):
                    self._push(ms, _Layers(item.key, change, numbers))

    def _fewest(self, item: _Layers) -> Change:
        """Return the layout that fits with the fewest recomputed or offloaded layers, by bisection."""
        number = bisect.bisect_left(
            item.recomputes,
            True,
            hi=len(item.recomputes) - 1,
            key=lambda recompute: self._fits(item.change.then(recompute)),
        )
        return item.change.then(item.recomputes[number])

    def _fits(self, change: Change) -> bool:
        memory = self._memory(change)
        return memory is not None and memory.fits(self._target.gpu)

    def _key(self, change: Change) -> Hashable:
        if self._of_families:
            return family_of(change)
        return self._pushed

    def _push(self, ms: float, item: _Queued) -> None:
        self._pushed += 1
        heapq.heappush(self._queue, (ms, self._pushed, item))

    def _push_timed(self, change: Change, key: Hashable, graphs: bool = True) -> float:
        """Queue a complete layout, with CUDA graphs of layers if it waits for the host, and return its time."""
        if not self._target.allows(change.overrides):
            return math.inf
        step = self._step(change)
        if step is None:
            return math.inf
        replayed = None
        if graphs and _ms_of(step, "host"):
            replayed = layer_graphs(change.args, self._target)
        if replayed is not None:
            faster = self._step(change.then(replayed))
            if faster is not None and faster.ms < step.ms:
                change, step = change.then(replayed), faster
        self._push(step.ms, _Timed(key, change, step))
        return step.ms

    def _memory(self, change: Change) -> MemoryEstimate | None:
        """Estimate the memory of a layout. The search reaches many layouts in several ways."""
        settings = frozenset(change.overrides.items())
        args, memory = self._memories.get(settings, (None, None))
        if args != change.args:
            memory = memory_of(change.args, self._target)
            self._memories[settings] = change.args, memory
        return memory

    def _step(self, change: Change) -> StepTime | None:
        """Predict the step of a layout."""
        target, settings = self._target, frozenset(change.overrides.items())
        args, step = self._steps.get(settings, (None, None))
        if args != change.args:
            step = step_time_at(change.args, target.gpus, target.global_batch, target.speeds, self._shared)
            self._steps[settings] = change.args, step
        return step


def _deepest(item: _Division) -> Change:
    """Return a division with all memory savings that keep its numerics."""
    args = item.change.args
    recomputes = layer_recomputes(args) or module_recomputes(args) or [Change()]
    return item.change.then(item.gathers[-1]).then(recomputes[-1])


# --- time ------------------------------------------------------------------------------------------------------------


def _least_ms(step: StepTime, change: Change, target: Target, choices: Sequence[Change]) -> float:
    """Return a lower bound of a division's time.

    Graphs may remove the host's time. Another type of gathered parameters may need less exposed communication, fewer
    launches, and no cast of the masters.
    """
    removed = 0.0
    if layer_graphs(change.args, target) or len(choices) > 1:
        removed += _ms_of(step, "host")
    if len(choices) > 1:
        removed += _ms_of(step, "DP communication") + _ms_of(step, "optimizer")
    # The term "scale" is a fraction of all other terms.
    return step.ms * (1 - removed / (step.ms - _ms_of(step, "scale")))


def _ms_of(step: StepTime, term_name: str) -> float:
    """Return the milliseconds of the terms whose names begin with `term_name`."""
    return sum(term.ms for term in step.terms if term.name.startswith(term_name))
