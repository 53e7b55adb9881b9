"""`check` asks a real Slurm what it has against a job, explains it, and submits nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster as Slurm
from cluster.config import ACCOUNT, FORBIDDEN_QOS, SHORT_QOS

from fp8launch.check.checker import check
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.job.build_job import UNPLACED, plan
from fp8launch.job.prepared import prepare
from fp8launch.schedulers.slurm import preflight as checks
from fp8launch.schedulers.slurm.inventory import Silent, Site, read_site

ROOT = Path(__file__).parents[2]
# A recipe for the GPUs of the test cluster, of a size that any of its nodes can run.
RECIPE = "llama8b_4layers_fp8_h200x1"
Look = Callable[..., list[Problem]]


@pytest.fixture
def look(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Look]:
    """What the cluster has against a recipe with overrides, under a profile; and that asking submitted nothing."""
    monkeypatch.setenv("SLURM_CONF", str(slurm.site.slurm_conf))
    monkeypatch.setenv("PATH", slurm.env["PATH"])
    read_site.cache_clear()
    before = jobs(slurm)

    def ask(*overrides: str, **profile: Any) -> list[Problem]:
        prepared = prepare(RECIPE, overrides)
        cluster = Cluster.model_validate(profile)
        job = plan(prepared, cluster, UNPLACED, runtime="pyxis", check_paths=False)
        return list(checks.problems(job, prepared.loaded, os.environ))

    yield ask
    read_site.cache_clear()
    if slurm.run("scontrol", "ping", check=False).returncode == 0:
        assert jobs(slurm) <= before  # it forgets the oldest meanwhile


def jobs(slurm: Slurm) -> set[str]:
    """Every job that the controller remembers."""
    return set(slurm.run("squeue", "-h", "-t", "all", "-o", "%i").stdout.split())


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def test_a_job_that_fits_is_no_problem(look: Look) -> None:
    assert look() == []
    assert look("resources.nodes=4", "resources.gpus_per_node=8", "batch.global=32", partition="main") == []
    assert look("resources.time=30", partition="debug", gres_type="h200", account=ACCOUNT) == []
    assert look(gpus="gres", gres_type="h200") == []


def test_a_partition_that_is_none(look: Look) -> None:
    problem = only(look(partition="mian"))
    assert (problem.code, problem.severity) == ("slurm-partition", "error")
    assert problem.fix == "did you mean 'main'?"
    assert "debug, low, high" in problem.message


def test_one_of_several_partitions_is_enough(look: Look) -> None:
    assert look("resources.time=60", partition="debug,main") == []
    # What does not exist is told, however much the others have.
    assert only(look("resources.time=60", partition="main,nonesuch")).code == "slurm-partition"


def test_more_nodes_than_the_partition_has(look: Look) -> None:
    problem = only(look("resources.nodes=2", "batch.global=8", partition="debug"))
    assert (problem.code, problem.severity) == ("slurm-nodes", "error")
    assert "2 nodes, but partition debug has 1" in problem.message
    assert only(look("resources.nodes=9", "batch.global=36")).fix == "use --nodes 4 or less"


def test_a_time_limit_that_slurm_takes_and_never_starts(look: Look, slurm: Slurm) -> None:
    problem = only(look("resources.time=01:00:00", partition="debug"))
    assert (problem.code, problem.severity) == ("slurm-time-limit", "error")
    assert "after 00:30:00" in problem.message
    # Slurm itself says nothing, and would let the job wait for ever.
    assert slurm.run("sbatch", "--test-only", "-p", "debug", "-t", "60", "--wrap", "true", check=False).returncode == 0


def test_more_gpus_than_a_node_has(look: Look) -> None:
    problem = only(look("resources.gpus_per_node=9", "batch.global=36"))
    assert (problem.code, problem.severity) == ("slurm-gpus", "error")
    assert "1 x 9 GPUs" in problem.message and "have 8" in problem.message
    assert problem.fix == "set resources.gpus_per_node to 8 or less"
    assert only(look("resources.gpus_per_node=9", "batch.global=36", gpus="gres")).code == "slurm-gpus"


def test_gpus_of_another_type(look: Look) -> None:
    problem = only(look(gres_type="h100"))
    assert (problem.code, problem.where) == ("slurm-gpus", "cluster profile: gres_type")
    assert problem.fix == "set `gres_type: h200` in the cluster profile"


def test_a_recipe_for_another_gpu_is_a_warning(look: Look) -> None:
    problem = only(look("resources.gpu=h100"))
    assert (problem.code, problem.severity) == ("slurm-gpu-model", "warning")


@pytest.mark.parametrize(
    ("profile", "code", "says"),
    [
        ({"account": "nobody"}, "slurm-account", f"your accounts: {ACCOUNT}"),
        ({"qos": FORBIDDEN_QOS}, "slurm-qos", f"you may use: normal, {SHORT_QOS}"),
        ({"qos": "nonesuch"}, "slurm-qos", "nonesuch"),
        ({"constraint": "rack1&fast"}, "slurm-constraint", "'fast'"),
        ({"nodelist": "elsewhere"}, "slurm-refuses", "node name"),
        ({"reservation": "mine"}, "slurm-refuses", "reservation"),
        ({"memory": "9999G"}, "slurm-refuses", "not available"),
        ({"options": {"no-such-option": "1"}}, "slurm-refuses", "unrecognized option"),
    ],
)
def test_what_a_user_may_not_have(look: Look, profile: dict[str, Any], code: str, says: str) -> None:
    problems = look(**profile)
    assert {(p.code, p.severity) for p in problems} == {(code, "error")}
    assert any(says in p.message for p in problems)
    assert all(p.fix for p in problems)


def test_too_few_nodes_are_left(look: Look, slurm: Slurm) -> None:
    nodes = slurm.run("sinfo", "-h", "-N", "-o", "%N").stdout.split()
    problem = only(look(exclude=",".join(sorted(set(nodes)))))
    assert problem.code == "slurm-refuses" and "not available" in problem.message
    assert problem.fix and problem.fix.startswith("leave the job more nodes in `exclude:`")


def test_a_qos_with_a_limit_of_its_own(look: Look) -> None:
    problem = only(look("resources.time=20", qos=SHORT_QOS))
    assert problem.code == "slurm-refuses" and "QOSMaxWallDurationPerJobLimit" in problem.message


def test_a_qos_that_lifts_the_limit_of_the_partition(look: Look, slurm: Slurm) -> None:
    try:
        slurm.run(
            "sacctmgr", "-i", "modify", "qos", SHORT_QOS, "set", "Flags=DenyOnLimit,PartitionTimeLimit", "MaxWall=90"
        )
        assert look("resources.time=60", partition="debug", qos=SHORT_QOS) == []
    finally:
        slurm.run("sacctmgr", "-i", "modify", "qos", SHORT_QOS, "set", "Flags=DenyOnLimit", "MaxWall=10")


def test_nodes_that_are_drained_are_a_warning(look: Look, slurm: Slurm) -> None:
    slurm.run("scontrol", "update", "NodeName=node[3-4]", "State=DRAIN", "Reason=test")
    try:
        problem = only(look("resources.nodes=3", "batch.global=12"))
        assert (problem.code, problem.severity) == ("slurm-nodes-down", "warning")
        assert "2 of the 4" in problem.message and "node3 drained" in problem.message
        assert look("resources.nodes=2", "batch.global=8") == []
    finally:
        slurm.run("scontrol", "update", "NodeName=node[3-4]", "State=RESUME")


def test_a_job_for_drained_nodes_waits_and_is_not_refused(slurm: Slurm) -> None:
    """Why that is no error, although `--test-only` refuses."""
    slurm.run("scontrol", "update", "NodeName=node[3-4]", "State=DRAIN", "Reason=test")
    try:
        assert slurm.run("sbatch", "--test-only", "-N3", "--wrap", "true", check=False).returncode != 0
        job = slurm.run("sbatch", "--parsable", "-N3", "--wrap", "true", cwd=slurm.root).stdout.strip()
        slurm.wait_state(job, "PENDING")
        slurm.run("scancel", job)
    finally:
        slurm.run("scontrol", "update", "NodeName=node[3-4]", "State=RESUME")


def test_a_partition_that_is_switched_off(look: Look, slurm: Slurm) -> None:
    try:
        for state, code, severity in (
            ("INACTIVE", "slurm-partition", "error"),
            ("DOWN", "slurm-partition-down", "warning"),
        ):
            slurm.run("scontrol", "update", "PartitionName=low", f"State={state}")
            read_site.cache_clear()
            problem = only(look(partition="low"))
            assert (problem.code, problem.severity) == (code, severity)
    finally:
        slurm.run("scontrol", "update", "PartitionName=low", "State=UP")


def test_a_controller_that_is_gone_is_one_warning(look: Look, slurm: Slurm) -> None:
    slurm.stop_controller()
    problem = only(look(partition="nonesuch"))
    assert (problem.code, problem.severity) == ("slurm-silent", "warning")


@pytest.mark.parametrize(
    ("closed", "opened", "fields", "words"),
    [
        ("AllowAccounts=other", "AllowAccounts=ALL", {}, f"closed to account {ACCOUNT}"),
        (f"DenyAccounts={ACCOUNT}", "DenyAccounts=", {"account": ACCOUNT}, f"closed to account {ACCOUNT}"),
        ("AllowQos=vip", "AllowQos=ALL", {}, "closed to QOS normal"),
        ("AllowQos=vip", "AllowQos=ALL", {"qos": SHORT_QOS}, f"closed to QOS {SHORT_QOS}"),
        (f"AllowAccounts={ACCOUNT}", "AllowAccounts=ALL", {}, None),
        (f"AllowQos=vip,{SHORT_QOS}", "AllowQos=ALL", {"qos": SHORT_QOS}, None),
    ],
)
def test_a_partition_that_is_closed_to_the_user(
    look: Look, slurm: Slurm, closed: str, opened: str, fields: dict[str, str], words: str | None
) -> None:
    """sbatch accepts such a job, which then waits forever."""
    slurm.run("scontrol", "update", "PartitionName=high", closed)
    try:
        found = look("resources.time=5", partition="high", **fields)
        elsewhere = look("resources.time=5", partition="main,high", **fields)
    finally:
        slurm.run("scontrol", "update", "PartitionName=high", opened)
    assert elsewhere == []
    if words is None:
        assert found == []
    else:
        problem = only(found)
        assert (problem.code, problem.severity) == ("slurm-partition-closed", "warning")
        assert words in problem.message


def test_an_empty_slurm_conf_counts_as_unset(slurm: Slurm, tmp_path: Path) -> None:
    """Every command of Slurm would look for a file of that name for a minute."""
    env = {**slurm.env, "HOME": str(tmp_path), "FP8LAUNCH_RUNS": str(tmp_path / "runs"), "SLURM_CONF": ""}
    for words in (["submit", "tiny_cpu", "--backend", "sbatch", "--dry-run"], ["doctor"]):
        command = [sys.executable, "-m", "fp8launch", *words]
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert "did not answer" not in done.stdout + done.stderr
        assert "slurm-silent" not in done.stderr


def test_a_slurm_conf_that_is_gone_costs_no_minute(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    problem = only(look())
    assert problem.code == "slurm-silent" and "/nowhere/slurm.conf" in problem.message


def test_without_accounting_words_the_refusal_is_still_told(look: Look, slurm: Slurm) -> None:
    slurm.stop_dbd()
    problem = only(look(account="nobody"))
    assert (problem.code, problem.message) == ("slurm-account", "you cannot use account 'nobody'")


def test_the_cluster_is_read_once(look: Look) -> None:
    assert isinstance(read_site(os.environ["SLURM_CONF"]), Site)
    look()
    assert read_site.cache_info().misses == 1


def test_the_whole_layer_on_the_cluster(look: Look, slurm: Slurm, tmp_path: Path) -> None:
    """Files, machine and Slurm together, each thing told once."""
    prepared = prepare(RECIPE, ["resources.nodes=9", "batch.global=36", f"checkpoint.load={tmp_path}/gone"])
    profile = Cluster(run_root=str(tmp_path), partition="main", shared_folders=[str(tmp_path)])
    result = check(prepared, profile, layers=("machine",))
    assert [p.code for p in result.problems] == ["checkpoint-missing", "slurm-nodes"]
    assert list(tmp_path.iterdir()) == []


def doctor(slurm: Slurm, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**slurm.env, "HOME": str(home), "FP8LAUNCH_RUNS": str(home / "runs")}
    command = [sys.executable, "-m", "fp8launch", "doctor", *arguments]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.needs_plugin("doctor")
def test_doctor_on_a_cluster(slurm: Slurm, tmp_path: Path) -> None:
    done = doctor(slurm, tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    found = {f["what"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["Slurm"]["state"] == "ok" and found["Slurm"]["found"][0].isdigit()
    assert found["accounting"]["state"] == "ok"
    assert found["partition main"]["found"] == "up (default), 4 of 4 nodes in service, 8 x h200"


@pytest.mark.needs_plugin("doctor")
def test_doctor_without_a_controller(slurm: Slurm, tmp_path: Path) -> None:
    slurm.stop_controller()
    done = doctor(slurm, tmp_path, "--json")
    found = {f["what"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["Slurm"]["state"] == "missing"
    assert "Traceback" not in done.stderr


def test_a_silent_cluster_has_words(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm.stop_controller()
    monkeypatch.setenv("SLURM_CONF", str(slurm.site.slurm_conf))
    read_site.cache_clear()
    answer = read_site(str(slurm.site.slurm_conf))
    read_site.cache_clear()
    assert isinstance(answer, Silent) and answer.words
