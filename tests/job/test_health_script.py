"""The health check of one node and of many, by real bash; tests/slurm has it on real nodes.

No GPU is needed: `nvidia-smi` answers here as four H200 did (driver 580.159), with one fault at a time.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from fp8launch.resources import in_job_folder

HEALTH = in_job_folder() / "health.sh"
ROOT = Path(__file__).parents[2]
WELL = {
    "memory.used": "0, 0\n1, 0\n2, 0\n3, 0",
    "ecc.errors.uncorrected.volatile.total": "0, 0\n1, 0\n2, 0\n3, 0",
    "remapped": "00000000:00:06.0, No, No\n00000000:00:07.0, No, No",
    "clocks_event_reasons": "0, Not Active, Not Active, Not Active\n1, Not Active, Not Active, Not Active",
    "fabric": "0, Completed, Success\n1, Completed, Success",
    "nvlink": "GPU 0: NVIDIA H200 (UUID: GPU-a)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s",
}
# What this machine has must not decide.
EASY = ("--memory=0", "--shm=0", "--tmp=0")


def programs(folder: Path, **scripts: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        path = folder / name.replace("_", "-")
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    return folder


def nvidia_smi(answers: Mapping[str, str]) -> str:
    """A shell script that answers a query by the first word of `answers` that it holds, else as for an unknown name."""
    cases = "\n".join(f"*{key}*) cat <<'END'\n{text}\nEND\n;;" for key, text in answers.items())
    return f'case "$*" in\n{cases}\n*) echo "Field is not a valid field to query."; exit 2 ;;\nesac'


def look(path: Path | None, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    where = f"{path}:/usr/bin:/bin" if path else "/usr/bin:/bin"
    return subprocess.run(
        ["bash", str(HEALTH), *options],
        env={"PATH": where, "SLURMD_NODENAME": "n1", **env}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_a_node_without_gpus_is_looked_at_and_says_what_was_skipped() -> None:
    done = look(None, *EASY)
    assert (done.returncode, done.stdout) == (0, "n1: ok, skipped: GPUs (no nvidia-smi)\n")


def test_a_well_node_is_one_line(tmp_path: Path) -> None:
    bins = programs(tmp_path / "bin", nvidia_smi=nvidia_smi(WELL), dmesg="echo 'NVRM: Xid (PCI:0000:06:00): 31, pid=1'")
    done = look(bins, *EASY, "--gpus=4")
    assert (done.returncode, done.stdout, done.stderr) == (0, "n1: ok\n", "")


@pytest.mark.parametrize(
    ("key", "answer", "says"),
    [
        ("memory.used", "0, 0\n1, 0\n2, 0", "3 of 4 GPUs"),
        ("memory.used", "0, 0\n1, 71234\n2, 0\n3, 0", "GPU 1: 71234 MiB in use before the job"),
        ("ecc.errors.uncorrected.volatile.total", "0, 0\n1, 0\n2, 3\n3, 0", "GPU 2: 3 uncorrected ECC errors"),
        ("remapped", "00000000:00:06.0, No, No\n00000000:00:07.0, Yes, No", "GPU 00000000:00:07.0: memory rows"),
        ("clocks_event_reasons", "0, Not Active, Not Active, Active", "GPU 0: clocks held down"),
        ("fabric", "0, In Progress, N/A", "GPU 0: NVLink fabric: In Progress"),
        ("nvlink", "GPU 3: NVIDIA H200\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>", "GPU 3: 1 of 2 NVLinks down"),
    ],
)
def test_a_fault_is_reported(tmp_path: Path, key: str, answer: str, says: str) -> None:
    bins = programs(tmp_path / "bin", nvidia_smi=nvidia_smi({**WELL, key: answer}), dmesg="true")
    done = look(bins, *EASY, "--gpus=4")
    assert done.returncode == 1
    assert done.stdout.startswith(f"n1: bad: {says}")
    assert done.stdout.count("\n") == 1 and ";" not in done.stdout


def test_a_gpu_that_fell_off_the_bus_is_reported(tmp_path: Path) -> None:
    log = "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus."
    bins = programs(tmp_path / "bin", nvidia_smi=nvidia_smi(WELL), dmesg=f"echo '{log}'; echo '{log}'")
    done = look(bins, *EASY)
    assert done.stdout == "n1: bad: GPU 0000:06:00: Xid 79 (2 times in the last hour)\n"


def test_older_drivers_skip_what_they_do_not_know(tmp_path: Path) -> None:
    known = {"memory.used": WELL["memory.used"], "clocks_throttle_reasons": WELL["clocks_event_reasons"]}
    bins = programs(tmp_path / "bin", nvidia_smi=nvidia_smi(known), dmesg="exit 1")
    done = look(bins, *EASY, SLURM_GPUS_ON_NODE="4")
    assert done.returncode == 0
    skipped = ("ECC", "remapped rows", "NVLink (none here)", "Xid (kernel log not readable)")
    assert done.stdout == f"n1: ok, skipped: {'; '.join(skipped)}\n"


def test_a_gpu_that_hangs_nvidia_smi_is_reported(tmp_path: Path) -> None:
    bins = programs(tmp_path / "bin", nvidia_smi="exit 124", dmesg="true")
    done = look(bins, *EASY)
    assert (done.returncode, done.stdout) == (1, "n1: bad: nvidia-smi fails: no answer in 10 s\n")


@pytest.mark.parametrize("option", ["--memory=100000", "--shm=100000", "--tmp=10000000"])
def test_a_shortage_is_reported_with_the_requirement(option: str) -> None:
    done = look(None, *(o for o in EASY if o.split("=")[0] != option.split("=")[0]), option)
    assert done.returncode == 1
    assert f"GiB, wants {option.split('=')[1]}" in done.stdout


@pytest.mark.parametrize("option", ["--gpus=x", "--nonsense", "--shm=", "--skew=1.5"])
def test_a_wrong_option_is_refused(option: str) -> None:
    done = look(None, option)
    assert (done.returncode, done.stdout) == (2, "")
    assert option in done.stderr


@pytest.mark.parametrize(
    ("answers", "status", "says"),
    [
        ("$(date +%s.%N) a: ok\n$(date +%s.%N) b: ok, skipped: ECC", 0, "all 2 nodes are healthy, skipped: ECC\n"),
        ("$(date +%s.%N) a: ok\n$(($(date +%s) - 60)).5 b: ok", 1, "b: bad: clock differs"),
        ("$(date +%s.%N) a: ok\n$(($(date +%s) + 60)).5 b: ok", 1, "b: bad: clock differs"),
        ("$(date +%s.%N) a: ok\n$(($(date +%s) - 1)).5 b: ok", 0, "all 2 nodes are healthy"),
        ("$(date +%s.%N) a: ok\nsrun: error: b: cannot start", 1, "b: bad: no answer\nsrun: error: b: cannot start\n"),
        ("$(date +%s.%N) b: bad: 3 of 4 GPUs\n$(date +%s.%N) a: ok", 1, "b: bad: 3 of 4 GPUs\nfp8launch: 1 of 2 nodes"),
    ],
)  # fmt: skip
def test_nodes_are_judged_together(tmp_path: Path, answers: str, status: int, says: str) -> None:
    bins = programs(tmp_path / "bin", srun=f"cat <<END\n{answers}\nEND", scontrol="echo a; echo b")
    done = look(bins, "--all-nodes", SLURM_NNODES="2", SLURM_JOB_NODELIST="[a-b]")
    assert (done.returncode, says in done.stdout) == (status, True), done.stdout + done.stderr


@pytest.mark.parametrize("file", [HEALTH, *(ROOT / "slurm" / f"{n}.sbatch" for n in ("health", "array", "nccl_check"))])
def test_shellcheck_has_nothing_to_say(file: Path, shellcheck: Callable[[str], None]) -> None:
    shellcheck(file.read_text(encoding="utf-8"))
