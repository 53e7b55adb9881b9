"""Fixtures of the tests that run on a real Slurm; every test in this folder gets the marker ``slurm``."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Image, InstallError, Settings, pyxis, why_not
from drilling import Chain, submitted
from launching import PyxisImage, Site, from_weights, losses, sets, train_here

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)


def visible() -> list[Path]:
    """Folders of this machine that a container needs for this Python, its packages and the repository."""
    folders = [REPOSITORY, Path(sys.prefix), Path(sys.base_prefix), *map(Path, sys.path)]
    return [folder for folder in folders if folder.is_absolute() and folder.is_dir()]


def unavailable(reason: str) -> None:
    """Skips; or fails where FP8LAUNCH_NEED_SLURM is set, so that CI cannot lose these tests unseen."""
    if os.environ.get("FP8LAUNCH_NEED_SLURM"):
        pytest.fail(f"FP8LAUNCH_NEED_SLURM is set, but there is no Slurm: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def _cluster() -> Iterator[Cluster]:
    if reason := why_not():
        unavailable(reason)
    try:
        cluster = Cluster.up()
    except InstallError as error:
        unavailable(str(error))
    with cluster:
        yield cluster


@pytest.fixture
def slurm(_cluster: Cluster) -> Iterator[Cluster]:
    """Four nodes of eight GPUs, one cluster for the session; after each test it is whole and empty again.

    Commands run as ``slurm.run("sbatch", ...)``, or by subprocess with ``env=slurm.env``.
    """
    yield _cluster
    _cluster.heal()


@pytest.fixture(scope="session")
def _pyxis_cluster() -> Iterator[Cluster]:
    if isinstance(found := pyxis.find(), str):
        pytest.skip(found)  # no package brings it, so not even CI can be asked to have it
    settings = Settings(pyxis=True)
    if reason := why_not(settings):
        unavailable(reason)
    try:
        cluster = Cluster.up(settings)
    except InstallError as error:
        unavailable(str(error))
    with cluster:
        yield cluster


@pytest.fixture
def pyxis_slurm(_pyxis_cluster: Cluster) -> Iterator[Cluster]:
    """A second cluster like `slurm`, whose srun has --container-image."""
    yield _pyxis_cluster
    _pyxis_cluster.heal()


@pytest.fixture(scope="session")
def pyxis_image(_pyxis_cluster: Cluster) -> PyxisImage:
    """What `image` is, as a file for pyxis."""
    built = Image.build(_pyxis_cluster.root / "image", visible())
    return PyxisImage(built.squash(), built.mounts)


@pytest.fixture
def pyxis_site(pyxis_slurm: Cluster, tmp_path: Path) -> Site:
    return Site(pyxis_slurm, tmp_path)


@pytest.fixture(scope="session")
def image(_cluster: Cluster) -> Image:
    """A container image in which this Python and this repository work once ``image.mounts`` are mounted."""
    if not shutil.which("ch-run", path=_cluster.env["PATH"]):
        pytest.skip("needs Charliecloud's ch-run: apt-get install charliecloud-runtime")
    built = Image.build(_cluster.root / "image", visible())
    probe = _cluster.run("ch-run", *built.binds, str(built.folder), "--", "true", check=False)
    if probe.returncode:
        pytest.skip(f"ch-run cannot make a container here: {probe.stderr.strip()}")
    return built


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path) -> Site:
    return Site(slurm, tmp_path)


@pytest.fixture
def chain(site: Site) -> Callable[..., Chain]:
    """Submits a run for a drill; `profile=` is its cluster profile."""
    return functools.partial(submitted, site)


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that every layout starts from: how Megatron draws them depends on the layout."""
    folder = tmp_path_factory.mktemp("weights")
    saved = folder / "ckpt"
    once = sets("train.iterations=1", "train.warmup=0", f"checkpoint.dir={saved}", "checkpoint.interval=1")
    train_here(folder, *once)
    return saved


@pytest.fixture(scope="session")
def one_process(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the same recipe in one process on this machine."""
    return losses(train_here(tmp_path_factory.mktemp("one"), *from_weights(weights)))
