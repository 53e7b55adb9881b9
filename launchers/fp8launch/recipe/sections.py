"""The sections of a recipe that all engines share, as frozen models.

A section sets only the Megatron flags whose keys it contains. All other flags keep Megatron's defaults.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fp8launch.diagnostics import UserError
from fp8launch.hardware.quantization import FP16, UNQUANTIZED, quantization_recipes
from fp8launch.recipe.field_types import (
    ActionCode,
    FormatName,
    GpuName,
    HealthCode,
    LaunchMode,
    NotNegative,
    Overrides,
    Positive,
    PositiveFraction,
    PrecisionName,
    RuleCode,
    StateDtype,
    Version,
    WallTime,
)
from fp8launch.recipe.slurm_time import slurm_seconds
from fp8launch.recipe.validation_problems import validation_problems
from fp8launch.recipe.yaml_source import Node

if TYPE_CHECKING:
    from typing_extensions import Self


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def from_node(cls, node: Node) -> Self:
        """Build the section from a node. Raises UserError with one problem per mistake."""
        try:
            return cls.model_validate(node.plain())
        except ValidationError as exc:
            raise UserError(validation_problems(cls, node, exc)) from None

    def field(self, name: str) -> Any:
        """Return the value of a field, given its name in recipes."""
        return getattr(self, {"global": "global_"}.get(name, name))


class Bf16Layers(Section):
    """The number of transformer layers at the start and at the end that stay in bf16."""

    start: NotNegative = 1
    end: NotNegative = 1


class Precision(Section):
    recipe: PrecisionName
    format: FormatName | None = None
    param_gather: bool = False
    bf16_layers: Bf16Layers | None = None
    amax_history: Positive | None = None
    amax_algo: Literal["max", "most_recent"] | None = None
    loss_scale: Annotated[float, Field(gt=0)] | None = None

    @property
    def quantized(self) -> bool:
        """Return whether the recipe requests FP8 or FP4."""
        return self.recipe not in UNQUANTIZED

    @field_validator("recipe", mode="before")
    @classmethod
    def _is_in_megatron(cls, recipe: object) -> object:
        if recipe in ("rowwise", "rowwise_with_gw_hp"):
            raise ValueError(
                f"{recipe} is a torchao recipe; Transformer Engine does not scale per row. Use blockwise, whose "
                "scales cover 128 values of a row"
            )
        return recipe

    @model_validator(mode="after")
    def _format_belongs(self) -> Precision:
        # Megatron interprets a format without a recipe as `delayed`, and a recipe without a format as bf16.
        quantization = quantization_recipes().get(self.recipe)
        if quantization is None and self.format is not None:
            raise ValueError(f"precision recipe {self.recipe} does not take a `format`; remove `format: {self.format}`")
        if quantization and self.format not in quantization.formats:
            need = f"needs `format: {' or '.join(quantization.formats)}`"
            raise ValueError(f"precision recipe {self.recipe} {need}, not {self.format or 'nothing'}")
        if not self.quantized and (self.param_gather or self.bf16_layers):
            raise ValueError(f"precision recipe {self.recipe} does not take `param_gather` or `bf16_layers`")
        if self.loss_scale is not None and self.recipe != FP16:
            raise ValueError(f"precision recipe {self.recipe} does not take a `loss_scale`; fp16 does")
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
    """Storage types of TE's precision-aware Adam, enabled by setting any of them, and the gradient reduction type."""

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

    @field_validator("blend", mode="before")
    @classmethod
    def _blend_is_flat(cls, blend: Any) -> Any:
        if isinstance(blend, list) and blend and all(isinstance(pair, list) for pair in blend):
            flat = ", ".join(str(part) for pair in blend for part in pair)
            raise ValueError("weights and paths alternate in one list", f"write blend: [{flat}]")
        return blend

    @model_validator(mode="after")
    def _indexed_has_blend(self) -> Data:
        if (self.kind == "indexed") != bool(self.blend):
            raise ValueError("kind indexed needs `blend: [path, ...]`, and kind mock does not take a blend")
        return self


class Checkpoint(Section):
    """Where checkpoints are saved and loaded. `dir` and `load` are absolute, or relative to the run folder.

    A cluster profile may store a relative `dir` elsewhere (docs/clusters.md). Only the `keep` newest checkpoints are
    kept. `allow_pickle` lets Transformer Engine unpickle FP8 state that this run did not write itself. Unpickling runs
    any code in the file (docs/security.md).
    """

    dir: str | None = None
    interval: Positive | None = None
    load: str | None = None
    keep: Positive | None = None
    allow_pickle: bool = False


class Survive(Section):
    """How a run with checkpoints continues automatically.

    The run stops after `attempts` attempts that count, or after `stuck` of them in a row without a newer checkpoint.
    Training saves and exits `stop_before` seconds before the time limit. A log that has not grown for `hang_after`
    seconds counts as a hang; 0 disables the watchdog. `rules` override the action for a cause (docs/survival.md).
    """

    attempts: Positive = 1
    stuck: Positive = 2
    stop_before: Positive = 120
    hang_after: NotNegative | None = None
    rules: dict[RuleCode, Literal["go-on", "free", "exclude", "stop"]] = {}


class Rewind(Section):
    """Go back this many checkpoints from the newest one before the event, and skip the batches up to the event."""

    rewind: Positive


class Health(Section):
    """When training counts as unhealthy, and what the job does about it (docs/health.md). Thresholds are fractions.

    `loss_jump` limits how much the loss rises, `skipped_steps` the share of skipped steps, and `slowdown` the increase
    of the step time. `loss_fall` is how much the loss of a new run must fall at least. Codes in `ignore` are not
    reported. `actions` has the job's action for each code. A run is rewound at most `max_rewinds` times.
    """

    loss_jump: PositiveFraction = 0.05
    loss_fall: PositiveFraction = 0.01
    skipped_steps: PositiveFraction = 0.01
    slowdown: PositiveFraction = 0.25
    ignore: list[HealthCode] = []
    actions: dict[ActionCode, Literal["stop", "continue", "exclude", "exclude-later"] | Rewind] = {}
    max_rewinds: Positive = 3

    @field_validator("actions", mode="before")
    @classmethod
    def _known_actions(cls, value: object) -> object:
        """Refuse unknown actions, naming all allowed ones. Pydantic's own message would omit the mapping form."""
        for code, action in value.items() if isinstance(value, dict) else ():
            allowed = ["continue", "exclude", "exclude-later"] if code == "slow-node" else ["continue", "stop"]
            if action in allowed or code not in get_args(ActionCode):
                continue
            if code != "slow-node":
                if isinstance(action, dict):
                    continue
                allowed.append("{rewind: N}")
            shown = "null" if action is None else repr(action)
            message = f"the action on {code} must be {', '.join(allowed[:-1])} or {allowed[-1]}, not {shown}"
            raise ValueError(message, f"write one of {', '.join(allowed)}")
        return value

    @property
    def rewinds(self) -> bool:
        """Return whether the run may go back to an earlier checkpoint."""
        return any(isinstance(action, Rewind) for action in self.actions.values())


class Resources(Section):
    nodes: Positive = 1
    gpus_per_node: Positive = 8
    gpu: GpuName = "h100"
    time: WallTime = "01:00:00"
    cpus_per_task: Positive | None = None

    @field_validator("time", mode="before")
    @classmethod
    def _minutes(cls, value: object) -> object:
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return value

    @property
    def device(self) -> str:
        """The torch device type, cpu or cuda."""
        if self.gpu == "cpu":
            return "cpu"
        return "cuda"

    @property
    def world_size(self) -> int:
        """The number of processes of the run: one per GPU."""
        return self.nodes * self.gpus_per_node

    @property
    def hours(self) -> float:
        """The time limit in hours."""
        return (slurm_seconds(self.time) or 0) / 3600

    @property
    def gpu_hours(self) -> float:
        """The maximum GPU-hours of one attempt: all its GPUs for the whole time limit."""
        if self.gpu == "cpu":
            return 0.0
        return self.world_size * self.hours


class Container(Section):
    image: str | None = None
    mounts: list[str] = []
    contains: list[str] = []


class Profile(Section):
    """Iterations to profile, `start` to `end`, both included, on these ranks. By default `end` is `start`."""

    start: Positive
    end: Positive | None = None
    ranks: list[NotNegative] = [0]
    tool: Literal["torch", "nsys", "memory"] = "torch"

    @property
    def last(self) -> int:
        return self.end or self.start

    @model_validator(mode="after")
    def _is_a_range(self) -> Profile:
        if self.last < self.start:
            raise ValueError(f"`end` must be at least `start`, which is {self.start}, not {self.end}")
        if not self.ranks:
            raise ValueError("`ranks` must name at least one rank, such as [0]")
        return self


class Launch(Section):
    """How processes start (one task per GPU with `srun`, or one `torchrun` per node), and which program they run.

    `arguments` belong to the script and follow Megatron's. With `health_check`, every node is tested before training
    starts, and a bad node ends the job. `probe` reports after the first iteration which modules ran in FP8.
    `profile_iteration: N` is the short form of `profile: {start: N}`. Every `tensor_stats` iterations, Transformer
    Engine measures underflow, scales and largest values of FP8 tensors. `config` sets fields of Megatron's
    TransformerConfig that have no command-line flag (only with fp8launch's own entry).
    """

    mode: LaunchMode | None = None
    script: str | None = None
    arguments: list[str | int | float] = []
    python: str | None = None
    health_check: bool | None = None
    probe: bool = True
    profile: Profile | None = None
    profile_iteration: Positive | None = None
    tensor_stats: Positive | None = None
    config: dict[str, bool | int | float | str] = {}

    @model_validator(mode="after")
    def _has_one_profile(self) -> Launch:
        if self.profile and self.profile_iteration:
            raise ValueError("`profile_iteration: N` is the short form of `profile: {start: N}`; remove one of them")
        return self

    @property
    def profiled(self) -> Profile | None:
        if self.profile_iteration is not None:
            return Profile(start=self.profile_iteration)
        return self.profile

    def measurements(self, begin: int) -> dict[str, str]:
        """Return the variables that request measurements from the processes of a run that starts after `begin`."""
        found = {}
        if not self.probe:
            found["FP8LAUNCH_PROBE"] = "0"
        if profile := self.profiled:
            numbers = {"start": begin + profile.start, "end": begin + profile.last}
            found["FP8LAUNCH_PROFILE"] = json.dumps({"tool": profile.tool, **numbers, "ranks": profile.ranks})
        if self.tensor_stats:
            found["FP8LAUNCH_TENSOR_STATS"] = str(self.tensor_stats)
        return found


class Software(Section):
    """Software versions in the job. They select the flag schema and the validators."""

    megatron: Version | None = None
    transformer_engine: Version | None = None
    cuda: Version | None = None


class Phase(Section):
    """A part of the training, with values that are merged into the recipe (docs/survival.md).

    One phase may omit `iterations`; it gets the rest of `train.iterations`.
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
    megatron_extra: Overrides | None = None


class Reference(Section):
    """A published speed for this model, precision and layout, which reports print for comparison.

    It does not change any argument. `gpus` says on which GPUs it was measured, `source` where it was published.
    """

    tokens_per_s_per_gpu: Annotated[float, Field(gt=0)]
    tflops_per_gpu: Annotated[float, Field(gt=0)] | None = None
    gpus: Positive
    source: str
