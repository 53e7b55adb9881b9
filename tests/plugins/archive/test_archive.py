"""`archive` and `diff` of runs."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cli import run
from fp8launch.rundir.registry import default_root
from fp8launch.rundir.run_dir import RunFolder, create_run_folder

RUN, OTHER = "tiny_cpu-20261122-075613-dbcb", "tiny_cpu-20261122-085613-aaaa"
RECIPE = "extends: [tiny_cpu]\nname: tiny_cpu\ntrain: {{lr: {lr}}}\n"


def made(name: str, lr: str = "1.0e-2", **entries: Any) -> RunFolder:
    manifest = {"run_id": name, "name": "tiny_cpu", "created": "2026-11-22T07:56:13+00:00", "jobs": [], **entries}
    files = {"recipe.yaml": RECIPE.format(lr=lr), "git.diff": "my secret plan\n"}
    found = create_run_folder(default_root(), name, files, manifest)
    (found.path / "logs").mkdir(exist_ok=True)
    return found


@pytest.fixture
def archived(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The texts of an archived run, by their names."""
    monkeypatch.setenv("MY_PASS", "hunter2hunter2")
    monkeypatch.setenv("USER", "jdoe")
    token = "hf_" + "Abcd1234" * 4
    found = made(RUN, secrets=["MY_PASS"], cluster="juniper")
    (found.path / "logs" / "7-0.log").write_text(
        f"data {home}/tokens and {home}2/x of jdoe, password hunter2hunter2, {token}\nover jdoes head\n"
    )
    (found.path / "logs" / "8-0.log").write_text("begin\n" + "x" * (3 << 20) + "\nend\n")
    (found.path / "logs" / "9-0.log").symlink_to("/etc/hostname")
    monkeypatch.chdir(tmp_path)
    assert run(["archive", RUN]) == 0
    file = tmp_path / f"{RUN}.tar.gz"
    assert file.stat().st_mode & 0o777 == 0o600
    with tarfile.open(file) as archive:
        texts = {}
        for name in archive.getnames():
            stream = archive.extractfile(name)
            assert stream is not None
            texts[name.partition("/")[2]] = stream.read().decode()
    return texts


def test_it_holds_what_a_report_needs_and_nothing_else(archived: dict[str, str]) -> None:
    assert set(archived) == {"manifest.json", "recipe.yaml", "logs/7-0.log", "logs/8-0.log"}
    assert '"cluster": "juniper"' in archived["manifest.json"]
    assert archived["logs/8-0.log"].startswith("begin\n") and archived["logs/8-0.log"].endswith("\nend\n")
    assert len(archived["logs/8-0.log"]) < (2 << 20) + 100


def test_secrets_home_and_user_are_gone(archived: dict[str, str], home: Path) -> None:
    line = archived["logs/7-0.log"]
    assert "hunter2" not in line and "hf_A" not in line
    assert f"data ~/tokens and {home}2/x of USER," in line
    assert "over jdoes head" in line


def test_nothing_is_replaced_unasked(archived: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["archive", RUN]) == 2
    assert "already exists" in capsys.readouterr().err
    assert run(["archive", RUN, "--force"]) == 0
    assert not [file for file in Path.cwd().iterdir() if file.name.startswith(f".{RUN}")]


@pytest.mark.needs_plugin("diff")
def test_runs_differ_as_their_recipes_do(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(RUN)
    other = made(OTHER, lr="2.0e-2")
    for name in (OTHER, str(other.path)):
        assert run(["diff", RUN, name]) == 0
        assert "lr" in capsys.readouterr().out
    assert run(["diff", RUN, "tiny_cpu", "--set", "train.lr=1"]) == 0
    assert capsys.readouterr().out == ""
    assert run(["diff", "tiny_cpu-2026", RUN]) == 2
    assert "matches 2 runs" in capsys.readouterr().err
    assert run(["diff", "tiny_cup", RUN]) == 2
    assert "did you mean tiny_cpu?" in capsys.readouterr().err
