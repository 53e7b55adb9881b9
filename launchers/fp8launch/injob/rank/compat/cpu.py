"""Real Megatron training on a machine without a GPU, for tests, demos and first steps.

Megatron-Core has no CPU mode: it asserts CUDA and places every tensor on it. `install()` answers torch.cuda's
questions as a machine with one Hopper GPU per process would and sends every tensor meant for CUDA to host memory.
Nothing of Megatron's own training, parallelism, checkpointing or logging is replaced; collectives run over gloo. Log
lines are Megatron's, with 0.0 for TFLOP/s and memory (there is no such device).

Works (0.17 to 0.19): data, tensor, pipeline (also virtual) and expert parallelism; multi-latent attention; the
distributed optimizer with overlapped reduction and gathering; torch_dist checkpoints, also asynchronous; resume; exit
on a signal; stop on NaN.
Does not, in Megatron itself without Transformer Engine: sequence parallelism, context parallelism, FP8 and FP4, TE's
fused attention and norms. Does not, here: CUDA graphs, CPU offloading, FSDP, and anything that times or profiles a GPU.
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
    """Make this process train on the CPU; call before Megatron is imported. Twice is once."""
    if getattr(install, "done", False):
        return
    install.done = True  # type: ignore[attr-defined]
    cpu_process.cover()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    triton_stub.install()
    install_device()
    install_megatron()


def install_device() -> None:
    """Answer torch.cuda's questions and keep every tensor in host memory; imports nothing of Megatron."""
    _answer_for_device()
    _host_random_state()
    _timeless_streams()
    _HostMemory().__enter__()


def mode() -> TorchFunctionMode:
    """The mode that places tensors in host memory, to enter where torch suspended it."""
    return _HostMemory()


def install_megatron() -> None:
    """Replace what reaches past torch's Python into its CUDA build."""
    _patch_megatron()


# --- What Megatron asks of torch.cuda -------------------------------------------------------------------------------


def _answer_for_device() -> None:
    """One GPU per process, of the Hopper kind, since the arguments are validated for one (Megatron asks its
    generation)."""
    cuda: Any = torch.cuda
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    properties = types.SimpleNamespace(
        name="cpu", major=9, minor=0, total_memory=ram, multi_processor_count=os.cpu_count() or 1
    )
    cuda.is_available = lambda: True
    # Megatron skips its process groups when it counts none.
    cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    cuda.set_device = lambda device: None
    # Given back to `device=` arguments, so it must name a device that tensors can live on.
    cuda.current_device = lambda: "cpu"
    cuda.get_device_capability = lambda device=None: (properties.major, properties.minor)
    cuda.get_device_properties = lambda device=None: properties
    cuda.get_device_name = lambda device=None: properties.name
    cuda.synchronize = lambda device=None: None
    cuda.reset_peak_memory_stats = lambda device=None: None


def _host_random_state() -> None:
    """The CUDA generator's state is the host generator's: one stream of random numbers, forked as Megatron forks
    it."""
    cuda: Any = torch.cuda

    def get_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def seed(value: int) -> None:
        torch.default_generator.manual_seed(value)

    for holder in (cuda, cuda.random):
        holder.get_rng_state, holder.set_rng_state = get_state, set_state
        holder.manual_seed = holder.manual_seed_all = seed


class _OfDevice:
    """As with CUDA's own objects, nothing that holds one can be copied or pickled."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(f"cannot pickle '{type(self).__name__.lstrip('_')}' object")


class _Stream(_OfDevice):
    """Host operations finish before they return, so every stream is empty and every wait is over."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

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

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class _Event(_OfDevice):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds."""
        return (end._at - self._at) * 1e3


def _timeless_streams() -> None:
    cuda: Any = torch.cuda
    only = _Stream()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = cuda.default_stream = lambda device=None: only
    cuda.set_stream = lambda stream: None
    cuda.stream = lambda stream: contextlib.nullcontext()
    torch.Tensor.record_stream = lambda self, stream: None


# --- Where tensors live ---------------------------------------------------------------------------------------------


def _host_if_device(argument: Any) -> Any:
    """An argument of `Tensor.to`: a number there is not a device."""
    if isinstance(argument, (torch.device, str)):
        return _host(argument)
    return argument


def _host(device: Any) -> Any:
    """`device` with every way to say CUDA (name, number, torch.device) turned into the host."""
    if isinstance(device, torch.device):
        return CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return "cpu" if device.startswith("cuda") else device
    if isinstance(device, int) and not isinstance(device, bool):
        return CPU
    return device


class _HostMemory(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Sends what is meant for a GPU to host memory, in every torch function and tensor method."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("cuda", "pin_memory"):  # Pinning needs a driver; its only use is the copy to a GPU.
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _host(kwargs["device"])
        if name == "to":
            args = tuple(map(_host_if_device, args))
        result = func(*args, **kwargs)
        if name == "type" and isinstance(result, str) and args[0].device.type != "meta":
            # Megatron's optimizers ask a parameter for its type by name, and know only those on CUDA.
            return result.replace("torch.", "torch.cuda.")
        return result


# --- What of Megatron and of torch's CUDA builds is in the way
# --------------------------------------------------------


def _patch_megatron() -> None:
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    # These two reach into torch's C++ CUDA generators.
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)  # type: ignore[attr-defined]

    # MoE's token dispatcher turns the split sizes into numbers only where they come from a GPU.
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
    """Let Megatron's own attention serve multi-latent attention, whose keys and values have widths of their own.

    The layer passes the widths as Transformer Engine's attention takes them. Megatron's computes any widths, and only
    the width of its output has to be that of the values.
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
    """Let the distributed optimizer load a checkpoint where Adam is torch's, for lack of Transformer Engine and APEX.

    Four faults of Megatron are in the way. It reads the step number from Adam's state, which torch fills only at the
    first step: an assertion fails at every load. A load leaves all parameters with one and the same step tensor, of a
    stale number, which each of them then increments: Adam's bias correction and the losses leave their course. The
    fully reshardable format holds no step for a parameter, and its loader fails for lack of one. And in fp32 the
    loader of the other format writes into a view of a parameter while gradients are recorded.
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
                for parameter in group["params"]:
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
