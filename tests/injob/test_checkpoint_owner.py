"""The owner of a checkpoint folder, and whether its FP8 state may be unpickled without the user's word."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_supervisor import Job, job  # noqa: F401

from fp8launch.check.checker import check
from fp8launch.injob.supervisor import checkpoint_owner, checkpoints
from fp8launch.injob.supervisor.checkpoint_owner import RECORD, UNPICKLE, claim, read_owner, why_not_trusted
from fp8launch.job.prepared import prepare
from fp8launch.submit.grid import Point, expand, own_checkpoint_folder

RUN = {"run": "llama-1", "recipe": "ab" * 32, "created": "2026-11-24T04:00:00.000+00:00"}
OTHER = {**RUN, "run": "llama-2"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoint 4, as a run leaves it."""
    iteration = checkpoints.place(tmp_path / "ck", 4)
    iteration.mkdir(parents=True)
    (iteration / "__0_0.distcp").write_bytes(b"weights")
    return tmp_path / "ck"


def test_the_first_run_owns_the_folder(folder: Path) -> None:
    assert read_owner(folder) is None
    claim(folder, RUN, inherited=0)
    again = claim(folder, OTHER, inherited=0)
    assert again == read_owner(folder) == {"format": 1, **RUN, "inherited": 0}
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_a_run_trusts_its_own_work_only(folder: Path) -> None:
    assert "no fp8launch_owner.json" in str(why_not_trusted(folder, RUN, 4))
    claim(folder, RUN, inherited=0)
    assert why_not_trusted(folder, RUN, 4) is None
    assert "belongs to the run llama-1" in str(why_not_trusted(folder, OTHER, 4))
    assert why_not_trusted(folder, {}, 4) is not None


def test_a_record_without_a_run_is_nobodys(folder: Path) -> None:
    (folder / RECORD).write_text(json.dumps({"format": 1, "run": None, "inherited": 0}))
    assert why_not_trusted(folder, {}, 4) is not None


def test_checkpoints_from_before_the_run_are_not_its_own(folder: Path) -> None:
    claim(folder, RUN, inherited=4)
    assert "was there before this run" in str(why_not_trusted(folder, RUN, 4))
    checkpoints.place(folder, 8).mkdir()
    assert why_not_trusted(folder, RUN, 8) is None


@pytest.mark.parametrize("place", ["iter_0000004/__0_0.distcp", "iter_0000004", RECORD, "."])
def test_what_others_can_write_is_not_trusted(folder: Path, place: str) -> None:
    claim(folder, RUN, inherited=0)
    (folder / place).chmod(0o777)
    assert "can be written by everybody" in str(why_not_trusted(folder, RUN, 4))
    assert why_not_trusted(folder, RUN, 4, group_is_trusted=True) is None


def test_a_link_to_somebody_elses_file_is_not_trusted(folder: Path, tmp_path: Path) -> None:
    claim(folder, RUN, inherited=0)
    (tmp_path / "elsewhere").write_bytes(b"weights")
    (folder / "iter_0000004" / "__1_0.distcp").symlink_to(tmp_path / "elsewhere")
    assert "is a link" in str(why_not_trusted(folder, RUN, 4))


@pytest.mark.parametrize("content", ["", "[]", "{", "\\ud800"])
def test_a_damaged_record_is_not_trusted(folder: Path, content: str) -> None:
    (folder / RECORD).write_text(content)
    assert "cannot be read" in str(why_not_trusted(folder, RUN, 4))


def test_a_pipe_in_place_of_the_record_holds_nobody_up(folder: Path) -> None:
    os.mkfifo(folder / RECORD)
    assert why_not_trusted(folder, RUN, 4) is not None


def owned(job: Callable[..., Job], owner: dict[str, Any] | None = None, **more: Any) -> Job:  # noqa: F811
    """A run whose plan names it as the owner of its checkpoints."""
    one = job("survive.attempts=3")
    plan = json.loads((one.run / "survive.json").read_text())
    (one.run / "survive.json").write_text(json.dumps({**plan, "owner": owner or RUN, **more}))
    return one


def test_a_resume_may_unpickle_what_this_run_saved(job: Callable[..., Job]) -> None:  # noqa: F811
    one = owned(job)
    one.begin()
    assert read_owner(one.run / "ckpt") == {"format": 1, **RUN, "inherited": 0}
    one.reach(10)
    allowed = one.supervisor("unpickle", "5-1")
    assert allowed.stdout == f"{UNPICKLE}=1\n", allowed.stderr
    # The log of the attempt says so too, for whoever reads only that.
    assert f"{UNPICKLE}=1 for this job: checkpoint 10" in (one.run / "logs" / "5-1.log").read_text()


def test_a_value_of_the_user_is_left_alone(job: Callable[..., Job]) -> None:  # noqa: F811
    one = owned(job)
    one.begin()
    one.reach(10)
    assert one.supervisor("unpickle", "5-1", **{UNPICKLE: "0"}).stdout == ""


def test_a_checkpoint_that_was_there_first_is_not_unpickled(job: Callable[..., Job]) -> None:  # noqa: F811
    one = owned(job)
    one.reach(10)
    one.begin()
    refused = one.supervisor("unpickle")
    assert refused.stdout == "" and "checkpoint 10 was there before this run" in refused.stderr
    one.reach(20)
    assert one.supervisor("unpickle").stdout != ""


def test_a_run_that_an_earlier_version_began_gets_its_record(job: Callable[..., Job]) -> None:  # noqa: F811
    """Its plan is new, as after `fp8launch resume`, but its first attempt wrote no record."""
    one = owned(job)
    one.begin()
    (one.run / "ckpt" / RECORD).unlink()
    one.reach(10)
    one.begin("5-1")
    assert read_owner(one.run / "ckpt") == {"format": 1, **RUN, "inherited": 0}


def test_a_plan_without_an_owner_goes_on_working(job: Callable[..., Job]) -> None:  # noqa: F811
    one = job("survive.attempts=3")
    assert one.begin().returncode == 0
    assert not (one.run / "ckpt" / RECORD).exists()


def test_the_folder_of_another_run_stays_its_own(job: Callable[..., Job]) -> None:  # noqa: F811
    one = owned(job)
    checkpoint_owner.claim(one.run / "ckpt", OTHER, inherited=0)
    one.reach(10)
    one.begin()
    refused = one.supervisor("unpickle")
    assert refused.stdout == "" and "belongs to the run llama-2" in refused.stderr


def test_two_runs_never_train_into_one_folder(job: Callable[..., Job]) -> None:  # noqa: F811
    """The second run began from the first one's weights, and removed its checkpoints."""
    one = owned(job, OTHER)
    claim(one.run / "ckpt", RUN, inherited=0)
    begun = one.begin()
    assert begun.returncode == 75 and begun.stdout == ""
    assert "belongs to the run llama-1" in begun.stderr and "another checkpoint.dir" in begun.stderr
    assert "belongs to the run llama-1" in json.loads((one.run / "attempts.json").read_text())["stopped"]


def test_another_run_is_continued_on_purpose(job: Callable[..., Job]) -> None:  # noqa: F811
    one = owned(job, OTHER, continues_another=True)
    claim(one.run / "ckpt", RUN, inherited=0)
    assert one.begin().returncode == 0
    assert "belongs to the run llama-1" in str(why_not_trusted(one.run / "ckpt", OTHER, 4)), (
        "its state is not unpickled"
    )


def test_the_check_names_the_owner(tmp_path: Path) -> None:
    folder = tmp_path / "ck"
    claim(folder, RUN, inherited=0)
    settings = [f"checkpoint={{dir: {folder}, interval: 10}}"]

    def found(*more: str) -> list[str]:
        result = check(prepare("tiny_cpu", [*settings, *more]), layers=("schema", "machine"))
        return [problem.code for problem in result.problems]

    assert "checkpoint-owner" in found()
    assert "checkpoint-owner" not in found(f"checkpoint.load={folder}")
    assert "checkpoint-owner" not in found(f"checkpoint.dir={tmp_path}/own")


def test_the_points_of_a_sweep_have_folders_of_their_own() -> None:
    def own(folder: str, *points: Point) -> set[str]:
        recipe = prepare("tiny_cpu", [f"checkpoint={{dir: {folder}, interval: 10}}"]).loaded.recipe
        return {word for point in points for word in own_checkpoint_folder(point, recipe)}

    grid = expand(["tiny_cpu"], [], {"train.lr": [0.01, 0.02]}, 2)
    assert len(own("/ck", *grid)) == 4 and 'checkpoint.dir="/ck/tiny_cpu-0.01-r1"' in own("/ck", *grid)
    assert own("ck", *grid) == set(), "it is in the run folder"
    assert own("/ck", Point("tiny_cpu", None, {"checkpoint.dir": "/a"})) == set(), "the user's choice"
