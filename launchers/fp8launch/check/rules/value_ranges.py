"""Check for values that Megatron's parser and validators accept, but that fail or spoil a run later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fp8launch.check.gemm_shapes import heads_fit
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.check.rules.table import table
from fp8launch.megatron.model_arithmetic import head_width, layer_kinds


@dataclass(frozen=True)
class ValueRange:
    """The allowed values of an argument, from `value_ranges` of the table."""

    dest: str
    outcome: str
    source: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    only_with: Sequence[str] = ()

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


def _ranges() -> Iterator[ValueRange]:
    for row in table().value_ranges:
        bounds = {key: value for key, value in row.items() if key != "arguments"}
        for argument in row["arguments"]:
            yield ValueRange(argument, **bounds)


RANGES = tuple(_ranges())
# Sizes of a model, at least 1 each. With a negative size Megatron fails only when it creates a tensor, or it trains
# another model without a message.
_SIZES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "vocab_size", "padded_vocab_size", "seq_length", "max_position_embeddings", "moe_ffn_hidden_size", "kv_lora_rank",
    "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "mamba_state_dim", "mamba_head_dim", "mamba_num_groups",
    "mamba_num_heads",
)  # fmt: skip
# Sizes that are 0 if the model lacks the part.
_SIZES_OR_NONE = (
    "num_experts", "mtp_num_layers", "moe_shared_expert_intermediate_size", "q_lora_rank",
)  # fmt: skip


@rule(
    "model-size",
    "error",
    source="torch.nn.Parameter, and the divisions of transformer_config:TransformerConfig.__post_init__",
    says=r"(division|modulo) by zero|negative dimension",
)
def model_size(run: ResolvedRun) -> Iterator[Finding]:
    for least, dests in ((1, _SIZES), (0, _SIZES_OR_NONE)):
        for dest in dests:
            size = run.given.get(dest)
            if isinstance(size, int) and size < least:
                message = f"{dest} is {size}, but must be at least {least}"
                yield Finding(message, run.where(dest), "correct it, or remove it")


@rule(
    "value-range",
    "error",
    source="check/rules/table.yaml has the source of each range",
    says=r"(division|modulo) by zero",
)
def value_range(run: ResolvedRun) -> Iterator[Finding]:
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


@rule("rotary-odd-width", "error", source="rotary_pos_embedding:RotaryEmbedding.get_freqs_non_repeated")
def rotary_odd_width(run: ResolvedRun) -> Iterator[Finding]:
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


@rule(
    "warmup-too-long",
    "error",
    source=(
        "optimizer_param_scheduler:OptimizerParamScheduler.__init__: lr_warmup_steps < lr_decay_steps, a bare assertion"
    ),
    scope="megatron_lm",
)
def warmup_too_long(run: ResolvedRun) -> Iterator[Finding]:
    for unit in ("iters", "samples"):
        length = run.integer(f"train_{unit}")
        decay = run.integer(f"lr_decay_{unit}") or length
        if not length or run.on("skip_train"):
            continue
        fraction = run.value("lr_warmup_fraction")
        warmup: float = run.integer(f"lr_warmup_{unit}")
        if isinstance(fraction, (int, float)):
            warmup = fraction * decay
        if warmup >= decay:
            message = f"the warm-up of {warmup:g} {unit} does not end before the decay, which ends after {decay}"
            names = ("lr_warmup_fraction", f"lr_warmup_{unit}", f"lr_decay_{unit}", f"train_{unit}")
            yield Finding(message, run.where(*names), f"make the warm-up shorter than {decay} {unit}")
