"""Measure how long the model's forward pass takes on each node, to find a node that slows the others down.

In synchronous training every rank waits for the slowest, so all have the same step time. Each rank therefore times only
the forward passes of its layers, from the arrival of their input to their output: with CUDA events on a GPU,
without waiting for it. About every ten seconds the ranks exchange one number each, and rank 0 prints the slowest rank
of each node in a line `fp8launch-nodes: {...}`, which `supervisor/slow_node.py` reads.

This happens only in jobs on several nodes. FP8LAUNCH_NODE_TIMES sets another number of seconds; 0 turns it off. Nothing
is timed inside CUDA graphs of whole iterations, or if Megatron interleaves two micro batches
(--overlap-moe-expert-parallel-comm).
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from fp8launch.injob.rank import training_loop
from fp8launch.injob.rank.module_facts import chunks_of
from fp8launch.injob.rank.node_info import describe
from fp8launch.injob.rank.training_loop import attempt, say
from fp8launch.injob.supervisor.slow_node import NODE_TIMES

_WHAT = "the measurement of forward passes"
EVERY = 10.0  # seconds between two lines
# A line names every node: with more nodes there are fewer lines, so that a log stays readable.
EVERY_PER_NODE = 0.25
# The first steps compile kernels and allocate memory.
FIRST_STEPS = 2
_LONGEST_NAME = 64
# Events that the GPU has not reached yet. A step ends by waiting for the GPU, so there are hardly ever more.
_MOST_PENDING = 10_000
_MOST_STEPS = 100_000  # between two exchanges


def install(env: Mapping[str, str] = os.environ, loop: str = training_loop.MEGATRON) -> None:
    """Time the forward passes of a training loop. Never raises."""

    def start() -> None:
        every = float(env.get("FP8LAUNCH_NODE_TIMES") or EVERY)
        if every > 0 and int(env.get("SLURM_NNODES") or 1) > 1:
            training_loop.observe(ForwardTimes(every, str(describe(env)["node"])), loop)

    attempt(_WHAT, start)


class ForwardTimes(training_loop.Observer):
    def __init__(self, every: float, node: str) -> None:
        self._every, self._node = every, node
        self._clock: Callable[[], Any] | None = None
        self._nodes: list[str] = []  # of each rank
        self._begun: dict[int, Any] = {}
        self._pending: list[tuple[Any, Any]] = []
        # Per chunk of the model, in the running step.
        self._micro_batches: dict[int, list[tuple[Any, Any]]] = {}
        self._sum, self._count = 0.0, 0
        self._steps, self._next, self._since = 0, FIRST_STEPS, 0
        self._began = time.monotonic()

    def before_step(self, model: Any, iteration: int | None) -> None:
        if self._clock is None:
            self._clock = attempt(_WHAT, lambda: self._watch(model)) or (lambda: None)

    def after_step(self, model: Any, iteration: int | None) -> bool:
        self._steps += 1
        attempt(_WHAT, self._take_step)
        if self._steps == FIRST_STEPS:
            self._sum, self._count = 0.0, 0
        if self._steps >= self._next:
            self._exchange(self._steps if iteration is None else iteration)
        return True

    def _watch(self, model: Any) -> Callable[[], Any]:
        """Time the forward passes of the model's chunks; return the clock."""
        import torch

        for number, chunk in enumerate(chunks_of(model)):
            chunk.register_forward_pre_hook(lambda module, _, number=number: self._begin(module, number))
            chunk.register_forward_hook(lambda module, _, __, number=number: self._end(module, number))
        if os.environ.get("FP8LAUNCH_DEVICE", "cuda") != "cuda":
            return time.perf_counter

        def record() -> Any:
            if torch.cuda.is_current_stream_capturing():
                return None
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event

        return record

    def _begin(self, module: Any, number: int) -> None:
        self._begun[number] = self._clock() if module.training and self._clock else None

    def _end(self, module: Any, number: int) -> None:
        begin = self._begun.pop(number, None)
        end = self._clock() if begin is not None and self._clock else None
        if end is not None:
            self._micro_batches.setdefault(number, []).append((begin, end))

    def _take_step(self) -> None:
        """Add the forward passes of a step that the GPU has finished."""
        for passes in self._micro_batches.values():
            # The first one waits for parameters that other ranks send (--overlap-param-gather).
            self._pending += passes[1:] or passes
        self._micro_batches.clear()
        waiting = []
        for begin, end in self._pending[-_MOST_PENDING:]:
            if isinstance(end, float):
                ms = 1000 * (end - begin)
            elif end.query():
                ms = begin.elapsed_time(end)
            else:
                waiting.append((begin, end))
                continue
            self._sum += ms
            self._count += 1
        self._pending = waiting

    def _exchange(self, iteration: int) -> None:
        """Collect the means of all ranks. All do so after the same step, which rank 0 chose at the last exchange."""
        import torch

        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        device = "cuda" if os.environ.get("FP8LAUNCH_DEVICE", "cuda") == "cuda" else "cpu"

        def gather(own: Any) -> list[Any]:
            every = torch.zeros(world * len(own), dtype=own.dtype, device=device)
            torch.distributed.all_gather_into_tensor(every, own)
            return list(every.view(world, len(own)).tolist())

        if not self._nodes:
            name = self._node.encode()[:_LONGEST_NAME].ljust(_LONGEST_NAME, b"\0")
            names = gather(torch.tensor(list(name), dtype=torch.uint8, device=device))
            self._nodes = [bytes(one).rstrip(b"\0").decode("utf-8", "replace") for one in names]
            if self._every == EVERY:
                self._every = max(EVERY, EVERY_PER_NODE * len(set(self._nodes)))
        now = time.monotonic()
        steps = self._steps - self._since
        wait = max(1, min(_MOST_STEPS, round(steps * self._every / max(now - self._began, 1e-3))))
        mean = self._sum / self._count if self._count else 0.0
        rows = gather(torch.tensor([mean, wait], dtype=torch.float64, device=device))
        if self._since and rank == 0:
            attempt(_WHAT, lambda: self._print(iteration - steps + 1, iteration, [row[0] for row in rows]))
        # The first interval includes the start-up, so it does not show how long a step takes.
        self._next = self._steps + (int(rows[0][1]) if self._since else 1)
        self._sum, self._count = 0.0, 0
        self._since, self._began = self._steps, now

    def _print(self, first: int, last: int, means: list[float]) -> None:
        slowest: dict[str, float] = {}
        for node, mean in zip(self._nodes, means, strict=True):
            slowest[node] = max(mean, slowest.get(node, 0.0))
        if len(slowest) < 2 or not all(slowest.values()):
            return
        record = {"v": 1, "first": first, "last": last, "forward_ms": {n: round(ms, 3) for n, ms in slowest.items()}}
        say(NODE_TIMES, record)
