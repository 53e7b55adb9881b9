"""Launch FP8 pre-training with Megatron-Core on Slurm clusters."""

__version__ = "0.1.0"
