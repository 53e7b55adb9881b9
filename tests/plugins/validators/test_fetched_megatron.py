"""Megatron-Core that is not on this machine: fetched once, by one of many, or reported as missing."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sets import MXFP8, RULES, Set

from fp8launch.check.checker import check
from fp8launch.plugins.validators import megatron_core
from fp8launch.plugins.validators.megatron_core import NoMegatron, cache_folder, megatron_for


@pytest.fixture
def no_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FP8LAUNCH_MEGATRON", raising=False)
    monkeypatch.setattr(megatron_core, "_installed", lambda: iter(()))
    yield cache_folder()


def test_offline_without_a_wheel_the_other_layers_still_look(
    no_megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8LAUNCH_OFFLINE", "1")
    result = check(Set(MXFP8).prepare(tmp_path), layers=RULES)
    assert result.layers["megatron"].startswith("not run: no megatron-core 0.19")
    assert "FP8LAUNCH_OFFLINE" in result.layers["megatron"]
    assert [p.code for p in result.problems] == ["mxfp8-needs-blackwell"]
    assert check(Set().prepare(tmp_path), layers=RULES).ok


def test_a_download_that_fails_is_no_error_and_not_tried_again_at_once(
    no_megatron: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8LAUNCH_OFFLINE", raising=False)
    # pip without any index.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    told: list[str] = []
    with pytest.raises(NoMegatron, match="could not be fetched"):
        megatron_for("0.19", told.append)
    assert len(told) == 1 and "megatron-core 0.19" in told[0]
    begin = time.perf_counter()
    with pytest.raises(NoMegatron, match="next attempt in an hour"):
        megatron_for("0.19", told.append)
    assert time.perf_counter() - begin < 0.5
    assert len(told) == 1
    # After an hour it is.
    [marker] = no_megatron.glob(".failed-*")
    os.utime(marker, (0, 0))
    with pytest.raises(NoMegatron, match=r"could not be fetched: (?!.*next attempt)"):
        megatron_for("0.19", told.append)
    assert len(told) == 2


def test_a_wheel_is_fetched_by_one_of_many(no_megatron: Path, tmp_path: Path) -> None:
    """Two checks at once: one fetches, from a folder of wheels here, the other finds what it brought."""
    source = tmp_path / "wheels"
    source.mkdir()
    name = "megatron_core-0.19.2-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
    _write_wheel(source / name)
    environment = {
        **os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(source), "PIP_CONFIG_FILE": os.devnull,
        "PYTHONPATH": str(Path(megatron_core.__file__).parents[3]), "FP8LAUNCH_OFFLINE": "0",
    }  # fmt: skip
    digest = hashlib.sha256((source / name).read_bytes()).hexdigest()
    code = (
        "from fp8launch.plugins.validators import megatron_core; megatron_core._installed = lambda: iter(())\n"
        f"megatron_core.WHEELS = {{'0.19.2': '{digest}'}}\n"
        "print(megatron_core.megatron_for('0.19', lambda m: print('SAID', m)))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert all(process.returncode == 0 for process in both)
    assert all(text.strip().endswith(name) for text in said)
    assert sum("SAID" in text for text in said) == 1
    assert [path.name for path in no_megatron.glob("*.whl")] == [name]
    assert not list(no_megatron.glob(".fetch-*"))


def _write_wheel(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("megatron/core/package_info.py", "MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
        archive.writestr("megatron/training/arguments.py", "")
        info = "megatron_core-0.19.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
