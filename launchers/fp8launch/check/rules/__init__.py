"""The rules: what Megatron, Transformer Engine or the GPU would only say, or not even say, once the job runs.

One module a subject. Megatron's places are those of megatron-core 0.19.2, Transformer Engine's those of 2.18 to 2.20.
"""
