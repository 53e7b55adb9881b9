"""A process group of any size in one process, which assumes that every other rank holds the same data.

An all-gather repeats this rank's tensor, a reduce-scatter takes this rank's slice, an all-to-all returns what this rank
would send to itself, and a receive fills its buffer. Megatron's own communication code, with its checks of shapes and
sizes, can thus run as one rank of a world of thousands.
"""
# mypy: disable-error-code="import-not-found, attr-defined, no-untyped-call, misc, no-any-return"

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from fp8launch.plugins.rehearse.cuda_graphs import Communication
from fp8launch.plugins.rehearse.noise import noise

NAME = "fp8launch_mirror"


class Finished(dist.Work):
    """The handle of a collective that has already finished."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Future[Any] = Future()
        self._future.set_result(result)
        self._communication = Communication()

    def wait(self, timeout: Any = None) -> bool:
        self._communication.wait()
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Future[Any]:
        return self._future


def _outside_autograd(kind: type) -> type:
    """Run the methods without autograd, as NCCL does: it writes to memory that autograd does not track."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, types.FunctionType) and not name.startswith("__"):
            setattr(kind, name, torch.no_grad()(method))
    return kind


@_outside_autograd
class Mirror(dist.ProcessGroup):
    """One rank's view of a group in which all ranks hold the same data."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.own, self.ranks = rank, size

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Any:
        for tensor in tensors:
            if "SUM" in str(getattr(opts, "reduceOp", "")):
                tensor.mul_(self.ranks)
        return Finished(tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return Finished(tensors)

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        return Finished(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            for each in output:
                # With NCCL, other ranks' tensors may have different sizes.
                each.copy_(tensor if each.shape == tensor.shape else noise(each.shape, each.dtype))
        return Finished(outputs)

    def _allgather_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        output.view(self.ranks, -1).copy_(tensor.reshape(1, -1).expand(self.ranks, -1))
        return Finished(output)

    all_gather_single = all_gather_into_tensor = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return Finished(outputs)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensors in zip(outputs, inputs, strict=True):
            output.copy_(tensors[self.own])
        return Finished(outputs)

    def _reduce_scatter_base(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Any:
        output.copy_(tensor.reshape(self.ranks, -1)[self.own].reshape(output.shape))
        return Finished(output)

    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor)
        return Finished(outputs)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall_base(
        self, output: torch.Tensor, tensor: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        sent = _parts(tensor, input_splits, self.ranks)[self.own]
        for received in _parts(output, output_splits, self.ranks):
            if received.shape[1:] != sent.shape[1:]:
                raise RuntimeError(f"all_to_all: ranks send {tuple(sent.shape)}, expected {tuple(received.shape)}")
            if len(received) and len(sent):
                # After a dispatch, the other ranks would return different numbers of rows: repeat this rank's.
                received.copy_(sent[torch.arange(len(received)) % len(sent)])
            elif len(received):
                received.zero_()
        return Finished(output)

    def all_to_all_single(self, output: torch.Tensor, tensor: torch.Tensor, *rest: Any) -> Any:
        return self.alltoall_base(output, tensor, *rest)

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output in outputs:
            output.copy_(inputs[self.own])
        return Finished(outputs)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensor in zip(outputs, inputs, strict=False):
            for each in output:
                # With NCCL, other ranks' tensors may have different sizes.
                each.copy_(tensor if each.shape == tensor.shape else noise(each.shape, each.dtype))
        return Finished(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, tensors in zip(outputs, inputs, strict=False):
            output.copy_(tensors[self.own])
        return Finished(outputs)

    def _start_coalescing(self, device: Any) -> None:
        """Do nothing: each operation runs when it is called."""

    def _end_coalescing(self, device: Any) -> Any:
        return Finished(torch.ones(1))

    def barrier(self, opts: Any = None) -> Any:
        return Finished(torch.ones(1))

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        return Finished(tensors)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.copy_(noise(tensor.shape, tensor.dtype))
            else:
                tensor.zero_()
        return Finished(tensors)

    recv_anysource = recv

    def getBackendName(self) -> str:  # the name that torch calls
        return NAME

    @property
    def pg_name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._given_name = name

    @property
    def group_name(self) -> str:
        return str(getattr(self, "_given_name", NAME))


def _parts(tensor: torch.Tensor, splits: Any, ranks: int) -> Sequence[torch.Tensor]:
    if splits is None or len(splits) == 0:
        return tensor.chunk(ranks)
    return tensor.split([int(size) for size in splits])


def _make(store: Any, rank: int, size: int, timeout: Any) -> Mirror:
    return Mirror(rank, size)


class _NcclOptions:
    """The options of a communicator that Megatron sets."""

    def __init__(self, is_high_priority_stream: bool = False, **_: Any) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = types.SimpleNamespace()


def install(rank: int, world: int) -> None:
    """Initialize torch.distributed as rank `rank` of `world`, and make every group a mirror."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.Backend.register_backend(NAME, _make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=FakeStore(), rank=rank, world_size=world)
    dist.is_nccl_available = dist.is_backend_available = lambda *_: True
    if not hasattr(dist, "ProcessGroupNCCL"):  # missing in CPU builds of torch
        dist.ProcessGroupNCCL = types.SimpleNamespace(Options=_NcclOptions)
    original = dist.new_group

    def new_group(*arguments: Any, **options: Any) -> Any:
        options["backend"] = None
        options.pop("pg_options", None)
        return original(*arguments, **options)

    dist.new_group = dist.distributed_c10d.new_group = new_group
    # The objects of other ranks are not known, so a list keeps its contents.
    dist.broadcast_object_list = dist.distributed_c10d.broadcast_object_list = lambda objects, *_, **__: None
