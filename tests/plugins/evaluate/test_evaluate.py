"""`fp8launch evaluate` up to the job: names, refusals, the job's script; and results in `parse` and `compare`.

The evaluation itself is in test_evaluate_program.py.
"""

from __future__ import annotations

import json
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_runs import FP8, Made, write_run

from fp8launch.injob.supervisor.checkpoints import TRACKER
from fp8launch.plugins.evaluate.injob import evaluate as program
from fp8launch.plugins.evaluate.injob import tiny_task

Ask = Callable[..., tuple[str, str]]
TASKS = ("--tasks", "fp8launch_tiny")
DRY = ("--dry-run", "--backend", "sbatch")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder of checkpoints that looks like one."""
    place = tmp_path / "saved" / "iter_0000007"
    place.mkdir(parents=True)
    (place.parent / TRACKER).write_text("7")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (place / ".metadata").write_bytes(pickle.dumps(types.SimpleNamespace(storage_data={})))
    return place.parent


def test_the_job_gets_what_is_asked(ask: Ask, model: Path, checkpoints: Path) -> None:
    words = ("--fewshot", 5, "--limit", 10, "--batch-size", 4, "--offline", "--gpu", "h100")
    out, _ = ask("evaluate", checkpoints, "--model", model, "--tasks", "arc_easy,hellaswag", *words, *DRY)
    assert "plugins/evaluate/injob/evaluate.py" in out and "HF_HUB_OFFLINE" in out and "FP8LAUNCH_DEVICE=cuda" in out
    given = ("--backend=hf", "--tasks=arc_easy,hellaswag", "--fewshot=5", "--limit=10", "--batch_size=4")
    for word in (*given, f"--model={model}", f"--checkpoint={checkpoints}/iter_0000007"):
        assert word in out
    assert "HF_HUB_OFFLINE" not in ask("evaluate", model, *TASKS, *DRY)[0]


def test_the_options_of_the_job_are_read() -> None:
    found = program.arguments(["--", "--model=a/b", "--tasks=x,y", "--fewshot=0", "--tp=2"])
    assert (found.tasks, found.fewshot, found.limit, found.tp, found.backend) == (["x", "y"], 0, None, 2, "hf")


def test_megatrons_backend_has_a_process_for_each_part(ask: Ask, model: Path, checkpoints: Path) -> None:
    words = ("evaluate", checkpoints, "--model", model, *TASKS, "--engine", "megatron", *DRY)
    out, _ = ask(*words, "--gpu", "h100", "--tp", 2, "--pp", 2)
    assert "#SBATCH --gpus-per-node=4" in out and "--backend=megatron" in out
    _, err = ask(*words, expect=2)
    assert "evaluate.backend is megatron, which needs CUDA" in " ".join(err.split()) and "--engine hf" in err
    assert "does not combine EP" in ask(*words, "--gpu", "h100", "--ep", 2, "--tp", 2, expect=2)[1]


@pytest.mark.parametrize(
    ("words", "says", "fix"),
    [
        (("MODEL", "--tasks", "a b"), "'a b' is not the name of a task", "separate names with commas"),
        (("MODEL", "--tasks", ""), "'' is not the name of a task", "separate names with commas"),
        (("MODEL", *TASKS, "--task-folder", "."), "has no task", "lm_eval --include_path"),
        (("MODEL", *TASKS, "--iteration", "3"), "has neither --model nor --iteration", "leave them out"),
        (("MODEL", *TASKS, "--engine", "megatron"), "is a Hugging Face model", "use --engine hf"),
        (("MODEL", *TASKS, "--tp", "2"), "is one process, but TP x PP x EP is 2", "--engine megatron"),
        (("SAVED", *TASKS), "does not record which Hugging Face model", "name one with --model"),
        (("./nowhere", *TASKS), "there is no folder ./nowhere", "the folder of a Hugging Face model"),
    ],
)
def test_refusals_name_value_and_fix(
    ask: Ask, model: Path, checkpoints: Path, words: tuple[str, ...], says: str, fix: str
) -> None:
    places = {"MODEL": model, "SAVED": checkpoints}
    _, err = ask("evaluate", *(places.get(word, word) for word in words), *DRY, expect=2)
    said = " ".join(err.split())
    assert says in said and fix in said and "Traceback" not in err


def test_megatrons_backend_refuses_a_checkpoint_of_bridge(ask: Ask, model: Path, checkpoints: Path) -> None:
    """The job on a GPU ended with an assertion of Megatron about num-layers."""
    (checkpoints / "iter_0000007" / "run_config.yaml").write_text("model: {}\n")
    words = ("evaluate", checkpoints, "--model", model, *TASKS, "--gpu", "h100", *DRY)
    said = " ".join(ask(*words, "--engine", "megatron", expect=2)[1].split())
    assert "which Megatron-Bridge wrote" in said and "use --engine hf" in said
    ask(*words)


def result(name: str, iteration: int, acc: float, stderr: float | None, **more: Any) -> dict[str, Any]:
    metrics = [
        {"metric": "acc", "filter": "none", "value": acc, "stderr": stderr},
        {"metric": "acc_norm", "filter": "none", "value": acc / 2, "stderr": stderr},
    ]
    task = {"task": "arc_easy", "version": 1.0, "fewshot": more.pop("fewshot", 0), "samples": 64, "metrics": metrics}
    return {"format": 1, "evaluation": name, "iteration": iteration, "limit": None, "tasks": [task], **more}


def put(run: Path, *results: dict[str, Any]) -> None:
    for each in results:
        (run / "evaluations").mkdir(exist_ok=True)
        (run / "evaluations" / f"{each['evaluation']}.json").write_text(json.dumps(each))


def test_compare_shows_the_last_checkpoints_accuracy_with_its_error(ask: Ask, tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", Made(precision=FP8))
    other = write_run(tmp_path / "other", Made())
    put(one, result("first", 10, 0.25, 0.05), result("a_later", 20, 0.5, 0.0625))
    put(other, result("else", 20, 0.75, None, fewshot=5, limit=100))
    out, _ = ask("compare", one, other, "--md", tmp_path / "c.md", "--json", "--csv", tmp_path / "c.csv")
    rows = json.loads(out)["rows"]
    curve = rows[0]["evaluations"][0].pop("by_iteration")
    assert [(each["iteration"], each["value"]) for each in curve] == [(10, 0.25), (20, 0.5)]
    assert len(rows[1]["evaluations"][0].pop("by_iteration")) == 1
    assert [row["evaluations"][0] for row in rows] == [
        {
            "task": "arc_easy", "metric": "acc", "value": 0.5, "stderr": 0.0625, "samples": 64, "iterations": [20],
            "runs": 1,
        },
        {
            "task": "arc_easy (5-shot, first 100)", "metric": "acc", "value": 0.75, "stderr": None, "samples": 64,
            "iterations": [20], "runs": 1,
        },
    ]  # fmt: skip
    assert "arc_easy: acc 0.5000 ± 0.0625 (iteration 20)" in (tmp_path / "c.md").read_text()
    assert "arc_easy: acc 0.5000 ± 0.0625 (iteration 20)" in (tmp_path / "c.csv").read_text()


def test_parse_and_evaluate_list_all_results(ask: Ask, tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", Made(precision=FP8))
    assert json.loads(ask("parse", run, "--json")[0])["evaluations"] is None
    put(run, result("a", 20, 0.5, 0.0625), result("b", 10, 0.25, 0.05))
    scores = json.loads(ask("parse", run, "--json")[0])["evaluations"]["scores"]
    assert [(score["iteration"], score["metric"], score["value"]) for score in scores] == [
        (10, "acc", 0.25), (10, "acc_norm", 0.125), (20, "acc", 0.5), (20, "acc_norm", 0.25),
    ]  # fmt: skip
    assert "arc_easy: acc 0.2500 ± 0.0500 at iteration 10" in ask("evaluate", run)[0]
    assert "arc_easy: acc 0.5000 ± 0.0625 at iteration 20 (1 earlier: --json)" in ask("parse", run)[0]
    assert json.loads(ask("evaluate", run, "--json")[0])["scores"] == scores


@pytest.mark.parametrize("content", ["[" * 100_000, '{"format": 1, "tasks": [1, {"metrics": 3}]}', "", "null"])
def test_damaged_results_are_left_out(ask: Ask, tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path / "one", Made(precision=FP8))
    (run / "evaluations").mkdir()
    (run / "evaluations" / "x.json").write_text(content)
    assert json.loads(ask("parse", run, "--json")[0])["evaluations"] is None
    assert "has no results of evaluations" in ask("evaluate", run, expect=1)[1]


def test_the_tiny_task_has_one_right_answer_in_every_place() -> None:
    questions = tiny_task.questions()
    assert len(questions) == 64
    assert {question["answer"] for question in questions} == {0, 1, 2, 3}
    for question in questions:
        words, choices = str(question["context"]).split(), question["choices"]
        assert isinstance(choices, list) and len(set(choices)) == 4
        assert choices[question["answer"]] == words[1]  # type: ignore[call-overload]


def test_lm_evals_results_become_metrics_with_their_errors() -> None:
    found = {
        "results": {"t": {"alias": "t", "acc,none": 0.5, "acc_stderr,none": 0.1, "bleu,none": 2.0}},
        "n-shot": {"t": 0}, "versions": {"t": 1.0}, "n-samples": {"t": {"original": 9, "effective": 4}},
    }  # fmt: skip
    assert program.task_result("t", found) == {
        "task": "t", "version": 1.0, "fewshot": 0, "samples": 4,
        "metrics": [
            {"metric": "acc", "filter": "none", "value": 0.5, "stderr": 0.1},
            {"metric": "bleu", "filter": "none", "value": 2.0, "stderr": None},
        ],
    }  # fmt: skip
