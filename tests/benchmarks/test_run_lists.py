"""The lists of `benchmarks/h200/run.sh`: every line names a recipe that means something, with these options."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
from support import unpacked

from fp8launch.hardware.quantization import is_stateful
from fp8launch.job.prepared import prepare_loaded
from fp8launch.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "benchmarks" / "h200"
REHEARSED = unpacked(H200 / "recipes" / "rehearsed.tar.xz", "rehearsed")
LINES = [
    (path.stem, words)
    for path in sorted([*(H200 / "lists").glob("*.txt"), *REHEARSED.glob("*.txt")])
    for line in path.read_text().splitlines()
    if (words := line.split()) and not words[0].startswith("#")  # as bash's `read` does: quotes are the recipe's
]
RUNS = [(name, words) for name, words in LINES if words[0] != "compare" and words[2] != "run"]
COMMANDS = {tuple(words[3:]) for _, words in LINES if words[2:3] == ["run"]}
# Parts of a line that need a plugin. The recipe `tune_base` profiles an iteration.
NEEDS = {
    "bridge:": "bridge",
    "recipes/peers/": "accelerate",
    "launch.tensor_stats": "measure",
    " tune_base ": "measure",
}


def case(name: str, words: list[str]) -> Any:
    """Return a line as parameters of a test."""
    line = f" {' '.join(words)} "
    marks = [pytest.mark.needs_plugin(plugin) for part, plugin in NEEDS.items() if part in line]
    return pytest.param(name, words, id=f"{name}-{words[1]}", marks=marks)


@pytest.mark.parametrize(("name", "words"), [case(*run) for run in RUNS])
def test_a_line_is_a_run(name: str, words: list[str]) -> None:
    gpus, _, recipe, *options = words
    assert set(options[::2]) <= {"--set"}
    places = {"{here}": str(H200), "{text}": "/data/text", "{data}": "/data/packages"}
    settings = options[1::2]
    for name, place in places.items():
        settings = [text.replace(name, place) for text in settings]
    folder = REHEARSED.parent if recipe.startswith("rehearsed/") else H200 / "recipes"
    path = ROOT / recipe if (ROOT / recipe).is_file() else folder / f"{recipe}.yaml"
    loaded = load_recipe(recipe if recipe.startswith("bridge:") else str(path), overrides=settings)
    assert loaded.recipe.resources.gpus_per_node <= int(gpus)
    if loaded.recipe.launch.script is None:
        assert prepare_loaded(loaded).layout.world == loaded.recipe.resources.world_size


@pytest.mark.parametrize("words", sorted(COMMANDS), ids=lambda words: words[-1])
def test_a_command_of_a_list_has_these_options(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter, program, *options = words
    assert interpreter == "python3"
    if program.endswith("/rates.py"):
        assert Path(program.replace("{here}", str(H200))).is_file()
        assert len(options) == 1 and options[0].startswith("{runs}/")
        return
    assert program == "{here}/torchtitan_steps.py"
    module = runpy.run_path(program.replace("{here}", str(H200)))
    monkeypatch.setattr("sys.argv", [program, *options])
    assert module["arguments"]().compile


def test_a_comparison_names_runs_of_its_list() -> None:
    for name, words in LINES:
        if words[0] == "compare":
            assert set(words[2:]) <= {other[1] for its, other in RUNS if its == name}


def test_the_recipe_of_the_resumes_saves_and_keeps_its_state() -> None:
    """`benchmarks/resume/run.sh` kills this run; without state to restore it would show nothing."""
    prepared = prepare_loaded(load_recipe(str(ROOT / "benchmarks" / "resume" / "delayed.yaml")))
    assert prepared.loaded.recipe.goes_on and is_stateful(prepared.args.attributes)
