"""A relative `launch.script` is a file next to the recipe that states it, whatever the working folder is."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.cluster.profile import Cluster
from fp8launch.job.build_job import plan
from fp8launch.job.prepared import prepare
from fp8launch.recipe.load import load_recipe

Write = Callable[[str, str], str]
Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder in which somebody left a script of the same name."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "train.py").write_text("raise SystemExit('the wrong script')\n")
    monkeypatch.chdir(folder)
    return folder


def script_of(recipe: str, *overrides: str) -> str | None:
    return load_recipe(recipe, overrides).recipe.launch.script


@pytest.mark.usefixtures("elsewhere")
def test_it_is_next_to_the_file_that_states_it(write: Write, tmp_path: Path) -> None:
    parent = write("parts/parent.yaml", "launch: {script: ./code/train.py}\n")
    recipe = write("mine/r.yaml", f"extends: [{parent}]\nname: r\n")
    assert script_of(recipe) == f"{tmp_path}/parts/code/train.py"
    assert script_of(write("mine/own.yaml", f"extends: [{parent}]\nlaunch: {{script: train.py}}\n")) == (
        f"{tmp_path}/mine/train.py"
    )


def test_a_link_to_a_recipe_stands_for_its_file(write: Write, tmp_path: Path, elsewhere: Path) -> None:
    recipe = write("there/r.yaml", "name: r\nlaunch: {script: train.py}\n")
    (elsewhere / "linked.yaml").symlink_to(recipe)
    assert script_of("./linked.yaml") == f"{tmp_path}/there/train.py"


def test_an_override_is_relative_to_the_working_folder(write: Write, elsewhere: Path) -> None:
    recipe = write("r.yaml", "name: r\n")
    assert script_of(recipe, "launch.script=train.py") == f"{elsewhere}/train.py"
    assert script_of(recipe, "launch={script: train.py}") == f"{elsewhere}/train.py"


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("script", ["/m/train.py", "~/train.py", "$HOME/train.py"])
def test_other_paths_stay(write: Write, script: str) -> None:
    assert script_of(write("r.yaml", f"name: r\nlaunch: {{script: {script}}}\n")) == script


@pytest.mark.usefixtures("elsewhere")
def test_the_scripts_of_an_axis_too(write: Write, tmp_path: Path) -> None:
    recipe = write("r.yaml", "name: r\naxes: {launch.script: [a.py, /m/b.py]}\n")
    assert load_recipe(recipe).recipe.axes == {"launch.script": [f"{tmp_path}/a.py", "/m/b.py"]}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("container.image", "x.sqsh", "{}/x.sqsh"),
        ("container.image", "../images/x.sif", "{}/../images/x.sif"),
        ("container.image", "nemo-26.04", "nemo-26.04"),
        ("container.image", "site/mine:1", "site/mine:1"),
        ("launch.python", ".venv/bin/python", "{}/.venv/bin/python"),
        ("launch.python", "python3.12", "python3.12"),
    ],
)
def test_the_image_and_the_python_too(write: Write, tmp_path: Path, key: str, value: str, found: str) -> None:
    """They choose the program as well."""
    section, name = key.split(".")
    loaded = load_recipe(write("r.yaml", f"name: r\n{section}: {{{name}: {value!r}}}\n"))
    assert getattr(getattr(loaded.recipe, section), name) == found.format(tmp_path)
    changed = load_recipe(write("o.yaml", "name: r\n"), [f"{key}={value}"])
    assert getattr(getattr(changed.recipe, section), name) == found.format(Path.cwd())


@pytest.mark.usefixtures("elsewhere")
def test_check_submit_and_the_job_mean_the_same_script(write: Write, tmp_path: Path, home: Path, say: Say) -> None:
    write("mine/train.py", "print('the right script')\n")
    recipe = write("mine/r.yaml", "extends: [tiny_cpu]\nname: r\nlaunch: {script: train.py}\n")
    assert plan(prepare(recipe), Cluster(), Path("/r")).entry.script == f"{tmp_path}/mine/train.py"
    codes = [one["code"] for one in json.loads(say("check", recipe, "--json")[1])["problems"]]
    assert "script-missing" not in codes
    say("submit", recipe, "--backend", "local", "--wait", "--yes")
    run = next((home / "runs").glob("r-*"))
    assert "the right script" in next(run.glob("logs/*.log")).read_text()
    assert script_of(str(run / "recipe.yaml")) == f"{tmp_path}/mine/train.py"
    shown = say("render", recipe, "--as", "sbatch")[1]
    assert f"--script {tmp_path}/mine/train.py" in shown


# --- whose script it is -----------------------------------------------------------------------------------------------

STRANGER = 54321


@pytest.fixture
def shared(write: Write, tmp_path: Path) -> Path:
    """A recipe with a script next to it."""
    write("mine/train.py", "")
    write("mine/r.yaml", "extends: [tiny_cpu]\nname: r\nlaunch: {script: train.py}\n")
    return tmp_path / "mine"


def unsafe(say: Say, *words: str) -> list[str]:
    problems = json.loads(say("check", *words, "--json")[1])["problems"]
    return [one["message"] for one in problems if one["code"] == "script-not-safe"]


def test_one_s_own_script_is_safe(say: Say, shared: Path) -> None:
    assert unsafe(say, f"{shared}/r.yaml") == []


@pytest.mark.parametrize(
    ("place", "mode"), [("", 0o777), ("", 0o1777), ("", 0o775), ("train.py", 0o666), ("train.py", 0o664)]
)
def test_a_script_that_others_can_write_is_refused(say: Say, shared: Path, place: str, mode: int) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(shared / place, 0, STRANGER)
    (shared / place).chmod(mode)
    [message] = unsafe(say, f"{shared}/r.yaml")
    who = "everybody" if mode & 0o002 else f"the group {STRANGER}"
    assert message.endswith(f"{shared / place} is writable by {who}")
    submitted = say("submit", f"{shared}/r.yaml", "--backend", "local", "--wait", "--yes")
    assert (submitted[0], "[script-not-safe]" in submitted[2]) == (1, True)


def test_a_link_to_a_script_that_others_can_write_is_refused(say: Say, shared: Path, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (shared / "train.py").rename(tmp_path / "open/train.py")
    (shared / "train.py").symlink_to(tmp_path / "open/train.py")
    assert len(unsafe(say, f"{shared}/r.yaml")) == 1


@pytest.mark.parametrize(("mode", "count"), [(0o775, 0), (0o777, 1)])
def test_a_group_may_be_trusted_with_scripts(say: Say, shared: Path, write: Write, mode: int, count: int) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(shared, 0, STRANGER)
    shared.chmod(mode)
    profile = write("c.yaml", "trust_run_root: true\n")
    assert len(unsafe(say, f"{shared}/r.yaml", "--cluster", profile)) == count


def test_a_stranger_s_script_is_not_the_one_next_to_the_recipe(say: Say, shared: Path) -> None:
    """Others may have put it there before the recipe's owner did."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(shared / "train.py", STRANGER, STRANGER)
    [message] = unsafe(say, f"{shared}/r.yaml")
    assert f"belongs to the user {STRANGER}" in message
    # A colleague's recipe with the colleague's script, named by its path, is the user's choice.
    os.chown(shared / "r.yaml", STRANGER, STRANGER)
    assert unsafe(say, f"{shared}/r.yaml") == []


def test_a_colleague_s_checkout_may_be_named(say: Say, shared: Path, write: Write) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(shared / "train.py", STRANGER, STRANGER)
    recipe = write("other/r.yaml", f"extends: [tiny_cpu]\nname: r\nlaunch: {{script: {shared}/train.py}}\n")
    assert unsafe(say, recipe) == []
