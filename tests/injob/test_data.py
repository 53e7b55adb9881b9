"""Indexed data, and the compiled helper that every Megatron dataset needs."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from train_jobs import LAUNCHERS, MOCK, TINY, job_environment, srun, worker

from fp8launch.injob.rank.compat import datasets_helper

pytestmark = pytest.mark.train

WRITE = """
import random, sys
sys.path.insert(0, {code!r})
from fp8launch.injob.rank.compat import python311; python311.install()
from fp8launch.injob.rank.compat import cpu; cpu.install()
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
random.seed(1)
for prefix in {prefixes!r}:
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.uint16)
    for document in range(200):
        start, step = random.randrange(250), random.choice((1, 2, 3))
        builder.add_document(torch.tensor([(start + step * at) % 250 for at in range(100)]), [100])
    builder.finalize(prefix + ".idx")
"""


def test_indexed_files_in_a_blend(megatron: None, tmp_path: Path) -> None:
    """Counting sequences are easy to learn: the mock data's loss never gets there."""
    prefixes = [str(tmp_path / name) for name in ("one", "two")]
    write = WRITE.format(code=str(LAUNCHERS), prefixes=prefixes)
    subprocess.run([sys.executable, "-c", write], env=job_environment(), check=True, capture_output=True)
    blend = ["--data-path", "0.3", prefixes[0], "0.7", prefixes[1], "--data-cache-path", str(tmp_path / "cache")]
    run = worker([*TINY, *blend, "--train-iters", "60", "--lr", "1e-2"]).succeeded()
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
