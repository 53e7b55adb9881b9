"""The sections of a recipe: one frozen model each, every field in the field's own units.

A section sets only the Megatron flags that it states: what is left out keeps Megatron's default.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from fp8launch.problems import nearest

PRECISION_RECIPES = ("bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4")

FlagValue = str | int | float | bool | list[str | int | float] | None

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,79}$"
_ENV_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
# Slurm's own forms: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:minutes[:seconds]].
_WALL_TIME = r"^([0-9]{1,9}(:[0-9]{2}){0,2}|[0-9]{1,9}-[0-9]{1,2}(:[0-9]{2}){0,2})$"
# Never the dot of a dotted key, and plain in a shell and a file's name.
_PHASE = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$"
_RULE_CODE = r"^[a-z0-9]+(-[a-z0-9]+)*$"
_REASON = r"\S"
_AXIS = r"^[a-z]+(\.[A-Za-z0-9_-]+)+$"
_VERSION = r"^[0-9]+(\.[0-9]+)*([a-z0-9.+-]*)$"
PATTERNS_IN_WORDS = {
    _NAME: "letters, digits, '.', '_' or '-', at most 80, starting with a letter or digit",
    _ENV_NAME: "letters, digits and '_', not starting with a digit",
    _WALL_TIME: "a Slurm time: minutes, HH:MM:SS or D-HH:MM:SS",
    _PHASE: "letters, digits, '_' or '-', at most 40, starting with a letter or digit",
    _RULE_CODE: "the code of a warning, as `fp8launch check` shows it in brackets",
    _REASON: "a reason in words",
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
PhaseName = Annotated[str, StringConstraints(pattern=_PHASE)]
# A section's keys and values; checked with the rest of the section, once they are laid on the recipe's own.
Overrides = dict[str, Any]
StateDtype = Literal["fp32", "fp16", "bf16", "fp8"]
Gpu = Literal["a100", "h100", "h200", "b200", "b300", "gb200", "gb300", "cpu"]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Bf16Layers(Section):
    """How many transformer layers at the start and at the end stay in bf16."""

    start: NotNegative = 1
    end: NotNegative = 1


class Precision(Section):
    recipe: Literal["bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"]
    format: Literal["e4m3", "hybrid", "e2m1"] | None = None
    param_gather: bool = False
    bf16_layers: Bf16Layers | None = None
    amax_history: Positive | None = None
    amax_algo: Literal["max", "most_recent"] | None = None

    @property
    def quantized(self) -> bool:
        """FP8 or FP4 is asked for."""
        return self.recipe != "bf16"

    @model_validator(mode="after")
    def _format_belongs(self) -> Precision:
        # Megatron reads a format without a recipe as `delayed`, and a recipe without a format as bf16.
        allowed = {"bf16": (None,), "nvfp4": ("e2m1",)}.get(self.recipe, ("e4m3", "hybrid"))
        if self.format not in allowed:
            names = " or ".join(str(a) for a in allowed if a)
            need = f"needs `format: {names}`" if names else "takes no `format`"
            raise ValueError(f"precision recipe {self.recipe} {need}, not {self.format or 'nothing'}")
        if not self.quantized and (self.param_gather or self.bf16_layers):
            raise ValueError("precision recipe bf16 has no use for `param_gather` or `bf16_layers`")
        return self


class Parallel(Section):
    """Sizes of tensor, pipeline, virtual pipeline, context, expert and expert tensor parallelism. DP is derived."""

    tp: Positive | None = None
    pp: Positive | None = None
    vp: Positive | None = None
    cp: Positive | None = None
    ep: Positive | None = None
    etp: Positive | None = None
    sequence: bool | Literal["auto"] | None = None
    fsdp: Literal["none", "megatron", "megatron_optim", "megatron_optim_grads", "torch_fsdp2"] | None = None


class Batch(Section):
    """Sequences per micro batch and per step; tokens per sequence."""

    micro: Positive | None = None
    global_: Positive | None = Field(default=None, alias="global")
    sequence: Positive | None = None
    scaling: Literal["weak", "strong"] = "weak"


class Train(Section):
    iterations: Positive | None = None
    lr: Annotated[float, Field(ge=0)] | None = None
    min_lr: Annotated[float, Field(ge=0)] | None = None
    warmup: NotNegative | None = None


class Optimizer(Section):
    """Storage types of TE's precision-aware Adam, which any of them switches on; type of the gradient reduce."""

    grad_reduce: Literal["fp32", "bf16"] | None = None
    exp_avg: StateDtype | None = None
    exp_avg_sq: StateDtype | None = None
    main_grads: Literal["fp32", "bf16"] | None = None
    main_params: Literal["fp32", "fp16"] | None = None


class Tokenizer(Section):
    type: str = "NullTokenizer"
    model: str | None = None


class Data(Section):
    kind: Literal["mock", "indexed"]
    blend: list[str | float | int] | None = None
    split: str | None = None
    tokenizer: Tokenizer | None = None
    cache: str | None = None

    @model_validator(mode="after")
    def _indexed_has_blend(self) -> Data:
        if (self.kind == "indexed") != bool(self.blend):
            raise ValueError("data kind indexed needs `blend: [path, ...]`, and only indexed takes it")
        return self


class Checkpoint(Section):
    """`dir` and `load` are absolute, or relative to the run folder. Jobs of Slurm let `keep` whole checkpoints stay."""

    dir: str | None = None
    interval: Positive | None = None
    load: str | None = None
    keep: Positive | None = None


class Survive(Section):
    """How a run with checkpoints goes on by itself.

    `attempts` that count may be used, `stuck` of them in a row without a newer checkpoint. The training saves and
    leaves `stop_before` seconds before the time limit. A log that has not grown for `hang_after` seconds is a hang; 0
    for never. `rules` change what follows a cause (docs/survival.md).
    """

    attempts: Positive = 1
    stuck: Positive = 2
    stop_before: Positive = 120
    hang_after: NotNegative | None = None
    rules: dict[RuleCode, Literal["go-on", "free", "exclude", "stop"]] = {}


class Resources(Section):
    nodes: Positive = 1
    gpus_per_node: Positive = 8
    gpu: Gpu = "h100"
    time: WallTime = "01:00:00"
    cpus_per_task: Positive | None = None

    @field_validator("time", mode="before")
    @classmethod
    def _minutes(cls, value: object) -> object:
        return str(value) if isinstance(value, int) and not isinstance(value, bool) else value

    @property
    def world_size(self) -> int:
        """Processes of the run: one for each GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def hours(self) -> float:
        """The time limit in hours, from any of Slurm's forms."""
        days, dash, rest = self.time.rpartition("-")
        parts = [int(part) for part in rest.split(":")]
        if dash:
            hours, minutes, seconds = [*parts, 0, 0][:3]
        elif len(parts) == 3:
            hours, minutes, seconds = parts
        else:
            hours, (minutes, seconds) = 0, [*parts, 0][:2]
        return int(days or 0) * 24 + hours + minutes / 60 + seconds / 3600

    @property
    def gpu_hours(self) -> float:
        """What one attempt can cost at most: its GPUs for the whole time limit."""
        return 0.0 if self.gpu == "cpu" else self.world_size * self.hours


class Container(Section):
    image: str | None = None
    mounts: list[str] = []


class Launch(Section):
    """How processes start: one task per GPU by `srun`, or one `torchrun` per node; and what they run.

    With `health_check`, every node is looked at before training starts, and a bad one ends the job.
    `probe` says after the first iteration what ran under FP8; `profile_iteration` is profiled on rank 0, by kernel.
    Every `tensor_stats` iterations Transformer Engine measures FP8's underflow, scales and largest values.
    `config` sets fields of Megatron's TransformerConfig that its command line leaves out (our own entry only).
    """

    mode: Literal["srun", "torchrun"] | None = None
    script: str | None = None
    python: str | None = None
    health_check: bool | None = None
    probe: bool = True
    profile_iteration: Positive | None = None
    tensor_stats: Positive | None = None
    config: dict[str, bool | int | float | str] = {}

    @property
    def environment(self) -> dict[str, str]:
        """The variable that brings `config` to train/pretrain.py."""
        return {"FP8LAUNCH_CONFIG": json.dumps(self.config)} if self.config else {}


class Software(Section):
    """What the job will find: picks the flag schema and the validators."""

    megatron: Version | None = None
    transformer_engine: Version | None = None
    cuda: Version | None = None


class Phase(Section):
    """A stretch of the training with values of its own, laid on those of the recipe (docs/survival.md).

    One phase may leave `iterations` out and gets what the others leave of `train.iterations`.
    """

    iterations: Positive | None = None
    precision: Overrides | None = None
    parallel: Overrides | None = None
    batch: Overrides | None = None
    train: Overrides | None = None
    optimizer: Overrides | None = None
    data: Overrides | None = None
    env: Overrides | None = None
    megatron: Overrides | None = None


class Reference(Section):
    """A published figure for this model, precision and layout, for a report to print beside ours.

    It changes no argument. `gpus` is what the figure was measured on, `source` where it stands.
    """

    tokens_per_s_per_gpu: Annotated[float, Field(gt=0)]
    tflops_per_gpu: Annotated[float, Field(gt=0)] | None = None
    gpus: Positive
    source: str


class Recipe(Section):
    name: Name
    description: str = ""
    model: dict[str, FlagValue] = {}
    precision: Precision | None = None
    parallel: Parallel = Parallel()
    batch: Batch = Batch()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    data: Data | None = None
    checkpoint: Checkpoint = Checkpoint()
    survive: Survive = Survive()
    resources: Resources = Resources()
    container: Container = Container()
    launch: Launch = Launch()
    software: Software = Software()
    env: dict[EnvName, str | int | float | None] = {}
    secrets: list[EnvName] = []
    megatron: dict[str, FlagValue] = {}
    silence: dict[RuleCode, Reason] = {}
    notes: list[str] = []
    reference: Reference | None = None
    # A study: one run for every combination of these values, on each of these numbers of nodes.
    axes: dict[AxisKey, Annotated[list[AxisValue], Field(min_length=1)]] = {}
    nodes: Annotated[list[Positive], Field(min_length=1)] | None = None
    # One run in stretches, one after the other in this order, over one checkpoint.
    phases: Annotated[dict[PhaseName, Phase], Field(max_length=50)] = {}

    @field_validator("phases", mode="before")
    @classmethod
    def _no_phases(cls, phases: object) -> object:
        return {} if phases is None else phases  # `--set phases=null`: all of it in one

    @field_validator("axes")
    @classmethod
    def _axes_vary_what_exists(cls, axes: dict[str, list[AxisValue]]) -> dict[str, list[AxisValue]]:
        for key, values in axes.items():
            _refuse_unknown_axis(key)
            if len({repr(value) for value in values}) < len(values):
                raise ValueError(f"axis {key} has the same value twice")
        return axes

    @model_validator(mode="after")
    def _nodes_vary_once(self) -> Recipe:
        if self.nodes is not None and len(set(self.nodes)) < len(self.nodes):
            raise ValueError("`nodes` has the same number twice")
        if self.nodes is not None and "resources.nodes" in self.axes:
            raise ValueError("`nodes` and the axis resources.nodes say the same: keep `nodes`, which scales the batch")
        return self

    @model_validator(mode="after")
    def _going_on_needs_checkpoints(self) -> Recipe:
        if self.survive.attempts > 1 and not self.goes_on:
            raise ValueError("`survive.attempts` above 1 needs `checkpoint.dir` and `checkpoint.interval`")
        if self.phases and not self.goes_on:
            raise ValueError(
                "`phases` need `checkpoint.dir` and `checkpoint.interval`: each goes on from the one before"
            )
        return self

    @property
    def goes_on(self) -> bool:
        """The run leaves checkpoints that another attempt can go on from."""
        return self.checkpoint.dir is not None and self.checkpoint.interval is not None

    @property
    def is_study(self) -> bool:
        return bool(self.axes or self.nodes)

    @property
    def environment(self) -> dict[str, str]:
        """The recipe's variables as text; those set to null are dropped."""
        return {name: str(value) for name, value in self.env.items() if value is not None}


def _refuse_unknown_axis(key: str) -> None:
    """An axis is a key that a recipe can have: a field of a section, or any flag or variable."""
    section, field = key.split(".")[:2]
    free = ("model", "megatron", "env", "phases")
    sections: dict[str, type[Section]] = {"precision": Precision, "data": Data}
    for name, info in Recipe.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            sections[name] = info.annotation
    if section not in (*sections, *free):
        near = nearest(section, [*sections, *free])
        raise ValueError(f"axis {key}: there is no section '{section}'" + (f"; did you mean '{near}'?" if near else ""))
    if section in free:
        return
    known = [info.alias or name for name, info in sections[section].model_fields.items()]
    if field not in known:
        near = nearest(field, known)
        raise ValueError(f"axis {key}: {section} has no '{field}'" + (f"; did you mean '{near}'?" if near else ""))
