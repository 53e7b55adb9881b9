"""Hugging Face Accelerate, a peer to compare with: FSDP2, DDP or ZeRO, in FP8 with torchao or Transformer Engine.

The job's program is injob/accelerate_train.py. It reads Megatron's arguments for the model, the batch and the
optimizer. Settings that it does not read are refused, so that no setting is silently ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from fp8launch.diagnostics import ANSWER_IS_NO, Problem, UserError
from fp8launch.engines.base import EngineArguments, EngineDescription, Entry, EntryTraits
from fp8launch.engines.megatron_lm.engine import MegatronLM
from fp8launch.megatron.arguments import Argument
from fp8launch.megatron.schema import parser_defaults
from fp8launch.megatron.versions import DEFAULT
from fp8launch.plugins.accelerate.section import Accelerate as Stated
from fp8launch.plugins.accelerate.section import accelerate_of
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import Recipe

TITLE = "Hugging Face Accelerate"
# Flags of Megatron that the program reads.
READ = frozenset((
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
    "seq_length", "vocab_size", "untie_embeddings_and_output_weights", "rotary_base", "norm_epsilon",
    "init_method_std", "micro_batch_size", "global_batch_size", "train_iters", "lr", "weight_decay", "adam_beta1",
    "adam_beta2", "adam_eps", "clip_grad", "seed", "bf16", "fp8_format", "fp8_recipe", "fp8_param_gather",
    "fp8_amax_history_len", "fp8_amax_compute_algo", "use_rope_scaling", "rope_scaling_factor", "qk_layernorm",
    "recompute_granularity", "num_experts", "moe_ffn_hidden_size", "moe_router_topk",
))  # fmt: skip
# Flags with the value that describes what the program does anyway; None for any value.
ALWAYS: Mapping[str, object] = {
    "group_query_attention": True,
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "lr_decay_style": "constant",
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "max_position_embeddings": None,
    "make_vocab_size_divisible_by": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "log_interval": 1,
    "split": None,
}
# FP8 libraries, with the recipes that Accelerate's integration offers for each.
RECIPES = {"torchao": ("tensorwise",), "transformer_engine": ("delayed", "mxfp8")}
_NOT_HERE = {
    ("checkpoint", "dir"): "remove it: the program compares speed, and saves nothing",
    ("parallel", "fsdp"): "use accelerate.sharding",
    ("launch", "config"): "remove it: it sets fields of Megatron",
}
_MS_AMP = (
    "MS-AMP is not maintained: it has no release since 2024, needs its own build of CUDA kernels for old releases of "
    "PyTorch, cannot be installed without a network, and Accelerate marks it as deprecated"
)


class Accelerate(MegatronLM):
    """Train the model and batch of a recipe with Accelerate."""

    name: ClassVar[str] = "accelerate"
    description: ClassVar[EngineDescription] = EngineDescription(
        checks="hardware", validators="none", log_dialect="megatron", evidence=("module report", "kernel profile")
    )
    own_keys: ClassVar[tuple[str, ...]] = ("accelerate.sharding", "accelerate.fp8", "accelerate.rowwise")

    def problems(self, loaded: LoadedRecipe) -> Iterator[Problem]:
        recipe = loaded.recipe
        if accelerate_of(recipe).sharding is None:
            fix = f"write `accelerate: {{sharding: {' | '.join(('ddp', 'fsdp2', 'zero1', 'zero2', 'zero3'))}}}`"
            yield Problem("error", "no-sharding", "`engine: accelerate` needs a sharding", loaded.where("engine"), fix)
        for (section, key), fix in _NOT_HERE.items():
            if getattr(getattr(recipe, section), key) not in (None, "none", {}):
                message = f"`{section}.{key}` has no meaning for `engine: accelerate`"
                yield Problem("error", "key-of-other-engine", message, loaded.where(section, key), fix)
        if recipe.megatron_extra:
            message = "`megatron_extra` has no meaning for `engine: accelerate`"
            yield Problem("error", "key-of-other-engine", message, loaded.where("megatron_extra"), "remove it")
        yield from _precision_problems(loaded)

    def translate(self, loaded: LoadedRecipe) -> EngineArguments:
        args = super().translate(loaded)
        stated = accelerate_of(loaded.recipe)
        foreign = [_not_read(flag, args) for flag, value in args.values.items() if not _is_done(flag, value)]
        foreign += _bound_to_others(args, stated)
        if foreign:
            raise UserError(foreign, ANSWER_IS_NO)
        own = [Argument("sharding", ("--sharding", str(stated.sharding)))]
        if "fp8_format" in args.values:
            own.append(Argument("fp8_library", ("--fp8-library", str(stated.fp8))))
        args = replace(
            args, version="", arguments=tuple(each for each in args.arguments if each.flag in READ), own=tuple(own)
        )
        if stated.rowwise and "fp8_format" in args.values:
            return _by_rows(args)
        return args

    def defaults(self, args: EngineArguments) -> Mapping[str, Any]:
        return parser_defaults(DEFAULT)

    def translate_overrides(self, overrides: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if any(key.startswith("megatron.") for key in overrides):
            return None
        return overrides

    def entry(self, loaded: LoadedRecipe, in_container: bool, check_paths: bool) -> Entry:
        return Entry(program="accelerate_train.py", title=TITLE, plugin="accelerate")

    def traits(self, recipe: Recipe) -> EntryTraits:
        return EntryTraits()

    def attempts(self, args: EngineArguments) -> None:
        return None


def _precision_problems(loaded: LoadedRecipe) -> Iterator[Problem]:
    """Report FP8 libraries and recipes that do not fit together or that Accelerate's integration lacks."""
    stated, precision = accelerate_of(loaded.recipe), loaded.recipe.precision
    if stated.fp8 == "msamp":
        fix = "use torchao or transformer_engine; recipes/studies/levels has its levels O1 to O3 in Megatron"
        yield Problem("error", "msamp-abandoned", _MS_AMP, loaded.where("accelerate", "fp8"), fix)
        return
    if precision is None or not precision.quantized:
        return
    where = loaded.where("precision", "recipe")
    if stated.fp8 is None:
        library = _library_with(precision.recipe) or "torchao"
        message = f"precision recipe {precision.recipe} needs a library of FP8"
        yield Problem("error", "no-fp8-library", message, where, f"set accelerate.fp8, such as {library}")
        return
    offered = RECIPES[stated.fp8]
    if precision.recipe not in offered:
        message = f"Accelerate has no {precision.recipe} of {stated.fp8}, only {' and '.join(offered)}"
        fix = f"use precision.recipe={offered[0]}"
        if other := _library_with(precision.recipe):
            fix = f"use accelerate.fp8={other}"
        yield Problem("error", "recipe-not-in-library", message, where, fix)
        return
    by_rows = stated.rowwise and stated.fp8 == "torchao"
    if stated.rowwise and not by_rows:
        message = f"`accelerate.rowwise` is a recipe of torchao, and accelerate.fp8 is {stated.fp8}"
        yield Problem("error", "recipe-not-in-library", message, loaded.where("accelerate", "rowwise"), "remove it")
    name, wanted = "tensorwise", "hybrid"
    if by_rows:
        name, wanted = "rowwise", "e4m3"
    if stated.fp8 == "torchao" and precision.format != wanted:
        message = f"torchao's {name} recipe is {wanted}, not {precision.format}"
        where = loaded.where("precision", "format")
        yield Problem("error", "format-not-in-library", message, where, f"use precision.format={wanted}")
    if precision.param_gather and (by_rows or stated.fp8 != "torchao" or stated.sharding != "fsdp2"):
        message = "weights are gathered in FP8 by torchao's tensorwise recipe with fsdp2 only"
        yield Problem(
            "error", "no-fp8-gather", message, loaded.where("precision", "param_gather"), "remove param_gather"
        )


def _library_with(recipe: str) -> str | None:
    """Return the first library that has this recipe."""
    for library, offered in RECIPES.items():
        if recipe in offered:
            return library
    return None


def _is_done(flag: str, value: object) -> bool:
    """Return whether the program reads a flag, or always does what the flag requests."""
    if flag in READ:
        return True
    return flag in ALWAYS and ALWAYS[flag] in (None, value)


def _not_read(flag: str, args: EngineArguments) -> Problem:
    message = f"{flag} is {args.values[flag]}, which Accelerate's program does not do"
    fix = "remove it, or compare with another engine"
    if flag in ALWAYS:
        fix = f"use {ALWAYS[flag]}, or remove it"
    return Problem("error", "not-in-accelerate", message, args.places.get(flag), fix)


def _bound_to_others(args: EngineArguments, stated: Stated) -> Iterator[Problem]:
    """Report flags that the program reads, but only together with other settings."""
    if args.values.get("num_experts") and not args.values.get("qk_layernorm"):
        message = (
            f"num_experts is {args.values['num_experts']} without qk_layernorm; the program's only such model is Qwen3"
        )
        fix = "start from models/qwen3_30b_a3b, or compare with another engine"
        yield Problem("error", "not-in-accelerate", message, args.places.get("num_experts"), fix)
    if args.values.get("recompute_granularity") and stated.sharding != "fsdp2":
        message = f"recompute_granularity is set, which the program does with fsdp2, not {stated.sharding}"
        fix = "use accelerate.sharding=fsdp2, or remove it"
        yield Problem("error", "not-in-accelerate", message, args.places.get("recompute_granularity"), fix)


def _by_rows(args: EngineArguments) -> EngineArguments:
    """Return the arguments with torchao's rowwise recipe, for which Megatron has no name."""
    name = "rowwise"
    words = {"fp8_recipe": Argument("fp8_recipe", ("--fp8-recipe", name))}
    return replace(
        args,
        values={**args.values, "fp8_recipe": name},
        arguments=tuple(words.get(each.flag, each) for each in args.arguments),
        attributes={**args.attributes, "fp8_recipe": name},
    )
