"""Submission to Slurm by NeMo-Run."""
