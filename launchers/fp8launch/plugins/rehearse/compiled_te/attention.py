"""Fused attention: the shapes of its results, and the cases for which cuDNN has a kernel.

The rules come from `nvte_get_fused_attn_backend` (transformer_engine/common/fused_attn/fused_attn.cpp, releases 2.9 to
2.18). For head sizes and masks, they assume the newest cuDNN that any rule names, so that nothing is refused that some
image accepts. The largest logits need cuDNN 9.21.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any

import torch

from fp8launch.plugins.rehearse.compiled_te.libraries import CUDNN_WITH_LARGEST_LOGITS, Assumed
from fp8launch.plugins.rehearse.compiled_te.tensors import finished, is_quantized, plain_type
from fp8launch.plugins.rehearse.noise import noise

NAME = "transformer_engine_torch"
# Transformer Engine's messages about the backends that it rejected when it last chose one.
REASONS: list[str] = []
CAUSAL = ("NVTE_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_MASK")
CAUSAL_BOTTOM = ("NVTE_CAUSAL_BOTTOM_RIGHT_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK")
PADDING = ("NVTE_PADDING_MASK", "NVTE_PADDING_CAUSAL_MASK", "NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK")
FP8_MASKS = ("NVTE_NO_MASK", "NVTE_CAUSAL_MASK", "NVTE_PADDING_MASK", "NVTE_PADDING_CAUSAL_MASK")
# Positional arguments of tex.get_fused_attn_backend before 2.20. Later additions are left out, because they cannot be
# identified by position.
BEFORE_2_20 = (
    "is_training", "q_dtype", "kv_dtype", "qkv_layout", "bias_type", "attn_mask_type", "softmax_type", "dropout",
    "num_attn_heads", "num_gqa_groups", "max_seqlen_q", "max_seqlen_kv", "head_dim_qk", "head_dim_v",
    "window_size_left", "window_size_right", "return_max_logit",
)  # fmt: skip


class _Reasons(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said = record.getMessage()
        if said.startswith("Running with config"):
            REASONS.clear()
        elif said.startswith("Disabling") and said not in REASONS:
            REASONS.append(" ".join(said.split()))


def keep_reasons() -> None:
    """Fill REASONS from now on. Call this after importing Transformer Engine, because the import sets up its logger."""
    utils: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    # Each attention sets the logger to this level.
    utils.AttentionLogging._log_level = logging.DEBUG
    logger = logging.getLogger("DotProductAttention")
    logger.handlers, logger.propagate = [_Reasons()], False


def left_to_newer_flash_attention(capability: tuple[int, int], release: str) -> bool:
    """Return whether FlashAttention 2 was refused but the job may have a newer one: 3 on Hopper, 4 since 2.20."""
    newer = capability[0] == 9 or tuple(map(int, release.split(".")[:2])) >= (2, 20)
    return newer and any(reason.startswith("Disabling FlashAttention 2 as") for reason in REASONS)


def get_fused_attn_backend(*arguments: Any, **named: Any) -> Any:
    """Return the backend. Releases since 2.20, which pass one object, also get the reason if there is none."""
    if len(arguments) == 1 and not named:
        question = {key: getattr(arguments[0], key) for key in dir(arguments[0]) if not key.startswith("_")}
    else:
        question = {**dict(zip(BEFORE_2_20, arguments, strict=False)), **named}
    major, minor = torch.cuda.get_device_capability()
    backend, reason = answer(question, 10 * major + minor)
    found = getattr(sys.modules[NAME].NVTE_Fused_Attn_Backend, backend)
    return (found, reason) if len(arguments) == 1 and not named else found


def answer(question: dict[str, Any], arch: int) -> tuple[str, str]:
    """Return the backend's name, and a reason if there is none. `arch` is 90 for Hopper, 100 or more for Blackwell."""
    head_qk, head_v = question["head_dim_qk"], question["head_dim_v"]
    mask, bias = _name(question["attn_mask_type"]), _name(question["bias_type"])
    training = bool(question.get("is_training", True))
    kind = _name(question.get("q_dtype", question.get("qkv_dtype", "")))
    if kind.startswith("kFloat8"):
        if arch >= 90 and bias == "NVTE_NO_BIAS" and _fp8_heads(head_qk, head_v, mask, arch, training):
            return "NVTE_FP8", ""
        return "NVTE_No_Backend", "no FP8 attention for these heads and this mask"
    reason = _refusal(question, head_qk, head_v, mask, bias, training, arch)
    return ("NVTE_No_Backend", reason) if reason else ("NVTE_F16_arbitrary_seqlen", "")


def _name(member: Any) -> str:
    return str(getattr(member, "name", member))


def _fp8_heads(head_qk: int, head_v: int, mask: str, arch: int, training: bool) -> bool:
    if head_qk % 16 or head_v % 16:
        return False
    if arch < 100:
        fits = head_qk == head_v == 128 if training else head_qk <= 256 and head_v <= 256
        return fits and mask in FP8_MASKS
    if head_qk <= 128 and head_v <= 128:
        return mask in FP8_MASKS or mask == "NVTE_CAUSAL_BOTTOM_RIGHT_MASK"
    return head_qk <= 192 and head_v <= 128 and mask in ("NVTE_NO_MASK", "NVTE_CAUSAL_MASK", CAUSAL_BOTTOM[0])


def _refusal(
    question: dict[str, Any], head_qk: int, head_v: int, mask: str, bias: str, training: bool, arch: int
) -> str:
    """Return why cuDNN has no 16-bit kernel, or an empty string if it has one."""
    dropout = float(question.get("dropout", question.get("attn_dropout", 0.0)) or 0.0)
    left, right = int(question.get("window_size_left", -1)), int(question.get("window_size_right", -1))
    if arch < 80:
        return f"compute capability {arch / 10}"
    if question.get("return_max_logit") and Assumed.cudnn < CUDNN_WITH_LARGEST_LOGITS:
        return "the largest logits need cuDNN 9.21"
    if head_qk % 8 or head_v % 8:
        return f"head sizes {head_qk} and {head_v} are not multiples of 8"
    if not _heads_16_bit(head_qk, head_v, training, arch):
        return f"head sizes {head_qk} and {head_v} on compute capability {arch / 10}"
    if bias == "NVTE_PRE_SCALE_BIAS" or (bias == "NVTE_ALIBI" and mask not in ("NVTE_CAUSAL_MASK", CAUSAL_BOTTOM[0])):
        return f"bias {bias} with mask {mask}"
    if bias == "NVTE_POST_SCALE_BIAS" and mask in PADDING:
        return f"bias {bias} with mask {mask}"
    windowed = left >= 0 or right > 0
    if windowed and (dropout or bias != "NVTE_NO_BIAS"):
        return "a sliding window with dropout or a bias"
    if arch >= 100 and training and dropout and bias != "NVTE_NO_BIAS":
        return "dropout with a bias on Blackwell"
    return ""


def _heads_16_bit(head_qk: int, head_v: int, training: bool, arch: int) -> bool:
    if head_qk <= 128 and head_v <= 128:
        return True
    if not training:
        return True
    if arch == 90:
        # A bug in cuDNN 9.11 and newer: wide heads of unequal size, except 192 with 128, have no backward kernel.
        unequal = head_qk >= 128 and head_v >= 128 and head_qk != head_v and (head_qk, head_v) != (192, 128)
        return head_qk <= 256 and head_v <= 256 and not unequal
    return (head_qk, head_v) == (192, 128) or (head_qk == head_v == 256 and 100 <= arch < 110)


def fused_attn_fwd(*arguments: Any, **_: Any) -> list[Any]:
    """Return the output in the query's layout, statistics, and further results.

    These are the largest logits if requested, the generator's state, and what the backward pass needs for a bias and
    for sinks.

    The order of arguments depends on the version: query, key and value are the first three tensors with three or more
    dimensions, and the first of the flags at the end requests the largest logits.
    """
    q, _k, v = _query_key_value(arguments)
    quantizer = next(
        (each for each in arguments if hasattr(each, "make_empty") and hasattr(each, "rowwise_usage")), None
    )
    out = noise((*q.shape[:-1], v.shape[-1]), plain_type(q))
    heads = q.shape[-2]
    stats = torch.zeros(_batch(arguments, q), heads, _sequence(arguments, q), 1)
    results: list[Any] = [finished(out, quantizer), stats]
    flags = _flags_at_end(arguments)
    if flags and flags[0]:
        results.append(stats.clone())
    results.append(torch.zeros(2, dtype=torch.int64))
    if _one_of(arguments, "NVTE_Bias_Type") not in ("NVTE_NO_BIAS", "NVTE_ALIBI", ""):
        results.append(torch.zeros(1, heads, stats.shape[2], stats.shape[2], dtype=plain_type(q)))
    if _one_of(arguments, "NVTE_Softmax_Type") not in ("NVTE_VANILLA_SOFTMAX", ""):
        results.append(torch.zeros(1, heads, 1, 1))
    return results


def fused_attn_bwd(*arguments: Any, **_: Any) -> list[Any]:
    """Return the gradients of query, key, value, bias and sinks; None for a bias or sinks that are not used."""
    q, k, v = _query_key_value(arguments)
    gradients: list[Any] = [torch.zeros(tuple(each.shape), dtype=plain_type(each)) for each in (q, k, v)]
    heads, sequence = q.shape[-2], _sequence(arguments, q)
    biased = _one_of(arguments, "NVTE_Bias_Type") not in ("NVTE_NO_BIAS", "NVTE_ALIBI", "")
    gradients.append(torch.zeros(1, heads, sequence, sequence, dtype=plain_type(q)) if biased else None)
    sinks = _one_of(arguments, "NVTE_Softmax_Type") not in ("NVTE_VANILLA_SOFTMAX", "")
    gradients.append(torch.zeros(1, heads, 1, 1) if sinks else None)
    return gradients


def _query_key_value(arguments: tuple[Any, ...]) -> list[Any]:
    return [each for each in arguments if (torch.is_tensor(each) or is_quantized(each)) and len(each.size()) >= 3][:3]


def _one_of(arguments: tuple[Any, ...], enumeration: str) -> str:
    return next((_name(each) for each in arguments if type(each).__name__ == enumeration), "")


def _sequence_first(arguments: tuple[Any, ...]) -> bool:
    return _one_of(arguments, "NVTE_QKV_Layout").startswith(("NVTE_SB", "NVTE_Paged_KV_SB"))


def _batch(arguments: tuple[Any, ...], q: Any) -> int:
    if q.dim() < 4:
        return 1
    return int(q.shape[1] if _sequence_first(arguments) else q.shape[0])


def _sequence(arguments: tuple[Any, ...], q: Any) -> int:
    if q.dim() < 4:
        return int(q.shape[0])
    return int(q.shape[0] if _sequence_first(arguments) else q.shape[1])


def _flags_at_end(arguments: tuple[Any, ...]) -> list[bool]:
    found: list[bool] = []
    for each in reversed(arguments):
        if not isinstance(each, bool):
            break
        found.insert(0, each)
    return found
