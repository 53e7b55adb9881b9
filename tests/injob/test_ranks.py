"""Which process am I: from Slurm, from torchrun, alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from train_jobs import CODE, job_environment

from fp8launch.injob.rank import node, ranks

SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_srun_task_gets_torch_names() -> None:
    assert ranks.rank_environment(SRUN) == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
    }


@pytest.mark.parametrize(
    ("counts", "local"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x2)"}, "4"),
        ({"SLURM_TASKS_PER_NODE": "6,2"}, "2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "3,5", "SLURM_TASKS_PER_NODE": "1(x2)"}, "5"),
        ({}, "4"),
    ],
)
def test_local_size_without_ntasks_per_node(counts: dict[str, str], local: str) -> None:
    env = without(SRUN, "SLURM_NTASKS_PER_NODE") | counts
    assert ranks.rank_environment(env)["LOCAL_WORLD_SIZE"] == local


@pytest.mark.parametrize(("text", "counts"), [("8", [8]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2),3", [1, 2, 2, 3])])
def test_compressed_task_counts(text: str, counts: list[int]) -> None:
    assert ranks.tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "x", "2(x", "2,,1", "-1"])
def test_unreadable_task_counts_are_refused(text: str) -> None:
    with pytest.raises(ranks.EnvironmentProblem):
        ranks.tasks_per_node(text)


def test_torchrun_is_left_alone_even_inside_slurm() -> None:
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert ranks.rank_environment(SRUN | torchrun) == {}


def test_a_process_alone_needs_nothing() -> None:
    found = ranks.rank_environment({}, port=lambda: 4242)
    assert found == {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4242",
    }


def test_one_task_of_srun_needs_no_address() -> None:
    one = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "1"}
    assert ranks.rank_environment(one, port=lambda: 4242)["MASTER_PORT"] == "4242"


def test_an_address_that_nobody_knows_is_reported_at_once() -> None:
    said = ranks.unresolved_address({"MASTER_ADDR": "no-such-node.invalid"}, patience=0)
    assert said is not None and "no-such-node.invalid" in said and "/etc/hosts" in said
    assert ranks.unresolved_address({"MASTER_ADDR": "a" * 80}, patience=0) is not None
    assert ranks.unresolved_address({"MASTER_ADDR": "127.0.0.1"}) is None is ranks.unresolved_address({})


def test_a_process_whose_name_is_no_text_is_a_child() -> None:
    """Linux cuts names after 15 bytes, which may be in the middle of a character."""
    code = "open('/proc/self/comm', 'wb').write(b'caf\\xc3'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        assert process.pid in node.children(os.getpid())
        process.communicate(b"\n")


def test_a_port_is_not_chosen_twice_before_it_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two runs that start together pick the same port, the second fails after its imports."""
    reservations: list[socket.socket] = []
    monkeypatch.setattr(ranks, "_reservations", reservations)
    port = ranks.free_port()

    def chosen_elsewhere() -> bool:
        code = f"from fp8launch.injob.rank import ranks as r; r.PORTS = range({port}, {port + 1}); print(r.free_port())"
        command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(CODE.parents[2])}
        return int(subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout) == port

    assert not chosen_elsewhere()
    with socket.create_server(("127.0.0.1", port)):
        for reservation in reservations:
            reservation.close()
        assert not chosen_elsewhere(), "it is in use"
    assert chosen_elsewhere()


@pytest.mark.parametrize(
    ("env", "named"),
    [
        (without(SRUN, "MASTER_ADDR"), "MASTER_ADDR"),
        (without(SRUN, "MASTER_PORT"), "MASTER_PORT"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID"),
        (SRUN | {"SLURM_PROCID": "8"}, "SLURM_PROCID"),
        (SRUN | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a"}, "MASTER_PORT"),
    ],
)
def test_incomplete_environment_names_the_variable(env: dict[str, str], named: str) -> None:
    with pytest.raises(ranks.EnvironmentProblem, match=named):
        ranks.rank_environment(env)


def test_torchrun_arguments_of_the_second_node() -> None:
    arguments = node.launch_arguments(SRUN, 4, CODE / "worker.py", ["--script", "/m/pretrain_gpt.py"], ["--bf16"])
    assert arguments[:6] == [
        "--nnodes=2",
        "--node-rank=1",
        "--nproc-per-node=4",
        "--rdzv-backend=static",
        "--master-addr=node1",
        "--master-port=29500",
    ]
    assert arguments[-5:] == [str(CODE / "worker.py"), "--script", "/m/pretrain_gpt.py", "--", "--bf16"]


def test_one_node_finds_its_own_port() -> None:
    arguments = node.launch_arguments({}, 2, CODE / "worker.py", [], [])
    assert "--nnodes=1" in arguments
    assert "--master-addr=127.0.0.1" in arguments


def test_several_nodes_need_an_address() -> None:
    with pytest.raises(ranks.EnvironmentProblem, match="MASTER_ADDR"):
        node.launch_arguments(without(SRUN, "MASTER_ADDR"), 4, CODE / "worker.py", [], [])


# Chooses a port that another program takes before torchrun binds it, and then a free one.
TAKEN = """
import socket, sys
from fp8launch.injob.rank import node, ranks
taken = socket.create_server(("127.0.0.1", 0))
free = ranks.free_port()
ports = iter([free, taken.getsockname()[1], free])
ranks.free_port = lambda: next(ports)
sys.argv = ["node.py", "--nproc-per-node=2", "--worker", sys.argv[1], "--"]
node.main()
"""


def test_a_port_that_another_program_took_is_chosen_again(megatron: None, tmp_path: Path) -> None:
    # One write: `print` writes a line and its end separately, and the two ranks share the stream.
    (tmp_path / "worker.py").write_text("import sys; sys.stdout.write('trained\\n')")
    done = subprocess.run(
        [sys.executable, "-c", TAKEN, str(tmp_path / "worker.py")],
        env=job_environment(PYTHONPATH=str(CODE.parents[2])),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "choosing another" in done.stderr and done.stdout == "trained\n" * 2


def only_process(program: str, folder: Path, **env: str) -> subprocess.Popen[str]:
    """Start node.py with the program as the only process of its job."""
    (folder / "worker.py").write_text(program)
    return subprocess.Popen(
        [sys.executable, CODE / "node.py", "--nproc-per-node=1", "--worker", folder / "worker.py", "--", "--bf16"],
        env=job_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_only_process_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('not needed')")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    program = f"import os, sys; print(sys.argv[1:], *(os.environ[name] for name in {names}))"
    process = only_process(program, tmp_path, PYTHONPATH=str(tmp_path), RANK="7", WORLD_SIZE="8")
    said, errors = process.communicate(timeout=60)
    assert (said, errors, process.returncode) == ("['--', '--bf16'] 0 1 0 127.0.0.1\n", "", 0)


@pytest.mark.parametrize(
    ("end", "code", "reported"),
    [("sys.exit(3)", 3, "exitcode: 3"), ("os.kill(os.getpid(), 9)", 137, "exitcode: -9")],
)
def test_the_end_of_the_only_process_is_reported(tmp_path: Path, end: str, code: int, reported: str) -> None:
    process = only_process(f"import os, sys; {end}", tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"failed ({reported}) local_rank: 0" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_only_process_may_take_its_time_after_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    program = (
        "import signal, sys, time\n"
        "def save(number, frame):\n    time.sleep(1); print('saved'); sys.exit(0)\n"
        "for number in (signal.SIGTERM, signal.SIGINT): signal.signal(number, save)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(0.1)\n"
    )
    process = only_process(program, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    said, errors = process.communicate(timeout=60)
    assert (said, errors, process.returncode) == ("saved\n", "", 0)
