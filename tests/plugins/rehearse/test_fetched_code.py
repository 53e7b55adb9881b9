"""Code that is fetched and then run: only what has the known hash, and no program of the working folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from fp8launch.plugins.rehearse.software import RELEASES, NoTransformerEngine, transformer_engine_for
from fp8launch.plugins.validators.megatron_core import NoMegatron, megatron_for

MEGATRON_WHEEL = "megatron_core-0.19.2-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"


def fetch_megatron() -> Path:
    return megatron_for("0.19")


def fetch_transformer_engine() -> Path:
    return transformer_engine_for(Version("2.20"))


FETCHES = [
    pytest.param(fetch_megatron, NoMegatron, MEGATRON_WHEEL, "megatron/core/package_info.py", id="megatron-core"),
    pytest.param(
        fetch_transformer_engine,
        NoTransformerEngine,
        "transformer_engine-2.20.2-py3-none-any.whl",
        "transformer_engine/pytorch/__init__.py",
        id="transformer-engine",
    ),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and an index that is a folder of wheels."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FP8LAUNCH_MEGATRON", raising=False)
    monkeypatch.delenv("FP8LAUNCH_OFFLINE", raising=False)
    monkeypatch.setattr("fp8launch.plugins.validators.megatron_core._installed", lambda: iter(()))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(tmp_path / "index"), "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    (tmp_path / "index").mkdir()
    yield tmp_path / "cache" / "fp8launch"


def write_wheel(path: Path, member: str) -> None:
    """Write a wheel that pip accepts, with one file of its package."""
    name, version = path.name.split("-")[:2]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, "raise SystemExit('code of a stranger')\n")
        info = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.mark.parametrize(("fetch", "failure", "name", "member"), FETCHES)
def test_a_wheel_with_another_hash_is_not_kept(
    cache: Path, tmp_path: Path, fetch: Callable[[], Path], failure: type[Exception], name: str, member: str
) -> None:
    """An index in between may hand out anything under this name, and its code would be run."""
    write_wheel(tmp_path / "index" / name, member)
    with pytest.raises(failure, match="could not be fetched"):
        fetch()
    left = [path for path in cache.rglob("*") if path.is_file() and not path.name.startswith(".")]
    assert left == []


@pytest.mark.parametrize(("fetch", "failure"), [case.values[:2] for case in FETCHES])
def test_no_program_of_the_working_folder_is_run(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetch: Callable[[], Path], failure: type[Exception]
) -> None:
    """`python -m pip` would import a pip.py that somebody left in the folder where the command is typed."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "pip.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')\n")
    monkeypatch.chdir(work)
    with pytest.raises(failure, match="could not be fetched"):
        fetch()
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize(("fetch", "failure"), [case.values[:2] for case in FETCHES])
def test_the_offline_switch_is_named(
    cache: Path, monkeypatch: pytest.MonkeyPatch, fetch: Callable[[], Path], failure: type[Exception]
) -> None:
    monkeypatch.setenv("FP8LAUNCH_OFFLINE", "1")
    with pytest.raises(failure, match="FP8LAUNCH_OFFLINE forbids"):
        fetch()
    assert not cache.exists()


def test_a_release_without_a_known_hash_is_not_fetched(cache: Path) -> None:
    with pytest.raises(NoTransformerEngine, match=r"2\.99 is not in .* hash is not known"):
        transformer_engine_for(Version("2.99.1"))
    assert not cache.exists()


def test_what_the_user_unpacked_is_used_without_a_hash(cache: Path) -> None:
    place = cache / "transformer_engine" / "2.99.1"
    (place / "transformer_engine" / "pytorch").mkdir(parents=True)
    (cache / "transformer_engine" / "2.99.backup" / "transformer_engine" / "pytorch").mkdir(parents=True)
    assert transformer_engine_for(Version("2.99")) == place


def test_the_releases_of_the_image_catalogue_are_known() -> None:
    from fp8launch.cluster.images import catalogue, software_in

    stated = {software_in(name).get("transformer_engine") for name in catalogue()}
    minors = {".".join(version.split(".")[:2]) for version in stated if version}
    assert minors
    assert minors <= set(RELEASES)
    assert all(Version(release).release[:2] == Version(minor).release[:2] for minor, (release, _) in RELEASES.items())


@pytest.mark.train
def test_a_rehearsal_imports_nothing_from_the_working_folder(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for name in ("json", "torch", "numpy", "packaging"):
        (work / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').write({name!r})\n")
    command = [sys.executable, "-I", "-c", "from fp8launch.__main__ import main; main()"]
    done = subprocess.run(
        [*command, "check", "tiny_cpu", "--rehearse"], cwd=work, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
    assert done.returncode == 0, done.stdout + done.stderr
