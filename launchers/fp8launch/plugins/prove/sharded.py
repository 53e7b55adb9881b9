"""Megatron-FSDP in a proof: start from whole weights, save whole tensors, and train on a CPU.

Megatron-FSDP shards a model as soon as it wraps it, and has a checkpoint format of its own. The start is therefore
loaded before the model is wrapped. After the step, all shards are gathered, and whole tensors are saved under the names
that they have in Megatron's distributed checkpoints.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fp8launch.plugins.prove.settings import CPU

_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
# The entries of distributed checkpoints for the weights of a wrapped model, by the weight's name.
_ENTRIES = "_entries_of_proof"


def install(device: str, start: str | None) -> None:
    """Prepare Megatron-FSDP for a device, and let models begin with the weights of the checkpoint `start`."""
    adapter: Any = importlib.import_module(_ADAPTER)
    wrapper = adapter.FullyShardedDataParallel
    if device == CPU:
        adapter.DeviceMesh = SimpleNamespace(from_group=_mesh_on_host(adapter.DeviceMesh.from_group))
        if not isinstance(getattr(adapter, "TELinear", None), type):
            # Without Transformer Engine, 0.17 imports something that is not a class.
            adapter.TELinear = type(None)
        _keep_empty_states()
        _wait_for_gathers()
    initialize = wrapper.__init__

    @functools.wraps(initialize)
    def initialize_from_start(
        self: Any, config: Any, ddp_config: Any, module: Any, *options: Any, **named: Any
    ) -> None:
        entries = entries_of(module)
        if start is not None:
            _load(module, entries, start)
        if device == CPU:
            with _numbered_device():
                initialize(self, config, ddp_config, module, *options, **{**named, "device": torch.device(CPU)})
        else:
            initialize(self, config, ddp_config, module, *options, **named)
        setattr(self, _ENTRIES, entries)

    wrapper.__init__ = initialize_from_start


def is_sharded(chunk: Any) -> bool:
    """Return whether Megatron-FSDP has wrapped a model."""
    return hasattr(chunk, _ENTRIES)


def named_weights(chunk: Any) -> Iterator[tuple[str, Any]]:
    """Yield the part of every weight that this rank optimizes, with its name in a checkpoint."""
    for _, entry, weight in _with_entries(chunk):
        yield entry.key, weight


def whole_weights(chunk: Any) -> dict[str, Any]:
    """Return whole weights and saved buffers as entries of a checkpoint. All ranks take part."""
    weights = {
        name: replace(entry, data=_whole(chunk, weight, weight.detach()).to(weight.orig_param.dtype))
        for name, entry, weight in _with_entries(chunk)
    }
    entries, buffers = getattr(chunk, _ENTRIES), chunk.module.module.named_buffers()
    return weights | {name: replace(entries[name], data=buffer) for name, buffer in buffers if name in entries}


def save(chunk: Any, optimizer: Any, folder: Path) -> None:
    """Save whole weights and their first moments as a distributed checkpoint. All ranks take part."""
    serialization: Any = importlib.import_module("megatron.core.dist_checkpointing.serialization")
    states: dict[Any, Any] = {}
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        states |= part.optimizer.state
    content = whole_weights(chunk)
    for name, entry, weight in _with_entries(chunk):
        # A rank without a part of a weight has no state for it.
        moment = states[weight]["exp_avg"] if weight in states else torch.empty(0)
        key = f"optimizer.state.exp_avg.{entry.key}"
        whole = _whole(chunk, weight, moment)
        # The moment of a bf16 weight is in fp32. Factories, which split a tensor later, have no dtype.
        typed = {"dtype": whole.dtype} if hasattr(entry, "dtype") else {}
        content[f"optimizer.{name}"] = replace(entry, key=key, data=whole, **typed)
    if torch.distributed.get_rank() == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    serialization.save(content, str(folder))


def _with_entries(chunk: Any) -> Iterator[tuple[str, Any, Any]]:
    entries = getattr(chunk, _ENTRIES)
    for name, weight in chunk.param_and_grad_buffer.optimizer_named_parameters:
        yield name, entries[name], weight


def entries_of(module: Any) -> dict[str, Any]:
    """Return the checkpoint entry of each weight of a model that is not sharded, by the weight's name; None without.

    Saved buffers, such as the expert biases of a router, are included.
    """
    nested_values = importlib.import_module("megatron.core.dist_checkpointing.dict_utils").nested_values
    state = module.sharded_state_dict()
    by_address = {}
    for entry in nested_values(state):
        if isinstance(getattr(entry, "data", None), torch.Tensor):
            by_address[entry.data.data_ptr()] = entry
    found = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        # In bf16, Megatron wraps the model once more, which changes names but not entries.
        entry = state.get(name.removeprefix("module."))
        if hasattr(entry, "key"):
            found[name] = entry
        elif isinstance(tensor, torch.nn.Parameter):
            # An FP8 weight has no address, and its entry holds a copy in bf16.
            found[name] = by_address.get(tensor.data_ptr())
    return found


def _load(module: Any, entries: dict[str, Any], folder: str) -> None:
    serialization: Any = importlib.import_module("megatron.core.dist_checkpointing.serialization")
    loaded = serialization.load(dict(entries), folder)
    with torch.no_grad():
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        for name in entries:
            tensors[name].copy_(loaded[name])


def _whole(chunk: Any, weight: Any, value: Any) -> torch.Tensor:
    """Return a value of the optimizer for a whole weight of this rank, of which ranks hold consecutive parts."""
    buffer = chunk.param_and_grad_buffer
    original = weight.orig_param
    group = buffer.parameter_groups[buffer.param_to_param_group[original]]
    stored = group.main_weight_buffer or group.model_weight_buffer
    part = getattr(value, "_local_tensor", value).flatten()
    if stored is None or buffer.bucketing_policy.data_parallel_sharding_strategy == "no_shard":
        return part.reshape(original.shape)
    begin, _ = stored._get_item_slice_in_shard(stored.param_idx[original])
    parts: list[Any] = [None] * stored.data_parallel_group.size()
    torch.distributed.all_gather_object(parts, (begin, part.cpu()), group=stored.data_parallel_group)
    held = sorted(((begin, part) for begin, part in parts if part.numel()), key=lambda one: one[0])
    return torch.cat([part for _, part in held]).reshape(original.shape)


# --- On a CPU -------------------------------------------------------------------------------------------------------


def _mesh_on_host(from_group: Any) -> Any:
    @functools.wraps(from_group)
    def on_host(groups: Any, device_type: str, *options: Any, **named: Any) -> Any:
        return from_group(groups, CPU, *options, **named)

    return on_host


def _keep_empty_states() -> None:
    """Let torch's Adam have a state for weights of which this rank has no part, as Transformer Engine's Adam does.

    Megatron exchanges places of the state tensor by tensor, for which every rank must have the same ones in one order.
    """
    distributed: Any = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    begin, sharded_state = (
        distributed._init_optimizer_states_with_dummy_values,
        distributed.sharded_param_state_fsdp_dtensor,
    )

    @functools.wraps(begin)
    def begin_all(self: Any) -> None:
        begin(self)
        _add_empty_states(self.optimizer)

    @functools.wraps(sharded_state)
    def state_of_all(self: Any, is_loading: bool = False) -> Any:
        if not is_loading:
            _add_empty_states(self.optimizer)
        return sharded_state(self, is_loading)

    distributed._init_optimizer_states_with_dummy_values = begin_all
    distributed.sharded_param_state_fsdp_dtensor = state_of_all


def _add_empty_states(adam: Any) -> None:
    known = dict(adam.state)
    steps = max((state["step"] for state in known.values() if state), default=torch.tensor(0.0))
    # In the same order on every rank.
    adam.state.clear()
    for group in adam.param_groups:
        for weight in group["params"]:
            state = known.get(weight)
            if not state:
                moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
                state = {"step": steps.clone(), **moments}
            adam.state[weight] = state


def _wait_for_gathers() -> None:
    """Finish every collective before Megatron-FSDP goes on.

    It frees memory in the order of a CUDA stream, while gloo may still write to it.
    """
    buffers: Any = importlib.import_module("megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer")
    coalesce = buffers._coalescing_manager

    @contextmanager
    def finished(*arguments: Any, async_ops: bool = False, **named: Any) -> Iterator[Any]:
        with coalesce(*arguments, async_ops=async_ops, **named) as manager:
            yield manager
        if async_ops:
            manager.wait()

    buffers._coalescing_manager = finished


@contextmanager
def _numbered_device() -> Iterator[None]:
    """Let Megatron-FSDP compare its device with the current one, which it expects to have a number."""
    cuda: Any = torch.cuda
    current = cuda.current_device
    cuda.current_device = lambda: 0
    try:
        yield
    finally:
        cuda.current_device = current
