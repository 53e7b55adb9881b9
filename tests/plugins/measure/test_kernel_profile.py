"""Kernel profiles: how a recipe requests one, and the families of kernels."""

from __future__ import annotations

import pytest

from fp8launch.cli import run as command
from fp8launch.plugins.measure.injob import kernel_families
from fp8launch.plugins.measure.injob.kernel_families import Kernel

REQUEST = 'FP8LAUNCH_PROFILE={"tool": "%s", "start": %d, "end": %d, "ranks": [%s]}'


@pytest.mark.parametrize(
    ("overrides", "passed"),
    [
        ([], []),
        (["launch.probe=false"], ["FP8LAUNCH_PROBE=0"]),
        (["launch.profile_iteration=6"], [REQUEST % ("torch", 6, 6, "0")]),
        (["launch.profile={start: 6}"], [REQUEST % ("torch", 6, 6, "0")]),
        (["launch.profile={start: 4, end: 6, ranks: [0, 3], tool: nsys}"], [REQUEST % ("nsys", 4, 6, "0, 3")]),
        (["launch.tensor_stats=100"], ["FP8LAUNCH_TENSOR_STATS=100"]),
    ],
)
def test_a_recipe_turns_the_probe_off_the_profile_and_the_statistics_on(
    capsys: pytest.CaptureFixture[str], overrides: list[str], passed: list[str]
) -> None:
    options = [word for override in overrides for word in ("--set", override)]
    assert command(["render", "tiny_cpu", "--as", "sbatch", *options]) == 0
    script = [line.strip().strip("'") for line in capsys.readouterr().out.splitlines()]
    ours = ("FP8LAUNCH_PRO", "FP8LAUNCH_TENSOR")
    assert [line for line in script if line.startswith(ours)] == passed


# --- Names of kernels

# The first four and Transformer Engine's kernels were seen on H200; the Blackwell kernels are as published.
NAMES = {
    "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNT": "fp8_gemm",
    "nvjet_sm90_qrtst_128x192_128x5_1x2_h_bz_coopA_TNT": "fp8_gemm",
    "nvjet_sm90_qqtst_128x128_128x6_2x1_v_bz_Ablk128_Bvec128_TNT": "fp8_gemm",
    "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "gemm",
    "nvjet_sm100_qqtst_128x256_128x6_2x1_2cta_v_bz_bias_TNT": "fp8_gemm",
    "nvjet_ootst_256x128_Avec16UE4M3_Bvec16UE4M3": "fp4_gemm",
    "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize128x128x64": "fp8_gemm",
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8": "gemm",
    "void transformer_engine::(anonymous namespace)::amax_kernel<8, true, __nv_bfloat16>": "quantisation",
    "void transformer_engine::detail::cast_transpose_optimized_kernel<__nv_fp8_e4m3>": "quantisation",
    "void transformer_engine::block_scaled_1d_cast_transpose_kernel<true, float, __nv_bfloat16>": "quantisation",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_128x128x128": "attention",
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<>": "norm",
    "void multi_tensor_apply_kernel<AdamFunctor<float>>": "optimizer",
    "Memcpy DtoD (Device -> Device)": "memory",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add>": "other",
}


@pytest.mark.parametrize(("name", "family"), NAMES.items())
def test_kernel_names_tell_their_family(name: str, family: str) -> None:
    assert kernel_families.family(name) == family


def test_a_profile_is_summed_by_family_and_keeps_the_names_of_its_gemms() -> None:
    families = kernel_families
    names = list(NAMES)
    kernels = [Kernel(name, 0, 1_000_000) for name in names * 2]
    found = families.by_family(families.totals(kernels), top=3)
    assert found["families"]["fp8_gemm"] == {"count": 10, "ms": 10.0}
    assert sum(each["count"] for each in found["families"].values()) == 2 * len(names)
    assert len(found["top"]) == 3
    kept = {each["name"] for each in found["top"]} | {each.split(" ", 1)[1] for each in found["more_gemms"]}
    assert {name[:60] for name, family in NAMES.items() if "gemm" in family} <= {name[:60] for name in kept}


def test_a_gpu_is_busy_while_any_kernel_runs_and_waits_while_all_communicate() -> None:
    ms = 1_000_000
    reduce = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
    kernels = [Kernel("nvjet", 0, 4 * ms), Kernel(reduce, 3 * ms, 5 * ms), Kernel("adam", 7 * ms, ms),
               Kernel("adam", 20 * ms, 2 * ms)]  # fmt: skip
    found = kernel_families.summary(kernels)
    # 0 to 8 and 20 to 22; only the communication from 4 to 7.
    assert (found["busy_ms"], found["waiting_ms"]) == (10.0, 3.0)
