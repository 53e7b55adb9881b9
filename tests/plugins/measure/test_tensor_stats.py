"""FP8 tensor statistics: from Transformer Engine's scalars to the lines of a report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from support import parse_paths

from fp8launch.injob.rank.training_loop import CannotMeasure, install_measurements
from fp8launch.plugins.measure.injob import tensor_stats

LINE = " iteration {n:8d}/      40 | consumed samples: 8 | elapsed time per iteration (ms): {ms} | lm loss: 5.0E+00 |"


def line(iteration: int, stats: object, every: int = 10) -> str:
    return "fp8launch-tensors: " + json.dumps(
        {"v": 1, "rank": 0, "iteration": iteration, "every": every, "stats": stats}
    )


def log(path: Path, said: dict[int, str], slow: int = 10) -> Path:
    lines = []
    for n in range(1, 41):
        lines += [said[n]] if n in said else []
        lines.append(LINE.format(n=n, ms=900.0 if n % slow == 0 else 100.0))
    path.write_text("\n".join(lines) + "\n")
    return path


def test_names_of_scalars_are_taken_apart() -> None:
    assert tensor_stats.value_of("decoder.layers.3.mlp.linear_fc2_gradient_underflows%", 0.25) == (
        "decoder.layers.3.mlp.linear_fc2", "gradient", "underflow_pct", 0.25,
    )  # fmt: skip
    assert tensor_stats.value_of("a_weight_scale_inv_min", 2)[2:] == ("scale_inv_min", 2.0)
    assert tensor_stats.value_of("something else", 1.0) is None


def test_the_worst_layer_is_named() -> None:
    values = [("one", "weight", "underflow_pct", 0.1), ("two", "weight", "underflow_pct", 3.0),
              ("one", "weight", "scale_inv_min", 0.5), ("two", "weight", "scale_inv_min", 0.7)]  # fmt: skip
    assert tensor_stats.summary(values) == {
        "weight": {
            "scale_inv_min": {"worst": 0.5, "layer": "one", "median": 0.6, "n": 2},
            "underflow_pct": {"worst": 3.0, "layer": "two", "median": 1.55, "n": 2},
        }
    }


def test_only_what_a_recipe_has_is_asked_for() -> None:
    def stats(*how: object) -> dict[str, list[str]]:
        wanted = tensor_stats.features(5, *how)["fp8launch"]["transformer_engine"]
        listed = wanted.get("LogFp8TensorStats", {"tensors_struct": []})["tensors_struct"]
        assert all(entry["freq"] == 5 for feature in wanted.values() for entry in feature["tensors_struct"])
        return {entry["tensor"]: entry["stats"] for entry in listed}

    assert stats(False, False, False) == {}
    assert "overflows%" in stats(True, True, False)["gradient"]
    assert "overflows%" not in stats(True, False, False)["gradient"]
    assert stats(True, False, True)["weight"] == ["scale_inv_min", "scale_inv_max"]


def test_a_report_sums_up_iterations_and_ranks(tmp_path: Path) -> None:
    first = {
        "gradient": {"underflow_pct": {"worst": 1.5, "layer": "layers.2.fc1"}, "amax": {"worst": 9.0, "layer": "x"}}
    }
    second = {"gradient": {"underflow_pct": {"worst": 4.5, "layer": "layers.1.fc2"}}, "weight": "torn"}
    report = parse_paths([log(tmp_path / "log", {10: line(10, first), 20: line(20, second)})])
    measured = report.more["tensor_stats"]
    assert measured is not None
    assert measured.value["iterations"] == [10, 20]
    worst = report.as_json()["tensor_stats"]["tensors"]["gradient"]  # type: ignore[index]
    assert worst["underflow_pct"] == {"worst": 4.5, "layer": "layers.1.fc2", "iteration": 20}
    told = "\n".join(measured.lines)
    assert "gradient of the output 4.5 % (layers.1.fc2, iteration 20)" in told


def test_measured_iterations_are_no_speed(tmp_path: Path) -> None:
    stats = {"weight": {"amax": {"worst": 1.0, "layer": "x"}}}
    said = {n: line(n, stats) for n in (10, 20, 30, 40)}
    report = parse_paths([log(tmp_path / "log", said)])
    assert report.speed.step_time_ms is not None
    assert report.speed.step_time_ms.max == 100.0
    assert set(report.steady_state.dropped["profiled"]) >= {10, 20, 30, 40}


def test_a_run_without_them_says_nothing(tmp_path: Path) -> None:
    report = parse_paths([log(tmp_path / "log", {})])
    assert report.more["tensor_stats"] is None
    assert report.as_json()["tensor_stats"] is None


def test_where_it_cannot_be_had_the_job_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("nvdlfw_inspect") is not None:
        pytest.skip("nvdlfw-inspect is installed here")
    monkeypatch.setenv("FP8LAUNCH_TENSOR_STATS", "10")
    with pytest.raises(CannotMeasure, match="nvdlfw-inspect"):
        install_measurements()
    monkeypatch.setenv("FP8LAUNCH_TENSOR_STATS", "")
    install_measurements()
