"""Splits of layers over pipeline stages: even ones, and those with a lighter last stage, in a simulated schedule."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch.megatron.architecture import Chunk
from fp8launch.megatron.model_arithmetic import parse_layout
from fp8launch.plugins.plan.pipelines import lighter_last_stage, stage_layout


def _simulated(pieces: Sequence[float], pp: int, microbatches: int) -> float:
    """The time of a step of Megatron's interleaved schedule (megatron/core/pipeline_parallel/schedules.py), with the
    time of each piece, a third of it forward."""
    vp, total = len(pieces) // pp, microbatches * len(pieces) // pp

    def unit(rank: int, number: int, forward: bool) -> tuple[bool, int, int]:
        group, place = divmod(number, pp * vp)
        chunk = place // pp if forward else vp - 1 - place // pp
        return forward, group * pp + place % pp, chunk * pp + rank

    orders = []
    for rank in range(pp):
        ahead = min((pp - rank - 1) * 2 + (vp - 1) * pp if vp > 1 else pp - rank - 1, total)
        order = [unit(rank, number, True) for number in range(ahead)]
        for number in range(total - ahead):
            order += [unit(rank, ahead + number, True), unit(rank, number, False)]
        orders.append(order + [unit(rank, number, False) for number in range(total - ahead, total)])
    done: dict[tuple[bool, int, int], float] = {}
    clocks, at = [0.0] * pp, [0] * pp
    while any(at[rank] < len(orders[rank]) for rank in range(pp)):
        for rank in range(pp):
            while at[rank] < len(orders[rank]):
                forward, micro, piece = orders[rank][at[rank]]
                before = (forward, micro, piece - 1 if forward else piece + 1)
                if not forward and piece == len(pieces) - 1:
                    before = (True, micro, piece)
                if before not in done and not (forward and piece == 0):
                    break
                start = max(clocks[rank], done.get(before, 0.0))
                clocks[rank] = start + pieces[piece] * (1 / 3 if forward else 2 / 3)
                done[forward, micro, piece] = clocks[rank]
                at[rank] += 1
    return max(clocks)


def _counts(text: str) -> list[int]:
    parsed = parse_layout(text)
    assert parsed is not None
    return [piece.count("t") for piece in parsed]


def _lighter(layers: int, pp: int, vp: int, head: float) -> list[int] | None:
    """The counts of a split whose last stage is lighter than that of an even split; a layer takes a second."""
    counts, at = _counts(stage_layout(layers, 0, pp * vp)), 0
    chunks = []
    for count in counts:
        chunks.append(Chunk(tuple(range(at, at + count))))
        at += count
    pipeline = [chunks[rank::pp] for rank in range(pp)]
    seconds = [float(sum(counts[rank::pp])) for rank in range(pp)]
    seconds[-1] += head
    change = lighter_last_stage(pipeline, seconds)
    return None if change is None else _counts(change.args["pipeline_model_parallel_layout"])


def _times(counts: Sequence[int], pp: int, vp: int, head: float) -> tuple[float, float]:
    """The time of a step by the formula of docs/speed_model.md, and that of the schedule piece by piece."""
    pieces = [*counts[:-1], counts[-1] + head]
    stages = [sum(pieces[rank::pp]) for rank in range(pp)]
    return 8 * pp * max(stages) + (sum(stages) - max(stages)) / vp, _simulated(pieces, pp, 8 * pp)


@pytest.mark.parametrize(
    ("layers", "pp", "vp", "head"),
    [(80, 8, 5, 2.6), (80, 4, 5, 2.6), (32, 2, 8, 2.4), (32, 4, 1, 2.4), (96, 8, 6, 2.0), (36, 4, 3, 4.0)],
)
def test_a_lighter_last_stage_is_faster_in_the_schedule_by_what_its_stages_say(
    layers: int, pp: int, vp: int, head: float
) -> None:
    counts = _lighter(layers, pp, vp, head)
    assert counts is not None
    formula, simulated = _times(counts, pp, vp, head)
    assert simulated == pytest.approx(formula, rel=0.01)
    assert simulated < 0.97 * _times(_counts(stage_layout(layers, 0, pp * vp)), pp, vp, head)[1]


@given(st.integers(2, 16), st.integers(1, 8), st.integers(1, 126), st.floats(0, 9))
def test_a_lighter_last_stage_has_every_layer_once(pp: int, vp: int, layers: int, head: float) -> None:
    # Embedding and output may take the place of a layer each.
    layers = max(layers, pp * vp - 2, 2)
    counts = _lighter(layers, pp, vp, head)
    if counts is None:
        return
    assert sum(counts) == layers and len(counts) == pp * vp
    assert all(counts[:-1])
    stages = [sum(counts[rank::pp]) for rank in range(pp)]
    even = -(-sum(counts) // (pp * vp)) * vp
    assert max(*stages, stages[-1] + head) < even + head
    assert max(stages[:-1]) - min(stages[:-1]) <= 1
    if pp * vp <= 32:
        simulated = _times(counts, pp, vp, head)[1]
        assert simulated < _times(_counts(stage_layout(layers, 0, pp * vp)), pp, vp, head)[1]


def test_stages_as_even_as_layers_allow_stay() -> None:
    assert _lighter(32, 2, 4, 0.0) is None
    assert _lighter(8, 8, 1, 0.5) is None
