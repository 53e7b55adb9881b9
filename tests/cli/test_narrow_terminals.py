"""Tables in a terminal of 80 columns: ids stay whole, and what there is to read has room."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fp8launch.cli.output import _columns_that_fit, styled
from fp8launch.cluster.images import catalogue
from fp8launch.cluster.profile import config_folder
from fp8launch.recipe.catalog import pack_recipes
from fp8launch.rundir.registry import default_root
from fp8launch.rundir.run_dir import create_run_folder


def terminal(columns: int, home: Path, *arguments: str) -> str:
    """What a command prints in a terminal of this width."""
    main, side = pty.openpty()
    env = {**os.environ, "HOME": str(home), "COLUMNS": str(columns), "TERM": "xterm"}
    process = subprocess.Popen([sys.executable, "-m", "fp8launch", *arguments], stdout=side, stderr=side, env=env)
    os.close(side)
    shown = b""
    while True:
        try:
            block = os.read(main, 65536)
        except OSError:
            break
        if not block:
            break
        shown += block
    os.close(main)
    assert process.wait() in (0, 3), shown
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).replace("\r", "")


@pytest.mark.parametrize("columns", [60, 80, 120, 200])
@pytest.mark.parametrize(
    "run", ["tiny_cpu-20261122-075613-dbcb", "llama8b_fp8_h100x8-n16-tensorwise-delayed-0.001-r3-" + "a" * 20]
)
def test_an_id_is_never_broken(home: Path, columns: int, run: str) -> None:
    manifest = {
        "run_id": run, "name": "x", "backend": "sbatch", "created": "2026-11-22T07:56:13+00:00", "jobs": [],
        "recipe": {"resources": {"nodes": 16, "gpus_per_node": 8}}, "gpu": "h100",
        "submission": {"key": "k", "answered": True, "refused": "Requested node configuration is not available"},
    }  # fmt: skip
    create_run_folder(default_root(), run, {}, manifest)
    shown = terminal(columns, home, "runs")
    assert run in shown
    assert "unknown" in shown
    words = " ".join(shown.split())
    assert "configuration is not" in words or columns < 80
    assert max(map(len, shown.splitlines())) <= max(columns, len(run) + 35)


@pytest.mark.needs_plugin("doctor")
def test_doctor_has_room_for_what_it_found(home: Path) -> None:
    found = [line for line in terminal(80, home, "doctor").splitlines() if line.strip()]
    assert found[0].split() == ["what", "found,", "and", "what", "to", "do"]
    assert max(map(len, found)) >= 70
    width = len(found[0]) - len(found[0].lstrip())
    assert 80 - found[0].index("found,") >= 40, (width, found[0])
    assert any("-> " in line for line in found)


@pytest.mark.parametrize("columns", [80, 400])
def test_the_path_of_a_cluster_profile_is_never_broken(home: Path, columns: int) -> None:
    profile = config_folder() / "a_cluster_with_quite_a_long_name.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("description: a sentence about it that takes some room\n")
    shown = terminal(columns, home, "clusters")
    assert f" {profile}" in shown and f"\n{profile.stem} " in shown
    assert ("takes some room" in shown) == (columns == 400)


def test_the_names_of_recipes_are_never_broken(home: Path) -> None:
    shown = terminal(80, home, "recipes")
    for row in [*pack_recipes(), *pack_recipes("studies")]:
        assert re.search(rf"^{re.escape(row.name)}( |$)", shown, re.M), row.name


@pytest.mark.needs_plugin("images")
def test_the_names_of_images_are_never_broken(home: Path) -> None:
    shown = terminal(80, home, "images")
    for name, entry in catalogue().items():
        assert re.search(rf"^{re.escape(name)} +{re.escape(entry['uri'])}( |$)", shown, re.M), name


def test_the_points_of_a_study_have_whole_ids(home: Path) -> None:
    sweep = ["--sweep", "train.lr=0.01,0.02", "--repeat", "2", "--backend", "local", "--dry-run"]
    shown = terminal(80, home, "submit", "tiny_cpu", *sweep)
    assert len(re.findall(r"^tiny_cpu-0\.0[12]-r[12]-[0-9a-f]{6}  lr=0\.0[12], repeat [12] ", shown, re.M)) == 4


@pytest.mark.needs_plugin("diff")
def test_what_differs_between_runs_has_whole_ids(home: Path) -> None:
    runs = [f"tiny_cpu-20261122-07561{n}-dbcb" for n in range(2)]
    for number, run in enumerate(runs):
        text = f"extends: [tiny_cpu]\ntrain: {{lr: {number + 1}.0e-3}}\n"
        manifest = {"run_id": run, "created": "2026-11-22T07:56:13+00:00", "jobs": []}
        create_run_folder(default_root(), run, {"recipe.yaml": text}, manifest)
    shown = terminal(80, home, "diff", *runs)
    assert shown.startswith(f"A: {runs[0]}\nB: {runs[1]}\n")
    assert re.search(r"^numerics +arguments +lr +0\.001 +0\.002$", shown, re.M)


def test_columns_are_dropped_in_their_order() -> None:
    columns, rows = ["run", "a", "b", "text"], [["x" * 30, "a" * 10, "b" * 10, "word " * 20]]
    kept = {width: _columns_that_fit(columns, rows, width, ["run"], ["b", "a"])[0] for width in (80, 79, 67, 10)}
    assert kept == {80: [0, 1, 2, 3], 79: [0, 1, 3], 67: [0, 3], 10: [0, 3]}


@pytest.mark.needs_plugin("bridge")
def test_a_long_header_does_not_widen_a_table(home: Path) -> None:
    shown = terminal(80, home, "recipes", "--engine", "bridge", "--gpu", "h100")
    assert "llama31_405b_pretrain_1024gpu_h100_fp8cs_config" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_terminal_without_colours_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert styled("error", fg="red", bold=True) == "error"
    monkeypatch.setenv("TERM", "xterm")
    assert styled("error", fg="red").startswith("\x1b[")


@pytest.mark.needs_plugin("estimate")
def test_signs_that_an_encoding_lacks_have_others_in_their_place(home: Path) -> None:
    command = [sys.executable, "-m", "fp8launch", "estimate", "llama8b_fp8"]
    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=True)
    shown = done.stdout.decode("ascii")
    assert "#####" in shown and "+- " in shown and "\\u" not in shown
