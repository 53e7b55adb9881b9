"""Indexed data, and the compiled helper that every Megatron dataset needs."""

from __future__ import annotations

import importlib.util
import random
import shutil
import struct
from pathlib import Path

import pytest
from train_jobs import MOCK, TINY, forked, srun

from fp8launch.datasets.index_format import header
from fp8launch.injob.rank.compat import datasets_helper

pytestmark = pytest.mark.train


def counting(prefix: Path) -> str:
    """An indexed dataset of 200 documents of 100 tokens."""
    draw = random.Random(prefix.name)
    with Path(f"{prefix}.bin").open("wb") as file:
        for _ in range(200):
            start, step = draw.randrange(250), draw.choice((1, 2, 3))
            file.write(struct.pack("<100H", *((start + step * at) % 250 for at in range(100))))
    tables = [100] * 200, range(0, 40_000, 200), range(201)
    packed = (struct.pack(form, *table) for form, table in zip(("<200i", "<200q", "<201q"), tables, strict=True))
    Path(f"{prefix}.idx").write_bytes(header("uint16", 200, 201) + b"".join(packed))
    return str(prefix)


def test_indexed_files_in_a_blend(megatron: None, tmp_path: Path) -> None:
    """Counting sequences are easy to learn: the mock data's loss never gets there."""
    prefixes = [counting(tmp_path / name) for name in ("one", "two")]
    blend = ["--data-path", "0.3", prefixes[0], "0.7", prefixes[1], "--data-cache-path", str(tmp_path / "cache")]
    run = forked(1, [*TINY, *blend, "--train-iters", "60", "--lr", "1e-2"]).succeeded()
    assert run.losses[60] < 4.0
    assert list((tmp_path / "cache").iterdir()), "Megatron keeps its index of the blend there"


@pytest.mark.slow
def test_the_helper_is_compiled_where_the_installation_lacks_it(megatron: None, tmp_path: Path) -> None:
    """A copy of the installed Megatron without its compiled helper, read-only: the helper goes into the cache."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None and spec.origin is not None
    installed = Path(spec.origin).parent.parent
    site = tmp_path / "site"
    shutil.copytree(installed, site / "megatron", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    cache = tmp_path / "cache"
    run = srun(
        2, [*MOCK, "--train-iters", "3", "--lr-decay-iters", "10"], PYTHONPATH=str(site), XDG_CACHE_HOME=str(cache)
    )
    assert list(run.succeeded().losses) == [1, 2, 3]
    assert len(list(cache.rglob("helpers_cpp*.so"))) == 1
    assert not list(site.rglob("*.so"))


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = datasets_helper
    (tmp_path / "helpers.cpp").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(helper.HelperProblem, match="there is no C"):
        helper._build(tmp_path / "helpers.cpp")


def test_a_compiler_error_is_passed_on(megatron: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    helper = datasets_helper
    (tmp_path / "helpers.cpp").write_text("this is not C++\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(helper.HelperProblem, match=r"compiling Megatron's dataset helper failed: .*error"):
        helper._build(tmp_path / "helpers.cpp")
    assert not list((tmp_path / "cache").rglob("*.so"))
