"""What the nemo-run backend refuses before anything is written, and the lines that it puts into NeMo-Run's script."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import only, refused

from fp8launch import schedulers
from fp8launch.job.job import Job
from fp8launch.megatron.arguments import Argument
from fp8launch.plugins.nemo_run.scheduler import NemoRunScheduler, setup_lines
from fp8launch.rundir.run_dir import RunFolder


def test_asking_for_the_backend_imports_nothing_of_nemo_run() -> None:
    program = (
        "import sys\nfrom fp8launch import schedulers\nb = schedulers.by_name('nemo-run')\nb.states([])\n"
        "assert not {'nemo_run', 'fiddle', 'torchx'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert "nemo-run" in schedulers.names()


@pytest.mark.parametrize(
    "broken",
    ["raise ModuleNotFoundError(\"No module named 'leptonai.api.v1'\")", "raise TypeError('metaclass conflict')"],
)
def test_a_nemo_run_that_cannot_be_imported_is_one_message(
    fake_slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    (tmp_path / "nemo_run.py").write_text(broken + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nemo_run", raising=False)
    fake_slurm.program("scontrol", "Slurmctld(primary) at head is DOWN", status=1)
    problem = only(refused(NemoRunScheduler().require, exit_code=3))
    assert problem.code == "no-nemo-run"
    assert "leptonai<0.28" in str(problem.fix) and sys.executable in str(problem.fix)


def with_option(job: Job, name: str, value: str | bool) -> Job:
    """The job with one more option of its cluster profile."""
    options = {**job.resources.options, "options": {name: value}}
    return replace(job, resources=replace(job.resources, options=options))


def test_without_an_account_nothing_is_written(a_job: Any) -> None:
    without = replace(a_job, resources=replace(a_job.resources, account=None))
    problem = only(refused(NemoRunScheduler().validate, without))
    assert problem.code == "nemo-run-account" and "account:" in str(problem.fix)


@pytest.mark.parametrize("home", ["/a b", "/a;b", "/$(touch x)", "/a'b"])
def test_a_folder_that_nemo_run_would_give_to_a_shell_unquoted(
    a_job: Any, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    monkeypatch.setenv("NEMORUN_HOME", home)
    assert only(refused(NemoRunScheduler().validate, a_job)).code == "nemo-run-home"


def test_paths_that_nemo_run_would_rewrite(a_job: Any) -> None:
    assert only(refused(NemoRunScheduler().validate, replace(a_job, folder="/x/nemo_run/r-1"))).code == "nemo-run-path"
    job = with_option(a_job, "chdir", "/y/nemo_runs")
    assert only(refused(NemoRunScheduler().validate, job)).code == "nemo-run-path"


def test_its_script_gets_a_path_and_no_value(a_job: Any, a_run: Callable[..., RunFolder]) -> None:
    job = replace(
        a_job,
        environment=(("NASTY", "canary"),),
        secrets=("HF_TOKEN",),
        arguments=(Argument("lr", ("--lr", "canary")),),
    )
    text = setup_lines(job, a_run(job_sbatch="exit 7\n"))
    assert "canary" not in text and "HF_TOKEN" not in text


@pytest.mark.parametrize("status", [0, 1, 7, 255])
def test_the_lines_end_the_script_with_our_status_and_print_nothing(
    a_job: Any, a_run: Callable[..., RunFolder], status: int
) -> None:
    """Run as NeMo-Run runs them: in a shell that prints what it reads and does, with what it exports."""
    run = a_run(name="r 1", job_sbatch=f"echo flags:$- left:${{!SLURM_UN*}}${{!TORCHX*}}\nexit {status}\n")
    before = "set -evx\nexport SLURM_UNBUFFEREDIO=1 TORCHX_MAX_RETRIES=3\nset +e\n"
    done = subprocess.run(
        ["bash", "-c", f"{before}{setup_lines(a_job, run)}\necho reached"], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    # Neither a flag nor a variable of NeMo-Run's shell is left.
    assert done.stdout == "flags:hB left:\n"


@pytest.mark.parametrize(("option", "told"), [("no-requeue", True), ("requeue", False)])
def test_a_job_that_shall_not_be_requeued_says_so_itself(
    fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder], option: str, told: bool
) -> None:
    fake_slurm.program("scontrol")
    run = a_run(job_sbatch="exit 5\n")
    job = with_option(a_job, option, True)
    done = subprocess.run(["bash", "-c", setup_lines(job, run)], env={"SLURM_JOB_ID": "42", **_path()}, check=False)
    assert done.returncode == 5
    assert fake_slurm.calls == (["scontrol update JobId=42 Requeue=0"] if told else [])


def test_a_job_that_cannot_be_kept_from_requeueing_does_not_run(
    fake_slurm: Any, a_job: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("scontrol", status=1, complaint="Access/permission denied")
    job = with_option(a_job, "no-requeue", True)
    run = a_run(job_sbatch="exit 0\n")
    done = subprocess.run(["bash", "-c", setup_lines(job, run)], env={"SLURM_JOB_ID": "42", **_path()}, check=False)
    assert done.returncode == 1


def _path() -> dict[str, str]:
    return {"PATH": os.environ["PATH"]}
