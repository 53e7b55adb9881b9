"""Real Megatron training on a machine without a GPU, for tests, demos and first steps.

Megatron-Core has no CPU mode: it requires CUDA and places every tensor there. `install()` makes torch.cuda answer like
a machine with one Hopper GPU per process, and places every tensor meant for CUDA in host memory. Megatron's training,
parallelism, checkpointing and logging run unchanged; collectives run over gloo. Its log lines have 0.0 for TFLOP/s and
memory, because there is no such device.

Works (0.17 to 0.19): data, tensor, pipeline (also virtual) and expert parallelism; multi-latent attention; the
distributed optimizer with overlapped reduction and gathering; torch_dist checkpoints, also asynchronous; resume; exit
on a signal; stop on NaN.
Does not work in Megatron without Transformer Engine: sequence and context parallelism, FP8 and FP4, TE's fused
attention and norms. Does not work here: CUDA graphs, CPU offloading, FSDP, timing and profiling of a GPU.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fp8launch.injob.rank.compat import cpu_process, triton_stub

CPU = torch.device("cpu")


def install() -> None:
    """Make this process train on the CPU. Call this before Megatron is imported; a second call does nothing."""
    if getattr(install, "done", False):
        return
    install.done = True  # type: ignore[attr-defined]
    cpu_process.cover()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    triton_stub.install()
    install_device()
    install_megatron()


def install_device() -> None:
    """Replace torch.cuda's answers and keep every tensor in host memory. Imports nothing of Megatron."""
    _describe_device()
    _use_host_random_state()
    _replace_streams()
    HostMemory().__enter__()


# --- What Megatron asks of torch.cuda -------------------------------------------------------------------------------


def _describe_device() -> None:
    """Describe one Hopper GPU per process, for which Megatron's arguments are validated."""
    cuda: Any = torch.cuda
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=ram, multi_processor_count=os.cpu_count() or 1
    )
    cuda.is_available = lambda: True
    # Megatron skips creating its process groups if this is 0.
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.set_device = lambda device: None
    # Megatron passes this to `device=` arguments, so it must name a device that tensors can be on.
    cuda.current_device = lambda: "cpu"
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: properties.name
    cuda.synchronize = lambda device=None: None
    cuda.reset_peak_memory_stats = lambda device=None: None


def _use_host_random_state() -> None:
    """Make the host's generator the CUDA generator: one stream of random numbers, forked as Megatron forks it."""
    cuda: Any = torch.cuda

    for holder in (cuda, cuda.random):
        holder.get_rng_state = lambda device=None: torch.get_rng_state()
        holder.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
        holder.manual_seed = holder.manual_seed_all = torch.default_generator.manual_seed


class _OfDevice:
    """Like CUDA's own objects, it cannot be copied or pickled, nor can anything that holds it.

    Host operations finish before they return, so there is nothing to wait for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle '{type(self).__name__.lstrip('_')}' object")


class _Stream(_OfDevice):
    cuda_stream = 0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record(self)
        return event


class _Event(_OfDevice):
    _at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return (end._at - self._at) * 1e3


def _replace_streams() -> None:
    cuda: Any = torch.cuda
    only = _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: only
    cuda.set_stream = lambda stream: None
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


# --- Where tensors live ---------------------------------------------------------------------------------------------


def _host(device: Any) -> Any:
    """Return the host for a CUDA device (by name, number or torch.device), and other values unchanged."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


class HostMemory(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Torch function mode that places tensors meant for a GPU in host memory."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):  # Pinning needs a driver; its only use is the copy to a GPU.
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        if name == "to":
            # A number is no device there.
            args = tuple(_host(value) if isinstance(value, (torch.device, str)) else value for value in args)
        result = func(*args, **kwargs)
        if name == "type" and isinstance(result, str) and args[0].device.type != "meta":
            # Megatron's optimizers read the name of a parameter's type, and know only CUDA types.
            return result.replace("torch.", "torch.cuda.")
        return result


# --- Parts of Megatron and of torch's CUDA builds that need a GPU -----------------------------------------------------


def install_megatron() -> None:
    """Replace what uses the C++ code of torch's CUDA builds."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # These two use torch's CUDA generators in C++.
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)  # type: ignore[attr-defined]

    # MoE's token dispatcher turns split sizes into numbers only if they come from a GPU.
    for name in ("moe_utils", "token_dispatcher"):
        module = importlib.import_module(f"megatron.core.transformer.moe.{name}")
        module.maybe_move_tensor_to_cpu = _split_sizes  # type: ignore[attr-defined]

    _attend_with_other_widths(
        importlib.import_module("megatron.core.transformer.dot_product_attention").DotProductAttention
    )
    _resume_with_torch_adam(importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer)

    # A CUDA build of torch without a driver: the data loader's pinning thread and Adam's check for graph capture.
    pinning = importlib.import_module("torch.utils.data._utils.pin_memory")
    pinning.pin_memory = lambda data, device=None: data  # type: ignore[attr-defined]
    torch.optim.Optimizer._accelerator_graph_capture_health_check = lambda self: None


def _attend_with_other_widths(attention: Any) -> None:
    """Let Megatron's own attention serve multi-latent attention, whose keys and values have their own widths.

    The layer passes the widths to the constructor, as Transformer Engine's attention takes them. Megatron's attention
    computes any widths; only the width of its output must be set to the width of the values.
    """
    initialize = attention.__init__

    @functools.wraps(initialize)
    def initialize_with_widths(
        self: Any, *arguments: Any, k_channels: int | None = None, v_channels: int | None = None, **named: Any
    ) -> None:
        initialize(self, *arguments, **named)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.__init__ = initialize_with_widths


def _resume_with_torch_adam(distributed_optimizer: Any) -> None:
    """Let the distributed optimizer load a checkpoint with torch's Adam, without Transformer Engine and APEX.

    Megatron has four faults there. It reads the step number from Adam's state, which torch fills only at the first
    step, so an assertion fails at every load. After a load all parameters share one step tensor with a stale number,
    which each of them increments, so Adam's bias correction and the losses differ. The fully reshardable format has no
    step for each parameter, but its loader requires one. In fp32 the loader of the other format writes into a view of a
    parameter while gradients are recorded.
    """
    state_dict, load_state_dict = distributed_optimizer.state_dict, distributed_optimizer.load_state_dict

    def state_dict_of_started(self: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam) and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    zeros = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    self.optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
        return state_dict(self)

    def load_own_steps(self: Any, state: Any) -> None:
        load_state_dict(self, state)
        if isinstance(self.optimizer, torch.optim.Adam):
            for group in self.optimizer.param_groups:
                # The format of Megatron-FSDP has a step for each parameter.
                for parameter in group["params"] if "step" in group else ():
                    self.optimizer.state[parameter]["step"] = torch.tensor(float(group["step"]))

    set_states = distributed_optimizer._set_main_param_and_optimizer_states

    def set_states_with_step(self: Any, parameter: Any, tensors: Any) -> None:
        with torch.no_grad():
            # `load_own_steps` sets the step of every parameter afterwards.
            set_states(self, parameter, {"step": torch.tensor(0.0), **tensors})

    distributed_optimizer._set_main_param_and_optimizer_states = set_states_with_step
    distributed_optimizer.state_dict = state_dict_of_started
    distributed_optimizer.load_state_dict = load_own_steps


def _split_sizes(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
