"""`fp8launch schema build`, and recipes that name the fork."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from megatron_sites import megatron_site

from fp8launch import cli
from fp8launch.megatron.schema import FlagSchema, by_name, load_schema, supported_versions
from fp8launch.plugins.forks.source_flags import read_flags

ARGUMENTS = """
import argparse
from enum import Enum
from megatron.training.config import *
raise SystemExit("no code of a fork may run")

FAST = 2 ** 3 - 1

class Kind(Enum):
    soft = "s"
    hard = "h"

def parse_args():
    parser = argparse.ArgumentParser()
    parser = _add_own_args(parser)
    return parser.parse_args()

def _add_own_args(parser):
    group = parser.add_argument_group(title="own")
    group.add_argument("--num-layers", type=int, default=None)
    group.add_argument("--hidden-size", "--width", type=int, default=FAST)
    group.add_argument("--num-attention-heads", type=int)
    group.add_argument("--beta3", type=float, default=-1e-3)
    group.add_argument("--kind", choices=[one.value for one in Kind], default=Kind.soft.value)
    group.add_argument("--rate", type=float, default=compute())
    group.add_argument("--no-norm", action="store_false", dest="norm")
    group.add_argument("--optimizer", choices=["adam", "ademamix"], default="ademamix")
    for name in ("a", "b"):
        group.add_argument(f"--{name}")
    ArgumentGroupFactory(OwnConfig, exclude=["left_out"]).build_group(parser, "own")
    return parser
"""
CONFIG = """
from dataclasses import dataclass, field
from typing import Literal

@dataclass
class Base:
    depth: int | None = None

@dataclass
class OwnConfig(Base):
    left_out: int = 0
    on: bool = True
    off: bool = False
    mode: Literal["x", "y"] = "x"
    sizes: list[int] = field(default_factory=lambda: [1, 2])
    renamed: str = field(default="z", metadata={"argparse_meta": {"arg_names": ["--other-name"]}})
"""
RECIPE = """\
model: {num_layers: 2, hidden_size: 256, num_attention_heads: 4, vocab_size: 512}
batch: {micro: 1, global: 8, sequence: 4096}
train: {iterations: 10, lr: 1.0e-4}
data: {kind: mock}
software: {megatron: 0.19+mine}
"""


@pytest.fixture
def fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    root = tmp_path / "Fork"
    (root / "megatron" / "training").mkdir(parents=True)
    (root / "megatron" / "core").mkdir()
    (root / "megatron" / "training" / "arguments.py").write_text(ARGUMENTS)
    (root / "megatron" / "training" / "config.py").write_text(CONFIG)
    (root / "megatron" / "core" / "package_info.py").write_text("MAJOR = 0\nMINOR = 23\nPATCH = 1\n")
    return root


def schema_of(root: Path) -> FlagSchema:
    found = read_flags(root)
    assert found is not None
    return FlagSchema("0", (), {}, by_name(found.flags.values()))


@pytest.mark.parametrize("default", ["((9**64)**64)**64", "9**64 * 9**64 * 'x'", "'x' * 10**10"])
def test_arithmetic_that_would_take_all_memory_is_not_done(fork: Path, default: str) -> None:
    file = fork / "megatron/training/arguments.py"
    file.write_text(file.read_text().replace("default=compute()", f"default={default}"))
    assert "unread" in read_flags(fork).flags["--rate"]  # type: ignore[union-attr]


@pytest.mark.parametrize("minor", supported_versions())
def test_the_text_shows_the_flags_of_the_parser(minor: str) -> None:
    """The flags in the text of a release are those of its parser, except what Python computes at start."""
    place = megatron_site(minor)
    theirs = {
        flag.options: replace(flag, hidden=False, deprecated=False)
        for flag in load_schema(minor).flags()
        if flag.needs is None
    }
    ours = {flag.options: flag for flag in schema_of(place).flags()}
    assert theirs.keys() <= ours.keys()
    different = {options[0] for options, flag in theirs.items() if flag != ours[options]}
    assert different <= {
        *("--cuda-graph-modules", "--cuda-graph-scope", "--exit-signal"),
        *("--inprocess-active-world-size", "--local-rank"),
    }


def test_what_is_read(fork: Path) -> None:
    found = read_flags(fork)
    assert found is not None
    assert found.unread == ["megatron.training.arguments:29"]
    assert [name for name, flag in found.flags.items() if "unread" in flag] == ["--rate"]
    schema = schema_of(fork)
    flags = {flag.options[0]: (flag.type, flag.default) for flag in schema.flags()}
    assert flags["--beta3"] == ("float", -0.001)
    assert flags["--hidden-size"] == ("int", 7)
    assert flags["--depth"] == ("int", None)
    assert flags["--no-on"] == (None, True)
    assert flags["--off"] == (None, False)
    assert flags["--sizes"] == ("int", [1, 2])
    assert flags["--other-name"] == ("str", "z")
    assert schema.find("left_out") is None
    for name, choices in {"kind": ("s", "h"), "mode": ("x", "y")}.items():
        flag = schema.find(name)
        assert flag is not None
        assert flag.choices == choices


def test_check_knows_the_fork(fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schema", "build", str(fork), "--name", "Mine"]) == 0
    assert "software: {megatron: 0.19+mine}" in capsys.readouterr().out
    found = findings(tmp_path, capsys, "megatron_extra: {beta3: 0.9, kind: s, optimizer: ademamix}\n")
    assert not found("unchecked-flags")
    own = found("fork-flags")
    assert any(message.startswith("mine has no flag --lr") for message in own)
    assert not any("beta3" in message or "kind" in message or "optimizer" in message for message in own)
    assert "--optimizer (adam -> ademamix)" in found("fork-defaults")[0]
    found = findings(tmp_path, capsys, "megatron_extra: {beta3: fast, kind: soft, betta3: 1}\n")
    own = found("fork-flags")
    for message in ("--beta3 needs a number, not 'fast'", "--kind has no choice 'soft'", "mine has no flag --betta3"):
        assert message in own
    fixes = findings(tmp_path, capsys, "megatron_extra: {beta3: fast}\n", key="fix")("fork-flags")
    assert sum(fix.startswith("correct the value, or build the schema again") for fix in fixes) == 1


def test_a_fork_that_was_not_built_is_not_checked(
    fork: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = findings(tmp_path, capsys, "megatron_extra: {beta3: fast}\n")
    assert found("unchecked-flags")
    assert not found("fork-flags")


@pytest.mark.parametrize(
    "text",
    [
        "def parse_args():\n    x.add_argument('--a', default=b'1')\n    ArgumentGroupFactory()",
        "class A(A):\n    x: int = 0\ndef parse_args():\n    ArgumentGroupFactory(A)",
        "class A:\n    x: Literal[f()] = 0\n    y: 'a b' = 1\ndef parse_args():\n  ArgumentGroupFactory(A, f())",
        "a = b\nb = a\ndef parse_args():\n    x.add_argument('--a', default=a, choices=9**9**9)",
        "def parse_args():\n    x.add_argument('--a', default=" + "-" * 400 + "1)",
        "def parse_args(:",
    ],
)
def test_strange_code(fork: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (fork / "megatron" / "training" / "arguments.py").write_text(text)
    cli.run(["schema", "build", str(fork)])
    assert "Traceback" not in capsys.readouterr().err


def test_no_megatron_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["schema", "build", str(tmp_path)]) != 0
    assert "[no-megatron-parser]" in capsys.readouterr().err


def findings(
    folder: Path, capsys: pytest.CaptureFixture[str], more: str, key: str = "message"
) -> Callable[[str], list[str]]:
    file = folder / "recipe.yaml"
    file.write_text(RECIPE + more)
    cli.run(["check", str(file), "--json"])
    problems = json.loads(capsys.readouterr().out)["problems"]

    def of_code(code: str) -> list[str]:
        return [problem[key] for problem in problems if problem["code"] == code]

    return of_code
