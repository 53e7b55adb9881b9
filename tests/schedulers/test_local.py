"""Runs on this machine: they outlive the shell, keep their exit code, and end to the last process."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.cluster.profile import Cluster
from fp8launch.injob.local_job import LOCAL_RUN, processes_with
from fp8launch.job.job import Job, Resources
from fp8launch.job.prepared import prepare
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers import local
from fp8launch.schedulers.base import JobState
from fp8launch.schedulers.local import LocalScheduler
from fp8launch.submit.submit import single, submit_run

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
ENDING = 'status=0\n{command} || status=$?\necho "$status" > logs/local-0.exit\n: > logs/local-0.log\nexit "$status"\n'


def started(run: RunFolder, a_job: Job) -> RunFolder:
    run.update(jobs=[{"id": LocalScheduler().submit(a_job, run, "k")}])
    return run


def state(run: RunFolder) -> JobState:
    return LocalScheduler().states([run])[0]


def until(true: Callable[[], object], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def script(run_folder: str, command: str) -> str:
    return f"cd '{run_folder}'\n" + ENDING.format(command=command)


@pytest.fixture
def run_of(a_run: Callable[..., RunFolder], a_job: Job, tmp_path: Path) -> Callable[[str], RunFolder]:
    """A started run of this shell command."""
    return lambda command: started(a_run(job_sh=script(f"{tmp_path}/runs/r-1", command)), a_job)


@pytest.mark.parametrize(("command", "status", "code"), [("true", "completed", 0), ("sh -c 'exit 7'", "failed", 7)])
def test_a_run_keeps_its_exit_status(run_of: Callable[[str], RunFolder], command: str, status: str, code: int) -> None:
    run = run_of(command)
    until(lambda: state(run).final)
    assert (state(run).status, state(run).exit_code) == (status, code)


def test_a_run_lives_on_when_the_shell_ends(a_run: Callable[..., RunFolder], tmp_path: Path) -> None:
    """Started by another process, which has ended when the state is queried."""
    run = a_run(job_sh=script(f"{tmp_path}/runs/r-1", "sh -c 'while [ ! -e go ]; do sleep 0.02; done'"))
    program = (
        "import sys; from pathlib import Path\n"
        "from fp8launch.schedulers.local import LocalScheduler; from fp8launch.rundir.run_dir import RunFolder\n"
        "from fp8launch.job.job import Job, Resources\n"
        "run = RunFolder(Path(sys.argv[1]))\n"
        "job = Job('r', '', str(run.path), Resources(), 1, 'srun', 'python3')\n"
        "run.update(jobs=[{'id': LocalScheduler().submit(job, run, 'k')}])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(LAUNCHERS)}
    subprocess.run([sys.executable, "-c", program, run.path], env=environment, check=True)
    assert state(run).status == "running"
    (run.path / "go").touch()
    until(lambda: state(run).final)
    assert state(run).status == "completed"


def test_the_surrounding_jobs_variables_do_not_reach_the_run(
    run_of: Callable[[str], RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("X_MINE", "kept")
    run = run_of("env > seen")
    until(lambda: state(run).final)
    seen = (run.path / "seen").read_text().splitlines()
    assert "X_MINE=kept" in seen
    assert not [line for line in seen if line.startswith(("SLURM_", "RANK="))]


RANKS = (
    # A process in a session of its own, as torchrun starts its ranks; one of them hears nothing.
    "bash -c 'for n in 1 2; do setsid bash -c \"echo \\$\\$ >> pids; {trap} sleep 300 & wait; wait\" & done; wait'"
)


def ranks(run: RunFolder) -> list[int]:
    file = run.path / "pids"
    return [int(pid) for pid in file.read_text().split()] if file.exists() else []


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def processes(run: RunFolder) -> list[int]:
    return list(processes_with(LOCAL_RUN, str(run.path)))


@pytest.mark.parametrize("trap", ["", 'trap "" TERM;'.replace('"', '\\"')], ids=["polite", "deaf"])
def test_cancel_ends_every_process(
    run_of: Callable[[str], RunFolder], trap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    run = run_of(RANKS.format(trap=trap))
    until(lambda: len(ranks(run)) == 2)
    assert state(run).status == "running"
    everyone = processes(run)
    assert set(ranks(run)) < set(everyone)
    LocalScheduler().cancel([run])
    assert not [pid for pid in everyone if lives(pid)]
    assert state(run).status == "cancelled"


def test_ranks_that_outlive_their_script_are_still_the_run(
    run_of: Callable[[str], RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    run = run_of(RANKS.format(trap=""))
    until(lambda: len(ranks(run)) == 2)
    pid = int(str(run.manifest()["jobs"][0]["id"]).partition(":")[0])
    os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    assert state(run).status == "running"
    LocalScheduler().cancel([run])
    assert not any(map(lives, ranks(run)))


def test_a_script_that_was_killed_has_failed(run_of: Callable[[str], RunFolder]) -> None:
    run = run_of("sh -c 'touch started; sleep 300'")
    until((run.path / "started").exists)
    pid = int(str(run.manifest()["jobs"][0]["id"]).partition(":")[0])
    while alive := processes(run):
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    assert state(run).status == "failed"
    assert "without an exit status" in state(run).detail


def test_cancelling_what_has_ended_changes_nothing(run_of: Callable[[str], RunFolder]) -> None:
    run = run_of("true")
    until(lambda: state(run).final)
    LocalScheduler().cancel([run])
    assert state(run).status == "completed"


def test_a_recycled_pid_is_not_the_run(a_run: Callable[..., RunFolder]) -> None:
    """This very process has the pid, and started at another time."""
    ticks = local.start_of(os.getpid())
    run = a_run(f"{os.getpid()}:{int(ticks) - 1}")
    assert state(run).status == "failed"
    LocalScheduler().cancel([run])  # Would end this test run.
    assert local.start_of(os.getpid()) == ticks


def test_two_runs_do_not_see_each_other(
    a_run: Callable[..., RunFolder], a_job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "GRACE_SECONDS", 0.5)
    first = started(a_run(job_sh=script(f"{tmp_path}/runs/r-1", "sleep 300")), a_job)
    second = started(a_run(name="r-12", job_sh=script(f"{tmp_path}/runs/r-12", "sleep 300")), a_job)
    LocalScheduler().cancel([first])
    assert (state(first).status, state(second).status) == ("cancelled", "running")
    LocalScheduler().cancel([second])


def test_a_run_on_another_machine_is_asked_for_there(a_run: Callable[..., RunFolder]) -> None:
    run = a_run("1:1")
    run.update(host="elsewhere")
    assert (state(run).status, state(run).detail) == ("unknown", "runs on elsewhere; run the command there")
    assert only(refused(LocalScheduler().cancel, [run], exit_code=3)).code == "another-machine"


def test_one_machine_is_one_node(a_run: Callable[..., RunFolder]) -> None:
    job = Job("r", "", "/r", Resources(nodes=2), 1, "srun", "python3")
    assert only(refused(LocalScheduler().validate, job)).code == "local-is-one-node"


@pytest.mark.slow
def test_a_named_script_runs_as_the_ranks_of_a_real_torchrun(home: Path, write: Callable[[str, str], str]) -> None:
    """The whole way without Megatron training: recipe, run folder, node.py, torchrun, two ranks of the named script."""
    if not all(map(importlib.util.find_spec, ("torch", "megatron"))):
        pytest.skip("torch and megatron-core are not installed")
    program = write(
        "mine.py",
        "import os, sys, pathlib, time\n"
        "rank = int(os.environ['RANK'])\n"
        "pathlib.Path(f'rank-{rank}').write_text(repr((sys.argv[1:], os.environ['WORDS'])))\n"
        # torchrun ends the other rank as soon as one fails.
        "while rank == 1 and not pathlib.Path('rank-0').exists():\n"
        "    time.sleep(0.05)\n"
        "sys.exit(5 if rank == 1 else 0)\n",
    )
    recipe = write(
        "r.yaml",
        f"extends: tiny_cpu\nname: r\nlaunch: {{script: '{program}'}}\nresources: {{gpus_per_node: 2}}\n"
        'env: {WORDS: "it\'s\\n$(two)"}\n',
    )
    run = submit_run(single(prepare(recipe)), Cluster(python=sys.executable), home / "runs", LocalScheduler())
    until(lambda: state(run).final, 120)
    log = run.attempts()[0].log.read_text()
    assert (state(run).status, state(run).exit_code) == ("failed", 5), log
    for rank in (0, 1):
        argv, words = eval((run.path / f"rank-{rank}").read_text())
        assert argv == run.manifest()["megatron"]["argv"]
        assert words == "it's\n$(two)"
