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
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
# Slurm's formats: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_WALL_TIME = r"^([0-9]{1,9}(:[0-9]{2}){0,2}|[0-9]{1,9}-[0-9]{1,2}(:[0-9]{2}){0,2})$"
# No dots, which separate keys, and no characters that are special in a shell or a file name.
_PHASE = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$"
_RULE_CODE = r"^[a-z0-9]+(-[a-z0-9]+)*$"
_REASON = r"\S"
_EXTRA_FLAG = r"^-{0,2}[A-Za-z][A-Za-z0-9_.-]*$"
_AXIS = r"^[a-z]+(\.[A-Za-z0-9_-]+)+$"
_VERSION = r"^[0-9]+(\.[0-9]+)*([a-z0-9.+-]*)$"
PATTERNS_IN_WORDS = {
    _NAME: "letters, digits, '.', '_' or '-', at most 80, starting with a letter or digit",
    _ENV_NAME: "letters, digits and '_', not starting with a digit",
    _WALL_TIME: "a Slurm time: minutes, HH:MM:SS or D-HH:MM:SS",
    _PHASE: "letters, digits, '_' or '-', at most 40, starting with a letter or digit",
    _RULE_CODE: "the code of a warning, as `fp8launch check` shows it in brackets",
    _REASON: "a reason that is not blank",
    _EXTRA_FLAG: "the name of a flag: letters, digits, '.', '_' or '-'",
    _AXIS: "a section and a key, such as precision.recipe",
    _VERSION: 'a version in quotes, such as "0.19"',
}
Name = Annotated[str, StringConstraints(pattern=_NAME)]
EnvName = Annotated[str, StringConstraints(pattern=_ENV_NAME)]
WallTime = Annotated[str, StringConstraints(pattern=_WALL_TIME)]
AxisKey = Annotated[str, StringConstraints(pattern=_AXIS)]
AxisValue = str | int | float | bool | None
Version = Annotated[str, StringConstraints(pattern=_VERSION)]
RuleCode = Annotated[str, StringConstraints(pattern=_RULE_CODE)]
Reason = Annotated[str, StringConstraints(pattern=_REASON)]
ExtraFlag = Annotated[str, StringConstraints(pattern=_EXTRA_FLAG)]
PhaseName = Annotated[str, StringConstraints(pattern=_PHASE)]
# Keys and values of a section. They are validated after they have been merged into the recipe.
Overrides = dict[str, Any]
StateDtype = Literal["fp32", "fp16", "bf16", "fp8"]
