"""Check schedule, evaluation, tokenizer and error handling, for what stops a run at start or hides why it failed."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule

_SCHEDULER = "megatron/core/optimizer_param_scheduler.py"


@rule(
    "evaluation-without-interval",
    "error",
    source="megatron/training/training.py get_train_valid_test_num_samples divides by None; run on H200",
    scope="megatron_lm",
)
def evaluation_has_an_interval(run: ResolvedRun) -> Iterator[Finding]:
    """The interval has had no default since 0.16, and Megatron reads it even with eval_iters 0. Our entry sets it."""
    if run.value("eval_interval") is None and not run.on("full_validation") and not run.on("skip_train"):
        message = "eval_interval is not set; without it Megatron fails at start, even when eval_iters is 0"
        yield Finding(
            message, run.where("eval_iters"), "add `eval_interval: 1000`; with eval_iters 0 no evaluation runs"
        )


@rule(
    "dataset-cache-folder",
    "error",
    source="megatron/core/datasets/blended_megatron_dataset_config.py __post_init__; run with Bridge 0.6.0 on a CPU",
    says="must be provided when using --dataloader-",
)
def caches_have_a_folder(run: ResolvedRun) -> Iterator[Finding]:
    for name in ("dataloader_fast_cache_load", "dataloader_defer_npy_index_mmap"):
        if run.on(name) and not run.on("data_cache_path"):
            message = f"{name} reads dataset caches that were built before, but no folder for caches is set"
            fix = "set megatron.data_cache_path to the folder with the caches, or turn the flag off"
            if run.software.megatron_bridge is not None:
                fix = (
                    "set bridge.overrides: {dataset: {path_to_cache: DIR}}, or turn both flags off: "
                    "{dataset: {fast_cache_load: false, defer_npy_index_mmap: false}}"
                )
            yield Finding(message, run.where(name), fix)
            return


@rule("no-learning-rate", "error", source=f"{_SCHEDULER}:60: float(None)", scope="megatron_lm")
def there_is_a_learning_rate(run: ResolvedRun) -> Iterator[Finding]:
    if run.value("lr") is None and not run.on("skip_train"):
        yield Finding("no learning rate is set, and Megatron has no default", run.where("min_lr"), "set train.lr")


@rule(
    "no-training-length",
    "error",
    source="megatron/training/training.py get_optimizer_param_scheduler",
    scope="megatron_lm",
)
def there_is_an_end(run: ResolvedRun) -> Iterator[Finding]:
    lengths = ("train_iters", "train_samples", "skip_train")
    if not any(map(run.on, lengths)):
        yield Finding("the number of iterations is not set", run.where(), "set train.iterations")


@rule(
    "warmup-too-long",
    "error",
    source=f"{_SCHEDULER}:74: lr_warmup_steps < lr_decay_steps, a bare assertion",
    scope="megatron_lm",
)
def warmup_ends_before_decay(run: ResolvedRun) -> Iterator[Finding]:
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


@rule("learning-rate-schedule", "error", source=f"{_SCHEDULER}:57-85, bare assertions", scope="megatron_lm")
def schedule_is_whole(run: ResolvedRun) -> Iterator[Finding]:
    lr, first, least = run.value("lr"), run.value("lr_warmup_init"), run.value("min_lr")
    if lr is not None and first is not None and first > lr:
        message = f"the warm-up starts at a learning rate of {first:g}, above its end value {lr:g}"
        yield Finding(message, run.where("lr_warmup_init"), "lower lr_warmup_init")
    if least is not None and least < 0:
        yield Finding("the minimum learning rate is below zero", run.where("min_lr"), "use 0 or more")
    unit = "iters" if run.on("train_iters") else "samples"
    if run.value("lr_decay_style") == "WSD" and run.value(f"lr_wsd_decay_{unit}") is None:
        message = f"lr_decay_style WSD needs lr_wsd_decay_{unit}, the length of its decay"
        yield Finding(message, run.where("lr_decay_style"), f"set lr_wsd_decay_{unit}")
    start, end = run.value("start_weight_decay"), run.value("end_weight_decay")
    if start is not None and end is not None and (start < 0 or end < start):
        message = f"weight decay goes from {start:g} to {end:g}, but it must start at 0 or more and may not decrease"
        yield Finding(
            message,
            run.where("end_weight_decay", "start_weight_decay"),
            "set end_weight_decay to at least start_weight_decay",
        )
    if run.on("override_opt_param_scheduler") and run.on("use_checkpoint_opt_param_scheduler"):
        message = "override_opt_param_scheduler and use_checkpoint_opt_param_scheduler cannot be combined"
        yield Finding(message, run.where("override_opt_param_scheduler"), "remove one of them")


@rule(
    "null-tokenizer-vocabulary", "error", source="run: NullTokenizer.__init__ asks for vocab_size", scope="megatron_lm"
)
def null_tokenizer_knows_its_size(run: ResolvedRun) -> Iterator[Finding]:
    if run.value("tokenizer_type") == "NullTokenizer" and not run.on("vocab_size"):
        message = "the NullTokenizer needs vocab_size"
        yield Finding(message, run.where("tokenizer_type"), "set model.vocab_size, such as 128256 for Llama 3")


@rule(
    "nan-without-save",
    "warning",
    source="run: TypeError in rerun_state_machine.py instead of exit code 16",
    scope="megatron_lm",
)
def a_nan_can_be_told(run: ResolvedRun) -> Iterator[Finding]:
    checked = run.on("check_for_nan_in_loss_and_grad") and run.value("rerun_mode") != "disabled"
    if checked and run.value("save") is None:
        message = (
            "a NaN would end the run with a TypeError: the rerun state machine saves a checkpoint, but no save "
            "directory is set"
        )
        fix = "set checkpoint.dir, or `rerun_mode: disabled` for a run that saves nothing"
        yield Finding(message, run.where("rerun_mode", "train_iters"), fix)


@rule(
    "no-tokenizer",
    "error",
    source="megatron/core/tokenizers/utils/build_tokenizer.py: no type, no tokenizer",
    scope="megatron_lm",
)
def there_is_a_tokenizer(run: ResolvedRun) -> Iterator[Finding]:
    """Megatron-LM's pretrain_gpt.py falls back to GPT2BPETokenizer, which needs files; our entry has no fallback."""
    fallback = "tokenizer_type" in run.entry.fills_in and run.on("vocab_file")
    if "tokenizer_type" not in run.given and not fallback:
        yield Finding("no tokenizer is set", run.where("data_path", "mock_data"), "set data.tokenizer.type")


@rule(
    "no-data",
    "warning",
    source="megatron/core/datasets/blended_megatron_dataset_config.py: mock without a blend",
    scope="megatron_lm",
)
def data_is_named(run: ResolvedRun) -> Iterator[Finding]:
    sources = ("mock_data", "data_path", "train_data_path", "data_args_path", "per_split_data_args_path")
    if not any(map(run.on, sources)):
        message = "no data is set, so Megatron silently trains on mock data"
        yield Finding(message, run.where("split"), "set `data: {kind: mock}`, or a blend of your data")


@rule(
    "no-save-optim-resume",
    "error",
    source="megatron/training/checkpointing.py load_checkpoint: state_dict['optimizer'], a KeyError",
    scope="megatron_lm",
)
def no_save_optim_resume(run: ResolvedRun) -> Iterator[Finding]:
    recipe = run.loaded.recipe
    if run.on("no_save_optim") and recipe.goes_on and (recipe.survive.attempts > 1 or recipe.phases):
        message = "no_save_optim leaves the optimizer out of the checkpoints that the run continues from"
        yield Finding(message, run.where("no_save_optim"), "remove no_save_optim, or set survive.attempts to 1")


@rule(
    "ft-launcher",
    "error",
    source="megatron/training/ft_integration.py: RankMonitorClient needs the socket that ft_launcher opens",
    scope="megatron_lm",
)
def ft_launcher(run: ResolvedRun) -> Iterator[Finding]:
    if run.on("enable_ft_package"):
        message = "enable_ft_package needs processes started by ft_launcher; fp8launch starts them by srun or torchrun"
        fix = "remove enable_ft_package: survive.attempts and survive.hang_after restart runs that fail or hang"
        yield Finding(message, run.where("enable_ft_package"), fix)
