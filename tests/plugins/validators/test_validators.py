"""Megatron's own validators without torch or a GPU: good runs pass, bad ones are refused, each at its stage."""

from __future__ import annotations

import runpy
import shutil
import sys
import zipfile
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron_sites import megatron_site
from published import listed_values

from fp8launch.diagnostics import MACHINE_LACKS, UserError
from fp8launch.megatron.flag_problems import check_values, emit_argv
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.validators import validate_worker
from fp8launch.plugins.validators.megatron_core import cache_folder, find_megatron, megatron_version
from fp8launch.plugins.validators.verdicts import MegatronVerdict, Request, validate

# Llama-3 8B, FP8 current scaling, one node: it passes everything.
BASE_FILE = Path(__file__).parents[2] / "megatron" / "llama3_8b_fp8.args"
BASE = BASE_FILE.read_text().split()
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


@dataclass(frozen=True)
class Case:
    """`BASE` with some flags changed (None drops one), on 8 H100 with TE 2.20 unless `target` says otherwise."""

    change: dict[str, Any]
    target: dict[str, Any] = field(default_factory=dict)
    stage: str = "num_microbatches"
    message: str = ""

    def request(self, minor: str, with_args: bool = False) -> Request | None:
        """None where this version of Megatron lacks a flag or choice."""
        schema = load_schema(minor)
        values = {**listed_values(BASE_FILE, schema), **self.change}
        if check_values(values, schema):
            return None
        request = Request(emit_argv(values, schema), world_size=8, compute_capability=(9, 0), te_version="2.20")
        return replace(request, with_args=with_args, **self.target)


BF16 = {"fp8_format": None, "fp8_recipe": None, "fp8_param_gather": None}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FSDP = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "no_gradient_accumulation_fusion": True,
}
OFFLOAD = {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}

GOOD = {
    "8 x H100": Case({}),
    "4 x H200": Case({}, {"world_size": 4}),
    "bf16": Case(BF16),
    "deterministic": Case(
        {"deterministic_mode": True, "cross_entropy_loss_fusion": None},
        {"env": {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}},
    ),
    "delayed": Case({"fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}),
    "blockwise": Case({"fp8_recipe": "blockwise", "fp8_param_gather": None}),
    "mxfp8 on B200": Case({"fp8_recipe": "mxfp8", "fp8_format": "e4m3"}, {"compute_capability": (10, 0)}),
    "nvfp4 on B200": Case({**BF16, "fp4_format": "e2m1"}, {"compute_capability": (10, 0)}),
    "TP2 on Hopper, one connection": Case(TP2_SP, {"env": ONE_CONNECTION}),
    "TP2 on Blackwell": Case(TP2_SP, {"compute_capability": (10, 0)}),
    "FSDP": Case({**FSDP, "ckpt_format": "fsdp_dtensor"}),
    "bf16 moments": Case({"use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}),
}

_VALIDATE = {
    "world % TP": Case({"tensor_model_parallel_size": 3}, message="not divisible"),
    "layers % PP": Case({"pipeline_model_parallel_size": 3}, {"world_size": 6}, message="Number of layers"),
    "sequence % 2 CP": Case(
        {"context_parallel_size": 2, "seq_length": 8190}, {"env": ONE_CONNECTION}, message="2 * context-parallel-size"
    ),
    "TP2 on Hopper": Case({"tensor_model_parallel_size": 2}, message="CUDA_DEVICE_MAX_CONNECTIONS"),
    "sequence > positions": Case({"seq_length": 16384}, message="max_position_embeddings"),
    "param gather, no distributed optimizer": Case(
        {"use_distributed_optimizer": None, "overlap_param_gather": None}, message="--fp8-param-gather only supported"
    ),
    "fp8 and fp4": Case({"fp4_format": "e2m1"}, message="cannot be used simultaneously"),
    "bf16 and fp16": Case({"fp16": True}, message="assert not args.bf16"),
    "param overlap without grad overlap": Case({"overlap_grad_reduce": None}, message="--overlap-grad-reduce"),
    "FSDP with another checkpoint format": Case(FSDP, message="fsdp_dtensor"),
    "FSDP's checkpoint format without FSDP": Case({"ckpt_format": "fsdp_dtensor"}, message="fsdp_dtensor"),
    "EP without experts": Case({"expert_model_parallel_size": 2}, message="num_experts"),
    "experts % EP": Case({"num_experts": 3, "expert_model_parallel_size": 2}, message="Number of experts"),
    "virtual pipeline split": Case(
        {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3}, message="virtual pipeline"
    ),
    "min_lr > lr": Case({"min_lr": 1e-3}, message="args.min_lr <= args.lr"),
    "iterations and samples": Case({"train_samples": 1000}, message="expected iteration-based training"),
    "save without interval": Case({"save": "/checkpoints"}, message="save_interval"),
    "CPU offload with current-scaling param gather": Case(OFFLOAD, message="optimizer cpu offload"),
    "TP overlap without SP": Case(
        {"tensor_model_parallel_size": 2, "tp_comm_overlap": True}, {"env": ONE_CONNECTION}, message="sequence parallel"
    ),
    "full-iteration graph with NaN check": Case(
        {"cuda_graph_impl": "full_iteration", "no_check_for_nan_in_loss_and_grad": None}, message="--no-check-for-nan"
    ),
    "nvfp4 with an old TE": Case({**BF16, "fp4_format": "e2m1"}, {"te_version": "2.6"}, message="2.7"),
}  # fmt: skip
_TRANSFORMER = {
    "heads % TP": Case(
        {"num_attention_heads": 12, "tensor_model_parallel_size": 8, "num_query_groups": 4},
        {"env": ONE_CONNECTION}, message="num_attention_heads (12)",
    ),
    "query groups against TP": Case(
        {"num_query_groups": 6, "tensor_model_parallel_size": 4}, {"env": ONE_CONNECTION}, message="num_query_groups"
    ),
    "param gather without fp8": Case({"fp8_format": None}, message="fp8_param"),
    "bf16 layers with delayed": Case({"fp8_recipe": "delayed", "first_last_layers_bf16": True}, message="Delayed"),
    "too many bf16 layers": Case(
        {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 33}, message="num_layers_at_start_in_bf16"
    ),
    "full recompute without method": Case({"recompute_granularity": "full"}, message="recompute_method"),
    "full recompute without layers": Case(
        {"recompute_granularity": "full", "recompute_method": "block"}, message="recompute_num_layers"
    ),
    "custom recipe without factory": Case({"fp8_recipe": "custom"}, message="fp8_quantizer_factory"),
    "fp8 output layer without mxfp8": Case({"fp8_output_proj": True}, message="mxfp8"),
    "uneven pipeline": Case(
        {"pipeline_model_parallel_size": 4, "decoder_first_pipeline_num_layers": 6}, message="number of layers"
    ),
    "pipeline layout": Case(
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et*3|t*3L"}, message="num_layers 32"
    ),
    "no TE": Case({}, {"te_version": None}, message="apply_rope_fusion"),
}  # fmt: skip
_DDP = {
    "buffer reuse without param gather": Case(
        {"fp8_param_gather": None, "reuse_grad_buf_for_mxfp8_param_ag": True}, message="MXFP8"
    ),
    "buckets by size and number": Case({"ddp_num_buckets": 4}, message="Cannot specify both"),
}
_OPTIMIZER = {
    "bf16 moments alone": Case({"exp_avg_dtype": "bf16"}, message="exp_avg_dtype"),
    "bf16 main gradients alone": Case({"main_grads_dtype": "bf16"}, message="main_grads_dtype"),
}
BAD = {
    name: replace(case, stage=stage)
    for stage, cases in {
        "validate_args": _VALIDATE,
        "TransformerConfig": _TRANSFORMER,
        "DistributedDataParallelConfig": _DDP,
        "OptimizerConfig": _OPTIMIZER,
    }.items()
    for name, case in cases.items()
}
# Refused everywhere; 0.18 moved the check, and says so of the evaluation batch.
BATCHES = {
    "batch % micro batch": Case({"micro_batch_size": 3}),
    "batch % data parallel": Case({"global_batch_size": 60}),
}


def verdicts(cases: dict[str, Case], minor: str, site: Path, **options: Any) -> dict[str, MegatronVerdict]:
    """One verdict a case that this version can express."""
    requests = {name: case.request(minor, with_args=bool(options)) for name, case in cases.items()}
    possible = {name: request for name, request in requests.items() if request}
    return dict(zip(possible, validate(list(possible.values()), site, **options), strict=True))


def test_good_runs_pass_every_stage(minor: str, site: Path) -> None:
    found = verdicts(GOOD, minor, site)
    assert {name: v.message for name, v in found.items() if not v.ok} == {}
    assert {v.stage for v in found.values()} == {"num_microbatches"}
    assert set(found) == set(GOOD)


def test_bad_runs_are_refused_at_their_stage(minor: str, site: Path) -> None:
    found = verdicts(BAD, minor, site)
    assert {name: v.stage for name, v in found.items()} == {name: BAD[name].stage for name in found}
    assert {name: v.message for name, v in found.items() if BAD[name].message not in (v.message or "")} == {}
    assert all(not v.ok and v.at and v.at.startswith("megatron/") for v in found.values())
    # 0.17 has neither full-iteration graphs nor an FP8 output layer.
    assert len(BAD) - len(found) == (2 if minor == "0.17" else 0)


def test_batches_that_do_not_divide_are_refused(minor: str, site: Path) -> None:
    stage = "num_microbatches" if minor == "0.17" else "validate_args"
    assert {v.stage for v in verdicts(BATCHES, minor, site).values() if not v.ok} == {stage}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-layer 32", "unrecognized arguments: --num-layer 32"),
        ("--fp8-dot-product-attention", "unrecognized arguments"),
        ("--fp8-recipe tensorwize", "invalid choice: 'tensorwize'"),
    ],
)
def test_the_parser_speaks_for_itself(words: str, message: str, minor: str, site: Path) -> None:
    verdict = validate([Request((*BASE, *words.split()), 8, (9, 0), "2.20")], site)[0]
    assert (verdict.ok, verdict.stage, verdict.exception) == (False, "parse_args", "SystemExit")
    assert message in str(verdict.message)


def test_requests_do_not_touch_each_other(site: Path) -> None:
    hopper = Request((*BASE, "--tensor-model-parallel-size", "2"), 8, (9, 0), "2.20")
    requests = [hopper, replace(hopper, env=ONE_CONNECTION), replace(hopper, compute_capability=(10, 0)), hopper]
    assert [v.ok for v in validate(requests, site)] == [False, True, True, False]


def test_the_login_nodes_environment_plays_no_part(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("PYTHONPATH", "/nonexistent")
    request = Request((*BASE, "--tensor-model-parallel-size", "2"), 8, (9, 0), "2.20", with_args=True)
    verdict = validate([request, Request(tuple(BASE), 8, (9, 0), "2.20", with_args=True)], site)
    assert not verdict[0].ok
    assert verdict[1].args is not None
    assert verdict[1].args["world_size"] == 8
    assert verdict[1].args["data_parallel_size"] == 8


def test_what_megatron_says_in_passing_is_kept(site: Path) -> None:
    # Sequence parallelism on one GPU is switched off, with a warning.
    verdict = validate([Request((*BASE, "--sequence-parallel"), 8, (9, 0), "2.20", with_args=True)], site)[0]
    assert verdict.ok
    assert verdict.args is not None
    assert verdict.args["sequence_parallel"] is False
    assert any("sequence parallelism" in warning for warning in verdict.warnings)


def test_a_recipe_takes_milliseconds(site: Path) -> None:
    # The fastest one, because other processes may share the processor.
    assert min(v.seconds for v in validate([Request(tuple(BASE), 8, (9, 0), "2.20")] * 9, site)) < 0.1


def test_a_wheel_is_unpacked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wheel = tmp_path / "megatron_core-0.19.2-cp311-cp311-linux_x86_64.whl"
    site = megatron_site("0.19")
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in (site / "megatron").rglob("*.py"):
            archive.write(file, file.relative_to(site))
    request = Request(tuple(BASE), 8, (9, 0), "2.20")
    assert find_megatron("0.19", wheel) == find_megatron("0.19.1", tmp_path) == wheel
    assert validate([request], wheel)[0].ok
    unpacked = list(cache_folder().iterdir())
    assert [megatron_version(folder) for folder in unpacked] == ["0.19.2"]
    inode = unpacked[0].stat().st_ino
    assert validate([request], wheel)[0].ok
    assert [folder.stat().st_ino for folder in cache_folder().iterdir()] == [inode]


def test_where_megatron_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(folder: Path, version: str) -> Path:
        major, minor, patch = version.split(".")
        (folder / "megatron/training").mkdir(parents=True)
        (folder / "megatron/core").mkdir()
        (folder / "megatron/training/arguments.py").touch()
        (folder / "megatron/core/package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\n")
        return folder

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FP8LAUNCH_MEGATRON", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert find_megatron("0.19") is None
    older = place(cache_folder() / "0.19.1", "0.19.1")
    newer = place(cache_folder() / "0.19.10", "0.19.10")
    place(cache_folder() / "0.18.2", "0.18.2")
    assert find_megatron("0.19.1") == newer
    named = place(tmp_path / "checkout", "0.19.0")
    monkeypatch.setenv("FP8LAUNCH_MEGATRON", str(named))
    assert find_megatron("0.19") == named
    assert find_megatron("0.18") == cache_folder() / "0.18.2"
    assert find_megatron("0.17") is None
    assert find_megatron("0.19", older) == older
    with pytest.raises(UserError, match=r"contains no Megatron-Core 0\.18"):
        find_megatron("0.18", older)


def test_a_broken_megatron_is_the_machines_lack(tmp_path: Path) -> None:
    site = megatron_site("0.19")
    shutil.copytree(site / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("arguments.py"))
    with pytest.raises(UserError, match=r"cannot be run: ModuleNotFoundError: .*arguments'") as caught:
        validate([Request(tuple(BASE), 8, (9, 0), "2.20")], tmp_path)
    assert caught.value.exit_code == MACHINE_LACKS
    with pytest.raises(UserError, match="cannot be run"):
        validate([Request(tuple(BASE), 8, (9, 0), "2.20")], tmp_path, python=str(tmp_path / "no-python"))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")
def test_real_torch_gives_the_same_verdicts(minor: str, site: Path) -> None:
    cases = {**GOOD, **BAD, **BATCHES}
    without = verdicts(cases, minor, site, real_torch=False)
    real = verdicts(cases, minor, site, real_torch=True)
    assert set(without) == set(real)
    for name, ours in without.items():
        theirs = real[name]
        # Python's own and torch's warnings differ; what the run would have been given does not.
        assert replace(ours, warnings=(), seconds=0.0) == replace(theirs, warnings=(), seconds=0.0), name


def test_an_exception_of_python_quotes_the_statement_that_names_the_arguments(tmp_path: Path) -> None:
    """Python's words alone, such as `unsupported operand`, name no argument."""
    file = tmp_path / "arguments.py"
    file.write_text("def check(args):\n    return (\n        args.hidden_size //\n        args.num_layers\n    )\n")
    with pytest.raises(TypeError) as raised:
        runpy.run_path(str(file))["check"](SimpleNamespace(hidden_size=None, num_layers=2))
    message = str(validate_worker._refusal(raised.value, "")["message"])
    assert message.startswith("TypeError: unsupported operand")
    assert "args.hidden_size // args.num_layers" in message
    with pytest.raises(AssertionError) as asserted:
        raise AssertionError("TP must divide heads")
    assert validate_worker._refusal(asserted.value, "")["message"] == "TP must divide heads"
