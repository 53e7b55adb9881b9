"""Pipes and devices where a file is expected: they hold nobody up, and are named."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.injob.supervisor import checkpoints
from fp8launch.injob.supervisor.checkpoints import TRACKER

PIPE_OR_DEVICE = pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
Make = Callable[[Path], object]


def in_time(code: str) -> str:
    """What Python code prints; a hang fails, and so does an endless read."""
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n{code}"
    done = subprocess.run([sys.executable, "-c", limited], timeout=300, capture_output=True, text=True, check=True)
    return done.stdout


@PIPE_OR_DEVICE
def test_the_supervisor_sets_a_tracker_right_that_is_no_file(tmp_path: Path, make: Make) -> None:
    make(tmp_path / TRACKER)
    whole = checkpoints.place(tmp_path, 4)
    (whole / "mp_rank_00").mkdir(parents=True)
    with zipfile.ZipFile(whole / "mp_rank_00/model.pt", "w") as archive:
        archive.writestr("x", "x")
    code = "from pathlib import Path; from fp8launch.injob.supervisor.checkpoints import *; folder = Path({!r})\n"
    said = in_time(code.format(str(tmp_path)) + "print(latest(folder), repair(folder), latest(folder))")
    assert said.startswith("0 [") and said.strip().endswith("4")
    assert "not a regular file" in said
    assert (tmp_path / TRACKER).is_file() and not (tmp_path / TRACKER).is_symlink()


@PIPE_OR_DEVICE
def test_a_checkpoint_whose_part_is_no_file_is_torn(tmp_path: Path, make: Make) -> None:
    part = tmp_path / "mp_rank_00" / "model_optim_rng.pt"
    part.parent.mkdir()
    make(part)
    code = "from pathlib import Path; from fp8launch.injob.supervisor.checkpoints import torn; print(torn(Path({!r})))"
    assert "model_optim_rng.pt, which is cut short" in in_time(code.format(str(tmp_path)))


def test_the_tracker_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / f".{TRACKER}.new").symlink_to(victim)
    checkpoints.point_at(tmp_path, 7)
    assert victim.read_text() == "mine"
    assert (tmp_path / TRACKER).read_text() == "7"


@PIPE_OR_DEVICE
def test_check_names_a_tracker_that_is_no_file(tmp_path: Path, make: Make) -> None:
    (tmp_path / "ckpt" / "iter_0000004").mkdir(parents=True)
    make(tmp_path / "ckpt" / TRACKER)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: tiny_cpu\nname: r\ncheckpoint: {{load: {tmp_path}/ckpt}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "fp8launch", "check", str(recipe)],
        timeout=300,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"{TRACKER} that cannot be read: it is not a regular file" in done.stdout


@pytest.mark.parametrize("verb", ["check", "render", "submit"])
@pytest.mark.parametrize("link", [False, True])
def test_a_pipe_in_the_place_of_a_recipe_holds_nobody_up(tmp_path: Path, verb: str, link: bool) -> None:
    os.mkfifo(tmp_path / "p")
    (tmp_path / "l.yaml").symlink_to(tmp_path / "p")
    file = str(tmp_path / ("l.yaml" if link else "p"))
    code = f"from fp8launch.cli import run; print(run([{verb!r}, {file!r}]))"
    limited = [sys.executable, "-c", code]
    done = subprocess.run(limited, timeout=300, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("2\n")
    assert "it is a pipe [unreadable-file]" in done.stdout + done.stderr


COMMAND_LINE = "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64"


@pytest.mark.parametrize(
    ("verb", "content", "answer"),
    [
        ("render", "extends: tiny_cpu", "--num-layers 2"),
        pytest.param("import", COMMAND_LINE, "num_layers: 2", marks=pytest.mark.needs_plugin("importer")),
    ],
)
def test_what_a_shell_passes_as_a_file_is_read(verb: str, content: str, answer: str) -> None:
    start = f"{sys.executable} -c 'from fp8launch.__main__ import main; main()'"
    line = f"{start} {verb} <(sleep 1; echo '{content}')"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert answer in done.stdout
