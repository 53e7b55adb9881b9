"""Where compiled code goes in a container whose home folder cannot be written."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fp8launch.injob.rank.compat import cache_folders

READ_ONLY = "/proc/self"  # not even root makes a folder there


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRITON_CACHE_AUTOTUNING", "TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # so that what a test sets goes again
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_home_that_can_be_written_is_left_to_triton() -> None:
    cache_folders.give_triton_a_cache()
    assert "TRITON_CACHE_DIR" not in os.environ


def test_tritons_choices_are_stored_unless_the_recipe_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    cache_folders.give_triton_a_cache()
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "1"
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "0")
    cache_folders.give_triton_a_cache()
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "0"


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


@pytest.mark.parametrize(
    "plant",
    [
        lambda place, mine: place.symlink_to(mine),
        lambda place, mine: (place.mkdir(), place.chmod(0o777)),
        lambda place, mine: (place.mkdir(), place.chmod(0o770)),
        lambda place, mine: place.write_text(""),
        lambda place, mine: (place.mkdir(), os.chown(place, 65534, 65534)),
    ],
)
@pytest.mark.parametrize("where", ["cache", "temporary"])
def test_a_folder_that_others_planted_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, plant: Callable[[Path, Path], object]
) -> None:
    """Its name is known to everybody, and what is compiled there is loaded by every later job."""
    if os.geteuid():
        pytest.skip("only root can give files away")
    (tmp_path / "mine").mkdir(mode=0o700)
    if where == "temporary":
        monkeypatch.setenv("HOME", READ_ONLY)
        place, other = tmp_path / f"fp8launch-{os.getuid()}", None
    else:
        place, other = tmp_path / "home/.cache/fp8launch", tmp_path / f"fp8launch-{os.getuid()}"
    place.parent.mkdir(parents=True, exist_ok=True)
    plant(place, tmp_path / "mine")
    assert cache_folders.private_folder() == other


def test_without_any_place_triton_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", READ_ONLY)
    monkeypatch.setattr("tempfile.tempdir", READ_ONLY)
    cache_folders.give_triton_a_cache()
    assert "TRITON_CACHE_DIR" not in os.environ
    assert cache_folders.private_folder() is None
