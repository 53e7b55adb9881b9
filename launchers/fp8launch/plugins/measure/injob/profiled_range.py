"""Profile a range of iterations of a training loop with one of three tools.

    torch    kernels by name and family, from torch's profiler
    memory   history of GPU memory: the peak, and what is allocated then
    nsys     Nsight Systems, under which the rank was started

Megatron's own flags (`--profile`, `--record-memory-history`) are not used. With torch's profiler, they count from the
start of the process, so a resumed run profiles other iterations, and they need a folder for TensorBoard. They record
memory from the first iteration on, of the last rank. A failing call ends the training. Megatron-Bridge has none of the
flags. The files and records here are the same for every loop.
"""

from __future__ import annotations

from typing import Any, Protocol

from fp8launch.injob.rank import training_loop
from fp8launch.injob.rank.training_loop import attempt
from fp8launch.plugins.measure.injob.request import Request, requested


class Tool(Protocol):
    """A profiler. Its methods may raise; then the profile ends and training continues."""

    def begin(self, model: Any) -> None:
        """Start before the first iteration."""

    def before_step(self, iteration: int) -> None:
        """Called before each iteration of the range."""

    def end(self, first: int) -> None:
        """Stop after the last iteration, and write and print the results. `first` is the first profiled iteration."""


class ProfiledRange(training_loop.Observer):
    """Runs a tool in the requested iterations. If the loop does not number its iterations, this counts them."""

    def __init__(self, request: Request, tool: Tool) -> None:
        self._request, self._tool = request, tool
        self._first: int | None = None
        self._number = 0

    def before_step(self, model: Any, iteration: int | None) -> None:
        self._number = self._number + 1 if iteration is None else iteration
        if self._first is None and self._request.start <= self._number <= self._request.end:
            self._first = self._number
            self._try(lambda tool: tool.begin(model))
        if self._first is not None:
            self._try(lambda tool: tool.before_step(self._number))

    def after_step(self, model: Any, iteration: int | None) -> bool:
        if self._number < self._request.end:
            return True
        if (first := self._first) is not None:
            self._try(lambda tool: tool.end(first))
        return False

    def _try(self, action: Any) -> None:
        """Call the tool. After a failure it is called no more."""
        if (
            self._tool is not None
            and attempt(f"the profile ({self._request.tool})", lambda: action(self._tool) or 1) is None
        ):
            self._tool = None  # type: ignore[assignment]


def install(loop: str) -> None:
    """Profile iterations of this loop. Never raises."""
    attempt("the profile", lambda: _observe(loop))


def _observe(loop: str) -> None:
    if observer := requested_range():
        training_loop.observe(observer, loop)


def requested_range() -> ProfiledRange | None:
    """Return the observer for the request to this rank, for a loop that calls it itself. Raises what torch raises."""
    request = requested()
    if request is None:
        return None
    return ProfiledRange(request, _tool(request))


def _tool(request: Request) -> Tool:
    if request.tool == "memory":
        from fp8launch.plugins.measure.injob.memory_profile import MemoryProfile

        return MemoryProfile(request)
    if request.tool == "nsys":
        from fp8launch.plugins.measure.injob.nsight import NsightProfile

        return NsightProfile(request)
    from fp8launch.plugins.measure.injob.kernel_profile import KernelProfile

    return KernelProfile(request)
