"""The core alone, and with each plugin of its own: commands work, and nothing of other plugins is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

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
    assert "TFLOP/s/GPU" in run("", "compare", "latest")
    assert "tiny_cpu" in run("", "runs")


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
        "print(*(name.split('.')[2] for name in sys.modules if name.startswith('fp8launch.plugins.')))"
    )
    env = {**os.environ, "FP8LAUNCH_PLUGINS": name}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split()) if done.stdout.splitlines()[-1].strip() else set()
    assert "Traceback" not in done.stderr and "a bug in fp8launch" not in done.stderr
    assert imported <= selected


def test_what_an_absent_plugin_has_is_refused_with_its_name(run: Run) -> None:
    answer = run("", "check", "peers/fsdp2_te", expect=2)
    assert "unknown key 'accelerate'" in answer
    assert "it needs the plugin accelerate: add that to FP8LAUNCH_PLUGINS" in answer
