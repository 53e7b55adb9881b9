"""Training health: what is broken is reported with its code and iterations, what is healthy is not."""

from __future__ import annotations

import json
import math
import random
import tarfile
import typing
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import write_run
from support import BENCHMARKS, real_logs, sitting

from fp8launch.cli import run
from fp8launch.injob.supervisor.health_rules import CODES, LIMITS, HealthLimits
from fp8launch.injob.supervisor.slow_node import SlowNode
from fp8launch.recipe.field_types import HealthCode
from fp8launch.recipe.sections import Health
from fp8launch.report.losses import loss_summary
from fp8launch.report.outcome import limits_of
from fp8launch.report.read_run import run_from_folder, run_from_logs
from fp8launch.report.run_report import RunReport
from fp8launch.report.throughput import read_logs, summarise_run
from fp8launch.rundir.run_dir import RunFolder

Value = Callable[[int], object]
DONE = "[after training is done] datetime: 2026-11-20 12:00:00\n"


def falling(i: int) -> float:
    return 3 + math.exp(-i / 80) + random.Random(i).gauss(0, 0.01)


def norm(i: int) -> str:
    return f"{0.5 + random.Random(-i).gauss(0, 0.03):.3f}"


def text(
    iterations: int = 300,
    loss: Value = falling,
    grad: Value = norm,
    ms: Value = lambda i: 2000 + random.Random(7 * i).uniform(-5, 5),
    skipped: Value = lambda i: 0,
    nan: Value = lambda i: 0,
    before: Callable[[int], str] = lambda i: "",
    first: int = 1,
    every: int = 1,
) -> str:
    """A log as Megatron writes it; a loss of None is left out, as Megatron leaves out a loss that is NaN."""
    lines = []
    for i in range(first + every - 1, first + iterations, every):
        value = loss(i)
        shown = "" if value is None else f" lm loss: {value if isinstance(value, str) else f'{value:.6E}'} |"
        lines.append(
            f"{before(i)} [2026-11-20 10:00:00.000000] iteration {i:8d}/{first + iterations - 1:8d} | consumed "
            f"samples: {128 * i:12d} | elapsed time per iteration (ms): {ms(i):.1f} | learning rate: 3.000000E-04 | "
            f"global batch size:   128 |{shown} loss scale: 1.0 | grad norm: {grad(i)} | number of skipped "
            f"iterations: {skipped(i):3d} | number of nan iterations: {nan(i):3d} |\n"
        )
    return "".join(lines) + DONE


def report(folder: Path, log: str, limits: HealthLimits = LIMITS, mock: bool = False) -> RunReport:
    file = folder / "run.log"
    file.write_text(log)
    return summarise_run(read_logs([file]), arguments={"mock_data": True} if mock else None, limits=limits)


def load(i: int, at: int = 201) -> str:
    """What Megatron says before the first iteration of a resumed run."""
    if i != at:
        return ""
    return f"  successfully loaded checkpoint from /ck [ t 1/8, p 1/1 ] at iteration {at - 1}\n"


def validation(i: int, loss: float) -> str:
    """What Megatron says after an evaluation, every 50 iterations."""
    if i % 50:
        return ""
    return f" validation loss at iteration {i} | lm loss value: {loss:.6E} | lm loss PPL: {loss:.6E} | \n"


def noisy(i: int) -> float:
    return 3 + math.exp(-i / 80) + random.Random(i).gauss(0, 0.15)


BROKEN: dict[str, tuple[str, str, str, range]] = {
    # name: log, code, severity, where the first reported iteration may be
    "zero": (text(grad=lambda i: "0.000"), "zero-grad-norm", "error", range(1, 2)),
    "zero from 150": (
        text(grad=lambda i: "0.000" if i >= 150 else norm(i)), "zero-grad-norm", "error", range(150, 151)),
    "zero in a short log": (text(8, grad=lambda i: "0.000"), "zero-grad-norm", "error", range(1, 2)),
    "constant": (text(grad=lambda i: "0.731"), "constant-grad-norm", "error", range(1, 2)),
    "constant from 200": (
        text(grad=lambda i: "0.731" if i >= 200 else norm(i)), "constant-grad-norm", "error", range(200, 201)),
    "jump": (text(loss=lambda i: falling(i) + (i >= 150)), "loss-jump", "error", range(147, 154)),
    "divergence": (
        text(loss=lambda i: falling(i) + max(0, i - 150) / 100), "loss-jump", "error", range(150, 190)),
    "jump that recovers": (
        text(loss=lambda i: falling(i) + (150 <= i < 170)), "loss-jump", "warning", range(147, 154)),
    "jump in noise": (text(loss=lambda i: noisy(i) + 2 * (i >= 150)), "loss-jump", "error", range(146, 156)),
    "jump at a resume": (
        text(loss=lambda i: falling(i) + 0.5 * (i > 200), before=load), "resume-jump", "error", range(201, 202)),
    "from scratch at a resume": (
        text(loss=lambda i: falling(i - 200 * (i > 200)), before=load), "resume-jump", "error", range(201, 202)),
    "flat": (text(loss=lambda i: 4 + random.Random(i).gauss(0, 0.01)), "loss-flat", "error", range(1, 2)),
    "explodes at once": (
        text(loss=lambda i: 5.5 if i == 1 else 60 + random.Random(i).gauss(0, 20)), "loss-flat", "error", range(1, 2)),
    "exactly flat": (text(loss=lambda i: 10.82), "loss-flat", "error", range(1, 2)),
    "slower": (text(ms=lambda i: 2000 if i <= 100 else 3000), "slowdown", "warning", range(96, 106)),
    "slower, every tenth line": (
        text(ms=lambda i: 2000 if i <= 100 else 3000, every=10), "slowdown", "warning", range(100, 121)),
    "slower, every twentieth line": (
        text(1000, ms=lambda i: 2000 if i <= 100 else 3000, every=20), "slowdown", "warning", range(100, 141)),
    "constant, every tenth line": (
        text(grad=lambda i: "0.731", every=10), "constant-grad-norm", "error", range(10, 11)),
    "flat, every hundredth line": (
        text(1200, loss=lambda i: 4 + random.Random(i).gauss(0, 0.01), every=100), "loss-flat", "error",
        range(100, 101)),
    "NaN in validation": (
        text(before=lambda i: validation(i, 3.2 if i < 200 else math.nan)), "nan", "error", range(200, 201)),
    "infinite in one validation": (
        text(before=lambda i: validation(i, math.inf if i == 100 else 3.2)), "nan", "warning", range(100, 101)),
    "drifting": (text(ms=lambda i: 2000 + 5 * max(0, i - 100)), "slowdown", "warning", range(150, 260)),
    "one NaN step": (text(nan=lambda i: int(i == 150)), "nan", "warning", range(150, 151)),
    "NaN for a while": (
        text(loss=lambda i: "NAN" if 100 <= i < 120 else falling(i)), "nan", "error", range(100, 101)),
    "infinite gradients": (text(grad=lambda i: "inf" if i >= 100 else norm(i)), "nan", "error", range(100, 101)),
    "skipped": (text(skipped=lambda i: int(i > 100 and i % 20 == 0)), "skipped-steps", "warning", range(120, 121)),
    "all skipped": (
        text(skipped=lambda i: int(i > 100), loss=lambda i: falling(i) if i <= 100 else None),
        "skipped-steps", "error", range(101, 102)),
}  # fmt: skip

HEALTHY: dict[str, str] = {
    "usual": text(),
    "noisy": text(loss=noisy),
    "known by heart": text(loss=lambda i: 0.003 + 4 * math.exp(-i / 10) + 0.004 * (i // 7 % 3)),
    "one spike": text(loss=lambda i: falling(i) + 4 * (i == 150)),
    "resumed": text(before=load),
    "a later part": text(first=100_001, loss=lambda i: 2.0 + random.Random(i).gauss(0, 0.01)),
    "short": text(20, loss=lambda i: 10.8, grad=lambda i: "1.234"),
    "slow checkpoints": text(ms=lambda i: 9000 if i % 50 == 0 else 2000),
    "a short slow part": text(1000, ms=lambda i: 3000 if 500 < i <= 600 else 2000, every=20),
    "validated": text(before=lambda i: validation(i, 3.2)),
    "uneven steps": text(ms=lambda i: random.Random(i).uniform(1500, 3000)),
    "loss scale found": text(
        skipped=lambda i: int(i <= 12), loss=lambda i: falling(i) if i > 12 else None, grad=lambda i: norm(i)
    ),
    "cut": text().removesuffix(DONE)[:-180],
    "no gradient norm": text().replace(" grad norm: ", " num zeros: "),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_reported(name: str, tmp_path: Path) -> None:
    log, code, severity, first = BROKEN[name]
    found = report(tmp_path, log)
    assert [(problem.code, problem.severity) for problem in found.health] == [(code, severity)]
    assert found.health[0].first in first
    if found.status != "failed":
        assert found.status == ("unhealthy" if severity == "error" else "ok")


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_not_reported(name: str, tmp_path: Path) -> None:
    assert report(tmp_path, HEALTHY[name]).health == ()


@pytest.mark.parametrize(
    "log",
    [
        text(loss=lambda i: "NAN", grad=lambda i: "nan"),
        text(loss=lambda i: "nan" if i > 150 else falling(i), grad=lambda i: "nan" if i > 150 else norm(i)),
        text(loss=lambda i: falling(i) if i < 150 else None, grad=lambda i: "nan" if i >= 150 else norm(i)),
    ],
    ids=["always", "from 151", "left out"],
)
def test_a_run_that_is_nan_to_its_end_has_failed(log: str, tmp_path: Path) -> None:
    found = report(tmp_path, log)
    assert found.status == "failed" and found.failure is not None and found.failure.code == "nan"
    assert "nan" in {problem.code for problem in found.health}


def test_no_real_log_raises_a_false_alarm() -> None:
    with tarfile.open(BENCHMARKS / "h200" / "logs.tar.xz") as archive:
        measurements = sorted({member.name.split("/")[0] for member in archive})
    folders = [real_logs("runs"), real_logs("h200"), *map(sitting, measurements)]
    found = {}
    trained = 0
    for log in (file for folder in folders for file in sorted(folder.rglob("*")) if file.is_file()):
        seen = summarise_run(read_logs([log]))
        trained += bool(seen.training.lines)
        if seen.health:
            found[f"{log.parent.name}/{log.name}"] = [problem.code for problem in seen.health]
        assert not [note for note in seen.notes if "mix both speeds" in note], log
    assert trained > 150
    # Not false: the gradients of one are infinite from the second step on, and the loss of the other rises from 4.0 to
    # 10.6 within five steps and ends at 10.0. Twelve runs shared a GPU, and the first ones became slower as the others
    # started.
    shared = ("bf16_1", "bf16_2", "bf16_3", "blockwise_1", "delayed_1")
    assert found == {
        "2026-11-23-levels/o3.log": ["nan"],
        "2026-11-28-peers-3b/ours_1.log": ["loss-jump"],
        **{f"2026-11-29-convergence/{name}.log": ["slowdown"] for name in shared},
    }


def test_the_share_of_skipped_steps_names_the_steps_that_it_is_a_share_of(tmp_path: Path) -> None:
    (problem,) = report(tmp_path, BROKEN["skipped"][0]).health
    skipped = range(120, 301, 20)
    assert problem.message == (
        f"training skipped {len(skipped)} of the 250 steps from iteration 51 on (4.0%), in iterations 120 to 300"
    )


def test_mock_data_may_have_nothing_to_learn(tmp_path: Path) -> None:
    flat, *_ = BROKEN["exactly flat"]
    assert report(tmp_path, flat, mock=True).health == ()
    explodes, *_ = BROKEN["explodes at once"]
    assert [problem.code for problem in report(tmp_path, explodes, mock=True).health] == ["loss-flat"]


@pytest.mark.parametrize("argument", ["finetune", "pretrained_checkpoint"])
def test_a_run_from_trained_weights_may_be_flat(argument: str, tmp_path: Path) -> None:
    file = tmp_path / "run.log"
    file.write_text(BROKEN["flat"][0])
    assert summarise_run(read_logs([file]), arguments={argument: "/ck"}).health == ()
    assert summarise_run(read_logs([file]), arguments={argument: None}).health != ()


def test_lines_that_print_nan_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.log"
    file.write_text(text(loss=lambda i: "NAN" if i > 250 else falling(i), grad=lambda i: norm(i)))
    assert run(["parse", str(file)]) == 1
    assert "to NaN, last grad norm" in (shown := capsys.readouterr().out) and "; 50 NaN and 0 skipped" in shown
    assert run(["parse", str(file), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["nan_iterations"] == 50


def test_a_loss_that_is_infinite_at_the_end_has_no_number_there(tmp_path: Path) -> None:
    (tmp_path / "good.log").write_text(text())
    (tmp_path / "infinite.log").write_text(text(loss=lambda i: "INF" if i > 250 else falling(i)))
    good, infinite = (loss_summary([run_from_logs(name, [tmp_path / name])]) for name in ("good.log", "infinite.log"))
    assert good is not None and good.runs == 1
    assert infinite is None


def test_thresholds_of_a_recipe_count(tmp_path: Path) -> None:
    slow, *_ = BROKEN["slower"]
    manifest = {"recipe": {"health": {"slowdown": 0.6, "loss_jump": "nonsense", "ignore": ["nan", 3]}}}
    limits = limits_of(manifest)
    assert limits == HealthLimits(slowdown=0.6, ignore=("nan",))
    assert report(tmp_path, slow, limits).health == ()
    assert report(tmp_path, BROKEN["one NaN step"][0], limits).health == ()
    for damaged in ({}, {"recipe": None}, {"recipe": {"health": []}}, {"recipe": {"health": {"slowdown": math.nan}}}):
        assert limits_of(damaged) == LIMITS


def test_recipe_and_report_have_the_same_codes_and_defaults() -> None:
    assert set(typing.get_args(HealthCode)) == set(CODES)
    section = Health()
    assert limits_of({"recipe": {"health": section.model_dump()}}) == LIMITS


def test_parse_shows_it_and_exits_with_1_for_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.log"
    for name, exit_code, status in (("jump at a resume", 1, "unhealthy"), ("slower", 0, "ok")):
        log, code, severity, _ = BROKEN[name]
        file.write_text(log)
        assert run(["parse", str(file)]) == exit_code
        assert f"{severity}: " in (shown := capsys.readouterr().out) and f"[{code}]" in shown
        assert run(["parse", str(file), "--json"]) == exit_code
        data = json.loads(capsys.readouterr().out)
        assert data["status"] == status
        [problem] = data["health"]
        assert (problem["code"], problem["severity"]) == (code, severity)
        first, last = problem["iterations"]
        assert 1 <= first <= last <= 300


def test_a_comparison_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.log").write_text(HEALTHY["usual"])
    (tmp_path / "bad.log").write_text(BROKEN["jump"][0])
    names = [str(tmp_path / name) for name in ("good.log", "bad.log")]
    assert run(["compare", *names]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 unhealthy" in shown and "does not recover [loss-jump]" in shown
    assert run(["compare", *names, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    codes = {one["name"]: [problem["code"] for problem in one["health"]] for row in rows for one in row["runs"]}
    assert sorted(codes.values()) == [[], ["loss-jump"]]


def node_times(slow: float, everybody: float = 1.0) -> Callable[[int], str]:
    """What rank 0 prints about three nodes every tenth iteration; from iteration 151 on node2 is slower."""

    def line(i: int) -> str:
        if i % 10 != 1 or i == 1:
            return ""
        times = {f"node{n}": 20 + random.Random(10 * i + n).gauss(0, 0.5) for n in (1, 2, 3)}
        if i > 151:
            times = {node: ms * everybody for node, ms in times.items()}
            times["node2"] *= slow
        record = {"v": 1, "first": i - 10, "last": i - 1, "forward_ms": times}
        return f"0: fp8launch-nodes: {json.dumps(record)}\n"

    return line


def later(i: int) -> float:
    return (2000 if i <= 150 else 3000) + random.Random(7 * i).uniform(-5, 5)


def test_a_slow_node_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = text(ms=later, before=node_times(1.6))
    slow = {problem.code: problem for problem in report(tmp_path, log).health}["slow-node"]
    assert slow.message.startswith("node2 slows the run from iteration 15") and "on node2" in slow.message
    assert run(["parse", str(tmp_path / "run.log"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["health"]
    [entry] = [problem for problem in found if problem["code"] == "slow-node"]
    assert (entry["node"], entry["others"], entry["severity"]) == ("node2", 2, "warning")
    assert entry["factor"] == pytest.approx(1.6, rel=0.1) and entry["others_factor"] == pytest.approx(1, rel=0.1)
    assert entry["measurements"] == [15, 14]
    assert run(["parse", str(tmp_path / "run.log")]) == 0
    assert "[slow-node]" in capsys.readouterr().out
    assert {problem.code for problem in report(tmp_path, log, HealthLimits(ignore=("slow-node",))).health} == {
        "slowdown"
    }


@pytest.mark.parametrize("times", [node_times(1.0), node_times(1.0, 1.5)])
def test_a_slowdown_that_is_not_one_nodes_names_none(tmp_path: Path, times: Callable[[int], str]) -> None:
    assert [problem.code for problem in report(tmp_path, text(ms=later, before=times)).health] == ["slowdown"]


def test_a_node_that_slows_nobody_is_not_named(tmp_path: Path) -> None:
    """The step time stays: the forward pass is a small part of it."""
    assert report(tmp_path, text(before=node_times(1.6))).health == ()


def test_a_slow_node_that_the_job_found_is_reported_although_the_log_leaves_doubt(tmp_path: Path) -> None:
    found = SlowNode("node2", 340.0, 2.2, 2.5, 2, 0.95, 76, 190, (12, 37))
    run = write_run(tmp_path / "made-1", None)
    (run / "logs").mkdir()
    (run / "logs" / "1-0.log").write_text(text())
    attempt = {"name": "1-0", "job": "1", "before": 0, "slow_node": {**found.as_json(), "excluded": True}}
    (run / "attempts.json").write_text(json.dumps({"attempts": [attempt]}))
    [problem] = run_from_folder(RunFolder(run)).health
    stated = {"code": "slow-node", "severity": "warning", "message": found.sentence, "iterations": [76, 190]}
    assert problem.as_json() == {**stated, **found.as_json()}
