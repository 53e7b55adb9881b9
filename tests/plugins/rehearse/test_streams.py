"""Stand-ins of streams and events refuse what CUDA's own refuse."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")

from fp8launch.injob.rank.compat import cpu
from fp8launch.plugins.rehearse import cuda_graphs


@pytest.mark.parametrize(("stand_in", "name"), [(cpu._Stream, "Stream"), (cpu._Event, "Event")])
def test_what_holds_a_stream_or_an_event_cannot_be_copied(stand_in: type, name: str) -> None:
    with pytest.raises(TypeError, match=f"cannot pickle '{name}' object"):
        copy.deepcopy({"held": stand_in()})


def test_a_capture_says_which_event_it_cannot_wait_for() -> None:
    before, inside = cpu._Event(), cpu._Event()
    cuda_graphs._record_event(before)
    with cuda_graphs.graph(cuda_graphs.CUDAGraph()):
        cuda_graphs._record_event(inside)
        with pytest.raises(RuntimeError, match="an event last recorded in a capturing stream"):
            cuda_graphs._synchronize_event(inside)
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
            cuda_graphs._synchronize_event(before)
    cuda_graphs._synchronize_event(inside)
    assert before.elapsed_time(inside) > 0


def test_captured_work_waits_for_captured_work_only(monkeypatch: pytest.MonkeyPatch) -> None:
    current, other, event = cpu._Stream(), cpu._Stream(), cpu._Event()
    monkeypatch.setattr(cuda_graphs.Captures, "stream", current)
    with cuda_graphs.graph(cuda_graphs.CUDAGraph()):
        with pytest.raises(RuntimeError, match="dependency created on uncaptured work in another stream"):
            cuda_graphs._wait_stream(current, other)
        cuda_graphs._wait_stream(other, current)
        cuda_graphs._wait_stream(current, other)
        cuda_graphs._record_event(event, cpu._Stream())
        with pytest.raises(RuntimeError, match="uncaptured work"):
            cuda_graphs._wait_event(current, event)
        cuda_graphs._record_event(event, other)
        cuda_graphs._wait_event(current, event)
    cuda_graphs._wait_stream(current, cpu._Stream())


def test_a_stream_takes_part_by_waiting_for_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """As context parallelism in Transformer Engine's captured layers does, on a stream of its own."""
    current, other = cpu._Stream(), cpu._Stream()
    monkeypatch.setattr(cuda_graphs.Captures, "stream", current)
    before, side = cuda_graphs.Communication(), cuda_graphs._OnStream(other)
    with cuda_graphs.graph(cuda_graphs.CUDAGraph()):
        inside = cuda_graphs.Communication()
        with side:
            before.wait()
            with pytest.raises(RuntimeError, match="uncaptured work"):
                cuda_graphs._wait_stream(current, other)
            inside.wait()
        with side:
            assert cuda_graphs.Captures.stream is other
        assert cuda_graphs.Captures.stream is current
        cuda_graphs._wait_stream(current, other)
