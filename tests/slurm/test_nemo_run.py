"""The nemo-run backend on a real Slurm, with the real NeMo-Run in a separate virtual environment."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Image
from cluster.processes import until
from launching import ROOT, TWO_BY_TWO, Site, from_weights, losses, sets

pytestmark = pytest.mark.needs_plugin("nemo_run")

PYTHON = ROOT / ".cache" / "nemo_run" / "bin" / "python"
INSTALL = f"python -m venv {PYTHON.parents[1].relative_to(ROOT)}, then its pip install -e '.[nemo-run]' (500 MB)"


@functools.cache
def missing() -> str | None:
    if not PYTHON.exists():
        return f"needs NeMo-Run: {INSTALL}"
    done = subprocess.run(
        [PYTHON, "-c", "import nemo_run, fp8launch"], capture_output=True, text=True, cwd="/", check=False
    )
    return f"NeMo-Run cannot be imported: {done.stderr.strip().splitlines()[-1]}" if done.returncode else None


class NemoSite(Site):
    """`submit` goes through NeMo-Run with a profile of this site; the processes run in the Python of the tests."""

    def profile(self, **entries: Any) -> list[str]:
        file = self.folder / "site.yaml"
        file.write_text(json.dumps({"account": "root", "python": sys.executable, **entries}))
        return ["--cluster", str(file)]

    def submit(self, *arguments: str, recipe: str = "recipes/tiny_cpu.yaml", expect: int = 0) -> str:
        cluster = [] if "--cluster" in arguments else self.profile()
        return super().submit("--backend", "nemo-run", *cluster, *arguments, recipe=recipe, expect=expect)

    def job(self, run: str) -> str:
        return str(json.loads((self.runs / run / "manifest.json").read_text())["jobs"][0]["id"])

    def program(self, text: str) -> list[str]:
        """Choices that run this Python text in place of the training."""
        script = self.folder / "program.py"
        script.write_text(text)
        return sets(f"launch.script={script}")

    def field(self, job: str, name: str) -> str:
        shown = self.slurm.run("scontrol", "show", "job", job).stdout.split()
        return next(word for word in shown if word.startswith(f"{name}=")).partition("=")[2]


@pytest.fixture
def site(slurm: Cluster, tmp_path: Path) -> NemoSite:
    if reason := missing():
        pytest.skip(reason)
    return NemoSite(slurm, tmp_path, PYTHON)


@pytest.mark.train
@pytest.mark.slow
def test_two_nodes_train_as_one_process(site: NemoSite, weights: Path, one_process: dict[int, float]) -> None:
    run = site.submit(*sets("parallel.tp=2"), *TWO_BY_TWO, *from_weights(weights), "--wait")
    report = site.json("parse", run)
    assert (report["status"], report["iterations"], report["world_size"]) == ("ok", 20, 4)
    there = losses(site.log(run))
    assert there.keys() == one_process.keys()
    for iteration, loss in one_process.items():
        assert there[iteration] == pytest.approx(loss, rel=0.005), f"iteration {iteration}"
    state = site.state(run)
    assert (state["state"], state["backend"]) == ("completed", "nemo-run")


@pytest.mark.train
def test_training_in_a_charliecloud_container(site: NemoSite, image: Image) -> None:
    profile = site.profile(
        runtime="charliecloud", images={"tiny": str(image.folder)}, mounts=[str(path) for path in image.mounts]
    )
    inside = sets("container.image=tiny", f"launch.python={sys.executable}")
    run = site.submit(*profile, "--wait", *TWO_BY_TWO, *inside)
    assert site.json("parse", run)["status"] == "ok"


def test_nothing_but_the_run_on_stdout(site: NemoSite) -> None:
    done = site.run(
        "submit", "recipes/tiny_cpu.yaml", "--backend", "nemo-run", *site.profile(), *site.program("pass"), "--wait"
    )
    assert done.returncode == 0, done.stderr
    assert [path.name for path in site.runs.iterdir()] == done.stdout.split()


def test_a_failing_job_keeps_its_exit_status(site: NemoSite) -> None:
    run = site.submit(*site.program("import sys\nprint('about to fail', flush=True)\nsys.exit(7)"), "--wait", expect=1)
    job = site.job(run)
    site.slurm.wait_state(job, "FAILED")
    assert site.slurm.run("sacct", "-X", "-n", "-P", "-o", "State,ExitCode", "-j", job).stdout.strip() == "FAILED|7:0"
    state = site.state(run)
    assert (state["state"], state["exit_code"], state["attempts"]) == ("failed", 7, 1)
    assert "about to fail" in site.run("logs", run).stdout


def test_cancel_ends_the_job(site: NemoSite) -> None:
    run = site.submit(*site.program("import time\ntime.sleep(300)"), *TWO_BY_TWO)
    site.slurm.wait_state(site.job(run), "RUNNING")
    assert site.run("cancel", run).returncode == 0
    site.slurm.wait_state(site.job(run), "CANCELLED")
    assert site.state(run)["state"] == "cancelled"


def test_values_arrive_byte_for_byte_and_secrets_stay_off_the_disk(site: NemoSite) -> None:
    """A run root with a space, a variable in lower case, and values that a shell would run."""
    canary = site.folder / "canary"
    nasty = f"a b'c\" $(touch {canary}) `touch {canary}`; touch {canary} #\n\\n,%j é"
    program = site.program(
        "import json, os, sys\n"
        "cache = sys.argv[sys.argv.index('--data-cache-path') + 1]\n"
        "names = ('NASTY', 'nasty_too', 'HF_TOKEN')\n"
        "print('SEEN ' + json.dumps([cache, *(os.environ.get(name) for name in names)]), flush=True)\n"
    )
    recipe = site.folder / "nasty.yaml"
    quoted = json.dumps(nasty)
    recipe.write_text(
        f"extends: [{ROOT}/recipes/tiny_cpu]\nenv: {{NASTY: {quoted}, nasty_too: {quoted}}}\nsecrets: [HF_TOKEN]\n"
        f"megatron: {{data_cache_path: {quoted}}}\n"
    )
    root = site.folder / "runs of mine"
    choices = ["--backend", "nemo-run", *site.profile(), *program, "--run-root", str(root), "--wait"]
    done = site.run("submit", str(recipe), *choices, HF_TOKEN="hush-hush")
    assert done.returncode == 0, done.stderr
    log = site.run("logs", done.stdout.split()[-1]).stdout
    seen = json.loads(log[log.index("SEEN ") + 5 :].splitlines()[0])
    assert seen == [nasty, nasty, nasty, "hush-hush"]
    assert not canary.exists()

    training = next(root.glob("*/logs/*-0.log"))
    files = [p for p in site.folder.rglob("*") if p.is_file() and p != training]
    assert any("nemo_run" in str(path) for path in files) and any(p.name.startswith("slurm-") for p in files)
    holders = [path for path in files if b"hush-hush" in path.read_bytes()]
    assert holders == []
    # NeMo-Run's own files and its printed script hold no value at all.
    private = [p for p in files if "nemo_run" in str(p) or p.name.startswith("slurm-")]
    assert [p for p in private if b"touch" in p.read_bytes()] == []


def test_a_requeued_job_begins_another_log(site: NemoSite) -> None:
    run = site.submit(
        *site.program(
            "import os, time\n"
            "again = os.environ.get('SLURM_RESTART_COUNT', '0')\n"
            "print('attempt', again, flush=True)\n"
            "time.sleep(0 if again == '1' else 300)\n"
        )
    )
    job = site.job(run)
    first, second = (site.runs / run / "logs" / f"{job}-{n}.log" for n in (0, 1))
    assert until(lambda: first.exists() and "attempt 0" in first.read_text(), 60, every=0.2)
    site.slurm.run("scontrol", "requeue", job)
    site.slurm.wait_state(job, "COMPLETED", timeout=180)
    assert "attempt 0" in first.read_text() and "attempt 1" in second.read_text()
    assert (site.state(run)["state"], site.state(run)["attempts"]) == ("completed", 2)


@pytest.mark.parametrize(("wish", "found"), [(False, "0"), (True, "1")])
def test_whether_a_job_is_requeued_is_the_profiles_word(site: NemoSite, wish: bool, found: str) -> None:
    run = site.submit(
        *site.profile(requeue=wish), *site.program("import time\nprint('up', flush=True)\ntime.sleep(99)")
    )
    assert until(
        lambda: any("up" in log.read_text() for log in (site.runs / run / "logs").glob("*-0.log")), 60, every=0.2
    )
    assert site.field(site.job(run), "Requeue") == found


def test_the_processes_see_what_plain_sbatch_shows_them(site: NemoSite) -> None:
    """No variable of NeMo-Run's script reaches the training, and none changes."""
    seen = []
    for backend in ("nemo-run", "submitit"):
        # In a file: srun --label breaks long lines.
        file = site.folder / f"{backend}.json"
        program = site.program(
            f"import json, os, sys\njson.dump([sys.stdout.isatty(), dict(os.environ)], open({str(file)!r}, 'w'))\n"
        )
        done = site.run("submit", "recipes/tiny_cpu.yaml", "--backend", backend, *site.profile(), *program, "--wait")
        assert done.returncode == 0, done.stderr
        seen.append(json.loads(file.read_text()))
    (terminal, here), (_, there) = seen
    assert terminal is False
    # What differs from job to job (folders among it: submitit starts in its own), and what submitit itself sets.
    own = ("SLURM_", "SUBMITIT_", "MASTER_PORT", "PWD", "OLDPWD", "PYTHONPATH", "SHLVL", "_")
    different = {name for name in here.keys() | there.keys() if here.get(name) != there.get(name)}
    assert {name for name in different if not name.startswith(own)} == set()
    assert "SLURM_UNBUFFEREDIO" not in here


def test_nemo_run_itself_knows_the_run(site: NemoSite) -> None:
    run = site.submit(*site.program("print('from the training', flush=True)"), "--wait")
    experiment = json.loads((site.runs / run / "manifest.json").read_text())["nemo_run"]["experiment"]

    def nemo(*arguments: str) -> str:
        command = [str(PYTHON.with_name("nemo")), "experiment", *arguments]
        done = subprocess.run(command, env=site.env, capture_output=True, text=True, timeout=180, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    assert site.job(run) in nemo("status", experiment)
    assert "from the training" in nemo("logs", experiment, "0")


def test_a_refusal_is_reported_in_slurms_words(site: NemoSite) -> None:
    """What only Slurm finds, when the check is over."""
    program = site.folder / "refused.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\n"
        "from fp8launch.plugins.nemo_run.scheduler import NemoRunScheduler\n"
        "from fp8launch.job.job import Job, Resources\n"
        "from fp8launch.diagnostics import UserError\nfrom fp8launch.rundir.run_dir import create_run_folder\n"
        "resources = Resources(account='root', queue='nonesuch')\n"
        "run = create_run_folder(Path(sys.argv[1]), 'r-1', {'job.sbatch': '#!/bin/bash\\n'}, {'jobs': []})\n"
        "job = Job('r', '', str(run.path), resources, 1, 'srun', 'python3')\n"
        "try:\n    NemoRunScheduler().submit(job, run, run.run_id)\n"
        "except UserError as exc:\n    print(exc.exit_code, *exc.problems)\n"
    )
    done = subprocess.run(
        [PYTHON, program, site.runs], env=site.env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.stdout.startswith("3 "), done.stderr
    assert "invalid partition specified: nonesuch" in done.stdout
    assert "sinfo" in done.stdout
    assert site.slurm.run("squeue", "-h").stdout == ""


def test_an_answer_that_was_lost_costs_no_second_job(site: NemoSite) -> None:
    """sbatch submits, and then says that the controller did not answer in time; the site replaces comments."""
    wrapper = site.folder / "bin" / "sbatch"
    wrapper.parent.mkdir()
    real = shutil.which("sbatch", path=site.env["PATH"])
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = --requeue ] || exec {real} "$@"\n'
        f'scontrol update JobId="$({real} "$@")" Comment=site\n'
        'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2\nexit 1\n'
    )
    wrapper.chmod(0o755)
    site.env["PATH"] = f"{wrapper.parent}:{site.env['PATH']}"
    run = site.submit(*site.program("pass"), "--wait")
    assert site.state(run)["state"] == "completed"
    assert site.slurm.run("squeue", "-h", "-t", "all", "-o", "%i").stdout.split().count(site.job(run)) == 1


@pytest.mark.slow
def test_a_grid_that_was_killed_is_completed_by_the_same_command(site: NemoSite) -> None:
    program = site.program("pass")
    grid = [*sets("resources.gpus_per_node=2"), "--nodes", "1,2", "--sweep", "train.lr=0.001,0.002,0.003", "--yes"]
    command = ["submit", "recipes/tiny_cpu.yaml", "--backend", "nemo-run", *site.profile(), *grid, *program]
    # The third sbatch never answers, so that two runs have a job when the launcher is killed.
    wrapper = site.folder / "bin" / "sbatch"
    wrapper.parent.mkdir()
    real = shutil.which("sbatch", path=site.env["PATH"])
    wrapper.write_text(
        '#!/bin/sh\ncase "$*" in *--parsable*|*.sh) ;; *) exec REAL "$@";; esac\n'
        'echo >>"$0.calls"\n[ $(wc -l <"$0.calls") -lt 3 ] || { : >"$0.stuck"; exec sleep 600; }\n'
        'exec REAL "$@"\n'.replace("REAL", str(real))
    )
    wrapper.chmod(0o755)
    env = site.env | {"PATH": f"{wrapper.parent}:{site.env['PATH']}"}
    killed = subprocess.Popen([PYTHON, "-m", "fp8launch", *command], env=env, cwd=ROOT, start_new_session=True)
    assert until(Path(f"{wrapper}.stuck").exists, 60, every=0.2)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()

    def jobs_of_runs() -> list[str]:
        """The runs of this test that have a job: Slurm shows, and forgets meanwhile, jobs of other tests as well."""
        # os.walk and not rglob: folders that are being made vanish under it.
        mine = {Path(folder).name for folder, _, files in os.walk(site.runs) if "manifest.json" in files}
        comments = site.slurm.run("squeue", "-h", "-t", "all", "-o", "%k").stdout.split()
        # A job carries its run's name and which submission of it this is.
        names = [re.sub(r"\.s\d+-[0-9a-f]+$", "", word.removeprefix("fp8launch:")) for word in comments]
        return sorted(name for name in names if name in mine)

    assert len(jobs_of_runs()) == 2
    done = site.run(*command)
    assert done.returncode == 0, done.stderr
    assert "4 submitted" in done.stderr and "2 already existed" in done.stderr
    again = site.run(*command)
    assert "0 submitted" in again.stderr and "6 already existed" in again.stderr
    mine = sorted(manifest.parent.name for manifest in site.runs.rglob("manifest.json"))
    assert len(mine) == 6
    assert jobs_of_runs() == mine
