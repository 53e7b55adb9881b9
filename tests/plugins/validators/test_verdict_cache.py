"""Verdicts in the user's cache: the same question is asked once, and any other is asked."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sets import Set

from fp8launch.check.checker import check
from fp8launch.check.job_paths import JobPaths
from fp8launch.check.resolved_run import resolve_run
from fp8launch.plugins.validators import verdict_cache
from fp8launch.plugins.validators.layer import request
from fp8launch.plugins.validators.megatron_core import megatron_for, site_of
from fp8launch.plugins.validators.verdicts import MegatronVerdict, Request, validate

Ask = Callable[..., list[MegatronVerdict]]


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that really reached Megatron, from an empty cache on."""
    real = megatron_for("0.19")
    monkeypatch.setattr(verdict_cache, "cache_folder", lambda: tmp_path / "cache" / "megatron")
    monkeypatch.setenv("FP8LAUNCH_MEGATRON", str(real))
    seen: list[Request] = []

    def recorded(requests: Sequence[Request], megatron: Path) -> list[MegatronVerdict]:
        seen.extend(requests)
        return validate(requests, megatron)

    monkeypatch.setattr(verdict_cache, "validate", recorded)
    return seen


@pytest.fixture
def good(tmp_path: Path) -> Request:
    return request(resolve_run(Set().prepare(tmp_path)), JobPaths(None))


def entries(folder: Path) -> list[Path]:
    return sorted((folder / "cache/verdicts").glob("*.json"))


def ask(*requests: Request) -> list[MegatronVerdict]:
    return verdict_cache.cached_verdicts(requests, megatron_for("0.19"))


def test_a_repeated_check_asks_nothing_and_finds_the_same(asked: list[Request], tmp_path: Path) -> None:
    for values, ok in (({}, True), ({"min_lr": 1.0}, False)):
        prepared = Set(values).prepare(tmp_path)
        first = check(prepared, layers=("megatron",))
        count = len(asked)
        assert count > 0
        assert check(prepared, layers=("megatron",)) == first
        assert len(asked) == count
        assert first.ok is ok


def test_of_several_only_the_new_ones_are_asked(asked: list[Request], good: Request) -> None:
    bad = replace(good, argv=(*good.argv, "--no-such-flag"))
    other = replace(good, world_size=16)
    [one] = ask(good)
    found = ask(bad, good, other)
    assert [verdict.ok for verdict in found] == [False, True, True]
    assert found[1] == one
    assert asked == [good, bad, other]


@pytest.mark.parametrize(
    "change",
    [
        {"world_size": 16}, {"compute_capability": (10, 0)}, {"te_version": "2.1"}, {"last_stage": "validate_args"},
        {"env": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}},
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_another_machine_is_another_question(asked: list[Request], good: Request, change: dict[str, object]) -> None:
    other = replace(good, **change)  # type: ignore[arg-type]
    assert other != good
    ask(good, other)
    ask(good, other)
    assert asked == [good, other]


def test_what_megatron_may_read_is_asked_every_time(asked: list[Request], good: Request, tmp_path: Path) -> None:
    description = tmp_path / "model.json"
    named = replace(good, argv=(*good.argv, f"--heterogeneous-layers-config-path={description}"))
    ask(named)  # refused, and remembered: there is no such file
    description.write_text("{}")
    ask(named)
    ask(named)
    assert asked == [named, named, named]


def test_other_files_of_megatron_are_another_megatron(
    asked: list[Request], good: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "site"
    package = site_of(megatron_for("0.19")) / "megatron"
    shutil.copytree(package, copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("FP8LAUNCH_MEGATRON", str(copy))
    assert ask(good)[0].ok
    arguments = copy / "megatron/training/arguments.py"
    code = arguments.read_text()
    changed = code.replace(
        "def validate_args(args, defaults={}):", "def validate_args(args, defaults={}):\n    assert 0, 'no'"
    )
    assert changed != code
    arguments.write_text(changed)
    [verdict] = ask(good)
    assert (verdict.ok, verdict.message) == (False, "no")
    assert asked == [good, good]


def test_another_worker_asks_again(
    asked: list[Request], good: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(good)
    changed = tmp_path / "validate_worker.py"
    changed.write_text("# another release of fp8launch\n")
    monkeypatch.setattr(verdict_cache, "WORKER_FILES", (changed,))
    ask(good)
    assert asked == [good, good]


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"ok": true}', "\0\0"])
def test_an_entry_that_cannot_be_read_is_made_again(
    asked: list[Request], good: Request, tmp_path: Path, content: str
) -> None:
    [verdict] = ask(good)
    [entry] = entries(tmp_path)
    entry.write_text(content)
    assert ask(good)[0].ok
    assert len(asked) == 2
    assert json.loads(entry.read_text())["ok"] is verdict.ok


def test_an_entry_that_others_can_write_is_not_believed(asked: list[Request], good: Request, tmp_path: Path) -> None:
    ask(good)
    [entry] = entries(tmp_path)
    entry.chmod(0o666)
    ask(good)
    assert len(asked) == 2
    entry.parent.chmod(0o777)
    ask(good)
    assert len(asked) == 3


def test_a_cache_that_cannot_be_written_is_no_error(asked: list[Request], good: Request, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert ask(good)[0].ok
    assert ask(good)[0].ok
    assert len(asked) == 2


def test_uncertain_verdicts_are_not_kept(asked: list[Request], good: Request, tmp_path: Path) -> None:
    no_version = replace(good, te_version="not a version")
    assert ask(no_version)[0].no_answer
    ask(no_version)
    assert asked == [no_version, no_version]
    assert not entries(tmp_path)


def test_the_oldest_entries_go_first(
    asked: list[Request], good: Request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict_cache, "MOST_ENTRIES", 4)
    several = [replace(good, world_size=8 * size) for size in range(1, 5)]
    ask(*several)
    for age, entry in enumerate(entries(tmp_path)):
        os.utime(entry, (1e9 + age, 1e9 + age))
    newest_before = entries(tmp_path)[-1]
    ask(replace(good, world_size=64))
    assert len(entries(tmp_path)) == 2
    assert newest_before in entries(tmp_path)
