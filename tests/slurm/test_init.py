"""`init cluster` on the test Slurm: options, questions on a terminal, and a profile that works."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from launching import ROOT, Site

pytestmark = pytest.mark.needs_plugin("init")


def profile_of(site: Site, name: str = "default") -> Path:
    return site.folder / "home" / ".config" / "fp8launch" / "clusters" / f"{name}.yaml"


def test_without_questions_the_proposals_hold(site: Site) -> None:
    done = site.run("init", "cluster")
    assert done.returncode == 0, done.stderr
    assert "Slurm would accept a job of one node" in done.stderr
    profile = yaml.safe_load(profile_of(site).read_text())
    assert {"account": "research", "partition": "main", "qos": "normal"}.items() <= profile.items()
    assert profile["gpus"] == "gpus-per-node"
    assert "4 nodes, 8 x h200 each" in profile["description"]


def test_the_profile_is_what_submit_uses(site: Site) -> None:
    choices = ["--partition", "low", "--qos", "short", "--run-root", str(site.runs), "--runtime", "none"]
    assert site.run("init", "cluster", *choices, "--env", "SITE_NOTE=hello").returncode == 0
    script = site.run("submit", "tiny_cpu", "--dry-run")
    assert script.returncode == 0, script.stderr
    assert "#SBATCH --partition=low" in script.stdout
    assert "#SBATCH --qos=short" in script.stdout
    assert "SITE_NOTE=hello" in script.stdout


def test_a_profile_is_not_replaced_unasked(site: Site) -> None:
    assert site.run("init", "cluster", "mine").returncode == 0
    again = site.run("init", "cluster", "mine", "--partition", "low")
    assert (again.returncode, "already exists" in again.stderr) == (2, True)
    assert yaml.safe_load(profile_of(site, "mine").read_text())["partition"] == "main"
    assert site.run("init", "cluster", "mine", "--partition", "low", "--force").returncode == 0
    assert yaml.safe_load(profile_of(site, "mine").read_text())["partition"] == "low"


def test_wrong_choices_name_the_right_ones(site: Site) -> None:
    choices = (("--partition", "man", "main"), ("--account", "reserch", "research"), ("--gres-type", "h100", "h200"))
    for option, value, near in choices:
        done = site.run("init", "cluster", option, value)
        assert (done.returncode, f"did you mean '{near}'?" in done.stderr) == (2, True)
    forbidden = site.run("init", "cluster", "--qos", "vip")
    assert (forbidden.returncode, "normal, short" in forbidden.stderr) == (2, True)
    assert not profile_of(site).exists()


def test_what_slurm_would_reject_is_said(site: Site) -> None:
    site.slurm.run("scontrol", "update", "PartitionName=low", "MaxNodes=0")
    try:
        done = site.run("init", "cluster", "--partition", "low", "--out", "-")
    finally:
        site.slurm.run("scontrol", "update", "PartitionName=low", "MaxNodes=UNLIMITED")
    assert done.returncode == 1
    assert "Slurm would reject a job of one node with these settings:" in done.stderr


def test_the_questions_on_a_terminal(site: Site) -> None:
    answers = {
        "Partition": "low\n",
        "Account": "\n",
        "QOS": "short\n",
        "Container runtime": "none\n",
        "Folder for run folders": f"{site.runs}\n",
    }
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fp8launch", "init", "cluster", "asked"],
        stdin=side, stdout=side, stderr=side, env={**site.env, "TERM": "dumb"}, cwd=ROOT,
    )  # fmt: skip
    os.close(side)
    shown, answered = "", 0
    while True:
        try:
            block = os.read(main, 4096)
        except OSError:
            break
        if not block:
            break
        shown += block.decode(errors="replace")
        question = shown[answered:].rpartition("\n")[2]
        answer = next((text for start, text in answers.items() if question.startswith(start)), None)
        if answer is not None and question.endswith("]: "):
            answered = len(shown)
            os.write(main, answer.encode())
    os.close(main)
    assert process.wait() == 0, shown
    profile = yaml.safe_load(profile_of(site, "asked").read_text())
    assert profile["partition"] == "low"
    assert profile["qos"] == "short"
    assert profile["account"] == "research"
    assert profile["run_root"] == str(site.runs)
    assert "runtime" not in profile
    assert "debug: 1 node, 8 x h200 each, at most 30 minutes" in shown


def test_the_page_of_a_first_cluster(site: Site, tmp_path: Path) -> None:
    """Every command of docs/first_cluster.md, in order, as a user of the cluster would."""
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "fp8launch").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fp8launch "$@"\n')
    (binaries / "fp8launch").chmod(0o755)
    env = {**site.env, "PATH": f"{binaries}:{site.env['PATH']}"}
    env.pop("FP8LAUNCH_RUNS")
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs/first_cluster.md").read_text(), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) >= 6
    for line in lines:
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"$ {line}\n{done.stdout}{done.stderr}"
    assert "iterations" in done.stdout


def test_options_of_one_submission_reach_slurm(site: Site) -> None:
    run = site.submit("--partition", "low", "--nodelist", "node3", "--time", "7", "--nice", "11", "--slurm", "hold")
    shown = site.slurm.run("scontrol", "--oneliner", "show", "job", site.state(run)["jobs"][0]).stdout
    assert site.run("cancel", run).returncode == 0
    for words in ("Partition=low", "ReqNodeList=node3", "TimeLimit=00:07:00", "Nice=11", "Reason=JobHeldUser"):
        assert words in shown
