"""The recipe that `tune --write` writes, in other folders than the tuned recipe's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8launch.plugins.tune.recipe_text import recipe_text
from fp8launch.recipe.load import load_recipe, read_recipe


@pytest.mark.parametrize("folder", ["recipes", "elsewhere/deep", "linked"])
def test_it_extends_the_tuned_recipe_from_any_folder(tmp_path: Path, folder: str) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "elsewhere" / "deep")
    tuned = tmp_path / "recipes" / "own.yaml"
    tuned.parent.mkdir()
    tuned.write_text("extends: [tiny_cpu]\nname: own\ntrain: {iterations: 7}\n")
    file = tmp_path / folder / "best.yaml"
    text = recipe_text(str(tuned), read_recipe(str(tuned)), ["train.lr=0.5"], {"batch.micro": 4}, [], "here", [], file)
    file.write_text(text)
    recipe = load_recipe(str(file)).recipe
    assert (recipe.train.iterations, recipe.train.lr, recipe.batch.micro) == (7, 0.5, 4)
    parent = "./own.yaml" if folder == "recipes" else "../../recipes/own.yaml"
    assert f"# It extends {parent}, relative to this file: move both together.\n" in text


def test_a_recipe_of_the_pack_is_extended_by_its_name(tmp_path: Path) -> None:
    file = tmp_path / "best.yaml"
    text = recipe_text("tiny_cpu", read_recipe("tiny_cpu"), [], {"batch.micro": 4}, [], "here", [], file)
    assert "tiny_cpu" in text and "move both" not in text
    file.write_text(text)
    assert load_recipe(str(file)).recipe.batch.micro == 4
