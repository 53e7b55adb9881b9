"""Whether one phase can go on from the checkpoint of the one before, and whether schedule and data go through.

Each finding is about two neighbours; what changes, and back again, is found at both borders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Finding
from fp8launch.megatron.phases import Phase
from fp8launch.megatron.schema import load_schema
from fp8launch.megatron.sections import MODEL_FLAGS
from fp8launch.problems import Problem, Severity

_CHECKPOINTING = "megatron/training/checkpointing.py"
_SCHEDULER = "megatron/core/optimizer_param_scheduler.py load_state_dict"
_DISTRIBUTED = "megatron/core/optimizer/distrib_optimizer.py"

# Of what describes a model, these change no tensor: they may change from phase to phase.
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
_SPLIT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)  # fmt: skip
# On what the distributed optimizer's buckets depend, beside the split.
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

    before: Facts
    after: Facts
    names: tuple[str, str]

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of these arguments that are not the same in both."""
        return [name for name in names if self.before.value(name) != self.after.value(name)]

    def where(self, *names: str) -> str:
        """Where the later phase states one of these, else where the earlier one does."""
        stated = [*names, "global_batch_size"]
        place = next((self.after.places[n] for n in names if n in self.after.places), None)
        return place or self.before.where(*stated)

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


def problems(phases: Sequence[Phase], seen: Sequence[Facts]) -> list[Problem]:
    """What keeps phases, in order and with their facts, from following one another."""
    found = [*_start(seen[0])] if seen else []
    for i in range(1, len(seen)):
        border = Border(seen[i - 1], seen[i], (phases[i - 1].name, phases[i].name))
        for rule in _RULES:
            found += [Problem(rule.severity, rule.code, *finding) for finding in rule.find(border)]
    return found


def _start(first: Facts) -> Iterator[Problem]:
    """Phases are counted from iteration 0, so a start in the middle of another training is none of theirs."""
    load, save = first.value("load"), first.value("save")
    if load and load != save and not first.on("finetune"):
        message = f"the run loads {load} and goes on at its iteration, and phases are counted from the beginning"
        fix = "set megatron.finetune: true, which takes the weights and begins at 0, or drop checkpoint.load"
        yield Problem("error", "phase-start", message, first.where("load"), fix)


@_rule("phase-model", "error", f"{_CHECKPOINTING} check_checkpoint_args; torch.distributed.checkpoint compares shapes")
def same_model(border: Border) -> Iterator[Finding]:
    names = MODEL_FLAGS - _NO_TENSOR
    if border.after.value("position_embedding_type") == "learned_absolute":
        names |= {"max_position_embeddings"}
    schema = load_schema(border.after.args.version)
    changed = border.changed(sorted(flag.dest for name in names if (flag := schema.find(name))))
    if changed:
        message = f"{border.there}: the model changes ({border.words(changed)}), which no checkpoint can follow"
        yield Finding(message, border.where(*changed), "keep one model in all phases")


@_rule("phase-layers", "warning", "megatron/core/models/gpt/gpt_layer_specs.py: layers with other names of weights")
def same_layers(border: Border) -> Iterator[Finding]:
    changed = border.changed(("transformer_impl", "moe_grouped_gemm"))
    if changed:
        message = f"{border.there}: other layers ({border.words(changed)}), whose weights may have other names"
        yield Finding(message, border.where(*changed), "try it on a short run first, or keep the layers")


@_rule("phase-checkpoint-format", "error", f"{_CHECKPOINTING} load_checkpoint: one loader for each format")
def same_format(border: Border) -> Iterator[Finding]:
    changed = border.changed(("ckpt_format", "use_megatron_fsdp", "use_torch_fsdp2"))
    # It reads the older format where it is to write the newer one.
    reads = (border.before.value("ckpt_format"), border.after.value("ckpt_format")) == ("torch", "torch_dist")
    if changed and not (reads and changed == ["ckpt_format"]):
        message = f"{border.there}: the checkpoint would be of another format ({border.words(changed)})"
        yield Finding(message, border.where(*changed), "keep one format, and one kind of sharding, in all phases")


@_rule("phase-optimizer", "error", "megatron/core/optimizer/optimizer.py, each class has states of its own; run on CPU")
def same_optimizer(border: Border) -> Iterator[Finding]:
    changed = border.changed(("optimizer", "use_distributed_optimizer", "bf16", "fp16", "optimizer_cpu_offload"))
    if changed:
        message = f"{border.there}: another optimizer ({border.words(changed)}) cannot load the states of this one"
        yield Finding(message, border.where(*changed), "keep one optimizer and one type of weights in all phases")


@_rule("phase-optimizer-states", "warning", f"{_DISTRIBUTED}; optimizer_config.py __post_init__")
def same_state_types(border: Border) -> Iterator[Finding]:
    changed = border.changed(_STATE_TYPES)
    if not changed and _in_kernel(border.before) != _in_kernel(border.after):
        changed = ["fp8_recipe"]
    if changed:
        message = f"{border.there}: the optimizer keeps its states otherwise ({border.words(changed)})"
        yield Finding(message, border.where(*changed), "try it on a short run first, or keep their types")


def _in_kernel(run: Facts) -> bool:
    """The precision-aware optimizer leaves master weights to Transformer Engine's kernel."""
    kept = run.value("main_params_dtype") not in (None, "fp32") or run.on("optimizer_cpu_offload")
    return run.on("use_precision_aware_optimizer") and (kept or run.value("fp8_recipe") in (None, "delayed"))


@_rule("phase-states", "error", f"{_CHECKPOINTING} load_checkpoint: without them the schedule begins anew")
def states_are_saved(border: Border) -> Iterator[Finding]:
    if border.before.on("no_save_optim"):
        message = f"{border.there}: no_save_optim leaves neither the optimizer's states nor the place in the schedule"
        yield Finding(message, border.before.where("no_save_optim"), "drop no_save_optim")


@_rule("phase-resharding", "error", f"{_DISTRIBUTED} sharded_state_dict (dp_reshardable); run on CPU")
def states_fit_the_split(border: Border) -> Iterator[Finding]:
    split = border.changed(_SPLIT)
    if split and border.before.value("ckpt_format") == "torch":
        message = f"{border.there}: {border.words(split)}, and a checkpoint of format torch has a file for each place"
        yield Finding(message, border.where(*split), "use megatron.ckpt_format: torch_dist, or keep the split")
        return
    in_buckets = border.before.on("use_distributed_optimizer") and not border.before.on(
        "dist_ckpt_optim_fully_reshardable"
    )
    changed = border.changed((*_SPLIT, *_BUCKETS))
    if changed and in_buckets and border.before.value("ckpt_format") == "torch_dist":
        message = (
            f"{border.there}: {border.words(changed)}, and the checkpoint holds the optimizer's states bucket by bucket"
        )
        fix = "set megatron.dist_ckpt_optim_fully_reshardable: true for all phases, or keep the split"
        yield Finding(message, border.where(*changed), fix)


@_rule(
    "phase-learning-rate",
    "error",
    "megatron/core/optimizer/optimizer.py param_group_identifier_keys (0.19); run on CPU",
)
def groups_are_found(border: Border) -> Iterator[Finding]:
    changed = border.changed(("lr", "min_lr"))
    if changed and border.after.megatron >= (0, 19):
        message = f"{border.there}: {border.words(changed)}, by which Megatron 0.19 finds the states in the checkpoint"
        yield Finding(message, border.where(*changed), "keep lr and min_lr; warm-up and decay say how it goes")


@_rule("phase-schedule", "error", f"{_SCHEDULER}: assertions; run on CPU")
def schedule_is_the_same(border: Border) -> Iterator[Finding]:
    changed = border.changed(_SCHEDULE)
    if changed and not border.after.on("override_opt_param_scheduler"):
        kept = border.after.on("use_checkpoint_opt_param_scheduler")
        what = "takes the checkpoint's values and never looks at these" if kept else "refuses the checkpoint"
        message = f"{border.there}: the schedule changes ({border.words(changed)}), and Megatron {what}"
        fix = "keep the schedule, or set megatron.override_opt_param_scheduler: true to break it at this iteration"
        yield Finding(message, border.where(*changed), fix)


@_rule("phase-no-effect", "warning", "run on CPU: the optimizer's parameter groups come from the checkpoint, whole")
def groups_are_loaded(border: Border) -> Iterator[Finding]:
    changed = border.changed(("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum"))
    if changed:
        message = f"{border.there}: {border.words(changed)} does nothing: the checkpoint's own values are used"
        yield Finding(message, border.where(*changed), "keep them the same in all phases")


@_rule("phase-schedule-breaks", "warning", f"{_SCHEDULER}: override_opt_param_scheduler")
def schedule_goes_through(border: Border) -> Iterator[Finding]:
    changed = border.changed(_SCHEDULE)
    if changed and border.after.on("override_opt_param_scheduler"):
        message = f"{border.there}: the schedule changes ({border.words(changed)}), so the learning rate may jump"
        yield Finding(message, border.where(*changed), "keep the schedule, or silence this if the jump is wanted")


@_rule("phase-global-batch", "error", f"{_SCHEDULER} counts samples; get_train_valid_test_num_samples; run on CPU")
def batch_is_the_same(border: Border) -> Iterator[Finding]:
    if border.before.layout.global_batch != border.after.layout.global_batch:
        sizes = f"{border.before.layout.global_batch} to {border.after.layout.global_batch}"
        message = (
            f"{border.there}: the global batch changes from {sizes}. Schedule and data set are made for iterations x "
            "global batch samples, so both would be others from there on"
        )
        fix = "keep batch.global; megatron.rampup_batch_size lets it grow within one schedule"
        yield Finding(message, border.where("global_batch_size"), fix)


@_rule("phase-sequence", "warning", "megatron/core/datasets/gpt_dataset.py: the sample index is made for one length")
def sequence_is_the_same(border: Border) -> Iterator[Finding]:
    if border.changed(("seq_length",)):
        message = (
            f"{border.there}: {border.words(('seq_length',))}. The data set of the new length goes on at the same "
            "sample number, which is another place in the text"
        )
        yield Finding(message, border.where("seq_length"), "silence this if the order of the data may change")


@_rule("phase-data", "warning", "megatron/training/training.py: consumed samples are skipped in whatever data is given")
def data_is_the_same(border: Border) -> Iterator[Finding]:
    changed = border.changed(_DATA)
    if changed:
        message = (
            f"{border.there}: other data ({', '.join(changed)}). It begins at the sample number that the earlier "
            "phases reached, not at its own first"
        )
        yield Finding(message, border.where(*changed), "silence this if that is meant")


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


CODES: Mapping[str, Severity] = {rule.code: rule.severity for rule in _RULES} | {"phase-start": "error"}
