"""What the container definitions put into an image, run inside one by a real container runtime on a node."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from cluster import Cluster, Image
from launching import ROOT


@pytest.fixture
def built(image: Image, tmp_path: Path) -> Image:
    """The tests' image with the definition's files copied into it, as `apptainer build` would."""
    mine = Image.build(tmp_path / "image", [Path(sys.prefix), Path(sys.base_prefix)])
    definition = (ROOT / "containers/fp8launch.def").read_text(encoding="utf-8")
    files = re.search(r"^%files\n(.*?)^%", definition, re.M | re.S)
    assert files is not None
    for line in files[1].split("\n"):
        if line.strip():
            source, target = line.split()
            place = mine.folder / target.lstrip("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, place)
    return mine


def inside(slurm: Cluster, image: Image, *command: str) -> tuple[int, str]:
    runtime = ["ch-run", f"--set-env=PATH={Path(sys.executable).parent}:/usr/bin:/bin", *image.binds, str(image.folder)]
    done = slurm.run("srun", "-n1", *runtime, "--", *command, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_definitions_own_test_tells_what_the_image_lacks(slurm: Cluster, built: Image) -> None:
    definition = (ROOT / "containers/fp8launch.def").read_text(encoding="utf-8")
    test = re.search(r"^%test\n +(.*)$", definition, re.M)
    assert test is not None
    status, said = inside(slurm, built, *test[1].replace("python3", Path(sys.executable).name).split())
    assert re.search(r"megatron\.core: \d", said), said
    # No machine of the tests has Transformer Engine for nothing: the image must be refused where it is missing.
    there = "transformer_engine: missing" not in said
    assert status == (0 if there else 1)


def test_the_in_job_part_starts_in_the_image(slurm: Cluster, built: Image) -> None:
    worker = "/opt/fp8launch/launchers/fp8launch/injob/rank/worker.py"
    python = Path(sys.executable).name
    status, said = inside(slurm, built, python, worker, "--", "--fp8-format", "hybrid")
    assert status == 3, said
    assert "Transformer Engine" in said or "GPU" in said
