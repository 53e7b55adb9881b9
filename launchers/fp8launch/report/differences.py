"""Differences between runs, and their effect on a ratio of speeds.

unlike   a different amount of work per token or per step, or a different machine: the ratio is refused
noted    may change the speed: the ratio is given with a mark
neutral  does not change the speed (seeds, learning rates, paths): matters to loss parity at most
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fp8launch.megatron.flag_map import FIELDS, MODEL_FLAGS
from fp8launch.untyped import as_int

Effect = Literal["unlike", "noted", "neutral"]
Facts = Mapping[str, object]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Model flags that change values, not the amount of work. Megatron's dump has other names for a few flags.
_VALUES_ONLY = _words(
    "max_position_embeddings init_method_std embedding_init_method_std rotary_base rope_scaling_factor norm_epsilon "
    "layernorm_epsilon moe_aux_loss_coeff moe_z_loss_coeff mtp_loss_scaling_factor make_vocab_size_divisible_by"
)
MODEL = (MODEL_FLAGS | {"add_bias_linear"}) - _VALUES_ONLY

UNLIKE: Mapping[str, str] = {
    **dict.fromkeys(MODEL, "model"),
    "seq_length": "sequence length",
    "gpu": "GPU model",
    "GPU": "GPU model",
    "world_size": "number of GPUs",
    "global_batch_size": "global batch",
}

# Facts that determine the loss at each iteration. They must be equal for two loss curves to be comparable.
PARITY = _words("""
    seed data_path train_data_path data_args_path per_split_data_args_path split mock_data tokenizer_type
    tokenizer_model global_batch_size rampup_batch_size seq_length lr min_lr lr_decay_style lr_decay_iters
    lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction lr_wsd_decay_iters lr_wsd_decay_style
    train_iters train_samples optimizer adam_beta1 adam_beta2 adam_eps weight_decay start_weight_decay end_weight_decay
    clip_grad reset_position_ids reset_attention_mask eod_mask_loss finetune pretrained_checkpoint
    """) | (MODEL_FLAGS | {"add_bias_linear", "layernorm_epsilon"})

# Arguments that decide how well a model learns. Rows that differ in them are judged by their loss.
LEARNING = (
    "lr", "min_lr", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_decay_style", "lr_decay_iters",
    "lr_decay_samples", "lr_wsd_decay_style", "lr_wsd_decay_iters", "optimizer", "weight_decay", "clip_grad",
    "adam_beta1", "adam_beta2", "adam_eps", "init_method_std", "embedding_init_method_std", "attention_dropout",
    "hidden_dropout", "moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_bias_update_rate",
    "mtp_loss_scaling_factor", "rotary_base", "global_batch_size",
)  # fmt: skip
# Facts that must be equal for losses to be ranked: the program, the model and its data.
TASK = (MODEL - {"padded_vocab_size"} - set(LEARNING)) | _words("""
    script seq_length data_path train_data_path data_args_path per_split_data_args_path split mock_data tokenizer_type
    tokenizer_model
    """)

_INITIALISATION = _words(
    "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size use_cpu_initialization "
    "use_megatron_fsdp"
)

# Facts that follow from another, compared fact, or belong to the precision, which is compared by name.
_DERIVED = _words("""
    data_parallel_size transformer_pipeline_model_parallel_size tensor_parallel_num_weight_shards
    expert_tensor_parallel_num_weight_shards encoder_num_layers decoder_num_layers encoder_seq_length
    stream_ckpt_dequant nodes inprocess_active_world_size use_custom_fsdp padded_vocab_size eval_global_batch_size
    eval_micro_batch_size parameters
    bf16 fp16 params_dtype fp8 fp8_recipe fp8_param_gather fp8_param fp4 fp4_recipe fp4_param_gather fp4_param
    fp8_amax_history_len fp8_amax_compute_algo first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16
    moe_router_padding_for_fp8 moe_router_padding_for_quantization recipe
    """)
_NEUTRAL = (
    (
        _words("""
        rank local_rank save load ckpt_format ckpt_step tensorboard_dir wandb_project wandb_exp_name wandb_save_dir
        wandb_entity data_cache_path consumed_train_samples consumed_valid_samples skipped_train_samples
        iteration iter_per_epoch exit_duration_in_mins exit_interval save_interval save_retain_interval
        eval_interval eval_iters log_interval distributed_timeout_minutes config_logger_dir train_iters train_samples
        dump_param_to_param_group_map iterations_to_skip
        """)
        | PARITY
        | _VALUES_ONLY
    )
    - set(UNLIKE)
    - {"optimizer", "mock_data", "clip_grad"}
)

# Facts in which repeats of one run may differ: its seed, its output paths, and where and when it was started.
_OF_ONE_RUN = _words("""
    seed rank local_rank save load ckpt_step tensorboard_dir wandb_project wandb_exp_name wandb_save_dir wandb_entity
    data_cache_path consumed_train_samples consumed_valid_samples skipped_train_samples iteration iter_per_epoch
    exit_duration_in_mins exit_interval config_logger_dir dump_param_to_param_group_map
    """)


# When and where a run was made. Repeats may differ in these.
CIRCUMSTANCES = frozenset(
    ("commit", "uncommitted changes", "cluster", "fp8launch", "recipe", "node set", "driver", "nodes", "world_size")
)
_UNKNOWN = "the logs do not both state"


@dataclass(frozen=True)
class Comparability:
    """The differences between two runs: `unlike` forbids a ratio of their speeds, `noted` only marks it."""

    unlike: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()

    @property
    def comparable(self) -> bool:
        return not self.unlike


@dataclass(frozen=True)
class FactDifference:
    """A fact that differs between rows: `values` by row label, in the order of the rows."""

    name: str
    kind: Effect
    axis: bool
    values: Mapping[str, object]

    def as_json(self) -> dict[str, object]:
        values = {}
        for label, value in self.values.items():
            values[label] = value if isinstance(value, str | int | float) else str(value)
        return {"name": self.name, "kind": self.kind, "axis": self.axis, "values": values}


def kind_of(name: str) -> Effect:
    if name in UNLIKE:
        return "unlike"
    if name in _NEUTRAL or name in _DERIVED:
        return "neutral"
    return "noted"


def affects_speed(name: str) -> bool:
    return kind_of(name) != "neutral"


def makes_variant(name: str) -> bool:
    """Return whether runs that differ in a fact are not repeats of each other."""
    return name == "precision" or name not in _DERIVED | _OF_ONE_RUN | CIRCUMSTANCES


def affects_loss(name: str) -> bool:
    """Return whether a fact decides the loss at each iteration, and follows from no other."""
    return name in PARITY and name not in _DERIVED


def differing(all_facts: Sequence[Facts]) -> list[str]:
    """Name the facts that two of the runs state differently. A fact that only some of them state may be equal."""
    first: dict[str, object] = {}
    found = set()
    for facts in all_facts:
        for name, value in facts.items():
            if name not in first:
                first[name] = value
            elif not _same(value, first[name]):
                found.add(name)
    return sorted(found)


class HasFacts(Protocol):
    """A run, or a row of runs."""

    @property
    def facts(self) -> Facts: ...


def differing_facts(runs: Iterable[HasFacts]) -> list[str]:
    """Name the facts that two of these runs state differently."""
    return differing([run.facts for run in runs])


def settings_change_speed(runs: Iterable[HasFacts]) -> bool:
    """Return whether these runs were set up with different speeds in mind, not only on different nodes or days."""
    return any(
        affects_speed(name) and (name == "world_size" or name not in CIRCUMSTANCES) for name in differing_facts(runs)
    )


def _same(a: object, b: object) -> bool:
    """1e-05 and 1.0e-5, 8 and 8.0, None and a flag that is off are the same."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return str(a) == str(b) or (a in (None, False) and b in (None, False))


def speed_comparability(a: Facts, b: Facts, axes: Collection[str] = ()) -> Comparability:
    """Judge whether only the compared settings can explain a ratio of the speeds of two runs.

    Facts in `axes` are varied on purpose.
    """
    compared = 0
    unlike, noted, varied = [], [], []
    different = differing([a, b])
    for name in filter(affects_speed, different):
        described = _describe(name, a, b)
        if name == "precision":
            compared += 1
        elif name in axes:
            compared += 1
            varied.append(described)
        elif kind_of(name) == "unlike":
            unlike.append(described)
        else:
            noted.append(described)
    if compared > 1:
        # With two varied axes at once, either may have caused the difference.
        noted += varied
    # If either side lacks arguments, nothing was compared.
    unknown = {*unstated(a), *unstated(b)}
    equal = _equally_large(a, b)
    if equal is not None:
        unknown.discard("num_layers")
    if equal is False and MODEL.isdisjoint(different):
        unlike.append(_describe("parameters", a, b))
    if unknown:
        noted.append(f"{_UNKNOWN} {', '.join(sorted(unknown))}")
    return Comparability(tuple(unlike), tuple(noted))


def _equally_large(a: Facts, b: Facts) -> bool | None:
    """Return whether two models have equally many parameters, except for padding; None if a number is unknown."""
    here, there = as_int(a.get("parameters")), as_int(b.get("parameters"))
    if here is None or there is None:
        return None
    return abs(here - there) <= 0.001 * max(here, there)


def unstated(facts: Facts) -> list[str]:
    """Return the arguments that determine the work of a step and that these facts lack."""
    return [name for name in ("seq_length", "global_batch_size", "num_layers") if name not in facts]


def arguments_unknown(comparability: Comparability) -> bool:
    """Return whether a side's arguments are unknown, so that the runs may have done different work."""
    return any(is_unknown(note) for note in comparability.noted)


def is_unknown(reason: str) -> bool:
    """Return whether a reason is that facts are unknown, and not that they differ."""
    return reason.startswith(_UNKNOWN)


def parity_differences(a: Facts, b: Facts) -> list[str]:
    """Say why two loss curves cannot be compared: differences in data order, start or schedule."""
    return described_or_unknown(PARITY, ("seed", "seq_length", "global_batch_size", "lr"), a, b)


def described_or_unknown(names: Collection[str], needed: Sequence[str], a: Facts, b: Facts) -> list[str]:
    """Describe the differences in these facts, and name the `needed` ones that either side does not state."""
    found = _described(names, a, b)
    unknown = [name for name in needed if name not in a or name not in b]
    if unknown:
        found.append(f"{_UNKNOWN} {', '.join(unknown)}")
    return found


def initialisation_differences(a: Facts, b: Facts) -> list[str]:
    """Name the parallel group sizes that make Megatron draw different initial weights from the same seed."""
    return _described(_INITIALISATION, a, b)


def _described(names: Collection[str], a: Facts, b: Facts) -> list[str]:
    return [_describe(name, a, b) for name in differing([a, b]) if name in names]


def _describe(name: str, a: Facts, b: Facts) -> str:
    label = UNLIKE.get(name, name)
    if label == "model":
        label = f"model ({name})"
    return f"{label} {_short(a[name])} against {_short(b[name])}"


def _short(value: object) -> str:
    if value is None or value is False:
        return "off"
    if value is True:
        return "on"
    # Large numbers are counts, such as parameters.
    return f"{value:,}" if isinstance(value, int) and value >= 10_000_000 else shortened(str(value))


def shortened(text: str) -> str:
    """Return a value for a table or a sentence: a long one without its middle."""
    if len(text) <= 40:
        return text
    return f"{text[:18]}…{text[-18:]}"


def facts_of_axis(key: str) -> set[str]:
    """Return the facts that an axis of a study varies. The axis is a recipe key such as `parallel.tp`."""
    section, _, name = key.rpartition(".")
    if key in ("nodes", "resources.nodes"):
        return {"nodes", "world_size", "global_batch_size"}
    if section == "precision":
        return {"precision"}
    if section == "env":
        return {f"env {name}"}
    if section == "launch.config":
        return {f"config {name}", name}
    if key == "resources.gpu":
        return {"gpu", "GPU"}
    if key == "container.image":
        return {name}
    return {FIELDS.get(tuple(section.split(".")), {}).get(name, name)}
