"""Submission to Slurm by submitit."""
