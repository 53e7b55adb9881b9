"""The stand-in for Transformer Engine's compiled extension against Transformer Engine's own Python code."""

from __future__ import annotations

import ast
import functools
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

from fp8launch.check.resolved_run import ASSUMED_TE
from fp8launch.cluster.images import catalogue
from fp8launch.plugins.rehearse.software import NoTransformerEngine, transformer_engine_for

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

# The releases of the image catalogue, and the one that is assumed where neither recipe nor image says.
RELEASES = sorted({entry.get("transformer_engine", ASSUMED_TE) for entry in catalogue().values()} | {ASSUMED_TE})

# Called by Transformer Engine's Python code and not answered: a rehearsal that gets there ends without a verdict.
NOT_ANSWERED = {
    "ONNX export": {"LayerNorm"},
    "inference": {"copy_to_kv_cache"},
    "packed sequences": {
        "convert_bshd_to_thd", "convert_thd_to_bshd", "thd_copy_valid_tokens_from_per_split_to_rank_local",
        "thd_cp_rank_order_to_sequence_order", "thd_get_partitioned_indices", "thd_grad_correction",
        "thd_out_correction", "thd_read_half_tensor", "thd_read_second_half_lse", "thd_second_half_lse_correction",
        "thd_sequence_order_to_cp_rank_order",
    },
    "fused experts of transformer_engine.pytorch.ops": {
        "convert_host_pointers_to_tensor", "copy_data_ptrs_to_device", "get_device_pointer_for_data_and_scales",
        "group_requantize_inplace", "grouped_mlp_experimental", "grouped_swizzle_for_gemm",
        "nvfp4_group_quantize_with_amax", "nvfp4_quantize_with_amax",
    },
    "NCCL's expert parallelism": {
        "ep_combine", "ep_combine_bwd", "ep_dispatch", "ep_dispatch_bwd", "ep_finalize", "ep_get_zero_copy",
        "ep_handle_mem_size", "ep_initialize", "ep_prepare", "ep_prepare_and_dispatch", "ep_zero_copy_supported",
    },
    "Newton-Schulz by cuSOLVERMp": {"cusolvermp_ctx_create", "cusolvermp_ctx_destroy", "newton_schulz"},
    "quantile-balanced routing": {"fused_topk_with_score_function_qb_fwd"},
}  # fmt: skip


@functools.cache
def calls(site: Path) -> list[tuple[str, ast.Call]]:
    """Every call of a function of the extension: its file and line, and the call."""
    return list(_calls(site))


def _calls(site: Path) -> Iterator[tuple[str, ast.Call]]:
    for path in sorted((site / "transformer_engine" / "pytorch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id in ("tex", "transformer_engine_torch"):
                yield f"{path.relative_to(site)}:{node.lineno}", node


@pytest.fixture(params=RELEASES)
def site(request: pytest.FixtureRequest) -> Path:
    try:
        return transformer_engine_for(Version(request.param))
    except NoTransformerEngine as exc:
        pytest.skip(str(exc))


def test_what_transformer_engine_calls_is_answered(site: Path) -> None:
    from fp8launch.plugins.rehearse.compiled_te import functions_by_name

    answered = functions_by_name()
    excused = set().union(*NOT_ANSWERED.values())
    missing = {name: where for where, name in functions_named(site) if name not in answered}
    assert {name: where for name, where in missing.items() if name not in excused} == {}


def functions_named(site: Path) -> Iterator[tuple[str, str]]:
    """Every function of the extension that is named, called there or handed on; classes have capital letters."""
    for path in sorted((site / "transformer_engine" / "pytorch").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                named = node.value.id in ("tex", "transformer_engine_torch") and node.attr[0].islower()
                if named:
                    yield f"{path.relative_to(site)}:{node.lineno}", node.attr


def test_every_call_fits_the_stand_in(site: Path) -> None:
    from fp8launch.plugins.rehearse.compiled_te import functions_by_name

    answered = functions_by_name()
    unfit = []
    for where, node in calls(site):
        name = node.func.attr  # type: ignore[attr-defined]
        spread = any(isinstance(each, ast.Starred) for each in node.args)
        if name not in answered or spread or any(each.arg is None for each in node.keywords):
            continue
        try:
            named = {each.arg: None for each in node.keywords if each.arg}
            inspect.signature(answered[name]).bind(*[None] * len(node.args), **named)
        except TypeError as exc:
            unfit.append(f"{where}: {name}: {exc}")
    assert unfit == []


def test_no_function_is_excused_that_is_answered() -> None:
    from fp8launch.plugins.rehearse.compiled_te import functions_by_name

    assert set().union(*NOT_ANSWERED.values()) & set(functions_by_name()) == set()


HOPPER, BLACKWELL = 90, 100
CAUSAL = {"attn_mask_type": "NVTE_CAUSAL_MASK", "bias_type": "NVTE_NO_BIAS", "is_training": True, "dropout": 0.0}


@pytest.mark.parametrize(
    ("question", "arch", "backend"),
    [
        ({"head_dim_qk": 128, "head_dim_v": 128}, HOPPER, "NVTE_F16_arbitrary_seqlen"),
        ({"head_dim_qk": 192, "head_dim_v": 128}, HOPPER, "NVTE_F16_arbitrary_seqlen"),
        ({"head_dim_qk": 192, "head_dim_v": 128}, BLACKWELL, "NVTE_F16_arbitrary_seqlen"),
        ({"head_dim_qk": 256, "head_dim_v": 256}, HOPPER, "NVTE_F16_arbitrary_seqlen"),
        ({"head_dim_qk": 256, "head_dim_v": 192}, HOPPER, "NVTE_No_Backend"),
        ({"head_dim_qk": 320, "head_dim_v": 320}, HOPPER, "NVTE_No_Backend"),
        ({"head_dim_qk": 160, "head_dim_v": 160}, BLACKWELL, "NVTE_No_Backend"),
        ({"head_dim_qk": 100, "head_dim_v": 100}, HOPPER, "NVTE_No_Backend"),
        ({"head_dim_qk": 128, "head_dim_v": 128, "window_size_left": 1024, "dropout": 0.1}, HOPPER, "NVTE_No_Backend"),
        ({"head_dim_qk": 128, "head_dim_v": 128, "window_size_left": 1024}, HOPPER, "NVTE_F16_arbitrary_seqlen"),
        ({"head_dim_qk": 128, "head_dim_v": 128, "q_dtype": "kFloat8E4M3"}, HOPPER, "NVTE_FP8"),
        ({"head_dim_qk": 64, "head_dim_v": 64, "q_dtype": "kFloat8E4M3"}, HOPPER, "NVTE_No_Backend"),
        ({"head_dim_qk": 64, "head_dim_v": 64, "q_dtype": "kFloat8E4M3"}, BLACKWELL, "NVTE_FP8"),
        # As a run on H200 with cuDNN 9.19 ended.
        ({"head_dim_qk": 128, "head_dim_v": 128, "return_max_logit": True}, HOPPER, "NVTE_No_Backend"),
    ],
)
def test_attention_that_cudnn_has_a_kernel_for(question: dict[str, object], arch: int, backend: str) -> None:
    from fp8launch.plugins.rehearse.compiled_te.attention import answer

    assert answer({**CAUSAL, **question}, arch)[0] == backend


@pytest.mark.parametrize(
    ("capability", "release", "left"),
    [((9, 0), "2.16.1", True), ((10, 0), "2.16.1", False), ((10, 0), "2.20.2", True)],
)
def test_what_a_newer_flash_attention_may_do_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], release: str, left: bool
) -> None:
    from fp8launch.plugins.rehearse.compiled_te import attention

    monkeypatch.setattr(attention, "REASONS", ["Disabling FlashAttention 2 as it does not support MLA."])
    assert attention.left_to_newer_flash_attention(capability, release) is left
    monkeypatch.setattr(attention, "REASONS", ["Disabling FlashAttention for max_logit"])
    assert not attention.left_to_newer_flash_attention(capability, release)


def test_adam_on_fp8_weights_takes_fp32_states_only() -> None:
    """As a run on H200 ended: delayed scaling, parameters gathered in FP8, moments in bf16."""
    import torch

    from fp8launch.plugins.rehearse.compiled_te.adam import multi_tensor_adam, multi_tensor_adam_fp8

    lists = [[torch.zeros(2)] for _ in range(8)]
    multi_tensor_adam_fp8(0, None, lists)
    lists[2] = [torch.zeros(2, dtype=torch.bfloat16)]
    with pytest.raises(RuntimeError, match=r"First moment tensor 0 has dtype=torch\.bfloat16"):
        multi_tensor_adam_fp8(0, None, lists)
    with pytest.raises(RuntimeError, match="both be Float32 or both be BFloat16"):
        multi_tensor_adam(0, None, lists[:5])


def test_no_image_is_refused_for_a_cudnn_that_nobody_published(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8launch.plugins.rehearse.compiled_te import attention, libraries

    monkeypatch.setattr(libraries.Assumed, "cudnn", libraries.Assumed.cudnn)
    monkeypatch.setattr(libraries.Assumed, "cublas", libraries.Assumed.cublas)
    question = {**CAUSAL, "head_dim_qk": 128, "head_dim_v": 128, "return_max_logit": True}
    libraries.assume("2.16.1", "13.0")
    assert attention.answer(question, HOPPER)[0] == "NVTE_F16_arbitrary_seqlen"
    libraries.assume("2.20.2", "13.2.1")
    assert attention.answer(question, HOPPER)[0] == "NVTE_F16_arbitrary_seqlen"
    libraries.assume("2.20.2", "13.0")
    assert attention.answer(question, HOPPER)[0] == "NVTE_No_Backend"


@pytest.mark.parametrize(
    ("cuda", "cublas"), [("13.0", 130100), ("13.0.2", 130100), ("13.2.0", 130300), ("13.2.1", 130400), ("12.1", 120804)]
)
def test_cublas_is_that_of_the_cuda_in_the_image(cuda: str, cublas: int) -> None:
    from fp8launch.plugins.rehearse.compiled_te.libraries import cublas_of

    assert cublas_of(cuda) == cublas


def test_rows_after_the_last_section_are_not_quantized() -> None:
    """As the buffer of fused experts with fixed room, which has more rows than tokens."""
    import torch

    from fp8launch.plugins.rehearse.compiled_te.tensors import split_quantize

    rows = torch.arange(12.0).reshape(6, 2)
    first, second = split_quantize(rows, [1, 3], [None, None])
    assert torch.equal(first, rows[:1])
    assert torch.equal(second, rows[1:4])
    with pytest.raises(RuntimeError, match="Attempted to split"):
        split_quantize(rows, [4, 3], [None, None])


def test_a_folder_named_triton_is_not_the_package_triton(tmp_path: Path) -> None:
    """Transformer Engine imports its own from `..triton`."""
    (tmp_path / "engine" / "triton").mkdir(parents=True)
    (tmp_path / "engine" / "triton" / "sums.py").write_text("import triton\nSUM = triton.cdiv(7, 2)\n")
    (tmp_path / "engine" / "layer.py").write_text("from .triton.sums import SUM\n")
    program = """
from fp8launch.injob.rank.compat import triton_stub
triton_stub.install(("engine.",))
from engine.layer import SUM
print(SUM)
"""
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == ("4\n", 0), ran.stderr


def grouped(values: object, sizes: list[int]) -> object:
    """A grouped tensor in high precision, as far as its GEMM looks at it."""
    import types

    import torch

    found = torch.as_tensor(values)
    return types.SimpleNamespace(
        logical_shape=tuple(found.shape), num_tensors=len(sizes), first_dims=torch.tensor(sizes), quantizer=None,
        rowwise_data=found.reshape(-1),
    )  # fmt: skip


def test_each_group_of_a_grouped_product_has_its_own_weight() -> None:
    """The buffer has more rows than the groups together, as HybridEP's has; one group has no tokens."""
    import torch

    from fp8launch.plugins.rehearse.compiled_te.grouped import grouped_gemm

    rows, sizes = torch.randn(8, 4), [2, 0, 3]
    weights = [torch.randn(6, 4) for _ in sizes]
    out = torch.zeros(8, 6)
    beta = torch.zeros(3)
    grouped_gemm(weights, True, grouped(rows, sizes), False, grouped(out, sizes), None, None, torch.ones(3), beta)
    assert torch.allclose(out[:2], rows[:2] @ weights[0].T)
    assert torch.allclose(out[2:5], rows[2:5] @ weights[2].T)
    assert not out[5:].any()
    gradients = [torch.ones(6, 4) for _ in sizes]
    tokens, results = grouped(rows, sizes), grouped(out, sizes)
    grouped_gemm(tokens, False, results, True, gradients, None, None, torch.ones(3), torch.ones(3))
    assert torch.allclose(gradients[0], 1 + out[:2].T @ rows[:2])
    assert torch.equal(gradients[1], torch.ones(6, 4))
    grouped_gemm(tokens, False, results, True, gradients, None, None, torch.ones(3), beta)
    assert not gradients[1].any()


def test_a_product_of_large_matrices_differs_by_row_and_column() -> None:
    """A router would send all tokens of equal rows to the same experts."""
    import torch

    from fp8launch.plugins.rehearse.compiled_te.functions import generic_gemm

    a, b = torch.randn(96, 512), torch.randn(64, 512)
    result, *_ = generic_gemm(a, True, b, False)
    assert result.shape == (64, 96)
    assert len(result.unique(dim=0)) == 64
    assert len(result.T.unique(dim=0)) == 96
    assert 0.5 < result.std() / (b @ a.T).std() < 2


def test_what_is_computed_again_is_seen_by_all_views_of_what_was_freed() -> None:
    import torch

    from fp8launch.plugins.rehearse.freed_memory import share_storage

    output = torch.ones(4, 3)
    view = output.view(3, 4)
    output.untyped_storage().resize_(0)
    share_storage(output, torch.arange(12.0).view(4, 3))
    assert view[2, 3] == 11
