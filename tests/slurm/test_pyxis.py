"""Runs in containers of pyxis and enroot, on a Slurm that has them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from cluster.image import NAME
from cluster.processes import until
from drilling import Chain
from launching import ROOT, TWO_BY_TWO, PyxisImage, Site, sets

from fp8launch.check.job_paths import JobPaths, parse_mount

INTERVAL = sets("checkpoint.interval=10")


def test_a_task_runs_inside_the_image_on_two_nodes(pyxis_slurm: Cluster, pyxis_image: PyxisImage) -> None:
    mounts = ",".join(f"{path}:{path}" for path in pyxis_image.mounts)
    options = [f"--container-image={pyxis_image.file}", f"--container-mounts={mounts}"]
    code = "import socket; print(socket.gethostname(), open('/etc/os-release').read())"
    done = pyxis_slurm.run("srun", "-N2", *options, sys.executable, "-c", code)
    assert {line.split()[0] for line in done.stdout.splitlines() if line.strip()} == {"node1", "node2"}
    assert done.stdout.count(NAME) == 2


@pytest.mark.train
@pytest.mark.parametrize("mode", ["srun", "torchrun"])
def test_training_in_a_pyxis_container(pyxis_site: Site, pyxis_image: PyxisImage, mode: str, tmp_path: Path) -> None:
    """Checkpoints are on the host, where the supervisor and the next attempt look for them."""
    saves = tmp_path / "saves"
    saves.mkdir()
    profile = pyxis_image.profile(tmp_path, "run_root: " + str(pyxis_site.runs))
    inside = sets(
        "container.image=tiny",
        f"container.mounts=[{saves}:/saves]",
        f"launch.python={sys.executable}",
        f"launch.mode={mode}",
        "checkpoint.dir=/saves/new",
        "checkpoint.interval=10",
        "survive.attempts=2",
    )
    run = pyxis_site.submit("--cluster", str(profile), *inside, *TWO_BY_TWO, "--wait")
    assert pyxis_site.state(run)["state"] == "completed"
    assert (saves / "new" / "latest_checkpointed_iteration.txt").read_text().strip() == "20"
    attempts = json.loads((pyxis_site.runs / run / "attempts.json").read_text())["attempts"]
    assert len(attempts) == 1


def test_a_run_whose_checkpoints_would_be_lost_is_not_submitted(
    pyxis_site: Site, pyxis_image: PyxisImage, tmp_path: Path
) -> None:
    profile = pyxis_image.profile(tmp_path)
    lost = sets("container.image=tiny", f"launch.python={sys.executable}", "checkpoint.dir=/elsewhere/z")
    done = pyxis_site.run("submit", "recipes/tiny_cpu.yaml", "--cluster", str(profile), *lost, *INTERVAL)
    assert done.returncode == 1
    assert "[path-not-mounted]" in done.stderr and "mounts: [/elsewhere]" in done.stderr
    assert pyxis_site.slurm.run("squeue", "-h").stdout == ""
    assert not pyxis_site.runs.exists()


def test_compiled_code_has_a_place_in_a_read_only_container(pyxis_slurm: Cluster, pyxis_image: PyxisImage) -> None:
    """Triton stops at the first kernel that it cannot keep; the root folder of enroot is read-only by default."""
    mounts = ",".join(f"{path}:{path}" for path in pyxis_image.mounts)
    options = [f"--container-image={pyxis_image.file}", f"--container-mounts={mounts}", "--no-container-mount-home"]
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT / "launchers")!r})
from fp8launch.injob.rank.compat import cache_folders
assert not os.access(os.path.expanduser("~"), os.W_OK) or os.statvfs(os.path.expanduser("~")).f_flag & os.ST_RDONLY
cache_folders.give_triton_a_cache()
os.makedirs(os.environ["TRITON_CACHE_DIR"])
print("in", os.environ["TRITON_CACHE_DIR"])
"""
    done = pyxis_slurm.run("srun", "--container-readonly", *options, sys.executable, "-c", code)
    assert done.stdout.startswith("in /tmp/fp8launch-"), done.stdout


def test_a_job_in_an_image_without_python(pyxis_site: Site, pyxis_image: PyxisImage, tmp_path: Path) -> None:
    """The supervisor runs beside the container, so it says what the container lacks."""
    profile = tmp_path / "shell.yaml"
    profile.write_text(f"runtime: pyxis\nimages: {{tiny: {pyxis_image.file}}}\nmounts: [/usr:/usr]\n")
    inside = sets("container.image=tiny", "launch.python=python4", "checkpoint.dir=ckpt", "survive.attempts=2")
    run = pyxis_site.submit("--cluster", str(profile), *inside, *INTERVAL)
    assert until(lambda: pyxis_site.state(run)["state"] == "failed", 120, 0.5), pyxis_site.state(run)
    assert "command-not-found" in pyxis_site.state(run)["survival"]["stopped"]
    assert "python4" in pyxis_site.json("parse", run)["failure"]["message"]


@pytest.mark.parametrize(
    ("options", "cause"), [("size=16k,nr_inodes=8", "container-disk-full"), ("ro", "container-unwritable")]
)
def test_a_node_whose_disk_for_containers_is_unusable_is_left_out(
    pyxis_site: Site, pyxis_image: PyxisImage, tmp_path: Path, options: str, cause: str
) -> None:
    """A real disk that is full or read-only: enroot cannot unpack the image there."""
    profile = pyxis_image.profile(tmp_path, "run_root: " + str(pyxis_site.runs))
    data = pyxis_site.slurm.root / "local" / "enroot" / "data"
    small = f"mkdir -p {data} && mount -t tmpfs -o {options} tmpfs {data}"
    in_node = ["nsenter", "-t", str(pyxis_site.slurm.node_process(1)), "-m"]
    pyxis_site.slurm.run(*in_node, "sh", "-c", small)
    inside = sets(
        "container.image=tiny", f"launch.python={sys.executable}", "checkpoint.dir=ckpt", "survive.attempts=3"
    )
    run = pyxis_site.submit("--cluster", str(profile), *inside, *INTERVAL, "--nodes", "2")
    log = pyxis_site.runs / run / "attempts.json"
    try:
        assert until(lambda: log.exists() and json.loads(log.read_text())["finished"], 300, 0.5), log.read_text()
    finally:
        pyxis_site.slurm.run(*in_node, "umount", str(data))
    state = json.loads(log.read_text())
    assert [one["cause"] for one in state["attempts"]] == [cause, "finished"]
    assert state["excluded"] == ["node1"]


def test_a_container_has_what_check_says_it_has(pyxis_slurm: Cluster, pyxis_image: PyxisImage, tmp_path: Path) -> None:
    """Links, mounts over mounts and /tmp, as `check/job_paths.py` takes them to be."""
    for name in ("outer/sub", "inner", "away"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "file").write_text(name)
    (tmp_path / "outer" / "link").symlink_to(tmp_path / "away")
    (tmp_path / "outer" / "near").symlink_to("../data/sub")
    outer, inner = f"{tmp_path}/outer:/data", f"{tmp_path}/inner:/data/sub"

    def read(path: str, *mounts: str) -> str:
        texts = [*(f"{place}:{place}" for place in pyxis_image.mounts), *mounts]
        options = [f"--container-image={pyxis_image.file}", f"--container-mounts={','.join(texts)}"]
        return pyxis_slurm.run("srun", *options, "cat", path, check=False).stdout

    def said(path: str, *mounts: str) -> str:
        paths = JobPaths(tuple(mount for text in mounts if (mount := parse_mount(text))), "pyxis")
        here = paths.here(path)
        return here.read_text() if here is not None and here.is_file() else ""

    cases = [
        ("/data/sub/file", (outer, inner), "inner"),
        ("/data/sub/file", (inner, outer), "outer/sub"),
        ("/data/near/file", (outer,), "outer/sub"),
        ("/data/link/file", (outer,), ""),
        ("/data/link/file", (outer, str(tmp_path)), "away"),
        (f"{tmp_path}/away/file", (), ""),
    ]
    for path, mounts, expected in cases:
        assert read(path, *mounts) == said(path, *mounts) == expected, (path, mounts)


@pytest.mark.train
def test_a_container_that_an_earlier_start_left_is_not_in_the_way(
    pyxis_site: Site, pyxis_image: PyxisImage, tmp_path: Path
) -> None:
    """A job that Slurm starts again keeps its number, after which pyxis names containers; a node that went down, or a
    step that was killed, leaves them."""
    saves = tmp_path / "saves"
    saves.mkdir()
    # As on a real node, where enroot is on the PATH of a job too.
    path = f"setup: ['export PATH={pyxis_site.slurm.root}/bin:$PATH']"
    profile = pyxis_image.profile(tmp_path, "run_root: " + str(pyxis_site.runs), "nodelist: node1", path)
    inside = sets(
        "container.image=tiny",
        f"container.mounts=[{saves}:/saves]",
        f"launch.python={sys.executable}",
        "train.iterations=400",
        "checkpoint.dir=/saves/new",
        "checkpoint.interval=20",
        "survive.attempts=3",
    )
    run = pyxis_site.submit("--cluster", str(profile), *inside)
    tracker = saves / "new" / "latest_checkpointed_iteration.txt"
    assert until(tracker.exists, 240, 0.5)
    [job] = pyxis_site.state(run)["jobs"]
    containers = pyxis_site.slurm.root / "disk" / "node1" / "enroot" / "data"
    assert (containers / f"pyxis_{job}.0").is_dir()
    left = [containers / f"pyxis_{job}.{step}" for step in (1, 2, 3)]
    for folder in left:
        (folder / "etc").mkdir(parents=True)
    other = containers / f"pyxis_{job}9.1"
    other.mkdir()
    pyxis_site.slurm.run("scontrol", "requeue", job)
    log = pyxis_site.runs / run / "attempts.json"
    assert until(lambda: json.loads(log.read_text())["finished"], 300, 0.5), log.read_text()
    assert len(json.loads(log.read_text())["attempts"]) == 2
    assert not any(folder.exists() for folder in left)
    assert other.exists()
    said = (pyxis_site.runs / run / "logs" / f"slurm-{job}.out").read_text()
    assert f"removed container pyxis_{job}.1, which was left on node1" in said


@pytest.mark.train
def test_a_step_that_was_killed_leaves_no_container(pyxis_site: Site, pyxis_image: PyxisImage, tmp_path: Path) -> None:
    """A rank is killed; srun ends the other, which cannot save alone and is killed too."""
    path = f"setup: ['export PATH={pyxis_site.slurm.root}/bin:$PATH']"
    profile = pyxis_image.profile(tmp_path, "run_root: " + str(pyxis_site.runs), "nodelist: node1", path)
    saves = tmp_path / "saves"
    saves.mkdir()
    inside = sets(
        "container.image=tiny",
        f"container.mounts=[{saves}:/saves]",
        f"launch.python={sys.executable}",
        "train.iterations=5000",
        "checkpoint.dir=/saves/new",
        "resources.gpus_per_node=2",
    )
    run = pyxis_site.submit("--cluster", str(profile), *inside, *INTERVAL)
    assert until((saves / "new" / "latest_checkpointed_iteration.txt").exists, 240, 0.5)
    [job] = pyxis_site.state(run)["jobs"]
    containers = pyxis_site.slurm.root / "disk" / "node1" / "enroot" / "data"
    assert list(containers.glob(f"pyxis_{job}*"))
    os.kill(Chain(pyxis_site, run).ranks(1)[-1].pid, signal.SIGKILL)
    assert until(lambda: pyxis_site.state(run)["state"] == "failed", 120, 0.5), pyxis_site.state(run)
    assert not list(containers.glob(f"pyxis_{job}*"))
