"""Runs of the in-job part as the real processes that a job starts, training a tiny Llama on the CPU."""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from fp8launch.injob.rank import ranks
from fp8launch.megatron.versions import SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
LAUNCHERS = ROOT / "launchers"
CODE = LAUNCHERS / "fp8launch" / "injob" / "rank"
OLDER = ROOT / ".cache" / "megatron"
# Tested releases before the installed one: the oldest in the quick part, those between only in the whole run.
OLDER_RELEASES = tuple(SUPPORTED.values())[:-1]
OLDEST_QUICKLY = [
    pytest.param(one, marks=() if one == OLDER_RELEASES[0] else pytest.mark.slow) for one in OLDER_RELEASES
]

TINY = shlex.split("""
    --num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --seq-length 64 --max-position-embeddings 64 --position-embedding-type rope --swiglu
    --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 10
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2 --clip-grad 1.0 --bf16
    --tokenizer-type NullTokenizer --vocab-size 255 --split 99,1,0 --num-workers 0
    --log-interval 1 --eval-iters 0 --eval-interval 1000 --log-throughput
    --transformer-impl local --use-cpu-initialization --distributed-backend gloo --no-rope-fusion
    --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-persist-layer-norm
""")
MOCK = [*TINY, "--mock-data"]
ITERATION = re.compile(r"iteration +(\d+)/ +\d+ .*?\| lm loss: (\S+) \|")
TIMEOUT = 300


@dataclass(frozen=True)
class Run:
    """What one job left: the exit code and the output of each process that was started."""

    codes: list[int]
    output: str

    @property
    def losses(self) -> dict[int, float]:
        """Loss by iteration, as Megatron printed it."""
        return {int(number): float(loss) for number, loss in ITERATION.findall(self.output)}

    def succeeded(self) -> Run:
        assert set(self.codes) == {0}, f"exit codes {self.codes}:\n{self.output[-4000:]}"
        return self


def job_environment(**extra: str) -> dict[str, str]:
    """What a job's process inherits: nothing of a job, a torchrun or a GPU that the tests themselves may run under."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "MASTER_", "TORCHELASTIC_", "OMP_", "CUDA_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "PYTHONPATH")
    }
    return {**kept, "FP8LAUNCH_DEVICE": "cpu", **extra}


def start(
    script: str, arguments: Sequence[str], python: tuple[str, ...] = (), folder: Path | None = None, **env: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *python, str(CODE / script), *arguments],
        cwd=folder,
        env=job_environment(**env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> Run:
    # All are read at once: one that nobody reads stops when its pipe is full, and the others wait for it.
    try:
        with ThreadPoolExecutor(len(processes)) as readers:
            outputs = list(readers.map(lambda process: process.communicate(timeout=TIMEOUT)[0], processes))
    finally:
        for process in processes:
            process.kill()
    return Run([process.returncode for process in processes], "\n".join(outputs))


def worker(
    argv: Sequence[str],
    own: tuple[str, ...] = (),
    python: tuple[str, ...] = (),
    folder: Path | None = None,
    **env: str,
) -> Run:
    """One process alone."""
    return finish([start("worker.py", [*own, "--", *argv], python, folder, **env)])


def torchrun(processes: int, argv: Sequence[str], folder: Path | None = None, **env: str) -> Run:
    """One node's processes under torchrun."""
    return finish([start("node.py", ["--nproc-per-node", str(processes), "--", *argv], (), folder, **env)])


def srun(processes: int, argv: list[str], **env: str) -> Run:
    """The processes that `srun --ntasks-per-node=N` would start on one node, with its variables."""
    port = str(ranks.free_port())
    return finish(
        [
            start(
                "worker.py",
                ["--", *argv],
                **env,
                SLURM_PROCID=str(task),
                SLURM_LOCALID=str(task),
                SLURM_NTASKS=str(processes),
                SLURM_NTASKS_PER_NODE=str(processes),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            )
            for task in range(processes)
        ]
    )


@functools.cache
def _server(software: str, python_path: str) -> subprocess.Popen[str]:
    """The process that has imported this software, from this path first."""
    command = [sys.executable, str(ROOT / "tests" / "forked_ranks.py"), software]
    env = job_environment(PYTHONPATH=python_path)
    server = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)
    return server


def forked(
    processes: int,
    argv: Sequence[str],
    folder: Path | None = None,
    PYTHONPATH: str = "",
    software: str = "worker",
    program: str = "fp8launch.injob.rank.worker",
    **env: str,
) -> Run:
    """The processes of one node, without each one's imports: for tests of what a job does and not of its start.

    `software` is what they have imported already, as in forked_ranks.py, and `program` the module that they run.
    """
    size, port = str(processes), str(ranks.free_port())
    env |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [{**env, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    server = _server(software, PYTHONPATH)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        place = str(folder or Path.cwd())
        job = {"program": program, "argv": list(argv), "folder": place, "output": output.name, "ranks": each}
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        codes = json.loads(server.stdout.readline())
        return Run(codes, output.read())


def from_weights(folder: Path) -> list[str]:
    return ["--load", str(folder), "--finetune"]
