"""Text to Megatron's indexed datasets: build, inspect, split and blend them.

    sources (files) -> Shard -> documents -> token ids -> PREFIX.bin, PREFIX.idx, PREFIX.manifest.json

Everything beyond Python's standard library (numpy, tokenizers, pyarrow ...) is imported where it is used: the extra
`fp8launch[data]` has it, and a login node that only checks recipes does not need it.
"""
