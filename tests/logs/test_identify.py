"""A log without iterations says what it is. Lines of other programs are real."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support import parse_paths
from support_logs import dump

from fp8launch.logs.identify import why_no_iterations

TORCHTITAN = (
    "[rank0]:[titan] 2026-02-24 19:46:17,508 - root - INFO - step:  4  loss:  7.62585  grad_norm: 26.6250  "
    "memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: 13.99%\n"
)
NANOTRON = (
    "10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 327281 / 378950 | consumed_tokens: 85.8G | "
    "elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K | tokens_per_sec_per_gpu: 11.4K | lm_loss: 2.38\n"
)
NEMO_1 = (
    "Epoch 0: :   3%|▎         | 9000/301500 [1:42:42<55:37:46, v_num=0-56, reduced_train_loss=7.04, "
    "global_step=9e+3, consumed_samples=6.3e+5, train_step_timing in s=0.615, val_loss=7.040]\n"
)
CASES = {
    "empty": (b"", "it is empty"),
    "newlines": (b"\n\n", "it is empty"),
    "binary": (b"PK\x03\x04\0\0\x08", "binary file"),
    "noise": (bytes(range(128, 256)) * 8, "binary file"),
    "another program": (b"hello\nworld\n", "the file has no iteration lines; expected"),
    "cut": (b"hello\nwor", "its last line is cut off"),
    "cut after the arguments": (dump().encode() + b"\n", "ends before the first iteration"),
    "torchtitan": (TORCHTITAN.encode(), "a log of torchtitan"),
    "nanotron": (NANOTRON.encode(), "a log of nanotron"),
    "NeMo 1": (NEMO_1.encode(), "a log of NeMo 1"),
    "other languages": ("größer\nпривет\n".encode(), "no iteration lines"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_log_without_iterations_says_what_it_is_and_what_is_expected(tmp_path: Path, name: str) -> None:
    data, found = CASES[name]
    path = tmp_path / "some.log"
    path.write_bytes(data)
    report = parse_paths([path])
    assert report.training.iterations == 0
    notes = [note for note in report.notes if note.startswith("some.log: ")]
    assert len(notes) == 1 and found in notes[0]
    assert "elapsed time per iteration (ms)" in notes[0]


def test_a_failure_of_another_program_is_read_and_the_program_named(tmp_path: Path) -> None:
    path = tmp_path / "some.log"
    path.write_text(TORCHTITAN + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    report = parse_paths([path])
    assert report.failure is not None and report.failure.code == "out-of-memory"
    assert any("a log of torchtitan" in note for note in report.notes)


def test_a_failure_of_megatrons_needs_no_further_words(tmp_path: Path) -> None:
    path = tmp_path / "some.log"
    path.write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    assert not any(note.startswith("some.log") for note in parse_paths([path]).notes)


@pytest.mark.parametrize("text", ["step: 1 loss:", "iteration: 1 / 1 | ", "Epoch 0: ", "reduced_train_loss="])
def test_a_hostile_log_is_described_in_time(tmp_path: Path, text: str) -> None:
    path = tmp_path / "some.log"
    path.write_text(text * (2_000_000 // len(text)))
    start = time.process_time()
    why_no_iterations(path)
    assert time.process_time() - start < 2
