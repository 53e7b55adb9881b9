"""The knobs of `tune`: the options of each knob for a run, and what they affect.

Options are not validated here. `candidates` passes them to the check's rules and to Megatron's validators, and drops
options that do not change the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.hardware.connections import CONNECTIONS
from fp8launch.hardware.quantization import quantization_recipes
from fp8launch.plugins.plan.settings import CUTLASS_GROUPED_GEMM
from fp8launch.wording import counted

Touch = Literal["numerics", "memory", "speed"]


@dataclass(frozen=True)
class Option:
    """One setting of a knob. `overrides` has values by recipe key.

    `prior` is a speed-up measured elsewhere, for effects that the speed model does not cover. `unpredicted` is one for
    effects that it does cover, used for runs whose step it cannot predict. `instead` has alternative overrides with the
    same effect, tried in order if the check refuses the first ones.
    """

    name: str
    overrides: Mapping[str, Any]
    prior: float = 1.0
    unpredicted: float = 1.0
    instead: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Knob:
    """A knob. `touches` says what it may change. `note` is printed with a result that uses it."""

    name: str
    touches: frozenset[Touch]
    options: Callable[[ResolvedRun], Iterator[Option]]
    note: str = ""
    about: str = field(default="", compare=False)

    @property
    def keeps_numerics(self) -> bool:
        return "numerics" not in self.touches


_OPTIONS = Callable[[ResolvedRun], Iterator[Option]]
_KNOBS: dict[str, Knob] = {}


def _knob(name: str, *touches: Touch, note: str = "") -> Callable[[_OPTIONS], _OPTIONS]:
    def register(options: _OPTIONS) -> _OPTIONS:
        _KNOBS[name] = Knob(name, frozenset(touches), options, note, (options.__doc__ or "").strip())
        return options

    return register


def knobs() -> Mapping[str, Knob]:
    """Return all knobs by name. Options with equal predictions are tried in this order."""
    return _KNOBS


def _data_parallel(run: ResolvedRun) -> bool:
    return run.layout.dp * run.layout.cp > 1


def _other(on: bool) -> bool | None:
    """Return the value that flips a switch. None removes the flag."""
    if on:
        return None
    return True


def _without(what: str, on: bool) -> str:
    """Return the name of an option that flips a switch: `no WHAT` if it is on."""
    if on:
        return f"no {what}"
    return what


def _removed(run: ResolvedRun, flags: Iterable[str]) -> dict[str, Any]:
    """Return overrides that remove those of the flags that the run sets."""
    return {f"megatron.{flag}": None for flag in flags if run.on(flag)}


# --- numerics stay ----------------------------------------------------------------------------------------------------


@_knob("recompute", "memory", "speed")
def _recompute(run: ResolvedRun) -> Iterator[Option]:
    """Turn off activation recompute, or halve the number of recomputed layers."""
    if not run.on("recompute_granularity"):
        return
    flags = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
    yield Option("no recompute", _removed(run, flags))
    layers = run.integer("recompute_num_layers")
    if run.value("recompute_method") == "block" and layers > 1:
        yield Option(f"recompute {layers // 2} layers", {"megatron.recompute_num_layers": layers // 2})


@_knob("micro-batch", "memory", "speed")
def _micro_batch(run: ResolvedRun) -> Iterator[Option]:
    """Change the micro batch size and keep the global batch."""
    micro = run.layout.micro_batch
    for size in (2 * micro, 4 * micro, micro // 2):
        if size:
            yield Option(f"micro batch {size}", {"batch.micro": size})


@_knob("te-activation", "speed")
def _te_activation(run: ResolvedRun) -> Iterator[Option]:
    """Use Transformer Engine's SwiGLU kernels: saves 1 % of an 8B step on H200 (benchmarks/h200/tuning.md)."""
    if run.uses_te and run.on("swiglu") and not run.on("use_te_activation_func"):
        keys = {"megatron.use_te_activation_func": True, "megatron.no_bias_swiglu_fusion": True}
        yield Option("TE's SwiGLU", keys, prior=1.01)


@_knob("qkv-rope", "speed")
def _qkv_rope(run: ResolvedRun) -> Iterator[Option]:
    """Apply rotary embeddings to QKV in one kernel: saves 1.8 % of an 8B step on H200 (benchmarks/h200/tuning.md)."""
    if run.uses_te and run.entry.sets_config and run.value("position_embedding_type") == "rope":
        yield Option("one rope over QKV", {"launch.config.fused_single_qkv_rope": True}, unpredicted=1.018)


@_knob("loss-fusion", "memory", "speed")
def _loss_fusion(run: ResolvedRun) -> Iterator[Option]:
    """Use Megatron's fused cross entropy."""
    if run.uses_te and not run.on("cross_entropy_loss_fusion"):
        keys = {"megatron.cross_entropy_loss_fusion": True, "megatron.cross_entropy_fusion_impl": "native"}
        yield Option("fused loss", keys)


@_knob("grad-overlap", "speed")
def _grad_overlap(run: ResolvedRun) -> Iterator[Option]:
    """Overlap gradient reduction with the backward pass, or turn the overlap off."""
    if _data_parallel(run) and not run.fsdp:
        on = run.on("overlap_grad_reduce")
        keys: dict[str, Any] = {"megatron.overlap_grad_reduce": _other(on)}
        if on and run.on("overlap_param_gather"):
            keys["megatron.overlap_param_gather"] = None  # Megatron requires overlap_grad_reduce for it
        yield Option(_without("overlap of gradient reduction", on), keys)


@_knob("gather-overlap", "speed")
def _gather_overlap(run: ResolvedRun) -> Iterator[Option]:
    """Overlap the parameter all-gather with the forward pass, or turn the overlap off."""
    if _data_parallel(run) and run.on("use_distributed_optimizer") and not run.fsdp:
        on = run.on("overlap_param_gather")
        keys: dict[str, Any] = {"megatron.overlap_param_gather": _other(on)}
        if not on and not run.on("overlap_grad_reduce"):
            keys["megatron.overlap_grad_reduce"] = True
        yield Option(_without("overlap of parameter gather", on), keys)


@_knob("tp-overlap", "speed")
def _tp_overlap(run: ResolvedRun) -> Iterator[Option]:
    """Overlap tensor-parallel communication with GEMMs; requires sequence parallelism."""
    if run.uses_te and run.layout.tp > 1 and run.on("sequence_parallel"):
        on = run.on("tp_comm_overlap")
        keys: dict[str, Any] = {"megatron.tp_comm_overlap": _other(on)}
        if not on:
            keys["megatron.tp_comm_bootstrap_backend"] = "nccl"
        yield Option(_without("TP overlap", on), keys)


@_knob("cuda-graphs", "memory", "speed")
def _cuda_graphs(run: ResolvedRun) -> Iterator[Option]:
    """Capture layers (in MoE layers, the parts with fixed shapes) as CUDA graphs, or turn graphs off."""
    if not run.uses_te:
        return
    if run.value("cuda_graph_impl") not in (None, "none"):
        yield Option("no CUDA graphs", _removed(run, ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope")))
        return
    modules = ["attn", "mlp"]
    if run.on("num_experts"):
        modules = ["attn", "moe_router", "moe_preprocess"]
    keys = {
        "megatron.cuda_graph_impl": "transformer_engine",
        "megatron.cuda_graph_modules": modules,
        "megatron.te_rng_tracker": True,
        "env.NCCL_GRAPH_REGISTER": 0,
    }
    yield Option("CUDA graphs of layers", keys)


@_knob("moe-permute", "speed")
def _moe_permute(run: ResolvedRun) -> Iterator[Option]:
    """Permute the experts' tokens in one fused kernel."""
    if run.uses_te and run.on("num_experts") and not run.on("moe_permute_fusion"):
        yield Option("fused permutation", {"megatron.moe_permute_fusion": True}, prior=1.02)


@_knob("moe-router", "speed")
def _moe_router(run: ResolvedRun) -> Iterator[Option]:
    """Compute the router's top-k and auxiliary loss in fused kernels."""
    if run.uses_te and run.on("num_experts") and not run.on("moe_router_fusion"):
        yield Option("fused router", {"megatron.moe_router_fusion": True}, prior=1.01)


@_knob("grouped-gemm", "speed")
def _grouped_gemm(run: ResolvedRun) -> Iterator[Option]:
    """Multiply all experts in one CUTLASS kernel (bf16, Hopper): 1.15 times as fast (benchmarks/h200/peers.md)."""
    bf16 = run.quantization is None
    if run.uses_te and run.on("num_experts") and run.on("moe_grouped_gemm") and bf16 and run.gpu.capability == (9, 0):
        on = run.env.get(CUTLASS_GROUPED_GEMM) == "1"
        keys = {f"env.{CUTLASS_GROUPED_GEMM}": None if on else 1}
        yield Option(_without("grouped GEMM by CUTLASS", on), keys, unpredicted=1 / 1.15 if on else 1.15)


@_knob("nan-check", "speed")
def _nan_check(run: ResolvedRun) -> Iterator[Option]:
    """Skip the NaN check of loss and gradients, which synchronizes with the GPU in every step."""
    if run.value("check_for_nan_in_loss_and_grad") is not False:
        yield Option("no NaN check", {"megatron.no_check_for_nan_in_loss_and_grad": True}, prior=1.002)


@_knob("norms", "speed")
def _norms(run: ResolvedRun) -> Iterator[Option]:
    """Compute norms with cuDNN, or with Transformer Engine's own kernels."""
    if run.is_estimated:  # the norms are Transformer Engine's
        on = run.env.get("NVTE_NORM_FWD_USE_CUDNN") == "1"
        name = "norms by TE" if on else "norms by cuDNN"
        value = None if on else 1
        yield Option(name, {"env.NVTE_NORM_FWD_USE_CUDNN": value, "env.NVTE_NORM_BWD_USE_CUDNN": value})


@_knob("sm-margin", "speed")
def _sm_margin(run: ResolvedRun) -> Iterator[Option]:
    """Change how many SMs the norm kernels leave free for communication."""
    if run.is_estimated:  # the norms are Transformer Engine's
        for margin in (0, 16):
            keys = {"env.NVTE_FWD_LAYERNORM_SM_MARGIN": margin, "env.NVTE_BWD_LAYERNORM_SM_MARGIN": margin}
            yield Option(f"SM margin {margin}", keys)


@_knob("connections", "speed")
def _connections(run: ResolvedRun) -> Iterator[Option]:
    """Change the number of hardware queues, CUDA_DEVICE_MAX_CONNECTIONS."""
    if run.gpu.name != "cpu":
        for count in (1, 8, 32):
            yield Option(counted(count, "connection"), {f"env.{CONNECTIONS}": count})


@_knob("attention", "speed")
def _attention(run: ResolvedRun) -> Iterator[Option]:
    """Use FlashAttention 3 on Hopper if installed (1.04 times: benchmarks/h200/tuning.md), or cuDNN's attention."""
    backend = run.value("attention_backend")
    here = run.loaded.recipe.container.image is None and importlib.util.find_spec("flash_attn_interface")
    if run.uses_te and run.gpu.capability == (9, 0) and here and backend != "flash":
        yield Option("FlashAttention 3", {"megatron.attention_backend": "flash"}, prior=1.04)
    if run.uses_te and backend in (None, "auto"):
        yield Option("cuDNN's attention", {"megatron.attention_backend": "fused"}, prior=1.01)


@_knob("cpu-threads", "speed")
def _cpu_threads(run: ResolvedRun) -> Iterator[Option]:
    """Change the number of threads per process on a CPU."""
    if run.gpu.name == "cpu":
        for count in (1, 2):
            yield Option(counted(count, "thread"), {"env.OMP_NUM_THREADS": count})


# --- numerics change --------------------------------------------------------------------------------------------------


@_knob("param-gather", "numerics", "memory", "speed")
def _param_gather(run: ResolvedRun) -> Iterator[Option]:
    """All-gather the weights in FP8, or in bf16 from the fp32 master weights."""
    recipe = run.quantization
    if recipe is None:
        return
    on = run.on(recipe.gather_flag)
    if on or (recipe.gather_is_proven and run.on("use_distributed_optimizer")):
        yield Option(_without("FP8 parameter gather", on), {"precision.param_gather": not on})


@_knob("scaling", "numerics", "memory", "speed")
def _scaling(run: ResolvedRun) -> Iterator[Option]:
    """Use another FP8 recipe of the pack with the same data type."""
    current = run.quantization
    if current is None:
        return
    for name, recipe in quantization_recipes().items():
        if recipe.selectable and recipe.operands == current.operands and name != current.name:
            yield Option(f"{name} scaling", {"precision.recipe": name})


@_knob(
    "te-loss",
    "numerics",
    "memory",
    "speed",
    note="Megatron 0.18.2 and 0.19 refuse Transformer Engine's cross entropy as unstable; 500 steps of a small model "
    "showed no instability (benchmarks/h200/numerics.md)",
)
def _te_loss(run: ResolvedRun) -> Iterator[Option]:
    """Use Transformer Engine's cross entropy, set after validation if Megatron's validators refuse the flag."""
    if run.uses_te and run.on("cross_entropy_loss_fusion") and run.value("cross_entropy_fusion_impl") != "te":
        instead: tuple[Mapping[str, Any], ...] = ()
        if run.entry.sets_config:
            instead = ({"launch.config.cross_entropy_fusion_impl": "te"},)
        yield Option("TE's cross entropy", {"megatron.cross_entropy_fusion_impl": "te"}, instead=instead)


@_knob("gradients", "numerics", "memory", "speed")
def _gradients(run: ResolvedRun) -> Iterator[Option]:
    """Change the data type in which gradients are accumulated and reduced."""
    if run.layout.world > 1 or run.uses_te:
        other = "bf16"
        if run.on("grad_reduce_in_bf16"):
            other = "fp32"
        yield Option(f"{other} gradients", {"optimizer.grad_reduce": other})


@_knob("moments", "numerics", "memory", "speed")
def _moments(run: ResolvedRun) -> Iterator[Option]:
    """Store Adam's moments in bf16."""
    if run.uses_te and run.on("use_distributed_optimizer") and not run.on("use_precision_aware_optimizer"):
        yield Option("bf16 moments", {"optimizer.exp_avg": "bf16", "optimizer.exp_avg_sq": "bf16"})
