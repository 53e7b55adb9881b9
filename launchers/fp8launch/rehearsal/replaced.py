"""What of Megatron and Transformer Engine is replaced in a rehearsal: code that reaches past torch's Python, or that
compares what different ranks hold.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
from contextlib import nullcontext, suppress
from typing import Any

import torch

from fp8launch.rehearsal.cuda_graphs import Generator
from fp8launch.rehearsal.failure import NotRehearsed
from fp8launch.rehearsal.freed_memory import offload_from_the_host
from fp8launch.rehearsal.storage import share_storage

WEAK_REFERENCES = (
    "megatron.core.transformer.cuda_graphs",
    "transformer_engine.pytorch.utils",
    "transformer_engine.pytorch.graph",
)


# Transformer Engine's functions from quantized values to plain ones. Most of them move the values to the GPU first.
DEQUANTIZE = {
    "float8_tensor_storage": "_FromFloat8Func",
    "float8_blockwise_tensor_storage": "_FromFloat8BlockwiseFunc",
    "mxfp8_tensor_storage": "_FromMXFP8Func",
    "nvfp4_tensor_storage": "_FromNVFP4Func",
}


def install() -> None:
    """Replace it, before Megatron's training is imported; call after the CPU mode of Megatron is installed."""
    states: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    _random_state(states, False)
    # Megatron compiles a C++ extension for it, with a compiler that a login node may lack.
    states._get_share_storage = lambda: share_storage
    with suppress(ImportError):
        _random_state(importlib.import_module("transformer_engine.pytorch.distributed"), True)
    for storage, function in DEQUANTIZE.items():
        with suppress(ImportError):
            _dequantize_on_the_host(
                importlib.import_module(f"transformer_engine.pytorch.tensor.storage.{storage}"), function
            )
    with suppress(ImportError):
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        symmetric.empty = _no_symmetric_memory
    with suppress(ImportError):
        _uneven_shards()
    with suppress(ImportError):
        _host_meshes(importlib.import_module("torch.distributed.device_mesh"))
    with suppress(ImportError):
        _plain_memory(importlib.import_module("megatron.core.nccl_allocator"))
    with suppress(ImportError):
        offloading: Any = importlib.import_module("megatron.core.pipeline_parallel.fine_grained_activation_offload")
        offload_from_the_host(offloading.ChunkOffloadHandler)
    # It binds the process to the cores near the GPU, by packages of the image (cuda-python, pynvml).
    pipeline: Any = importlib.import_module("megatron.core.pipeline_parallel.utils")
    pipeline.set_ideal_affinity_for_current_gpu = lambda: None
    for name in WEAK_REFERENCES:
        with suppress(ImportError):
            _strong_references(importlib.import_module(name))


def _host_meshes(meshes: Any) -> None:
    """FSDP of torch asks the kind of its mesh where tensors live."""
    from_group = meshes.DeviceMesh.from_group

    def on_the_host(group: Any, device_type: str, *arguments: Any, **named: Any) -> Any:
        return from_group(group, "cpu", *arguments, **named)

    meshes.DeviceMesh.from_group = staticmethod(on_the_host)


def _plain_memory(allocator: Any) -> None:
    """NCCL's memory comes from an extension that Megatron compiles with CUDA."""
    allocator._build_nccl_allocator = lambda: None
    allocator.create_nccl_mem_pool = lambda symmetric=None: None
    allocator.register_mem_pool = allocator.deregister_mem_pool = lambda pool, group, **_: None
    for name in ("nccl_mem", "MultiGroupMemPoolAllocator", "MemPoolAllocatorWithoutRegistration"):
        setattr(allocator, name, lambda *_, **__: nullcontext())


def _dequantize_on_the_host(storage: Any, name: str) -> None:
    """Return the values that a quantized tensor was made from."""
    tensors: Any = importlib.import_module("fp8launch.rehearsal.compiled_te.tensors")
    function = getattr(storage, name, None)
    if function is None:
        return  # before Transformer Engine 2.10 some had none
    of_te = function.forward

    def forward(context: Any, tensor: Any, dtype: torch.dtype | None = None) -> Any:
        if all(part is None or not part.numel() for part in _data_of(tensor)):
            return of_te(context, tensor, dtype)
        return tensors.values(tensor, dtype)

    function.forward = staticmethod(forward)


def _data_of(tensor: Any) -> tuple[Any, ...]:
    """The bytes that a quantized tensor holds, in either orientation."""
    names = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
    return tuple(getattr(tensor, name, None) for name in names)


def every_rank_trains() -> None:
    """Rank 0 says whether there is data to train with; ranks that read none believe it."""
    training: Any = importlib.import_module("megatron.training.training")
    build = training.build_train_valid_test_data_loaders

    def with_data(*arguments: Any, **named: Any) -> Any:
        loaders = build(*arguments, **named)
        training.get_args().do_train = True
        return loaders

    training.build_train_valid_test_data_loaders = with_data


def predicts_by_the_last_layer() -> None:
    """Megatron-LM builds layers of multi-token prediction with softmax attention only, Bridge as the model's last one
    (`mtp_block_spec` of models/gpt_provider.py, 0.6.0)."""
    with suppress(ImportError):  # 0.19 on
        models: Any = importlib.import_module("megatron.training.models.gpt")
        layers: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
        of_megatron_lm = models.mtp_block_spec

        def mtp_block_spec(config: Any, spec: Any, vp_stage: int | None = None) -> Any:
            model = config.transformer
            if not model.mtp_num_layers or not model.experimental_attention_variant or not spec.layer_specs:
                return of_megatron_lm(config, spec, vp_stage)
            return layers.get_gpt_mtp_block_spec(model, spec, use_transformer_engine=True, vp_stage=vp_stage)

        models.mtp_block_spec = mtp_block_spec


def _no_symmetric_memory(*_: Any, **__: Any) -> Any:
    raise NotRehearsed("symmetric memory, which symmetric_ar_type asks for")


def _strong_references(module: Any) -> None:
    """Captured graphs are kept by tensors that point into CUDA's memory without owning it. Megatron 0.19 puts it into
    the tensor itself; Transformer Engine's function makes another one, a leaf.
    """
    if hasattr(module, "make_weakref"):
        module.make_weakref = lambda tensor, *_, **__: tensor
    if hasattr(module, "make_weak_ref"):
        module.make_weak_ref = lambda value: value.detach() if torch.is_tensor(value) else value


def _random_state(module: Any, graph_safe_by_default: bool) -> None:
    """Random states that CUDA graphs may use are generators; torch has them for CUDA only."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = graph_safe_by_default) -> Any:
        return Generator() if graph_safe else torch.get_rng_state()

    def set_state(state: Any, device: Any = None, graph_safe: bool = graph_safe_by_default) -> None:
        if torch.is_tensor(state):
            torch.set_rng_state(state)

    module._get_cuda_rng_state, module._set_cuda_rng_state = get_state, set_state


def _uneven_shards() -> None:
    """Megatron's FSDP checks that the parts of all ranks together are the whole. It does not under torch's `fake`
    process groups, and cannot where all ranks hold the same."""
    shards: Any = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor")
    buffers: Any = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer")
    for module in (shards, buffers):
        if hasattr(module, "validate_uneven_dtensor"):
            module.validate_uneven_dtensor = lambda dtensor: None
    # Ranks after the first of their tensor parallel group take its random state, which is this one's.
    adapter: Any = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    adapter.FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda wrapped: None
