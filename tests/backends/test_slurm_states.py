"""What squeue, sacct and the run folder say, put together: one state, right where any of them is missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from support import only, refused

from fp8launch.backends import slurm
from fp8launch.backends.base import JobState
from fp8launch.runs.folder import RunFolder
from fp8launch.runs.submission import keyed

DISABLED = "Slurm accounting storage is disabled"
SILENT = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


def state(run: RunFolder) -> JobState:
    return slurm.states([run])[0]


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


def test_what_nobody_knows_is_unknown(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue", "")
    fake_slurm.program("sacct", status=1, complaint=DISABLED)
    found = state(left(a_run("12"), "12-0", None))
    assert (found.status, found.final) == ("unknown", False)
    assert "no longer knows" in found.detail


def test_a_silent_controller_is_told_and_changes_nothing(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
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
    found = slurm.states([a_run(job, name=f"r-{job}") for job in ("1", "2", "3")])
    assert [s.status for s in found] == ["running", "failed", "completed"]
    assert [call.split()[0] for call in fake_slurm.calls] == ["squeue", "sacct"]
    assert fake_slurm.calls[1].endswith("-j 2,3")


def test_a_run_that_was_never_submitted_asks_nobody(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue")
    assert state(a_run()).status == "unknown"
    assert fake_slurm.calls == []


def test_a_command_that_hangs_is_given_up(fake_slurm: Any) -> None:
    fake_slurm.program("squeue", before="exec sleep 60")
    begin = time.monotonic()
    done = slurm.call("squeue", timeout=0.5)
    assert time.monotonic() - begin < 5
    assert (done.returncode, done.stderr) == (124, "squeue did not answer within 0 s")


def test_a_command_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert slurm.call("squeue").returncode == 127
    assert not slurm.available()
    assert slurm.version() is None


def test_words_that_are_not_utf8_do_no_harm(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    fake_slurm.program("squeue", before="printf '12|RUNNING|\\xff\\xfe\\n'; exit")
    assert state(a_run("12")).status == "running"


def test_slurm_is_there_only_when_the_controller_answers(fake_slurm: Any) -> None:
    fake_slurm.program("sbatch", "slurm 24.11.5")
    fake_slurm.program("scontrol", "Slurmctld(primary) at head is DOWN", status=1)
    assert not slurm.available()
    fake_slurm.program("scontrol", "Slurmctld(primary) at head is UP")
    assert slurm.available()
    assert slurm.version() == "24.11.5"


# --- refusals and cancelling ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("invalid partition specified: x", "partition:"),
        ("Batch job submission failed: Invalid account or account/partition combination specified", "account:"),
        ("Batch job submission failed: Invalid qos specification", "qos:"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "resources.time"),
        ("Requested node configuration is not available", "resources.nodes"),
        ("Batch job submission failed: Unable to contact slurm controller (connect failure)", "try again"),
        ("sbatch: unrecognized option '--container-image=x'", "runtime:"),
    ],
)
def test_a_refusal_is_slurms_words_and_what_to_change(
    fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any, words: str, advice: str
) -> None:
    from fp8launch.backends.sbatch import SbatchBackend

    fake_slurm.program("sbatch", status=1, complaint=f"sbatch: error: {words}")
    problem = only(refused(SbatchBackend().submit, a_job, a_run(job_sbatch="#!/bin/bash\n"), exit_code=3))
    assert words.replace("sbatch: ", "") in problem.message
    assert advice in str(problem.fix)


@pytest.mark.parametrize("answer", ["4242", "4242;cluster"])
def test_sbatch_is_given_the_script_and_a_clean_environment(
    fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fp8launch.backends.sbatch import SbatchBackend

    monkeypatch.setenv("SLURM_NTASKS", "99")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("MASTER_ADDR", "elsewhere")
    monkeypatch.setenv("X_MINE", "kept")
    fake_slurm.program("sbatch", answer)
    run = a_run(job_sbatch="#!/bin/bash\n")
    assert SbatchBackend().submit(keyed(a_job, "two words"), run) == "4242"
    assert fake_slurm.calls == [f"sbatch --parsable --comment=fp8launch:two words {run.path}/job.sbatch"]
    seen = fake_slurm.environment("sbatch")
    assert not {"SLURM_NTASKS", "SBATCH_PARTITION", "MASTER_ADDR"} & set(seen)
    assert seen["X_MINE"] == "kept"


def test_an_answer_without_a_job_id_is_an_error(fake_slurm: Any, a_run: Callable[..., RunFolder], a_job: Any) -> None:
    from fp8launch.backends.sbatch import SbatchBackend

    fake_slurm.program("sbatch", "all is well")
    assert only(refused(SbatchBackend().submit, a_job, a_run(), exit_code=3)).code == "sbatch-refused"


def test_cancel_names_every_job_of_a_run(fake_slurm: Any, a_run: Callable[..., RunFolder]) -> None:
    from fp8launch.backends.sbatch import SbatchBackend

    fake_slurm.program("scancel")
    fake_slurm.program("squeue", "12|RUNNING|None|r|\n13|PENDING|None|r|fp8launch:r-1.s1\n14|RUNNING|None|r|")
    SbatchBackend().cancel(a_run("12", "13"))
    SbatchBackend().cancel(a_run(name="r-2"))
    assert [call for call in fake_slurm.calls if call.startswith("scancel")] == ["scancel 12 13"]


@pytest.mark.parametrize("comment", ["fp8launch:r-2", "fp8launch:r-1x", "fp8launch:r-1.s1x", "fp8launch:"])
def test_a_job_that_only_has_the_number_of_ours_is_neither_shown_nor_cancelled(
    fake_slurm: Any, a_run: Callable[..., RunFolder], comment: str
) -> None:
    """Slurm counts from 1 again when its state is lost."""
    from fp8launch.backends.sbatch import SbatchBackend

    fake_slurm.program("scancel")
    fake_slurm.program("sacct", f"12|FAILED|1:0|None|r|{comment}")
    fake_slurm.program("squeue", f"12|RUNNING|None|r|{comment}")
    assert state(a_run("12")).status == "unknown"
    SbatchBackend().cancel(a_run("12", name="r-9"))
    assert not [call for call in fake_slurm.calls if call.startswith("scancel")]


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
    from fp8launch.backends.sbatch import SbatchBackend

    fake_slurm.program("scancel")
    fake_slurm.program("squeue", status=1, complaint=SILENT)
    assert only(refused(SbatchBackend().cancel, a_run("12"), exit_code=3)).code == "slurm-silent"
    assert not [call for call in fake_slurm.calls if call.startswith("scancel")]


def test_an_array_is_cancelled_whole_only_where_all_that_lives_of_it_is_ours(
    fake_slurm: Any, a_run: Callable[..., RunFolder]
) -> None:
    fake_slurm.program("scancel")
    tasks = "\n".join(f"7_{n}|RUNNING|None|r|fp8launch:s.0" for n in range(3))
    runs = [a_run(f"7_{n}", name=f"r-{n}") for n in range(3)]
    for run in runs:
        run.update(study={"name": "s"})
    fake_slurm.program("squeue", tasks)
    slurm.cancel_runs(runs[:2])
    slurm.cancel_runs(runs)
    assert [call for call in fake_slurm.calls if call.startswith("scancel")] == ["scancel 7_0 7_1", "scancel 7"]


def test_cancelling_what_has_ended_is_no_error_and_a_refusal_is(fake_slurm: Any) -> None:
    fake_slurm.program(
        "scancel", status=1, complaint="scancel: error: Kill job error on job id 5: Invalid job id specified"
    )
    slurm.cancel(["5"])
    fake_slurm.program(
        "scancel", status=1, complaint="scancel: error: Kill job error on job id 5: Access/permission denied"
    )
    problem = only(refused(slurm.cancel, ["5"], exit_code=3))
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
    assert (name in slurm.clean_environment({name: "x"})) == kept


def test_the_processs_own_environment_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("SLURM_JOB_ID", "1")
    assert "SLURM_JOB_ID" not in slurm.clean_environment()
    assert os.environ["SLURM_JOB_ID"] == "1"
