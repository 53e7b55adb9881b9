"""A half-built dataset, and the profile of its jobs: what is followed there must be this user's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Say = Callable[..., tuple[int, str, str]]
NOBODY = 65534


def give(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, NOBODY, NOBODY)


@pytest.fixture
def build(say: Say, home: Path) -> Callable[..., tuple[int, str, str]]:
    (home / "a.jsonl").write_text('{"text": "a b c"}\n')
    words = ("data", "build", str(home / "a.jsonl"), "--tokenizer", "bytes", "--out", str(home / "out"))
    return lambda *more: say(*words, *more)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: folder.chmod(0o777),
        lambda folder: give(folder),
        lambda folder: ((folder / "plan.json").write_text("{}"), give(folder / "plan.json")),
        lambda folder: ((folder / "array.sbatch").write_text(""), (folder / "array.sbatch").chmod(0o666)),
        lambda folder: (folder.rename(folder.with_name("x")), folder.symlink_to(folder.with_name("x"))),
    ],
)
def test_a_build_does_not_go_on_in_a_folder_of_others(
    build: Callable[..., tuple[int, str, str]], say: Say, home: Path, spoil: Callable[[Path], object]
) -> None:
    """Its name follows from the prefix; shards, scripts and a plan lie there."""
    folder = home / "out.build"
    folder.mkdir(mode=0o755)
    spoil(folder)
    code, _, err = build()
    assert (code, "[not-yours]" in err) == (3, True)
    assert not (home / "out.bin").exists()
    assert say("data", "build-part", str(folder))[0] in (1, 3)


def test_a_task_follows_no_plan_of_others(say: Say, home: Path, build: Callable[..., tuple[int, str, str]]) -> None:
    """A plan names the file that is written: a task of mine must not write where somebody else says."""
    (home / "b.jsonl").write_text('{"text": "a"}\nbroken\n')
    failed = say("data", "build", str(home / "b.jsonl"), "--tokenizer", "bytes", "--out", str(home / "b"))
    assert failed[0] == 1
    plan = home / "b.build/plan.json"
    content = json.loads(plan.read_text())
    plan.write_text(json.dumps({**content, "prefix": str(home / "elsewhere")}))
    (home / "b.build").chmod(0o777)
    code, _, err = say("data", "build-part", str(home / "b.build"), "--on-error", "skip")
    assert (code, "[not-yours]" in err) == (3, True)
    assert not list(home.glob("elsewhere*"))


@pytest.mark.parametrize("env", ["OPTIND: 'BASH_VERSINFO[$(touch canary)]'", "BASH_ENV: /tmp/x", "HF_TOKEN: c4n4ry"])
def test_the_profile_of_a_build_sets_no_reserved_variable(
    build: Callable[..., tuple[int, str, str]], home: Path, env: str
) -> None:
    profile = home / "site.yaml"
    profile.write_text(f"env: {{{env}}}\n")
    code, _, err = build("--cluster", str(profile))
    assert (code, "[reserved-variable]" in err or "[secret-in-env]" in err) == (2, True)
    assert not (home / "out.build").exists()


def test_the_jobs_of_a_build_import_nothing_from_the_folder_where_it_was_typed(tmp_path: Path) -> None:
    from fp8launch.cluster.profile import Cluster
    from fp8launch.plugins.data.slurm_build import _program
    from fp8launch.plugins.data.slurm_program import program_script

    class Plan:
        prefix = str(tmp_path / "out")
        folder = tmp_path / "out.build"

    Plan.folder.mkdir()
    (tmp_path / "json.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    command = f"{sys.executable} -m fp8launch --version"
    script = tmp_path / "s.sh"
    program = _program(Plan, Cluster(), "shards", "array", command, "1")  # type: ignore[arg-type]
    script.write_text(program_script(program))
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "canary").exists()
