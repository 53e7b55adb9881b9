"""A rank ends in a bounded time after its training, and what it started ends with it."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.injob.local_job import end_all
from fp8launch.injob.supervisor.failures import ALL_WRITTEN, read_ending

LAUNCHERS = Path(sys.modules["fp8launch"].__path__[0]).parent

# How a process can stay after its last line: in Python's own exit, in the C library's, in the main thread's last call.
STAYS = {
    "a thread that never ends": "import threading; threading.Thread(target=time.sleep, args=(3600,)).start()",
    "an exit handler of Python": "import atexit; atexit.register(time.sleep, 3600)",
    "an exit handler of C": "import ctypes; libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.pause, None, None)",
    "the last call": "leaving.everything_is_written(); time.sleep(3600)",
}


def run(text: str, **env: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run a program after its training; also the seconds that it took."""
    head = f"import sys, time; sys.path.insert(0, {str(LAUNCHERS)!r}); from fp8launch.injob.rank import leaving\n"
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", head + text],
        env={"PATH": os.environ["PATH"], "FP8LAUNCH_LEAVE_WITHIN": "1", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done, time.monotonic() - began


@pytest.mark.parametrize("way", STAYS)
def test_a_rank_that_stays_after_its_training_leaves_as_one_that_succeeded(way: str) -> None:
    done, seconds = run(f"{STAYS[way]}\nprint('trained')\nleaving.everything_is_written()")
    assert done.returncode == 0, done.stderr
    assert seconds < 30
    assert ALL_WRITTEN in done.stdout
    if "of C" not in way:
        assert "rank 0 has not ended 1 s after its training" in done.stderr
        assert "most recent call first" in done.stderr


def test_the_exit_code_is_the_one_that_the_rank_would_have_had() -> None:
    stays = STAYS["an exit handler of Python"]
    leave = "try: sys.exit(3)\nexcept SystemExit as left: leaving.training_is_over(leaving.exit_code(left))"
    done, _ = run(f"{stays}\n{leave}")
    assert done.returncode == 3


def test_a_rank_that_ends_normally_is_not_disturbed() -> None:
    done, _ = run("leaving.everything_is_written()\nprint('end')")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("end\n")


# Aborts where C++ destroys a thread that still runs: in the C library's exit.
ABORTS = "import ctypes; libc = ctypes.CDLL(None); libc.__cxa_atexit(libc.abort, None, None)"


def test_a_rank_that_wrote_everything_does_not_abort_on_its_way_out() -> None:
    registers = "import atexit; atexit.register(print, 'at exit')"
    done, _ = run(f"leaving.skip_native_exit()\n{ABORTS}\n{registers}\nleaving.everything_is_written()")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("at exit\n")


def test_a_rank_that_did_not_write_everything_may_abort() -> None:
    done, _ = run(f"leaving.skip_native_exit()\n{ABORTS}")
    assert done.returncode == -signal.SIGABRT
    done, _ = run(f"leaving.skip_native_exit()\n{ABORTS}\nleaving.training_is_over(1)")
    assert done.returncode == -signal.SIGABRT


def test_only_one_rank_reports_the_end() -> None:
    done, _ = run("leaving.everything_is_written(); leaving.everything_is_written()")
    assert done.stdout.count(ALL_WRITTEN) == 1
    assert run("leaving.everything_is_written()", RANK="1")[0].stdout == ""


def test_what_happens_after_the_end_is_no_failure() -> None:
    lines = ["[after training is done] datetime: now", f"0: {ALL_WRITTEN}", "srun: error: n1: task 0: Killed"]
    ending = read_ending(enumerate(lines))
    assert (ending.finished, ending.whole, ending.failure) == (True, True, None)
    assert read_ending(enumerate([lines[0], "OSError: [Errno 28] No space left on device"])).failure is not None


GRAPHS = """
import types
released = []

class Graph:
    def reset(self):
        released.append("graph")

class FullCudaGraphWrapper:
    cuda_graph = {"training": Graph(), "validation": None}
    result = {"training": object(), "validation": None}

torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, synchronize=lambda: None)
torch.distributed = types.SimpleNamespace(
    is_initialized=lambda: True, destroy_process_group=lambda: released.append("process group"))
sys.modules["torch"] = torch
module = types.ModuleType("megatron.core.full_cuda_graph")
module.FullCudaGraphWrapper = FullCudaGraphWrapper
sys.modules["megatron.core.full_cuda_graph"] = module
leaving.end_process_group()
print(released, FullCudaGraphWrapper.cuda_graph, FullCudaGraphWrapper.result)
"""


def test_graphs_go_before_the_communicators_that_they_hold() -> None:
    """The order alone: what NCCL does is tried on GPUs."""
    done, _ = run(GRAPHS)
    empty = {"training": None, "validation": None}
    assert done.stdout == f"{['graph', 'process group']} {empty} {empty}\n", done.stderr


RANK = """
import multiprocessing, os, sys, time
sys.path.insert(0, LAUNCHERS)

def stay():
    os.write(1, b"%d\\n" % os.getpid())  # in one piece: several processes write
    time.sleep(3600)

def stay_and_fork():
    if os.fork() == 0:
        stay()
    stay()

if __name__ == "__main__":
    from fp8launch.injob.rank import signals
    signals.tie_helpers_to_rank()
    manager = multiprocessing.get_context("spawn").Manager()
    os.write(1, b"%d\\n" % manager._process.pid)
    for way in ("fork", "spawn"):
        multiprocessing.get_context(way).Process(target=stay_and_fork, daemon=True).start()
    time.sleep(3600)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition: Callable[[], bool], seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.1)
    return condition()


def test_helpers_of_a_rank_that_was_killed_end_with_it(tmp_path: Path) -> None:
    """A manager, forks, fresh processes, and what those fork; also the trackers that hold no line of this output."""
    script = tmp_path / "rank.py"
    script.write_text(RANK.replace("LAUNCHERS", repr(str(LAUNCHERS))))
    rank = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert rank.stdout
    helpers: list[int] = []
    while len(helpers) < 5:
        word = rank.stdout.readline().strip()
        assert word, "the rank ended"
        helpers += [int(word)] if word.isdigit() else []
    tracker = [int(p.parent.name) for p in Path("/proc").glob("[0-9]*/stat") if _session(p) == rank.pid]
    assert set(helpers) < set(tracker)
    time.sleep(2)  # longer than they look: nothing ends while the rank is there
    assert all(map(lives, helpers))
    rank.send_signal(signal.SIGKILL)
    rank.wait()
    assert until(lambda: not any(map(lives, tracker))), [pid for pid in tracker if lives(pid)]


def _session(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[3])
    except OSError:
        return -1


def gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())


@pytest.mark.parametrize("graph", ["released", "kept"])
def test_processes_with_a_graph_of_a_collective_end(graph: str) -> None:
    """On two GPUs: released graphs let NCCL end; with kept ones the processes leave within the bound."""
    if gpus() < 2:
        pytest.skip("needs two GPUs")
    program = [sys.executable, str(Path(__file__).with_name("leave_on_gpus.py"))]
    done = subprocess.run([*program, graph], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if graph == "released":
        assert "has not ended" not in done.stderr


def test_a_process_that_one_look_does_not_see_is_ended_too() -> None:
    """During exec a process briefly shows no environment, which identifies the processes of a run."""
    process = subprocess.Popen(["sleep", "600"])
    hidden = [True]

    def alive() -> set[int]:
        if hidden and hidden.pop():
            return set()
        return {process.pid} if process.poll() is None else set()

    end_all(alive, 60)
    assert process.wait() == -signal.SIGTERM
