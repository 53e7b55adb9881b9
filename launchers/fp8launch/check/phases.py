"""Check that each phase can load the previous phase's checkpoint and continue its schedule and data.

Each finding compares two consecutive phases; a value that changes and changes back is reported twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8launch.check import advisories
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding
from fp8launch.diagnostics import Problem, Severity
from fp8launch.job.phases import Phase
from fp8launch.megatron.flag_map import MODEL_FLAGS
from fp8launch.megatron.schema import load_schema

_CHECKPOINTING = "megatron/training/checkpointing.py"
_SCHEDULER = "megatron/core/optimizer_param_scheduler.py load_state_dict"
_DISTRIBUTED = "megatron/core/optimizer/distrib_optimizer.py"

# Model flags that change no tensor: they may change from phase to phase.
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
# The flags, besides the split, that the distributed optimizer's buckets depend on.
_BUCKETS = (
    "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout",
    "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_bf16", "fp8_param_gather", "fp4_param_gather",
    "overlap_grad_reduce", "ddp_bucket_size", "ddp_num_buckets",
)  # fmt: skip
_STATE_TYPES = ("use_precision_aware_optimizer", "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype")
_DATA = ("mock_data", "data_path", "split", "seed", "train_data_path", "data_args_path", "reset_position_ids")


@dataclass(frozen=True)
class Border:
    """Two phases, one after the other."""

    before: ResolvedRun
    after: ResolvedRun
    names: tuple[str, str]

    def changed(self, names: Iterable[str]) -> list[str]:
        """Return the names whose values differ between the two phases."""
        return [name for name in names if self.before.value(name) != self.after.value(name)]

    def where(self, *names: str) -> str:
        """Return the place where the later phase sets one of these, else the earlier phase's."""
        for name in names:
            if place := self.after.places.get(name):
                return place
        return self.before.where(*names, "global_batch_size")

    def words(self, names: Iterable[str]) -> str:
        """`tp from 1 to 2`, for each of these."""
        return ", ".join(f"{n} from {_shown(self.before.value(n))} to {_shown(self.after.value(n))}" for n in names)

    @property
    def there(self) -> str:
        return f"phase {self.names[1]} after {self.names[0]}"


Finder = Callable[[Border], Iterator[Finding]]


@dataclass(frozen=True)
class BorderRule:
    """`source` says where the fact comes from, as for the rules of `check/rules/`."""

    code: str
    severity: Severity
    source: str
    find: Finder


_RULES: list[BorderRule] = []


def _rule(code: str, severity: Severity, source: str) -> Callable[[Finder], Finder]:
    def register(find: Finder) -> Finder:
        _RULES.append(BorderRule(code, severity, source, find))
        return find

    return register


def problems(phases: Sequence[Phase], seen: Sequence[ResolvedRun]) -> list[Problem]:
    """Return the problems that prevent consecutive phases from continuing one another."""
    if not seen or not seen[0].engine.covers("megatron_lm"):
        return []
    found = [*_start(seen[0])]
    for i in range(1, len(seen)):
        border = Border(seen[i - 1], seen[i], (phases[i - 1].name, phases[i].name))
        for rule in _RULES:
            found += [Problem(rule.severity, rule.code, *finding) for finding in rule.find(border)]
        found += advisories.phase_problems(border.before, border.after, border.there)
    return found


def _start(first: ResolvedRun) -> Iterator[Problem]:
    """Check the start: phases count from iteration 0, so the run must not continue another run's iterations."""
    load, save = first.value("load"), first.value("save")
    if load and load != save and not first.on("finetune"):
        message = f"the run loads {load} and continues from its iteration, but phases count from iteration 0"
        fix = "set megatron.finetune: true, which loads only the weights and starts at 0, or remove checkpoint.load"
        yield Problem("error", "phase-start", message, first.where("load"), fix)


@_rule("phase-model", "error", f"{_CHECKPOINTING} check_checkpoint_args; torch.distributed.checkpoint compares shapes")
def same_model(border: Border) -> Iterator[Finding]:
    names = MODEL_FLAGS - _NO_TENSOR
    if border.after.value("position_embedding_type") == "learned_absolute":
        names |= {"max_position_embeddings"}
    schema = load_schema(border.after.args.version)
    changed = border.changed(sorted(flag.dest for name in names if (flag := schema.find(name))))
    if changed:
        message = (
            f"{border.there}: the model changes ({border.words(changed)}), and checkpoints cannot be loaded across "
            "this change"
        )
        yield Finding(message, border.where(*changed), "use the same model in all phases")


@_rule("phase-layers", "warning", "megatron/core/models/gpt/gpt_layer_specs.py: layers with other names of weights")
def same_layers(border: Border) -> Iterator[Finding]:
    changed = border.changed(("transformer_impl", "moe_grouped_gemm"))
    if changed:
        message = (
            f"{border.there}: the layer implementation changes ({border.words(changed)}), so names of weights may "
            "differ"
        )
        yield Finding(message, border.where(*changed), "test it on a short run first, or use the same implementation")


@_rule("phase-checkpoint-format", "error", f"{_CHECKPOINTING} load_checkpoint: one loader for each format")
def same_format(border: Border) -> Iterator[Finding]:
    changed = border.changed(("ckpt_format", "use_megatron_fsdp", "use_torch_fsdp2"))
    # Megatron set to torch_dist also loads the older format torch.
    reads = (border.before.value("ckpt_format"), border.after.value("ckpt_format")) == ("torch", "torch_dist")
    if changed and not (reads and changed == ["ckpt_format"]):
        message = (
            f"{border.there}: the checkpoint format changes ({border.words(changed)}), and Megatron cannot load the "
            "old one"
        )
        yield Finding(
            message, border.where(*changed), "use the same format and the same kind of sharding in all phases"
        )


@_rule("phase-optimizer", "error", "megatron/core/optimizer/optimizer.py, each class has states of its own; run on CPU")
def same_optimizer(border: Border) -> Iterator[Finding]:
    changed = border.changed(("optimizer", "use_distributed_optimizer", "bf16", "fp16", "optimizer_cpu_offload"))
    if changed:
        message = (
            f"{border.there}: the optimizer changes ({border.words(changed)}), and cannot load the previous "
            "optimizer states"
        )
        yield Finding(message, border.where(*changed), "use the same optimizer and the same weight type in all phases")


@_rule("phase-optimizer-states", "warning", f"{_DISTRIBUTED}; optimizer_config.py __post_init__")
def same_state_types(border: Border) -> Iterator[Finding]:
    changed = border.changed(_STATE_TYPES)
    if not changed and _in_kernel(border.before) != _in_kernel(border.after):
        changed = ["fp8_recipe"]
    if changed:
        message = f"{border.there}: the optimizer stores its states in a different form ({border.words(changed)})"
        yield Finding(message, border.where(*changed), "test it on a short run first, or use the same types")


def _in_kernel(run: ResolvedRun) -> bool:
    """The precision-aware optimizer leaves master weights to Transformer Engine's kernel."""
    kept = run.value("main_params_dtype") not in (None, "fp32") or run.on("optimizer_cpu_offload")
    return run.on("use_precision_aware_optimizer") and (kept or run.value("fp8_recipe") in (None, "delayed"))


@_rule("phase-states", "error", f"{_CHECKPOINTING} load_checkpoint: without them the schedule begins anew")
def states_are_saved(border: Border) -> Iterator[Finding]:
    if border.before.on("no_save_optim"):
        message = (
            f"{border.there}: with no_save_optim the checkpoint has neither optimizer states nor the position in the "
            "schedule"
        )
        yield Finding(message, border.before.where("no_save_optim"), "remove no_save_optim")


@_rule("phase-resharding", "error", f"{_DISTRIBUTED} sharded_state_dict (dp_reshardable); run on CPU")
def states_fit_the_split(border: Border) -> Iterator[Finding]:
    split = border.changed(_SPLIT)
    if split and border.before.value("ckpt_format") == "torch":
        message = (
            f"{border.there}: {border.words(split)}, but a checkpoint in format torch has one file per rank of this "
            "split"
        )
        yield Finding(
            message, border.where(*split), "use megatron.ckpt_format: torch_dist, or the same split in all phases"
        )
        return
    in_buckets = border.before.on("use_distributed_optimizer") and not border.before.on(
        "dist_ckpt_optim_fully_reshardable"
    )
    changed = border.changed((*_SPLIT, *_BUCKETS))
    if changed and in_buckets and border.before.value("ckpt_format") == "torch_dist":
        message = f"{border.there}: {border.words(changed)}, but the checkpoint stores the optimizer states by bucket"
        fix = "set megatron.dist_ckpt_optim_fully_reshardable: true for all phases, or use the same split"
        if advisories.fully_reshardable_shifts(advisories.setup_of_run(border.before)):
            # Megatron would write shifted states, so the setting alone is no way out.
            fix = (
                "use the same split. Here megatron.dist_ckpt_optim_fully_reshardable: true saves correct states only "
                "without overlap_grad_reduce, because gradient buckets are padded (Megatron-LM pull request 5077)"
            )
        yield Finding(message, border.where(*changed), fix)


@_rule(
    "phase-learning-rate",
    "error",
    "megatron/core/optimizer/optimizer.py param_group_identifier_keys (0.19); run on CPU",
)
def groups_are_found(border: Border) -> Iterator[Finding]:
    changed = border.changed(_RATES)
    if changed and border.after.megatron >= (0, 19):
        message = (
            f"{border.there}: {border.words(changed)}, but Megatron 0.19 finds optimizer states in the checkpoint by "
            "these values"
        )
        yield Finding(
            message,
            border.where(*changed),
            "keep lr and min_lr the same; warm-up and decay set the course of the learning rate",
        )


@_rule(
    "phase-expert-groups",
    "error",
    "megatron/core/optimizer/optimizer.py param_group_identifier_keys (is_expert_parallel); run on CPU",
)
def expert_groups_are_found(border: Border) -> Iterator[Finding]:
    sizes = border.before.layout.ep, border.after.layout.ep
    if border.before.on("num_experts") and min(sizes) == 1 < max(sizes):
        message = (
            f"{border.there}: EP goes from {sizes[0]} to {sizes[1]}, but Megatron matches the experts' optimizer "
            "states by whether they are expert parallel"
        )
        fix = f"keep parallel.ep above 1 in both phases, or {sizes[0]} in both"
        yield Finding(message, border.where("expert_model_parallel_size"), fix)


@_rule("phase-schedule", "error", f"{_SCHEDULER}: assertions; run on CPU")
def schedule_is_the_same(border: Border) -> Iterator[Finding]:
    changed = border.changed(_SCHEDULE)
    if changed and not border.after.on("override_opt_param_scheduler"):
        kept = border.after.on("use_checkpoint_opt_param_scheduler")
        what = "uses the checkpoint's values and ignores these" if kept else "rejects the checkpoint"
        message = f"{border.there}: the schedule changes ({border.words(changed)}), and Megatron {what}"
        fix = "use the same schedule, or set megatron.override_opt_param_scheduler: true to change it at this iteration"
        if not set(changed).isdisjoint(_RATES):
            fix = "use the same schedule; override_opt_param_scheduler cannot change lr and min_lr"
        yield Finding(message, border.where(*changed), fix)


@_rule("phase-no-effect", "warning", "run on CPU: the optimizer's parameter groups come from the checkpoint, whole")
def groups_are_loaded(border: Border) -> Iterator[Finding]:
    changed = border.changed(("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"))
    if changed:
        message = f"{border.there}: {border.words(changed)} has no effect: Megatron uses the values of the checkpoint"
        yield Finding(message, border.where(*changed), "use the same values in all phases")


@_rule("phase-schedule-breaks", "warning", f"{_SCHEDULER}: override_opt_param_scheduler")
def schedule_goes_through(border: Border) -> Iterator[Finding]:
    # Parameter groups keep their lr and min_lr: up to 0.18 an advisory says so, from 0.19 on loading fails.
    changed = [name for name in border.changed(_SCHEDULE) if name not in _RATES]
    if changed and border.after.on("override_opt_param_scheduler"):
        message = f"{border.there}: the schedule changes ({border.words(changed)}), so the learning rate may jump"
        yield Finding(
            message, border.where(*changed), "use the same schedule, or silence this warning if the jump is intended"
        )


@_rule("phase-global-batch", "error", f"{_SCHEDULER} counts samples; get_train_valid_test_num_samples; run on CPU")
def batch_is_the_same(border: Border) -> Iterator[Finding]:
    if border.before.layout.global_batch != border.after.layout.global_batch:
        sizes = f"{border.before.layout.global_batch} to {border.after.layout.global_batch}"
        message = (
            f"{border.there}: the global batch changes from {sizes}. Megatron builds the schedule and the dataset "
            "for iterations x global batch samples, so both would change at this point"
        )
        ramp = "step_batch_size_schedule" if border.after.megatron >= (0, 18) else "rampup_batch_size"
        fix = f"use the same batch.global; megatron.{ramp} increases it within one schedule"
        yield Finding(message, border.where("global_batch_size"), fix)


@_rule("phase-sequence", "warning", "megatron/core/datasets/gpt_dataset.py: the sample index is made for one length")
def sequence_is_the_same(border: Border) -> Iterator[Finding]:
    if border.changed(("seq_length",)):
        message = (
            f"{border.there}: {border.words(('seq_length',))}. Training continues at the same sample number, which "
            "is a different position in the data"
        )
        yield Finding(message, border.where("seq_length"), "silence this warning if the order of the data may change")


@_rule("phase-data", "warning", "megatron/training/training.py: consumed samples are skipped in whatever data is given")
def data_is_the_same(border: Border) -> Iterator[Finding]:
    changed = border.changed(_DATA)
    if changed:
        message = (
            f"{border.there}: the data changes ({', '.join(changed)}). Training starts at the sample number that the "
            "earlier phases reached, not at the first sample of the new data"
        )
        yield Finding(message, border.where(*changed), "silence this warning if this is intended")


def _shown(value: object) -> str:
    if value is None:
        return "none"
    return str(value)


CODES: Mapping[str, Severity] = {rule.code: rule.severity for rule in _RULES} | {"phase-start": "error"}
