"""Where compiled code goes in a container whose home folder cannot be written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8launch.injob.rank.compat import cache_folders

READ_ONLY = "/proc/self"  # not even root makes a folder there


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that what a test sets goes again
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_home_that_can_be_written_is_left_to_triton() -> None:
    cache_folders.give_triton_a_cache()
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_read_only_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", READ_ONLY)
    cache_folders.give_triton_a_cache()
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/fp8launch-{os.getuid()}/triton"
    assert (tmp_path / f"fp8launch-{os.getuid()}").stat().st_mode & 0o777 == 0o700


def test_what_the_recipe_says_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", READ_ONLY)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/data/cache")
    cache_folders.give_triton_a_cache()
    assert os.environ["TRITON_CACHE_DIR"] == "/data/cache"


def test_without_any_place_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", READ_ONLY)
    monkeypatch.setattr("tempfile.tempdir", READ_ONLY)
    cache_folders.give_triton_a_cache()
    assert "TRITON_CACHE_DIR" not in os.environ
    assert cache_folders.private_folder() is None
