"""Run a training step of Megatron's and Transformer Engine's own Python code without a GPU."""
