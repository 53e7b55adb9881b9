"""What squeue, sacct and the run folder say, put together: one state, right where any of them is missing."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import only, refused

from fp8launch import cli
from fp8launch.diagnostics import UserError
from fp8launch.rundir import atomic_io
from fp8launch.rundir.attempts import CANCELLED, SURVIVE
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState
from fp8launch.schedulers.environment import clean_environment
from fp8launch.schedulers.slurm import sbatch, slurm_cli, slurm_jobs
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler
from fp8launch.submit.submission import cancel_runs, record_job

DISABLED = "Slurm accounting storage is disabled"
SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def state(run: RunFolder) -> JobState:
    return slurm_jobs.states([run])[0]


def left(run: RunFolder, attempt: str, status: int | None) -> RunFolder:
    """As if this attempt had run, and had left this exit status."""
    (run.path / "logs" / f"{attempt}.log").touch()
    if status is not None:
        (run.path / "logs" / f"{attempt}.exit").write_text(f"{status}\n")
    return run


@pytest.mark.parametrize(
    ("word", "status"),
    [
        ("PENDING", "pending"),
        ("CONFIGURING", "pending"),
        ("REQUEUE_HOLD", "pending"),
        ("SPECIAL_EXIT", "pending"),
        ("RUNNING", "running"),
        ("COMPLETING", "running"),
        ("SUSPENDED", "running"),
        ("STAGE_OUT", "running"),
        ("EXPEDITING", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_living_job_is_as_squeue_says(
    fake_slurm: Any, a_run: Callable[..., RunFolder], word: str, status: str
) -> None:
    fake_slurm.program("squeue", f"11|RUNNING|None\n12|{word}|Priority")
    fake_slurm.program("sacct", "12|COMPLETED|0:0|None")
    found = state(a_run("12"))
    assert (found.status, found.source, found.final) == (status, "squeue", False)
    assert found.detail == f"{word}: Priority"


@pytest.mark.parametrize(
    ("rows", "status", "code"),
    [
        ("12|COMPLETED|0:0|None", "completed", 0),
        ("12|COMPLETED|0:0|", "completed", 0),
        ("12|FAILED|7:0|NonZeroExitCode", "failed", 7),
        ("12|FAILED|0:9|RaisedSignal:9(Killed)", "failed", 137),
        ("12|CANCELLED by 1000|0:15|None", "cancelled", 143),
        ("12|CANCELLED+|0:0|None", "cancelled", 0),
        ("12|TIMEOUT|0:0|TimeLimit", "timeout", 0),
        ("12|NODE_FAIL|1:0|NodeDown", "node_fail", 1),
        ("12|OUT_OF_MEMORY|0:125|OutOfMemory", "out_of_memory", 253),
        ("12|PREEMPTED|0:0|", "cancelled", 0),
        ("12|BOOT_FAIL|0:0|", "node_fail", 0),
        ("12|REQUEUED|0:0|None\n12|NODE_FAIL|1:0|\n12|COMPLETED|0:0|None", "completed", 0),
        ("12|FAILED|1:0|a|b|c", "failed", 1),
        ("12|FAILED", "failed", None),
    ],
)
def test_an_ended_job_is_as_sacct_says(
    fake_slurm: Any, a_run: Callable[..., RunFolder], rows: str, status: str, code: int | None
) -> None:
    fake_slurm.program("squeue", "")
    fake_slurm.program("sacct", rows)
    found = state(a_run("12"))
    assert (found.status, found.exit_code, found.source) == (status, code, "sacct")
    assert found.final


def test_the_exit_code_is_known_while_squeue_still_shows_the_end(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("squeue", "12|FAILED|NonZeroExitCode")
    fake_slurm.program("sacct", "12|FAILED|7:0|NonZeroExitCode")
    assert (state(a_run("12")).status, state(a_run("12", name="r-2")).exit_code) == ("failed", 7)


def test_a_task_without_a_record_is_cancelled_only_if_squeue_has_forgotten_it(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    """The accounting learns of the tasks of an array one by one, and later than squeue."""
    run = a_run("12_1")
    fake_slurm.program("sacct", "12_0|COMPLETED|0:0|None")
    fake_slurm.program("squeue", "12_1|COMPLETED|None")
    assert (state(run).status, state(run).source) == ("completed", "squeue")
    fake_slurm.program("squeue", status=1, complaint="Unable to contact slurm controller")
    assert state(run).status == "unknown"
    fake_slurm.program("squeue", "")
    assert (state(run).status, state(run).detail) == ("cancelled", "CANCELLED while it waited")


def test_without_accounting_the_end_comes_from_squeue_and_the_run_folder(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("sacct", status=1, complaint=DISABLED)
    fake_slurm.program("squeue", "12|TIMEOUT|TimeLimit")
    run = left(a_run("12"), "12-0", None)
    assert state(run).status == "timeout"
    fake_slurm.program("squeue", "12|FAILED|NonZeroExitCode")
    assert state(left(run, "12-0", 7)) == JobState("failed", "FAILED: NonZeroExitCode", 7, "squeue")
    fake_slurm.program("squeue", "")
    assert state(run) == JobState("failed", "exit status 7", 7, "run folder")
    assert state(left(a_run("13", name="r-2"), "13-0", 0)).status == "completed"


def test_a_job_that_began_and_is_forgotten_is_over(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    """Without accounting it stayed unknown for good, and could not be resumed."""
    fake_slurm.program("squeue", "")
    fake_slurm.program("sacct", status=1, complaint=DISABLED)
    found = state(left(a_run("12"), "12-0", None))
    assert (found.status, found.final) == ("interrupted", True)
    assert "no longer knows" in found.detail


@pytest.mark.parametrize(
    ("accounted", "record", "status"),
    [
        ("12|COMPLETED|0:0|None", {}, "interrupted"),
        ("12|COMPLETED|0:0|None\n13|CANCELLED by 1000|0:0|None", {}, "interrupted"),
        ("12|FAILED|1:0|None", {}, "interrupted"),
        ("12|COMPLETED|0:0|None\n13|CANCELLED by 1000|0:0|None", {"finished": True}, "completed"),
        ("12|FAILED|1:0|None", {"stopped": "nan: another attempt would fail again"}, "failed"),
    ],
)
def test_a_run_whose_follow_up_is_gone_is_interrupted(
    fake_slurm: Any, a_run: Callable[..., RunFolder], accounted: str, record: dict[str, Any], status: str
) -> None:
    """It counted as completed in the middle of its training."""
    fake_slurm.program("squeue", "12|COMPLETED|None")
    fake_slurm.program("sacct", accounted)
    run = left(a_run("12"), "12-0", 0)
    attempts = {"attempts": [{"job": "12"}], "waiting": "13", "excluded": [], **record}
    (run.path / "attempts.json").write_text(json.dumps(attempts))
    found = state(run)
    assert found.status == status, found
    if status == "interrupted":
        assert "job 13, which was to continue the run, is " in found.detail
    # Nobody can say while a source is silent.
    fake_slurm.program("squeue", status=1, complaint=SILENT)
    assert state(run).status != "interrupted"


def test_a_cancelled_run_is_not_interrupted(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    """`fp8launch cancel` ends the job that waits as well, and the supervisor has no time to record it."""
    fake_slurm.program("squeue", "12|CANCELLED|None\n13|CANCELLED|None")
    fake_slurm.program("sacct", "12|CANCELLED by 0|0:0|None\n13|CANCELLED by 0|0:0|None")
    run = left(a_run("12"), "12-0", None)
    (run.path / "attempts.json").write_text(json.dumps({"attempts": [{"job": "12"}], "waiting": "13", "excluded": []}))
    run.update(cancelled="2026-01-01T00:00:00+00:00")
    assert state(run).status == "cancelled"


def test_a_silent_controller_is_reported_and_changes_nothing(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue", status=1, complaint=SILENT)
    fake_slurm.program("sacct", "")
    run = left(a_run("12"), "12-0", None)
    assert state(run).status == "unknown"
    assert SILENT in state(run).detail
    fake_slurm.program("sacct", "12|RUNNING|0:0|None")
    assert state(run).status == "running"
    assert state(left(run, "12-0", 0)) == JobState("completed", "exit status 0", 0, "run folder")


def test_the_exit_status_of_an_earlier_attempt_is_not_that_of_a_later_one(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("squeue", status=1, complaint=SILENT)
    fake_slurm.program("sacct", status=1, complaint=SILENT)
    run = left(left(a_run("12"), "12-0", 1), "12-1", None)
    assert state(run).status == "unknown"


def test_only_the_newest_job_of_a_run_counts(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue", "12|RUNNING|None\n13|PENDING|Resources")
    assert state(a_run("12", "13")).status == "pending"
    assert state(a_run("13", "12", name="r-2")).status == "running"


def test_many_runs_are_one_question(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue", "1|RUNNING|None\n3|COMPLETED|None")
    fake_slurm.program("sacct", "2|FAILED|1:0|\n3|COMPLETED|0:0|")
    found = slurm_jobs.states([a_run(job, name=f"r-{job}") for job in ("1", "2", "3")])
    assert [s.status for s in found] == ["running", "failed", "completed"]
    assert [call.split()[0] for call in fake_slurm.calls] == ["squeue", "sacct"]
    assert fake_slurm.calls[1].endswith("-j 2,3")


def test_runs_whose_jobs_have_one_number_are_told_apart(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    """Slurm gives numbers away again. Comments are in the accounting of few sites, the command line in that of all."""
    first, second, third = a_run("12"), a_run("12", name="r-2"), a_run("12", name="r-3")
    rows = [
        "12|COMPLETED|0:0|None|r||sbatch --parsable --comment=fp8launch:r-1.s0-ab x/job.sbatch",
        f"12|FAILED|1:0|None|r||sbatch {second.path}/submitit/submission_file_1.sh",
    ]
    fake_slurm.program("sacct", "\n".join(rows))
    fake_slurm.program("squeue", "12|RUNNING|None|r|fp8launch:r-3.s0-cd|x")
    found = slurm_jobs.states([first, second, third])
    assert [one.status for one in found] == ["completed", "failed", "running"]
    assert [one.status for one in slurm_jobs.states([third, second, first])] == ["running", "failed", "completed"]


def test_a_run_that_was_never_submitted_asks_nobody(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue")
    assert state(a_run()).status == "unknown"
    assert fake_slurm.calls == []


def test_a_command_that_hangs_is_given_up(fake_slurm: Any) -> None:
    fake_slurm.program("squeue", before="exec sleep 60")
    begin = time.monotonic()
    done = slurm_cli.call("squeue", timeout=0.5)
    assert time.monotonic() - begin < 5
    assert (done.returncode, done.stderr) == (124, "squeue did not answer within 0 s")


def test_a_command_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert slurm_cli.call("squeue").returncode == 127
    assert slurm_cli.version() is None


def test_words_that_are_not_utf8_do_no_harm(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue", before="printf '12|RUNNING|\\xff\\xfe\\n'; exit")
    assert state(a_run("12")).status == "running"


# --- refusals and cancelling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("invalid partition specified: x", "partition:"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "account:"),
        ("Batch job submission failed: Invalid qos specification", "qos:"),
        (
            "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or "
            "time limits)",
            "as many jobs as",
        ),
        ("Requested time limit is invalid (missing or exceeds some limit)", "resources.time"),
        ("Requested node configuration is not available", "resources.nodes"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "repeat the command"),
        ("Batch job submission failed: Resource temporarily unavailable", "repeat the command"),
        ("sbatch: unrecognized option '--container-image=x'", "runtime:"),
    ],
)
def test_a_refusal_is_slurms_words_and_what_to_change(
    fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any, words: str, advice: str
) -> None:
    fake_slurm.program("sbatch", status=1, complaint=f"sbatch: error: {words}")
    problem = only(refused(SlurmScheduler().submit, a_job, a_run(job_sbatch="#!/bin/bash\n"), "k", exit_code=3))
    assert words.replace("sbatch: ", "") in problem.message
    assert advice in str(problem.fix)


@pytest.mark.parametrize("answer", ["4242", "4242;cluster"])
def test_sbatch_is_given_the_script_and_a_clean_environment(
    fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_NTASKS", "99")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("X_MINE", "kept")
    fake_slurm.program("sbatch", answer)
    run = a_run(job_sbatch="#!/bin/bash\n")
    assert SlurmScheduler().submit(a_job, run, "r-1.s0") == "4242"
    assert fake_slurm.calls == [f"sbatch --parsable --comment=fp8launch:r-1.s0 two words {run.path}/job.sbatch r-1.s0"]
    seen = fake_slurm.environment("sbatch")
    assert not {"SLURM_NTASKS", "SBATCH_PARTITION", "MASTER_ADDR"} & set(seen)
    assert seen["X_MINE"] == "kept"


def test_an_answer_without_a_job_id_is_an_error(fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any) -> None:
    fake_slurm.program("sbatch", "all is well")
    assert only(refused(SlurmScheduler().submit, a_job, a_run(), "k", exit_code=3)).code == "sbatch-refused"


def test_cancel_names_every_job_of_a_run(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("scancel")
    fake_slurm.program("squeue", "12|RUNNING|None|r|\n13|PENDING|None|r|fp8launch:r-1.s1\n14|RUNNING|None|r|")
    SlurmScheduler().cancel([a_run("12", "13")])
    SlurmScheduler().cancel([a_run(name="r-2")])
    assert [call for call in fake_slurm.calls if call.startswith("scancel")] == ["scancel 12 13"]


@pytest.mark.parametrize("comment", ["fp8launch:r-2", "fp8launch:r-1x", "fp8launch:r-1.s1x", "fp8launch:"])
def test_a_job_that_only_has_the_number_of_ours_is_neither_shown_nor_cancelled(
    fake_slurm: Any, a_run: Callable[..., RunFolder], comment: str
) -> None:
    """Slurm counts from 1 again when its state is lost."""
    fake_slurm.program("scancel")
    fake_slurm.program("sacct", f"12|FAILED|1:0|None|r|{comment}")
    fake_slurm.program("squeue", f"12|RUNNING|None|r|{comment}")
    assert state(a_run("12")).status == "unknown"
    SlurmScheduler().cancel([a_run("12", name="r-9")])
    assert not [call for call in fake_slurm.calls if call.startswith("scancel")]


def test_of_two_runs_with_one_number_the_one_whose_job_lives_is_cancelled(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    first, second = a_run("12"), a_run("12", name="r-2")
    fake_slurm.program("squeue", "12|RUNNING|None|r|fp8launch:r-1.s0-ab|x")
    fake_slurm.program("scancel")
    slurm_jobs.cancel_runs([first, second])
    assert "scancel 12" in fake_slurm.calls
    before = fake_slurm.calls.count("scancel 12")
    slurm_jobs.cancel_runs([second])
    assert fake_slurm.calls.count("scancel 12") == before


def test_where_comments_are_not_kept_the_name_tells(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("sacct", "")
    fake_slurm.program("squeue", "12|RUNNING|None|other|\n13|RUNNING|None|mine|the site's own words")
    run = a_run("12")
    run.update(name="mine")
    assert state(run).status == "unknown"
    run.update(jobs=[{"id": "13"}])
    assert state(run).status == "running"


def test_nothing_is_cancelled_while_nobody_can_say_whose_it_is(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("scancel")
    fake_slurm.program("squeue", status=1, complaint=SILENT)
    assert only(refused(SlurmScheduler().cancel, [a_run("12")], exit_code=3)).code == "slurm-silent"
    assert not [call for call in fake_slurm.calls if call.startswith("scancel")]


def test_an_array_is_cancelled_whole_only_where_all_that_lives_of_it_is_ours(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("scancel")
    runs = [a_run(f"7_{n}", name=f"r-{n}") for n in range(3)]
    study = runs[0].path.parent
    (study / "study.json").write_text("{}")
    tasks = "\n".join(f"7_{n}|RUNNING|None|r|fp8launch:{study.name}.0" for n in range(3))
    fake_slurm.program("squeue", tasks)
    slurm_jobs.cancel_runs(runs[:2])
    slurm_jobs.cancel_runs(runs)
    assert [call for call in fake_slurm.calls if call.startswith("scancel")] == ["scancel 7_0 7_1", "scancel 7"]


def test_cancelling_what_has_ended_is_no_error_and_a_refusal_is(fake_slurm: Any) -> None:
    fake_slurm.program(
        "scancel", status=1, complaint="scancel: error: Kill job error on job id 5: Invalid job id specified"
    )
    slurm_jobs.scancel(["5"])
    fake_slurm.program(
        "scancel", status=1, complaint="scancel: error: Kill job error on job id 5: Access/permission denied"
    )
    problem = only(refused(slurm_jobs.scancel, ["5"], exit_code=3))
    assert "permission denied" in problem.message


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("SLURM_JOB_ID", False),
        ("SLURM_NTASKS", False),
        ("SLURMD_NODENAME", False),
        ("SBATCH_ACCOUNT", False),
        ("SRUN_CPUS_PER_TASK", False),
        ("SALLOC_PARTITION", False),
        ("PMI_RANK", False),
        ("PMIX_RANK", False),
        ("OMPI_COMM_WORLD_RANK", False),
        ("TORCHELASTIC_RUN_ID", False),
        ("SUBMITIT_EXECUTOR", False),
        ("RANK", False),
        ("LOCAL_RANK", False),
        ("WORLD_SIZE", False),
        ("MASTER_PORT", False),
        ("SLURM_CONF", True),
        ("SLURM_CLUSTERS", True),
        ("PATH", True),
        ("HF_TOKEN", True),
        ("RANKING", True),
        ("MY_SLURM", True),
        ("PMIXTURE", True),
    ],
)
def test_only_what_belongs_to_a_surrounding_job_is_left_out(name: str, kept: bool) -> None:
    assert (name in clean_environment({name: "x"})) == kept


def test_an_empty_slurm_conf_is_left_out() -> None:
    assert clean_environment({"SLURM_CONF": "", "A": ""}) == {"A": ""}


def test_the_processs_own_environment_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert "SLURM_JOB_ID" not in clean_environment()
    assert os.environ["SLURM_JOB_ID"] == "1"


# --- jobs that ended before they began --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("listed", "tasks"),
    [
        ("12", ["12"]),
        ("12_3", ["12_3"]),
        ("12_[0-2]", ["12_0", "12_1", "12_2"]),
        ("12_[0,4-5%2]", ["12_0", "12_4", "12_5"]),
        ("12_[0-6:3]", ["12_0", "12_3", "12_6"]),
        ("12_[]", []),
        ("12_[5-1]", []),
        ("12_[0-2", ["12_[0-2"]),
    ],
)
def test_an_array_that_waits_is_listed_in_brackets(listed: str, tasks: list[str]) -> None:
    assert list(slurm_jobs.tasks_of(listed)) == tasks


def test_tasks_that_were_cancelled_while_they_waited(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    """The accounting has one row for all of them, which `-j 7_1` does not find."""
    fake_slurm.program("squeue", "")
    fake_slurm.program("sacct", "7_0|COMPLETED|0:0|None|r|\n7_[1-2%4]|CANCELLED by 0|0:0|BeginTime|r|")
    found = slurm_jobs.states([a_run(f"7_{n}", name=f"r-{n}") for n in range(3)])
    assert [state.status for state in found] == ["completed", "cancelled", "cancelled"]
    assert fake_slurm.calls[-1].endswith("-j 7")


def test_what_fp8launch_cancelled_is_cancelled_even_where_slurm_has_forgotten_it(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("scancel")
    fake_slurm.program("squeue", "7_0|PENDING|Resources|r|")
    fake_slurm.program("sacct", status=1, complaint=DISABLED)
    run = a_run("7_0")
    cancel_runs([run], SlurmScheduler())
    fake_slurm.program("squeue", "")
    assert state(run) == JobState("cancelled", "by fp8launch cancel", None, "run folder")
    assert state(left(run, "7_0-0", 0)).status == "completed", "it was done before it could be ended"
    record_job(run, "8")
    assert state(run).status == "unknown", "the mark was for the job before"


def test_a_full_disk_does_not_keep_a_run_from_being_cancelled(
    fake_slurm: Any, a_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark against further attempts could not be written, so nothing was cancelled."""
    fake_slurm.program("scancel")
    fake_slurm.program("squeue", "7_0|RUNNING|None|r|")
    fake_slurm.program("sacct", status=1, complaint=DISABLED)
    run = a_run("7_0")
    (run.path / SURVIVE).write_text("{}")

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic_io.os, "fsync", full)
    with pytest.raises(UserError, match="the jobs are cancelled, but their run folders do not say so: No space left"):
        cancel_runs([run], SlurmScheduler())
    assert any(call.startswith("scancel") for call in fake_slurm.calls)
    assert (run.path / CANCELLED).exists()


def test_a_job_that_never_began_and_is_gone_may_be_submitted_again(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("squeue", "")
    fake_slurm.program("sacct", "")
    found = state(a_run("7_0"))
    assert (found.status, found.dropped) == ("unknown", True)
    assert "--retry-failed" in found.detail
    assert not state(left(a_run("8", name="r-2"), "8-0", None)).dropped, "one that began may have trained"
    fake_slurm.program("squeue", status=1, complaint=SILENT)
    assert not state(a_run("7_0", name="r-3")).dropped


@pytest.mark.parametrize("began", [True, False])
def test_an_accounting_that_does_not_answer_is_named(
    fake_slurm: Any, a_run: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    real = slurm_cli.call
    monkeypatch.setattr(slurm_cli, "call", lambda *command, timeout=0.5: real(*command, timeout=min(timeout, 0.5)))
    fake_slurm.program("squeue", "")
    fake_slurm.program("sacct", before="exec sleep 60")
    run = left(a_run("12"), "12-0", None) if began else a_run("12")
    found = state(run)
    assert (found.status, found.dropped, found.source) == ("unknown", False, "sacct")
    assert "sacct did not answer within" in found.detail and "no longer knows" not in found.detail


def test_a_run_root_that_the_node_does_not_see_is_named(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue", "12|FAILED|NonZeroExitCode")
    fake_slurm.program("sacct", "12|FAILED|0:53|NonZeroExitCode")
    run = a_run("12")
    found = state(run)
    assert (found.status, found.exit_code) == ("failed", 181)
    assert str(run.path) in found.detail and "every node sees" in found.detail and found.folder_unseen
    assert "every node sees" not in state(left(run, "12-0", None)).detail, "it could write its log"


def test_a_job_that_no_node_could_start_is_explained_before_the_accounting_knows_it(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    """squeue says FAILED without an exit code for some minutes."""
    fake_slurm.program("squeue", "12|FAILED|JobLaunchFailure|r|")
    fake_slurm.program("sacct", "")
    found = state(a_run("12"))
    assert (found.status, found.exit_code, found.folder_unseen) == ("failed", None, False)
    assert "JobLaunchFailure" in found.detail and "every node sees" in found.detail


@pytest.mark.parametrize(
    ("word", "reason", "detail"),
    [
        ("FAILED", "BeginTime", "FAILED"),
        ("FAILED", "JobHeldUser", "FAILED"),
        ("CANCELLED by 0", "Priority", "CANCELLED by 0"),
        ("FAILED", "NonZeroExitCode", "FAILED: NonZeroExitCode"),
        ("FAILED", "RaisedSignal:9(Killed)", "FAILED: RaisedSignal:9(Killed)"),
        ("TIMEOUT", "TimeLimit", "TIMEOUT: TimeLimit"),
    ],
)
def test_why_an_ended_job_once_waited_is_not_why_it_ended(
    fake_slurm: Any, a_run: Callable[..., RunFolder], word: str, reason: str, detail: str
) -> None:
    fake_slurm.program("squeue", "")
    fake_slurm.program("sacct", f"12|{word}|1:0|{reason}")
    assert state(a_run("12")).detail == detail


# --- the comment of a cluster profile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ["sbatch", pytest.param("submitit", marks=pytest.mark.needs_plugin("submitit"))])
def test_the_profiles_comment_is_in_the_dry_run_and_in_the_job(
    fake_slurm: Any, home: Path, scheduler: str, capfd: pytest.CaptureFixture[str], write: Callable[[str, str], str]
) -> None:
    fake_slurm.program("scontrol", "Slurmctld(primary) at head is DOWN", status=1)
    fake_slurm.program("srun")
    # What submitit reads is a sentence, and what sbatch --parsable prints a number.
    keep = 'cat "${!#}" > "$HOME/script"; [ "$1" = --parsable ] || echo -n "Submitted batch job "'
    fake_slurm.program("sbatch", "4242", before=keep)
    profile = write("c.yaml", "options: {comment: FP8 pre-training}\n")
    submit = ["submit", "tiny_cpu", "--cluster", profile, "--backend", scheduler]
    assert cli.run([*submit, "--dry-run"]) == 0
    assert re.search(r"^#SBATCH --comment='fp8launch:tiny_cpu-\S+ FP8 pre-training'$", capfd.readouterr().out, re.M)
    assert cli.run(submit) == 0
    seen = fake_slurm.calls[-1] + (home / "script").read_text()
    assert re.search(r"--comment='?fp8launch:tiny_cpu-\S+\.s0-\w+ FP8 pre-training", seen), seen


def test_a_job_is_found_by_its_key_whatever_follows_it(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    jobs = ["7|/r/job.sbatch|fp8launch:r-1.s0-ab FP8 pre-training", "8|/r/job.sbatch|fp8launch:r-1.s0-abc"]
    fake_slurm.program("squeue", "\n".join([*jobs, "9|/r-1.s0-ab.old/job.sbatch|(null)"]))
    fake_slurm.program("sacct", "")
    assert SlurmScheduler().find(["r-1.s0-ab", "r-2.s0"]) == {"r-1.s0-ab": "7"}
    row = slurm_jobs.JobRow("7", "RUNNING", comment="fp8launch:r-1.s0-ab FP8 pre-training")
    assert slurm_jobs.is_job_of(row, a_run("7"))


def test_another_attempt_keeps_the_profiles_comment(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("sbatch", "9")
    run = a_run("7", job_sbatch="")
    run.update(slurm={"comment": "fp8launch:r-1 FP8 pre-training"})
    assert SlurmScheduler().resume(run, "r-1.r1", ["n1", "n2"]) == "9"
    assert "--comment=fp8launch:r-1.r1 FP8 pre-training --exclude=n1,n2" in fake_slurm.calls[-1]


# --- a controller that has just started -------------------------------------------------------------------------------


NOT_YET = "sbatch: error: Batch job submission failed: Requested node configuration is not available"


def started_seconds_ago(fake_slurm: Any, seconds: float) -> None:
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() - seconds))
    fake_slurm.program("scontrol", f"BOOT_TIME               = {when}")


def test_a_controller_that_waits_for_its_nodes_is_asked_again(
    fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sbatch, "NODE_SECONDS", 0.0)
    started_seconds_ago(fake_slurm, 20)
    refuses_twice = f'echo >> "$HOME/times"; [ $(wc -l < "$HOME/times") -gt 2 ] || {{ echo "{NOT_YET}" >&2; exit 1; }}'
    fake_slurm.program("sbatch", "4242", before=refuses_twice)
    monkeypatch.setenv("HOME", str(a_run().path))
    assert SlurmScheduler().submit(a_job, a_run(name="r-2", job_sbatch=""), "k") == "4242"


@pytest.mark.parametrize(("seconds", "advice", "calls"), [(20, "in a minute", 7), (3600, "resources.nodes", 1)])
def test_what_to_do_about_missing_nodes_depends_on_when_the_controller_started(
    fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any, monkeypatch: pytest.MonkeyPatch, seconds: int,
    advice: str, calls: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(sbatch, "NODE_SECONDS", 0.0)
    started_seconds_ago(fake_slurm, seconds)
    fake_slurm.program("sbatch", status=1, complaint=NOT_YET)
    problem = only(refused(SlurmScheduler().submit, a_job, a_run(job_sbatch=""), "k", exit_code=3))
    assert advice in str(problem.fix)
    assert sum(call.startswith("sbatch") for call in fake_slurm.calls) == calls


def test_a_job_that_no_node_can_take_is_refused_also_by_a_new_controller(
    fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any
) -> None:
    """All nodes have reported: waiting for them would not help."""
    started_seconds_ago(fake_slurm, 20)
    fake_slurm.program("sinfo", "idle\nmixed\nidle")
    fake_slurm.program("sbatch", status=1, complaint=NOT_YET)
    problem = only(refused(SlurmScheduler().submit, a_job, a_run(job_sbatch=""), "k", exit_code=3))
    assert "resources.nodes" in str(problem.fix)


@pytest.mark.parametrize(
    ("printed", "told"),
    [
        ("squeue: error: Invalid user: nobody9\n", "squeue: Invalid user: nobody9"),
        (SILENT, f"squeue: {SILENT}"),
        ("squeue: error: a\nsqueue: error: b\n", "squeue: a; b"),
        ("", "squeue: ended with status 1"),
    ],
)
def test_a_command_that_fails_is_named_once(printed: str, told: str) -> None:
    assert slurm_cli.trouble(subprocess.CompletedProcess(("squeue", "-h"), 1, "", printed)) == told


def test_a_command_that_is_missing_is_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm_cli.trouble(slurm_cli.call("squeue")) == "squeue: No such file or directory"
