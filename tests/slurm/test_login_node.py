"""A laptop that has only ssh: commands run on the login node of the test cluster, through a real sshd."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from cluster.processes import until
from launching import ROOT, Site, sets
from login_node import LoginNode, why_no_sshd

pytestmark = pytest.mark.needs_plugin("ssh")


class Laptop(Site):
    """No Slurm, no runs, another home; `node` is the login node, whose runs are in `runs`."""

    def __init__(self, slurm: Cluster, folder: Path) -> None:
        super().__init__(slurm, folder)
        there = {"PATH": f"{Path(sys.executable).parent}:{slurm.env['PATH']}", "USER": slurm.env["USER"]}
        there |= {"SLURM_CONF": slurm.env["SLURM_CONF"], "FP8LAUNCH_RUNS": str(self.runs), "FP8LAUNCH_OFFLINE": "1"}
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in there.items())
        self.node = LoginNode(folder / "sshd", folder / "there", f"echo Welcome to the machine\n{exports}")
        # What a laptop lacks.
        for name in ("SLURM_CONF", "FP8LAUNCH_RUNS"):
            del self.env[name]
        self.profile = self.node.profile(python=sys.executable)

    def at(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        return self.run("--remote", str(self.profile), *arguments, **env)

    def submit_at(self, *arguments: str, recipe: str = "recipes/tiny_cpu.yaml", **env: str) -> str:
        done = self.at("submit", recipe, *arguments, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[-1]

    def state(self, run: str) -> dict[str, Any]:
        done = self.at("runs", run, "--json")
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)[0]
        return answer

    def program(self, text: str) -> list[str]:
        script = self.folder / "program.py"
        script.write_text(text)
        return sets(f"launch.script={script}")


@pytest.fixture
def laptop(slurm: Cluster, tmp_path: Path) -> Iterator[Laptop]:
    if reason := why_no_sshd():
        pytest.skip(reason)
    laptop = Laptop(slurm, tmp_path)
    yield laptop
    laptop.node.stop()


@pytest.mark.train
def test_a_run_from_submission_to_its_numbers(laptop: Laptop) -> None:
    run = laptop.submit_at("--wait")
    state = laptop.state(run)
    assert (state["state"], state["backend"]) == ("completed", "sbatch")
    assert json.loads(laptop.at("parse", run, "--json").stdout)["status"] == "ok"
    followed = laptop.at("logs", run, "-f")
    assert followed.returncode == 0
    assert "iteration       20/      20" in followed.stdout
    assert (laptop.runs / run / "manifest.json").is_file()
    assert not (laptop.folder / "home" / "fp8launch-runs").exists()


@pytest.mark.parametrize("backend", ["sbatch", pytest.param("submitit", marks=pytest.mark.needs_plugin("submitit"))])
def test_a_failure_and_a_cancellation_come_back(laptop: Laptop, backend: str) -> None:
    failing = laptop.at(
        "submit", "recipes/tiny_cpu.yaml", "--backend", backend, *laptop.program("raise SystemExit(7)"), "--wait"
    )
    assert failing.returncode == 1
    assert laptop.state(failing.stdout.split()[-1])["exit_code"] == 7
    run = laptop.submit_at("--backend", backend, *laptop.program("import time\ntime.sleep(300)"))
    assert laptop.at("cancel", run).returncode == 0
    assert until(lambda: laptop.state(run)["state"] == "cancelled", 30, every=0.5)


def test_values_arrive_byte_for_byte_and_nothing_is_executed(laptop: Laptop) -> None:
    canary = laptop.folder / "canary"
    nasty = f"a b'c\" $(touch {canary}) `touch {canary}`; touch {canary} #\n\\n!! ~ * é"
    program = laptop.program(
        "import json, os, sys\n"
        "cache = sys.argv[sys.argv.index('--data-cache-path') + 1]\n"
        "print('SEEN ' + json.dumps([os.environ.get(n) for n in ('A', 'B', 'HF_TOKEN')] + [cache]), flush=True)\n"
    )
    recipe = laptop.folder / "my recipe.yaml"
    recipe.write_text(
        f"extends: [{ROOT}/recipes/tiny_cpu]\nenv: {{A: {json.dumps(nasty)}}}\nsecrets: [HF_TOKEN]\n"
        f"megatron: {{data_cache_path: {json.dumps(nasty)}}}\n"
    )
    told = ["--set", f"env.B={json.dumps(nasty)}"]
    secret = "hush-hush $(x) 'y\n"
    run = laptop.submit_at(*program, *told, "--wait", recipe=str(recipe), HF_TOKEN=secret)
    log = next((laptop.runs / run / "logs").glob("*-0.log")).read_text()
    seen = json.loads(log[log.index("SEEN ") + 5 :].splitlines()[0])
    assert seen == [nasty, nasty, secret, nasty]
    assert not canary.exists()
    there = [p for folder in (laptop.node.home, laptop.runs) for p in folder.rglob("*") if p.is_file()]
    assert [p for p in there if b"hush-hush" in p.read_bytes() and p.suffix != ".log"] == []


def test_wrong_usage_is_told_before_anything_connects(laptop: Laptop) -> None:
    laptop.node.stop()
    for words in (["submit"], ["subimt"], [], ["submit", "recipes/tiny_cpu.yaml", "--backend", "local"], ["clusters"]):
        assert laptop.at(*words).returncode == 2, words
    assert laptop.at("submit", "--help").returncode == 0
    bad = laptop.folder / "bad.yaml"
    bad.write_text("nmae: x\n")
    done = laptop.at("submit", str(bad))
    assert done.returncode == 2
    assert f"{bad}:1" in done.stderr


def test_a_cluster_behind_a_login_node_is_not_submitted_to_from_here(laptop: Laptop) -> None:
    done = laptop.run("submit", "recipes/tiny_cpu.yaml", "--cluster", str(laptop.profile))
    assert done.returncode == 2
    assert "--remote" in done.stderr


@pytest.mark.parametrize("verb", [["submit", "recipes/tiny_cpu.yaml"], ["runs"]])
def test_a_login_node_that_cannot_be_reached(laptop: Laptop, verb: list[str]) -> None:
    laptop.node.stop()
    done = laptop.at(*verb)
    assert done.returncode == 3
    assert "Connection refused" in done.stderr and "ssh-failed" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("verb", [["submit", "recipes/tiny_cpu.yaml"], ["runs"]])
def test_a_host_key_that_is_not_the_known_one(laptop: Laptop, verb: list[str]) -> None:
    laptop.node.trust("other_key")
    done = laptop.at(*verb)
    assert done.returncode == 3
    assert "Host key verification failed" in done.stderr
    assert not laptop.runs.exists()


def test_a_key_that_the_login_node_does_not_take(laptop: Laptop) -> None:
    (laptop.node.folder / "authorized_keys").write_text((laptop.node.folder / "other_key.pub").read_text())
    done = laptop.at("submit", "recipes/tiny_cpu.yaml")
    assert done.returncode == 3
    assert "Permission denied" in done.stderr and "identity:" in done.stderr


def test_without_fp8launch_there(laptop: Laptop) -> None:
    login = {"host": "login", "config": str(laptop.node.folder / "ssh_config"), "command": "no-such-fp8launch"}
    laptop.profile = laptop.node.profile(ssh=login)
    done = laptop.at("runs")
    assert done.returncode == 3
    assert "pip install ." in done.stderr


def test_a_dropped_connection_ends_the_command_and_not_the_run(laptop: Laptop) -> None:
    go = laptop.folder / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}):\n    time.sleep(0.1)\n"
    run = laptop.submit_at(*laptop.program(f"print('up', flush=True)\n{waits}print('end', flush=True)"))
    command = [sys.executable, "-m", "fp8launch", "--remote", str(laptop.profile), "logs", run, "-f"]
    following = subprocess.Popen(command, env=laptop.env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert following.stdout is not None
    line = b""
    while b"up" not in line:
        line = following.stdout.readline()
        assert line
    assert laptop.node.drop() > 0
    _, complaint = following.communicate(timeout=120)
    assert following.returncode == 3
    assert b"ssh-failed" in complaint and b"Traceback" not in complaint
    go.touch()
    assert until(lambda: laptop.state(run)["state"] == "completed", 60, every=1)
    assert "end" in laptop.at("logs", run).stdout


def test_a_grid_is_submitted_once(laptop: Laptop) -> None:
    grid = ["--sweep", "train.lr=0.001,0.002", "--yes", *laptop.program("pass")]
    study = laptop.submit_at(*grid)
    again = laptop.at("submit", "recipes/tiny_cpu.yaml", *grid)
    assert again.stdout.split()[-1] == study
    assert "0 submitted" in again.stderr and "2 already existed" in again.stderr
