"""The cluster is a real Slurm with separate nodes, breaks and recovers on command, and leaves nothing behind."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, ClusterError, Image, Settings
from cluster.config import ACCOUNT, FORBIDDEN_QOS, SHORT_QOS
from cluster.image import NAME
from cluster.nodes import ETC_HOSTS
from cluster.processes import Process, until

HERE = Path(__file__).parent


def finished(slurm: Cluster, job: str, timeout: float = 20) -> list[str]:
    """State and exit code of each run of a job, from sacct, which hears of a job's end a little later than squeue."""
    done: list[str] = []

    def ended() -> bool:
        done[:] = slurm.history(job, "state,exitcode")
        return bool(done) and not done[-1].startswith(("RUNNING", "PENDING", "REQUEUED"))

    assert until(ended, timeout, every=0.2), f"sacct says {done}"
    return done


def test_tasks_run_on_four_nodes_with_names_and_addresses_of_their_own(slurm: Cluster) -> None:
    script = 'echo "$(hostname) $(getent hosts "$(hostname)" | cut -d" " -f1)"'
    lines = slurm.run("srun", "-N4", "--ntasks-per-node=2", "sh", "-c", script).stdout.split("\n")[:-1]
    if not slurm.site.namespaces:
        pytest.skip("this machine lets nobody make namespaces: the nodes share its name")
    expected = [f"node{n} {slurm.site.node_address(n)}" for n in (1, 2, 3, 4)]
    assert sorted(lines) == sorted(2 * expected)


def test_every_name_in_the_node_list_resolves_on_every_node(slurm: Cluster) -> None:
    script = 'for name in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do getent hosts "$name" || exit 1; done'
    out = slurm.run("srun", "-N4", "sh", "-c", script).stdout
    assert len(out.splitlines()) == 16


def test_gpus_are_handed_out_one_set_per_task(slurm: Cluster) -> None:
    out = slurm.run("srun", "-N1", "-n8", "--gpus-per-task=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout
    assert sorted(out.split()) == [str(gpu) for gpu in range(8)]
    assert slurm.run("srun", "--gres=gpu:3", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout == "0,1,2\n"


def test_pmix_ranks(slurm: Cluster) -> None:
    kinds = slurm.run("srun", "--mpi=list")  # on stdout or stderr, by version
    if "pmix" not in kinds.stdout + kinds.stderr:
        pytest.skip("this Slurm has no PMIx plugin")
    out = slurm.run("srun", "-N2", "-n2", "--mpi=pmix", "sh", "-c", "echo $PMIX_RANK").stdout
    assert sorted(out.split()) == ["0", "1"]


def test_sacct_knows_the_exit_code_and_the_account(slurm: Cluster) -> None:
    job = slurm.run("sbatch", "--parsable", "--wrap", "exit 3", cwd=slurm.root).stdout.strip()
    assert finished(slurm, job) == ["FAILED|3:0"]
    owner = [f"{slurm.site.user}|{ACCOUNT}|normal"]  # the QOS of a fresh job is Unknown at first
    assert until(lambda: slurm.history(job, "user,account,qos") == owner, 10, every=0.2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--account=nobody"], "Invalid account"),
        ([f"--qos={FORBIDDEN_QOS}"], "Invalid qos"),
        ([f"--qos={SHORT_QOS}", "--time=20"], "QOSMaxWallDurationPerJobLimit"),
        (["--partition=nowhere"], "invalid partition specified: nowhere"),
        (["--gres=gpu:9"], "Requested node configuration is not available"),
    ],
)
def test_what_a_site_would_refuse_is_refused(slurm: Cluster, flags: list[str], message: str) -> None:
    refused = slurm.run("sbatch", *flags, "--wrap", "true", check=False)
    assert refused.returncode != 0
    assert message in refused.stderr


def test_cancel(slurm: Cluster) -> None:
    job = slurm.run("sbatch", "--parsable", "-N2", "--wrap", "srun sleep 100").stdout.strip()
    slurm.wait_state(job, "RUNNING")
    slurm.run("scancel", job)
    slurm.wait_state(job, "CANCELLED")
    assert finished(slurm, job)[-1].startswith(f"CANCELLED by {os.getuid()}|")


@pytest.mark.drill
def test_a_job_runs_on_through_the_death_of_both_daemons(slurm: Cluster, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = slurm.run("sbatch", "--parsable", "--wrap", f"until [ -e {go} ]; do sleep 0.1; done").stdout.strip()
    slurm.wait_state(job, "RUNNING")
    slurm.settle()
    slurm.stop_controller()
    slurm.stop_dbd()
    assert slurm.run("squeue", check=False, timeout=180).returncode != 0
    slurm.start_dbd()
    slurm.start_controller()
    slurm.wait_state(job, "RUNNING")
    go.touch()
    slurm.wait_state(job, "COMPLETED")
    assert finished(slurm, job) == ["COMPLETED|0:0"]


def test_a_container_has_its_own_root_and_our_python_on_two_nodes(slurm: Cluster, image: Image) -> None:
    code = "import os, sys; print(open('/etc/os-release').read().strip(), os.uname().nodename, sys.prefix)"
    names = ["node1", "node2"] if slurm.site.namespaces else 2 * [slurm.site.host]
    expected = [f'NAME="{NAME}" {name} {sys.prefix}' for name in names]
    # Two ch-run that start at once on a host fail if both have to make the folder to mount on.
    Path(f"/var/tmp/{getpass.getuser()}.ch/mnt").mkdir(parents=True, exist_ok=True)
    for root in (image.folder, image.squash()):
        argv = ["ch-run", *image.binds, str(root), "--", sys.executable, "-c", code]
        assert sorted(slurm.run("srun", "-w", "node[1-2]", *argv).stdout.splitlines()) == expected


@pytest.mark.drill
def test_a_power_cut_is_noticed_and_the_node_comes_back(slurm: Cluster) -> None:
    # The batch script outlives its step, whose srun may notice first that a node is gone: the job would be FAILED.
    steps = "srun sleep 100; sleep 100"
    job = slurm.run("sbatch", "--parsable", "-w", "node[1-2]", "--no-requeue", "--wrap", steps).stdout.strip()
    slurm.wait_state(job, "RUNNING")
    slurm.kill_node(2)
    assert slurm.processes("node2") == []
    slurm.wait_state(job, "NODE_FAIL", timeout=180)
    assert finished(slurm, job)[-1].startswith("NODE_FAIL|")
    assert slurm.node_state(2) == "down*"
    slurm.start_node(2)
    assert slurm.run("srun", "-w", "node2", "echo", "back").stdout == "back\n"


@pytest.mark.drill
def test_a_higher_partition_takes_the_nodes_and_the_lower_job_is_requeued(slurm: Cluster) -> None:
    low = slurm.run("sbatch", "--parsable", "-p", "low", "-N4", "--exclusive", "--wrap", "sleep 100").stdout.strip()
    slurm.wait_state(low, "RUNNING")
    high = slurm.run("sbatch", "--parsable", "-p", "high", "-N4", "--exclusive", "--wrap", "sleep 3").stdout.strip()
    slurm.wait_state(high, "COMPLETED")
    slurm.wait_state(low, "RUNNING")
    assert slurm.history(low) == ["PREEMPTED", "RUNNING"]


@pytest.mark.parametrize("shared", [False, True], ids=["own namespaces", "shared namespaces"])
def test_down_leaves_nothing(slurm: Cluster, shared: bool) -> None:
    hosts = ETC_HOSTS.read_text()
    with Cluster.up(Settings(nodes=2, gpus=0, accounting=False, shared=shared)) as second:
        job = second.run("sbatch", "--parsable", "-N2", "--wrap", "srun sleep 100").stdout.strip()
        second.wait_state(job, "RUNNING")
        assert until(lambda: any(_argv(process) == ["sleep", "100"] for process in second.processes()), 10)
        left = second.processes()
    assert [process for process in left if process.alive] == []
    assert not second.root.exists()
    assert second.site.bridge not in _links()
    assert ETC_HOSTS.read_text() == hosts
    assert slurm.run("srun", "-N4", "true").returncode == 0  # the first one never noticed


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_cluster_goes_with_the_process_that_started_it(slurm: Cluster, number: signal.Signals) -> None:
    code = (
        f"import sys, time; sys.path.insert(0, {str(HERE)!r})\n"
        "from cluster import Cluster, Settings\n"
        "print(Cluster.up(Settings(nodes=1, accounting=False)).root, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=slurm.env) as owner:
        assert owner.stdout is not None
        orphan = Cluster.at(Path(owner.stdout.readline().strip()))
        left = orphan.processes()
        owner.send_signal(number)
    assert len(left) > 3
    assert until(lambda: not orphan.root.exists(), 10)
    assert until(lambda: not any(process.alive for process in left), 5)
    assert orphan.site.bridge not in _links()


def test_problems_are_told_in_words(slurm: Cluster, tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="nodes must be 1 to 64, not 0"):
        Cluster.up(Settings(nodes=0))
    with pytest.raises(ClusterError, match="already runs in"):
        Cluster.up(root=slurm.root)
    with pytest.raises(ClusterError, match="there is no cluster in"):
        Cluster.at(tmp_path)
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ClusterError, match="holds something that is no cluster"):
        Cluster.up(root=tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def _argv(process: Process) -> list[str]:
    try:
        argv = Path(f"/proc/{process.pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []
    return [Path(argv[0]).name, *argv[1:]] if argv else []


def _links() -> list[str]:
    """The names of network devices; one may begin with another: fp8slurm1, fp8slurm186."""
    lines = subprocess.run(["ip", "-br", "link"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line.split()[0] for line in lines]
