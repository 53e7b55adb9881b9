"""The core alone, and with each plugin: commands work, and no other plugin is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from made_runs import Made, write_log

from fp8launch import plugin_registry

ROOT = Path(__file__).parents[2]
Run = Callable[..., str]


@pytest.fixture
def run(home: Path) -> Run:
    """Run a command with a selection of plugins; its stdout."""

    def call(plugins: str, *words: str, expect: int = 0) -> str:
        env = {**os.environ, "FP8LAUNCH_PLUGINS": plugins}
        command = [sys.executable, "-m", "fp8launch", *words]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == expect, done.stdout + done.stderr
        return done.stdout

    return call


@pytest.mark.train
@pytest.mark.slow
def test_the_core_alone_goes_from_a_recipe_to_a_comparison(run: Run) -> None:
    assert "--num-layers" in run("", "render", "tiny_cpu")
    assert json.loads(run("", "check", "tiny_cpu", "--json"))["ok"]
    run("", "submit", "tiny_cpu", "--backend", "local", "--wait")
    report = json.loads(run("", "parse", "latest", "--json"))
    assert report["status"] == "ok"
    assert "TFLOP/s/process" in run("", "compare", "latest")
    assert "tiny_cpu" in run("", "runs")


@pytest.mark.slow
def test_tests_of_the_core_pass_without_plugins(home: Path) -> None:
    """These files call commands of plugins, or options and recipes that need one, next to commands of the core.

    The whole of it is `FP8LAUNCH_PLUGINS= pytest tests --ignore tests/plugins`.
    """
    files = (
        "check/test_check_summary.py",
        "check/test_phase_rules.py",
        "cli/test_json_output.py",
        "engines/test_new_engine.py",
        "job/test_phase_scripts.py",
        "rundir/test_names.py",
        "safety/test_tables_for_others.py",
    )
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not train"]
    done = subprocess.run(
        [*words, *(f"tests/{file}" for file in files)],
        cwd=ROOT,
        env={**os.environ, "FP8LAUNCH_PLUGINS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


@pytest.mark.parametrize("name", ["", *plugin_registry._BUILT_IN])
def test_a_selection_imports_no_other_plugin(run: Run, name: str) -> None:
    listing = run(name, "--help")
    selected = plugin_registry._with_required([name] if name else [])
    for other in plugin_registry._BUILT_IN:
        for verb in plugin_registry._built_in(other).commands:
            assert (f"\n  {verb} " in listing) == (other in selected)
    code = (
        "import sys; from fp8launch.cli import run\n"
        "for words in (['check', 'tiny_cpu'], ['recipes'], ['estimate', 'llama8b_fp8'], ['doctor']): run(words)\n"
        # A message may look up in the descriptions which plugin has what is missing.
        "parts = [name.split('.') for name in sys.modules if name.startswith('fp8launch.plugins.')]\n"
        "print(*(part[2] for part in parts if len(part) > 3 and part[3] != 'plugin'))"
    )
    env = {**os.environ, "FP8LAUNCH_PLUGINS": name}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split()) if done.stdout.splitlines()[-1].strip() else set()
    assert "Traceback" not in done.stderr and "a bug in fp8launch" not in done.stderr
    assert imported <= selected


def test_a_section_of_an_absent_plugin_is_refused_with_its_name(run: Run) -> None:
    answer = run("", "check", "peers/fsdp2_te", expect=2)
    assert "unknown key 'accelerate'" in answer
    assert "it needs the plugin accelerate, which is not active: add accelerate to FP8LAUNCH_PLUGINS" in answer


def test_a_measurement_of_an_absent_plugin_is_refused_with_its_name(run: Run) -> None:
    answer = run("", "check", "tiny_cpu", "--set", "launch.profile_iteration=5", expect=2)
    assert "`launch.profile_iteration` needs the plugin measure, which is not active" in answer


@pytest.mark.parametrize("command", ["parse", "compare"])
def test_event_files_of_an_absent_plugin_name_it(home: Path, tmp_path: Path, command: str) -> None:
    events = tmp_path / "events.out.tfevents.1.x"
    events.touch()
    env = {**os.environ, "FP8LAUNCH_PLUGINS": ""}
    words = [sys.executable, "-m", "fp8launch", command, str(events)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "events.out.tfevents.1.x needs the plugin tensorboard, which is not active" in done.stderr


@pytest.mark.parametrize(
    "words", [["check", "bridge:llama3_8b"], ["recipes", "bridge:llama3_8b"], ["recipes", "--engine", "bridge"]]
)
def test_recipes_of_an_absent_plugin_are_refused_with_its_name(home: Path, words: list[str]) -> None:
    env = {**os.environ, "FP8LAUNCH_PLUGINS": ""}
    command = [sys.executable, "-m", "fp8launch", *words]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs the plugin bridge, which is not active" in done.stdout + done.stderr


def test_without_the_planner_an_estimate_says_why_it_predicts_nothing(run: Run) -> None:
    found = json.loads(run("estimate", "estimate", "llama8b_fp8", "--json"))
    assert found["predicted"] is None and found["terms"] is None
    assert found["predicted_reason"] == "the plugin plan is not active"
    assert found["memory"]["total_mib"] > 0
    with_planner = json.loads(run("plan", "estimate", "llama8b_fp8", "--json"))
    assert with_planner["predicted"]["step_time_ms"] > 0 and with_planner["predicted_reason"] is None


def test_without_a_memory_model_the_check_says_that_its_layer_did_not_run(run: Run) -> None:
    crowded = ("check", "llama8b_fp8", "--set", "batch.micro=16", "--set", "container.image=null", "--json")
    found = json.loads(run("", *crowded))
    assert found["layers"]["memory"] == "not run: the plugin estimate is not active"
    assert "does-not-fit" not in {problem["code"] for problem in found["problems"]}
    found = json.loads(run("estimate", *crowded, expect=1))
    assert found["layers"]["memory"] == "ran"
    assert "does-not-fit" in {problem["code"] for problem in found["problems"]}


@pytest.mark.parametrize("command", [["estimate", "tiny_cpu"], ["plan", "llama3_8b"], ["tune", "tiny_cpu"]])
def test_a_command_of_an_absent_plugin_names_it(home: Path, command: list[str]) -> None:
    env = {**os.environ, "FP8LAUNCH_PLUGINS": ""}
    done = subprocess.run(
        [sys.executable, "-m", "fp8launch", *command], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and f"plugin {command[0]}" in done.stderr


@pytest.mark.parametrize(
    ("command", "plugin"),
    [
        (["check", "tiny_cpu", "--rehearse"], "rehearse"),
        (["submit", "tiny_cpu", "--rehearse"], "rehearse"),
        (["compare", "latest", "--html", "a.html"], "plots"),
        (["compare", "latest", "--plot=a.png"], "plots"),
    ],
)
def test_an_option_of_an_absent_plugin_names_it(home: Path, command: list[str], plugin: str) -> None:
    env = {**os.environ, "FP8LAUNCH_PLUGINS": ""}
    words = [sys.executable, "-m", "fp8launch", *command]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    option = command[2].partition("=")[0]
    assert f"{option} needs the plugin {plugin}, which is not active: add {plugin} to FP8LAUNCH_PLUGINS" in done.stderr


def test_a_section_of_a_profile_for_an_absent_plugin_is_noted(home: Path, tmp_path: Path) -> None:
    (tmp_path / "site.yaml").write_text("name: site\nrehearse: {from_gpu_hours: 1}\n")
    for selection, noted in (("", True), ("rehearse", False)):
        env = {**os.environ, "FP8LAUNCH_PLUGINS": selection}
        words = [sys.executable, "-m", "fp8launch", "submit", "tiny_cpu", "--dry-run", "--cluster", "site.yaml"]
        done = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        note = "warning: the cluster profile has `rehearse`, but the plugin rehearse is not active"
        assert (note in done.stderr) == noted


@pytest.mark.parametrize("code", ["fp8-experts-slower", "global-aux-dp"])
def test_a_recipe_may_silence_the_rule_of_an_absent_plugin(run: Run, code: str) -> None:
    answer = json.loads(run("", "check", "tiny_cpu", "--set", f"silence.{code}=known", "--json"))
    assert answer["ok"]


@pytest.mark.parametrize(
    ("words", "plugin"),
    [
        (["submit", "tiny_cpu", "--backend", "submitit"], "submitit"),
        (["submit", "tiny_cpu", "--backend", "nemo-run"], "nemo_run"),
        (["--remote", "mycluster", "runs"], "ssh"),
    ],
)
def test_a_backend_or_login_node_of_an_absent_plugin_names_it(home: Path, words: list[str], plugin: str) -> None:
    env = {**os.environ, "FP8LAUNCH_PLUGINS": ""}
    command = [sys.executable, "-m", "fp8launch", *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"needs the plugin {plugin}" in done.stderr


def test_a_run_of_an_absent_backend_is_listed_with_the_plugin_that_it_needs(home: Path, run: Run) -> None:
    manifest = {"run_id": "r-1", "name": "r", "backend": "submitit", "jobs": [{"id": "12"}], "created": "2026-01-01"}
    folder = home / "fp8launch-runs" / "r-1"
    (folder / "logs").mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (found,) = json.loads(run("", "runs", "--json"))
    assert found["state"] == "unknown" and "needs the plugin submitit" in found["detail"]


def test_without_the_validators_the_check_says_that_megatron_was_not_asked(run: Run) -> None:
    answer = json.loads(run("", "check", "tiny_cpu", "--json"))
    assert answer["ok"] and answer["layers"]["megatron"] == "not run: the plugin validators is not active"
    assert json.loads(run("validators", "check", "tiny_cpu", "--json"))["layers"]["megatron"] == "ran"


def test_what_an_absent_plugin_would_report_of_a_finished_run_is_null(run: Run, tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", Made())
    assert json.loads(run("", "verify", str(log), "--json"))["advisories"] is None
    assert json.loads(run("advisories", "verify", str(log), "--json"))["advisories"] == []
