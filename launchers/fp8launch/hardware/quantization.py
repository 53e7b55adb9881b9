"""Quantization recipes: one row for each, with everything that the rest of the code needs to know.

The allowed names and formats of a recipe file, the flags for Megatron, the bytes of the memory estimate, the rules of
`check` and the evidence that `verify` looks for all follow from the row. A recipe that Megatron knows by name is a row
of this table. A plugin adds one that Megatron makes from a factory of quantizers (`Plugin.precisions`).

Sources. Formats and classes: Transformer Engine, common/recipe/__init__.py. Compute capability and CUDA: pytorch/
quantization.py, the `_compute_*_support` functions. First Transformer Engine release: megatron/core/fp8_utils.py
730-766 and 305, megatron/training/arguments.py 1073. Multiples: pytorch/utils.py 614 (features 16, tokens 8),
common/gemm/cublaslt_gemm.cu 161 (leading dimensions), pytorch/csrc/quantizer.cpp 1514 (MXFP8) and 1982 (NVFP4).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from fp8launch import plugin_registry

Capability = tuple[int, int]
Release = tuple[int, int]

# Megatron's defaults for an operand type without a recipe (megatron/training/arguments.py).
DEFAULT_RECIPE: Mapping[str, str] = {"fp8": "delayed", "fp4": "nvfp4"}
BF16, FP16, FP32 = "bf16", "fp16", "fp32"
# Bytes per element of unquantized precisions. The first one in a comparison is its baseline.
UNQUANTIZED_BYTES: Mapping[str, float] = {BF16: 2.0, FP16: 2.0, FP32: 4.0}
UNQUANTIZED = tuple(UNQUANTIZED_BYTES)
# Megatron's name for every recipe that comes from a factory.
CUSTOM = "custom"


@dataclass(frozen=True)
class QuantizationRecipe:
    """The properties, requirements and costs of a quantization recipe.

    name, operands      the name in `precision.recipe`, and the data type of its matrix products: the GPU's peak, the
                        family of Megatron's flags (`--fp8-...` or `--fp4-...`) and of the kernels that prove it
    formats             values of `precision.format`; `usual_format` is the format that NVIDIA trains with, if there is
                        one, and `unusual_because` says why the other formats are worse
    factory             import path of the function that makes the quantizers, for a recipe that Megatron calls `custom`
    selectable          can be named in `precision.recipe`; Megatron's `custom` cannot, it needs a factory in Python
    te_classes          names of the recipe objects that modules report to the probe
    least_capability    first compute capability that has it, and the first one (`no_capability`) that lacks it again
    emulated_from       from this capability on, the GPU emulates it with other instructions
    least_te, least_cuda  first releases of Transformer Engine and CUDA that have it
    feature_multiple    each rank's features of every linear layer must be a multiple of this; None if unknown
    token_multiple      the same for the tokens of a micro batch
    tn_only             matrices are multiplied in one orientation only on every GPU, not just before Blackwell
    block               side of a block of scales that may be ragged, but is padded
    overlap_multiple    dimensions must be a multiple of this for tp_comm_overlap; None: overlap lacks this recipe
    saved_bytes         bytes per element of a saved input of a linear layer, scales included
    weight_bytes        the same for one orientation of a weight
    both_orientations   weights are kept in two orientations on every GPU, not just before Blackwell
    copies_attention_output  the output projection saves its own copy of the attention output
    keeps_gathered_input     a sequence-parallel rank saves the gathered input: it cannot gather the quantized one again
    gather_flags        further Megatron flags that `precision.param_gather` must set
    gather_is_proven    a parameter all-gather in this type is known to train
    stateful            scales come from earlier steps, so checkpoints hold them; Transformer Engine pickles that state
    """

    name: str
    operands: Literal["fp8", "fp4"]
    formats: tuple[str, ...]
    te_classes: tuple[str, ...]
    saved_bytes: float
    weight_bytes: float
    usual_format: str | None = None
    unusual_because: str = ""
    factory: str | None = None
    selectable: bool = True
    least_capability: Capability = (8, 9)
    no_capability: Capability | None = None
    emulated_from: Capability | None = None
    least_te: Release | None = None
    least_cuda: Release | None = None
    feature_multiple: int | None = 16
    token_multiple: int = 8
    tn_only: bool = False
    block: int | None = None
    overlap_multiple: int | None = 1
    both_orientations: bool = True
    copies_attention_output: bool = False
    keeps_gathered_input: bool = False
    gather_flags: tuple[str, ...] = ()
    gather_is_proven: bool = False
    stateful: bool = False

    @property
    def format_flag(self) -> str:
        """Megatron's flag for the format."""
        return f"{self.operands}_format"

    @property
    def recipe_flag(self) -> str:
        """Megatron's flag for the recipe."""
        return f"{self.operands}_recipe"

    @property
    def factory_flag(self) -> str:
        """Megatron's flag for the factory of a `custom` recipe."""
        return f"{self.operands}_quantizer_factory"

    @property
    def megatron_name(self) -> str:
        """Megatron's name for the recipe."""
        return CUSTOM if self.factory else self.name

    @property
    def gather_flag(self) -> str:
        """Megatron's flag for a parameter all-gather in this type."""
        return f"{self.operands}_param_gather"

    def runs_on(self, capability: Capability) -> bool:
        """Return whether a GPU of this compute capability has the instructions, or emulates them."""
        return self.least_capability <= capability and (self.no_capability is None or capability < self.no_capability)

    def copies_of_weights(self, capability: Capability) -> int:
        """Return how many orientations of a quantized weight are kept. Only Blackwell multiplies FP8 in both."""
        if (10, 0) <= capability < (12, 0) and not self.both_orientations:
            return 1
        return 2


_PER_TENSOR = "per-tensor scales leave the gradients too little range in e4m3"
_MX = "scales of 32 values need no wider range for gradients, which lose a bit of precision, and runs diverged"

_BUILT_IN: dict[str, QuantizationRecipe] = {
    recipe.name: recipe
    for recipe in (
        QuantizationRecipe(
            "delayed",
            "fp8",
            ("e4m3", "hybrid"),
            ("DelayedScaling", "TEDelayedScaling"),
            saved_bytes=1.0,
            weight_bytes=1.0,
            usual_format="hybrid",
            unusual_because=_PER_TENSOR,
            both_orientations=False,
            copies_attention_output=True,
            gather_is_proven=True,
            stateful=True,
        ),
        QuantizationRecipe(
            "tensorwise",
            "fp8",
            ("e4m3", "hybrid"),
            ("Float8CurrentScaling", "torchao.tensorwise"),
            saved_bytes=1.0,
            weight_bytes=1.0,
            usual_format="hybrid",
            unusual_because=_PER_TENSOR,
            least_te=(2, 2),
            both_orientations=False,
            gather_is_proven=True,
        ),
        # Activations are scaled per 1x128, weights per 128x128. Trained in both formats.
        QuantizationRecipe(
            "blockwise",
            "fp8",
            ("e4m3", "hybrid"),
            ("Float8BlockScaling",),
            saved_bytes=1 + 4 / 128,
            weight_bytes=1 + 4 / 128**2,
            least_capability=(9, 0),
            emulated_from=(10, 0),
            least_te=(2, 3),
            least_cuda=(12, 9),
            tn_only=True,
            block=128,
            overlap_multiple=None,
            keeps_gathered_input=True,
        ),
        # Runs with hybrid diverged: Megatron-Bridge PR 638.
        QuantizationRecipe(
            "mxfp8",
            "fp8",
            ("e4m3", "hybrid"),
            ("MXFP8BlockScaling",),
            saved_bytes=1 + 1 / 32,
            weight_bytes=1 + 1 / 32,
            usual_format="e4m3",
            unusual_because=_MX,
            least_capability=(10, 0),
            no_capability=(12, 0),
            least_te=(2, 1),
            feature_multiple=32,
            token_multiple=32,
            overlap_multiple=128,
            # Without the flag Megatron only warns, and then fails when it wraps the model (replace_raw_data).
            gather_flags=("reuse_grad_buf_for_mxfp8_param_ag",),
            gather_is_proven=True,
        ),
        QuantizationRecipe(
            "nvfp4",
            "fp4",
            ("e2m1",),
            ("NVFP4BlockScaling",),
            saved_bytes=0.5 + 1 / 16,
            weight_bytes=0.5 + 1 / 16,
            least_capability=(10, 0),
            least_te=(2, 7),
            token_multiple=16,
            overlap_multiple=None,
        ),
        # The user's own factory, assumed to store what blockwise stores.
        QuantizationRecipe(
            CUSTOM,
            "fp8",
            (),
            (),
            saved_bytes=1 + 4 / 128,
            weight_bytes=1 + 4 / 128**2,
            selectable=False,
            least_te=(2, 9),
            feature_multiple=None,
        ),
    )
}


@functools.cache
def quantization_recipes() -> Mapping[str, QuantizationRecipe]:
    """Return the quantization recipes of Megatron and of plugins, by name."""
    return {**_BUILT_IN, **dict(plugin_registry.loaded("precisions"))}


def selectable_recipes() -> tuple[str, ...]:
    """Return the quantization recipes that `precision.recipe` can name."""
    return tuple(name for name, recipe in quantization_recipes().items() if recipe.selectable)


def precision_names() -> tuple[str, ...]:
    """Return everything that `precision.recipe` can name."""
    return (*UNQUANTIZED, *selectable_recipes())


def format_names() -> tuple[str, ...]:
    """Return everything that `precision.format` can name."""
    return tuple(dict.fromkeys(chain.from_iterable(recipe.formats for recipe in quantization_recipes().values())))


def is_stateful(arguments: Mapping[str, object]) -> bool:
    """Return whether a run with these arguments, by attribute name, saves scales of earlier steps."""
    recipe = quantization_recipes().get(requested(arguments))
    return recipe is not None and recipe.stateful


def requested(arguments: Mapping[str, object]) -> str:
    """Return the precision that Megatron's arguments (by attribute name) request: a quantization recipe, or a type.

    An operand type without a recipe means the default recipe of that type. Arguments that state that bf16 is off mean
    fp32; arguments that do not state it count as bf16.
    """
    for operands, default in DEFAULT_RECIPE.items():
        if arguments.get(operands):
            name = str(arguments.get(f"{operands}_recipe") or default)
            return recipe_made_by(arguments.get(f"{operands}_quantizer_factory")) if name == CUSTOM else name
    if arguments.get("fp16"):
        return FP16
    if arguments.get("bf16") is False:
        return FP32
    return BF16


def recipe_made_by(factory: object) -> str:
    """Return the name of the recipe that comes from this factory: a plugin's, or `custom`."""
    for name, recipe in quantization_recipes().items():
        if recipe.factory is not None and recipe.factory == factory:
            return name
    return CUSTOM
