"""Check single values that Megatron's parser and validators accept and that fail or spoil a run later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8launch.check.gemm_shapes import heads_fit
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.model_arithmetic import head_width, layer_kinds


@dataclass(frozen=True)
class ValueRange:
    """The allowed values of an argument; `least` and `most` are inclusive bounds, `above` and `below` exclusive.

    `source` is the place where Megatron or a library fails, and `outcome` the failure. With `only_with`, the range
    applies only if one of these arguments is set.
    """

    dest: str
    outcome: str
    source: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    only_with: tuple[str, ...] = ()

    def holds(self, value: float) -> bool:
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


_LOOP = "megatron/training/training.py"
_SCHEDULER = "megatron/core/optimizer_param_scheduler.py:150-176"
_ADAM = "torch/optim/adam.py; TransformerEngine's FusedAdam divides by 1 - beta^t"
_DIVIDED = "the training loop divides by this value"
_PROBABILITY = "a dropout must be a probability"

RANGES: tuple[ValueRange, ...] = (
    ValueRange("seed", "Megatron raises ValueError at start", "megatron/training/initialize.py:436", least=1),
    ValueRange("log_interval", _DIVIDED, f"{_LOOP}:2816; run", least=1),
    ValueRange("eval_interval", _DIVIDED, f"{_LOOP}:4481; run", least=1),
    ValueRange(
        "tensorboard_log_interval", _DIVIDED, f"{_LOOP}:2681", least=1, only_with=("tensorboard_dir", "wandb_project")
    ),
    ValueRange("log_memory_interval", _DIVIDED, f"{_LOOP}:2925", least=1),
    ValueRange("check_weight_hash_across_dp_replicas_interval", _DIVIDED, f"{_LOOP}:3178", least=1),
    ValueRange("adlr_autoresume_interval", _DIVIDED, f"{_LOOP}:3191", least=1, only_with=("adlr_autoresume",)),
    ValueRange("manual_gc_interval", "Megatron fails an assertion before the training loop", f"{_LOOP}:3590", least=0),
    ValueRange("weight_decay", "the learning rate scheduler fails an assertion", f"{_SCHEDULER}; run", least=0),
    ValueRange("lr_warmup_init", "the learning rate would start below zero", _SCHEDULER, least=0),
    ValueRange("lr_warmup_iters", "the schedule would not start at its beginning", _SCHEDULER, least=0),
    ValueRange("lr_warmup_samples", "the schedule would not start at its beginning", _SCHEDULER, least=0),
    ValueRange("lr_warmup_fraction", "the schedule would not start at its beginning", _SCHEDULER, least=0),
    ValueRange("lr_decay_iters", "the learning rate scheduler fails an assertion", f"{_SCHEDULER}; run", least=1),
    ValueRange("lr_decay_samples", "the learning rate scheduler fails an assertion", _SCHEDULER, least=1),
    ValueRange("adam_beta1", "the first step divides by zero, or Adam rejects it", _ADAM, least=0, below=1),
    ValueRange("adam_beta2", "the first step divides by zero, or Adam rejects it", _ADAM, least=0, below=1),
    ValueRange("adam_eps", "Adam rejects it", _ADAM, least=0),
    ValueRange("sgd_momentum", "SGD rejects it", "torch/optim/sgd.py", least=0),
    ValueRange("attention_dropout", _PROBABILITY, "torch/nn/modules/dropout.py", least=0, most=1),
    ValueRange("hidden_dropout", _PROBABILITY, "torch/nn/modules/dropout.py", least=0, most=1),
    ValueRange("num_workers", "the data loader rejects it", "torch/utils/data/dataloader.py", least=0),
    ValueRange(
        "make_vocab_size_divisible_by",
        "the vocabulary cannot be padded",
        "megatron/training/vocab_utils.py:53",
        least=1,
    ),
    ValueRange("init_method_std", "weights cannot be initialized", "torch/nn/init.py normal_", least=0),
    ValueRange("embedding_init_method_std", "weights cannot be initialized", "torch/nn/init.py normal_", least=0),
    ValueRange("rotary_base", "rotary frequencies need a base above zero", "rotary_pos_embedding.py:80", above=0),
    ValueRange("rotary_percent", "no channel would be rotated", "rotary_pos_embedding.py:74", above=0),
    ValueRange(
        "expert_tensor_parallel_size",
        "process groups cannot be created",
        "megatron/core/parallel_state.py RankGenerator",
        least=1,
    ),
    ValueRange(
        "expert_model_parallel_size", "process groups cannot be created", "megatron/core/parallel_state.py", least=1
    ),
    ValueRange(
        "num_distributed_optimizer_instances",
        "process groups cannot be created",
        "megatron/core/parallel_state.py",
        least=1,
    ),
    ValueRange("distributed_timeout_minutes", "collectives would time out immediately", "torch.distributed", least=1),
    ValueRange(
        "moe_router_topk", "torch.topk rejects it", "moe_utils.py: torch.topk", least=1, only_with=("num_experts",)
    ),
)


# Sizes of a model, at least 1 each. Megatron's classes are built of a negative one until a tensor is, or run without
# a message: `num_query_groups` below 1 divides the heads by what is left.
_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "padded_vocab_size", "seq_length", "max_position_embeddings", "moe_ffn_hidden_size", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
    "mamba_num_heads",
)  # fmt: skip
# Sizes that are 0 where a model does not have the part.
_SIZES_OR_NONE = (
    "num_experts", "mtp_num_layers", "moe_shared_expert_intermediate_size", "q_lora_rank",
)  # fmt: skip


@rule(
    "model-size",
    "error",
    source="torch.nn.Parameter and the divisions of megatron/core/transformer/transformer_config.py, __post_init__",
    says=r"(division|modulo) by zero|negative dimension",
)
def sizes_are_positive(run: ResolvedRun) -> Iterator[Finding]:
    for least, dests in ((1, _SIZES), (0, _SIZES_OR_NONE)):
        for dest in dests:
            size = run.given.get(dest)
            if isinstance(size, int) and size < least:
                message = f"{dest} is {size}, but must be at least {least}"
                yield Finding(message, run.where(dest), "correct it, or remove it")


@rule(
    "value-range",
    "error",
    source="check/rules/value_ranges.py: RANGES has the source of each",
    says=r"(division|modulo) by zero",
)
def values_lie_in_their_ranges(run: ResolvedRun) -> Iterator[Finding]:
    """Check only values that a recipe sets; the others are Megatron's defaults."""
    for allowed in RANGES:
        value = run.given.get(allowed.dest)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            continue
        if allowed.only_with and not any(map(run.on, allowed.only_with)):
            continue
        if not allowed.holds(value):
            message = f"{allowed.dest} is {value:g}, but must be {allowed}: {allowed.outcome}"
            yield Finding(message, run.where(allowed.dest), f"use a value {allowed}, or remove it")


@rule("rotary-odd-width", "error", source="megatron/core/models/common/embeddings/rotary_pos_embedding.py:138-168")
def rotated_channels_pair_up(run: ResolvedRun) -> Iterator[Finding]:
    """Rotary embeddings rotate channels in pairs; for an odd number Megatron uses one more than a head has."""
    kind = run.value("position_embedding_type")
    if kind not in ("rope", "yarn", "mrope") and not run.on("use_rotary_position_embeddings"):
        return
    if not heads_fit(run):
        return
    name, width = "kv_channels", head_width(run.arguments)
    if "latent attention" in layer_kinds(run.arguments):
        name, width = "qk_pos_emb_head_dim", run.integer("qk_pos_emb_head_dim")
    rotated, percent = width, run.value("rotary_percent")
    if isinstance(percent, float) and percent < 1:
        rotated = int(width * percent)
    if rotated % 2 and rotated + 1 > width:
        message = f"attention heads have {width} channels, but rotary embeddings need an even number"
        where = run.where(name, "num_attention_heads", "hidden_size")
        yield Finding(message, where, f"set {name} to {width - 1} or {width + 1}")
