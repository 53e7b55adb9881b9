"""Run a rank under Nsight Systems, which records a range of iterations.

The rank replaces itself with `nsys profile ... python PROGRAM`, which starts it again as a child process. Without
nsys, or if nsys cannot run here, the training runs unprofiled, and a line says so.

nsys ends the training at SIGTERM, before a checkpoint is saved. So this process blocks the signals that a job sends,
nsys inherits that, and the rank unblocks them for itself. A signal that was sent to nsys alone stays pending there; the
rank looks for it and sends it to itself.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8launch.injob.rank.training_loop import attempt, say
from fp8launch.plugins.measure.injob import kernel_families
from fp8launch.plugins.measure.injob.kernel_families import Total
from fp8launch.plugins.measure.injob.request import SAID, VARIABLE, Request

# The process id of nsys, in the environment of the rank below it.
UNDER = "FP8LAUNCH_UNDER_NSYS"
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_INSTALLED = ("usr/local/cuda/bin/nsys", "opt/nvidia/nsight-systems*/*/bin/nsys")  # below /
_SECONDS = 120.0  # for a trial of nsys, for its report, and for its summary


def find_nsys() -> str | None:
    """Return nsys of the PATH, or of a usual folder."""
    found = shutil.which("nsys")
    for pattern in _INSTALLED:
        found = found or max(map(str, Path("/").glob(pattern)), default=None)
    return found


def command(nsys: str, report: Path, program: Sequence[str]) -> list[str]:
    """Return the command that runs `program` and records it between cudaProfilerStart and cudaProfilerStop.

    By default nsys would end the program after the range, and wait for helpers that outlive it.
    """
    return [
        nsys,
        "profile",
        "--output=" + str(report).replace("%", "%%"),
        "--force-overwrite=true",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
        "--wait=primary",
        *program,
    ]


def start_under_nsys(request: Request) -> None:
    """Replace this process with nsys, which starts it again. Return in that process, or without nsys."""
    parent = os.environ.pop(UNDER, None)
    if parent is not None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _pass_on_signals(int(parent))
        return
    nsys = find_nsys()
    reason = "there is no nsys on this machine or in this image" if nsys is None else _refusal(nsys)
    if nsys is None or reason:
        print(f"fp8launch: rank {request.rank} trains without a profile: {reason}", file=sys.stderr, flush=True)
        del os.environ[VARIABLE]
        return
    report = request.file("").resolve()
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    os.environ[UNDER] = str(os.getpid())
    # `sys.orig_argv` has the interpreter's own options.
    os.execv(nsys, command(nsys, report, [sys.executable, *sys.orig_argv[1:]]))


def _refusal(nsys: str) -> str:
    """Try nsys on a program that does nothing. Return why it fails."""
    report = Path(os.environ.get("TMPDIR", "/tmp"), f"fp8launch-nsys-{os.getpid()}")
    words = command(nsys, report, [sys.executable, "-c", "pass"])
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as problem:
        return f"{nsys} cannot run here: {problem}"
    if done.returncode == 0:
        return ""
    last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
    return f"{nsys} exits with {done.returncode} here: {last}"


def _pass_on_signals(nsys: int) -> None:
    """Send this process the signals that wait in nsys, each once."""

    def look() -> None:
        left = list(_SIGNALS)
        while left:
            time.sleep(0.5)
            for number in pending(nsys) & set(left):
                left.remove(number)
                os.kill(os.getpid(), number)

    threading.Thread(target=look, name="fp8launch-nsys-signals", daemon=True).start()


def pending(process: int) -> set[signal.Signals]:
    """Return the blocked signals that wait in a process."""
    waiting = 0
    try:
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("SigPnd", "ShdPnd"):
                waiting |= int(value, 16)
    except OSError:
        return set()
    return {number for number in _SIGNALS if waiting >> (number - 1) & 1}


class NsightProfile:
    """Marks the range for nsys, and prints nsys's own summary of the kernels.

    The line is `fp8launch-kernels: {json}` if there is a summary, and always `fp8launch-profile: {json}` with the file.
    """

    def __init__(self, request: Request) -> None:
        self._request = request

    def begin(self, model: Any) -> None:
        import torch

        if "NSYS_PROFILING_SESSION_ID" not in os.environ:
            raise RuntimeError("this process does not run under nsys")
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        # Operators of PyTorch become ranges on nsys's time line.
        self._ranges = torch.autograd.profiler.emit_nvtx(record_shapes=False)
        self._ranges.__enter__()
        self._began = time.perf_counter()

    def before_step(self, iteration: int) -> None:
        pass

    def end(self, first: int) -> None:
        import torch

        torch.cuda.synchronize()
        wall_ms = round((time.perf_counter() - self._began) * 1e3, 1)
        self._ranges.__exit__(None, None, None)
        torch.cuda.cudart().cudaProfilerStop()
        file = self._request.file(".nsys-rep")
        record = {**self._request.record(first), "wall_ms": wall_ms}
        if found := attempt("the summary by nsys", lambda: _kernels(file)):
            say("fp8launch-kernels: ", {**record, **kernel_families.by_family(found)})
        say(SAID, {**record, "file": str(file)})


def _kernels(report: Path) -> dict[str, Total]:
    """Return the kernels of a report by name. nsys writes the report once the range is over."""
    end = time.monotonic() + _SECONDS
    size = -1
    while size < 0 or report.stat().st_size != size:
        # nsys leaves this file if its importer is missing.
        if (raw := report.with_suffix(".qdstrm")).exists():
            raise RuntimeError(f"nsys made no report of its recording {raw}, which Nsight Systems can open")
        if time.monotonic() > end:
            raise RuntimeError(f"{report} was not complete after {_SECONDS:.0f} seconds")
        size = report.stat().st_size if report.exists() else -1
        time.sleep(1)
    nsys = find_nsys()
    assert nsys is not None, "it runs this process"
    # The summary must not be recorded.
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NSYS", "QUADD", "LD_PRELOAD"))}
    clean.pop("CUDA_INJECTION64_PATH", None)
    words = [nsys, "stats", "--quiet", "--report=cuda_gpu_kern_sum", "--format=json", "--output=-", str(report)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_SECONDS, check=True, env=clean)
    return kernel_totals(done.stdout)


def kernel_totals(text: str) -> dict[str, Total]:
    """Read nsys's summary of kernels, `nsys stats --report=cuda_gpu_kern_sum --format=json`."""
    rows = json.loads(text[text.index("[{") :])
    return {row["Name"]: Total(int(row["Instances"]), int(row["Total Time (ns)"])) for row in rows}
