"""The sections of a recipe: one frozen model each, every field in the field's own units.

A section sets only the Megatron flags that it states: what is left out keeps Megatron's default.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fp8launch.diagnostics import UserError
from fp8launch.hardware.connections import CONNECTIONS, NEED_MANY, connections
from fp8launch.hardware.gpus import GPUS
from fp8launch.hardware.quantization import FP16, QUANTIZATION, UNQUANTIZED
from fp8launch.recipe.axes import refuse_unknown_axis
from fp8launch.recipe.field_types import (
    AxisKey,
    AxisValue,
    EnvName,
    FlagValue,
    FormatName,
    GpuName,
    Name,
    NotNegative,
    Overrides,
    PhaseName,
    Positive,
    PrecisionName,
    Reason,
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

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def from_node(cls, node: Node) -> Self:
        """Return the section that `node` states. Raises UserError with one problem for each mistake."""
        cls._build()
        try:
            return cls.model_validate(node.plain())
        except ValidationError as exc:
            raise UserError(validation_problems(cls, node, exc)) from None

    @classmethod
    def _build(cls) -> None:
        """Build the validator once, without pydantic's plugins: it would look for them in every installed package."""
        if cls.__pydantic_complete__:
            return
        stated = os.environ.get(_PLUGINS)
        os.environ[_PLUGINS] = "__all__"
        try:
            cls.model_rebuild()
        finally:
            del os.environ[_PLUGINS]
            if stated is not None:
                os.environ[_PLUGINS] = stated


class Bf16Layers(Section):
    """How many transformer layers at the start and at the end stay in bf16."""

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
                f"{recipe} is a recipe of torchao; Transformer Engine has no scale per row. Use blockwise, whose "
                "scales cover 128 values of a row"
            )
        return recipe

    @model_validator(mode="after")
    def _format_belongs(self) -> Precision:
        # Megatron reads a format without a recipe as `delayed`, and a recipe without a format as bf16.
        quantization = QUANTIZATION.get(self.recipe)
        allowed: tuple[str | None, ...] = quantization.formats if quantization else (None,)
        if self.format not in allowed:
            names = " or ".join(name for name in allowed if name)
            need = f"needs `format: {names}`" if names else "does not take a `format`"
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
            raise ValueError("kind indexed needs `blend: [path, ...]`, and kind mock does not take a blend")
        return self


class Checkpoint(Section):
    """`dir` and `load` are absolute or relative to the run folder, and the `keep` newest checkpoints are kept.

    A cluster profile may store a relative `dir` elsewhere (docs/clusters.md).
    """

    dir: str | None = None
    interval: Positive | None = None
    load: str | None = None
    keep: Positive | None = None


class Survive(Section):
    """How a run with checkpoints continues automatically.

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
    gpu: GpuName = "h100"
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
        return (slurm_seconds(self.time) or 0) / 3600

    @property
    def gpu_hours(self) -> float:
        """Return the most GPU-hours that one attempt can use: its GPUs for the whole time limit."""
        return 0.0 if self.gpu == "cpu" else self.world_size * self.hours


class Container(Section):
    image: str | None = None
    mounts: list[str] = []
    contains: list[str] = []


class Launch(Section):
    """How processes start: one task per GPU by `srun`, or one `torchrun` per node; and what they run.

    `arguments` are those of the script's own, which Megatron does not have; they follow Megatron's.
    With `health_check`, every node is looked at before training starts, and a bad one ends the job.
    `probe` says after the first iteration what ran under FP8; `profile_iteration` is profiled on rank 0, by kernel.
    Every `tensor_stats` iterations Transformer Engine measures FP8's underflow, scales and largest values.
    `config` sets fields of Megatron's TransformerConfig that its command line leaves out (our own entry only).
    """

    mode: Literal["srun", "torchrun"] | None = None
    script: str | None = None
    arguments: list[str | int | float] = []
    python: str | None = None
    health_check: bool | None = None
    probe: bool = True
    profile_iteration: Positive | None = None
    tensor_stats: Positive | None = None
    config: dict[str, bool | int | float | str] = {}


class Software(Section):
    """Versions in the job; they select the flag schema and the validators."""

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


class Bridge(Section):
    """A recipe of Megatron-Bridge by its name, for `engine: bridge`; the newest release that has it unless one is set.

    `overrides` are fields of Bridge's configuration, such as `{train: {train_iters: 50}}`. `model` is a local folder
    with the Hugging Face `config.json` that the recipe would read from the hub.
    """

    recipe: str | None = None
    release: Version | None = None
    model: str | None = None
    overrides: Overrides = {}


class Accelerate(Section):
    """A training by Hugging Face Accelerate, for `engine: accelerate`, which recipes of `peers/` use.

    `fp8` is the library of a precision in FP8. With `rowwise`, torchao scales each row and not each tensor: Megatron
    has no name for it, so `precision.recipe` stays tensorwise.
    """

    sharding: Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"] | None = None
    fp8: Literal["torchao", "transformer_engine", "msamp"] | None = None
    rowwise: bool = False


ConvertDirection = Literal["hf-to-megatron", "megatron-to-hf"]
ConvertDtype = Literal["bf16", "fp16", "fp32"]


class Convert(Section):
    """A conversion of weights, for `engine: convert`: what `fp8launch convert` submits, which writes this section.

    `model` is a Hugging Face model: a folder, or a name on the hub; the source, or what the output shall be like.
    `checkpoint` is the folder of one iteration, `fingerprint` a digest of the input.
    """

    direction: ConvertDirection | None = None
    model: str | None = None
    checkpoint: str | None = None
    out: str | None = None
    dtype: ConvertDtype | None = None
    fingerprint: str | None = None


class Recipe(Section):
    # The sections' defaults are made without validation: each would build a validator of its own at every start.
    name: Name
    description: str = ""
    engine: Name | None = None
    model: dict[str, FlagValue] = {}
    precision: Precision | None = None
    parallel: Parallel = Parallel.model_construct()
    batch: Batch = Batch.model_construct()
    train: Train = Train.model_construct()
    optimizer: Optimizer = Optimizer.model_construct()
    data: Data | None = None
    checkpoint: Checkpoint = Checkpoint.model_construct()
    survive: Survive = Survive.model_construct()
    resources: Resources = Resources.model_construct()
    container: Container = Container.model_construct()
    launch: Launch = Launch.model_construct()
    bridge: Bridge = Bridge.model_construct()
    accelerate: Accelerate = Accelerate.model_construct()
    convert: Convert = Convert.model_construct()
    software: Software = Software.model_construct()
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

    @field_validator("phases", "axes", mode="before")
    @classmethod
    def _none_of_them(cls, value: object) -> object:
        return {} if value is None else value  # `--set phases=null`: all of it in one; `axes: null`: one run

    @field_validator("axes")
    @classmethod
    def _axes_vary_what_exists(cls, axes: dict[str, list[AxisValue]]) -> dict[str, list[AxisValue]]:
        for key, values in axes.items():
            refuse_unknown_axis(key, _section_fields())
            if len({repr(value) for value in values}) < len(values):
                raise ValueError(f"axis {key} has the same value twice")
        return axes

    @model_validator(mode="after")
    def _nodes_vary_once(self) -> Recipe:
        if self.nodes is not None and len(set(self.nodes)) < len(self.nodes):
            raise ValueError("`nodes` has the same number twice")
        if self.nodes is not None and "resources.nodes" in self.axes:
            raise ValueError(
                "`nodes` and the axis resources.nodes vary the same value; use `nodes`, which also scales the batch"
            )
        return self

    @model_validator(mode="after")
    def _going_on_needs_checkpoints(self) -> Recipe:
        if self.survive.attempts > 1 and not self.goes_on:
            raise ValueError(
                "`survive.attempts` above 1 needs `checkpoint.dir` and `checkpoint.interval`",
                "--set checkpoint.dir=checkpoints --set checkpoint.interval=100, or the same lines in the recipe",
            )
        if self.phases and not self.goes_on:
            raise ValueError(
                "`phases` need `checkpoint.dir` and `checkpoint.interval`, because each phase continues from a "
                "checkpoint of the one before"
            )
        return self

    @property
    def goes_on(self) -> bool:
        """Return whether the run writes checkpoints from which another attempt can continue."""
        return self.checkpoint.dir is not None and self.checkpoint.interval is not None

    @property
    def is_study(self) -> bool:
        return bool(self.axes or self.nodes)

    @property
    def environment(self) -> dict[str, str]:
        """The recipe's variables as text; those set to null are dropped.

        `CUDA_DEVICE_MAX_CONNECTIONS: auto` becomes what this layout needs on this GPU.
        """
        found = {name: str(value) for name, value in self.env.items() if value is not None}
        if found.get(CONNECTIONS) == "auto":
            found[CONNECTIONS] = self._connections()
        return found

    def _connections(self) -> str:
        flags = {name.replace("-", "_"): value for name, value in self.megatron.items()}
        tp = self.parallel.tp or flags.get("tensor_model_parallel_size") or 1
        cp = self.parallel.cp or flags.get("context_parallel_size") or 1
        many = self.parallel.fsdp not in (None, "none") or any(flags.get(name) for name in NEED_MANY)
        return connections(split=tp != 1 or cp != 1, many=many, capability=GPUS[self.resources.gpu].capability)


def _section_fields() -> dict[str, list[str]]:
    """The fields of each section, as recipes spell them."""
    sections: dict[str, type[Section]] = {"precision": Precision, "data": Data}
    for name, info in Recipe.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            sections[name] = info.annotation
    return {
        section: [info.alias or name for name, info in model.model_fields.items()]
        for section, model in sections.items()
    }
