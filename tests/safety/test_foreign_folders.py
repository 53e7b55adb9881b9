"""Run folders that others made, or that lie: read with care, never acted upon, and they lead nowhere else."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8launch.runs.folder import RunFolder, create_run_folder
from fp8launch.runs.study import create_study

Say = Callable[..., tuple[int, str, str]]
BASE = {
    "name": "r", "backend": "local", "created": "2026-01-01T00:00:00+00:00", "jobs": [{"id": "1:1"}], "recipe": {},
    "megatron": {"argv": []}, "layout": {}, "host": None,
}  # fmt: skip
NOBODY = 65534


@pytest.fixture
def make(home: Path) -> Callable[..., RunFolder]:
    def create(name: str = "r-1", root: Path | None = None, **entries: Any) -> RunFolder:
        run = create_run_folder(root or home / "runs", name, {"job.sh": "#!/bin/bash\n"}, {**BASE, **entries})
        (run.path / "logs/local-0.log").write_text("hello\n")
        return run

    return create


def give_away(folder: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


# --- whose run it is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_a_run_of_another_user_is_not_acted_upon(say: Say, make: Callable[..., RunFolder], verb: str) -> None:
    run = make()
    give_away(run.path)
    before = (run.path / "manifest.json").read_text()
    for name in ("r-1", str(run.path)):
        code, _, err = say(verb, name)
        assert (code, "[not-yours]" in err) == (1, True)
    assert (run.path / "manifest.json").read_text() == before


def test_a_run_of_another_user_can_be_read(say: Say, make: Callable[..., RunFolder]) -> None:
    give_away(make().path)
    assert say("logs", "r-1")[:2] == (0, "hello\n")
    assert "r-1" in say("runs")[1]


def test_the_latest_run_is_one_s_own(say: Say, make: Callable[..., RunFolder]) -> None:
    """In a run root that a group shares, somebody else's must not be what `cancel latest` ends."""
    make("mine-1")
    give_away(make("theirs-1", created="2026-02-01T00:00:00+00:00").path)
    code, _, err = say("cancel", "latest")
    assert (code, "mine-1" in err, "theirs" in err) == (0, True, False)


def test_a_study_of_another_user_is_not_ended(say: Say, home: Path, make: Callable[..., RunFolder]) -> None:
    study = create_study(home / "runs", "s", {"points": [{"run": "r-1"}]})
    make("r-1", study.path)
    give_away(study.path)
    code, _, err = say("cancel", "s")
    assert (code, "[not-yours]" in err) == (1, True)


# --- what stands in it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["--user=root", "-u", "1 2", "1;2", "$(id)", "", "1_", "_1", "12\n13", None, {"a": 1}])
@pytest.mark.parametrize("verb", ["cancel", "resume", "runs"])
def test_a_job_is_a_number_and_never_an_option_of_scancel(
    say: Say, make: Callable[..., RunFolder], job: object, verb: str
) -> None:
    run = make()
    (run.path / "manifest.json").write_text(json.dumps({**BASE, "backend": "sbatch", "jobs": [{"id": job}]}))
    code, _, err = say(verb, str(run.path))
    assert (code, "[bad-manifest]" in err) == (2, True)


@pytest.mark.parametrize(
    "record",
    [
        {"waiting": "--user=root"},
        {"attempts": [{"job": "-u root"}]},
        {"excluded": ["--nodes=1"]},
        {"attempts": 7},
        {"attempts": [7]},
        [],
    ],
)
def test_a_record_that_no_keeper_wrote_counts_for_nothing(
    say: Say, make: Callable[..., RunFolder], record: Any
) -> None:
    run = make()
    (run.path / "attempts.json").write_text(json.dumps(record))
    code, out, _ = say("runs", "r-1", "--json")
    survival = json.loads(out)[0]["survival"]
    assert (code, survival["jobs"], survival["waiting"], survival["excluded"]) == (0, [], None, [])


@pytest.mark.parametrize("name", ["../../elsewhere", "..", "/etc", "a/b", "", 7, None, ".hidden", "a\0b"])
def test_a_study_leads_nowhere_else(say: Say, home: Path, make: Callable[..., RunFolder], name: object) -> None:
    make("elsewhere", home)
    study = create_study(home / "runs", "s", {"points": []})
    (study.path / "study.json").write_text(json.dumps({"points": [{"run": name}]}))
    for verb in ("runs", "cancel"):
        code, _, err = say(verb, "s")
        assert (code, "[bad-study]" in err) == (2, True)


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "a/b", "..", "-x", "a b", "$(id)", "a\nb", ""])
def test_a_study_is_named_like_a_folder(say: Say, home: Path, name: str) -> None:
    here = ("--backend", "local", "--wait", "--set", "launch.python=/bin/true")
    code, _, err = say("submit", "tiny_cpu", *here, "--study", name, "--over", "megatron.seed=1,2", "--yes")
    if name:
        assert (code, "[bad-study-name]" in err) == (2, True)
    made = list(home.rglob("study.json"))
    assert all(path.parent.parent == home / "runs" for path in made)


def test_links_in_a_run_folder_are_not_followed(say: Say, make: Callable[..., RunFolder], tmp_path: Path) -> None:
    run = make()
    (tmp_path / "secret").write_text("what others may not see\n")
    (run.path / "logs/local-1.log").symlink_to(tmp_path / "secret")
    (run.path / "logs/slurm-9.out").symlink_to(tmp_path / "secret")
    assert say("logs", "r-1")[:2] == (0, "hello\n")
    assert "others" not in say("logs", "r-1", "--batch")[1]


def test_writing_replaces_links_and_does_not_follow_them(
    say: Say, make: Callable[..., RunFolder], tmp_path: Path
) -> None:
    run = make()
    (tmp_path / "precious.json").write_text(json.dumps(BASE))
    (run.path / "manifest.json").unlink()
    (run.path / "manifest.json").symlink_to(tmp_path / "precious.json")
    run.update(name="new")
    assert json.loads((tmp_path / "precious.json").read_text()) == BASE


@pytest.mark.parametrize("name", ["manifest.json", "attempts.json", "logs/local-0.log", "logs/slurm-1.out"])
def test_a_pipe_in_the_place_of_a_file_holds_nobody_up(say: Say, make: Callable[..., RunFolder], name: str) -> None:
    run = make()
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    ended = threading.Event()

    def late() -> None:
        if not ended.wait(20):
            os._exit(9)

    threading.Thread(target=late, daemon=True).start()
    for verb in ("runs", "logs", "parse", "verify"):
        assert say(verb, "r-1")[0] in (0, 1, 2)
    ended.set()


@pytest.mark.parametrize(
    "content", [b"[" * 200_000, b'{"a":' * 50_000, b"\xff", b"9" * 10_000, b'{"created": 7}', b"{}"]
)
def test_a_manifest_that_nobody_wrote(say: Say, make: Callable[..., RunFolder], content: bytes) -> None:
    make("good-1")
    bad = make("bad-1")
    (bad.path / "manifest.json").write_bytes(content)
    code, out, err = say("runs")
    assert (code, "good-1" in out) == (0, True)
    assert "bad-manifest" in err or content.startswith(b"{")


# --- half written -----------------------------------------------------------------------------------------------------


def test_what_is_half_made_or_damaged_is_told(say: Say, home: Path, make: Callable[..., RunFolder]) -> None:
    make("good-1")
    (home / "runs/.making-x-1.0123abcd").mkdir()
    (make("torn-1").path / "manifest.json").write_text('{"name"')
    code, out, err = say("runs")
    assert (code, "good-1" in out, "half-made" in err, "torn-1" in err) == (0, True, True, True)
    make("x-1")
    assert not (home / "runs/.making-x-1.0123abcd").exists()


def test_points_that_have_no_run_yet_are_told(say: Say, home: Path, make: Callable[..., RunFolder]) -> None:
    study = create_study(home / "runs", "s", {"points": [{"run": "r-1"}, {"run": "r-2"}]})
    make("r-1", study.path)
    code, out, err = say("runs", "s")
    assert (code, "r-1" in out, "1 of 2 points have no run yet" in err) == (0, True, True)


def test_a_study_of_the_same_name_keeps_all_its_points(say: Say, home: Path) -> None:
    here = ("--backend", "local", "--wait", "--yes", "--study", "s", "--set", "launch.python=/bin/true")
    for seeds in ("1,2", "2,3"):
        assert say("submit", "tiny_cpu", "--over", f"megatron.seed={seeds}", *here)[0] == 0
    runs = json.loads(say("runs", "s", "--json")[1])
    assert sorted(run["study"]["point"]["megatron.seed"] for run in runs) == [1, 2, 3]
    assert all(len(run["jobs"]) == 1 for run in runs)


# --- what a terminal obeys --------------------------------------------------------------------------------------------

TITLE, CLEAR, C1 = "\x1b]0;owned\x07", "\x1b[2J", "\x9b2J"


def test_tables_and_messages_hold_no_commands_for_a_terminal(say: Say, make: Callable[..., RunFolder]) -> None:
    make(name="r-1", gpu=f"h100{TITLE}", created=f"{CLEAR}x", backend="local")
    make("r-2", submission={"key": "k", "answered": True, "refused": TITLE + C1}, jobs=[])
    for verb in (("runs",), ("runs", "r-2"), ("cancel", f"x{CLEAR}"), ("parse", f"x{TITLE}")):
        _, out, err = say(*verb)
        assert not [text for text in (out, err) for bad in ("\x1b]", "\x1b[2J", "\x9b", "\x07") if bad in text]


def test_a_log_keeps_its_colours_on_a_terminal_and_nothing_else(
    home: Path, make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    log = make().path / "logs/local-0.log"
    log.write_bytes(b"\x1b[31mred\x1b[0m \x1b]0;owned\x07 \x1b[2J \xc2\x9b2J \xe2\x82\xac\n")
    for more in ((), ("-n", "5")):
        shown = on_a_terminal("logs", "r-1", *more)
        assert b"\x1b[31mred\x1b[0m" in shown and "€".encode() in shown
        assert not [bad for bad in (b"\x1b]", b"\x1b[2J", b"\x07", b"\xc2\x9b") if bad in shown]


def on_a_terminal(*arguments: str) -> bytes:
    """What a command writes to a terminal."""
    terminal, inner = pty.openpty()
    child = subprocess.Popen([sys.executable, "-m", "fp8launch", *arguments], stdout=inner, stdin=inner)
    os.close(inner)
    shown = b""
    try:
        while block := os.read(terminal, 65536):
            shown += block
    except OSError:
        pass  # the terminal is gone with its last user
    assert child.wait() == 0
    os.close(terminal)
    return shown


@pytest.mark.parametrize(
    "record",
    [
        {"left_out": None},
        {"left_out": [{}]},
        {"left_out": [7]},
        {"points": None},
        {"points": [{"run": "r-1", "repeat": "x"}]},
    ],
)
def test_a_study_that_nobody_wrote(say: Say, home: Path, record: dict[str, Any]) -> None:
    study = create_study(home / "runs", "s", {"points": []})
    (study.path / "study.json").write_text(json.dumps({"points": [], **record}))
    for verb in ("runs", "compare"):
        code, _, err = say(verb, "s")
        assert (code, "[bad-study]" in err) == (2, True)


@pytest.mark.parametrize(
    "entry",
    [
        {"study": {"repeat": "x"}},
        {"layout": {"world": "x"}},
        {"megatron": {"argv": 7}},
        {"name": []},
        {"phases": 1.0},
        {"phases": [1.0]},
        {"phases": [{"name": "body", "begin": 0, "end": "x"}]},
    ],
)
def test_a_manifest_whose_parts_nobody_wrote(say: Say, make: Callable[..., RunFolder], entry: dict[str, Any]) -> None:
    run = make()
    (run.path / "manifest.json").write_text(json.dumps({**run.manifest(), **entry}))
    for verb in ("compare", "parse", "cancel"):
        code, _, err = say(verb, str(run.path))
        assert (code, "[bad-manifest]" in err) == (2, True)


@pytest.mark.parametrize(
    "entry",
    [
        {"environment": {"N": [1]}},
        {"git": {"commit": {}}},
        {"recipe": {"resources": {"nodes": [2]}}},
    ],
)
def test_a_manifest_with_other_kinds_of_values(say: Say, make: Callable[..., RunFolder], entry: dict[str, Any]) -> None:
    run = make()
    (run.path / "manifest.json").write_text(json.dumps({**run.manifest(), **entry}))
    for verb in ("compare", "parse"):
        code, _, err = say(verb, str(run.path))
        assert code in (0, 1, 2) and "a bug in fp8launch" not in err
