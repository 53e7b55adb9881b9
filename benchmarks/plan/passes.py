"""Count the passes over memory of the activation and the output bias of GPT-OSS's experts, without a GPU.

    python benchmarks/plan/passes.py

Megatron-Core 0.19 fuses neither (megatron/core/transformer/moe/experts.py): PyTorch runs one kernel for each operation,
partly in fp32, because the router's probabilities are. One pass reads or writes the experts' first product, twice as
wide as the model, once in bf16. The operations here follow that file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROWS, WIDTH, EXPERTS = 1024, 2880, 8
CLAMP = 7.0


class Bytes(TorchDispatchMode):
    """Add up the bytes that operations read and write; views cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, written = ([t for t in tree_leaves(x) if isinstance(t, torch.Tensor)] for x in ((args, kwargs), result))
        storages = {t.untyped_storage().data_ptr() for t in read}
        views = all(t.untyped_storage().data_ptr() in storages for t in written)
        if not views or func._schema.name.endswith("_"):
            self.total += sum(t.numel() * t.element_size() for t in (*read, *written))
        return result


def activation(product: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    gate, linear = torch.chunk(product, 2, dim=-1)
    gate, linear = gate.clamp(max=CLAMP), linear.clamp(min=-CLAMP, max=CLAMP)
    activated = gate * torch.sigmoid(1.702 * gate) * (linear + 1.0)
    return (activated * probabilities).to(product.dtype)


def output_bias(output: torch.Tensor, probabilities: torch.Tensor, biases: list[torch.Tensor]) -> torch.Tensor:
    parts = zip(output.chunk(EXPERTS), biases, probabilities.chunk(EXPERTS), strict=True)
    return torch.cat([part + bias * weight for part, bias, weight in parts]).to(output.dtype)


def passes(operation: Callable[[], torch.Tensor]) -> float:
    """Return the forward and backward passes over a bf16 tensor twice as wide as the model."""
    with Bytes() as count:
        result = operation()
        result.backward(torch.ones_like(result))
    return count.total / (ROWS * 2 * WIDTH * 2)


def main() -> None:
    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, requires_grad=True)

    product, output = tensor(ROWS, 2 * WIDTH), tensor(ROWS, WIDTH)
    probabilities = tensor(ROWS, 1, dtype=torch.float32)
    biases = [tensor(WIDTH) for _ in range(EXPERTS)]
    print(f"activation   {passes(lambda: activation(product, probabilities)):.0f} passes")
    print(f"output bias  {passes(lambda: output_bias(output, probabilities, biases)):.0f} passes")


if __name__ == "__main__":
    main()
