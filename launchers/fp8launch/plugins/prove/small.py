"""Megatron's arguments for the trainings of a proof: a small model of the recipe's structure, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fp8launch.engines.base import Layout
from fp8launch.injob.rank.compat import cpu_process
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.model_arithmetic import pattern_value
from fp8launch.plugins.prove.reduced_layout import Reduced, reduce_layout, reduce_pair, splits_sequences
from fp8launch.plugins.prove.settings import (
    CPU,
    CUDA,
    DISPATCHER,
    DROPS,
    FLEX,
    FP8_PARAMETERS,
    FSDP,
    RESET_MASK,
    compares_context_parallel,
    deepep_flags,
    divides,
    has_part,
    masks_documents,
    why_left_out,
    without_delayed_scaling,
)
from fp8launch.plugins.prove.uneven import uneven_stages
from fp8launch.plugins.rehearse.shrink import FREQUENCIES, shrink

# Elements of a row; small, but enough for two ranks and for heads of even width.
WIDTH = 64
SEQUENCE = 64
HEAD = 16
# A query group serves at most so many heads, and a token is sent to at most so many experts.
HEADS_PER_GROUP = 2
CHOSEN = 2
# Experts of a rank, so that a rank has more than one.
LOCAL_EXPERTS = 2
VOCABULARY = 256

# One step from given weights: no clipping, so that Adam's first moment is the gradient, and a rate that is not zero.
# With a usual epsilon, the first update of Adam is the sign of the gradient, which rounding changes where that is zero.
STEP: Mapping[str, FlagValue] = {
    "lr": 1.0e-2, "min_lr": 1.0e-2, "lr_decay_style": "constant", "clip_grad": 1.0e9, "adam_beta1": 0.9,
    "optimizer": "adam", "train_iters": 1, "lr_warmup_iters": 0, "adam_eps": 1.0e-3,
}  # fmt: skip
# A course of some iterations, saved at its middle, with a rate that changes in each.
HALF = 2
COURSE: Mapping[str, FlagValue] = {"lr": 1.0e-3, "min_lr": 1.0e-4, "lr_warmup_iters": 1, "train_iters": 2 * HALF}
# Flags of the recipe that its small run resumes with, although the comparison of gradients leaves them out.
RESUMED = (
    "bf16", "fp16", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis",
    "grad_reduce_in_bf16", "attention_dropout", "hidden_dropout", "async_save", "dist_ckpt_optim_fully_reshardable",
    "dataloader_type", "no_data_sharding", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
    "data_parallel_random_init", "no_save_optim", "no_load_optim", "no_save_rng", "no_load_rng",
    "lr_decay_style", "clip_grad", "adam_beta1", "adam_eps",
    "moe_router_force_load_balancing", "moe_input_jitter_eps",
)  # fmt: skip
_ALWAYS: Mapping[str, FlagValue] = {
    "mock_data": True, "tokenizer_type": "NullTokenizer", "num_workers": 0, "eval_iters": 0, "eval_interval": 1000,
    "log_interval": 1, "split": "99,1,0", "ckpt_format": "torch_dist",
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "seed": 1234,
    "no_check_for_nan_in_loss_and_grad": True, "no_create_attention_mask_in_dataloader": True,
}  # fmt: skip
# Modules of `recompute_modules` that only exist with Transformer Engine.
RECOMPUTED_BY_TE = ("moe_act",)
# Sizes that a list of layers states; the small model has fewer layers.
_LISTS = FREQUENCIES
RESHARDABLE = "dist_ckpt_optim_fully_reshardable"
RAMP = "rampup_batch_size"
INSTANCES = "num_distributed_optimizer_instances"
# Balancing that treats every sequence alone, so that no loss depends on the micro batch size.
_BALANCED_BY_SEQUENCE = {"none", "seq_aux_loss"}


@dataclass(frozen=True)
class SmallRun:
    """Arguments by flag, and the layout that they state."""

    values: dict[str, FlagValue]
    layout: Layout

    @property
    def low_precision(self) -> bool:
        """Whether it computes in bf16 or FP8."""
        return bool(self.values.get("bf16") or self.values.get("fp16"))


def small_run(values: Mapping[str, FlagValue], layout: Layout, device: str = CPU) -> SmallRun:
    """Return one step of a recipe's reduced layout: in fp32 on a CPU, in the recipe's precision on a GPU."""
    computed = without_delayed_scaling(values)
    reduced = reduce_layout(values, layout, compares_context_parallel(values, device))
    return _small(computed, layout, reduced, STEP, {}, device=device)


def resumed_run(values: Mapping[str, FlagValue], layout: Layout, device: str = CPU) -> SmallRun:
    """Return four iterations of a recipe's reduced layout, with its dropout and its precision, on a CPU without FP8.

    Context parallelism has no state, and on a GPU no kernels that give the same result twice.
    """
    kept = {name: value for name, value in values.items() if name in RESUMED}
    if not values.get("save"):
        # A benchmark without checkpoints. Megatron cannot resume random routes (advisory expert-rng-resume).
        kept.pop("moe_router_force_load_balancing", None)
    if kept.get("lr_decay_style") == "WSD":
        kept["lr_wsd_decay_iters"] = 1
    if kept.get("dataloader_type") == "cyclic":
        # Ranks of two can only get different numbers of micro batches if these have one sample each.
        layout = replace(layout, micro_batch=1)
    reduced = reduce_layout(values, layout, context_parallel=False)
    if values.get(RAMP):
        kept |= _ramp(reduced.layout, wsd="lr_wsd_decay_iters" in kept)
    return _small(values, layout, reduced, COURSE, kept, device=device)


def _ramp(layout: Layout, wsd: bool) -> dict[str, FlagValue]:
    """Return the flags of a batch ramp: the second half of the iterations has twice the batch of the first half."""
    # Virtual stages need as many micro batches as there are stages.
    start = layout.micro_batch * layout.dp * (layout.pp if layout.vp > 1 else 1)
    found: dict[str, FlagValue] = {
        RAMP: [start, start, HALF * start],
        "global_batch_size": 2 * start,
        "train_samples": 3 * HALF * start,
        "lr_warmup_samples": start,
        **dict.fromkeys(("train_iters", "lr_warmup_iters", "lr_wsd_decay_iters")),
    }
    return {**found, "lr_wsd_decay_samples": start} if wsd else found


def ramped_microbatches(run: SmallRun) -> list[int]:
    """Return the number of micro batches in each iteration of a run with a batch ramp."""
    ramp = run.values[RAMP]
    assert isinstance(ramp, list)
    first = int(ramp[0]) // (run.layout.micro_batch * run.layout.dp)
    return [first] * HALF + [2 * first] * HALF


def with_other_rate(run: SmallRun) -> SmallRun:
    """Return a run with twice the learning rate."""
    return replace(run, values={**run.values, **{name: 2 * float(COURSE[name]) for name in ("lr", "min_lr")}})  # type: ignore[arg-type]


def resharded_runs(
    values: Mapping[str, FlagValue], layout: Layout, other_values: Mapping[str, FlagValue], other_layout: Layout
) -> tuple[SmallRun, SmallRun]:
    """Return four iterations of one model in two layouts, in fp32."""
    pair = reduce_pair(values, layout, other_values, other_layout)
    words = _vocabulary_of_pair(values, layout, other_layout)
    # The same samples in each iteration.
    batch = math.lcm(*(reduced.layout.global_batch for reduced in pair))
    stages = _stages_of_pair((values, other_values), (layout, other_layout), pair)
    found = []
    for one, whole, reduced, own in zip((values, other_values), (layout, other_layout), pair, stages, strict=True):
        kept = {name: value for name, value in one.items() if name == RESHARDABLE}
        kept |= words
        kept["global_batch_size"] = batch
        found.append(_small(one, whole, reduced, COURSE, kept, pair, max(layout.tp, other_layout.tp), stages=own))
    # A rank may hold more experts in one layout than in the other, but both layouts train the same model.
    if experts := max(_int(run.values, "num_experts") for run in found):
        for run in found:
            run.values["num_experts"] = experts
    return found[0], found[1]


def _stages_of_pair(
    values: Sequence[Mapping[str, FlagValue]], layouts: Sequence[Layout], pair: Sequence[Reduced]
) -> list[dict[str, FlagValue]]:
    """Return the flags for the stages of two layouts of one model, which has one number of layers.

    The stages are divided evenly if no number of layers serves both.
    """
    found = [
        uneven_stages(one, layout, reduced.layout) for one, layout, reduced in zip(values, layouts, pair, strict=True)
    ]
    stated = {_int(stages, "num_layers") for stages in found} - {0}
    if len(stated) == 1:
        (layers,) = stated
        chunks = [reduced.layout.pp * reduced.layout.vp for reduced in pair]
        if all(stages.get("num_layers") or layers % count == 0 for stages, count in zip(found, chunks, strict=True)):
            return [{**stages, "num_layers": layers} for stages in found]
    return [dict.fromkeys(stages) for stages in found]


def _small(
    values: Mapping[str, FlagValue],
    layout: Layout,
    reduced: Reduced,
    course: Mapping[str, FlagValue],
    stated: Mapping[str, FlagValue],
    shared: Sequence[Reduced] = (),
    real_tp: int = 1,
    device: str = CPU,
    stages: Mapping[str, FlagValue] | None = None,
) -> SmallRun:
    """Return a small run with the schedule `course` and the flags `stated`; its model fits the layouts `shared`.

    `stages` are the flags for the stages of its pipeline, which follow from the recipe if they are not given.
    """
    kept = {
        name: value for name, value in values.items() if has_part(name) and why_left_out(name, value, device) is None
    }
    sharing = shared or (reduced,)
    if any(splits_sequences(one.layout) for one in sharing):
        kept = {name: value for name, value in kept.items() if name not in DROPS}
    tp_at_most = max(layout.tp, real_tp)
    modules = kept.get("recompute_modules")
    if isinstance(modules, list) and device == CPU:
        kept["recompute_modules"] = [module for module in modules if module not in RECOMPUTED_BY_TE] or None
    kept |= _layout_flags(values, reduced)
    small = dict(shrink(kept, reduced.layout).values)
    small |= _widths(values, max(one.layout.tp for one in sharing), tp_at_most)
    small |= _experts(values, max(one.layout.ep for one in sharing))
    if stages is None:
        stages = uneven_stages(values, layout, reduced.layout)
    small |= stages
    layers = _int(stages, "num_layers")
    # A rehearsal chooses the layers for one layout only.
    usual = 0 if shared else _int(small, "num_layers")
    small |= _layers(values, usual, math.lcm(*(one.layout.pp * one.layout.vp for one in sharing)), layers)
    small |= _vocabulary(values, layout, reduced)
    if small.get("use_distributed_optimizer") and course is STEP:
        small[RESHARDABLE] = True
    if values.get(DISPATCHER) == FLEX:
        small |= deepep_flags(values, device) or {DISPATCHER: "alltoall"}
    small.pop("moe_router_force_load_balancing", None)
    small["global_batch_size"] = reduced.layout.global_batch
    small |= {**_ALWAYS, **(_cpu_flags() if device == CPU else {"transformer_impl": "transformer_engine"})}
    small |= {**course, **stated}
    if small.get(FSDP):
        # Master weights of FP8 weights would keep their values from before the start is loaded.
        small |= {"ckpt_format": "fsdp_dtensor", RESHARDABLE: None, FP8_PARAMETERS: None}
        if values.get("use_precision_aware_optimizer"):
            # That optimizer reads gradients from the buffer, without the copy that causes mfsdp-pertoken-norms.
            small["megatron_fsdp_main_grads_dtype"] = "fp32"
        if device == CPU:
            # Gloo cannot scale while it sums.
            small["no_gradient_reduce_div_fusion"] = True
    if device == CPU and masks_documents(values):
        small |= {RESET_MASK: True, "no_create_attention_mask_in_dataloader": None}
    return SmallRun({name: value for name, value in small.items() if value is not None}, reduced.layout)


def reference(run: SmallRun) -> SmallRun:
    """Return the same model on one rank, with none of the settings that divide work.

    It has micro batches of one sample, unless a larger micro batch has a legitimate effect.
    """
    values = {name: value for name, value in run.values.items() if not divides(name) and name != RESHARDABLE}
    if run.values.get(DISPATCHER) == FLEX:
        # One rank has nobody to exchange tokens with.
        deepep = deepep_flags(values, CUDA)
        values = {name: value for name, value in values.items() if name not in deepep} | {DISPATCHER: "alltoall"}
    if run.values.get(FP8_PARAMETERS):
        # Only the distributed optimizer trains FP8 weights.
        values |= {"use_distributed_optimizer": True, RESHARDABLE: True}
    # The same padded vocabulary: Megatron pads to a multiple of this times TP.
    values["make_vocab_size_divisible_by"] = _int(run.values, "make_vocab_size_divisible_by") * run.layout.tp
    layout = run.layout
    micro_batch = layout.micro_batch if _depends_on_micro_batch(run) else 1
    values |= {"micro_batch_size": micro_batch, "ckpt_format": _ALWAYS["ckpt_format"]}
    alone = replace(
        layout, world=1, tp=1, pp=1, vp=1, cp=1, ep=1, dp=1, micro_batch=micro_batch,
        microbatches=layout.global_batch // micro_batch,
    )  # fmt: skip
    return SmallRun(values, alone)


def _depends_on_micro_batch(run: SmallRun) -> bool:
    """Return whether gradients legitimately depend on the micro batch size, or differ by rounding that is not small."""
    values = run.values
    if run.low_precision or (values.get("eod_mask_loss") and not values.get("calculate_per_token_loss")):
        return True
    if not values.get("num_experts"):
        return False
    stated = values.get("moe_router_load_balancing_type") or "aux_loss"
    balanced = set(stated if isinstance(stated, list) else [stated])
    by_micro_batch = ("moe_expert_capacity_factor", "moe_router_quantile_balancing_ema")
    return not balanced <= _BALANCED_BY_SEQUENCE or any(values.get(name) for name in by_micro_batch)


def _layout_flags(values: Mapping[str, FlagValue], reduced: Reduced) -> dict[str, FlagValue]:
    layout = reduced.layout
    found: dict[str, FlagValue] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": layout.vp if layout.vp > 1 else None,
        "micro_batch_size": layout.micro_batch,
        "context_parallel_size": layout.cp if layout.cp > 1 else None,
        INSTANCES: reduced.instances if reduced.instances > 1 else None,
    }
    if values.get("num_experts"):
        found |= {"expert_model_parallel_size": layout.ep, "expert_tensor_parallel_size": reduced.etp}
    if layout.tp == 1:
        found["sequence_parallel"] = None
    return found


def _widths(values: Mapping[str, FlagValue], tp: int, real_tp: int) -> dict[str, FlagValue]:
    heads, groups = _int(values, "num_attention_heads"), _int(values, "num_query_groups")
    found: dict[str, FlagValue] = {
        "hidden_size": WIDTH,
        "ffn_hidden_size": 2 * WIDTH,
        "seq_length": SEQUENCE,
        "max_position_embeddings": SEQUENCE,
        "kv_channels": HEAD,
    }
    if values.get("moe_ffn_hidden_size"):
        # Another width than a dense layer's, as in most models.
        found["moe_ffn_hidden_size"] = WIDTH
    if values.get("moe_shared_expert_intermediate_size"):
        found["moe_shared_expert_intermediate_size"] = WIDTH
    if values.get("multi_latent_attention"):
        found |= {
            "num_attention_heads": 2 * tp,
            "qk_head_dim": HEAD,
            "v_head_dim": HEAD,
            "qk_pos_emb_head_dim": HEAD // 2,
        }
        found |= {name: WIDTH // 2 for name in ("q_lora_rank", "kv_lora_rank") if values.get(name)}
        if groups:
            found["num_query_groups"] = 2 * tp
    elif groups and values.get("group_query_attention"):
        # Fewer groups than tensor parallel ranks stay fewer.
        fewer = groups < real_tp
        small_groups = 1 if fewer or groups == 1 else max(tp, 2)
        found |= {
            "num_query_groups": small_groups,
            "num_attention_heads": max(small_groups * min(heads // groups, HEADS_PER_GROUP), tp),
        }
    elif heads:
        found["num_attention_heads"] = 2 * tp
    if values.get("experimental_attention_variant") == "gated_delta_net":
        several = (_int(values, "linear_num_value_heads") or 32) > (_int(values, "linear_num_key_heads") or 16)
        found |= {
            "linear_key_head_dim": HEAD,
            "linear_value_head_dim": HEAD,
            "linear_num_key_heads": 2 * tp,
            "linear_num_value_heads": (4 if several else 2) * tp,
        }
    if values.get("experimental_attention_variant") == "dsa":
        found |= {"dsa_indexer_n_heads": 4, "dsa_indexer_head_dim": HEAD, "dsa_indexer_topk": SEQUENCE // 4}
    window = values.get("window_size")
    if isinstance(window, list):
        found["window_size"] = [min(int(side), SEQUENCE // 4) for side in window]
    return found


def _experts(values: Mapping[str, FlagValue], ep: int) -> dict[str, FlagValue]:
    experts = _int(values, "num_experts")
    if not experts:
        return {}
    local = min(experts // max(_int(values, "expert_model_parallel_size"), 1), LOCAL_EXPERTS)
    chosen = min(_int(values, "moe_router_topk") or 2, CHOSEN)
    small = ep * max(local, -(-2 * chosen // ep))
    found: dict[str, FlagValue] = {"num_experts": small, "moe_router_topk": chosen}
    if values.get("moe_router_num_groups"):
        found |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
    return found


def _layers(values: Mapping[str, FlagValue], usual: int, chunks: int, stated: int) -> dict[str, FlagValue]:
    """Return the number of layers, and lists of kinds in which every kind occurs, in the order of the recipe.

    `usual` is the number that a rehearsal has, and `stated` the number that an uneven pipeline needs, or 0.
    """
    layers = _int(values, "num_layers")
    lists = {name: kinds for name in _LISTS if (kinds := _kinds(values.get(name)))}
    if every := _int(values, "no_rope_freq"):
        # Megatron refuses a frequency that does not divide the number of layers.
        lists["no_rope_freq"] = [0] * (every - 1) + [1]
    # What the rehearsal cannot shorten is shortened here.
    per_chunk = max(1, -(-max((len(set(kinds)) for kinds in lists.values()), default=1) // chunks), 2 // chunks)
    if usual and not lists and usual % chunks == 0 and usual <= 2 * chunks:
        per_chunk = usual // chunks
    # A hybrid states its layers only in its pattern.
    fits = layers > 0 and layers % chunks == 0
    count = stated or (min(chunks * per_chunk, layers) if fits else chunks * per_chunk)
    found: dict[str, FlagValue] = {"num_layers": count}
    for name, kinds in lists.items():
        found[name] = "[" + ",".join(map(str, _shortened(kinds, count))) + "]"
    if _int(values, "recompute_num_layers"):
        found["recompute_num_layers"] = 1
    return found


def _kinds(stated: FlagValue) -> list[int]:
    """Return the kind of each layer, empty for a frequency that is a number."""
    if isinstance(stated, str):
        found = pattern_value(stated)
        if isinstance(found, list):
            return [int(kind) for kind in found]
    return []


def _shortened(kinds: Sequence[int], count: int) -> list[int]:
    """Return `count` kinds in the same order, of which none is lost that fits."""
    distinct = list(dict.fromkeys(kinds))
    if count <= len(distinct):
        return distinct[:count]
    # The most frequent kind fills what the others leave.
    most = max(distinct, key=kinds.count)
    found = []
    for kind in distinct:
        found += [kind] * (count - len(distinct) + 1 if kind == most else 1)
    return found


def _vocabulary_of_pair(values: Mapping[str, FlagValue], layout: Layout, other: Layout) -> dict[str, FlagValue]:
    """Return a vocabulary that both layouts pad to one size, or to two as they do with the recipe's."""
    multiple, words = _int(values, "make_vocab_size_divisible_by") or 128, _int(values, "vocab_size")
    padded = {-(-words // (multiple * tp)) * multiple * tp for tp in (layout.tp, other.tp)}
    return {"vocab_size": VOCABULARY if len(padded) == 1 else VOCABULARY // 2 + 1, "make_vocab_size_divisible_by": 32}


def _vocabulary(values: Mapping[str, FlagValue], layout: Layout, reduced: Reduced) -> dict[str, FlagValue]:
    """Return a small vocabulary that is padded in the same way: by what remains after the recipe's multiple."""
    multiple = (_int(values, "make_vocab_size_divisible_by") or 128) * layout.tp
    words = _int(values, "vocab_size")
    padded = bool(words % multiple)
    return {
        "vocab_size": VOCABULARY - 6 if padded else VOCABULARY,
        "make_vocab_size_divisible_by": VOCABULARY // (2 * reduced.layout.tp),
        "padded_vocab_size": None,
    }


def _cpu_flags() -> dict[str, FlagValue]:
    found: dict[str, FlagValue] = {"use_cpu_initialization": True}
    for flag, value in cpu_process.FLAGS:
        found[flag.lstrip("-").replace("-", "_")] = True if value is None else value
    return found


def _int(values: Mapping[str, FlagValue], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
