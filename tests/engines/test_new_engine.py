"""An engine that fp8launch does not know, from check to verify: nothing outside it knows its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import said
from counting_engine import NAME, PROGRAM
from support import only, refused

from fp8launch import plugin_registry
from fp8launch.job.prepared import prepare
from fp8launch.plugin_registry import Plugin

ENGINE, DIALECT = "counting_engine:CountingEngine", "counting_engine:DIALECT"
RECIPE = """\
name: counted
engine: counting
precision: {recipe: tensorwise, format: hybrid}
batch: {global: 8, sequence: 64}
train: {iterations: 12}
resources: {gpu: cpu, gpus_per_node: 1}
"""

Write = Callable[[str, str], str]
Ask = Callable[..., Any]


@pytest.fixture(autouse=True)
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(plugin_registry, "_added", [])
    plugin_registry.add(Plugin("counting", engines={NAME: ENGINE}, log_dialects={NAME: DIALECT}))
    yield


@pytest.fixture
def recipe(write: Write) -> str:
    return write("counted.yaml", RECIPE)


@pytest.fixture
def ask(home: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """fp8launch in this process: what a command prints, as JSON with `--json`."""

    def call(*words: str, expect: int = 0) -> Any:
        out = said(capsys, *words, expect=expect).out
        return json.loads(out) if "--json" in words else out

    return call


def test_check_asks_what_holds_for_it(recipe: str, ask: Ask) -> None:
    found = ask("check", recipe, "--json")
    assert found["ok"] and not [p for p in found["problems"] if p["severity"] == "error"]
    assert found["layers"]["rules"] == "ran"
    assert found["layers"]["megatron"].startswith("not run: Megatron-LM's validators do not know")


def test_hardware_rules_hold_for_every_engine(recipe: str, ask: Ask) -> None:
    found = ask("check", recipe, "--set", "resources.gpu=a100", "--json", expect=1)
    assert "fp8-needs-newer-gpu" in [p["code"] for p in found["problems"]]


def test_no_rule_of_megatron_sees_it(recipe: str, ask: Ask) -> None:
    # Megatron-LM would ask for a learning rate, a tokenizer and data, Megatron-Core for a width of the layers.
    assert [p["code"] for p in ask("check", recipe, "--json")["problems"]] == []


@pytest.mark.needs_plugin("measure")
def test_a_measurement_that_it_does_not_print_is_refused(recipe: str) -> None:
    problem = only(refused(prepare, recipe, ["launch.profile_iteration=5"]))
    assert problem.code == "no-such-evidence"
    assert problem.where == "--set launch.profile_iteration=5"


def test_render_shows_its_own_arguments_and_program(recipe: str, ask: Ask) -> None:
    assert ask("render", recipe, "--as", "args", "--json") == ["--steps", "12", "--quantize", "tensorwise"]
    script = ask("render", recipe, "--as", "sbatch")
    assert f'"$python" {PROGRAM} -- "${{megatron_args[@]}}"' in script
    assert "--steps 12" in script


@pytest.mark.needs_plugin("estimate")
def test_estimate_counts_no_model(recipe: str, ask: Ask) -> None:
    found = ask("estimate", recipe, "--json")
    assert found["parameters"] is None and found["memory"] is None
    assert found["steps"] == 12 and found["tokens"] == 12 * 8 * 64


def test_a_run_from_submit_to_verify(recipe: str, ask: Ask) -> None:
    name = ask("submit", recipe, "--backend", "local", "--wait").split()[-1]
    run = ask("runs", name, "--json")[0]
    assert run["state"] == "completed"
    manifest = json.loads((Path(run["folder"]) / "manifest.json").read_text())
    assert manifest["engine"]["name"] == NAME
    assert manifest["arguments"]["fp8_recipe"] == "tensorwise"

    report = ask("parse", name, "--json")
    assert (report["status"], report["iterations"]) == ("ok", 12)
    assert 5.0 <= report["step_time_ms"]["median"] <= 6.0
    assert report["tokens_per_s_per_gpu"]["median"] == pytest.approx(8 * 64 / (report["step_time_ms"]["median"] / 1e3))
    assert report["loss_last"] == pytest.approx(2 / 12)

    verdict = ask("verify", name, "--json")
    assert (verdict["verdict"], verdict["recipe"]) == ("verified", "tensorwise")
    row = only(tuple(ask("compare", name, "--json")["rows"]))
    assert "tensorwise" in json.dumps(row)


def test_what_ran_without_fp8_is_not_verified(recipe: str, ask: Ask) -> None:
    name = ask("submit", recipe, "--backend", "local", "--wait", "--set", "launch.probe=false").split()[-1]
    assert ask("verify", name, "--json", expect=1)["verdict"] == "requested only"


def test_a_resume_gets_its_own_arguments(write: Write, ask: Ask) -> None:
    file = write("kept.yaml", RECIPE + "checkpoint: {dir: counted, interval: 1}\n")
    name = ask("submit", file, "--backend", "local", "--wait").split()[-1]
    ask("resume", name, "--wait")
    run = ask("runs", name, "--json")[0]
    script = (Path(run["folder"]) / "job.sh").read_text()
    assert "--continue-from counted" in script


def test_an_unknown_engine_is_answered_with_the_near_one(write: Write) -> None:
    problem = only(refused(prepare, write("r.yaml", RECIPE.replace("engine: counting", "engine: countin"))))
    assert problem.code == "unknown-engine"
    assert problem.fix == "did you mean 'counting'?"
    assert problem.where is not None and problem.where.endswith("r.yaml:2")


@pytest.mark.needs_plugin("diff")
def test_two_engines_are_compared_by_megatrons_names(recipe: str, ask: Ask) -> None:
    found = ask("diff", recipe, "tiny_cpu", "--json")
    lines = {one["name"]: one for one in found if one["part"] == "arguments"}
    assert lines["train_iters"]["a"] == 12 and lines["train_iters"]["b"] == 20
    assert lines["num_layers"]["a"] is None
