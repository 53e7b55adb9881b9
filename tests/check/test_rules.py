"""What the table of sets cannot say: boundaries, words and places of single rules."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sets import BF16, BLOCKWISE, FSDP, MLA, MOE, MXFP8, NVFP4, TP2, Set

from fp8launch.check import resolved_run as resolved_run_module
from fp8launch.check.gemm_shapes import tokens, widths
from fp8launch.check.resolved_run import ResolvedRun, resolve_run
from fp8launch.check.rule import all_rules
from fp8launch.diagnostics import Problem
from fp8launch.engines.megatron_lm.engine import NOT_IN_ENTRY
from fp8launch.megatron.model_arithmetic import expert_layers, virtual_stages
from fp8launch.megatron.schema import load_schema
from fp8launch.resources import in_job_folder


def run_of(case: Set, folder: Path) -> ResolvedRun:
    return resolve_run(case.prepare(folder))


def said(case: Set, code: str, folder: Path) -> list[Problem]:
    return list(all_rules()[code].problems(run_of(case, folder)))


def test_an_image_with_an_old_torch_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolved_run_module, "software_in", lambda image: {"pytorch": "2.10.0a0", "cuda": "12.8.1"})
    segments = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    case = Set({**FSDP, "use_nccl_ub": True}, env=segments, more={"container": {"image": "site"}})
    [problem] = said(case, "nccl-buffers-segments", tmp_path)
    assert "2.10.0" in problem.message
    assert not said(case, "nccl-buffers-segments-unknown", tmp_path)
    # What the recipe states goes before what is known of the image.
    case = Set(BLOCKWISE, software={"cuda": None}, more={"container": {"image": "site"}})
    assert said(case, "blockwise-needs-cuda", tmp_path)
    assert not said(Set(BLOCKWISE, more={"container": {"image": "site"}}), "blockwise-needs-cuda", tmp_path)


def test_a_misspelt_argument_is_no_answer(tmp_path: Path) -> None:
    """It read as "not set", so that a rule with a typo never said anything."""
    run = run_of(Set(BF16), tmp_path)
    assert run.value("train_iters") and run.value("fp8_recipe") is not None
    for misspelt in ("train_iter", "fp8-recipe"):
        with pytest.raises(KeyError, match=misspelt):
            run.on(misspelt)


def test_an_argument_of_another_version_is_not_set(tmp_path: Path) -> None:
    run = run_of(Set(BF16, software={"megatron": "0.17"}), tmp_path)
    newer = load_schema("0.19").defaults().keys() - load_schema("0.17").defaults().keys() - run.arguments.keys()
    assert newer
    assert not any(run.on(name) for name in newer)


MUON = {"optimizer": "dist_muon"}
FLEX = {**MOE, "moe_token_dispatcher_type": "flex", "expert_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("arguments", "module"),
    [
        (MUON, "emerging_optimizers"),
        ({**FLEX, "moe_flex_dispatcher_backend": "deepep"}, "deep_ep"),
        ({**FLEX, "moe_flex_dispatcher_backend": "hybridep"}, "deep_ep"),
    ],
)
def test_an_optional_package_that_the_image_may_lack_is_reported(
    arguments: dict[str, Any], module: str, tmp_path: Path
) -> None:
    """Five of 62 random recipes that passed the check died on a GPU for want of a package."""
    [problem] = said(Set(arguments, more={"container": {"image": "/site/own.sqsh"}}), "optional-package", tmp_path)
    assert f"imports {module}, " in problem.message and problem.severity == "warning"
    assert "https://github.com/" in str(problem.fix)
    assert not said(Set(arguments, more={"container": {"image": "nemo-26.06"}}), "optional-package", tmp_path)
    plain = {name: value for name, value in arguments.items() if name not in (*MUON, "moe_token_dispatcher_type")}
    assert not said(Set(plain, more={"container": {"image": "/site/own.sqsh"}}), "optional-package", tmp_path)


def test_sparse_attention_needs_a_rotation_that_images_may_lack(tmp_path: Path) -> None:
    sparse = Set({"experimental_attention_variant": "dsa"}, more={"container": {"image": "nemo-26.06"}})
    [problem] = said(sparse, "optional-package", tmp_path)
    assert "sparse attention (dsa) imports fast_hadamard_transform, which may be missing" in problem.message
    # The archive on PyPI cannot be built.
    assert "git+https://github.com/Dao-AILab/fast-hadamard-transform.git" in str(problem.fix)


def test_unknown_software_raises_no_alarm(tmp_path: Path) -> None:
    nothing = {"transformer_engine": None, "cuda": None}
    for code in ("te-too-old", "blockwise-needs-cuda", "cuda-too-old"):
        assert not said(Set(BLOCKWISE, software=nothing), code, tmp_path)


@pytest.mark.parametrize(
    ("recipe", "oldest"), [({}, "2.2.0"), (BLOCKWISE, "2.3.0.dev0"), (MXFP8, "2.1"), (NVFP4, "2.7.0.dev0")]
)
def test_the_first_release_with_a_recipe_is_new_enough(recipe: dict[str, Any], oldest: str, tmp_path: Path) -> None:
    assert not said(Set(recipe, gpu="b200", software={"transformer_engine": oldest}), "te-too-old", tmp_path)


def test_a_problem_points_at_the_line_and_says_what_to_change(tmp_path: Path) -> None:
    case = Set({"ffn_hidden_size": 14344})
    [problem] = said(case, "fp8-dimension", tmp_path)
    path, _, line = str(problem.where).rpartition(":")
    assert "ffn_hidden_size: 14344" in Path(path).read_text().splitlines()[int(line) - 1]
    assert problem.fix == "make it a multiple of 16, such as 14336 or 14352"


def test_the_advice_for_a_split_dimension_counts_the_ranks(tmp_path: Path) -> None:
    [problem] = said(Set({**TP2, "ffn_hidden_size": 14352}), "fp8-dimension", tmp_path)
    assert problem.fix is not None
    assert "14336 or 14368" in problem.fix


def test_bf16_may_have_any_width(tmp_path: Path) -> None:
    odd = {**BF16, "hidden_size": 4100, "kv_channels": 128, "seq_length": 8191}
    run = run_of(Set(odd), tmp_path)
    assert not [p for rule in all_rules().values() for p in rule.problems(run)]


def test_widths_of_a_rank(tmp_path: Path) -> None:
    dense = {w.name: w.size for w in widths(run_of(Set(TP2), tmp_path))}
    assert dense == {
        "hidden_size": 4096,
        "the query, key and value projection": (32 + 2 * 8) * 128 // 2,
        "the attention output": 4096 // 2,
        "ffn_hidden_size": 14336 // 2,
    }
    experts = {w.name: w.size for w in widths(run_of(Set(MOE), tmp_path))}
    assert "ffn_hidden_size" not in experts
    assert experts["moe_ffn_hidden_size"] == 768
    latent = {w.name: w.size for w in widths(run_of(Set(MLA), tmp_path))}
    assert latent["kv_lora_rank + qk_pos_emb_head_dim"] == 576
    assert latent["the query up projection"] == 128 * 192


def test_more_tensor_ranks_than_query_groups_repeat_the_groups(tmp_path: Path) -> None:
    few = {"num_query_groups": 4, "tensor_model_parallel_size": 8, "sequence_parallel": True}
    found = {w.name: w.size for w in widths(run_of(Set(few), tmp_path))}
    assert found["the query, key and value projection"] == (32 // 8 + 2) * 128


def test_tokens_of_a_rank(tmp_path: Path) -> None:
    run = run_of(Set({**TP2, "context_parallel_size": 2, "micro_batch_size": 2, "global_batch_size": 64}), tmp_path)
    assert tokens(run) == (8192, 4096)


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        ({}, 1),
        ({"num_virtual_stages_per_pipeline_rank": 4}, 4),
        ({"num_layers_per_virtual_pipeline_stage": 2}, 8),
        ({"pipeline_model_parallel_layout": "Et*8|(t*8|)*2t*8L"}, 2),
        ({"pipeline_model_parallel_layout": "Et*16|t*16,L"}, 1),
    ],
)
def test_virtual_stages_however_stated(change: dict[str, Any], stages: int, tmp_path: Path) -> None:
    run = run_of(Set({**change, "pipeline_model_parallel_size": 2}), tmp_path)
    assert virtual_stages(run.arguments, 2) == stages


def test_a_layout_cannot_grow_without_bound(tmp_path: Path) -> None:
    layout = "(((t*9999)*9999|)*9999"
    run = run_of(Set({"pipeline_model_parallel_layout": layout, "pipeline_model_parallel_size": 2}), tmp_path)
    assert virtual_stages(run.arguments, 2) >= 1


@pytest.mark.parametrize(
    ("text", "layers"),
    [("2", [1, 0] * 24), ("[0]*3+[1]*45", [0] * 3 + [1] * 45), ("([0,1])*24", [0, 1] * 24)],
)
def test_patterns_of_expert_layers(text: str, layers: list[int], tmp_path: Path) -> None:
    run = run_of(Set({**MOE, "moe_layer_freq": text}), tmp_path)
    assert expert_layers(run.arguments, len(layers)) == tuple(map(bool, layers))


@given(
    hidden=st.integers(1, 600),
    ffn=st.integers(1, 1200),
    heads=st.integers(1, 64),
    sequence=st.integers(1, 9000),
    tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2]),
    recipe=st.sampled_from([BF16, {}, BLOCKWISE, MXFP8, NVFP4]),
    gpu=st.sampled_from(["a100", "h100", "b200"]),
)
def test_rules_never_break(
    tmp_path_factory: pytest.TempPathFactory,
    hidden: int, ffn: int, heads: int, sequence: int, tp: int, cp: int, recipe: dict[str, Any], gpu: str,
) -> None:  # fmt: skip
    change = {
        **recipe, "hidden_size": hidden * 8, "ffn_hidden_size": ffn * 4, "num_attention_heads": heads,
        "seq_length": sequence, "tensor_model_parallel_size": tp, "context_parallel_size": cp,
        "sequence_parallel": tp > 1 or None,
    }  # fmt: skip
    run = run_of(Set(change, gpu=gpu, nodes=2), tmp_path_factory.mktemp("run"))
    for rule in all_rules().values():
        assert all(p.severity == rule.severity and p.fix for p in rule.problems(run))


def test_what_the_entry_refuses_is_what_the_rules_say() -> None:
    """Read from the in-job code, which imports torch."""
    entry = _constant("rank/pretrain.py", "NOT_HERE")
    assert tuple(name.lstrip("-").replace("-", "_") for name in entry) == NOT_IN_ENTRY


def _constant(file: str, name: str) -> Any:
    tree = ast.parse((in_job_folder() / file).read_text(encoding="utf-8"))
    [value] = [n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name]
    return ast.literal_eval(value)


HYBRID = {"hidden_size": 512, "num_layers": 8, "num_attention_heads": 8, "num_query_groups": 4, "swiglu": None}


@pytest.mark.parametrize(
    ("change", "code", "fires"),
    [
        ({"hybrid_layer_pattern": "M*M*M*M*", "ffn_hidden_size": 1001, **TP2, **BF16}, "size-not-divisible", False),
        ({"hybrid_layer_pattern": "M*M-M*M-", "ffn_hidden_size": 1001, **TP2, **BF16}, "size-not-divisible", True),
        ({"hybrid_layer_pattern": "M*M*M*M*", "ffn_hidden_size": 1000}, "fp8-dimension", False),
        ({"hybrid_layer_pattern": "M*M*M*M-", "ffn_hidden_size": 1000}, "fp8-dimension", True),
        ({"hybrid_layer_pattern": "MMMM-MM-", "ffn_hidden_size": 1024, "num_query_groups": 3}, "query-groups", False),
        ({"hybrid_layer_pattern": "MMMM-MM*", "ffn_hidden_size": 1024, "num_query_groups": 3}, "query-groups", True),
        (
            {"hybrid_layer_pattern": "M*M*M*M*", "num_experts": 8, "moe_ffn_hidden_size": 1001, **TP2, **BF16},
            "size-not-divisible",
            False,
        ),
        (
            {"hybrid_layer_pattern": "M*M*M*ME", "num_experts": 8, "moe_ffn_hidden_size": 1001, **TP2, **BF16},
            "size-not-divisible",
            True,
        ),
    ],
)
def test_a_hybrid_model_is_held_to_the_layers_that_it_has(
    change: dict[str, Any], code: str, fires: bool, tmp_path: Path
) -> None:
    assert bool(said(Set({**HYBRID, **change}), code, tmp_path)) == fires


def test_learnable_sinks_are_not_sent_to_a2a(tmp_path: Path) -> None:
    """There their gradient is CP times too large; sinks that are not learned have none."""
    for kind, advice in (("learnable", False), ("off-by-one", True)):
        change = {"softmax_type": kind, "attention_backend": None, "context_parallel_size": 2}
        [problem] = said(Set(change), "sinks-context-parallel", tmp_path)
        fix = problem.fix or ""
        assert "parallel.cp to 1" in fix
        assert ("a2a" in fix) == advice
