"""The two models of a conversion: Hugging Face's, opened by AutoBridge, and Megatron's on this rank."""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fp8launch.injob.rank import worker
from fp8launch.plugins.bridge.injob import bridge

HUB = "megatron.bridge.models.conversion.auto_bridge"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def open_model(name: str, with_weights: bool) -> Any:
    """Return AutoBridge for a Hugging Face model. Exits if it cannot be read or is not supported."""
    auto: Any = importlib.import_module(HUB).AutoBridge
    transformers: Any = importlib.import_module("transformers")
    try:
        if with_weights:
            return auto.from_hf_pretrained(name)
        return auto.from_hf_config(transformers.AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as failure:
        reason = (str(failure).strip().splitlines() or [repr(failure)])[0]
        if Path(name).is_dir():
            worker.stop(worker.WRONG_REQUEST, f"{name}: {reason}")
        advice = "name a local folder, or export HF_TOKEN before `fp8launch convert`"
        worker.stop(worker.MACHINE_LACKS, f"{name}: {reason}; {advice}")


def has_weights(model: str) -> bool:
    """Return whether a model has weights: it is a folder with safetensors, or a name on the hub."""
    folder = Path(model)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def dtype_of(source: Any, stated: str | None) -> Any:
    """Return the data type of the converted weights: the stated one, else the model's, else bfloat16."""
    import torch

    if stated is not None:
        return getattr(torch, DTYPES[stated])
    config = getattr(source.hf_pretrained, "config", source.hf_pretrained)
    own = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    if isinstance(own, str):
        own = getattr(torch, own)
    if own in (torch.bfloat16, torch.float16, torch.float32):
        return own
    return torch.bfloat16


def provider_of(source: Any, ours: argparse.Namespace, dtype: Any, load: bool) -> Any:
    """Return Bridge's configuration of the model with the requested layout."""
    import torch

    provider = source.to_megatron_provider(load_weights=load)
    provider.tensor_model_parallel_size = ours.tp
    provider.pipeline_model_parallel_size = ours.pp
    provider.expert_model_parallel_size = ours.ep
    provider.expert_tensor_parallel_size = 1
    provider.sequence_parallel = ours.tp > 1 and bool(getattr(provider, "num_moe_experts", None))
    provider.params_dtype = provider.pipeline_dtype = dtype
    provider.bf16, provider.fp16 = dtype == torch.bfloat16, dtype == torch.float16
    return provider


@contextlib.contextmanager
def without_gpu(provider: Any) -> Iterator[None]:
    """Build layers from torch's own modules inside this context. Afterwards the configuration is Bridge's again."""
    default: Any = importlib.import_module(bridge.PROVIDER).default_layer_spec
    if getattr(provider, "transformer_layer_spec", None) is not default:
        worker.stop(
            worker.MACHINE_LACKS,
            f"{type(provider).__name__} has its own layers, which need Transformer Engine: convert on a GPU",
        )
    names = ("transformer_layer_spec", *bridge.ON_CPU)
    before = {name: getattr(provider, name) for name in names if hasattr(provider, name)}
    bridge.local_layers(provider)
    provider.sequence_parallel = False
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(provider, name, value)


def build(provider: Any, device: str) -> list[Any]:
    """Return the model's parts on this rank, with the weights that the provider loads."""
    import torch

    # Bridge sends weights between ranks through NCCL, so its mappings allocate receive buffers on the GPU.
    on_host = device == "cpu"
    backend = "gloo"
    if not on_host:
        backend = "cpu:gloo,cuda:nccl"
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)
    provider.finalize()
    provider.initialize_model_parallel(seed=0)
    model = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=on_host)
    if isinstance(model, list):
        return model
    return [model]
