"""What differs between runs, and what a difference does to a ratio of their speeds.

unlike   another amount of work per token or per step, or another machine: the ratio would not be of the two variants
noted    may change the speed, and is part of what is compared or beside it: the ratio stands, with a mark
neutral  changes no speed (seeds, learning rates, paths): matters to loss parity only
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fp8launch.megatron.sections import FIELDS, MODEL_FLAGS

Kind = Literal["unlike", "noted", "neutral"]
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

# What decides the loss at each iteration: all of it must agree before two loss curves can be laid over each other.
PARITY = _words("""
    seed data_path train_data_path data_args_path per_split_data_args_path split mock_data tokenizer_type
    tokenizer_model global_batch_size rampup_batch_size seq_length lr min_lr lr_decay_style lr_decay_iters
    lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction lr_wsd_decay_iters lr_wsd_decay_style
    train_iters train_samples optimizer adam_beta1 adam_beta2 adam_eps weight_decay start_weight_decay end_weight_decay
    clip_grad reset_position_ids reset_attention_mask eod_mask_loss finetune pretrained_checkpoint
    """) | (MODEL_FLAGS | {"add_bias_linear", "layernorm_epsilon"})

# Follows from another fact, which is compared; or belongs to the precision, which has a name of its own.
_DERIVED = _words("""
    data_parallel_size transformer_pipeline_model_parallel_size tensor_parallel_num_weight_shards
    expert_tensor_parallel_num_weight_shards encoder_num_layers decoder_num_layers encoder_seq_length
    stream_ckpt_dequant nodes inprocess_active_world_size use_custom_fsdp padded_vocab_size eval_global_batch_size
    eval_micro_batch_size
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


@dataclass(frozen=True)
class Verdict:
    """What stands between two runs and a ratio of their speeds; both empty where nothing does."""

    unlike: tuple[str, ...] = ()
    noted: tuple[str, ...] = ()

    @property
    def comparable(self) -> bool:
        return not self.unlike


@dataclass(frozen=True)
class Difference:
    """A fact that is not the same in all rows: `values` by row label, in the order of the rows."""

    name: str
    kind: Kind
    axis: bool
    values: Mapping[str, object]

    def as_json(self) -> dict[str, object]:
        values = {label: value if isinstance(value, str | int | float | bool) else str(value)
                  for label, value in self.values.items()}  # fmt: skip
        return {"name": self.name, "kind": self.kind, "axis": self.axis, "values": values}


def kind_of(name: str) -> Kind:
    if name in UNLIKE:
        return "unlike"
    return "neutral" if name in _NEUTRAL or name in _DERIVED else "noted"


def differing(all_facts: Sequence[Facts]) -> list[str]:
    """Names of facts that two of the runs state differently. What only some of them state is not known to differ."""
    names = sorted({name for facts in all_facts for name in facts})
    return [name for name in names if _several([facts[name] for facts in all_facts if name in facts])]


def _several(values: Sequence[object]) -> bool:
    return any(not _same(value, values[0]) for value in values[1:])


def _same(a: object, b: object) -> bool:
    """1e-05 and 1.0e-5, 8 and 8.0, None and a flag that is off are the same."""
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return str(a) == str(b) or (a in (None, False) and b in (None, False))


def speed_verdict(a: Facts, b: Facts, axes: Collection[str] = ()) -> Verdict:
    """Whether a ratio of the speeds of two runs is one of what is compared. Facts in `axes` are varied on purpose."""
    names = [name for name in differing([a, b]) if kind_of(name) != "neutral"]
    compared = [name for name in names if name == "precision" or name in axes]
    unlike = [_says(name, a, b) for name in names if kind_of(name) == "unlike" and name not in compared]
    noted = [_says(name, a, b) for name in names if kind_of(name) == "noted" and name not in compared]
    if len(compared) > 1:
        # One axis is what is compared; of two at once, nobody knows which made the difference.
        noted += [_says(name, a, b) for name in compared if name != "precision"]
    # Without either side's arguments nothing was compared at all.
    unknown = [n for n in ("seq_length", "global_batch_size", "num_layers") if n not in a or n not in b]
    if unknown:
        noted.append(f"not known of both: {', '.join(unknown)}")
    return Verdict(tuple(unlike), tuple(noted))


def parity_differences(a: Facts, b: Facts) -> list[str]:
    """Why two loss curves cannot be laid over each other: what decides the data order, the start or the schedule."""
    found = [_says(name, a, b) for name in differing([a, b]) if name in PARITY]
    unknown = [name for name in ("seed", "seq_length", "global_batch_size", "lr") if name not in a or name not in b]
    return found + [f"{name} is not known of both" for name in unknown]


def initialisation_differences(a: Facts, b: Facts) -> list[str]:
    """What makes Megatron draw other initial weights from the same seed: the layout of tensor, pipeline, experts."""
    sizes = ("tensor", "pipeline", "expert")
    names = {f"{kind}_model_parallel_size" for kind in sizes} | {"use_cpu_initialization", "use_megatron_fsdp"}
    return [_says(name, a, b) for name in differing([a, b]) if name in names]


def _says(name: str, a: Facts, b: Facts) -> str:
    label = UNLIKE.get(name, name)
    label = f"{label} ({name})" if label == "model" else label
    return f"{label} {_short(a[name])} against {_short(b[name])}"


def _short(value: object) -> str:
    text = "off" if value in (None, False) else "on" if value is True else str(value)
    return text if len(text) <= 40 else f"{text[:18]}…{text[-18:]}"


def facts_of_axis(key: str) -> set[str]:
    """The facts that an axis of a study, a recipe key such as `parallel.tp`, varies."""
    section, _, name = key.rpartition(".")
    if key in ("nodes", "resources.nodes"):
        return {"nodes", "world_size", "global_batch_size"}
    if section == "precision":
        return {"precision"}
    if section == "env":
        return {f"env {name}"}
    if section == "launch.config":
        return {f"config {name}"}
    if key == "resources.gpu":
        return {"gpu", "GPU"}
    if key == "container.image":
        return {name}
    return {FIELDS.get(tuple(section.split(".")), {}).get(name, name)}
