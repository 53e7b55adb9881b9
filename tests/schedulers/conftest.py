"""Run folders and stand-ins for Slurm's commands (`tests/fake_slurm.py`)."""

from fake_slurm import a_job, a_run, fake_slurm

__all__ = ["a_job", "a_run", "fake_slurm"]
