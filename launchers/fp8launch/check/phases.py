"""Check that each phase can load the previous phase's checkpoint and continue its schedule and data.

Every finding compares two consecutive phases. A value that changes and changes back is reported twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import all_rules
from fp8launch.check.rules.table import Names, table
from fp8launch.diagnostics import Problem, Severity
from fp8launch.engines.base import Layout
from fp8launch.job.prepared import Phase
from fp8launch.megatron.flag_map import MODEL_FLAGS
from fp8launch.megatron.model_arithmetic import head_width
from fp8launch.megatron.schema import load_schema, value_of
from fp8launch.untyped import as_int

_CHECKPOINTING = "megatron/training/checkpointing.py"
_SCHEDULER = "megatron/core/optimizer_param_scheduler.py load_state_dict"
_DISTRIBUTED = "megatron/core/optimizer/distrib_optimizer.py"

# Model flags that phases may change because they do not change any tensor.
_NO_TENSOR = frozenset(
    """
    max_position_embeddings rotary_base rotary_percent rotary_scaling_factor rotary_seq_len_interpolation_factor
    rope_scaling_factor use_rope_scaling mscale mscale_all_dim yarn_original_max_position_embeddings yarn_beta_fast
    yarn_beta_slow attention_dropout hidden_dropout init_method_std embedding_init_method_std
    init_method_xavier_uniform moe_aux_loss_coeff moe_z_loss_coeff mtp_loss_scaling_factor moe_router_bias_update_rate
    moe_router_load_balancing_type
    """.split()  # noqa: SIM905
)
_SCHEDULE = (
    "lr", "min_lr", "lr_warmup_iters", "lr_warmup_samples", "lr_warmup_fraction", "lr_decay_iters", "lr_decay_samples",
    "lr_decay_style", "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style",
)  # fmt: skip
_RATES = ("lr", "min_lr")
_SPLIT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip
# Flags that determine the distributed optimizer's buckets, in addition to the layout.
_BUCKETS = (
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout",
    "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "fp8_param_gather", "fp4_param_gather",
    "overlap_grad_reduce", "ddp_bucket_size", "ddp_num_buckets",
)  # fmt: skip
_STATE_TYPES = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")


@dataclass(frozen=True)
class Border:
    """Two consecutive phases."""

    before: ResolvedRun
    after: ResolvedRun
    names: tuple[str, str]

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the names whose values differ between the two phases."""
        return [name for name in names if self.before.value(name) != self.after.value(name)]

    def where(self, *names: str) -> str:
        """Return the place where the later phase sets one of the names, else where the earlier phase does."""
        for name in names:
            if place := self.after.places.get(name):
                return place
        return self.before.where(*names, "global_batch_size")

    def words(self, names: Iterable[str]) -> str:
        """Describe the change of each name, such as `tp from 1 to 2`."""
        return ", ".join(f"{n} from {_shown(self.before.value(n))} to {_shown(self.after.value(n))}" for n in names)

    @property
    def there(self) -> str:
        return f"phase {self.names[1]} after {self.names[0]}"


class Advice(NamedTuple):
    """A problem at a border, and its fix. `about` has the arguments to point at, by default the changed ones."""

    message: str
    fix: str
    about: Sequence[str] = ()


Finder = Callable[[Border, list[str]], "Advice | None"]


@dataclass(frozen=True)
class BorderRule:
    """A rule that is called with the changed arguments if any of `compares` changed, or always if that is empty.

    `source` says where the fact comes from, as for rules in `check/rules/`.
    """

    code: str
    severity: Severity
    source: str
    compares: Sequence[str]
    find: Finder

    def problem(self, border: Border) -> Problem | None:
        changed = border.changed(self.compares)
        if self.compares and not changed:
            return None
        advice = self.find(border, changed)
        if advice is None:
            return None
        return Problem(self.severity, self.code, advice.message, border.where(*(advice.about or changed)), advice.fix)


_RULES: list[BorderRule] = []


def _rule(code: str, severity: Severity, source: str, compares: Sequence[str] = ()) -> Callable[[Finder], Finder]:
    def register(find: Finder) -> Finder:
        _RULES.append(BorderRule(code, severity, source, compares, find))
        return find

    return register


def problems(phases: Sequence[Phase], seen: Sequence[ResolvedRun]) -> list[Problem]:
    """Return the problems that keep a phase from continuing the previous one."""
    if not seen or not seen[0].engine.covers("megatron_lm"):
        return []
    found = [*_start(seen[0])]
    for i in range(1, len(seen)):
        border = Border(seen[i - 1], seen[i], (phases[i - 1].name, phases[i].name))
        at_border = [problem for rule in _RULES if (problem := rule.problem(border))]
        after = replace(border.after, before=border.before.arguments)
        for each in all_rules().values():
            if each.compares:
                at_border += each.problems(after)
        found += [replace(problem, message=f"{border.there}: {problem.message}") for problem in at_border]
    return found


def border_problems(border: Border, codes: Collection[str], fix: str) -> list[Problem]:
    """Return the problems of two separate runs, of which the later one loads the earlier one's checkpoint."""
    found = [problem for rule in _RULES if rule.code in codes and (problem := rule.problem(border))]
    return [replace(problem, code=problem.code.replace("phase-", "stage-"), fix=fix) for problem in found]


def _start(first: ResolvedRun) -> Iterator[Problem]:
    """Check the start of the run. Phases count from iteration 0, so it must not continue another run's iterations."""
    load, save = first.value("load"), first.value("save")
    if load and load != save and not first.on("finetune"):
        message = f"the run loads {load} and continues from its iteration, but phases count from iteration 0"
        fix = "set megatron.finetune: true, which loads only the weights and starts at 0, or remove checkpoint.load"
        yield Problem("error", "phase-start", message, first.where("load"), fix)


@_rule("phase-model", "error", f"{_CHECKPOINTING} check_checkpoint_args; torch.distributed.checkpoint compares shapes")
def phase_model(border: Border, changed: list[str]) -> Advice | None:
    names = MODEL_FLAGS - _NO_TENSOR
    if border.after.value("position_embedding_type") == "learned_absolute":
        names |= {"max_position_embeddings"}
    schema = load_schema(border.after.args.version)
    changed = border.changed(sorted(flag.dest for name in names if (flag := schema.find(name))))
    if not changed:
        return None
    message = f"the model changes ({border.words(changed)}), and checkpoints cannot be loaded across this change"
    return Advice(message, "use the same model in all phases", changed)


@_rule(
    "phase-checkpoint-format",
    "error",
    f"{_CHECKPOINTING} load_checkpoint: one loader for each format",
    compares=("ckpt_format", "use_megatron_fsdp", "use_torch_fsdp2"),
)
def phase_checkpoint_format(border: Border, changed: list[str]) -> Advice | None:
    # With torch_dist, Megatron can also load the older format torch.
    formats = border.before.value("ckpt_format"), border.after.value("ckpt_format")
    if changed == ["ckpt_format"] and formats == ("torch", "torch_dist"):
        return None
    message = f"the checkpoint format changes ({border.words(changed)}), and Megatron cannot load the old one"
    return Advice(message, "use the same format and the same kind of sharding in all phases")


@_rule("phase-optimizer-states", "warning", f"{_DISTRIBUTED}; optimizer_config.py __post_init__")
def phase_optimizer_states(border: Border, changed: list[str]) -> Advice | None:
    changed = border.changed(_STATE_TYPES)
    if not changed and _in_kernel(border.before) != _in_kernel(border.after):
        changed = ["fp8_recipe"]
    if not changed:
        return None
    message = f"the optimizer stores its states in a different form ({border.words(changed)})"
    return Advice(message, "test it on a short run first, or use the same types", changed)


def _in_kernel(run: ResolvedRun) -> bool:
    """Return whether the precision-aware optimizer keeps its master weights in Transformer Engine's kernel."""
    kept = run.value("main_params_dtype") not in (None, "fp32") or run.on("optimizer_cpu_offload")
    return run.on("use_precision_aware_optimizer") and (kept or run.value("fp8_recipe") in (None, "delayed"))


@_rule("phase-states", "error", f"{_CHECKPOINTING} load_checkpoint: without them the schedule restarts")
def phase_states(border: Border, changed: list[str]) -> Advice | None:
    if not border.before.on("no_save_optim"):
        return None
    message = "with no_save_optim the checkpoint has neither optimizer states nor the position in the schedule"
    return Advice(message, "remove no_save_optim", ["no_save_optim"])


@_rule(
    "phase-resharding",
    "error",
    f"{_DISTRIBUTED} sharded_state_dict (dp_reshardable); run on CPU",
    compares=(*_SPLIT, *_BUCKETS),
)
def phase_resharding(border: Border, changed: list[str]) -> Advice | None:
    split = [name for name in changed if name in _SPLIT]
    written = border.before.value("ckpt_format")
    if split and written == "torch":
        message = f"{border.words(split)}, but a checkpoint in format torch has one file per rank of this layout"
        return Advice(message, "use megatron.ckpt_format: torch_dist, or the same layout in all phases", split)
    reshardable = border.before.on("dist_ckpt_optim_fully_reshardable")
    if written != "torch_dist" or reshardable or not border.before.on("use_distributed_optimizer"):
        return None
    message = f"{border.words(changed)}, but the checkpoint stores the optimizer states by bucket"
    fix = "set megatron.dist_ckpt_optim_fully_reshardable: true for all phases, or use the same layout"
    if fully_reshardable_shifts(border.before.arguments, border.before.layout):
        # The setting alone does not help, because Megatron would save shifted states.
        fix = (
            "use the same layout. megatron.dist_ckpt_optim_fully_reshardable: true saves correct states here only "
            "without overlap_grad_reduce, because gradient buckets are padded (Megatron-LM pull request 5077)"
        )
    return Advice(message, fix)


def fully_reshardable_shifts(arguments: Mapping[str, Any], layout: Layout) -> bool:
    """Return whether fully reshardable checkpoints of a run contain shifted states (Megatron-LM PR 5077).

    This happens if a gradient bucket is padded. Megatron pads buckets to a multiple of lcm(ranks, 128).
    """

    def on(name: str) -> bool:
        return bool(value_of(arguments, name))

    if not on("use_distributed_optimizer") or not on("overlap_grad_reduce"):
        return False
    ranks = layout.dp * layout.cp
    even_ranks = ranks <= 128 and math.log2(ranks).is_integer()
    even_sizes = not (as_int(value_of(arguments, "hidden_size")) or 0) % 128
    if on("qk_layernorm") and head_width(arguments) % 128:
        even_sizes = False
    return not (even_ranks and even_sizes) or on("ddp_pad_buckets_for_high_nccl_busbw")


@_rule(
    "phase-expert-groups",
    "error",
    "megatron/core/optimizer/optimizer.py param_group_identifier_keys (is_expert_parallel); run on CPU",
)
def phase_expert_groups(border: Border, changed: list[str]) -> Advice | None:
    before, after = border.before.layout.ep, border.after.layout.ep
    if not border.before.on("num_experts") or not min(before, after) == 1 < max(before, after):
        return None
    message = (
        f"EP goes from {before} to {after}, but Megatron matches the experts' optimizer states by whether they are "
        "expert parallel"
    )
    return Advice(
        message, f"keep parallel.ep above 1 in both phases, or {before} in both", ["expert_model_parallel_size"]
    )


@_rule("phase-schedule", "error", f"{_SCHEDULER}: assertions; run on CPU", compares=_SCHEDULE)
def phase_schedule(border: Border, changed: list[str]) -> Advice | None:
    if border.after.on("override_opt_param_scheduler"):
        return None
    kept = border.after.on("use_checkpoint_opt_param_scheduler")
    outcome = "uses the checkpoint's values and ignores these" if kept else "rejects the checkpoint"
    fix = "use the same schedule, or set megatron.override_opt_param_scheduler: true to change it at this iteration"
    if not set(changed).isdisjoint(_RATES):
        fix = "use the same schedule; override_opt_param_scheduler cannot change lr and min_lr"
    return Advice(f"the schedule changes ({border.words(changed)}), and Megatron {outcome}", fix)


@_rule("phase-global-batch", "error", f"{_SCHEDULER} counts samples; get_train_valid_test_num_samples; run on CPU")
def phase_global_batch(border: Border, changed: list[str]) -> Advice | None:
    before, after = border.before.layout.global_batch, border.after.layout.global_batch
    if before == after:
        return None
    message = (
        f"the global batch changes from {before} to {after}. Megatron builds the schedule and the dataset for "
        "iterations x global batch samples, so both would change at this point"
    )
    ramp = "step_batch_size_schedule" if border.after.megatron >= (0, 18) else "rampup_batch_size"
    fix = f"use the same batch.global; megatron.{ramp} increases it within one schedule"
    return Advice(message, fix, ["global_batch_size"])


def _table_rule(
    code: str,
    compares: Sequence[str],
    message: str,
    fix: str,
    source: str,
    severity: Severity = "error",
    when: str = "",
) -> BorderRule:
    """Return a rule from the section `phases` of the table. `when` applies to the later phase."""

    def find(border: Border, changed: list[str]) -> Advice | None:
        names = Names(border.after)
        names["changed"], names["names"] = border.words(changed), ", ".join(changed)
        if when and not names.satisfy(when):
            return None
        return Advice(names.fill(message), fix)

    return BorderRule(code, severity, source, compares, find)


_RULES += [_table_rule(code, **row) for code, row in table().phases.items()]


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


CODES: Mapping[str, Severity] = {rule.code: rule.severity for rule in _RULES} | {"phase-start": "error"}
