"""Changes of one setting of a recipe, in search of the nearest one that is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fp8launch.engines.base import Layout
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.schema import Flag, load_schema
from fp8launch.plugins.prove.part import Part
from fp8launch.plugins.prove.settings import divides, has_part, why_left_out
from fp8launch.plugins.prove.small import SmallRun, small_run
from fp8launch.plugins.validators.refusals import recipe_field

# Sizes of the layout that become 1; the ranks that this frees train other samples.
_SIZES = {
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_model_parallel_size": "ep",
    "expert_tensor_parallel_size": "",
}
# Of a setting with many values, so many others are tried.
_MOST_CHOICES = 2


@dataclass(frozen=True)
class Trial:
    """A change: the flag and Megatron's attribute, `text` in the words of the recipe, and the run with it."""

    flag: str
    attribute: str
    text: str
    run: SmallRun


def trials_of(part: Part) -> Iterator[Trial]:
    """Yield changes of one setting each: a switch off, a size 1, or another choice."""
    schema = load_schema(part.seen.args.version)
    for name, value in part.values.items():
        flag = schema.find(name)
        if flag is None or not has_part(name) or why_left_out(name, value, part.device) is not None:
            continue
        for other in _others(flag, value):
            values = {**part.values, name: other}
            layout = _layout(part.seen.layout, name)
            run = small_run({key: one for key, one in values.items() if one is not None}, layout, part.device)
            shown = "null" if other is None else other
            yield Trial(name, flag.dest, f"{recipe_field(part.seen, name) or name}={shown}", run)


def by_relevance(trials: Sequence[Trial], read: Sequence[str]) -> list[Trial]:
    """Sort changes: first settings that the code around the differing tensors reads, then settings that divide work."""

    def distance(trial: Trial) -> tuple[int, int]:
        for name in (trial.attribute, trial.flag):
            if name in read:
                return 0, read.index(name)
        return (1 if divides(trial.flag) else 2), 0

    return sorted(trials, key=distance)


def _others(flag: Flag, value: FlagValue) -> list[FlagValue]:
    if flag.name in _SIZES:
        if not isinstance(value, int) or value == 1:
            return []
        return [None if flag.name == "expert_tensor_parallel_size" else 1]
    if value is True and not flag.takes_value:
        return [None]
    if flag.choices:
        stated = value if isinstance(value, list) else [value]
        found: list[FlagValue] = [choice for choice in flag.choices if choice not in stated]
        return found[:_MOST_CHOICES]
    return []


def _layout(layout: Layout, name: str) -> Layout:
    size = _SIZES.get(name)
    if not size:
        return layout
    factor = getattr(layout, size)
    if size == "ep":
        return replace(layout, ep=1)
    freed = replace(layout, dp=layout.dp * factor, microbatches=max(layout.microbatches // factor, 1))
    if size == "pp":
        return replace(freed, pp=1, vp=1)
    return replace(freed, **{size: 1})
