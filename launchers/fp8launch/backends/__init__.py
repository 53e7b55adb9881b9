"""Backends by name; each is imported when it is asked for."""

from __future__ import annotations

from fp8launch.backends import slurm
from fp8launch.backends.base import Backend
from fp8launch.problems import error

NAMES = ("sbatch", "submitit", "nemo-run", "local")


def backend(name: str | None) -> Backend:
    """The backend called `name`; without a name a Slurm cluster if one answers, else this machine."""
    chosen = name or ("sbatch" if slurm.available() else "local")
    if chosen == "sbatch":
        from fp8launch.backends.sbatch import SbatchBackend

        return SbatchBackend()
    if chosen == "submitit":
        from fp8launch.backends.submitit import SubmititBackend

        return SubmititBackend()
    if chosen == "nemo-run":
        from fp8launch.backends.nemo_run import NemoRunBackend

        return NemoRunBackend()
    if chosen == "local":
        from fp8launch.backends.local import LocalBackend

        return LocalBackend()
    raise error("unknown-backend", f"no backend '{chosen}'", "--backend", f"one of {', '.join(NAMES)}")
