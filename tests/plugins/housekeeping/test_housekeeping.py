"""Tags, titles and notes, the filters of `runs`, and the deletion of runs: never one that somebody still needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from command_line import said

from fp8launch import cli
from fp8launch.injob.supervisor.run_records import start_of
from fp8launch.rundir.atomic_io import held
from fp8launch.rundir.registry import default_root, find_run
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.rundir.study import create_study

Ask = Callable[..., Any]
Make = Callable[..., RunFolder]


@pytest.fixture
def make(home: Path) -> Make:
    """Make a run of a recipe that was created so many days ago, and never got a job."""

    def create(run_id: str, days: float = 0, root: Path | None = None, **entries: Any) -> RunFolder:
        created = datetime.now(timezone.utc) - timedelta(days=days)
        manifest = {"name": "tiny", "created": created.isoformat(), "backend": "local", "jobs": [], **entries}
        manifest["host"] = os.uname().nodename
        return create_run_folder(root or default_root(), run_id, {"recipe.yaml": "name: tiny\n"}, manifest)

    return create


@pytest.fixture
def ask(home: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command with --json and return its answer."""

    def call(*words: str, expect: int = 0) -> Any:
        return json.loads(said(capsys, *words, "--json", expect=expect).out)

    return call


def names(rows: list[dict[str, Any]]) -> list[str]:
    return [row["run"] for row in rows]


# --- labels


def test_tags_titles_and_notes_are_shown_and_found(make: Make, ask: Ask, capsys: pytest.CaptureFixture[str]) -> None:
    run = make("a-1")
    make("b-1")
    assert ask("tag", "a-1", "--add", "paper", "--add", "x")[0]["tags"] == ["paper", "x"]
    assert ask("tag", "a-1", "--remove", "x", "--add", "paper")[0]["tags"] == ["paper"]
    ask("rename", "a-1", "best-lr")
    ask("annotate", "a-1", "--note", "twice the learning rate")
    assert names(ask("runs", "--tag", "paper")) == ["a-1"]
    (shown,) = ask("runs", "best-lr")
    assert (shown["tags"], shown["title"], shown["note"]) == (["paper"], "best-lr", "twice the learning rate")
    assert find_run("best-lr").path == run.path
    assert cli.run(["runs"]) == 0
    assert "twice the learning rate" in capsys.readouterr().out
    ask("rename", "best-lr", "")
    ask("annotate", "a-1", "--note", "")
    assert ask("runs", "a-1")[0]["title"] is ask("runs", "a-1")[0]["note"] is None


@pytest.mark.parametrize("title", ["b-1", "tiny", "llama8b_fp8", "taken"])
def test_a_title_is_never_the_name_of_something_else(make: Make, ask: Ask, title: str) -> None:
    make("a-1")
    make("b-1")
    ask("rename", "b-1", "taken")
    assert ask("rename", "a-1", title, expect=2)["problems"][0]["code"] == "name-taken"


@pytest.mark.parametrize("title", ["a b", "../x", "x" * 65])
def test_titles_and_tags_must_be_names(make: Make, ask: Ask, title: str) -> None:
    make("a-1")
    assert ask("rename", "a-1", title, expect=2)["problems"][0]["code"] == "bad-name"
    assert ask("tag", "a-1", "--add", title, expect=2)["problems"][0]["code"] == "bad-name"


def test_labels_of_other_users_runs_stay(make: Make, ask: Ask) -> None:
    make("a-1").path.chmod(0o777)
    for words in (("tag", "a-1", "--add", "x"), ("rename", "a-1", "x"), ("annotate", "a-1", "--note", "x")):
        assert ask(*words, expect=1)["problems"][0]["code"] == "not-yours"


# --- the list


def test_runs_are_filtered_sorted_and_shown_by_columns(
    make: Make, ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (days, lr) in enumerate(((40, 3.0), (10, 1.0), (0, 2.0)), 1):
        make(f"r-{number}", days, recipe={"train": {"lr": lr}})
    make("other-1", 0, name="other")
    assert names(ask("runs", "--since", "20d")) == ["r-2", "r-3", "other-1"]
    assert names(ask("runs", "--recipe", "tiny", "--state", "unknown")) == ["r-1", "r-2", "r-3"]
    assert names(ask("runs", "--state", "running")) == []
    assert names(ask("runs", "--sort", "train.lr")) == ["r-2", "r-3", "r-1", "other-1"]
    assert names(ask("runs", "--sort", "-train.lr")) == ["r-1", "r-3", "r-2", "other-1"]
    assert names(ask("runs", "--since", datetime.now().date().isoformat(), "-n", "1")) == ["other-1"]
    capsys.readouterr()
    assert cli.run(["runs", "--columns", "run,train.lr", "--recipe", "tiny"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines == [["run", "train.lr"], ["r-1", "3.0"], ["r-2", "1.0"], ["r-3", "2.0"]]
    for wrong in (("--sort", "los"), ("--columns", "run,los"), ("--since", "soon"), ("--state", "done")):
        assert ask("runs", *wrong, expect=2)["problems"][0]["code"] == "usage"


# --- deletion


def test_old_runs_are_deleted_except_tagged(make: Make, ask: Ask) -> None:
    old, kept, new = make("old-1", 40), make("kept-1", 40), make("new-1", 1)
    ask("tag", "kept-1", "--add", "paper")
    rule = ("delete", "--older-than", "30d")
    plan = ask(*rule, "--dry-run")
    assert (names(plan["deleted"]), names(plan["kept"]), plan["dry_run"]) == (["old-1"], ["kept-1"], True)
    assert plan["kept"][0]["why"] == "is tagged paper"
    assert plan["bytes"] == plan["deleted"][0]["bytes"] > 100_000
    assert old.path.is_dir()
    assert ask(*rule, expect=2)["problems"][0]["code"] == "not-asked"
    assert old.path.is_dir()
    assert names(ask(*rule, "--yes")["deleted"]) == ["old-1"]
    assert not old.path.exists() and kept.path.is_dir() and new.path.is_dir()
    assert ask("delete", "kept-1", "--yes", expect=1)["deleted"] == []
    assert names(ask("delete", "--tag", "paper", "--yes")["deleted"]) == ["kept-1"]
    assert names(ask("runs")) == ["new-1"]


def test_another_tag_keeps_a_run_that_a_tag_selects(make: Make, ask: Ask) -> None:
    make("a-1")
    ask("tag", "a-1", "--add", "scratch", "--add", "paper")
    assert ask("delete", "--tag", "scratch", "--yes")["kept"][0]["why"] == "is tagged paper"
    assert names(ask("delete", "--tag", "scratch", "--include-tagged", "--yes")["deleted"]) == ["a-1"]


def test_what_others_need_is_never_deleted(make: Make, ask: Ask) -> None:
    base = make("base-1", 40)
    make("loads-1", 1, recipe={"checkpoint": {"load": str(base.path / "checkpoints")}})
    make("relative-1", 1, arguments={"load": "../running-2/checkpoints"})
    make("running-1", 40, jobs=[{"id": f"{os.getpid()}:{start_of(os.getpid())}"}])
    make("running-2", 40)
    make("foreign-1", 40).path.chmod(0o777)
    busy = make("busy-1", 40)
    with held(busy.path):
        found = ask("delete", "--older-than", "30d", "--yes")
    why = {one["run"]: one["why"] for one in found["kept"]}
    assert why == {
        "base-1": "loads-1 loads its checkpoints",
        "running-1": "is running",
        "running-2": "relative-1 loads its checkpoints",
        "busy-1": "another command is submitting it",
    }
    assert found["deleted"] == []
    named = ask("delete", "foreign-1", "base-1", "--yes", "--include-tagged", expect=1)
    assert [one["why"].split(":")[0] for one in named["kept"]] == ["not safely yours", "loads-1 loads its checkpoints"]
    assert names(ask("delete", "loads-1", "base-1", "--yes", expect=1)["deleted"]) == ["loads-1"]
    assert names(ask("delete", "base-1", "--yes")["deleted"]) == ["base-1"]


def test_checkpoints_in_the_storage_of_a_cluster_go_with_the_run(make: Make, ask: Ask, tmp_path: Path) -> None:
    mine, other = tmp_path / "scratch" / "a-1", tmp_path / "scratch" / "precious"
    for folder in (mine, other):
        folder.mkdir(parents=True, mode=0o755)
        (folder / "weights").write_bytes(b"x" * 300_000)
    run = make("a-1", storage={"checkpoints": str(mine), "more": str(other)})
    (run.path / "checkpoints").symlink_to(mine)
    (run.path / "more").symlink_to(other)
    make("loads-1", recipe={"checkpoint": {"load": str(run.path / "checkpoints")}})
    assert ask("delete", "a-1", "--yes", expect=1)["kept"][0]["why"] == "loads-1 loads its checkpoints"
    ask("delete", "loads-1", "--yes")
    assert ask("delete", "a-1", "--yes")["bytes"] > 300_000
    assert not mine.exists() and (other / "weights").is_file()


def test_a_study_goes_with_its_last_run(make: Make, ask: Ask) -> None:
    points = [{"run": run, "recipe": "tiny", "nodes": None, "values": {}, "repeat": 1} for run in ("p-1", "p-2")]
    study = create_study(default_root(), "s-1", {"study": "s-1", "points": points})
    make("p-1", root=study.path)
    make("p-2", root=study.path)
    assert names(ask("delete", "p-1", "--yes")["deleted"]) == ["p-1"]
    assert study.path.is_dir()
    assert names(ask("delete", "s-1", "--yes")["deleted"]) == ["p-2"]
    assert not study.path.exists()


def test_nothing_is_deleted_without_a_selection(make: Make, ask: Ask) -> None:
    make("a-1", 40)
    assert ask("delete", "--yes", expect=2)["problems"][0]["code"] == "usage"
    assert names(ask("runs")) == ["a-1"]


def test_a_deletion_that_was_cut_off_is_completed(make: Make, ask: Ask) -> None:
    make("a-1", 40)
    doomed = make("b-1").path.rename(default_root() / ".deleting-b-1.12345678")
    assert names(ask("runs")) == ["a-1"]
    ask("delete", "a-1", "--yes")
    assert not doomed.exists()
