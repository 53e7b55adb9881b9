"""What lines mean that a run failed: all patterns, in the order in which a line is matched.

Texts are those of Slurm, PyTorch, Transformer Engine, NCCL, gloo, torchrun, pyxis, enroot, Apptainer, Megatron, and of
the worker (`injob/rank/worker.py`).

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

from fp8launch.injob.supervisor.cause_patterns import CAUSES
from fp8launch.injob.supervisor.failure_pattern import Pattern
from fp8launch.injob.supervisor.symptom_patterns import SYMPTOMS

# The first match gives a line its meaning: a cause before what follows from it.
PATTERNS: tuple[Pattern, ...] = (*CAUSES, *SYMPTOMS)
