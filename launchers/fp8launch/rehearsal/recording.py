"""Record what one step does: collectives by group, messages between stages, and GEMMs, with their rehearsed shapes.

Shapes are all that counts here, so matrix products are not computed: each returns zeros of its shape. Tokens are
spread evenly over experts, as a trained router spreads them.
"""
# mypy: disable-error-code="import-not-found, no-untyped-call, misc, no-any-return"

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

# Iterations that are recorded: from the second on every step does the same.
FIRST = 2
# Operands of each product, by position.
PRODUCTS = {
    "aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::addmm_": (1, 2),
    "aten::baddbmm_": (1, 2),
}  # fmt: skip
# Transposition of the operands of cuBLAS, as Transformer Engine asks for it, to what the product is for.
PASSES = {(True, False): "forward", (False, False): "data gradient", (False, True): "weight gradient"}
QUANTIZED = {"Float8Tensor": "fp8", "Float8Block": "fp8 blockwise", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}

GROUPS: tuple[tuple[str, str, dict[str, bool]], ...] = (
    ("tp", "get_tensor_model_parallel_group", {}),
    ("cp", "get_context_parallel_group", {}),
    ("pp", "get_pipeline_model_parallel_group", {}),
    ("dp", "get_data_parallel_group", {}),
    ("dp-cp", "get_data_parallel_group", {"with_context_parallel": True}),
    ("ep", "get_expert_model_parallel_group", {}),
    ("etp", "get_expert_tensor_parallel_group", {}),
    ("expert-dp", "get_expert_data_parallel_group", {}),
    ("tp-ep", "get_expert_tensor_and_model_parallel_group", {}),
    ("tp-cp", "get_tensor_and_context_parallel_group", {}),
    ("tp-dp-cp", "get_tensor_and_data_parallel_group", {"with_context_parallel": True}),
    ("model", "get_model_parallel_group", {}),
    ("embedding", "get_embedding_group", {}),
)


class Recording:
    """The steps that were recorded: of each the events in order; and the parameters of the gradient buckets."""

    def __init__(self, microbatches: list[int], local_world: int) -> None:
        self.microbatches = microbatches
        self.local_world = local_world
        self.steps: list[list[dict[str, Any]]] = []
        self.buckets: list[list[list[int]]] = []
        self.quiet = 0
        self._iteration = 0
        self._recording = False
        self._of_address: dict[int, int] = {}
        self._groups: dict[tuple[int, ...], str] = {}
        self._pipeline: tuple[int, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The steps with 1, 2, ... of `microbatches`, and the shapes of the parameters of each bucket."""
        return {"steps": self.steps, "buckets": self.buckets}

    def begin(self, model: Any) -> int:
        """Begin an iteration; the number of micro batches that it shall have."""
        self._iteration += 1
        number = max(self._iteration - FIRST, 0)
        if self._iteration == FIRST:
            self._find_groups()
            self._find_buckets(model)
        self._recording = FIRST <= self._iteration < FIRST + len(self.microbatches)
        if self._recording:
            self.steps.append([])
        return self.microbatches[min(number, len(self.microbatches) - 1)]

    def end(self) -> None:
        self._recording = False

    def collective(self, kind: str, group: Any, tensor: torch.Tensor) -> None:
        """Note a collective, by its largest tensor; those of one rank are none."""
        if not self._recording or group.size() < 2:
            return
        ranks = _ranks(group)
        name = "other"
        if len(ranks) == dist.get_world_size():
            name = "world"
            if kind in ("send", "receive"):
                # Where two pipeline stages send and receive at once, one direction uses the world's group.
                ranks = self._pipeline or ranks
        bucket = None
        if tensor.dim() == 1:
            bucket = self._of_address.get(tensor.data_ptr())
        self.steps[-1].append(
            {
                "what": kind,
                "group": self._groups.get(ranks, name),
                "ranks": len(ranks),
                "nodes": len({rank // self.local_world for rank in ranks}),
                "item": tensor.element_size(),
                "shapes": [list(tensor.shape)],
                "bucket": bucket,
            }
        )

    def product(self, what: str, purpose: str, dtype: str, groups: int, shapes: list[list[int]]) -> None:
        """Note a GEMM, (rows, columns, inner), or an attention, by its operands."""
        if self._recording:
            self.steps[-1].append({"what": what, "pass": purpose, "dtype": dtype, "groups": groups, "shapes": shapes})

    def _find_groups(self) -> None:
        state: Any = importlib.import_module("megatron.core.parallel_state")
        for name, getter, options in GROUPS:
            try:
                group = getattr(state, getter)(check_initialized=False, **options)
            except TypeError:
                group = getattr(state, getter)(**options)
            except AssertionError:
                continue
            if group is not None and isinstance(group, dist.ProcessGroup):
                named = self._groups.setdefault(_ranks(group), name)
                if named == "pp":
                    self._pipeline = _ranks(group)

    def _find_buckets(self, model: Any) -> None:
        if not isinstance(model, list):
            model = [model]
        for chunk in model:
            for buffer in _buffers(chunk):
                for bucket in buffer.buckets:
                    for data in (bucket.grad_data, bucket.param_data):
                        if data is not None:
                            self._of_address[data.data_ptr()] = len(self.buckets)
                    self.buckets.append([list(parameter.shape) for parameter in bucket.params_list])


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(sorted(dist.get_process_group_ranks(group)))


def _buffers(chunk: Any) -> list[Any]:
    """The gradient buffers of Megatron's DDP; its module also has torch's method of that name."""
    found: list[Any] = []
    for name in ("buffers", "expert_parallel_buffers"):
        value = getattr(chunk, name, None)
        if isinstance(value, list):
            found += value
    return found


class _Products(TorchDispatchMode):
    """Notes every matrix product of torch's own and leaves its computation out."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if name not in PRODUCTS:
            return func(*args, **kwargs)
        first, second = PRODUCTS[name]
        left, right = args[first], args[second]
        if not self.recording.quiet:
            groups = 1
            if left.dim() == 3:
                groups = left.shape[0]
            shape = [left.shape[-2], right.shape[-1], left.shape[-1]]
            self.recording.product("matmul", "", str(left.dtype).removeprefix("torch."), groups, [shape])
        if name.endswith("_"):
            return args[0]
        if kwargs.get("out") is not None:
            return kwargs["out"]
        dtype = args[0].dtype
        return torch.zeros(*left.shape[:-1], right.shape[-1], dtype=dtype)


def install(request: dict[str, Any], local_world: int) -> Recording:
    """Record the steps of this process; call when Megatron can be imported and the groups are mirrors."""
    recording = Recording(request["microbatches"], local_world)
    mirror_group: Any = importlib.import_module("fp8launch.rehearsal.mirror_group")
    mirror_group.observe = recording.collective
    _record_extension(recording)
    _record_flash_attention(recording)
    _spread_tokens()
    _record_steps(recording)
    _Products(recording).__enter__()
    return recording


def _record_steps(recording: Recording) -> None:
    training: Any = importlib.import_module("megatron.training.training")
    calculators: Any = importlib.import_module("megatron.core.num_microbatches_calculator")
    original = training.train_step

    @functools.wraps(original)
    def train_step(forward_step: Any, data: Any, model: Any, *arguments: Any, **named: Any) -> Any:
        calculator = calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        usual = calculator.num_micro_batches
        calculator.num_micro_batches = recording.begin(model)
        try:
            return original(forward_step, data, model, *arguments, **named)
        finally:
            recording.end()
            calculator.num_micro_batches = usual

    training.train_step = train_step


def _spread_tokens() -> None:
    """Token i goes to the experts i * topk, i * topk + 1, ..., whatever the router would choose."""
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    original = router.TopKRouter.gating

    def gating(self: Any, *arguments: Any, **named: Any) -> torch.Tensor:
        logits = original(self, *arguments, **named)
        experts, chosen = logits.shape[-1], self.topk
        rows = torch.arange(logits.numel() // experts).unsqueeze(1)
        columns = (rows * chosen + torch.arange(chosen)) % experts
        wanted = torch.zeros(len(rows), experts, dtype=logits.dtype).scatter(1, columns, 1e4)
        return logits + wanted.view(logits.shape)

    router.TopKRouter.gating = gating
    # --moe-router-force-load-balancing, which would come after it.
    router.apply_random_logits = lambda logits: logits


def _record_extension(recording: Recording) -> None:
    extension = sys.modules.get("transformer_engine_torch")
    if extension is None:
        return
    module: Any = extension
    grouped_tensors: Any = importlib.import_module("fp8launch.rehearsal.compiled_te.grouped")

    def quietly(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*arguments: Any, **named: Any) -> Any:
            if not recording.quiet:
                note(*arguments, **named)
            recording.quiet += 1
            try:
                return original(*arguments, **named)
            finally:
                recording.quiet -= 1

        return call

    def gemm(a: Any, transa: bool, b: Any, transb: bool, *_: Any, **__: Any) -> None:
        shape = _product_shape(a, transa, b, transb)
        recording.product("gemm", PASSES.get((transa, transb), ""), _precision(a), 1, [shape])

    def grouped(a: Any, transa: bool, b: Any, transb: bool, *_: Any, **__: Any) -> None:
        each_group(_precision(a[0]), a, transa, b, transb)

    def of_grouped_tensors(a: Any, transa: bool, b: Any, transb: bool, *_: Any, **__: Any) -> None:
        operand = a
        if isinstance(a, list):
            operand = a[0]
        each_group(_precision(operand), grouped_tensors.parts(a), transa, grouped_tensors.parts(b), transb)

    def each_group(precision: str, a: Any, transa: bool, b: Any, transb: bool) -> None:
        shapes = [_product_shape(left, transa, right, transb) for left, right in zip(a, b, strict=True)]
        # The dimension of tokens is the inner one in products for weight gradients.
        tokens = 0
        if transb:
            tokens = 2
        total = list(shapes[0])
        total[tokens] = sum(shape[tokens] for shape in shapes)
        recording.product("grouped gemm", PASSES.get((transa, transb), ""), precision, len(shapes), [total])

    def attention(purpose: str) -> Callable[..., None]:
        def note(*arguments: Any, **_: Any) -> None:
            operands = [each for each in arguments if hasattr(each, "dim") and each.dim() >= 3][:3]
            recording.product("attention", purpose, _precision(operands[0]), 1, _shapes(operands))

        return note

    notes: dict[str, Callable[..., None]] = {
        "generic_gemm": gemm,
        "te_general_grouped_gemm": grouped,
        "fused_attn_fwd": attention("forward"),
        "fused_attn_bwd": attention("backward"),
    }
    notes |= dict.fromkeys(grouped_tensors.GEMMS, of_grouped_tensors)
    for name, note in notes.items():
        setattr(module, name, quietly(getattr(module, name), note))


def _record_flash_attention(recording: Recording) -> None:
    stand_in: Any = importlib.import_module("fp8launch.rehearsal.packages.flash_attn")
    accepted, original = stand_in._check, stand_in._Attention.backward

    def check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        accepted(q, k, v)
        recording.product("attention", "forward", _precision(q), 1, _shapes((q, k, v)))

    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        operands = context.saved_tensors
        recording.product("attention", "backward", _precision(operands[0]), 1, _shapes(operands))
        return original(context, *gradients)

    stand_in._check = check
    stand_in._Attention.backward = staticmethod(backward)


def _product_shape(a: Any, transa: bool, b: Any, transb: bool) -> list[int]:
    """(rows, columns, inner) of `b` by `a`, which cuBLAS sees column by column."""
    left, right = list(a.size()), list(b.size())
    outer_a, inner_a = _matrix(left)
    outer_b, inner_b = _matrix(right)
    rows, inner = outer_b, inner_b
    if transb:
        rows, inner = inner_b, outer_b
    columns = inner_a
    if transa:
        columns = outer_a
    return [rows, columns, inner]


def _shapes(operands: Sequence[Any]) -> list[list[int]]:
    return [list(operand.size()) for operand in operands]


def _matrix(shape: list[int]) -> tuple[int, int]:
    if not shape:
        return 1, 1
    return math.prod(shape[:-1]), shape[-1]


def _precision(operand: Any) -> str:
    name = type(operand).__name__
    if hasattr(operand, "num_tensors"):
        # A tensor of several groups has the kind of its quantizer.
        name = type(getattr(operand, "quantizer", None)).__name__
    for prefix, precision in QUANTIZED.items():
        if name.startswith(prefix):
            return precision
    return str(getattr(operand, "dtype", getattr(operand, "fake_dtype", ""))).removeprefix("torch.")
