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

from fp8launch.backends.submitit import RunScript, SubmititBackend, _executor, finish_submission
from fp8launch.job.script import batch_script
from fp8launch.runs.folder import RunFolder

pytest.importorskip("submitit")
LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"


@pytest.fixture
def generated(fake_slurm: Any, a_job: Any, tmp_path: Path) -> str:
    """The text that submitit's own code writes for a job."""
    fake_slurm.program("srun")
    return str(_executor(a_job, tmp_path / "submitit")._make_submission_file_text("the command", "uid"))


def test_the_options_are_those_of_our_own_script(generated: str, a_job: Any) -> None:
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
    problem = only(refused(SubmititBackend().submit, a_job, a_run(job_sbatch=""), exit_code=3))
    assert problem.code == "no-slurm"


def test_a_refusal_is_told_in_slurms_words(fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", status=1, complaint="sbatch: error: invalid partition specified: nope")
    problem = only(refused(SubmititBackend().submit, a_job, a_run(job_sbatch=""), exit_code=3))
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
    assert SubmititBackend().submit(a_job, a_run(job_sbatch="")) == "4242"
    assert not {"SLURM_NTASKS", "RANK"} & set(fake_slurm.environment("sbatch"))
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("script", "status"), [("exit 0", 0), ("exit 7", 7), ("exit 255", 255), ("kill -KILL $$", 137)]
)
def test_the_job_ends_with_the_scripts_exit_status(
    fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder], script: str, status: int
) -> None:
    """Submitit's own command, run as its job would run it."""
    fake_slurm.program("srun")
    fake_slurm.program("sbatch", "Submitted batch job 4242")
    run = a_run(job_sbatch=f"touch ran\n{script}\n")
    SubmititBackend().submit(a_job, run)
    submission = next((run.path / "submitit").rglob("*submission.sh"))
    job = {"SLURM_JOB_ID": "4242", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1",
           "SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "n"}  # fmt: skip
    done = subprocess.run(
        ["bash", submission], cwd=run.path, env={**os.environ, **job, "PYTHONPATH": str(LAUNCHERS)}, check=False,
        capture_output=True,
    )  # fmt: skip
    assert (run.path / "ran").exists()
    assert done.returncode == status


def test_what_is_pickled_is_a_path_and_nothing_else() -> None:
    assert vars(RunScript("/a")) == {"script": "/a"}
    assert sys.modules[RunScript.__module__].__name__ == "fp8launch.backends.submitit"


def test_a_submission_that_was_cut_off_after_sbatch_gets_its_pickle(tmp_path: Path) -> None:
    """As submitit leaves it when its process is killed before it learns the job's id."""
    unnamed = tmp_path / "f3f620a7412e443db8c3ce8f80ff21a5.pkl"
    unnamed.write_bytes(b"what runs")
    finish_submission(tmp_path, "51")
    assert (tmp_path / "51_submitted.pkl").read_bytes() == b"what runs" and not unnamed.exists()
    finish_submission(tmp_path, "51")
    assert [file.name for file in tmp_path.iterdir()] == ["51_submitted.pkl"]
