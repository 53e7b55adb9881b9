"""A stand-in for `transformer_engine_torch`, the compiled extension under Transformer Engine's Python code.

Transformer Engine's own Python code runs in a rehearsal: its modules, recipes, quantizers and all their assertions.
Only its calls into C++ are answered here, with the right shapes and types. Unknown functions are not guessed: calling
one ends the rehearsal with `NotRehearsed`, which is no verdict on the recipe.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

from fp8launch.plugins.rehearse.compiled_te import (
    adam,
    attention,
    functions,
    grouped,
    layout_functions,
    libraries,
    tensors,
    userbuffers,
)
from fp8launch.plugins.rehearse.failure import NotRehearsed

NAME = "transformer_engine_torch"


# Enumerations from transformer_engine.h and fused_attn.h whose numbers Python code passes around.
ENUMS: dict[str, dict[str, int]] = {
    "DType": {
        "kByte": 0, "kInt32": 2, "kInt64": 3, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7,
        "kFloat8E5M2": 8, "kFloat8E8M0": 9, "kFloat4E2M1": 10,
    },
    "FP8FwdTensors": {
        f"GEMM{gemm}_{kind}": 3 * (gemm - 1) + place
        for gemm in (1, 2, 3)
        for place, kind in enumerate(("INPUT", "WEIGHT", "OUTPUT"))
    },
    "FP8BwdTensors": {
        f"GRAD_{kind}{gemm}": 2 * (gemm - 1) + place
        for gemm in (1, 2, 3)
        for place, kind in enumerate(("OUTPUT", "INPUT"))
    },
    "NVTE_Fused_Attn_Backend": {
        "NVTE_No_Backend": -1, "NVTE_F16_max512_seqlen": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2,
    },
}  # fmt: skip


class _Members(type):
    """A C++ enumeration that creates members when Python code accesses them, each with its own number."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        known = ENUMS.get(cls.__name__, {})
        number = known.get(name, 100 + len(cls.__members__))
        member: Any = int.__new__(cls, number)  # type: ignore[arg-type]
        member.name, member.value = name, number
        cls.__members__[name] = member
        setattr(cls, name, member)
        return member


def _enumeration(name: str) -> Any:
    return _Members(name, (int if name in ENUMS else _Unknown,), {"__members__": {}, "__module__": NAME})


class _Unknown(int):
    """A name without a stand-in. It has members, as an enumeration does, but cannot be called."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise NotRehearsed(f"{NAME}.{cls.__name__}")


class Extension(types.ModuleType):
    """The module `transformer_engine_torch`."""

    def __init__(self) -> None:
        super().__init__(NAME)
        self.__spec__ = importlib.machinery.ModuleSpec(NAME, None)
        for name, value in functions_by_name().items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _enumeration(name)
        setattr(self, name, made)
        return made


def functions_by_name() -> dict[str, Any]:
    found: dict[str, Any] = {
        name: getattr(functions, name)
        for name in dir(functions)
        if name.startswith(
            ("fused_", "layernorm", "rmsnorm", "te_general", "generic_gemm", "multi_tensor", "bgrad", "fp8_t")
        )
    }
    found |= {"fused_attn_fwd": attention.fused_attn_fwd, "fused_attn_bwd": attention.fused_attn_bwd}
    found |= adam.functions()
    found |= layout_functions.functions()
    found |= grouped.functions()
    found |= {"fused_moe_aux_loss_fwd_graph_safe": functions.fused_moe_aux_loss_fwd}
    found |= {"create_empty_quantized_tensor": tensors.create_empty_quantized_tensor}
    found |= {"quantize": tensors.quantize, "split_quantize": tensors.split_quantize, "dequantize": tensors.dequantize}
    for name, gated in (
        ("gelu", False), ("geglu", True), ("qgelu", False), ("qgeglu", True), ("relu", False), ("reglu", True),
        ("srelu", False), ("sreglu", True), ("silu", False), ("swiglu", True), ("glu", True),
    ):  # fmt: skip
        base = {
            "geglu": "gelu",
            "qgeglu": "qgelu",
            "reglu": "relu",
            "sreglu": "srelu",
            "swiglu": "silu",
            "glu": "sigmoid",
        }
        backward = functions.activation_gradient(gated)
        found |= {name: functions.activation(base.get(name, name), gated), f"d{name}": backward}
        found[f"dbias_d{name}"] = functions.bias_gradient(backward)
    found |= {"clamped_swiglu": found["swiglu"], "clamped_dswiglu": found["dswiglu"]}
    found |= {"situglu": found["swiglu"], "dsituglu": found["dswiglu"]}
    for kind in ("scaled", "scaled_masked", "scaled_upper_triang_masked", "scaled_aligned_causal_masked"):
        found[f"{kind}_softmax_forward"] = functions.softmax_forward
        found[f"{kind}_softmax_backward"] = functions.softmax_backward
    found |= dict.fromkeys(("fused_rope_forward", "fused_rope_backward"), functions.same_shape)
    found |= dict.fromkeys(
        (
            "fused_amax_and_scale_update_after_reduction", "compute_amax",
            "multi_tensor_adam_capturable",
            "multi_tensor_adam_capturable_master", "multi_tensor_sgd", "multi_tensor_compute_scale_and_scale_inv",
            "multi_tensor_compute_scale_inv_e8m0", "fp8_block_scaling_compute_partial_amax",
            "fp8_block_scaling_partial_cast", "mxfp8_scaling_compute_partial_amax", "mxfp8_scaling_partial_cast",
            "nvfp4_multi_tensor_compute_partial_amax", "nvfp4_multi_tensor_2d_partial_cast",
            "nvfp4_compute_global_scale", "nvfp4_multi_tensor_fused_scale",
            "nvfp4_2d_multi_tensor_transpose",
            "nvfp4_2d_scale_transpose", "swizzle_scales_for_gemm_", "multi_tensor_swizzle_scales_for_gemm_unchecked_",
        ),
        functions.nothing,
    )  # fmt: skip
    found |= {
        "CommOverlap": userbuffers.CommOverlap,
        "CommOverlapP2P": userbuffers.CommOverlapP2P,
        "CommOverlapHelper": userbuffers.CommOverlapHelper,
        "bulk_overlap_ag_with_external_gemm": functions.nothing,
        "get_num_cublas_streams": lambda: 4,
        "get_cublasLt_version": lambda: libraries.Assumed.cublas,
        "get_cudnn_version": lambda: libraries.Assumed.cudnn,
        "get_stream_priority_range": lambda *_: (0, -5),
        "ubuf_built_with_mpi": lambda: False,
        "device_supports_multicast": lambda *_: True,  # as with NVLink on Hopper and Blackwell
        "get_grouped_gemm_setup_workspace_size": lambda number: 1024,
        "get_fused_attn_backend": attention.get_fused_attn_backend,
    }
    return found


class _Absorbing(types.ModuleType):
    """A package that Transformer Engine imports but a rehearsal does not need. It has every attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Anything:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __getitem__(self, _: Any) -> Any:
        return _Anything()

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        # As a decorator, it returns the function unchanged.
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else _Anything()


def install(site: Path, cuda: str) -> None:
    """Make `import transformer_engine.pytorch` run the Python code in `site` over this stand-in, with this CUDA.

    Transformer Engine's loader looks for its shared objects while `transformer_engine.common` is imported, and the
    package itself imports its torch part. The common part is therefore imported first, alone, and its loader is
    disabled, because the extension is already there.
    """
    import os

    libraries.assume(site.name, cuda)
    sys.modules[NAME] = Extension()
    for name in ("onnxscript", "onnx"):  # for the export to ONNX
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = _Absorbing(name)
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # do not load shared objects
    package = types.ModuleType("transformer_engine")
    package.__path__ = [str(site / "transformer_engine")]
    sys.modules["transformer_engine"] = package
    import transformer_engine.common as common

    common.load_framework_extension = lambda framework: None
    del sys.modules["transformer_engine"]
    if str(site) not in sys.path:
        sys.path.append(str(site))
    whole = importlib.import_module("transformer_engine")
    whole.common = common  # type: ignore[attr-defined]
    importlib.import_module("transformer_engine.common.recipe")
