"""Find the fix for a sentence with which Megatron refuses a recipe.

Megatron states the fact (`num_experts must be divisible by ...`), in a sentence or as a bare assertion. A fix names
the fields of the recipe that the sentence names, with their values, and the fix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.megatron.flag_map import FIELDS, MODEL_FLAGS
from fp8launch.megatron.schema import Flag, load_schema
from fp8launch.untyped import as_int

# Megatron's attribute to the field of a recipe, unless the field has the value of the flag (flag_map).
_FIELDS = {
    "fp8": "precision.format",
    "fp8_recipe": "precision.recipe",
    "fp8_param": "precision.param_gather",
    "fp8_param_gather": "precision.param_gather",
    "fp4": "precision.format",
    "fp4_recipe": "precision.recipe",
    "fp4_param_gather": "precision.param_gather",
    "first_last_layers_bf16": "precision.bf16_layers",
    "num_layers_at_start_in_bf16": "precision.bf16_layers.start",
    "num_layers_at_end_in_bf16": "precision.bf16_layers.end",
    "sequence_parallel": "parallel.sequence",
    "use_megatron_fsdp": "parallel.fsdp",
    "use_torch_fsdp2": "parallel.fsdp",
    "data_path": "data.blend",
    "mock_data": "data.kind",
    "virtual_pipeline_model_parallel_size": "parallel.vp",
}


def _fields_of_flags() -> dict[str, str]:
    """Return the recipe field that sets each flag."""
    found = {}
    for path, fields in FIELDS.items():
        for field, flag in fields.items():
            found[flag] = ".".join((*path, field))
    return found


_OF_FLAG = _fields_of_flags()
# Other names of arguments in Megatron's sentences.
_ALIASES = {
    "num_moe_experts": "num_experts",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_param": "fp8_param_gather",
    "data_parallel_size": "",
}
# Arguments that a sentence is about without naming them.
_PHRASES: tuple[tuple[str, str], ...] = (
    (r"pipeline[- ]model[- ]parallel size|pipeline stage|interleaved pipeline", "pipeline_model_parallel_size"),
    (r"virtual pipeline stage|interleaved pipeline", "num_layers_per_virtual_pipeline_stage"),
    (r"[Nn]umber of (?:decoder )?layers", "num_layers"),
    (r"[Nn]umber of experts", "num_experts"),
    (r"expert model parallel", "expert_model_parallel_size"),
    (r"[Tt]ensor parallel communication", "tp_comm_overlap"),
    (r"sequence parallelism", "sequence_parallel"),
    (r"seq-length", "seq_length"),
    (r"context-parallel-size", "context_parallel_size"),
    (r"Megatron[- ]FSDP|megatron fsdp", "use_megatron_fsdp"),
    (r"checkpointing format", "ckpt_format"),
    (r"[Rr]euse grad buffer", "reuse_grad_buf_for_mxfp8_param_ag"),
    (r"num_buckets", "ddp_num_buckets"),
    (r"bucket_size", "ddp_bucket_size"),
    (r"overlap grad reduce", "overlap_grad_reduce"),
    (r"overlap param gather", "overlap_param_gather"),
    (r"Muon optimizer", "optimizer"),
    (r"distributed optimizer", "use_distributed_optimizer"),
    (r"optimizer cpu offload", "optimizer_cpu_offload"),
    (r"precision-aware optimizer", "use_precision_aware_optimizer"),
    (r"Delayed scaling", "fp8_recipe"),
    (r"alltoall|allgather", "moe_token_dispatcher_type"),
    (r"moe_act|layernorm recompute", "recompute_modules"),
    (r"iteration-based training", "train_samples"),
    (r"sample-based training", "train_iters"),
)
# The fix for a sentence without a known name.
NAMELESS = "change the argument that the message names; `fp8launch render RECIPE --as args` shows all arguments"
_NAME = re.compile(r"--[a-z][a-z0-9-]+|[A-Za-z][A-Za-z0-9]*(?:_[A-Za-z0-9]+)+|\blr\b|\bfp8\b|\bfp4\b|\bbf16\b|\bfp16\b")

# Variables of Megatron and its libraries. Other words in capitals are names in their code.
_VARIABLE = re.compile(r"(CUDA|CUBLAS|CUDNN|MAMBA|MEGATRON|NCCL|NVSHMEM|NVTE|PYTORCH|TORCH|TRITON|UCC|UCX)_[A-Z0-9_]+$")


def names_in(run: ResolvedRun, message: str) -> list[str]:
    """Return the arguments (by Megatron's attribute name) and variables that a message names, each once, in order."""
    schema = load_schema(run.args.version)
    found = []
    for word in _NAME.findall(message):
        flag = schema.find(_ALIASES.get(word, word) or word)
        found.append(flag.dest if flag else word)
    for pattern, name in _PHRASES:
        if re.search(pattern, message):
            found.append(name)
    return list(dict.fromkeys(found))


def recipe_field(run: ResolvedRun, name: str) -> str | None:
    """Return the recipe field of an argument, such as `batch.sequence` for seq_length; None if there is none."""
    flag = _flag(run, name)
    if flag is None and name in run.loaded.recipe.launch.config:
        return f"launch.config.{name}"
    if flag is None and (name in run.env or _VARIABLE.match(name)):
        return f"env.{name}"
    if flag is None:
        return None
    for key in (name, flag.dest, flag.name):
        if key in _FIELDS:
            return _FIELDS[key]
        if key in _OF_FLAG:
            return _OF_FLAG[key]
    section = "model" if flag.name in MODEL_FLAGS else "megatron"
    return f"{section}.{flag.name}"


def _flag(run: ResolvedRun, name: str) -> Flag | None:
    """Return the flag of this name, else the first one that sets this attribute."""
    schema = load_schema(run.args.version)
    return schema.find(name) or next(iter(schema.setting(name)), None)


def fix_for(run: ResolvedRun, message: str, involved: Sequence[str] = ()) -> str:
    """Return what to change in the recipe, from Megatron's sentence or its bare assertion.

    `involved` are arguments that the refusing code reads, for a sentence that names none.
    """
    for pattern, advice in KNOWN:
        if re.search(pattern, message):
            return advice
    for pattern, advise in _SENTENCES:
        match = re.search(pattern, message)
        if match is not None:
            found = advise(run, match.groups())
            if found:
                return found
    named = [name for name in names_in(run, message) if recipe_field(run, name)]
    stated = list(dict.fromkeys(_shown(run, name) for name in named or involved))
    if not stated:
        return NAMELESS
    if len(stated) == 1:
        verb = "set" if stated[0].endswith(_NOT_SET) else "change"
        return f"{verb} {stated[0].removesuffix(_NOT_SET)}"
    return f"change {', '.join(stated[:-1])} or {stated[-1]}, so that they agree"


_NOT_SET = " (not set)"


def _shown(run: ResolvedRun, name: str) -> str:
    """Return a field with its value, from the recipe or Megatron's default."""
    field = recipe_field(run, name) or name
    value = run.arguments.get(name)
    if field.startswith("env."):
        value = run.env.get(name)
    elif field.startswith("launch.config."):
        value = run.loaded.recipe.launch.config[name]
    if value is None:
        return f"{field}{_NOT_SET}"
    if isinstance(value, bool):
        value = str(value).lower()
    return f"{field} ({value})"


def _assignment(run: ResolvedRun, name: str, value: object) -> str | None:
    """`model: {max_position_embeddings: 32768}`."""
    field = recipe_field(run, name)
    if field is None:
        return None
    *sections, last = field.split(".")
    text = f"{last}: {value}"
    for section in reversed(sections):
        text = f"{section}: {{{text}}}"
    return f"`{text}`"


def _raise_to(run: ResolvedRun, groups: Sequence[str]) -> str | None:
    small, _, large, value = groups
    assignment, other = _assignment(run, small, value), recipe_field(run, large)
    if not assignment or not other:
        return None
    return f"set {assignment}, or lower {other}"


def _multiple_of(run: ResolvedRun, groups: Sequence[str]) -> str | None:
    total, parts = recipe_field(run, groups[0]), recipe_field(run, groups[1])
    if total is None or parts is None:
        return None
    size = as_int(run.arguments.get(groups[1]))
    if size is not None and size > 1:
        return f"make {total} a multiple of {size}, or change {parts}"
    return f"make {total} a multiple of {parts}, or change {parts}"


def _set_one(run: ResolvedRun, groups: Sequence[str]) -> str | None:
    """A bare `assert args.x`, or one flag that needs another."""
    flag = _flag(run, groups[-1].lstrip("-").replace("-", "_"))
    if flag is None:
        return None
    value = "true"
    if flag.takes_value:
        value = f"<{flag.type}>"
    if flag.choices:
        value = " | ".join(map(str, flag.choices))
    if flag.dest == "sequence_parallel":
        value = "auto"
    return f"set {_assignment(run, flag.dest, value)}"


def _drop_one(run: ResolvedRun, groups: Sequence[str]) -> str | None:
    field = recipe_field(run, groups[0])
    if field is None:
        return None
    return f"remove {field}, or set it to null"


def _needs(run: ResolvedRun, groups: Sequence[str]) -> str | None:
    first, second = (names_in(run, group)[:1] for group in groups)
    if not first or not second:
        return None
    wanted, field = _set_one(run, second), recipe_field(run, first[0])
    if not wanted or not field:
        return None
    return f"{wanted}, or remove {field}"


def _excludes(run: ResolvedRun, groups: Sequence[str]) -> str | None:
    fields = []
    for group in groups:
        fields += [recipe_field(run, name) for name in names_in(run, group)[:1]]
    if len(fields) < 2 or None in fields or fields[0] == fields[1]:
        return None
    return f"remove {fields[0]} or {fields[1]}"


def _attention(run: ResolvedRun, groups: Sequence[str]) -> str | None:
    stated = run.value("attention_backend")
    if stated is None or str(getattr(stated, "name", stated)) == "auto":
        return "change the setting that the reason names"
    return (
        "allow other backends with `megatron: {attention_backend: auto}`, or change the setting that the reason names"
    )


# Patterns of the most frequent refusals of 0.17 to 0.19, with their fixes.
KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"layers per pipeline stage must be divisible",
        "choose model.num_layers as a multiple of parallel.pp x megatron.num_layers_per_virtual_pipeline_stage, "
        "or set the stages with megatron.pipeline_model_parallel_layout",
    ),
    (r"num-layers or encoder-num-layers should be specified", "set model.num_layers"),
    (r"args\.encoder_seq_length is not None", "set batch.sequence"),
    (
        r"number of layers at (first|last|middle) stage",
        "change megatron.decoder_first_pipeline_num_layers or megatron.decoder_last_pipeline_num_layers: each stage "
        "needs a multiple of parallel.vp, and the stages between them equal shares of the other layers",
    ),
    (
        r"mtp layers in layout must match",
        "write one `m` for each of model.mtp_num_layers, after the last `t` of megatron.pipeline_model_parallel_layout",
    ),
    (
        r"decoder layers must be placed before MTP",
        "write the `m` after the last `t` of megatron.pipeline_model_parallel_layout",
    ),
    (
        r"decoder layers .*must match num_layers|layers? in .*layout.*num_layers",
        "write one `t` for each of model.num_layers in megatron.pipeline_model_parallel_layout",
    ),
    (
        r"(first layer must be embedding|last layer must be loss|(Embedding|Loss) must be specified exactly once)",
        "begin megatron.pipeline_model_parallel_layout with its only `E` and end it with its only `L`",
    ),
    (
        r"Invalid layer character",
        "write megatron.pipeline_model_parallel_layout with `E`, `t`, `m` and `L`, with `|` between stages and without "
        "spaces, such as Et*8|(t*8|)*2t*8L",
    ),
    (r"Bias in Moe is only supported when ETP", "set `parallel: {etp: 1}`, or `model: {disable_bias_linear: true}`"),
    (
        r"multiple of 2 \* context-parallel-size",
        "choose batch.sequence as a multiple of 2 x parallel.cp",
    ),
    (
        r"fp8-param-gather only supported with",
        "set `megatron: {use_distributed_optimizer: true}`, or remove precision.param_gather",
    ),
    (r"fp4-format and --fp8-format cannot", "remove fp8_format or fp4_format, or set only `precision:`"),
    (
        r"overlap-param-gather with --overlap-grad-reduce",
        "set `megatron: {overlap_grad_reduce: true}`, or remove megatron.overlap_param_gather",
    ),
    (
        r"requires the `?fsdp_dtensor|fsdp_dtensor is only",
        "use `parallel: {fsdp: megatron}`, which sets ckpt_format fsdp_dtensor, and remove megatron.ckpt_format",
    ),
    (
        r"num_experts must be non None",
        "set model.num_experts, or remove parallel.ep, which divides experts",
    ),
    (r"[Nn]umber of experts should be a multiple", "choose parallel.ep as a divisor of model.num_experts"),
    (
        r"expected iteration-based",
        "remove train.iterations or megatron.train_samples",
    ),
    (r"expected sample-based", "set the schedule in samples too: lr_decay_samples and lr_warmup_samples"),
    (
        r"cpu offload must be used in conjunction with",
        "use `precision: {recipe: delayed}`, or remove precision.param_gather or megatron.optimizer_cpu_offload",
    ),
    (
        r"overlap can happen only when sequence parallelism",
        "set `parallel: {sequence: auto}`, or remove tp_comm_overlap",
    ),
    (
        r"no-check-for-nan-in-loss-and-grad should be set",
        "set `megatron: {no_check_for_nan_in_loss_and_grad: true}`, or remove megatron.cuda_graph_impl full_iteration",
    ),
    (
        r"NCCL_GRAPH_REGISTER=0",
        "set `env: {NCCL_GRAPH_REGISTER: 0}`, or remove expandable_segments from PYTORCH_CUDA_ALLOC_CONF",
    ),
    (
        r"cross entropy loss fusion is disabled",
        "set `megatron: {cross_entropy_fusion_impl: native}`, or remove megatron.cross_entropy_loss_fusion",
    ),
    (
        r"only supported with interleaved pipeline",
        "set parallel.vp and parallel.pp above 1, or remove megatron.overlap_param_gather_with_optimizer_step",
    ),
    (
        r"num_query_groups .* must be a multiple or divisor",
        "choose parallel.tp as a multiple or a divisor of model.num_query_groups",
    ),
    (
        r"fp8_param must be used together",
        "remove precision.param_gather, or set precision.recipe to an FP8 recipe",
    ),
    (
        r"num_layers_at_(start|end)_in_bf16 .* must be between",
        "lower precision.bf16_layers.start and .end to at most the layers of a pipeline stage",
    ),
    (
        r"recompute_method must be",
        "set `megatron: {recompute_method: uniform}` (or block) and recompute_num_layers: 1",
    ),
    (
        r"recompute_num_layers must be between|recompute_granularity: full recompute_num_layers",
        "set `megatron: {recompute_num_layers: 1}`, or up to the number of layers of a pipeline stage",
    ),
    (
        r"fp8_quantizer_factory must be provided",
        "set megatron.fp8_quantizer_factory to the import path of a factory, or use another precision.recipe",
    ),
    (r"fp8_output_proj requires", "remove megatron.fp8_output_proj, or use `precision: {recipe: mxfp8, format: e4m3}`"),
    (
        r"[Rr]euse grad buffer only when keeping",
        "remove megatron.reuse_grad_buf_for_mxfp8_param_ag, or set `precision: {param_gather: true}` with mxfp8",
    ),
    (r"Cannot specify both.*num.buckets", "remove megatron.ddp_num_buckets or megatron.ddp_bucket_size"),
    (
        r"can only be fp32 when not using precision-aware",
        "set the type under `optimizer:`, which enables the precision-aware optimizer, or use fp32",
    ),
    (
        r"fp8/fp4 must be specified when moe_router_padding",
        "remove megatron.moe_router_padding_for_quantization, or set precision.recipe to an FP8 recipe",
    ),
    (
        r"dispatcher does not support moe_router_padding",
        "set `megatron: {moe_token_dispatcher_type: alltoall}`, or remove moe_router_padding_for_quantization",
    ),
    (
        r"Delayed scaling does not support moe_act and layernorm",
        "remove moe_act and layernorm from megatron.recompute_modules, or use `precision: {recipe: tensorwise}`",
    ),
    # Refusals of layers when they are built or run, which only a rehearsal reaches.
    (
        r"fused_single_qkv_rope requested",
        "set `launch: {config: {fused_single_qkv_rope: false}}`: Megatron lacks it with normalized queries and keys",
    ),
    (
        r"cuda_sync_point must be after",
        "remove megatron.cuda_graph_impl (moe/layer_graphs), or train the experts in bf16",
    ),
    (
        r"hidden_size % args.num_attention_heads",
        "make model.num_attention_heads a divisor of model.hidden_size, or set model.kv_channels",
    ),
)

_ARG = r"(?:args|self|config)\.(\w+)"


def _equal_stages(run: ResolvedRun, _groups: Sequence[str]) -> str:
    """Megatron says the same about layers alone and about layers together with the embedding and the loss."""
    flags = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    if counted := [name for name in flags if run.on(name)]:
        places = " and ".join(f"megatron.{name}" for name in counted)
        return (
            f"choose model.num_layers so that it is a multiple of parallel.pp after adding {len(counted)} for {places}"
        )
    return (
        "choose parallel.pp as a divisor of model.num_layers, or set the stages with `megatron: "
        "{pipeline_model_parallel_layout: ...}`"
    )


# Pattern of Megatron's sentence to the fix. The first one that returns a fix decides.
_SENTENCES: tuple[tuple[str, Callable[[ResolvedRun, Sequence[str]], str | None]], ...] = (
    (r"(\w+) \((\d+)\) must be greater than or equal to (\w+) \((\d+)\)", _raise_to),
    (r"(\w+) \(\d+\) must be (?:a multiple of|divisible by) (\w+) \(\d+\)", _multiple_of),
    (rf"assert {_ARG} % {_ARG} == 0", _multiple_of),
    (rf"assert {_ARG} is not None", _set_one),
    (rf"assert not {_ARG}", _drop_one),
    (rf"assert {_ARG} is None", _drop_one),
    (rf"assert {_ARG}$", _set_one),
    (r"no longer valid, use (--[a-z-]+)", _set_one),
    (r"No dot product attention backend", _attention),
    (r"[Nn]umber of layers should be divisible by the pipeline|must be divisible ?by pipeline_model_parallel_size",
     _equal_stages),
    (r"^(.*?)\b(?:cannot be used|is incompatible|are incompatible|is not compatible|not supported|does not support)"
     r"(.*)$", _excludes),
    (r"^(.*?)\b(?:requires|require|needs|only supported with|only works with|is only supported when"
     r"|must be used with|should be used with|only effective when)\b(.*)$", _needs),
)  # fmt: skip
