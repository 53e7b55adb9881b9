"""Run folders that others made, or that lie: read with care, never acted upon, and they lead nowhere else."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cli import output
from fp8launch.cli.terminal_text import TerminalText
from fp8launch.injob.supervisor.run_records import start_of
from fp8launch.resources import in_job_folder
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.rundir.study import create_study
from fp8launch.schedulers.slurm.slurm_jobs import JobRow, is_job_of

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


@pytest.mark.parametrize(
    "spoil",
    [
        lambda run: (run / "code/fp8launch/injob/rank/worker.py").chmod(0o666),
        lambda run: (run / "code").chmod(0o777),
        lambda run: (run / "job.sh").chmod(0o666),
        lambda run: (run / "code/fp8launch/injob/rank/__pycache__").chmod(0o777),
        lambda run: (run / "code/fp8launch/injob/rank/__pycache__/worker.cpython-311.pyc").symlink_to("/tmp/x"),
        lambda run: run.chmod(0o777),
        lambda run: os.chown(run / "job.sh", NOBODY, NOBODY),
        lambda run: os.chown(run / "code/fp8launch/injob/rank/worker.py", NOBODY, NOBODY),
        lambda run: ((run / "code").rename(run / "elsewhere"), (run / "code").symlink_to(run / "elsewhere")),
        lambda run: ((run / "survive.json").symlink_to("/tmp/x"),),
    ],
)
@pytest.mark.parametrize("verb", ["cancel", "resume"])
def test_a_run_that_others_may_change_is_not_acted_upon(
    say: Say, make: Callable[..., RunFolder], verb: str, spoil: Callable[[Path], object]
) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    run = make()
    assert say("cancel", "r-1")[0] == 0
    spoil(run.path)
    code, _, err = say(verb, "r-1")
    assert (code, "[not-yours]" in err) == (1, True)


HERE = ("--backend", "local", "--wait", "--yes", "--set", "launch.python=/bin/true")


def test_a_planted_study_is_not_submitted_again(say: Say, home: Path) -> None:
    """Study ids can be computed by anybody; another user makes one whose runs have failed, with a script of his own."""
    submit = ("submit", "tiny_cpu", "--over", "megatron.seed=1,2", "--study", "s", *HERE)
    assert say(*submit)[0] == 0
    study = home / "runs/s"
    for run in study.glob("tiny*"):
        (run / "job.sh").write_text(f"#!/bin/bash\ntouch {home}/canary\n")
        next(run.glob("logs/*.exit")).write_text("1\n")
    for path in (study, *study.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    give_away(study)
    for more in ((), ("--retry-failed",)):
        code, _, err = say(*submit, *more)
        assert (code, "[not-yours]" in err, "belongs to" in err) == (3, True, True)
    assert not (home / "canary").exists()


def test_one_planted_run_of_a_study_is_not_submitted_again(say: Say, home: Path) -> None:
    submit = ("submit", "tiny_cpu", "--over", "megatron.seed=1,2", "--study", "s", *HERE)
    assert say(*submit)[0] == 0
    give_away(next((home / "runs/s").glob("tiny*")))
    code, _, err = say(*submit, "--retry-failed")
    assert (code, "[not-yours]" in err) == (1, True)


@pytest.mark.parametrize("inside", [(), ("arrays", "logs")])
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_a_study_s_folder_that_another_user_made_before_is_refused(
    say: Say, home: Path, inside: tuple[str, ...], mode: int
) -> None:
    """Its owner could replace the list of an array's tasks while the array waits."""
    study = home / "runs/s"
    for folder in (study, *(study / name for name in inside)):
        folder.mkdir(parents=True)
        folder.chmod(mode)
    give_away(study)
    code, _, err = say("submit", "tiny_cpu", "--over", "megatron.seed=1,2", "--study", "s", *HERE)
    assert (code, "[not-yours]" in err) == (3, True)
    assert not list(study.rglob("study.json")) + list(study.rglob("job.sh"))


def test_a_study_s_folder_is_no_link(say: Say, home: Path) -> None:
    (home / "elsewhere").mkdir()
    (home / "runs").mkdir()
    (home / "runs/s").symlink_to(home / "elsewhere")
    assert "[not-yours]" in say("submit", "tiny_cpu", "--over", "megatron.seed=1,2", "--study", "s", *HERE)[2]


@pytest.mark.parametrize("grid", [(), ("--over", "megatron.seed=1,2", "--study", "s")])
@pytest.mark.parametrize(
    ("mode", "owner", "group", "refused"),
    [
        (0o755, 0, 0, False),
        (0o777, 0, 0, True),
        (0o1777, 0, 0, False),
        (0o775, 0, NOBODY, True),
        (0o3775, 0, NOBODY, False),
        (0o755, 4321, 0, True),
    ],
)
@pytest.mark.parametrize("above", [False, True])
def test_a_run_root_in_which_others_may_replace_code_is_refused(
    say: Say, home: Path, mode: int, owner: int, group: int, refused: bool, above: bool, grid: tuple[str, ...]
) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    shared = home / "project"
    shared.mkdir()
    shared.chmod(mode)
    os.chown(shared, owner, group)
    shared.chmod(mode)
    root = shared / "me" if above else shared
    if above:
        root.mkdir(mode=0o755)
    code, _, err = say("submit", "tiny_cpu", *grid, *HERE, "--run-root", str(root))
    assert (code, "[run-root-shared]" in err) == ((3, True) if refused else (0, False))
    made = list(root.glob("**/manifest.json"))
    assert bool(made) is not refused


@pytest.mark.parametrize(("mode", "code"), [(0o775, 0), (0o777, 3)])
def test_a_group_may_be_trusted_with_the_run_root_and_everybody_may_not(
    say: Say, home: Path, write: Callable[[str, str], str], mode: int, code: int
) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    shared = home / "project"
    shared.mkdir()
    os.chown(shared, 0, NOBODY)
    shared.chmod(mode)
    profile = write("c.yaml", "trust_run_root: true\n")
    assert say("submit", "tiny_cpu", *HERE, "--run-root", str(shared), "--cluster", profile)[0] == code


def test_the_code_of_a_run_is_nobody_else_s_to_write(say: Say, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkout that a group may write to is copied, its modes are not."""
    source = home / "injob"
    shutil.copytree(in_job_folder(), source)
    for path in (source, *source.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    monkeypatch.setattr("fp8launch.rundir.run_dir.in_job_folder", lambda: source)
    old = os.umask(0)
    try:
        assert say("submit", "tiny_cpu", *HERE)[0] == 0
    finally:
        os.umask(old)
    run = next((home / "runs").glob("tiny*"))
    ours = [path for path in run.rglob("*") if "logs" not in path.relative_to(run).parts[:1]]
    assert not [path for path in ours if path.stat().st_mode & 0o022]


# --- what stands in it ------------------------------------------------------------------------------------------------


NO_JOB_IDS = ["--user=root", "-u", "1 2", "1;2", "$(id)", "", "../1", "_1", ".1", "12\n13", "1" * 200, None, {"a": 1}]


@pytest.mark.parametrize("job", NO_JOB_IDS)
@pytest.mark.parametrize("verb", ["cancel", "resume", "runs"])
def test_a_job_id_is_neither_an_option_nor_a_path(
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
        {"waiting": 1},
        {"attempts": [{"job": "-u root"}]},
        {"excluded": ["--nodes=1"]},
        {"attempts": 7},
        {"attempts": [7]},
        [],
    ],
)
def test_an_attempt_log_that_no_supervisor_wrote_counts_for_nothing(
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
    code, _, err = say("submit", "tiny_cpu", *here, "--study", name, "--sweep", "megatron.seed=1,2", "--yes")
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


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails what waits for ever: a signal interrupts a read of a pipe that nobody writes."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"waited for {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "name", ["manifest.json", "attempts.json", "logs/local-0.log", "logs/local-0.exit", "logs/slurm-1.out"]
)
@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_pipe_or_device_in_the_place_of_a_file_holds_nobody_up(
    say: Say, make: Callable[..., RunFolder], name: str, kind: str
) -> None:
    run = make()
    (run.path / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(run.path / name)
    else:
        (run.path / name).symlink_to("/dev/zero")
    with within(30):
        for verb in ("runs", "logs", "parse", "verify"):
            assert say(verb, "r-1")[0] in (0, 1, 2)


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


def test_incomplete_or_damaged_folders_are_reported(say: Say, home: Path, make: Callable[..., RunFolder]) -> None:
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
        assert say("submit", "tiny_cpu", "--sweep", f"megatron.seed={seeds}", *here)[0] == 0
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


def test_a_control_character_split_over_two_blocks() -> None:
    """C1 codes in UTF-8, and escape sequences, of which one block holds the beginning and the next the end."""
    for raw in (b"a\xc2\x9b2Jb", b"a\x1b]0;x\x07b", b"a\x1b[2Jb", b"a\x9bb\xe2\x82\xac"):
        for cut in range(len(raw) + 1):
            text = TerminalText()
            shown = text.feed(raw[:cut]) + text.feed(raw[cut:]) + text.feed(b"", final=True)
            assert shown.isprintable(), (raw, cut, shown)
    text = TerminalText()
    assert text.feed(b"\x1b[3") + text.feed(b"1mred") == "\x1b[31mred"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("\x1b[8mx", "x"), ("\x1b[31;8mx", "\x1b[31mx"), ("\x1b[1;008;4mx", "\x1b[1;4mx"), ("\x1b[5mx\x1b[06my", "xy"),
        ("\x1b[38;5;8mx", "\x1b[38;5;8mx"), ("\x1b[48;2;8;8;8;8mx", "\x1b[48;2;8;8;8mx"), ("\x1b[mx", "\x1b[mx"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
    ],
)  # fmt: skip
def test_nothing_in_a_log_is_concealed(raw: str, shown: str) -> None:
    """The attribute 8 hides text on many terminals; overrides of the direction turn it around."""
    assert TerminalText().feed(raw.encode()) == shown
    for cut in range(len(raw)):
        text = TerminalText()
        assert text.feed(raw[:cut].encode()) + text.feed(raw[cut:].encode()) == shown


def test_no_colour_outlasts_a_log() -> None:
    assert TerminalText().feed(b"\x1b[31mred", final=True) == "\x1b[31mred\x1b[0m"
    assert TerminalText().feed(b"plain", final=True) == "plain"


HOSTILE = "p\x1b]0;owned\x07\x1b[2J\x9b2J[link=http://e]x[/b]"


def test_phase_names_hold_no_commands(
    make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    """verify and parse printed the names of a manifest's phases; rich took them for markup, a MarkupError."""
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    phases = [{"name": HOSTILE, "begin": 0, "end": 4, "argv": []}, {"name": "b", "begin": 4, "end": 8, "argv": []}]
    run = make(phases=phases)
    line = " iteration {}/8 | elapsed time per iteration (ms): 9.0 | global batch size: 8 |"
    for attempt, numbers in enumerate((range(1, 5), range(5, 9))):
        log = run.path / f"logs/local-{attempt}.log"
        log.write_text("\n".join([*(line.format(i) for i in numbers), "[exiting program at iteration 4] x", ""]))
    for verb in ("parse", "verify", "compare"):
        shown = on_a_terminal(verb, "r-1", status=None)
        assert b"link=http" in shown
        assert not [bad for bad in (b"\x1b]", b"\x1b[2J", b"\x07", b"\xc2\x9b") if bad in shown]


def test_recipes_hold_no_commands_for_a_terminal(tmp_path: Path) -> None:
    """`render`, `--dry-run` and `recipes` show what somebody else may have written."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text('extends: tiny_cpu\ndescription: "a\\e]0;owned\\a\\e[2J"\nenv: {X: "a\\e]0;owned\\a\\x9b2J"}\n')
    verbs = [["render", str(recipe), "--as", form] for form in ("args", "sbatch", "yaml", "json")]
    for verb in (*verbs, ["submit", str(recipe), "--dry-run"], ["recipes", str(recipe)]):
        shown = on_a_terminal(*verb, status=None)
        assert shown
        assert not [bad for bad in (b"\x1b]", b"\x1b[2J", b"\x07", b"\xc2\x9b") if bad in shown], verb


def test_one_place_makes_text_safe_for_a_terminal() -> None:
    """All other code of the command line prints by the functions of `output`, also what rich draws."""
    for file in Path(output.__file__).parent.glob("*.py"):
        if file.name != "output.py":
            direct = re.search(r"\bclick\.(echo|secho)\(|\bprint\(\s*[f\"\']|\bConsole\(|\.show\(\)", file.read_text())
            assert not direct, (file, direct)


HOSTILE_NAME = "evil\x1b]52;c;cm0gLXJm\x07\u202egnp\u200f"


@pytest.mark.parametrize(
    "words",
    [
        ("runs",),
        ("runs", HOSTILE_NAME),
        ("parse", HOSTILE_NAME),
        ("compare", HOSTILE_NAME, HOSTILE_NAME),
        ("verify", HOSTILE_NAME),
        ("logs", HOSTILE_NAME, "--path"),
        pytest.param(("archive", HOSTILE_NAME), marks=pytest.mark.needs_plugin("archive")),
        ("cancel", HOSTILE_NAME),
        ("check", HOSTILE_NAME),
        ("check", HOSTILE_NAME, "--no-such-option"),
        ("recipes", "tiny_cpu", HOSTILE_NAME),
    ],
)
def test_the_name_of_a_run_holds_no_command_for_a_terminal(
    home: Path, tmp_path: Path, make: Callable[..., RunFolder], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """Without a path, as from a pattern of the shell, and in every table."""
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(home / "runs"))
    monkeypatch.chdir(tmp_path)
    run = make(HOSTILE_NAME)
    line = "iteration {}/ 4 | elapsed time per iteration (ms): 10.0 | lm loss: 1.0 |"
    (run.path / "logs/local-0.log").write_text("".join(f"{line.format(i)}\n" for i in range(1, 5)))
    shown = on_a_terminal(*words, status=None)
    assert shown
    assert not [bad for bad in (b"\x1b]", b"\x07", "\u202e".encode(), "\u200f".encode()) if bad in shown], shown


def on_a_terminal(*arguments: str, status: int | None = 0) -> bytes:
    """What a command writes to a terminal."""
    terminal, inner = pty.openpty()
    child = subprocess.Popen([sys.executable, "-m", "fp8launch", *arguments], stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    shown = b""
    try:
        while block := os.read(terminal, 65536):
            shown += block
    except OSError:
        pass  # the terminal is gone with its last user
    ended = child.wait()
    assert status is None or ended == status
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


# --- jobs that a manifest lists, and that are not the run's -----------------------------------------------------------


def test_cancel_ends_no_process_that_only_a_manifest_lists(say: Say, make: Callable[..., RunFolder]) -> None:
    """An archive that was unpacked is one's own folder, and its manifest is somebody else's."""
    process = subprocess.Popen(["sleep", "60"])
    try:
        make(jobs=[{"id": f"{process.pid}:{start_of(process.pid)}"}])
        say("cancel", "r-1")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("comment", "command", "ours"),
    [
        ("fp8launch:r-1.s0-0a1b2c", "/elsewhere/job.sbatch", True),
        ("fp8launch:other-1.s0-0a1b2c", "/elsewhere/job.sbatch", False),
        ("fp8launch:precious.0-0a1b2c", "/elsewhere/job.sbatch", False),
        ("", "{run}/job.sbatch", True),
        ("", "{run}/submitit/submission.sh", True),
        ("", "/home/me/precious.sbatch", False),
        ("(null)", "{run}/../precious.sbatch", False),
        ("", "", True),  # a Slurm that does not show it
    ],
)
def test_a_job_is_a_run_s_by_what_slurm_says_and_not_by_its_manifest(
    make: Callable[..., RunFolder], comment: str, command: str, ours: bool
) -> None:
    run = make(backend="sbatch", study={"name": "precious", "point": {}, "repeat": 1}, slurm={"job-name": "r"})
    row = JobRow("12", "RUNNING", "", "r", comment, command=command.format(run=run.path))
    assert is_job_of(row, run) is ours
