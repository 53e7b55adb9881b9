"""Legal layouts of a model on a number of GPUs, the fastest that fit first.

A layout is a set of changes to a run's arguments, with the recipe keys that make them. Those that break a division
rule are never built. The rest are predicted without anything that saves memory, which bounds their speed from above; in
that order each is given the cheapest saving with which it fits, until no other can be faster than the best found.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from fp8launch.megatron.architecture import architecture
from fp8launch.megatron.memory import MIB, MemoryEstimate, estimate
from fp8launch.megatron.model_arithmetic import Arguments, virtual_stages, whole
from fp8launch.megatron.parameters import whole_model
from fp8launch.planning.change import Change, Target
from fp8launch.planning.divisions import divisions
from fp8launch.planning.execution import LAYER_GRAPHS, layer_graphs
from fp8launch.planning.savings import savings
from fp8launch.planning.step_time import LayerTimes, StepTime, step_time_at

# Closer to what the GPU has, an allocator under pressure slows a run or ends it (check/memory.py warns from there).
FILLED = 0.94
MISSES = 3
# Bytes of a parameter that no saving takes away without FSDP: weight and gradient.
LEAST_BYTES = 3


_SHORT = {
    "precision.param_gather": "param gather",
    "optimizer.grad_reduce": "bf16 gradients",
    "optimizer.exp_avg": "bf16 moments",
}


@dataclass(frozen=True)
class Layout:
    """A layout with its prediction."""

    change: Change
    step: StepTime
    memory: MemoryEstimate

    @property
    def overrides(self) -> tuple[str, ...]:
        """What `--set` takes."""
        return tuple(f"{key}={value}" for key, value in self.change.overrides.items())

    @property
    def family(self) -> Hashable:
        """What layouts have in common that differ in virtual stages and memory savings alone."""
        names = (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "use_megatron_fsdp",
            "micro_batch_size",
        )
        return (*(self.change.args.get(name) for name in names), self.change.overrides.get("precision.recipe"))

    @property
    def short(self) -> str:
        """The layout in a few words, without sizes that are 1."""
        args, keys = self.change.args, self.change.overrides
        pp = whole(args, "pipeline_model_parallel_size") or 1
        sizes = {
            "TP": whole(args, "tensor_model_parallel_size"),
            "PP": pp,
            "VP": virtual_stages(args, pp),
            "CP": whole(args, "context_parallel_size"),
            "EP": whole(args, "expert_model_parallel_size"),
        }
        words = [f"{name} {size}" for name, size in sizes.items() if size and size > 1]
        if args.get("use_megatron_fsdp"):
            words.append("FSDP")
        words.append(f"micro batch {whole(args, 'micro_batch_size')}")
        if args.get("recompute_granularity") == "selective":
            words.append(f"recompute {'+'.join(args['recompute_modules'])}")
        elif args.get("recompute_granularity") == "full":
            block = args.get("recompute_method") == "block"
            layers = args["recompute_num_layers"]
            several = f"recompute {layers} layer{'s' * (layers != 1)} a stage"
            words.append(several if block else "recompute all")
        if keys.get("megatron.moe_flex_dispatcher_backend") == "hybridep":
            words.append("HybridEP")
        if "megatron.cuda_graph_impl" in keys:
            words.append("layer graphs" if args.get("cuda_graph_impl") in LAYER_GRAPHS else "no graphs")
        if "precision.recipe" in keys:
            words.append(keys["precision.recipe"])
        words += [name for key, name in _SHORT.items() if key in keys]
        return ", ".join(words)


@dataclass(frozen=True)
class Search:
    """Layouts that fit, best first; those that miss by least, with the most that they save; how many were legal."""

    layouts: tuple[Layout, ...]
    misses: tuple[Layout, ...]
    legal: int


def search(
    bases: Sequence[Change], target: Target, top: int, by_memory: bool = False, every_split: bool = False
) -> Search:
    """Find the `top` best layouts of the runs `bases`, which have all their arguments and differ in precision.

    `by_memory` ranks by peak memory instead of time. Of layouts that differ in virtual stages alone the best is kept,
    with `every_split` all.
    """
    bounds: list[tuple[float, Change]] = []
    legal = 0
    shared = LayerTimes()
    for base in bases:
        total, routed = _parameters(base.args)
        for division in divisions(base.args, target):
            legal += 1
            change = base.then(division)
            if _is_too_large(change.args, target, total, routed):
                continue
            step = step_time_at(change.args, target.gpus, target.global_batch, target.speeds, shared)
            if step is not None:
                # CUDA graphs may take the host's time away.
                host = _host_ms(step) if layer_graphs(change.args, target) else 0.0
                bounds.append((step.ms - host, change))
    bounds.sort(key=lambda one: one[0])
    found: dict[Hashable, Layout] = {}
    misses: dict[Hashable, Layout] = {}
    times: list[float] = []
    for least, change in bounds:
        if not by_memory and len(times) >= top and least >= times[top - 1]:
            break
        layout, small = _fitted(change, target)
        if layout is None:
            continue
        kept = found if small else misses
        key = layout.overrides if every_split else layout.family
        other = kept.get(key)
        if other is None or _rank(layout, by_memory or not small) < _rank(other, by_memory or not small):
            kept[key] = layout
            times = sorted(one.step.ms for one in found.values())
    best = sorted(found.values(), key=lambda one: _rank(one, by_memory))
    nearest = sorted(misses.values(), key=lambda one: _rank(one, True))
    return Search(tuple(best[:top]), tuple(nearest[:MISSES]), legal)


def _rank(layout: Layout, by_memory: bool) -> float:
    return layout.memory.total if by_memory else layout.step.ms


def _parameters(args: Arguments) -> tuple[int, int]:
    """All parameters of a model, and those of its routed experts."""
    model = architecture(args)
    if model is None:
        return 0, 0
    total, active = whole_model(model)
    if model.experts is None:
        return total, 0
    return total, round((total - active) / (1 - model.experts.top_k / model.experts.count))


def _is_too_large(args: Arguments, target: Target, total: int, routed: int) -> bool:
    """Whether weights and gradients alone exceed the GPU, so that nothing else need be computed."""
    if args.get("use_megatron_fsdp"):
        return False
    pp = whole(args, "pipeline_model_parallel_size") or 1
    dense = (total - routed) / (whole(args, "tensor_model_parallel_size") or 1)
    experts = routed / (whole(args, "expert_model_parallel_size") or 1)
    return (dense + experts) / pp * LEAST_BYTES > target.gpu.memory_gib * 1024 * MIB


def fits(memory: MemoryEstimate, target: Target) -> bool:
    return memory.total <= target.gpu.memory_gib * 1024 * MIB * FILLED


def _fitted(change: Change, target: Target) -> tuple[Layout | None, bool]:
    """A layout with the cheapest saving that makes it fit; with the greatest and False where none does."""
    ways = list(savings(change.args))
    greatest = _memory(change.then(ways[-1]).args, target)
    if greatest is None:
        return None, False
    if not fits(greatest, target):
        return _predicted(change.then(ways[-1]), greatest, target), False
    for saving in ways:
        memory = _memory(change.then(saving).args, target)
        if memory is not None and fits(memory, target):
            return _with_graphs(_predicted(change.then(saving), memory, target), target), True
    return None, False


def _host_ms(step: StepTime) -> float:
    return sum(term.ms for term in step.terms if term.name == "host")


def _with_graphs(layout: Layout | None, target: Target) -> Layout | None:
    """The layout with CUDA graphs of its layers where it would wait for the host, and they make it faster."""
    if layout is None or not _host_ms(layout.step):
        return layout
    graphs = layer_graphs(layout.change.args, target)
    other = None if graphs is None else _predicted(layout.change.then(graphs), layout.memory, target)
    return other if other is not None and other.step.ms < layout.step.ms else layout


def _memory(merged: Arguments, target: Target) -> MemoryEstimate | None:
    ranks = 1
    for kind in ("tensor_model", "pipeline_model", "context"):
        ranks *= whole(merged, f"{kind}_parallel_size") or 1
    micro = whole(merged, "micro_batch_size") or 1
    return estimate(merged, target.gpus, max(target.global_batch * ranks // (micro * target.gpus), 1), target.gpu)


def _predicted(change: Change, memory: MemoryEstimate, target: Target) -> Layout | None:
    step = step_time_at(change.args, target.gpus, target.global_batch, target.speeds)
    return None if step is None else Layout(change, step, memory)
