"""Flags and variables that a training process needs on a machine without a GPU. Standard library only."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

# They replace defaults of Megatron that need a GPU: fused kernels, NCCL, Transformer Engine.
FLAGS = (
    ("--transformer-impl", "local"),
    ("--distributed-backend", "gloo"),
    ("--no-rope-fusion", None),
    ("--no-gradient-accumulation-fusion", None),
    ("--no-masked-softmax-fusion", None),
    ("--no-persist-layer-norm", None),
)


def missing_flags(argv: list[str]) -> list[str]:
    """Return the flags that the arguments lack for a CPU; a flag with another value counts as missing."""
    words: list[str] = []
    for argument in argv:
        words += argument.split("=", 1)
    following = dict(pairwise([*words, None]))  # if a flag is repeated, its last value counts
    missing = []
    for flag, value in FLAGS:
        if value is None:
            if flag not in following:
                missing.append(flag)
        elif following.get(flag) != value:
            missing.append(f"{flag} {value}")
    return missing


def cover() -> None:
    """Set the variables, also for processes that Megatron starts afresh (checkpoint writers).

    Python imports `sitecustomize` at the start of every process. Ours waits until the process imports Megatron, so that
    the many helpers that never do cost nothing. An image's own sitecustomize does not run in these processes.
    """
    folder = str(Path(__file__).resolve().with_name("child"))
    path = os.environ.get("PYTHONPATH")
    if folder not in (path or "").split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, path)))
    # One thread per process, as torchrun does: several ranks share this machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # torch.compile would compile Megatron's small fused functions with a C++ compiler that may not be there.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron's validators require it for Hopper GPUs with tensor or context parallelism; it has no effect here.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
