"""Megatron-Bridge: the index of its performance recipes, and the throughput that NVIDIA publishes for them."""
