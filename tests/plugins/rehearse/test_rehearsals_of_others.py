"""What another user's run or recipe names is not executed: a user's own choice is a recipe named by its path."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8launch.rundir.run_dir import create_run_folder

Say = Callable[..., tuple[int, str, str]]
NOBODY = 65534
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away"),
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
]


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    return tmp_path / "canary"


@pytest.fixture
def recipe(write: Callable[[str, str], str], tmp_path: Path, canary: Path) -> Path:
    """A recipe with a script that leaves a trace."""
    write("theirs/train.py", f"open({str(canary)!r}, 'w').close()\n")
    text = (
        "name: theirs\nextends: [models/llama3_8b, parts/pretrain, hardware/h200]\nprecision: {recipe: bf16}\n"
        "model: {num_layers: 2}\n"
        'software: {megatron: "0.19", transformer_engine: "2.20"}\n'
        "batch: {micro: 1, global: 1, sequence: 8192}\nresources: {nodes: 1, gpus_per_node: 1}\n"
        "train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}\nlaunch: {script: train.py}\n"
    )
    return Path(write("theirs/r.yaml", text))


@pytest.fixture
def run(home: Path, recipe: Path) -> Path:
    """A run of another user."""
    text = recipe.read_text().replace("train.py", str(recipe.parent / "train.py"))
    manifest = {"name": "theirs", "backend": "local", "created": "2026-01-01T00:00:00+00:00", "jobs": [], "recipe": {}}
    manifest["megatron"] = {"argv": []}
    found = create_run_folder(home / "runs", "theirs-1", {"recipe.yaml": text}, manifest).path
    give_away(found)
    return found


def give_away(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


@pytest.mark.parametrize("by_path", [True, False])
def test_another_user_s_run_is_not_rehearsed(say: Say, run: Path, canary: Path, by_path: bool) -> None:
    name = str(run) if by_path else run.name
    code, out, _ = say("check", name, "--rehearse", "--json")
    assert (code, [one["code"] for one in json.loads(out)["problems"]]) == (1, ["not-yours"])
    assert "not-yours" not in say("check", name, "--json")[1]
    assert not canary.exists()


@pytest.mark.parametrize(
    "verb",
    [
        ("submit", "--dry-run", "--rehearse"),
        pytest.param(("tune", "--dry-run"), marks=pytest.mark.needs_plugin("tune")),
    ],
)
def test_another_user_s_run_is_not_started(say: Say, run: Path, canary: Path, verb: tuple[str, ...]) -> None:
    code, _, err = say(verb[0], run.name, *verb[1:], "--backend", "local")
    assert (code, "[not-yours]" in err) == (1, True)
    assert not canary.exists()


def test_a_folder_is_not_the_path_of_the_recipes_in_it(say: Say, recipe: Path, canary: Path) -> None:
    give_away(recipe.parent)
    code, out, _ = say("check", str(recipe.parent), "--rehearse", "--json")
    assert (code, [one["code"] for one in json.loads(out)["problems"]]) == (2, ["foreign-recipe"])
    assert not canary.exists()


@pytest.mark.train
def test_a_recipe_that_is_named_by_its_path_is(say: Say, recipe: Path, canary: Path) -> None:
    give_away(recipe.parent)
    assert say("check", str(recipe), "--rehearse")[0] == 0
    assert canary.exists()


@pytest.mark.needs_plugin("data")
def test_another_user_s_checkpoint_is_not_loaded(say: Say, run: Path) -> None:
    """Megatron unpickles parts of a checkpoint."""
    code, _, err = say("data", "sample", run.name, "--prompt", "a")
    assert (code, "[not-yours]" in err) == (1, True)
