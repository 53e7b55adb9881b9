"""Emulate CUDA graphs without a GPU: a capture runs its code once, and a replay does nothing.

Operations that are illegal during a capture are refused if they can be recognized: waiting for a device, stream or
event. Reading a value from a GPU tensor cannot be told apart from reading host memory, so it is allowed.
"""
# mypy: disable-error-code="import-not-found, misc"

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from fp8launch.injob.rank.compat import cpu

NOT_PERMITTED = "CUDA error: operation not permitted when stream is capturing"
NOT_ON_EVENT = "CUDA error: operation not permitted on an event last recorded in a capturing stream"
UNCAPTURED = "CUDA error: dependency created on uncaptured work in another stream"

# The maximum number of GPUs in a node.
MOST_GPUS = 16


class Captures:
    """The state of captures in this process.

    `depth` is the nesting depth, and `joined` has the ids of the participating streams. `stream` is the current stream,
    and `left` has the streams to return to.
    """

    depth = 0
    stream: ClassVar[Any] = None
    left: ClassVar[list[Any]] = []
    joined: ClassVar[set[int]] = set()


def capturing() -> bool:
    """Return whether a capture is in progress."""
    return Captures.depth > 0


class CUDAGraph:
    """A graph that records nothing."""

    def __init__(self, keep_graph: bool = False) -> None:
        pass

    def register_generator_state(self, generator: Any) -> None:
        """Do nothing: replays do not advance any random state."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        """Begin a capture."""
        if capturing():
            raise RuntimeError(NOT_PERMITTED)
        Captures.depth += 1
        Captures.joined = {id(Captures.stream)}

    def capture_end(self) -> None:
        """End the capture."""
        Captures.depth -= 1

    def replay(self) -> None:
        """Do nothing: outputs keep the values from the capture."""
        if capturing():
            raise RuntimeError(NOT_PERMITTED)

    def reset(self) -> None:
        """Do nothing: there is nothing to free."""

    instantiate = enable_debug_mode = reset

    def debug_dump(self, path: str) -> None:
        """Do nothing: there is nothing to draw."""

    def pool(self) -> tuple[int, int]:
        """Return the handle of the graph's memory pool."""
        return (0, 1)


@contextlib.contextmanager
def graph(
    cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global", **_: Any
) -> Iterator[None]:
    """Capture the code in the `with` block."""
    cuda_graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    finally:
        cuda_graph.capture_end()


class Generator(torch.Generator):
    """A CPU generator with the CUDA graph methods, which torch implements for CUDA generators only."""

    def graphsafe_get_state(self) -> Generator:
        """Return this generator."""
        return self

    def graphsafe_set_state(self, state: Any) -> None:
        """Do nothing: the generator keeps its own state."""

    def clone_state(self) -> Generator:
        """Return a new generator."""
        return Generator()


def _synchronize(*_: Any) -> None:
    if capturing():
        raise RuntimeError(NOT_PERMITTED)


_record = cpu._Event.record


def _record_event(event: Any, stream: Any = None) -> None:
    _record(event, stream)
    event.captured = _takes_part(stream)


def _takes_part(stream: Any) -> bool:
    """Return whether work queued on a stream now would be captured. None is the current stream."""
    return capturing() and id(stream or Captures.stream) in Captures.joined


def _wait(stream: Any, captured: bool) -> None:
    """Let a stream that waits for captured work join the capture. Refuse to make captured work wait for other work."""
    if captured:
        Captures.joined.add(id(stream))
    elif _takes_part(stream):
        raise RuntimeError(UNCAPTURED)


def _wait_stream(stream: Any, other: Any) -> None:
    _wait(stream, _takes_part(other))


def _wait_event(stream: Any, event: Any) -> None:
    _wait(stream, capturing() and getattr(event, "captured", False))


def _wait_of_event(event: Any, stream: Any = None) -> None:
    _wait_event(stream or Captures.stream, event)


class Communication:
    """A handle for a collective. A stream that waits for it joins the capture in which it was launched."""

    def __init__(self) -> None:
        self.captured = _takes_part(None)

    def wait(self) -> None:
        """Make the current stream wait for the collective."""
        if self.captured and capturing():
            _wait(Captures.stream, True)


def _set_stream(stream: Any) -> None:
    if stream is not None:
        Captures.stream = stream


class _OnStream:
    """Like torch's `StreamContext`, but reusable, because Megatron keeps one and enters it repeatedly."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        _enter(self.stream)

    def __exit__(self, *_: object) -> None:
        _leave()


def _enter(stream: Any) -> Any:
    Captures.left.append(Captures.stream)
    _set_stream(stream)
    return stream


def _leave(*_: object) -> None:
    Captures.stream = Captures.left.pop()


def _synchronize_event(event: Any) -> None:
    if capturing():
        raise RuntimeError(NOT_ON_EVENT if getattr(event, "captured", False) else NOT_PERMITTED)


def install() -> None:
    """Replace torch's CUDA graphs. Call this after the CPU mode is installed."""
    cuda: Any = torch.cuda
    for holder in (cuda, cuda.graphs):
        holder.is_current_stream_capturing = capturing
        holder.CUDAGraph, holder.graph = CUDAGraph, graph
        holder.graph_pool_handle = lambda: (0, 1)
    torch._C._graph_pool_handle = lambda: (0, 1)
    for name in ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        setattr(torch._C, name, lambda *_: None)
    cuda.default_generators = tuple(Generator() for _ in range(MOST_GPUS))
    Captures.stream = cuda.current_stream()
    cuda.current_stream = lambda device=None: Captures.stream
    cuda.stream, cuda.set_stream = _OnStream, _set_stream
    cuda.synchronize = _synchronize
    cuda.Stream.synchronize = _synchronize
    cuda.Stream.__enter__, cuda.Stream.__exit__ = _enter, _leave
    cuda.Stream.wait_stream, cuda.Stream.wait_event = _wait_stream, _wait_event
    cuda.Event.record, cuda.Event.synchronize = _record_event, _synchronize_event
    cuda.Event.wait = _wait_of_event
