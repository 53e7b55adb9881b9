"""A request that cannot work ends with one line that says why, before anything heavy is loaded."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

import pytest
from train_jobs import MOCK, TINY, Run, worker

from fp8launch.injob.rank import worker as in_job


def refused(run: Run, code: int, *said: str) -> None:
    assert run.codes == [code], run.output
    assert "Traceback" not in run.output
    lines = [line for line in run.output.splitlines() if line.startswith("fp8launch: ")]
    assert len(lines) == 1, run.output
    for words in said:
        assert words in lines[0]


@pytest.mark.parametrize("asked", [["--fp8-format", "hybrid"], ["--fp8-format=e4m3"], ["--fp4-format", "e2m1"]])
def test_low_precision_on_a_cpu(megatron: None, asked: list[str]) -> None:
    refused(worker([*MOCK, *asked]), 2, asked[0].split("=")[0], "CPU")


def test_fp8_that_would_silently_be_bf16() -> None:
    argv = ["--fp8-format", "hybrid", "--transformer-impl", "local"]
    assert "would train in bf16" in in_job.low_precision_problem(argv, "cuda")


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is not None, reason="Transformer Engine is installed"
)
def test_fp8_without_transformer_engine() -> None:
    assert "Transformer Engine" in in_job.low_precision_problem(["--fp8-format", "hybrid"], "cuda")


def test_bf16_asks_for_nothing() -> None:
    assert in_job.low_precision_problem(MOCK, "cpu") is None


def test_the_last_value_of_a_flag_counts() -> None:
    option = in_job.option
    assert option(["--a", "1", "--a=2"], "--a") == "2"
    assert option(["--a=1", "--a", "2"], "--a") == "2"
    assert option(["--ab", "1"], "--a") is None


def test_no_gpu(megatron: None) -> None:
    import torch

    if torch.cuda.device_count():
        pytest.skip("this machine has a GPU")
    refused(worker(MOCK, FP8LAUNCH_DEVICE="cuda"), 3, "no GPU", "FP8LAUNCH_DEVICE=cpu")


def test_unknown_device(megatron: None) -> None:
    refused(worker(MOCK, FP8LAUNCH_DEVICE="tpu"), 2, "'tpu'", "cuda", "cpu")


def test_flags_that_a_cpu_needs_are_all_named(megatron: None) -> None:
    argv = [word for word in MOCK if word != "--no-rope-fusion"]
    argv[argv.index("gloo")] = "nccl"
    refused(worker(argv), 2, "--distributed-backend gloo", "--no-rope-fusion")


def test_an_optional_package_is_missed_before_training(megatron: None) -> None:
    refused(worker([*MOCK, "--optimizer", "dist_muon"]), 3, "dist_muon needs emerging_optimizers", "pip install git+")


def test_what_the_entry_does_not_do(megatron: None) -> None:
    refused(worker([*MOCK, "--sft"]), 2, "--sft", "pretrain_gpt.py")


def test_missing_script(megatron: None) -> None:
    refused(worker(MOCK, own=("--script", "/nowhere/pretrain_gpt.py")), 2, "/nowhere/pretrain_gpt.py")


def test_missing_torch() -> None:
    refused(worker(TINY, python=("-S",)), 3, "torch is not installed", sys.executable)


def test_missing_megatron(megatron: None, tmp_path: Path) -> None:
    """A Python that has the real torch and nothing else."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    (tmp_path / "torch").symlink_to(Path(spec.origin).parent)
    run = worker(TINY, python=("-S",), PYTHONPATH=str(tmp_path))
    refused(run, 3, "Megatron-Core", sys.executable)


def test_untested_megatron_is_a_warning_only(megatron: None, tmp_path: Path) -> None:
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("VERSION = (0, 12, 3, '')\n__version__ = '0.12.3'\n")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    (tmp_path / "torch").symlink_to(Path(spec.origin).parent)
    run = worker(TINY, python=("-S",), PYTHONPATH=str(tmp_path))
    assert run.codes == [3]
    assert "warning: megatron-core 0.12.3 is not one of the tested versions" in run.output
    assert "no megatron.training" in run.output


def test_tasks_without_an_address(megatron: None) -> None:
    run = worker(MOCK, SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NTASKS="2")
    refused(run, 2, "MASTER_ADDR and MASTER_PORT")


def test_the_folder_is_self_contained() -> None:
    """It is copied alone into a run folder: nothing in it may import the rest of the package it is developed in."""
    code = Path(in_job.__file__).parents[1]
    texts = {file: file.read_text() for file in code.rglob("*.py")}
    assert len(texts) > 20
    outside = re.compile(r"(from|import) fp8launch(?!\.injob\b)")
    assert [file.name for file, text in texts.items() if outside.search(text)] == []
    assert all(os.access(file, os.R_OK) for file in texts)
