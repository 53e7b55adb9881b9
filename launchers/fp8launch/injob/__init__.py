"""The part of fp8launch that runs inside the job, copied into every run folder as `code/fp8launch/injob`.

Nothing here imports the rest of fp8launch: a job's image has torch and Megatron but not this package, a login node has
this package but not torch.

`rank` runs in the container, one process per GPU. Everything else runs on the compute node's own Python, outside the
image, where nothing is installed: it uses the standard library of Python 3.7 and its syntax.
"""
