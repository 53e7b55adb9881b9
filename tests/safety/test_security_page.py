"""Claims of docs/security.md that no other test makes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch import plugin_registry
from fp8launch.logs import open_log
from fp8launch.recipe import yaml_source

Say = Callable[..., tuple[int, str, str]]
PAGE = (Path(__file__).parents[2] / "docs/security.md").read_text()
ITERATIONS = "".join(
    f" iteration {i}/ 20 | elapsed time per iteration (ms): 100.0 | global batch size: 8 | lm loss: 1.0 |\n"
    for i in range(1, 13)
)
LOCAL = ("--backend", "local", "--wait", "--yes", "--set", "launch.python=/bin/true")


@pytest.mark.parametrize("verb", ["parse", "verify", "compare"])
def test_runs_of_others_are_read(say: Say, home: Path, verb: str) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    say("submit", "tiny_cpu", *LOCAL)
    run = next((home / "runs").glob("tiny*"))
    next(run.glob("logs/*.log")).write_text(ITERATIONS)
    for path in (run, *run.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    code, out, err = say(verb, run.name, *([] if verb == "verify" else ["--json"]))
    assert code in (0, 1)  # 1: a bf16 run is no FP8 run
    assert "not-yours" not in err
    assert out


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o022])
def test_runs_are_readable_for_others_and_the_diff_is_not(say: Say, home: Path, tmp_path: Path, umask: int) -> None:
    checkout = tmp_path / "co"
    checkout.mkdir()
    recipe = checkout / "r.yaml"
    recipe.write_text("extends: tiny_cpu\nname: r\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        subprocess.run([*git, *words], cwd=checkout, check=True)
    recipe.write_text("extends: tiny_cpu\nname: r\ndescription: changed\n")
    before = os.umask(umask)
    try:
        assert say("submit", str(recipe), *LOCAL)[0] == 0
    finally:
        os.umask(before)
    run = next((home / "runs").glob("r-*"))
    assert (run / "git.diff").stat().st_mode & 0o777 == 0o600
    for path in (run, *run.rglob("*")):
        mode = path.stat().st_mode
        assert not mode & 0o022, path
        if path.name != "git.diff":
            assert mode & 0o004, path


def test_the_stated_sizes_are_those_of_the_code() -> None:
    log, script = re.findall(r"(\d+) (?:GiB|MiB)", PAGE)[:2]
    assert int(log) << 30 == open_log.MAX_UNPACKED
    assert int(script) << 20 == yaml_source.MAX_BYTES


# What every program here imports early, or by a name that a folder of data may well have.
MODULES = (
    "json", "yaml", "click", "rich", "numpy", "torch", "packaging", "pydantic", "psutil", "submitit",
    "zipfile", "tempfile", "secrets", "statistics", "tokenizers", "pip", "fp8launch", "megatron", "sitecustomize",
)  # fmt: skip


@pytest.mark.parametrize(
    "words",
    [
        ("check", "tiny_cpu"),
        ("check", "llama8b_fp8", "--json"),
        ("submit", "r.yaml", "--backend", "local", "--wait", "--yes", "--set", "launch.python=/bin/true"),
        pytest.param(
            ("data", "build", "a.jsonl", "--tokenizer", "bytes", "--out", "out", "--workers", "2"),
            marks=pytest.mark.needs_plugin("data"),
        ),
        pytest.param(("doctor",), marks=pytest.mark.needs_plugin("doctor")),
    ],
    ids=" ".join,
)
def test_nothing_is_imported_from_the_working_folder(tmp_path: Path, home: Path, words: tuple[str, ...]) -> None:
    work = tmp_path / "work"
    work.mkdir()
    canary = tmp_path / "canary"
    (work / "r.yaml").write_text("extends: tiny_cpu\nname: r\n")
    (work / "a.jsonl").write_text("".join(json.dumps({"text": "a b c"}) + "\n" for _ in range(2000)))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"]):
        subprocess.run([*git, *command], cwd=work, check=True)
    for name in MODULES:
        (work / f"{name}.py").write_text(f"open({str(canary)!r}, 'a').write({name!r} + ' ')\n")
    environment = {**os.environ, "FP8LAUNCH_RUNS": str(home / "runs"), "SLURM_CONF": "/nonexistent/slurm.conf"}
    # As the installed command starts, whose Python does not look into the working folder; those that it starts might.
    start = "import sys; sys.path[:] = filter(None, sys.path); from fp8launch.__main__ import main; main()"
    launchers = str(Path(__file__).parents[2] / "launchers")
    done = subprocess.run(
        [sys.executable, "-c", start, *words],
        cwd=work,
        env={**environment, "PYTHONPATH": launchers},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1, 3), done.stderr
    assert "a bug in" not in done.stderr
    assert not canary.exists(), canary.read_text()


WATCHED = """
import sys
def see(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise SystemExit(f"the network: {event} {arguments[1:]}")
sys.addaudithook(see)
from fp8launch.cli import run
for words in %r:
    print(words, run(words), flush=True)
"""


def test_no_other_command_opens_a_connection(home: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(ITERATIONS)
    (tmp_path / "a.jsonl").write_text('{"text": "a b c"}\n')
    prefix = str(tmp_path / "out")
    html = ["--html", str(tmp_path / "o.html")] if "html" in plugin_registry.offered("comparison_files") else []
    commands = [
        ["check", "tiny_cpu"], ["render", "llama8b_fp8"], ["estimate", "llama8b_fp8"], ["recipes"], ["images"],
        ["clusters"], ["submit", "tiny_cpu", *LOCAL], ["runs"], ["logs", "latest"], ["parse", str(log)],
        ["compare", str(log), str(log), *html, "--force"], ["verify", str(log)],
        ["doctor"], ["diff", "tiny_cpu", "llama8b_fp8"], ["cancel", "latest"],
        ["data", "build", str(tmp_path / "a.jsonl"), "--tokenizer", "bytes", "--out", prefix],
        ["data", "inspect", prefix],
    ]  # fmt: skip
    commands = [words for words in commands if words[0] not in plugin_registry.absent("commands")]
    environment = {
        **os.environ,
        "FP8LAUNCH_RUNS": str(home / "runs"),
        "FP8LAUNCH_OFFLINE": "1",
        "SLURM_CONF": "/nonexistent/slurm.conf",
    }
    done = subprocess.run(
        [sys.executable, "-c", WATCHED % commands], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = re.findall(r"^\[.*\] (\d)$", done.stdout, re.M)
    assert len(statuses) == len(commands)
    assert not {"2", "3"} & {*statuses}, done.stdout + done.stderr
    assert "the network" not in done.stderr
