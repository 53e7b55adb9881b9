"""Save, resume, and end in good order: on a signal, on NaN, with the script's own exit code."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from train_jobs import MOCK, OLDER, OLDER_RELEASES, Run, finish, forked, start, torchrun, worker

from fp8launch.injob.rank.compat.checkpointing import PickledQueue
from fp8launch.logs import read_log

pytestmark = pytest.mark.train

LONG = [*MOCK, "--train-iters", "5000", "--lr-decay-iters", "5000", "--exit-signal-handler"]


def resumes(run: Run, alone: Run) -> None:
    """Iterations 8 to 10 as without the interruption.

    Megatron's second printed line after a start averages the first one in; our reader undoes it.
    """
    run.succeeded()
    found, expected = losses(run), losses(alone)
    assert list(found) == [8, 9, 10]
    for iteration in found:
        assert found[iteration] == pytest.approx(expected[iteration], rel=1e-6)


def losses(run: Run) -> dict[int, float | None]:
    """The loss by iteration, as reports have it."""
    with tempfile.NamedTemporaryFile("w", suffix=".log") as file:
        file.write(run.output)
        file.flush()
        return {line.number: line.loss for line in read_log(Path(file.name)).iterations}


def test_resume_repeats_the_uninterrupted_run(alone: Run, saved: Path) -> None:
    resumed = forked(1, [*MOCK, "--load", str(saved), "--ckpt-step", "7"])
    resumes(resumed, alone)
    # What Megatron printed is the mean of 8 and 9.
    assert resumed.losses[9] == pytest.approx((alone.losses[8] + alone.losses[9]) / 2, rel=1e-6)


FP32 = [word for word in MOCK if word != "--bf16"]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(MOCK, marks=pytest.mark.slow, id="bf16"),
        pytest.param([*MOCK, "--dist-ckpt-optim-fully-reshardable"], id="bf16, fully reshardable"),
        pytest.param(FP32, id="fp32"),
    ],
)
def test_resume_with_the_distributed_optimizer(megatron: None, tmp_path: Path, arguments: list[str]) -> None:
    """The resumed run ends with the bits of the uninterrupted one: weights, master weights, moments and steps."""
    sharded = [*arguments, "--use-distributed-optimizer", "--save-interval", "7"]
    whole = forked(2, [*sharded, "--save", str(tmp_path / "whole")])
    shutil.copytree(tmp_path / "whole" / "iter_0000007", tmp_path / "resumed" / "iter_0000007")
    (tmp_path / "resumed" / "latest_checkpointed_iteration.txt").write_text("7")
    folder = str(tmp_path / "resumed")
    resumes(forked(2, [*sharded, "--load", folder, "--save", folder]), whole.succeeded())
    ends = [tensors(tmp_path / name / "iter_0000010") for name in ("whole", "resumed")]
    assert ends[0].keys() == ends[1].keys() and len(ends[0]) > 10
    assert [name for name in ends[0] if not ends[0][name].equal(ends[1][name])] == []


def tensors(checkpoint: Path) -> dict[str, Any]:
    """The tensors of a checkpoint by name."""
    import torch
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    found = {}
    for name, entry in reader.read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    dcp.load(found, storage_reader=reader, no_dist=True)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("writer", [[], ["--async-strategy", "mcore", "--use-persistent-ckpt-worker"]])
def test_asynchronous_checkpoints(megatron: None, tmp_path: Path, writer: list[str]) -> None:
    """The persistent writer is a process started afresh, which has CPU mode only through its own start-up."""
    worker([*MOCK, "--async-save", *writer, "--save", str(tmp_path), "--save-interval", "5"]).succeeded()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10"


class Here:
    """Pickled, it is the id of the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.getpid, ()


def test_the_process_of_the_writers_queue_unpickles_nothing() -> None:
    with multiprocessing.get_context("spawn").Manager() as manager:
        queue = PickledQueue(manager.Queue())
        queue.put(Here())
        assert queue.get_nowait() == os.getpid()


@pytest.mark.parametrize("version", ["installed", *OLDER_RELEASES])
def test_a_save_imports_no_second_torch(megatron: None, tmp_path: Path, version: str) -> None:
    """The variable has all processes that the rank starts afresh list what they import."""
    if version != "installed" and not (OLDER / version).is_dir():
        pytest.skip(f"megatron-core {version} is not unpacked")
    path = "" if version == "installed" else str(OLDER / version)
    arguments = [*MOCK, "--train-iters", "3", "--save", str(tmp_path), "--save-interval", "3"]
    run = forked(1, arguments, PYTHONPATH=path, PYTHONPROFILEIMPORTTIME="1").succeeded()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    imported = {line.split()[-1] for line in run.output.splitlines() if line.startswith("import time:")}
    assert "multiprocessing.managers" in imported and "torch" not in imported


def stop_after_iteration(process: subprocess.Popen[str], iteration: int, number: signal.Signals) -> Run:
    """Let it train until that iteration is printed, send the signal, wait for its end."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f"iteration {iteration:8d}/" in line:
            os.kill(process.pid, number)
            break
    run = finish([process])
    return Run(run.codes, "".join(lines) + run.output)


def test_a_signal_saves_and_ends_well(megatron: None, tmp_path: Path) -> None:
    argv = [*LONG, "--save", str(tmp_path), "--save-interval", "100000"]
    run = stop_after_iteration(start("worker.py", ["--", *argv]), 3, signal.SIGTERM).succeeded()
    last = max(run.losses)
    assert 3 <= last < 1000
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(last)
    assert "exiting program after receiving SIGTERM" in run.output


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_node_reaches_all_its_processes(megatron: None, tmp_path: Path, number: signal.Signals) -> None:
    argv = [*LONG, "--save", str(tmp_path), "--save-interval", "100000"]
    if number != signal.SIGTERM:
        argv += ["--exit-signal", number.name]
    process = start("node.py", ["--nproc-per-node", "2", "--", *argv])
    run = stop_after_iteration(process, 3, number).succeeded()
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == str(max(run.losses))


@pytest.mark.slow
def test_without_a_handler_a_signal_ends_the_job_as_a_shell_would_say(megatron: None) -> None:
    argv = [word for word in LONG if word != "--exit-signal-handler"]
    run = stop_after_iteration(start("node.py", ["--nproc-per-node", "2", "--", *argv]), 3, signal.SIGTERM)
    assert run.codes == [128 + signal.SIGTERM]


@pytest.mark.slow
def test_nan_keeps_megatrons_exit_code_through_torchrun(megatron: None, tmp_path: Path) -> None:
    wild = ["--lr", "1e30", "--min-lr", "1e30", "--save", str(tmp_path), "--save-interval", "1000"]
    run = torchrun(2, [*MOCK, *wild])
    assert run.codes == [16], run.output[-3000:]


def test_a_named_script_runs_prepared(megatron: None, tmp_path: Path) -> None:
    """As __main__, with its own arguments, its own folder first on the path, CPU mode on, and its own exit code."""
    (tmp_path / "beside.py").write_text("number = 7\n")
    script = tmp_path / "my_pretrain.py"
    script.write_text(
        "import sys, torch\n"
        "from beside import number\n"
        "from megatron.core.datasets.utils import compile_helpers\n"
        "compile_helpers()\n"
        "assert __name__ == '__main__' and torch.empty(1, device='cuda').device.type == 'cpu'\n"
        "print('ARGUMENTS', sys.argv)\n"
        "sys.exit(number)\n"
    )
    run = worker(MOCK, own=("--script", str(script)))
    assert run.codes == [7], run.output
    assert f"ARGUMENTS {[str(script), *MOCK]}" in run.output
