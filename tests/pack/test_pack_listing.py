"""`fp8launch recipes` finds the right recipe in one screen and explains it value by value."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pack_support import HEADLINE, PACK, ROOT, STUDIES, name_of, points

from fp8launch.cli import run
from fp8launch.recipe.catalog import explained, pack_recipes, study_points
from fp8launch.recipe.load import load_recipe


def fp8launch(*arguments: str) -> str:
    command = [sys.executable, "-m", "fp8launch", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_the_list_fits_one_screen_and_names_all() -> None:
    shown = fp8launch("recipes")
    lines = shown.splitlines()
    assert len(lines) <= 55
    assert max(len(line.rstrip()) for line in lines) <= 135
    first = {line.split()[0] for line in lines if line.strip()}
    assert first >= {name_of(file) for file in [*HEADLINE, *STUDIES]}


def test_the_list_as_data() -> None:
    rows = {row["recipe"]: row for row in json.loads(fp8launch("recipes", "--json"))}
    assert set(rows) == {name_of(file) for file in [*HEADLINE, *STUDIES]}
    mine = rows["llama8b_fp8"]
    assert (mine["gpu"], mine["gpus"], mine["precision"], mine["model"]) == ("h100", 8, "tensorwise", "llama3_8b")
    assert mine["reference"]["tokens_per_s_per_gpu"] == 14451
    assert (mine["study"], mine["runs"]) == (False, 1)
    assert (rows["studies/scaling_weak_llama8b"]["study"], rows["studies/scaling_weak_llama8b"]["runs"]) == (True, 8)


def test_studies_come_after_recipes_and_small_jobs_first() -> None:
    worlds = [row.recipe.resources.world_size for row in pack_recipes()]
    assert worlds == sorted(worlds)
    study = {row.name: row for row in pack_recipes("studies")}
    assert study["studies/scaling_strong_llama8b"].gpus == "16-128 h100"
    assert study["studies/fp8_vs_bf16_qwen3_14b"].gpus == "4 b200"
    assert study["studies/fp8_vs_bf16_qwen3_4b"].precision == "bf16, tensorwise"


@pytest.mark.parametrize("file", STUDIES, ids=name_of)
def test_runs_are_counted_as_they_are_made(file: Path) -> None:
    assert study_points(load_recipe(str(file)).recipe) == len(list(points(file)))


@pytest.mark.parametrize("file", [*HEADLINE, *STUDIES], ids=name_of)
def test_an_explained_recipe_is_the_recipe(file: Path) -> None:
    loaded = load_recipe(str(file))
    assert yaml.safe_load(explained(loaded)) == loaded.tree.plain()


def test_every_value_comes_from_the_line_that_is_named() -> None:
    seen = 0
    for line in explained(load_recipe("llama70b_mxfp8_gb200")).splitlines():
        if found := re.fullmatch(r"\s*([\w.]+):.*?  # (\S+):(\d+)", line):
            source = (ROOT / found[2]).read_text(encoding="utf-8").splitlines()[int(found[3]) - 1]
            assert re.search(rf"\b{found[1]}: ", f"{source} ")
            seen += 1
    assert seen > 60


def test_one_recipe_as_data() -> None:
    data = json.loads(fp8launch("recipes", "llama70b_mxfp8_gb200", "--json"))
    assert data["parallel"]["tp"] == 2
    assert re.fullmatch(r"recipes/hardware/gb200.yaml:\d+", data["places"]["resources.gpus_per_node"])
    assert data["reference"]["gpus"] == 64
    assert data["files"][-1] == "recipes/llama70b_mxfp8_gb200.yaml"


def test_a_changed_value_is_told_from_an_inherited_one(tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: [llama8b_fp8]\nbatch:\n  global: 64\n")
    shown = fp8launch("recipes", str(mine))
    assert re.search(rf"global: 64 +# {re.escape(str(mine))}:3\n", shown)
    assert re.search(r"micro: 1 +# recipes/llama8b_fp8.yaml:\d+\n", shown)


def test_the_pack_folder_holds_nothing_else() -> None:
    assert {path.suffix for path in PACK.rglob("*") if path.is_file()} == {".yaml"}


def test_every_part_is_listed_by_its_kind(capsys: pytest.CaptureFixture[str]) -> None:
    files = [file for file in (ROOT / "recipes").glob("*/*.yaml") if file.parent.name != "studies"]
    for kind in {file.parent.name for file in files}:
        assert run(["recipes", "--kind", kind, "--json"]) == 0
        listed = {part["name"]: part["description"] for part in json.loads(capsys.readouterr().out)}
        assert set(listed) == {f"{kind}/{file.stem}" for file in files if file.parent.name == kind}
        assert all(listed.values()), "the first line of a part says what it is"
    assert run(["recipes", "--kind", "models"]) == 0
    assert "Llama 3 8B, 8 030 261 248 parameters." in capsys.readouterr().out


def test_kinds_filter_and_near_names_are_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--kind", "studies"]) == 0
    shown = capsys.readouterr().out
    assert "studies/scaling_weak_llama8b" in shown and "llama8b_fp8 " not in shown
    near_names = (
        (["--kind", "model"], "'models'"), (["llama8b_f8"], "llama8b_fp8"), (["--gpu", "h1000"], "'h100'"),
        (["--precision", "tensorwse"], "'tensorwise'"),
    )  # fmt: skip
    for wrong, near in near_names:
        assert run(["recipes", *wrong]) == 2
        assert f"did you mean {near}?" in capsys.readouterr().err
