"""Counts the parameters of Megatron's real GPTModel or HybridModel, on the meta device in a fake process group.

Run as a script: reads a JSON list of cases from stdin, writes the list of counts, one for each pipeline stage (tensor
and expert rank 0), to stdout. Layers are Megatron's own ("local"), so neither a GPU nor Transformer Engine is needed;
of mamba-ssm the mixer asks a norm, which has one weight per channel (mamba_ssm/ops/triton/layernorm_gated.py, RMSNorm).
"""

# ruff: noqa: E402 - what stands in for triton must be there before Megatron is imported
from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"


class _Kernels(types.ModuleType):
    """Replaces the only module of Megatron-Core that imports triton at its top."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = _Kernels("paged_stash")

import torch
import torch.distributed
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

# Made with the modules, but of no parameter: streams, and an attention core that takes no other widths for keys.
torch.cuda.Stream = lambda *_, **__: None
torch.cuda.current_device = lambda: "meta"
_core = DotProductAttention.__init__
DotProductAttention.__init__ = lambda self, *a, k_channels=None, v_channels=None, **k: _core(self, *a, **k)
torch.cuda.get_device_capability = lambda *_: (9, 0)


class OnMeta(TorchFunctionMode):
    """Puts every new tensor on the meta device, whatever device it asks for."""

    def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and str(kwargs["device"]) != "cpu":
            kwargs["device"] = "meta"
        return args[0] if getattr(function, "__name__", "") == "cuda" else function(*args, **kwargs)


def counts(case: dict[str, Any]) -> list[int]:
    """Parameters on the first tensor and expert rank of each pipeline stage."""
    pp = case["config"].get("pipeline_model_parallel_size", 1)
    return [_stage(case, rank * (case["world"] // pp)) for rank in range(pp)]


def _stage(case: dict[str, Any], rank: int) -> int:
    if torch.distributed.is_initialized():
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case["world"])
    own = dict(case["config"])
    if own.pop("gelu", False):
        own |= {"gated_linear_unit": False, "activation_func": torch.nn.functional.gelu}
    else:
        own |= {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    virtual = own.get("virtual_pipeline_model_parallel_size")
    parallel_state.initialize_model_parallel(
        own.get("tensor_model_parallel_size", 1),
        own.get("pipeline_model_parallel_size", 1),
        virtual,
        expert_model_parallel_size=own.get("expert_model_parallel_size", 1),
        expert_tensor_parallel_size=own.get("expert_tensor_parallel_size"),
        create_gloo_process_groups=False,
    )
    latent = own.pop("latent", None)
    kind = MLATransformerConfig if latent else TransformerConfig
    with OnMeta(), torch.device("meta"):
        config = kind(
            **own, **(latent or {}), perform_initialization=False, pipeline_dtype=torch.bfloat16,
            params_dtype=torch.bfloat16, apply_rope_fusion=False, gradient_accumulation_fusion=False,
        )  # fmt: skip
        return sum(_chunk(case, config, stage) for stage in range(virtual or 1))


def _chunk(case: dict[str, Any], config: TransformerConfig, stage: int) -> int:
    vp_stage = stage if config.virtual_pipeline_model_parallel_size else None
    if "pattern" in case:
        return _hybrid_chunk(case, config, vp_stage)
    spec = get_gpt_decoder_block_spec(config, False, normalization=config.normalization, vp_stage=vp_stage)
    mtp = None
    if config.mtp_num_layers:
        mtp = get_gpt_mtp_block_spec(config, spec, False, vp_stage=vp_stage)
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    model = GPTModel(
        config, spec, case["vocab"], case["positions"], pre_process=first, post_process=last, mtp_block_spec=mtp,
        share_embeddings_and_output_weights=case["tied"], position_embedding_type=case["position"], vp_stage=vp_stage,
    )  # fmt: skip
    return sum(parameter.numel() for parameter in model.parameters())


class _GatedNorm(torch.nn.Module):
    def __init__(self, channels: int, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(channels))


def _hybrid_chunk(case: dict[str, Any], config: TransformerConfig, vp_stage: int | None) -> int:
    """One stage of a hybrid model, of Megatron's own layers without Transformer Engine's."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.post_training.modelopt import layers
    from megatron.core.post_training.modelopt.hybrid.model_specs import get_hybrid_stack_modelopt_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import mamba_mixer
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    mamba_mixer.HAVE_MAMBA_SSM, mamba_mixer.ExtendedRMSNorm = True, _GatedNorm
    # Random states of a GPU, which the initial values of the mixer would come from.
    mamba_mixer.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)
    hybrid_block.TENorm, layers.Norm.__new__ = WrappedTorchNorm, lambda _, *a, **k: WrappedTorchNorm(*a, **k)
    model = HybridModel(
        config, get_hybrid_stack_modelopt_spec(local_core_attention=True), case["vocab"], case["positions"],
        hybrid_layer_pattern=case["pattern"], share_embeddings_and_output_weights=case["tied"], vp_stage=vp_stage,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )  # fmt: skip
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    results: list[Any] = []
    for case in json.load(sys.stdin):
        try:
            results.append(counts(case))
        except Exception as exc:
            results.append(f"{type(exc).__name__}: {exc}")
    json.dump(results, sys.stdout)
