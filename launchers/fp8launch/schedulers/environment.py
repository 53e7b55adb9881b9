"""The environment of a submission: this shell's, without the variables of a surrounding job."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping

from fp8launch.injob.local_job import AGENT, LOCAL_KEY, LOCAL_RUN, START
from fp8launch.job.reserved_env import OF_A_RANK

# A job submitted from inside another job, or from a rank, must not inherit its size, binding and rendezvous.
_OF_A_JOB = re.compile(r"(SLURM|SLURMD|SBATCH|SALLOC|SRUN|PMI|PMIX|OMPI|TORCHELASTIC|SUBMITIT)(_.*)?")
# Variables that mark processes of a run on this machine. Jobs submitted from such a process must not inherit them.
_OF_A_RUN = {LOCAL_RUN, LOCAL_KEY, AGENT, START, *OF_A_RANK, "MASTER_ADDR", "MASTER_PORT"}
# The user chooses which cluster to talk to; these are not left over from a job.
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS"}


def clean_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an environment (default: this process's) without the variables that belong to a surrounding job.

    An empty SLURM_CONF counts as unset: every Slurm command would wait a minute for a file with an empty name.
    """
    source = os.environ if environment is None else environment
    kept = {}
    for name, value in source.items():
        if name in _KEPT or not (name in _OF_A_RUN or _OF_A_JOB.fullmatch(name)):
            kept[name] = value
    if kept.get("SLURM_CONF") == "":
        del kept["SLURM_CONF"]
    return kept


@contextlib.contextmanager
def cleaned_process_environment() -> Iterator[None]:
    """Take a surrounding job's variables out of this process, for libraries that call sbatch with its environment."""
    before = dict(os.environ)
    clean = clean_environment()
    for name in set(before) - set(clean):
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
