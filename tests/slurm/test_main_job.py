"""The main job on a real Slurm: recipes submitted by both backends, trained by the real Megatron on two nodes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cluster import Image
from launching import ROOT, TWO_BY_TWO, Site, from_weights, losses, sets

pytestmark = pytest.mark.train
SUBMITIT = pytest.mark.needs_plugin("submitit")


@pytest.mark.parametrize(
    ("backend", "split", "mode"),
    [
        ("sbatch", "parallel.tp=2", "srun"),
        pytest.param("submitit", "parallel.pp=2", "torchrun", marks=SUBMITIT),
    ],
)
def test_two_nodes_train_as_one_process(
    site: Site, weights: Path, one_process: dict[int, float], backend: str, split: str, mode: str
) -> None:
    choices = ["--backend", backend, "--set", split, "--set", f"launch.mode={mode}", *TWO_BY_TWO]
    run = site.submit(*choices, *from_weights(weights), "--wait")

    report = site.json("parse", run)
    assert report["status"] == "ok"
    assert report["iterations"] == 20
    assert report["world_size"] == 4
    assert report["loss_last"] < report["loss_first"] - 0.3
    assert report["tokens_per_s_per_gpu"]["median"] > 0
    there = losses(site.log(run))
    assert there.keys() == one_process.keys()
    # bf16 keeps 8 bits: sums in another order differ in the third digit, and training carries that along.
    for iteration, loss in one_process.items():
        assert there[iteration] == pytest.approx(loss, rel=0.005), f"iteration {iteration}"
    state = site.state(run)
    assert state["state"] == "completed" and state["source"] in ("squeue", "sacct")
    hosts = site.slurm.run("sacct", "-X", "-n", "-P", "-o", "NNodes,State", "-j", state["jobs"][0]).stdout.strip()
    assert hosts == "2|COMPLETED"


def test_cancel_ends_the_job_and_says_so(site: Site) -> None:
    run = site.submit("--backend", "sbatch", "--set", "train.iterations=100000", *TWO_BY_TWO)
    job = site.state(run)["jobs"][0]
    site.slurm.wait_state(job, "RUNNING")

    assert site.run("cancel", run).returncode == 0
    site.slurm.wait_state(job, "CANCELLED")
    assert site.state(run)["state"] == "cancelled"
    assert "has already ended" in site.run("cancel", run).stderr


@pytest.mark.parametrize("backend", ["sbatch", pytest.param("submitit", marks=SUBMITIT)])
def test_a_failing_job_keeps_its_exit_status(site: Site, backend: str) -> None:
    script = site.folder / "fails.py"
    script.write_text("import sys\nprint('about to fail', flush=True)\nsys.exit(7)\n")
    run = site.submit("--backend", backend, "--set", f"launch.script={script}", "--wait", expect=1)
    site.slurm.wait_state(site.state(run)["jobs"][0], "FAILED")
    sacct = site.slurm.run("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", site.state(run)["jobs"][0])
    assert sacct.stdout.strip() == "FAILED|7:0"
    state = site.state(run)
    assert (state["state"], state["detail"].split(":")[0]) == ("failed", "FAILED")
    assert "about to fail" in site.run("logs", run).stdout


def test_a_training_error_is_reported_as_failed(site: Site) -> None:
    """What Megatron itself refuses, by a script that the check does not see through."""
    script = site.folder / "stubborn.py"
    script.write_text(
        "import sys\n"
        "sys.argv += ['--min-lr', '1.0']\n"
        "from megatron.training.arguments import parse_args, validate_args\n"
        "validate_args(parse_args())\n"
    )
    run = site.submit("--backend", "sbatch", "--wait", *sets(f"launch.script={script}"), expect=1)
    report = site.json("parse", run)
    assert report["status"] == "failed"
    assert report["failure"]["code"] == "bad-arguments"
    assert site.run("parse", run).returncode == 1


@pytest.mark.slow
def test_a_time_limit_is_reported(site: Site) -> None:
    script = site.folder / "waits.py"
    script.write_text("import time\ntime.sleep(600)\n")
    run = site.submit("--backend", "sbatch", *sets(f"launch.script={script}", "resources.time=1"))
    job = site.state(run)["jobs"][0]
    site.slurm.wait_state(job, "TIMEOUT", timeout=150)
    assert site.state(run)["state"] == "timeout"


@pytest.mark.parametrize("backend", ["sbatch", pytest.param("submitit", marks=SUBMITIT)])
def test_a_missing_partition_never_reaches_slurm(site: Site, backend: str) -> None:
    profile = site.folder / "site.yaml"
    profile.write_text("partition: nonesuch\n")
    done = site.run("submit", "recipes/tiny_cpu.yaml", "--backend", backend, "--cluster", str(profile))
    assert done.returncode == 1
    assert "nonesuch" in done.stderr
    assert "main, debug, low, high" in done.stderr
    assert site.slurm.run("squeue", "-h").stdout == ""


@pytest.mark.parametrize("backend", ["sbatch", pytest.param("submitit", marks=SUBMITIT)])
def test_a_refusal_is_reported_in_slurms_words(site: Site, backend: str) -> None:
    """The check cannot know everything: here an option that sbatch alone understands."""
    profile = site.folder / "site.yaml"
    profile.write_text("options: {licenses: nonesuch}\n")
    done = site.run("submit", "recipes/tiny_cpu.yaml", "--backend", backend, "--cluster", str(profile))
    assert done.returncode in (1, 3)
    assert "license" in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert site.slurm.run("squeue", "-h").stdout == ""


def test_the_shipped_script_runs_by_plain_sbatch(site: Site) -> None:
    done = site.slurm.run(
        "sbatch",
        "--parsable",
        f"--output={site.folder}/%x-%j.out",
        str(ROOT / "slurm/tiny_cpu.sbatch"),
        env={"FP8LAUNCH_PYTHON": sys.executable, "FP8LAUNCH_RUNS": str(site.runs), "FP8LAUNCH_HOME": str(ROOT)},
    )
    job = done.stdout.strip()
    site.slurm.wait_state(job, "COMPLETED", timeout=180)
    log = site.runs / f"tiny_cpu-{job}" / "logs" / f"{job}-0.log"
    report = json.loads(site.run("parse", str(log), "--json").stdout)
    assert (report["status"], report["iterations"]) == ("ok", 20)


@pytest.mark.parametrize("backend", ["sbatch", pytest.param("submitit", marks=SUBMITIT)])
def test_values_reach_the_processes_byte_for_byte(site: Site, backend: str) -> None:
    """Through sbatch, the script and srun; nothing of them is executed."""
    canary = site.folder / "canary"
    nasty = f"a b'c\" $(touch {canary}) `touch {canary}`; touch {canary} #\n\\n,%j é"
    script = site.folder / "show.py"
    script.write_text(
        "import json, os, sys\n"
        "cache = sys.argv[sys.argv.index('--data-cache-path') + 1]\n"
        "print('SEEN ' + json.dumps([os.environ['NASTY'], cache, os.environ.get('HF_TOKEN')]), flush=True)\n"
    )
    recipe = site.folder / "nasty.yaml"
    quoted = json.dumps(nasty)
    recipe.write_text(
        f"extends: [{ROOT}/recipes/tiny_cpu]\nenv: {{NASTY: {quoted}}}\nsecrets: [HF_TOKEN]\n"
        f"launch: {{script: {script}}}\nmegatron: {{data_cache_path: {quoted}}}\n"
    )
    done = site.run("submit", str(recipe), "--backend", backend, "--wait", HF_TOKEN="hush-hush")
    assert done.returncode == 0, done.stderr
    run = done.stdout.split()[-1]
    log = site.run("logs", run).stdout
    seen = json.loads(log[log.index("SEEN ") + 5 :].splitlines()[0])
    assert seen == [nasty, nasty, "hush-hush"]
    assert not canary.exists()
    written = b"".join(p.read_bytes() for p in (site.runs / run).rglob("*") if p.is_file() and p.parent.name != "logs")
    assert b"hush-hush" not in written


def test_a_job_inside_a_job_inherits_no_slurm_variables(site: Site) -> None:
    script = site.folder / "show.py"
    script.write_text("import os\nprint('TASKS', os.environ['SLURM_NTASKS'], os.environ['WORLD_SIZE'], flush=True)\n")
    leftovers = {
        "SLURM_NTASKS": "64",
        "SBATCH_PARTITION": "nonesuch",
        "SLURM_JOB_ID": "999",
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "RANK": "7",
    }
    choices = ["--backend", "sbatch", "--wait", *sets(f"launch.script={script}")]
    done = site.run("submit", "recipes/tiny_cpu.yaml", *choices, **leftovers)
    assert done.returncode == 0, done.stderr
    assert "TASKS 1 1" in site.run("logs", done.stdout.split()[-1]).stdout


@pytest.mark.parametrize("mode", ["srun", "torchrun"])
def test_training_in_a_charliecloud_container(site: Site, image: Image, mode: str) -> None:
    profile = site.folder / "site.yaml"
    mounts = ", ".join(str(path) for path in image.mounts)
    profile.write_text(f"runtime: charliecloud\nimages: {{tiny: {image.folder}}}\nmounts: [{mounts}]\n")
    inside = sets("container.image=tiny", f"launch.python={sys.executable}", f"launch.mode={mode}")
    run = site.submit("--cluster", str(profile), "--wait", *TWO_BY_TWO, *inside)
    assert site.json("parse", run)["status"] == "ok"
    manifest = json.loads((site.runs / run / "manifest.json").read_text())
    assert manifest["runtime"] == "charliecloud"


@pytest.mark.train
def test_checkpoints_of_a_container_are_on_the_host(site: Site, image: Image) -> None:
    """At the place that the supervisor looks at, under whichever name the container has it."""
    saves = site.folder / "saves"
    saves.mkdir()
    profile = site.folder / "site.yaml"
    mounts = ", ".join([*map(str, image.mounts), f"{saves}:/mnt"])
    profile.write_text(f"runtime: charliecloud\nimages: {{tiny: {image.folder}}}\nmounts: [{mounts}]\n")
    inside = sets("container.image=tiny", f"launch.python={sys.executable}", "checkpoint.interval=10")
    run = site.submit(
        "--cluster", str(profile), "--wait", *inside, *sets("checkpoint.dir=/mnt/z", "survive.attempts=2")
    )
    assert (saves / "z" / "latest_checkpointed_iteration.txt").read_text().strip() == "20"
    assert json.loads((site.runs / run / "survive.json").read_text())["checkpoint"] == f"{saves}/z"
    lost = site.run(
        "submit", "recipes/tiny_cpu.yaml", "--cluster", str(profile), *inside, *sets("checkpoint.dir=/gone/z")
    )
    assert lost.returncode == 1
    assert "[path-not-mounted]" in lost.stderr


def test_state_survives_a_silent_controller_and_missing_accounting(site: Site) -> None:
    run = site.submit("--backend", "sbatch", "--wait")
    site.slurm.stop_controller()
    site.slurm.stop_dbd()
    state = site.state(run)
    assert (state["state"], state["source"]) == ("completed", "run folder")


def test_logs_follow_to_the_end(site: Site) -> None:
    run = site.submit("--backend", "sbatch")
    done = site.run("logs", run, "-f")
    assert done.returncode == 0
    assert "iteration       20/      20" in done.stdout
    assert "completed" in done.stderr
