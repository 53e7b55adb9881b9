"""Hybrids of Mamba, attention, MLP and experts: fewer layers of the same kinds, stand-ins for Mamba's kernels."""

from __future__ import annotations

import inspect
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from megatron_sites import megatron_site

from fp8launch.check.checker import CheckResult, check, check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.engines.base import Layout, StepArguments
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.plugins.rehearse.layer import LAYER, with_rehearsal
from fp8launch.plugins.rehearse.shrink import shrink

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

NANO = "bridge:nemotron_3_nano_pretrain_8gpu_b200_bf16_config"
NEMOTRON_H = "bridge:nemotronh_56b_pretrain_64gpu_h100_fp8cs_config"
# Parameters of the real functions: state-spaces/mamba at 0048fbf, Dao-AILab/causal-conv1d 1.6.2.
UNLIMITED = (0.0, float("inf"))
REAL: dict[str, dict[str, Any]] = {
    "mamba_ssm:mamba_split_conv1d_scan_combined": {
        **dict.fromkeys(("zxbcdt", "conv1d_weight", "conv1d_bias", "dt_bias", "A", "D", "chunk_size"), ...),
        "initial_states": None, "seq_idx": None, "dt_limit": UNLIMITED, "return_final_states": False,
        "activation": "silu", "rmsnorm_weight": None, "rmsnorm_eps": 1e-6, "outproj_weight": None,
        "outproj_bias": None, "headdim": None, "ngroups": 1, "norm_before_gate": True, "state_dtype": None,
    },
    "mamba_ssm:mamba_chunk_scan_combined": {
        **dict.fromkeys(("x", "dt", "A", "B", "C", "chunk_size"), ...),
        "D": None, "z": None, "dt_bias": None, "initial_states": None, "seq_idx": None, "cu_seqlens": None,
        "dt_softplus": False, "dt_limit": UNLIMITED, "return_final_states": False, "return_varlen_states": False,
        "state_dtype": None,
    },
    "mamba_ssm:RMSNorm": {
        "hidden_size": ..., "eps": 1e-5, "group_size": None, "norm_before_gate": True, "device": None, "dtype": None,
    },
    "causal_conv1d:causal_conv1d_fn": {
        "x": ..., "weight": ..., "bias": None, "seq_idx": None, "initial_states": None, "return_final_states": False,
        "final_states_out": None, "activation": None,
    },
}  # fmt: skip


def stand_in(name: str) -> Any:
    module, function = name.split(":")
    return getattr(import_module(f"fp8launch.plugins.rehearse.packages.{module}"), function)


def rehearsed(name: str, *sets: str) -> CheckResult:
    one = prepare(name, sets)
    [result] = with_rehearsal([one], check_all([one], layers=("schema",)), Cluster())
    return result


def step_of(one: Prepared) -> StepArguments:
    return one.engine.rehearsal(one.args, one.layout, one.loaded)


def layout(pp: int = 1, tp: int = 1) -> Layout:
    return Layout(8, tp, pp, 1, 1, 1, 8 // pp // tp, 1, 8, pp * tp)


def fewer(pattern: str, pp: int = 1, **more: Any) -> Any:
    values = {"num_layers": 8, "hidden_size": 256, "hybrid_layer_pattern": pattern, **more}
    return shrink(values, layout(pp)).values["hybrid_layer_pattern"]


def test_every_kind_of_layer_stays_between_the_first_and_the_last_one() -> None:
    assert fewer("MEMEM*EMEMEM*EMEMEME") == "MEM*E"
    assert fewer("M-M-M-*-M-M-M-", num_layers_at_start_in_bf16=3, num_layers_at_end_in_bf16=2) == "M-M-M*M-"
    # Nothing to leave out.
    assert fewer("M*E") == "M*E"
    assert fewer("MM", num_layers_at_end_in_bf16=4) == "MM"
    assert fewer("MMMM") == "MMM"


def test_each_stage_of_a_hybrid_keeps_its_kinds() -> None:
    assert fewer("MEMEMEMEMM" + "*EMEMEMEME", 2) == "MEMM|*EME"
    assert fewer("MEMEMEMEM|MEM*EMEME", 2) == "MEMM|MEM*E"
    assert fewer("MEMEMEM", 2) == "MEMEMEM"  # refused by Megatron
    assert fewer("MEMEMEME/*E/*E") == "MEME/*E/*E"
    assert fewer("MEMEMEME", mtp_num_layers=2, mtp_hybrid_override_pattern="*E") == "MEME/*E/*E"


def test_mambas_heads_do_not_follow_the_smaller_width() -> None:
    values = {"hidden_size": 8192, "num_layers": 4, "hybrid_layer_pattern": "M-M-"}
    small = shrink(values, layout(tp=8)).values
    assert (small["hidden_size"], small["mamba_num_heads"]) == (1024, 256)
    assert "mamba_num_heads" not in shrink({**values, "mamba_num_heads": 64}, layout(tp=8)).sizes


@needs_torch
@pytest.mark.parametrize("name", REAL)
def test_a_stand_in_takes_what_the_real_function_takes(name: str) -> None:
    parameters = inspect.signature(stand_in(name)).parameters.values()
    empty = inspect.Parameter.empty
    assert {each.name: ... if each.default is empty else each.default for each in parameters} == REAL[name]


def scan(heads: int = 4, groups: int = 2, state: int = 8, tokens: int = 16, **more: Any) -> Any:
    """A Mamba layer's training kernel with heads of 16 channels."""
    import torch

    convolved = 16 * heads + 2 * groups * state
    values = {
        "zxbcdt": torch.zeros(2, tokens, 16 * heads + convolved + heads, requires_grad=True),
        "conv1d_weight": torch.zeros(convolved, 4), "conv1d_bias": torch.zeros(convolved),
        "dt_bias": torch.zeros(heads), "A": torch.zeros(heads), "D": torch.zeros(heads), "chunk_size": 128,
        "headdim": 16, "ngroups": groups, **more,
    }  # fmt: skip
    return values["zxbcdt"], stand_in("mamba_ssm:mamba_split_conv1d_scan_combined")(**values)


@needs_torch
def test_a_scan_gives_gradients_and_refuses_what_the_kernels_do() -> None:
    import torch

    given, out = scan()
    assert out.shape == (2, 16, 64)
    out.sum().backward()
    assert given.grad is not None
    for refused in ({"groups": 3}, {"A": torch.zeros(5)}, {"headdim": None}, {"activation": "relu"}):
        with pytest.raises(AssertionError):
            scan(**refused)
    with pytest.raises(AssertionError, match="Number of convolution channels is required to be a multiple of 8"):
        scan(groups=1, state=2)
    with pytest.raises(RuntimeError, match="width between 2 and 4"):
        scan(conv1d_weight=torch.zeros(96, 5))


@needs_torch
def test_a_convolution_refuses_what_the_compiled_one_does() -> None:
    import torch

    convolution = stand_in("causal_conv1d:causal_conv1d_fn")
    x, weight = torch.zeros(2, 12, 8), torch.zeros(12, 4)
    assert convolution(x, weight, torch.zeros(12), activation="silu").shape == x.shape
    with pytest.raises(RuntimeError, match="channel dimension divisible by 8"):
        convolution(x.transpose(1, 2).contiguous().transpose(1, 2), weight)
    with pytest.raises(RuntimeError, match="strides"):
        convolution(torch.zeros(2, 6, 12).transpose(1, 2)[:, :8], weight[:8])
    with pytest.raises(RuntimeError, match="must have shape"):
        convolution(x, weight[:8])
    with pytest.raises(NotImplementedError, match="silu, or swish"):
        convolution(x, weight, activation="relu")


@needs_torch
@pytest.mark.train
def test_a_hybrid_with_experts_passes() -> None:
    result = rehearsed(NANO)
    assert result.ok and result.layers[LAYER] == "ran", (result.problems, result.layers)
    assert "Mamba's kernels" in result.extra["rehearsal"].not_rehearsed


@needs_torch
@pytest.mark.train
def test_groups_that_cannot_be_divided_are_refused_in_megatrons_words() -> None:
    groups = "model.mamba_num_groups=4"
    by_rule = check(prepare(NEMOTRON_H, [groups]), layers=("rules",)).problems
    assert "4 Mamba groups cannot be divided over TP 8" in [problem.message for problem in by_rule]
    [refused] = [each for each in rehearsed(NEMOTRON_H, groups).problems if each.code == LAYER]
    assert "AssertionError: ngroups must be evenly divisible by tp_size" in refused.message
    assert "(megatron/core/ssm/mamba_mixer.py:" in refused.message


def test_mamba_groups_that_context_parallelism_cannot_share_are_refused() -> None:
    """Rehearsed: `cp_size must be evenly divisible by ngroups/tp_size`, and Transformer Engine on the width."""
    sets = ["parallel.tp=2", "parallel.cp=4", "model.mamba_num_heads=240"]

    def messages(groups: int) -> list[str]:
        found = check(prepare(NEMOTRON_H, [*sets, f"model.mamba_num_groups={groups}"]), layers=("rules",)).problems
        return [problem.message for problem in found if problem.code.startswith("mamba")]

    projection = (
        "the input projection of a Mamba layer has {} outputs on each of 2 ranks, and FP8 needs a multiple of 16"
    )
    groups = "240 Mamba heads in 6 groups cannot be divided over TP 2 and CP 4"
    assert set(messages(6)) == {groups, projection.format(17016)}
    assert messages(4) == [projection.format(16504)]


@needs_torch
@pytest.mark.train
@pytest.mark.parametrize(
    ("minor", "model", "kernels"),
    [
        ("0.17", "qwen3_next_80b_a3b", "flash-linear-attention's kernels"),
        ("0.18", "qwen3_next_80b_a3b", "flash-linear-attention's kernels"),
        ("0.18", "deepseek_v3_2", "the Hadamard transform"),
    ],
)
def test_older_releases_build_the_attention_that_a_recipe_names(
    minor: str, model: str, kernels: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8launch's own model for 0.17 and 0.18 had ordinary attention instead, without an error for delta nets."""
    monkeypatch.setenv("FP8LAUNCH_MEGATRON", str(megatron_site(minor)))
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        f"extends: [models/{model}, parts/pretrain, parts/benchmark, parts/distributed_optimizer, precision/bf16, "
        "hardware/h100, moe/alltoall]\n"
        f"name: run\nbatch: {{micro: 1, global: 64, sequence: 4096}}\nresources: {{nodes: 8}}\n"
        f"parallel: {{ep: 64}}\nsoftware: {{megatron: '{minor}'}}\n"
    )
    result = rehearsed(str(recipe))
    assert result.ok and result.layers[LAYER] == "ran", (result.problems, result.layers)
    assert kernels in result.extra["rehearsal"].not_rehearsed
