"""The life of a run and of a study, by the same commands on every scheduler."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from memory_scheduler import EVERYTHING, MemoryScheduler, leave, leave_attempt, save

from fp8launch.rundir.registry import find_run

Site = Any
GRID = ("--sweep", "megatron.seed=1,2,3", "--yes")


def test_a_run_from_submission_to_its_end(site: Site) -> None:
    run = site.submit().name
    assert site.state(run)["state"] in ("pending", "running")
    manifest = find_run(run).manifest()
    assert manifest["backend"] == site.backend
    assert site.state(run)["jobs"] == [job["id"] for job in manifest["jobs"]]
    site.end(run)
    ended = site.wait(run, "completed")
    assert ended["exit_code"] == 0
    assert run in site("runs").out


def test_a_failure_keeps_its_exit_status(site: Site) -> None:
    run = site.submit().name
    site.end(run, 7)
    assert site.wait(run, "failed")["exit_code"] == 7


def test_a_failed_run_shows_its_cause(in_memory: Site) -> None:
    run = in_memory.submit().name
    in_memory.end(run, 2)
    folder = find_run(run)
    leave(folder, in_memory.state(run)["jobs"][0], 2, "0: fp8launch: no such script: /not/mounted/train.py\n")
    state = in_memory.state(run)
    assert state["failure"]["code"] == "missing-file"
    assert "no such script" in state["failure"]["message"]
    assert "missing-file" in in_memory("runs", run).out


def test_cancel_ends_a_run_once(site: Site) -> None:
    run = site.submit().name
    assert "cancelled" in site("cancel", run).err
    assert site.wait(run, "cancelled")
    assert "has already ended: cancelled" in site("cancel", run).err


def test_the_dry_run_prints_the_script_and_makes_nothing(site: Site) -> None:
    assert site.submit("--dry-run").out.startswith("#")
    assert not list(site.home.rglob("manifest.json"))
    assert not site.memory.jobs


def test_wait_follows_a_run_to_its_end(in_memory: Site) -> None:
    in_memory.memory.ends_at_once = 3
    done = in_memory.submit("--wait", expect=1)
    assert "failed" in done.err and "end of" in done.err
    in_memory.memory.ends_at_once = 0
    assert "completed" in in_memory.submit("--wait").err


def test_the_log_of_a_run(in_memory: Site) -> None:
    run = in_memory.submit().name
    assert "has no log yet" in in_memory("logs", run, expect=1).err
    in_memory.end(run)
    assert in_memory("logs", run).out == in_memory("logs", run, "-f").out == "trained\n"


# --- studies ----------------------------------------------------------------------------------------------------------


def test_the_same_command_submits_a_grid_once(in_memory: Site) -> None:
    first = in_memory.submit(*GRID)
    assert "3 submitted in 1 call" in first.err
    assert sorted(in_memory.memory.jobs) == ["1_0", "1_1", "1_2"]
    again = in_memory.submit(*GRID)
    assert again.out == first.out
    assert "0 submitted, 3 already existed" in again.err
    assert len(in_memory.json("runs", first.name)) == len(in_memory.memory.jobs) == 3


def test_one_by_one_where_runs_go_one_at_a_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryScheduler, "capabilities", replace(EVERYTHING, arrays=False, one_run_at_a_time=True))
    site.memory.ends_at_once = 0
    problem = site.submit(*GRID, expect=2).err
    assert "add --wait" in problem and f"[{site.backend}-study]" in problem
    site.options = ("--set", "launch.python=/bin/true")
    done = site.submit(*GRID, "--wait")
    assert "3 submitted in 3 calls" in done.err
    assert [run["state"] for run in site.json("runs", done.name)] == ["completed"] * 3


def test_without_arrays_every_run_is_submitted_by_itself(in_memory: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryScheduler, "capabilities", replace(EVERYTHING, arrays=False))
    assert "3 submitted in 3 calls" in in_memory.submit(*GRID).err
    assert sorted(in_memory.memory.jobs) == ["1", "2", "3"]


def test_a_profile_may_switch_arrays_off(in_memory: Site, write: Callable[[str, str], str]) -> None:
    in_memory.submit(*GRID, "--cluster", write("c.yaml", "arrays: false\n"))
    assert sorted(in_memory.memory.jobs) == ["1", "2", "3"]


def test_failed_points_are_submitted_again_alone(in_memory: Site) -> None:
    study = in_memory.submit(*GRID).name
    good, bad, cancelled = (run["run"] for run in in_memory.json("runs", study))
    in_memory.end(good)
    in_memory.end(bad, 9)
    in_memory("cancel", cancelled)
    assert "0 submitted" in in_memory.submit(*GRID).err
    assert "2 submitted" in in_memory.submit(*GRID, "--retry-failed").err
    jobs = {run["run"]: run["jobs"] for run in in_memory.json("runs", study)}
    assert [len(jobs[run]) for run in (good, bad, cancelled)] == [1, 2, 2]


def test_points_that_the_scheduler_dropped_are_submitted_again(in_memory: Site) -> None:
    study = in_memory.submit(*GRID).name
    del in_memory.memory.jobs["1_1"]
    assert "0 submitted" in in_memory.submit(*GRID).err, "not without being asked"
    assert "1 submitted" in in_memory.submit(*GRID, "--retry-failed").err
    assert {run["state"] for run in in_memory.json("runs", study)} == {"pending"}


def test_cancel_leaves_a_mark_that_another_job_removes(in_memory: Site) -> None:
    study = in_memory.submit(*GRID).name
    first = in_memory.json("runs", study)[0]["run"]
    in_memory.end(first)
    assert f"cancelled {study}: 2 runs" in in_memory("cancel", study).err
    assert f"{study} has already ended" in in_memory("cancel", study).err
    marks = [find_run(run["run"]).manifest().get("cancelled") for run in in_memory.json("runs", study)]
    assert [bool(mark) for mark in marks] == [False, True, True]
    in_memory.submit(*GRID, "--retry-failed")
    assert not any(find_run(run["run"]).manifest()["cancelled"] for run in in_memory.json("runs", study))


def test_bad_points_are_left_out_when_that_is_asked_for(in_memory: Site) -> None:
    grid = ("--sweep", "batch.micro=2,3", "--yes")
    assert "micro batch 3" in in_memory.submit(*grid, expect=1).err
    assert not in_memory.memory.jobs
    done = in_memory.submit(*grid, "--skip-bad")
    assert "skipped: micro=3" in done.err and "1 submitted" in done.err


def test_a_grid_is_confirmed_first(in_memory: Site) -> None:
    refused = in_memory.submit(*GRID[:2], expect=2).err
    assert "pass --yes" in refused
    assert not list(in_memory.home.rglob("manifest.json"))


def test_the_old_name_of_sweep_is_the_same(in_memory: Site) -> None:
    new = in_memory.submit(*GRID).name
    old = in_memory.submit("--over", *GRID[1:])
    assert old.name == new and "0 submitted" in old.err
    assert "--over" not in in_memory("submit", "--help").out


def test_cancel_ends_a_whole_study(in_memory: Site) -> None:
    study = in_memory.submit(*GRID).name
    ended = in_memory.json("runs", study)[0]["run"]
    in_memory.end(ended)
    assert "2 runs" in in_memory("cancel", study).err
    states = [run["state"] for run in in_memory.json("runs", study)]
    assert sorted(states) == ["cancelled", "cancelled", "completed"]


# --- submissions that go wrong ----------------------------------------------------------------------------------------


def test_an_answer_that_was_lost_costs_no_second_job(in_memory: Site) -> None:
    in_memory.memory.loses_answers = True
    assert "timed out" in in_memory.submit(expect=3).err
    in_memory.memory.loses_answers = False
    run = in_memory.submit().name
    assert list(in_memory.memory.jobs) == in_memory.state(run)["jobs"] == ["1"]
    assert len(list(in_memory.home.rglob("manifest.json"))) == 1


def test_a_lost_answer_to_a_grid_costs_no_second_job(in_memory: Site) -> None:
    in_memory.memory.loses_answers = True
    in_memory.submit(*GRID, expect=3)
    in_memory.memory.loses_answers = False
    done = in_memory.submit(*GRID)
    assert "0 submitted" in done.err
    assert sorted(job for run in in_memory.json("runs", done.name) for job in run["jobs"]) == ["1_0", "1_1", "1_2"]


def test_runs_finds_the_job_of_a_submission_that_was_cut_off(in_memory: Site) -> None:
    in_memory.memory.loses_answers = True
    in_memory.submit(expect=3)
    assert in_memory.state("latest")["jobs"] == ["1"]


def test_a_refusal_is_reported_and_recorded(in_memory: Site) -> None:
    in_memory.memory.refusal = "not on Sundays"
    assert "not on Sundays" in in_memory.submit(expect=3).err
    state = in_memory.state("latest")
    assert (state["state"], state["detail"]) == ("unknown", "refused: not on Sundays")
    assert "was never submitted" in in_memory("cancel", "latest").err
    in_memory.memory.refusal = None
    assert in_memory.submit().name != state["run"], "what was refused stays as it is"


def test_a_silent_scheduler_gets_nothing_submitted_and_changes_no_state(in_memory: Site) -> None:
    study = in_memory.submit(*GRID).name
    in_memory.memory.silent = True
    assert {run["detail"] for run in in_memory.json("runs", study)} == {"the memory scheduler does not answer"}
    in_memory("cancel", study, expect=3)
    in_memory.memory.silent = False
    assert {run["state"] for run in in_memory.json("runs", study)} == {"pending"}


def test_a_job_of_more_nodes_than_one_is_refused_before_anything_is_made(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryScheduler, "capabilities", replace(EVERYTHING, several_nodes=False))
    problem = site.submit("--nodes", "2", expect=2).err
    assert f"[{site.backend}-is-one-node]" in problem
    assert not list(site.home.rglob("manifest.json"))


def test_a_name_that_is_no_scheduler(in_memory: Site) -> None:
    in_memory.backend = "memroy"
    assert "memory" in in_memory.submit(expect=2).err


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(in_memory: Site, tmp_path: Path) -> tuple[str, Path]:
    """A run that stopped at iteration 10 of 20, and its checkpoints."""
    saved = tmp_path / "saved"
    run = in_memory.submit("--set", f"checkpoint.dir={saved}", "--set", "checkpoint.interval=5").name
    in_memory.end(run, 1)
    leave_attempt(find_run(run), saved, 10, excluded=["n3"])
    return run, saved


def test_resume_continues_in_the_same_folder_without_the_bad_node(in_memory: Site, stopped: tuple[str, Path]) -> None:
    run, _ = stopped
    assert "continues from iteration 10" in in_memory("resume", run, "--attempts", "3").err
    job = in_memory.memory.jobs[in_memory.state(run)["jobs"][-1]]
    assert job.excluded == ("n3",)
    assert json.loads((find_run(run).path / "survive.json").read_text())["attempts"] == 3
    assert "is pending" in in_memory("resume", run, expect=1).err
    assert len(in_memory.memory.jobs) == 2


def test_resume_uses_an_excluded_node_again_where_no_others_are_left(
    in_memory: Site, stopped: tuple[str, Path]
) -> None:
    run, _ = stopped
    in_memory.memory.needs_all_nodes = True
    said = in_memory("resume", run).err
    assert "n3 may be used again, because too few other nodes are left" in said
    assert in_memory.memory.jobs[in_memory.state(run)["jobs"][-1]].excluded == ()
    assert json.loads((find_run(run).path / "attempts.json").read_text())["excluded"] == []


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(in_memory: Site, stopped: tuple[str, Path]) -> None:
    run, _ = stopped
    folder = find_run(run).path
    (folder / "cancelled").write_text("")
    before = [(folder / name).read_text() for name in ("attempts.json", "survive.json")]
    in_memory.memory.refusal = "the account has no hours left"
    assert "no hours left" in in_memory("resume", run, "--attempts", "9", expect=3).err
    assert [json.loads((folder / name).read_text()) for name in ("attempts.json", "survive.json")] == [
        json.loads(text) for text in before
    ]
    assert (folder / "cancelled").exists()
    assert "stopped: exception" in in_memory("runs", run).out.replace("\n", " ")
    in_memory.memory.refusal = None
    assert "continues from iteration 10" in in_memory("resume", run).err


def test_a_run_that_is_done_is_not_resumed(in_memory: Site, stopped: tuple[str, Path]) -> None:
    run, saved = stopped
    save(saved, 20)
    assert "[run-done]" in in_memory("resume", run, expect=1).err


def test_a_run_whose_state_nobody_knows_is_not_resumed(in_memory: Site, stopped: tuple[str, Path]) -> None:
    in_memory.memory.silent = True
    assert "[state-unknown]" in in_memory("resume", stopped[0], expect=3).err


def test_a_run_without_checkpoints_is_not_resumed(in_memory: Site) -> None:
    run = in_memory.submit().name
    in_memory.end(run, 1)
    assert "[no-checkpoints]" in in_memory("resume", run, expect=1).err


def test_where_a_run_is_started_once_more_attempts_are_refused(
    in_memory: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryScheduler, "capabilities", replace(EVERYTHING, continue_by=()))
    saves = ("--set", f"checkpoint.dir={tmp_path / 'saved'}", "--set", "checkpoint.interval=5")
    assert "[memory-attempts]" in in_memory.submit(*saves, "--attempts", "3", expect=2).err
    run = in_memory.submit(*saves).name
    in_memory.end(run, 1)
    assert not (find_run(run).path / "survive.json").exists()
    assert "[memory-resume]" in in_memory("resume", run, expect=2).err


def test_how_an_attempt_follows_is_what_the_scheduler_can_do(in_memory: Site, stopped: tuple[str, Path]) -> None:
    assert json.loads((find_run(stopped[0]).path / "survive.json").read_text())["continue_by"] == "dependency"
