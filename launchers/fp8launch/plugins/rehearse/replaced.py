"""Replace code of Megatron and Transformer Engine that cannot run in a rehearsal.

Such code reaches below torch's Python layer, or compares data between ranks.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
from contextlib import nullcontext, suppress
from typing import Any

import torch

from fp8launch.plugins.rehearse.cuda_graphs import Generator
from fp8launch.plugins.rehearse.failure import NotRehearsed
from fp8launch.plugins.rehearse.freed_memory import offload_from_the_host, share_storage

WEAK_REFERENCES = (
    "megatron.core.transformer.cuda_graphs",
    "transformer_engine.pytorch.utils",
    "transformer_engine.pytorch.graph",
)


# Transformer Engine's dequantization functions. Most of them move the values to the GPU first.
DEQUANTIZE = {
    "float8_tensor_storage": "_FromFloat8Func",
    "float8_blockwise_tensor_storage": "_FromFloat8BlockwiseFunc",
    "mxfp8_tensor_storage": "_FromMXFP8Func",
    "nvfp4_tensor_storage": "_FromNVFP4Func",
}


def install() -> None:
    """Replace the code before Megatron's training is imported. Call this after Megatron's CPU mode is installed."""
    states: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    _random_state(states, False)
    # Megatron compiles a C++ extension for this, but a login node may have no compiler.
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
    # Megatron would bind the process to the cores near the GPU with packages from the image (cuda-python, pynvml).
    pipeline: Any = importlib.import_module("megatron.core.pipeline_parallel.utils")
    pipeline.set_ideal_affinity_for_current_gpu = lambda: None
    for name in WEAK_REFERENCES:
        with suppress(ImportError):
            _strong_references(importlib.import_module(name))


def _host_meshes(meshes: Any) -> None:
    """Create device meshes on the host, because torch's FSDP places tensors on the device of its mesh."""
    from_group = meshes.DeviceMesh.from_group

    def on_the_host(group: Any, device_type: str, *arguments: Any, **named: Any) -> Any:
        return from_group(group, "cpu", *arguments, **named)

    meshes.DeviceMesh.from_group = staticmethod(on_the_host)


def _plain_memory(allocator: Any) -> None:
    """Use ordinary memory: Megatron allocates NCCL memory with an extension that it compiles with CUDA."""
    allocator._build_nccl_allocator = lambda: None
    allocator.create_nccl_mem_pool = lambda symmetric=None: None
    allocator.register_mem_pool = allocator.deregister_mem_pool = lambda pool, group, **_: None
    for name in ("nccl_mem", "MultiGroupMemPoolAllocator", "MemPoolAllocatorWithoutRegistration"):
        setattr(allocator, name, lambda *_, **__: nullcontext())


def _dequantize_on_the_host(storage: Any, name: str) -> None:
    """Make a dequantization function return the values from which the tensor was quantized."""
    tensors: Any = importlib.import_module("fp8launch.plugins.rehearse.compiled_te.tensors")
    function = getattr(storage, name, None)
    if function is None:
        return  # some storages had none before Transformer Engine 2.10
    of_te = function.forward

    def forward(context: Any, tensor: Any, dtype: torch.dtype | None = None) -> Any:
        if all(part is None or not part.numel() for part in _data_of(tensor)):
            return of_te(context, tensor, dtype)
        return tensors.values(tensor, dtype)

    function.forward = staticmethod(forward)


def _data_of(tensor: Any) -> tuple[Any, ...]:
    """Return a quantized tensor's bytes in either orientation, with None for missing parts."""
    names = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
    return tuple(getattr(tensor, name, None) for name in names)


def every_rank_trains() -> None:
    """Let ranks train that read no data: they rely on rank 0 to say whether there is any."""
    training: Any = importlib.import_module("megatron.training.training")
    build = training.build_train_valid_test_data_loaders

    def with_data(*arguments: Any, **named: Any) -> Any:
        loaders = build(*arguments, **named)
        training.get_args().do_train = True
        return loaders

    training.build_train_valid_test_data_loaders = with_data


def predicts_by_the_last_layer() -> None:
    """Build layers for multi-token prediction like the model's last layer, as Bridge does.

    Megatron-LM builds them with softmax attention only. Source: `mtp_block_spec` in Bridge's models/gpt_provider.py,
    0.6.0.
    """
    with suppress(ImportError):  # since 0.19
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
    """Let tensors that belong to captured graphs own their memory.

    Otherwise they point to CUDA memory that they do not own. Megatron 0.19 changes the tensor itself; Transformer
    Engine's function returns a new tensor, a leaf.
    """
    if hasattr(module, "make_weakref"):
        module.make_weakref = lambda tensor, *_, **__: tensor
    if hasattr(module, "make_weak_ref"):
        module.make_weak_ref = lambda value: value.detach() if torch.is_tensor(value) else value


def _random_state(module: Any, graph_safe_by_default: bool) -> None:
    """Return generators as random states for CUDA graphs, which torch supports for CUDA only."""

    def get_state(device: Any = None, clone: bool = False, graph_safe: bool = graph_safe_by_default) -> Any:
        return Generator() if graph_safe else torch.get_rng_state()

    def set_state(state: Any, device: Any = None, graph_safe: bool = graph_safe_by_default) -> None:
        if torch.is_tensor(state):
            torch.set_rng_state(state)

    module._get_cuda_rng_state, module._set_cuda_rng_state = get_state, set_state


def _uneven_shards() -> None:
    """Skip the check in Megatron's FSDP that the parts of all ranks make up the whole tensor.

    Megatron skips it itself under torch's `fake` process groups. It cannot pass if all ranks hold the same part.
    """
    shards: Any = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor")
    buffers: Any = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer")
    for module in (shards, buffers):
        if hasattr(module, "validate_uneven_dtensor"):
            module.validate_uneven_dtensor = lambda dtensor: None
    # Ranks copy the random state of the first rank in their tensor parallel group, which here equals their own.
    adapter: Any = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    adapter.FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda wrapped: None
