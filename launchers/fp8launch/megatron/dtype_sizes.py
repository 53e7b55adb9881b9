"""Bytes of each number that training holds: weights, their quantized copies, gradients, optimizer states.

Hopper multiplies FP8 matrices in one orientation only, so a weight is kept with its transpose; Blackwell needs none
for per-tensor scales. MXFP8 and NVFP4 keep both orientations everywhere, for their scales run along one.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp8launch.hardware.gpus import Gpu
from fp8launch.hardware.quantization import QUANTIZATION, UNQUANTIZED, UNQUANTIZED_BYTES, QuantizationRecipe, requested
from fp8launch.megatron.activations import BF16, FP32, Saving
from fp8launch.megatron.model_arithmetic import Arguments, whole
from fp8launch.megatron.parameters import Weight

_BYTES = {**UNQUANTIZED_BYTES, "fp8": 1.0}


@dataclass(frozen=True)
class PrecisionSizes:
    """Bytes per element. `recipe` is None without one; `dtype` names the type of what is not quantized, and `weight` is
    its size; `copy` is that of all quantized orientations of a weight that is."""

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
        """Whether a decoder layer (None: an MTP layer) runs in the quantized format."""
        if not self.quantized or layer is None:
            return self.quantized
        return self.bf16_start <= layer < layers - self.bf16_end

    def _quantizes(self, weight: Weight, layers: int) -> bool:
        if len(weight.shape) != 2 or not self.covers(weight.layer, layers):
            return False
        # A layer's number is missing outside the decoder, the router is of kind `other`.
        return weight.kind in ("linear", "expert") or (weight.kind == "output" and self.output_quantized)

    def weight_bytes(self, weight: Weight, layers: int) -> tuple[float, float]:
        """Bytes per element of the parameter itself, and of copies beside it."""
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
    """The sizes of weights, gradients and optimizer states under `args` (by attribute name) on this GPU."""
    name = requested(args)
    recipe, copy, gather, extra_gather = None, 0.0, False, 0.0
    if name not in UNQUANTIZED:
        recipe = QUANTIZATION.get(name, QUANTIZATION["custom"])
        copy = recipe.weight_bytes * recipe.copies_of_weights(gpu.capability)
        gather = bool(args.get(recipe.gather_flag))
        if gather:
            extra_gather = _gather_buffer(args, recipe)
    half = bool(args.get("bf16") or args.get("fp16"))
    aware = bool(args.get("use_precision_aware_optimizer"))
    main_params = str(args.get("main_params_dtype") or "fp32")
    # Transformer Engine's optimizer then reads gradients as they are and keeps the master weights: of a bf16 weight
    # only the 16 bits that bf16 lacks (store_param_remainders).
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
    """Bytes per element of a buffer of their own that gathered weights pass through in bf16, unless it is shared."""
    if all(map(args.get, recipe.gather_flags)):
        return 0.0
    return BF16


def _gradient(args: Arguments, half: bool) -> float:
    """The gradient buffer's bytes: Megatron goes to fp32 unless bf16 is asked for in one of two ways."""
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
    """Both of Adam's moments, or the one of SGD, Lion and Muon (whose embeddings and norms have Adam's).

    Before Blackwell an FP8 moment takes two bytes: Transformer Engine's quantizer of it makes the transpose of a weight
    too, which nothing reads (pytorch/optimizers/fused_adam.py, _initialize_state of 2.14 to 2.20; measured on H200).
    """
    if args.get("optimizer") in ("sgd", "lion", "muon", "dist_muon"):
        return FP32
    if not aware:
        return 2 * FP32
    dtypes = [str(args.get(name) or "fp32") for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
    sizes = {**_BYTES, "fp8": float(QUANTIZATION["tensorwise"].copies_of_weights(gpu.capability))}
    return sum(sizes.get(dtype, 4.0) for dtype in dtypes)


def _scaled_states(args: Arguments) -> int:
    """How many of master weights and moments are stored under a scale: FP8 and FP16, not bf16."""
    dtypes = list(map(args.get, ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")))
    return len([dtype for dtype in dtypes if dtype in ("fp8", "fp16")])


def _bf16_layers(args: Arguments) -> tuple[int, int]:
    """How many layers at the start and at the end stay in bf16."""
    if not args.get("first_last_layers_bf16"):
        return 0, 0
    start, end = whole(args, "num_layers_at_start_in_bf16"), whole(args, "num_layers_at_end_in_bf16")
    if start is None:
        start = 1
    if end is None:
        end = 1
    return start, end


def recomputed_modules(args: Arguments) -> frozenset[str]:
    """The modules that selective recompute covers, core attention by default."""
    if not args.get("recompute_activations") and args.get("recompute_granularity") != "selective":
        return frozenset()
    modules = args.get("recompute_modules")
    if isinstance(modules, (list, tuple)):
        return frozenset(map(str, modules))
    return frozenset(("core_attn",))


def recomputed_layers(args: Arguments, layers: int) -> int:
    """How many of the `layers` of a virtual stage full recompute covers."""
    if args.get("recompute_granularity") != "full":
        return 0
    if args.get("recompute_method") == "block":
        return min(whole(args, "recompute_num_layers") or 1, layers)
    return layers


def offloaded_layers(args: Arguments) -> int:
    """How many of the first layers keep their activations in the host's memory."""
    if args.get("cpu_offloading") is False:
        return 0  # Bridge's switch; Megatron-LM's is the number
    return whole(args, "cpu_offloading_num_layers") or 0


def _offloaded_modules(args: Arguments) -> frozenset[str]:
    modules = args.get("offload_modules")
    if not args.get("fine_grained_activation_offloading") or not isinstance(modules, (list, tuple)):
        return frozenset()
    return frozenset(map(str, modules))


def saving(args: Arguments, formats: PrecisionSizes, quantized: bool) -> Saving:
    """How a layer saves its tensors; `quantized` is false for the layers that stay in bf16."""
    recipe = formats.recipe if quantized else None
    linear_input = formats.weight
    # FlashAttention puts the batch first. With several sequences the bf16 projection saves its own, transposed copy:
    # 96 MiB a layer of Llama-3.2 3B (benchmarks/h200, 2026-11-23-pairs-more).
    micro_batch = args.get("micro_batch_size")
    copies_output = args.get("attention_backend") == "flash" and isinstance(micro_batch, int) and micro_batch > 1
    if recipe:
        linear_input = recipe.saved_bytes
        copies_output = recipe.copies_attention_output
    return Saving(
        element=formats.weight,
        linear_input=linear_input,
        quantized=quantized,
        shares_attention_output=not copies_output,
        keeps_gathered_input=bool(recipe and recipe.keeps_gathered_input),
        # Transformer Engine's fused attention takes 16 bits only (attention/dot_product_attention/utils.py).
        fused_attention=formats.weight != FP32
        and args.get("attention_backend", "auto") not in ("unfused", "local")
        and args.get("transformer_impl", "transformer_engine") != "local",
        # Transformer Engine's own activation keeps what Megatron's fused one does: measured on H200, benchmarks/h200.
        fused_activation=bool(args.get("bias_swiglu_fusion", True) or args.get("use_te_activation_func")),
        hidden_dropout=_positive(args.get("hidden_dropout", 0.1)),
        attention_dropout=_positive(args.get("attention_dropout", 0.1)),
        recompute=recomputed_modules(args),
        offload=_offloaded_modules(args),
    )


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and value > 0
