"""What a step of the real run sends and computes, from four recorded rehearsals in small.

Sizes are products. In a wide rehearsal every shrunk width is multiplied by a prime of its own, so the primes in the
ratio of two sizes name the widths in it, and the real size follows exactly. The other two rehearsals have one more
layer in each pipeline chunk, and each records steps of two numbers of micro batches; counts are linear in both.
Experts keep their real number, and tokens are spread evenly over them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from typing import Any

from fp8launch.engines.base import EngineArguments, Layout
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.model_arithmetic import ffn_width, layer_count, padded_vocab_size
from fp8launch.rehearsal.shrink import BLOCK, LATENT, Shrunk, fewer_layers, hybrid_chunks, shrink

# Widths that are scaled, each with its prime: small ones where a width costs the most.
PRIMES = {
    "seq_length": 2, "hidden_size": 3, "moe_ffn_hidden_size": 5, "ffn_hidden_size": 7,
    "moe_shared_expert_intermediate_size": 11, "vocab_size": 13, "moe_latent_size": 17,
}  # fmt: skip
# A width that follows another one.
FOLLOWS = {"max_position_embeddings": "seq_length"}


class NotCountable(Exception):
    """The recorded rehearsals do not correspond to each other; the message says where."""


@dataclass(frozen=True)
class CountingPlan:
    """The rehearsals, in pairs of a small and a wide one, the second pair with more layers; and what leads to the run.

    `widths` are (real, small) by flag. `depth` is how many times the difference between the pairs is added.
    `microbatches` are those of the recorded steps, the larger number first, and `real_microbatches` the run's.
    """

    pairs: tuple[tuple[Shrunk, Shrunk], ...]
    widths: Mapping[str, tuple[int, int]]
    depth: Fraction
    microbatches: tuple[int, int]
    real_microbatches: int


@dataclass(frozen=True)
class Counts:
    """One step of one rank. Entries are as `--json` has them; `exact` is false where a size could not be resolved.

    `without` names what moves data past torch's process groups, which are all that is recorded.
    """

    traffic: tuple[dict[str, Any], ...]
    gemms: tuple[dict[str, Any], ...]
    exact: bool
    without: tuple[str, ...] = ()


def counting_plan(args: EngineArguments, layout: Layout) -> CountingPlan:
    """How to count a step of this run."""
    usual = shrink(args.values, layout, parts=False)
    # A replayed graph does what was captured, out of Python's sight: nothing is captured here.
    values = {flag: value for flag, value in usual.values.items() if "cuda_graph" not in flag}
    sizes = dict(usual.sizes)
    # Beside a latent there are positions in one matrix, whose width is a sum.
    for flag in ("num_experts", "num_attention_heads", *LATENT):
        if flag in sizes:
            values[flag] = sizes.pop(flag)[0]
    widths = _widths(args, layout, values, sizes)
    values |= {flag: size for flag, (_, size) in widths.items()}
    larger = 2 * layout.pp
    values["train_iters"] = 3
    values["global_batch_size"] = layout.dp * layout.micro_batch * larger
    chunks = hybrid_chunks(args.values, layout)
    small = Shrunk(values, sizes)
    if chunks:
        models, depth = _hybrids(args, chunks, small)
    else:
        models, depth = _deeper(small, layout)
    pairs = tuple((_whole_blocks(model), _wide(model, widths)) for model in models)
    return CountingPlan(pairs, widths, depth, (larger, larger // 2), layout.microbatches)


def _wide(small: Shrunk, widths: Mapping[str, tuple[int, int]]) -> Shrunk:
    values = dict(small.values)
    for flag, (_, size) in widths.items():
        values[flag] = PRIMES[flag] * size
    for flag, leader in FOLLOWS.items():
        if flag in values and leader in widths:
            values[flag] = PRIMES[leader] * int(str(values[flag]))
    return _whole_blocks(replace(small, values=values))


def _whole_blocks(one: Shrunk) -> Shrunk:
    """A vocabulary that Megatron pads to the size meant: one less, because a tokenizer may add an entry."""
    return replace(one, values={**one.values, "vocab_size": int(str(one.values["vocab_size"])) - 1})


def _widths(
    args: EngineArguments, layout: Layout, values: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[int, int]]:
    widths = {flag: sizes[flag] for flag in PRIMES if flag in sizes}
    if "hidden_size" in values and "ffn_hidden_size" in values and "ffn_hidden_size" not in sizes:
        widths["ffn_hidden_size"] = (ffn_width(args.attributes), int(values["ffn_hidden_size"]))
    divisor = args.integer("make_vocab_size_divisible_by", BLOCK) * layout.tp
    widths["vocab_size"] = (padded_vocab_size(args.attributes) or divisor, divisor)
    return widths


def _deeper(small: Shrunk, layout: Layout) -> tuple[list[Shrunk], Fraction]:
    """The rehearsal, one with one more layer in each chunk, and how many such differences the real run has more."""
    if "num_layers" not in small.sizes:
        return [small], Fraction(0)
    real, shrunk = small.sizes["num_layers"]
    chunks = layout.pp * max(layout.vp, 1)
    values = {**small.values, "num_layers": shrunk + chunks}
    chunk = "num_layers_per_virtual_pipeline_stage"
    if chunk in values:
        values[chunk] = int(str(values[chunk])) + 1
    return [small, Shrunk(values, small.sizes)], Fraction(real - shrunk, chunks)


def _hybrids(args: EngineArguments, chunks: Sequence[str], small: Shrunk) -> tuple[list[Shrunk], Fraction]:
    """Two hybrids with fewer layers, and how many of their differences the real run has more, the same for each kind.

    Of the pairs for which there is such a number, the one with the fewest layers.
    """

    def pair(times: int) -> tuple[dict[str, FlagValue], dict[str, FlagValue]]:
        shallow = fewer_layers(args.values, chunks, lambda layers: (layers - 1) % times + 1)
        return shallow, fewer_layers(
            args.values, chunks, lambda layers: (layers - 1) % times + 1 + (layers - 1) // times
        )

    def layers(times: int) -> int:
        shallow, deep = pair(times)
        return (layer_count(shallow) or 0) + (layer_count(deep) or 0)

    times = min(range(1, max(map(len, chunks)) + 1), key=layers)
    found = []
    for pattern in pair(times):
        one = Shrunk({**small.values, **pattern}, small.sizes)
        if one not in found:
            found.append(one)
    return found, Fraction(times)


def counts(plan: CountingPlan, recorded: Sequence[Any]) -> Counts:
    """The step of the real run from what the rehearsals recorded, pair by pair. Raises NotCountable."""
    sizes = Sizes(plan.widths)
    tallies = []
    for small, wide in zip(recorded[::2], recorded[1::2], strict=True):
        buckets = []
        for pair in _paired(small["buckets"], wide["buckets"], "gradient buckets"):
            buckets.append(_of_shapes(sizes, *pair))
        steps = []
        for one, two in _paired(small["steps"], wide["steps"], "steps"):
            steps.append(_tally(sizes, buckets, _paired(one, two, "events of a step")))
        tallies.append(_at(plan, steps))
    return _reported(_extrapolated(tallies[0], tallies[-1], plan.depth), sizes)


Key = tuple[Any, ...]
# Calls and bytes.
Amount = tuple[Fraction, Fraction]
Event = tuple[Key, Amount]
_ZERO: Amount = (Fraction(0), Fraction(0))


class Sizes:
    """Resolves sizes of the small and the wide rehearsal to real ones; `exact` turns false where one does not."""

    def __init__(self, widths: Mapping[str, tuple[int, int]]) -> None:
        self.widths = widths
        self.unresolved: set[Key] = set()
        self.growth = {PRIMES[flag]: Fraction(real, small) for flag, (real, small) in widths.items()}
        self.exact = True

    def real(self, small: int, wide: int) -> Fraction:
        if small == wide or not small:
            return Fraction(wide)
        ratio, size = Fraction(wide, small), Fraction(small)
        for prime, growth in self.growth.items():
            while ratio.numerator % prime == 0:
                ratio /= prime
                size *= growth
        if ratio != 1 or size.denominator != 1:
            self.exact = False
        return size

    def real_shape(self, small: Sequence[int], wide: Sequence[int]) -> tuple[Fraction, ...]:
        return tuple(self.real(*pair) for pair in _paired(small, wide, "dimensions"))


def _of_shapes(sizes: Sizes, small: Sequence[Sequence[int]], wide: Sequence[Sequence[int]]) -> Fraction:
    """Elements of all parameters of a bucket, without Megatron's padding."""
    total = Fraction(0)
    for pair in _paired(small, wide, "parameters"):
        total += prod(sizes.real_shape(*pair), start=Fraction(1))
    return total


def _resolved(sizes: Sizes, buckets: Sequence[Fraction], small: dict[str, Any], wide: dict[str, Any]) -> Event:
    """An event's key and amount in the real run. One whose size is a sum, not a product, stays without a size."""
    kind = _kind(small)
    if kind != _kind(wide):
        raise NotCountable(f"one rehearsal has {kind} where the other has {_kind(wide)}")
    if small.get("bucket") is not None:
        return kind, (Fraction(1), buckets[small["bucket"]] * small["item"])
    own = Sizes(sizes.widths)
    shapes = tuple(own.real_shape(*pair) for pair in _paired(small["shapes"], wide["shapes"], "operands"))
    if not own.exact:
        sizes.exact = False
        sizes.unresolved.add(kind)
    if "item" in small:
        return kind, (Fraction(1), prod(shapes[0], start=Fraction(1)) * small["item"])
    if not own.exact:
        shapes = ()
    return (*kind, shapes), (Fraction(1), Fraction(0))


def _kind(event: Mapping[str, Any]) -> Key:
    if "item" in event:
        return (event["what"], event["group"], event["ranks"], event["nodes"])
    return (event["what"], event["pass"], event["dtype"], event["groups"])


def _tally(sizes: Sizes, buckets: Sequence[Fraction], events: Sequence[tuple[Any, Any]]) -> dict[Key, Amount]:
    """Calls and bytes of a step, from its events in the small and in the wide rehearsal."""
    found: dict[Key, Amount] = defaultdict(lambda: _ZERO)
    for small, wide in events:
        key, (calls, volume) = _resolved(sizes, buckets, small, wide)
        found[key] = (found[key][0] + calls, found[key][1] + volume)
    return dict(found)


def _at(plan: CountingPlan, steps: Sequence[Mapping[Key, Amount]]) -> dict[Key, Amount]:
    """A step with the real number of micro batches, from those with the two recorded ones."""
    if len(steps) != len(plan.microbatches):
        raise NotCountable(f"{len(steps)} of {len(plan.microbatches)} steps were recorded")
    many, few = steps
    distance = Fraction(plan.real_microbatches - plan.microbatches[1], plan.microbatches[0] - plan.microbatches[1])
    return _extrapolated(few, many, distance)


def _extrapolated(small: Mapping[Key, Amount], large: Mapping[Key, Amount], times: Fraction) -> dict[Key, Amount]:
    """The small step, and so many times what the large one has more."""
    found = {}
    for key in {**small, **large}:
        calls, volume = small.get(key, _ZERO)
        more_calls, more_volume = large.get(key, _ZERO)
        found[key] = (calls + times * (more_calls - calls), volume + times * (more_volume - volume))
    return found


def _paired(one: Sequence[Any], two: Sequence[Any], what: str) -> list[tuple[Any, Any]]:
    if len(one) != len(two):
        raise NotCountable(f"the rehearsals have {len(one)} and {len(two)} {what}")
    return list(zip(one, two, strict=True))


def _reported(totals: Mapping[Key, Amount], sizes: Sizes) -> Counts:
    traffic, gemms = [], []
    for key, (calls, volume) in totals.items():
        if isinstance(key[-1], tuple):
            what, purpose, dtype, groups, shapes = key
            entry = {"kind": what, "pass": purpose, "dtype": dtype, "groups": groups, "count": _number(calls)}
            gemms.append({**entry, "shape": [[_number(size) for size in shape] for shape in shapes]})
        else:
            collective, group, ranks, nodes = key
            entry = {"collective": collective, "group": group, "ranks": ranks, "nodes": nodes}
            entry |= {"calls": _number(calls), "bytes": _number(volume)}
            if key in sizes.unresolved:
                entry["bytes"] = None
            traffic.append(entry)
    for entry in gemms:
        if not entry["shape"]:
            entry["shape"] = None
        elif entry["kind"] != "attention":
            entry["shape"] = entry["shape"][0]
    return Counts(tuple(traffic), tuple(gemms), sizes.exact)


def _number(value: Fraction) -> float:
    if value.denominator == 1:
        return int(value)
    return float(value)
