"""Every place that has to know the supported Megatron versions agrees with the one table."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from fp8launch.engines.megatron_lm.engine import MegatronLM
from fp8launch.megatron import versions
from fp8launch.megatron.schema import SCHEMAS, load_schema
from fp8launch.megatron.versions import DEFAULT, SUPPORTED, WHEELS, minor_of, release
from fp8launch.recipe.load import load_recipe
from fp8launch.resources import in_job_folder

ROOT = Path(__file__).resolve().parents[2]


def test_each_supported_version_has_a_schema_of_its_release() -> None:
    assert {path.name.removesuffix(".json.xz") for path in SCHEMAS.iterdir()} == set(SUPPORTED)
    assert {minor: load_schema(minor).version for minor in SUPPORTED} == dict(SUPPORTED)
    assert list(SUPPORTED) == sorted(SUPPORTED, key=release)
    assert all(minor_of(tested) == minor for minor, tested in SUPPORTED.items())
    assert DEFAULT in SUPPORTED
    assert set(WHEELS) == set(SUPPORTED.values())


def test_the_package_asks_for_the_supported_versions() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [wanted] = [line.strip().strip('",').partition(";")[0] for line in text.splitlines() if '"megatron-core' in line]
    allowed = SpecifierSet(wanted.removeprefix("megatron-core"))
    oldest, newest = release(next(iter(SUPPORTED))), release(list(SUPPORTED)[-1])
    assert all(tested in allowed for tested in SUPPORTED.values())
    assert f"0.{oldest[1] - 1}.9" not in allowed
    assert f"0.{newest[1] + 1}.0" not in allowed


def test_the_worker_in_the_job_knows_the_same_versions() -> None:
    tree = ast.parse((in_job_folder() / "rank/worker.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
    assert ast.literal_eval(assigned["TESTED_MEGATRON"]) == tuple(release(minor) for minor in SUPPORTED)


def test_set_up_and_the_schema_tool_read_the_table() -> None:
    script = (ROOT / "tools/setup.sh").read_text(encoding="utf-8")
    [reader] = [line for line in script.splitlines() if line.startswith("mapfile -t megatrons")]
    command = ["bash", "-c", f'{reader}\necho "${{megatrons[@]}}"']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(SUPPORTED.values())
    code = "import flag_schemas; print(*flag_schemas.MINORS)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True, check=True)
    assert done.stdout.split() == list(SUPPORTED)


def test_an_image_decides_the_release_of_its_minor_version(tmp_path: Path) -> None:
    """Between 0.18.0, which the image has, and 0.18.2 lies what decides whether a set of arguments is legal."""
    recipe = tmp_path / "r.yaml"
    for software, expected in (("", "0.18.0"), ("0.18", "0.18.0"), ("0.18.2", "0.18.2"), ("0.19", SUPPORTED["0.19"])):
        stated = f"software: {{megatron: '{software}'}}\n" if software else ""
        recipe.write_text(f"extends: llama8b_bf16\ncontainer: {{image: nemo-26.06}}\n{stated}")
        assert MegatronLM().translate(load_recipe(str(recipe))).version == expected


def test_a_new_version_does_not_change_what_recipes_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only DEFAULT decides: here a newer version is supported, and the older one stays the default."""
    monkeypatch.setattr("fp8launch.engines.megatron_lm.engine.DEFAULT", "0.18")
    assert MegatronLM().translate(load_recipe("tiny_cpu")).version == SUPPORTED["0.18"]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.20.0", (2, 20, 0)),
        ("2.20.0.dev0+ab12", (2, 20, 0)),
        ("v0.19.2", (0, 19, 2)),
        ("2.11.0a0+git.3", (2, 11, 0)),
        ("12.9", (12, 9)),
        ("none", ()),
        ("", ()),
        ("9" * 5000, ()),
    ],
)
def test_a_release_is_the_numbers_of_a_version(text: str, numbers: tuple[int, ...]) -> None:
    assert versions.release(text)[: len(numbers) or None] == numbers or len(text) > 1000
