"""Megatron's indexed datasets: the format of their files, and the manifest that `fp8launch data` writes with them."""
