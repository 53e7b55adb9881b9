"""A job that follows a run: which checkpoints it evaluates, when the run is over, and its submission.

The real thing is in test_evaluate_program.py and tests/slurm/test_evaluation_jobs.py.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import Made, write_run

from fp8launch.injob.supervisor.checkpoints import TRACKER
from fp8launch.plugins.evaluate.injob import evaluate, follow
from fp8launch.plugins.evaluate.injob.follow import Saved, due, why_over

Ask = Callable[..., tuple[str, str]]
TASKS = ("--tasks", "fp8launch_tiny", "--backend", "sbatch")
PATIENCE = 60.0


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints every ten iterations, which is in its second attempt of three."""
    folder = write_run(tmp_path / "runs" / "trained-20261127-101500-ab12", Made())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["recipe"] |= {"checkpoint": {"dir": "ckpt", "interval": 10}, "survive": {"attempts": 3}}
    manifest["recipe"].setdefault("resources", {})["time"] = "06:00:00"
    manifest["arguments"] = {**manifest.get("arguments", {}), "save_interval": 10}
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "survive.json").write_text("{}")
    attempts(folder, {"ended": 1.0}, {})
    return folder


def attempts(run: Path, *each: dict[str, object], **more: object) -> None:
    (run / "attempts.json").write_text(json.dumps({"attempts": [{"job": "1", **one} for one in each], **more}))


def save(run: Path, iteration: int) -> Path:
    place = run / "ckpt" / f"iter_{iteration:07d}"
    place.mkdir(parents=True, exist_ok=True)
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (place / ".metadata").write_bytes(pickle.dumps(types.SimpleNamespace(storage_data={})))
    (run / "ckpt" / TRACKER).write_text(str(iteration))
    return place


def test_every_nth_checkpoint_is_due_and_the_last_one_once_the_run_is_over() -> None:
    saved = [Saved(iteration, 0) for iteration in (40, 10, 20, 30, 37, 50)]
    assert [each.iteration for each in due(saved, 20, over=False)] == [20, 40]
    assert [each.iteration for each in due(saved, 20, over=True)] == [20, 40, 50]
    assert due([], 20, over=True) == []


def test_a_checkpoint_that_is_being_written_does_not_count(run: Path) -> None:
    assert follow.saved_in(run / "ckpt") == []
    save(run, 10)
    (run / "ckpt" / "iter_0000020").mkdir()
    assert [each.iteration for each in follow.saved_in(run / "ckpt")] == [10]


def test_a_result_counts_for_the_checkpoint_that_was_evaluated(run: Path) -> None:
    """After a rewind, the same iteration is another checkpoint."""
    place = save(run, 10)
    (saved,) = follow.saved_in(run / "ckpt")
    settings = {"tasks": ["a"]}
    (run / "evaluations").mkdir()
    result = {"settings": settings, "iteration": 10, "written": evaluate.written_at(place)}
    (run / "evaluations" / "one.json").write_text(json.dumps(result))
    (run / "evaluations" / "damaged.json").write_text("[" * 100_000)
    assert set(follow.evaluated_in(run, settings)) == {saved}
    assert not set(follow.evaluated_in(run, {"tasks": ["b"]}))
    os.utime(place / ".metadata", ns=(1, 1))
    assert set(follow.evaluated_in(run, settings)) != set(follow.saved_in(run / "ckpt"))


# Follows a run that is over, with a program in place of lm-eval that only records a result.
_FOLLOW = """
import json, sys
from pathlib import Path
from fp8launch.injob.supervisor import checkpoints
from fp8launch.plugins.evaluate.injob import evaluate, follow
checkpoints.PAUSES, follow.POLL = (0, 0, 0), 0
words = [f"--run={sys.argv[1]}", f"--checkpoints={sys.argv[1]}/ckpt", "--model=m", "--tasks=t"]
ours = follow.arguments([*words, "--every=1", "--interval=10"])

def run_program(file, words, *more):
    place = Path(next(word for word in words if word.startswith("--checkpoint=")).partition("=")[2])
    result = {"iteration": int(place.name[5:]), "written": evaluate.written_at(place)}
    file = ours.run / "evaluations" / f"{place.name}.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({**result, "settings": evaluate.settings_of(ours)}))
    return 0

follow.run_program = run_program
follow.follow(ours, words)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the errors")
@pytest.mark.parametrize(
    ("error", "evaluated", "said"),
    [
        (
            "EIO:when=1..6",
            [20, 10],
            "checkpoint 10 is tried again later: a file cannot be read now (Input/output error",
        ),
        ("EIO", [20], "checkpoint 10 is skipped: a file cannot be read now (Input/output error)"),
    ],
    ids=["passes", "lasts"],
)
def test_a_checkpoint_that_cannot_be_read_is_tried_again(
    run: Path, error: str, evaluated: list[int], said: str
) -> None:
    """An error of half a minute cost its evaluation."""
    victim = save(run, 10) / "metadata.json"
    save(run, 20)
    attempts(run, {"ended": 1.0}, finished=True)
    inject = ["-P", str(victim), "-e", f"inject=openat,newfstatat,stat:error={error}"]
    command = ["strace", "-f", "-o", "/dev/null", *inject, sys.executable, "-c", _FOLLOW, str(run)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120, cwd=run)
    lines = done.stdout.splitlines()
    order = [int(line.split()[-1]) for line in lines if "evaluating checkpoint" in line]
    assert order == evaluated, done.stdout
    assert sum(said in line for line in lines) == 1, done.stdout


def test_a_run_is_over_when_its_supervisor_says_so(run: Path) -> None:
    over = lambda: why_over(run, run / "ckpt", PATIENCE)  # noqa: E731
    for log in (run / "logs").iterdir():
        os.utime(log)
    assert over() is None
    attempts(run, {"ended": 1.0}, finished=True)
    assert over() == "its training is done"
    attempts(run, {"ended": 1.0}, stopped="nccl: no attempts left")
    assert over() == "it has stopped: nccl: no attempts left"
    attempts(run, {})
    (run / "cancelled").write_text("by fp8launch cancel\n")
    assert over() == "it was cancelled"


def test_a_run_that_was_killed_with_its_supervisor_is_over_when_it_is_silent(run: Path) -> None:
    long_ago = time.time() - 2 * PATIENCE
    for file in (run / "attempts.json", *(run / "logs").iterdir()):
        os.utime(file, (long_ago, long_ago))
    assert "silent" in str(why_over(run, run / "ckpt", PATIENCE))
    attempts(run, {"ended": 1.0})  # waits for its next job, however long
    os.utime(run / "attempts.json", (long_ago, long_ago))
    assert why_over(run, run / "ckpt", PATIENCE) is None


def test_the_job_lasts_as_long_as_the_run(ask: Ask, run: Path, model: Path) -> None:
    out, _ = ask("evaluate", run, "--model", model, "--every", 2, *TASKS, "--dry-run")
    assert "plugins/evaluate/injob/follow.py" in out and "#SBATCH --time=06:00:00" in out
    for word in ("--every=2", "--interval=10", f"--run={run}", f"--checkpoints={run}/ckpt", "supervisor.py"):
        assert word in out
    assert "--keep" not in out
    assert "--keep" in ask("evaluate", run, "--model", model, "--every", 2, "--keep", *TASKS, "--dry-run")[0]


@pytest.mark.parametrize(
    ("words", "says", "fix"),
    [
        (("RUN", "--every", "2"), "does not record which Hugging Face model", "name one with --model"),
        (("RUN", "--every", "2", "--model", "MODEL", "--iteration", "3"), "every Nth checkpoint", "--iteration"),
        (("RUN", "--every", "2", "--model", "MODEL", "--engine", "megatron"), "with --engine hf", "leave out"),
        (("RUN", "--keep", "--model", "MODEL"), "has no effect without --every", "leave it out"),
        (("SAVED", "--every", "2", "--model", "MODEL"), "is a folder of checkpoints", "name a run"),
    ],
)
def test_refusals_name_value_and_fix(
    ask: Ask, run: Path, model: Path, words: tuple[str, ...], says: str, fix: str
) -> None:
    save(run, 10)
    places = {"RUN": run, "MODEL": model, "SAVED": run / "ckpt"}
    _, err = ask("evaluate", *(places.get(word, word) for word in words), *TASKS, "--dry-run", expect=2)
    said = " ".join(err.split())
    assert says in said and fix in said and "Traceback" not in err
