"""A file that cannot be written is named, in one line: compare, archive, init, import, export, pictures."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import sitting

TOO_LARGE = "File too large"


@pytest.fixture
def folder(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(sitting("2026-11-20-verify") / "blockwise.log", tmp_path / "a.log")
    (tmp_path / "launch.sh").write_text("python pretrain_gpt.py --num-layers 2 --hidden-size 64\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def complaint(arguments: str) -> str:
    """Run a command that may write no byte to any file, as on a full disk, and return its last message."""
    command = f"ulimit -f 0; {shlex.quote(sys.executable)} -m fp8launch {arguments}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        ("compare a.log --csv out.csv", "out.csv"),
        ("compare a.log --md out.md", "out.md"),
        pytest.param(
            "export a.log --to tensorboard --dir out", "out/fp8launch/a",
            marks=[
                pytest.mark.needs_plugin("tracking"),
                pytest.mark.skipif(not importlib.util.find_spec("tensorboard"), reason="needs tensorboard"),
            ],
        ),
        pytest.param(
            "compare a.log --plot out.png", "out.png",
            marks=[
                pytest.mark.needs_plugin("plots"),
                pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs matplotlib"),
            ],
        ),
    ],
)  # fmt: skip
def test_a_full_disk_names_the_file(folder: Path, arguments: str, file: str) -> None:
    assert complaint(arguments) == f"fp8launch: {file}: {TOO_LARGE}"
    assert not (folder / file).is_file()


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("import launch.sh", marks=pytest.mark.needs_plugin("importer")),
        "compare a.log",
        "compare a.log --json",
        "recipes",
    ],
)
def test_a_full_disk_names_the_file_behind_stdout(folder: Path, arguments: str) -> None:
    assert complaint(f"{arguments} > out.txt") == f"fp8launch: {folder}/out.txt: {TOO_LARGE}"


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        ("compare a.log --csv /proc/out.csv", "/proc/out.csv"),
        pytest.param(
            "init recipe tiny --gpu cpu --out /proc/r.yaml", "/proc/r.yaml", marks=pytest.mark.needs_plugin("init")
        ),
    ],
)
def test_a_folder_that_cannot_be_written_is_not_a_temporary_file(folder: Path, arguments: str, file: str) -> None:
    command = [sys.executable, "-m", "fp8launch", *arguments.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-1] == f"fp8launch: {file}: No such file or directory"


@pytest.mark.needs_plugin("data")
@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        ("data build text.txt --tokenizer bytes --out made", "made.build/plan.json"),
        ("data tokenizer text.txt --vocab-size 300 --out words", "words/tokenizer_config.json"),
    ],
)
def test_a_full_disk_names_a_file_of_the_data(folder: Path, arguments: str, file: str) -> None:
    """Not the pipe that reads the command's output, which cannot be full."""
    (folder / "text.txt").write_text("some words and some more\n" * 20)
    assert complaint(arguments) == f"fp8launch: {folder / file}: {TOO_LARGE}"
