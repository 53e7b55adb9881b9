"""Submitit as a thin wrapper: the script that it writes itself, and what becomes of exit codes and the environment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import only, refused

from fp8launch import cli
from fp8launch.plugins.submitit.scheduler import RunScript, RunTask, SubmititScheduler, _executor
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.slurm.batch_script import batch_script
from fp8launch.schedulers.slurm.options import sbatch_options

pytest.importorskip("submitit")
LAUNCHERS = Path(__file__).resolve().parents[3] / "launchers"


@pytest.fixture
def generated(fake_slurm: Any, a_job: Any, tmp_path: Path) -> str:
    """The text that submitit's own code writes for a job."""
    fake_slurm.program("srun")
    return str(_executor(sbatch_options(a_job), tmp_path / "submitit")._make_submission_file_text("the command", "uid"))


def test_the_options_match_our_own_script(generated: str, a_job: Any) -> None:
    def options(text: str) -> set[str]:
        return {line for line in text.splitlines() if line.startswith("#SBATCH")}

    assert options(generated) - options(batch_script(a_job)) == {"#SBATCH --signal=B:CONT@1"}
    assert options(batch_script(a_job)) <= options(generated)
    assert generated.count("--job-name") == 1


def test_no_workload_key_no_srun_and_no_signal_that_kills(generated: str) -> None:
    assert "wckey" not in generated
    assert "USR2" not in generated
    assert not [line for line in generated.splitlines() if line.startswith("srun")]
    assert "\nthe command\n" in generated


def test_without_slurm_it_says_so(a_job: Any, a_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    problem = only(refused(SubmititScheduler().submit, a_job, a_run(job_sbatch=""), "k", exit_code=3))
    assert problem.code == "no-slurm"


def test_a_refusal_is_reported_in_slurms_words(fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", status=1, complaint="sbatch: error: invalid partition specified: nope")
    problem = only(refused(SubmititScheduler().submit, a_job, a_run(job_sbatch=""), "k", exit_code=3))
    assert "invalid partition specified: nope" in problem.message
    assert "partition:" in str(problem.fix)


def test_the_environment_of_a_surrounding_job_is_left_out_and_comes_back(
    fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "99")
    monkeypatch.setenv("RANK", "3")
    before = dict(os.environ)
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", "Submitted batch job 4242")
    assert SubmititScheduler().submit(a_job, a_run(job_sbatch=""), "k") == "4242"
    assert not {"SLURM_NTASKS", "RANK"} & set(fake_slurm.environment("sbatch"))
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -KILL $$", 137)]
)
def test_the_job_ends_with_the_scripts_exit_status(
    fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder], script: str, status: int
) -> None:
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", "Submitted batch job 4242")
    run = a_run(job_sbatch=f'touch "${{0%/*}}/ran"\n{script}\n')
    SubmititScheduler().submit(a_job, run, "k")
    submission = next((run.path / "submitit").rglob("*submission.sh"))
    done = run_as_job(submission, run.path)
    assert (run.path / "ran").exists()
    assert done.returncode == status


def test_what_is_pickled_is_a_path_and_nothing_else() -> None:
    assert vars(RunScript("/a")) == {"script": "/a"}
    assert vars(RunTask("/a")) == {"tasks": "/a"}
    assert sys.modules[RunScript.__module__].__name__ == "fp8launch.plugins.submitit.scheduler"


JOB = {
    "SLURM_JOB_ID": "4242", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1",
    "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n",
}  # fmt: skip


def run_as_job(submission: Path, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Submitit's own submission file, run as its job would run it."""
    env = {**os.environ, **JOB, "PYTHONPATH": str(LAUNCHERS), **variables}
    return subprocess.run(["bash", submission], cwd=folder, env=env, check=False, capture_output=True, text=True)


def test_the_job_imports_nothing_from_the_folder_where_it_was_submitted(
    fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder], tmp_path: Path
) -> None:
    """Submitit starts Python with -m in that folder, which may be somebody else's checkout."""
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", "Submitted batch job 4242")
    run = a_run(job_sbatch='touch "${0%/*}/ran"\n')
    SubmititScheduler().submit(a_job, run, "k")
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("json", "submitit", "fp8launch", "pickle"):
        (theirs / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    done = run_as_job(next((run.path / "submitit").rglob("*submission.sh")), theirs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run.path / "ran").exists()
    assert not (tmp_path / "canary").exists()


def test_a_job_whose_launcher_was_killed_before_it_named_the_pickle_runs_all_the_same(
    fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", "Submitted batch job 4242")
    run = a_run(job_sbatch='touch "${0%/*}/ran"\n')
    SubmititScheduler().submit(a_job, run, "k")
    # As it was a moment before: the job's id was not known, and the file had a name of its own.
    file = next((run.path / "submitit").rglob("4242_submitted.pkl"))
    file.rename(file.with_name("f3f620a7412e443db8c3ce8f80ff21a5.pkl"))
    done = run_as_job(next((run.path / "submitit").rglob("*submission.sh")), run.path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (run.path / "ran").exists()


def test_a_grid_is_one_array(fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder], tmp_path: Path) -> None:
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", "Submitted batch job 4242")
    runs = [a_run(name=f"r-{n}", job_sbatch=f"touch '{tmp_path}/ran-{n}'; exit {n}\n") for n in range(3)]
    (tmp_path / "study/arrays").mkdir(parents=True)
    jobs = SubmititScheduler().submit_array([(run, a_job) for run in runs], "s.0", tmp_path / "study", 2)
    assert jobs == ["4242_0", "4242_1", "4242_2"]
    assert [call.split()[0] for call in fake_slurm.calls] == ["sbatch"]
    submission = next((tmp_path / "study").rglob("*submission.sh"))
    options = [line for line in submission.read_text().splitlines() if line.startswith("#SBATCH")]
    assert "#SBATCH --array=0-2%2" in options
    assert "#SBATCH --comment='fp8launch:s.0 two words'" in options
    assert f"#SBATCH --output={tmp_path}/study/logs/slurm-%A_%a.out" in options
    for pickle in (tmp_path / "study").rglob("*_submitted.pkl"):
        pickle.unlink()
    array = {"SLURM_ARRAY_JOB_ID": "4242", "SLURM_ARRAY_TASK_COUNT": "3"}
    for number in (2, 0):
        done = run_as_job(
            submission, tmp_path, **array, SLURM_JOB_ID=str(4242 + number), SLURM_ARRAY_TASK_ID=str(number)
        )
        assert done.returncode == number, done.stdout + done.stderr
    assert sorted(file.name for file in tmp_path.glob("ran-*")) == ["ran-0", "ran-2"]


def test_the_signal_that_the_run_asks_for_is_the_jobs(fake_slurm: Any, a_job: Any, tmp_path: Path) -> None:
    """Megatron saves and leaves when Slurm sends SIGTERM before the time limit."""
    fake_slurm.program("srun")
    executor = _executor({**sbatch_options(a_job), "signal": "TERM@60"}, tmp_path / "submitit")
    signals = [line for line in executor._make_submission_file_text("c", "u").splitlines() if "--signal" in line]
    assert signals == ["#SBATCH --signal=TERM@60"]


def test_without_submitit_nothing_is_made(
    home: Path, fake_slurm: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_slurm.program("scontrol", "Slurmctld(primary) at head is DOWN", status=1)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.run(["submit", "tiny_cpu", "--backend", "submitit"]) == 3
    err = capfd.readouterr().err
    assert "[no-submitit]" in err and f"{sys.executable} -m pip install 'submitit" in err
    assert not list(home.rglob("manifest.json"))
    assert only(refused(SubmititScheduler().require, exit_code=3)).code == "no-submitit"
