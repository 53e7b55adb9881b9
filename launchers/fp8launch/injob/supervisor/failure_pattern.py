"""A kind of line that says that a run failed: its meaning, how deep a cause it is, and the texts that it is known by.

Standard library only, on any Python from 3.7: this also runs on a compute node's own Python, outside the image.
"""

from __future__ import annotations

from fp8launch.injob.supervisor.line_pattern import LinePattern

# Depth. A dead rank makes all others fail too: NCCL and gloo report a lost peer, torchrun a dead child, srun an exit
# code. So the cause is the earliest line of the lowest depth. VAGUE only says that something ended badly.
CAUSE, EXCEPTION, PEER, END, VAGUE = range(5)

# Slurm ends a step in the same words whether somebody cancelled it or srun ended it for a process that failed.
STEP_CANCELLED = "step-cancelled"

KILLED_ADVICE = "killed from outside, most often by the kernel because the node's memory ran out"
CONTAINER_ADVICE = "the container could not start: check the image name and the mounts"
VERSION_ADVICE = (
    "two packages do not fit each other, or your code does not fit one of them: use the versions of one image, mount "
    "no packages over it, and compare `software` of the recipe with `fp8launch images`"
)


class Pattern:
    """Lines of one meaning: any of the alternatives."""

    def __init__(self, depth: int, code: str, advice: str, *alternatives: str) -> None:
        self.depth, self.code, self.advice = depth, code, advice
        self.alternatives = list(map(LinePattern, alternatives))

    def matches(self, line: str) -> bool:
        """Whether any of the alternatives occurs in the line."""
        return any(alternative.matches(line) for alternative in self.alternatives)
