"""`plan --study`: the best layouts as recipes that `submit --study` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8launch.cli import run
from fp8launch.recipe.load import load_recipe, read_recipe

PLAN = ("plan", "llama3_8b", "--gpu", "h200", "--gpus", "2", "--top", "2", "--study", "best")


@pytest.fixture(autouse=True)
def folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(home)
    yield home


def test_the_layouts_become_a_study_that_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN, "--json"]) == 0
    planned, said = capsys.readouterr()
    files = sorted(map(str, Path("best-layouts").iterdir()))
    assert "Nothing was submitted" in said and "submit best-layouts/*.yaml --study best" in said
    assert not list(folder.rglob("manifest.json"))
    for file, layout in zip(files, json.loads(planned), strict=True):
        assert run(["estimate", file, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["predicted"] == pytest.approx(layout["predicted"])
    words = ["--backend", "local", "--wait", "--yes", "--set", "launch.python=/bin/true"]
    assert run(["submit", *files, "--study", "best", *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert run(["runs", "best", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in runs] == ["completed"] * 2
    assert all(Path(file).stem in one["run"] for file, one in zip(files, runs, strict=True))


def test_what_exists_is_kept_and_bad_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*PLAN]) == 0
    before = {file: file.read_text() for file in Path("best-layouts").iterdir()}
    assert run([*PLAN, "--top", "1"]) == 2
    assert "best-layouts exists" in capsys.readouterr().err
    assert {file: file.read_text() for file in Path("best-layouts").iterdir()} == before
    assert run(["plan", "llama3_8b", "--study", "a/b"]) == 2
    assert "'a/b' is not a valid name for a study" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["studies/fp8_vs_bf16_llama3_1_8b", "llama8b_fp8"])
def test_a_layout_has_neither_the_grid_nor_the_figure_of_its_recipe(name: str) -> None:
    planned = load_recipe(read_recipe(name)).recipe
    assert planned.is_study or planned.reference
    assert run(["plan", name, "--top", "1", "--write", "one.yaml"]) == 0
    recipe = load_recipe(read_recipe("one.yaml")).recipe
    assert not recipe.is_study and recipe.reference is None
    assert recipe.model == planned.model


def test_what_cannot_be_written_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "llama3_8b", "--gpu", "h200", "--gpus", "2", "--top", "1"]
    assert run([*words, "--write", "missing/one.yaml"]) == 3
    assert "missing/one.yaml: error: cannot be written: No such file" in capsys.readouterr().err
