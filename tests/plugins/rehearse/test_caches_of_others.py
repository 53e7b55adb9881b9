"""Caches: what is run or believed there must be this user's own."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from packaging.version import Version

from fp8launch.injob.ownership import why_others_may_change
from fp8launch.plugins.rehearse.software import NoTransformerEngine, transformer_engine_for
from fp8launch.plugins.validators import verdict_cache
from fp8launch.plugins.validators.megatron_core import NoMegatron, megatron_for, site_of
from fp8launch.plugins.validators.verdicts import MegatronVerdict, Request
from fp8launch.plugins.validators.wheels import Wheel, fetch

Say = Callable[..., tuple[int, str, str]]
Spoil = Callable[[Path, Path], object]
NOBODY = 65534
INFO = "MAJOR = 0\nMINOR = 19\nPATCH = 9\n"


def give(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give files away")
    os.chown(path, NOBODY, NOBODY)


# A cache folder and the place in it that is used, spoilt.
SPOILT: dict[str, Spoil] = {
    "everybody writes to XDG_CACHE_HOME": lambda base, place: base.chmod(0o777),
    "everybody writes to the cache": lambda base, place: (base / "fp8launch").chmod(0o777),
    "everybody writes to its part": lambda base, place: place.parent.chmod(0o777),
    "everybody writes to the code": lambda base, place: place.chmod(0o777),
    "everybody writes to a module": lambda base, place: next(place.rglob("*.py")).chmod(0o666),
    "somebody else's cache": lambda base, place: give(base / "fp8launch"),
    "somebody else's part": lambda base, place: give(place.parent),
    "somebody else's code": lambda base, place: give(place),
    "somebody else's module": lambda base, place: give(next(place.rglob("*.py"))),
    "a group's module": lambda base, place: (give(place), os.chown(place, 0, NOBODY), place.chmod(0o775)),
    "a module that is a link": lambda base, place: (place / "extra.py").symlink_to("/tmp/x.py"),
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty XDG_CACHE_HOME; nothing can be fetched, and no other Megatron is here."""
    base = tmp_path / "cache"
    base.mkdir(mode=0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    monkeypatch.setenv("FP8LAUNCH_OFFLINE", "1")
    monkeypatch.delenv("FP8LAUNCH_MEGATRON", raising=False)
    monkeypatch.setattr("fp8launch.plugins.validators.megatron_core._installed", lambda: iter(()))
    yield base


def unpacked_megatron(base: Path) -> Path:
    place = base / "fp8launch/megatron/0.19.9"
    (place / "megatron/core").mkdir(parents=True)
    (place / "megatron/training").mkdir()
    (place / "megatron/core/package_info.py").write_text(INFO)
    (place / "megatron/training/arguments.py").touch()
    (place / "megatron/__init__.py").write_text(f"open({str(base.parent / 'canary')!r}, 'w')\n")
    return place


def unpacked_engine(base: Path) -> Path:
    place = base / "fp8launch/transformer_engine/2.20.9"
    (place / "transformer_engine/pytorch").mkdir(parents=True)
    (place / "transformer_engine/pytorch/__init__.py").touch()
    return place


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_code_that_others_could_have_written_is_not_used(cache: Path, spoil: Spoil) -> None:
    place = unpacked_megatron(cache)
    assert megatron_for("0.19") == place
    spoil(cache, place)
    with pytest.raises(NoMegatron, match=r"other users could have changed the code in it.*remove it, or set XDG"):
        megatron_for("0.19")


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
def test_nor_to_rehearse_with(cache: Path, spoil: Spoil) -> None:
    place = unpacked_engine(cache)
    assert transformer_engine_for(Version("2.20")) == place
    spoil(cache, place)
    with pytest.raises(NoTransformerEngine, match="other users could have changed the code in it"):
        transformer_engine_for(Version("2.20"))


def test_check_runs_no_code_of_a_cache_that_others_can_write(cache: Path, say: Say) -> None:
    place = unpacked_megatron(cache)
    (cache / "fp8launch").chmod(0o777)
    _, out, err = say("check", "tiny_cpu", "--json")
    assert "other users could have changed the code in it" in out + err
    (cache / "fp8launch").chmod(0o700)
    assert not (cache.parent / "canary").exists()
    say("check", "tiny_cpu")
    assert (cache.parent / "canary").exists(), f"{place} is run where nobody else can write to it"


def test_what_the_system_installed_and_a_link_to_one_s_own_are_used(cache: Path, tmp_path: Path) -> None:
    place = unpacked_megatron(cache)
    if not os.geteuid():
        for path in (cache / "fp8launch", *(cache / "fp8launch").rglob("*")):
            os.chown(path, 2, 2)
    assert megatron_for("0.19") == place
    elsewhere = tmp_path / "elsewhere"
    (cache / "fp8launch").rename(elsewhere)
    (cache / "fp8launch").symlink_to(elsewhere)
    assert megatron_for("0.19") == place
    elsewhere.chmod(0o777)
    with pytest.raises(NoMegatron, match=str(elsewhere)):
        megatron_for("0.19")


def test_a_wheel_unpacked_by_others_is_left_aside(cache: Path, tmp_path: Path) -> None:
    """A wheel of the user's own is unpacked into the cache once; what is in the cache then must still be hers."""
    wheel = tmp_path / "megatron_core-0.19.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("megatron/core/package_info.py", INFO)
    unpacked = site_of(wheel)
    assert unpacked.parent == cache / "fp8launch/megatron"
    assert site_of(wheel) == unpacked
    (unpacked / "megatron").chmod(0o777)
    assert site_of(wheel) == wheel
    cache.chmod(0o777)
    assert site_of(wheel) == wheel


def test_what_is_fetched_is_one_s_own_whatever_the_umask(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "plain-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("plain-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: plain\nVersion: 1.0\n")
        archive.writestr("plain-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("plain-1.0.dist-info/RECORD", "")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(index), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    monkeypatch.delenv("FP8LAUNCH_OFFLINE")
    folder = cache / "fp8launch" / "plain"

    def find() -> Path | None:
        return next(folder.glob("*.whl"), None)

    def keep(file: Path) -> None:
        file.rename(folder / file.name)

    release = Wheel("plain", "1.0", sha256(wheel.read_bytes()).hexdigest(), "1 kB")
    before = os.umask(0)
    try:
        found = fetch(release, folder, find, keep)
    finally:
        os.umask(before)
    assert found.is_file()
    assert why_others_may_change(found) is None
    assert folder.stat().st_mode & 0o777 == 0o700


def test_a_verdict_is_believed_only_where_nobody_can_replace_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []

    def validate(requests: list[Request], megatron: Path) -> list[MegatronVerdict]:
        asked.extend(requests)
        return [MegatronVerdict(True, "num_microbatches", None, None, None, (), 0.0) for _ in requests]

    monkeypatch.setattr(verdict_cache, "validate", validate)
    request = Request(argv=("--num-layers", "2"), world_size=1, compute_capability=(9, 0), te_version=None)
    site = unpacked_megatron(cache)
    for expected in (1, 1):
        verdict_cache.cached_verdicts([request], site)
        assert len(asked) == expected
    cache.chmod(0o777)
    verdict_cache.cached_verdicts([request], site)
    assert len(asked) == 2
