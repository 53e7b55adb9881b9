"""Bytes per element of weights, their quantized copies, gradients and optimizer states.

Hopper multiplies FP8 matrices in one orientation only, so a transpose of each weight is kept. Blackwell needs none for
per-tensor scales. MXFP8 and NVFP4 keep both orientations everywhere, because their scales run along one dimension.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypeAlias

from fp8launch.hardware.gpus import Gpu
from fp8launch.hardware.quantization import (
    CUSTOM,
    UNQUANTIZED,
    UNQUANTIZED_BYTES,
    QuantizationRecipe,
    quantization_recipes,
    requested,
)
from fp8launch.megatron.architecture import Architecture
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.megatron.parameters import Weight

BF16, FP32 = 2, 4
_BYTES = {**UNQUANTIZED_BYTES, "fp8": 1.0}
# The parts of a layer, and whether it is quantized. Layers of one kind have the same weights and activations, and take
# the same time.
LayerKind: TypeAlias = "tuple[str, bool]"


@dataclass(frozen=True)
class PrecisionSizes:
    """Bytes per element.

    `recipe` is the quantization recipe, if any. `dtype` is the type of unquantized values and `weight` its size. `copy`
    is the size of all quantized orientations of a quantized weight.
    """

    recipe: QuantizationRecipe | None
    dtype: str
    weight: float
    copy: float
    param_gather: bool
    extra_gather: float
    gradient: float
    master: float
    master_of_quantized: float
    moments: float
    copies_gradients: bool
    scaled_states: int
    fp8_moment: bool
    bf16_start: int
    bf16_end: int
    output_quantized: bool

    @property
    def quantized(self) -> bool:
        return self.recipe is not None

    @property
    def copies(self) -> str:
        if self.recipe is None:
            return "FP8"
        return self.recipe.operands.upper()

    @property
    def weights_note(self) -> str:
        if self.param_gather:
            return f"linear layers in {self.copies}, {self.copy:.4g} B a parameter, the rest in {self.dtype}"
        return f"in {self.dtype}"

    @property
    def gradients_note(self) -> str:
        if self.gradient == FP32:
            return "buffer in fp32"
        return f"buffer in {self.dtype}"

    @property
    def copies_note(self) -> str:
        if self.recipe is None:
            return ""
        return f"{self.copy:.4g} B a parameter of a linear layer: {self.recipe.name}"

    def optimizer_note(self, data: int) -> str:
        return f"{self.master:g} B master and {self.moments:g} B moments a parameter, over {data} ranks"

    def covers(self, layer: int | None, layers: int) -> bool:
        """Return whether a decoder layer, or an MTP layer (None), is quantized."""
        if not self.quantized or layer is None:
            return self.quantized
        return self.bf16_start <= layer < layers - self.bf16_end

    def _quantizes(self, weight: Weight, layers: int) -> bool:
        if len(weight.shape) != 2 or not self.covers(weight.layer, layers):
            return False
        # Weights outside the decoder have no layer number, and the router has the kind `other`.
        return weight.kind in ("linear", "expert") or (weight.kind == "output" and self.output_quantized)

    def weight_bytes(self, weight: Weight, layers: int) -> tuple[float, float]:
        """Return bytes per element of the parameter and of its copies."""
        if not self._quantizes(weight, layers):
            return self.weight, 0.0
        if self.param_gather:
            return self.copy, self.extra_gather
        return self.weight, self.copy

    def optimizer_bytes(self, weight: Weight) -> float:
        if self.param_gather and weight.kind in ("linear", "expert"):
            return self.master_of_quantized + self.moments
        return self.master + self.moments


def precision(args: Arguments, gpu: Gpu) -> PrecisionSizes:
    """Return the sizes of weights, gradients and optimizer states with `args` (by attribute name) on this GPU."""
    name = requested(args)
    recipe, copy, gather, extra_gather = None, 0.0, False, 0.0
    if name not in UNQUANTIZED:
        recipe = quantization_recipes().get(name, quantization_recipes()[CUSTOM])
        copy = recipe.weight_bytes * recipe.copies_of_weights(gpu.capability)
        gather = bool(args.get(recipe.gather_flag))
        if gather:
            extra_gather = _gather_buffer(args, recipe)
    half = bool(args.get("bf16") or args.get("fp16"))
    aware = bool(args.get("use_precision_aware_optimizer"))
    main_params = str(args.get("main_params_dtype") or "fp32")
    # Transformer Engine's optimizer then reads gradients without a copy and keeps the master weights. For a bf16 weight
    # it only keeps the 16 bits that bf16 lacks (store_param_remainders).
    te_recipe = str(args.get("fp8_recipe") or "delayed") == "delayed"
    direct = aware and (main_params != "fp32" or te_recipe or bool(args.get("optimizer_cpu_offload")))
    full = _BYTES.get(main_params, 4.0)
    master = full
    if not half:
        master = 0.0
    elif direct and main_params == "fp32" and args.get("bf16"):
        master = 2.0
    gradient = _gradient(args, half)
    start, end = _bf16_layers(args)
    return PrecisionSizes(
        recipe=recipe,
        dtype=_unquantized_dtype(args),
        weight=BF16 if half else FP32,
        copy=copy,
        param_gather=gather,
        extra_gather=extra_gather,
        gradient=gradient,
        master=master,
        master_of_quantized=full,
        moments=_moments(args, aware, gpu),
        copies_gradients=half and gradient == BF16 and not direct,
        scaled_states=_scaled_states(args) if aware else 0,
        fp8_moment=aware and "fp8" in (args.get("exp_avg_dtype"), args.get("exp_avg_sq_dtype")),
        bf16_start=start,
        bf16_end=end,
        output_quantized=bool(args.get("fp8_output_proj")),
    )


def _unquantized_dtype(args: Arguments) -> str:
    for dtype in ("bf16", "fp16"):
        if args.get(dtype):
            return dtype
    return "fp32"


def _gather_buffer(args: Arguments, recipe: QuantizationRecipe) -> float:
    """Return bytes per element of the bf16 buffer for gathered weights, unless they share another buffer."""
    if all(map(args.get, recipe.gather_flags)):
        return 0.0
    return BF16


def _gradient(args: Arguments, half: bool) -> float:
    """Return bytes per element of the gradient buffer, which is in fp32 unless one of two flags requests bf16."""
    if not half:
        return FP32
    if args.get("grad_reduce_in_bf16"):
        return BF16
    if args.get("accumulate_allreduce_grads_in_fp32"):
        return FP32
    if args.get("fp16") or args.get("main_grads_dtype") == "bf16":
        return BF16
    return FP32


def _moments(args: Arguments, aware: bool, gpu: Gpu) -> float:
    """Return bytes of both moments of Adam, or of the single moment of SGD, Lion and Muon (with Adam for some weights).

    Before Blackwell an FP8 moment takes two bytes: its Transformer Engine quantizer also makes a transpose, which is
    never used (pytorch/optimizers/fused_adam.py, _initialize_state of 2.14 to 2.20; measured on H200).
    """
    if args.get("optimizer") in ("sgd", "lion", "muon", "dist_muon"):
        return FP32
    if not aware:
        return 2 * FP32
    dtypes = [str(args.get(name) or "fp32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    sizes = {**_BYTES, "fp8": float(quantization_recipes()["tensorwise"].copies_of_weights(gpu.capability))}
    return sum(sizes.get(dtype, 4.0) for dtype in dtypes)


def _scaled_states(args: Arguments) -> int:
    """Return how many of master weights and moments are stored with a scale, as FP8 and FP16 are."""
    dtypes = list(map(args.get, ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")))
    return len([dtype for dtype in dtypes if dtype in ("fp8", "fp16")])


def _bf16_layers(args: Arguments) -> tuple[int, int]:
    """Return how many layers at the start and at the end stay in bf16."""
    if not args.get("first_last_layers_bf16"):
        return 0, 0
    start, end = whole(args, "num_layers_at_start_in_bf16"), whole(args, "num_layers_at_end_in_bf16")
    if start is None:
        start = 1
    if end is None:
        end = 1
    return start, end


def decoder_kinds(model: Architecture, formats: PrecisionSizes) -> tuple[LayerKind, ...]:
    """Return the kind of each decoder layer."""
    end = model.layers - formats.bf16_end
    if not formats.quantized:
        end = 0
    return _kinds(model.kinds, formats.bf16_start, end)


# A search for layouts needs the kinds of the same model thousands of times.
@functools.lru_cache(maxsize=64)
def _kinds(parts: tuple[str, ...], start: int, end: int) -> tuple[LayerKind, ...]:
    return tuple((kind, start <= number < end) for number, kind in enumerate(parts))


def mtp_kinds(model: Architecture, formats: PrecisionSizes) -> tuple[LayerKind, ...]:
    """Return the kind of each layer of one MTP depth."""
    return tuple((kind, formats.quantized) for kind in model.mtp_kinds)
