"""`check` prints findings on stdout, and of a pass in four lines what would run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fp8launch.cli import run


@pytest.fixture(autouse=True)
def no_slurm(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))


@pytest.mark.needs_plugin("estimate")
def test_four_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "llama8b_fp8", "--set", "container.image=null", "--nodes", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split()[0] for line in lines] == ["size", "memory", "data", "image"]
    assert "world size 16: data parallel size 16, 16 micro batches of 1 per step" in lines[0]
    assert "of 79.6 GiB per GPU" in lines[1]


def test_a_layout_and_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "tiny_cpu"]) == 0
    size, memory, data, image = capsys.readouterr().out.splitlines()[-4:]
    assert (memory, data) == ("memory  not estimated for this run", "data    mock: generated tokens")
    assert "1 x 1 cpu" in size and "none" in image


def test_findings_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "tiny_cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    assert run(["check", "tiny_cpu", "--set", "precision.recipe=tensorwise"]) == 1
    shown = capsys.readouterr()
    assert "[fp8-on-cpu]\n    fix: use `precision: {recipe: bf16}`" in shown.out and "memory  " not in shown.out
    assert shown.err == "1 recipe checked, 1 with errors\n"
