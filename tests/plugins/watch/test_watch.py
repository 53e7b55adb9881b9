"""`watch`: keys and screens as pure functions, and the command itself on a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import time
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import pytest
from rich.console import Console
from support import log_bytes, sitting, wait_for

from fp8launch.cli import run
from fp8launch.injob.supervisor.checkpoints import latest
from fp8launch.plugins.watch.view import Row, View, chosen_lines, render, sparkline
from fp8launch.report.progress import progress_of
from fp8launch.rundir.attempts import Attempts
from fp8launch.rundir.registry import default_root
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.schedulers.base import JobState, JobTimes

FIRST, SECOND = "llama8b_fp8-20261122-075613-dbcb", "llama8b_fp8-20261122-085613-aaaa"


def made(root: Path, name: str) -> RunFolder:
    """A run that has ended, with a real log."""
    manifest: dict[str, Any] = {
        "run_id": name, "name": "llama8b_fp8", "created": f"2026-11-22T0{7 + (name == SECOND)}:56:13+00:00",
        "jobs": [{"id": "4194303:1"}], "backend": "local", "host": os.uname().nodename, "runtime": None,
        "arguments": {"train_iters": 50, "seq_length": 8192}, "layout": {"world": 1, "global_batch": 4},
    }  # fmt: skip
    run = create_run_folder(root, name, {}, manifest)
    (run.path / "logs").mkdir(exist_ok=True)
    (run.path / "logs" / "local-0.log").write_bytes(log_bytes(sitting("2026-11-20-verify") / "blockwise.log"))
    (run.path / "logs" / "local-0.exit").write_text("0\n")
    return run


def row(run: RunFolder, state: JobState, times: JobTimes | None = None) -> Row:
    manifest = run.manifest()
    return Row(run, manifest, state, progress_of(run, manifest, state), times or JobTimes(), Attempts(), state.reason)


def drawn(view: View, rows: list[Row], log: list[str], width: int = 80, height: int = 24) -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(view, rows, log, width, height))
    return capture.get().splitlines()


def test_keys_move_open_filter_and_leave() -> None:
    runs, view = ["a", "b", "c"], View()
    assert view.press("up", runs, 24).selected == "b"
    opened = view.press("down", runs, 24).press("enter", runs, 24)
    assert (opened.opened, opened.above) == ("c", 0)
    scrolled = opened.press("up", runs, 24).press("page-up", runs, 24)
    assert scrolled.above == 18
    assert scrolled.press("right", runs, 24).press("right", runs, 24).press("left", runs, 24).aside == 40
    assert scrolled.press("f", runs, 24).above == 0
    searching = scrolled.press("/", runs, 24).press("q", runs, 24).press("x", runs, 24).press("backspace", runs, 24)
    assert (searching.search, searching.done) == ("q", False)
    ranked = searching.press("enter", runs, 24).press("r", runs, 24).press("x", runs, 24).press("3", runs, 24)
    assert (ranked.rank, ranked.typing) == ("3", "r")
    assert ranked.press("escape", runs, 24).rank == ""
    assert ranked.press("enter", runs, 24).press("escape", runs, 24) == View(selected="c")
    assert view.press("q", runs, 24).done and opened.press("quit", runs, 24).done
    assert View().press("enter", [], 24) == View()


def test_actions_ask_first() -> None:
    runs = ["a", "b"]
    asking = View().press("C", runs, 24)
    assert (asking.asking, asking.selected, asking.order) == ("cancel", "b", "")
    assert asking.press("y", [*runs, "newer"], 24).order == "cancel"
    for key in ("n", "escape", "enter", "q"):
        declined = asking.press(key, runs, 24)
        assert (declined.order, declined.asking, declined.done) == ("", "", False)
    opened = View(opened="a").press("R", runs, 24)
    assert (opened.asking, opened.selected, opened.opened) == ("resume", "a", "a")
    assert View().press("C", [], 24).asking == ""
    assert View(message="cancelled").press("down", runs, 24).message == ""


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_list_fits_and_names_are_whole(tmp_path: Path, width: int) -> None:
    rows = [
        row(made(tmp_path, FIRST), JobState("running"), JobTimes("5:00", "30:00")),
        row(
            made(tmp_path, SECOND), JobState("pending", "PENDING: Priority"), JobTimes("", "30:00", "2026-11-23 10:00")
        ),
    ]
    screen = drawn(View(selected=SECOND), rows, [], width)
    assert max(map(len, screen)) <= width
    assert len(screen) <= 24
    text = "\n".join(screen)
    assert FIRST in text and SECOND in text
    assert "…" not in text
    assert "Priority, start about 2026-11-23 10:00" in " ".join(text.split())
    assert "PENDING" not in text
    other = "\n".join(drawn(View(selected=FIRST), rows, [], width))
    for words in ("5:00/30:00", "TFLOP/s", "memory", "▁"):
        assert words in other


def test_a_slow_run_has_a_speed_above_zero(tmp_path: Path) -> None:
    """A training on a CPU had 0 TFLOP/s."""
    one = row(made(tmp_path, FIRST), JobState("running"))
    slow = replace(one, progress=replace(one.progress, tflops_per_gpu=0.00391))
    assert "0.00391" in "\n".join(drawn(View(selected=FIRST), [slow], [], 200))


def test_many_runs_scroll_with_the_selection(tmp_path: Path) -> None:
    run = made(tmp_path, FIRST)
    rows = [Row(RunFolder(run.path.with_name(f"r{i:03}")), {"jobs": []}, JobState("running"),
                progress_of(run, {}, JobState("running")), JobTimes(), Attempts()) for i in range(100)]  # fmt: skip
    for selected in ("r000", "r050", "r099"):
        screen = drawn(View(selected=selected), rows, [])
        assert len(screen) <= 24 and any(line.startswith(selected) for line in screen)


def test_a_run_shows_its_log_and_what_is_searched(tmp_path: Path) -> None:
    one = row(made(tmp_path, FIRST), JobState("completed"))
    log = [f"{rank}: line {number} \x1b[31mred\x1b[0m" for number in range(100) for rank in (0, 1)]
    screen = drawn(View(opened=FIRST), [one], log)
    assert len(screen) == 24 and max(map(len, screen)) <= 80
    assert "line 99" in screen[-2] and FIRST in screen[0]
    assert "line 98" in "\n".join(drawn(View(opened=FIRST, above=2), [one], log)[-3:])
    assert [line[:2] for line in screen[2:4]] == ["lo", "st"] and all("▁" in line for line in screen[2:4])
    assert "the end" in "\n".join(drawn(View(opened=FIRST, aside=80), [one], ["x" * 90 + "the end"]))
    filtered = drawn(View(opened=FIRST, search="LINE 7", rank="1"), [one], log)
    shown = [line for line in filtered if "line" in line and ":" in line and "log" not in line]
    assert len(shown) == 11 and all(line.startswith("1: line 7") for line in shown)
    assert chosen_lines(["\x1b[2Jx"], "", "") and "\x1b" not in "\n".join(
        drawn(View(opened=FIRST), [one], ["\x1b[2Jx"])
    )


# Another user's name for a run: it would write to the clipboard, and turn the direction of writing.
HOSTILE = "evil\x1b]52;c;cm0gLXJm\x07\u202egnp"


@pytest.fixture
def screen(home: Path, request: pytest.FixtureRequest) -> Any:
    for name in getattr(request, "param", (FIRST, SECOND)):
        made(default_root(), name)
    main, side = pty.openpty()
    ioctl(main, TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    env = {**os.environ, "HOME": str(home), "TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8launch", "watch"], stdin=side, stdout=side, stderr=side, env=env
    )
    os.close(side)
    seen = bytearray()

    def until(words: str, key: str = "") -> None:
        """Press a key, and wait until these words have been drawn since."""
        begin = len(seen)
        os.write(main, key.encode())
        end = time.monotonic() + 120
        while words not in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", seen[begin:].decode(errors="replace")):
            assert time.monotonic() < end, f"not drawn: {words}\n{seen[begin:].decode(errors='replace')}"
            if select.select([main], [], [], 1)[0]:
                seen.extend(os.read(main, 1 << 16))

    yield until, process, seen
    process.kill()
    process.wait()
    os.close(main)


@pytest.mark.parametrize("screen", [(HOSTILE,)], indirect=True)
def test_the_name_of_a_run_is_no_command_to_the_terminal(screen: Any) -> None:
    until, process, seen = screen
    until("completed")
    until("following", "\r")
    until("", "q")
    assert process.wait(120) == 0
    assert b"evil" in seen
    assert b"\x1b]52" not in seen
    assert "\u202e" not in seen.decode()


def test_the_command_on_a_terminal(screen: Any) -> None:
    until, process, _ = screen
    until(SECOND)
    until("following", "\r")
    until("search: thro", "/thro")
    until("with 'thro'", "\r")
    until("enter open", "\x1b")
    until("enter open", "\x1b[A")
    until(FIRST + "  completed", "\r")
    until("", "q")
    assert process.wait(120) == 0


def test_actions_and_removed_runs_on_a_terminal(screen: Any) -> None:
    until, process, _ = screen
    until("R resume")
    until(f"cancel {SECOND}? y/n", "C")
    until("R resume", "n")
    until("resume", "R")
    until("writes no checkpoints", "y")
    shutil.rmtree(default_root() / SECOND)
    until("1 completed")
    until(FIRST + "  completed", "\r")
    shutil.rmtree(default_root() / FIRST)
    until("no runs yet")
    until("", "q")
    assert process.wait(120) == 0


@pytest.mark.train
@pytest.mark.parametrize("screen", [()], indirect=True)
def test_a_run_is_cancelled_and_resumed_by_key(screen: Any) -> None:
    until, process, _ = screen
    sets = ["checkpoint.dir=checkpoints", "checkpoint.interval=20", "train.iterations=2000"]
    words = [word for setting in sets for word in ("--set", setting)]
    assert run(["submit", "tiny_cpu", "--backend", "local", "--yes", *words]) == 0
    (folder,) = default_root().iterdir()
    try:
        wait_for(lambda: latest(folder / "checkpoints") >= 20, 120)
        until("running")
        until(f"cancel {folder.name}? y/n", "C")
        until(f"cancelled {folder.name}", "y")
        reached = latest(folder / "checkpoints")
        until(f"resume {folder.name}? y/n", "R")
        until(f"{folder.name} continues from iteration {reached}", "y")
        until("running")
        until("", "q")
        assert process.wait(120) == 0
        wait_for(lambda: latest(folder / "checkpoints") > reached, 120)
    finally:
        run(["cancel", folder.name])


def test_without_a_terminal_it_says_what_to_use(home: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "fp8launch", "watch"], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == 2
    assert "use `fp8launch runs`" in done.stderr


def test_sparklines() -> None:
    assert sparkline((3.0, 2.0, 1.0), 3) == "█▄▁" or sparkline((3.0, 2.0, 1.0), 3) == "█▅▁"
    assert len(sparkline(tuple(map(float, range(100))), 10)) == 10
    assert sparkline((float("nan"),), 5) == ""
    assert sparkline((2.0, 2.0), 2) == "▁▁"
