"""The types of recipe fields, with their patterns in plain words for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, StringConstraints

from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import format_names, precision_names

if TYPE_CHECKING:
    GpuName = str
    PrecisionName = str
    FormatName = str
else:
    GpuName = Literal[tuple(GPUS)]
    PrecisionName = Literal[precision_names()]
    FormatName = Literal[format_names()]

# What starts the ranks: the scheduler (srun in Slurm), or one torchrun per node.
LaunchMode = Literal["srun", "torchrun"]
BY_SCHEDULER: LaunchMode = "srun"
FlagValue = str | int | float | bool | list[str | int | float] | None

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveFraction = Annotated[float, Field(gt=0)]
# The codes of injob/supervisor/health_rules.py.
HealthCode = Literal[
    "zero-grad-norm", "constant-grad-norm", "loss-jump", "resume-jump", "loss-flat", "nan", "skipped-steps", "slowdown",
    "slow-node",
]  # fmt: skip
# ACTION_CODES and SLOW_NODE of injob/supervisor/health_rules.py.
ActionCode = Literal["nan", "zero-grad-norm", "loss-jump", "slow-node"]
# What each pattern demands, in plain words.
PATTERNS_IN_WORDS: dict[str, str] = {}


def matching(pattern: str, in_words: str) -> StringConstraints:
    """Constrain a text field to a pattern. `in_words` completes "must be ..." in messages."""
    PATTERNS_IN_WORDS[pattern] = in_words
    return StringConstraints(pattern=pattern)


Name = Annotated[
    str,
    matching(
        r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$",
        "letters, digits, '.', '_' or '-', at most 80, starting with a letter or digit",
    ),
]
# No dots, which separate keys, and no characters that are special in a shell or a file name.
PhaseName = Annotated[
    str,
    matching(
        r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$",
        "letters, digits, '_' or '-', at most 40, starting with a letter or digit",
    ),
]
EnvName = Annotated[str, matching(r"^[A-Za-z_][A-Za-z0-9_]*$", "letters, digits and '_', not starting with a digit")]
# Slurm's formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
WallTime = Annotated[
    str,
    matching(
        r"^([0-9]{1,9}(:[0-9]{2}){0,2}|[0-9]{1,9}-[0-9]{1,2}(:[0-9]{2}){0,2})$",
        "a Slurm time: minutes, HH:MM:SS or D-HH:MM:SS",
    ),
]
AxisKey = Annotated[str, matching(r"^[a-z]+(\.[A-Za-z0-9_-]+)+$", "a section and a key, such as precision.recipe")]
AxisValue = str | int | float | bool | None
Version = Annotated[str, matching(r"^[0-9]+(\.[0-9]+)*([a-z0-9.+-]*)$", 'a version in quotes, such as "0.19"')]
RuleCode = Annotated[
    str, matching(r"^[a-z0-9]+(-[a-z0-9]+)*$", "the code of a warning, as `fp8launch check` shows it in brackets")
]
Reason = Annotated[str, matching(r"\S", "a reason that is not blank")]
ExtraFlag = Annotated[
    str, matching(r"^-{0,2}[A-Za-z][A-Za-z0-9_.-]*$", "the name of a flag: letters, digits, '.', '_' or '-'")
]
# Keys and values of a section. They are validated after they have been merged into the recipe.
Overrides = dict[str, Any]
StateDtype = Literal["fp32", "fp16", "bf16", "fp8"]
