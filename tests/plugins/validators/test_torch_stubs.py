"""The stand-ins for torch and numpy answer as the real packages do, and record what they cannot answer."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from test_validators import BASE

from fp8launch.plugins.validators import torch_stubs
from fp8launch.plugins.validators.verdicts import Request, validate

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

# Python expressions that validators could ask; each must have one value with stand-ins and with the real packages.
QUESTIONS = {
    "asyncio.iscoroutinefunction": ["iscoroutinefunction(print)", "iscoroutinefunction(None)"],
    "numpy.prod": ["prod([2, 2]) == 4", "prod((2, 3, 4)) == 24", "prod([]) == 1", "prod([[2, 3], [4, 5]]) == 120",
                   "4 == prod([2, 3])", "int(prod([7]))"],
    "torch.device": ["device('cuda') == device('cuda')", "device('cuda') == device('cpu')", "device('cuda', 1).index",
                     "device('cuda:3').index", "device('cpu').type", "str(device('cuda:1'))", "str(device('cpu'))"],
    "torch.is_grad_enabled": ["is_grad_enabled()", "not is_grad_enabled()"],
    "torch.use_deterministic_algorithms": ["use_deterministic_algorithms(False)"],
}  # fmt: skip


@needs_torch
def test_every_answer_is_asked_of_the_real_package() -> None:
    assert set(QUESTIONS) == set(torch_stubs.ANSWERS)


@needs_torch
@pytest.mark.parametrize("name", QUESTIONS)
def test_answers_are_those_of_the_real_package(name: str) -> None:
    import importlib

    package, _, member = name.rpartition(".")
    real = getattr(importlib.import_module(package), member)
    for question in QUESTIONS[name]:
        assert eval(question, {member: torch_stubs.ANSWERS[name]}) == eval(question, {member: real}), question


@needs_torch
def test_the_dtypes_are_those_of_torch() -> None:
    import torch

    for name, dtype in torch_stubs._DTYPE_BY_NAME.items():
        assert repr(dtype) == repr(getattr(torch, name)), name


PROGRAM = """
import sys; sys.path.insert(0, sys.argv[1])
import torch_stubs
torch_stubs.install()
import torch, numpy, torch.nn.functional as F
torch_stubs.asked.clear()
{statement}
print(" ".join(torch_stubs.asked))
"""


@pytest.mark.parametrize(
    ("statement", "asked"),
    [
        ("numpy.max([1, 2])", "numpy.max"),
        ("torch.cuda.device_count()", "torch.cuda.device_count"),
        ("torch.cuda.nccl.version()", "torch.cuda.nccl.version"),
        ("torch.backends.cudnn.enabled > 3", "torch.backends.cudnn.enabled"),
        ("F.gelu is F.relu; torch.float32 != torch.float; getattr(torch, 'int')", ""),
        ("numpy.prod([2, 2]); torch.is_grad_enabled(); torch.cuda.is_available()", ""),
    ],
)
def test_what_takes_part_in_a_computation_is_recorded(statement: str, asked: str) -> None:
    command = [sys.executable, "-I", "-c", PROGRAM.format(statement=statement), str(Path(torch_stubs.__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split()[:1] == asked.split()


CP4 = ("--context-parallel-size", "4", "--cp-comm-type", "a2a+p2p", "--hierarchical-context-parallel-sizes")
ONE_CONNECTION = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_hierarchical_context_parallelism_that_fits_is_accepted(site: Path) -> None:
    requests = [Request((*BASE, *CP4, *sizes), 8, (9, 0), "2.20", ONE_CONNECTION) for sizes in (("2", "2"), ("2", "3"))]
    assert [verdict.ok for verdict in validate(requests, site)] == [True, False]


def test_a_local_checkpoint_needs_nothing_of_the_login_node(site: Path) -> None:
    local = ("--non-persistent-ckpt-type", "local", "--non-persistent-save-interval", "5", "--save", "/s")
    words = (*BASE, *local, "--save-interval", "10", "--non-persistent-local-ckpt-dir", "/n")
    [verdict] = validate([Request(words, 8, (9, 0), "2.20")], site)
    assert verdict.ok, verdict.message


def test_an_exit_inside_megatron_is_one_runs_refusal(site: Path) -> None:
    good = Request(tuple(BASE), 8, (9, 0), "2.20")
    poison = Request((*BASE, "--checkpoint-activations"), 8, (9, 0), "2.20")
    found = validate([poison, good, poison, good], site)
    assert [verdict.ok for verdict in found] == [False, True, False, True]
    assert "use --recompute-activations" in str(found[0].message)


def test_what_ends_the_process_leaves_the_other_verdicts(site: Path, tmp_path: Path) -> None:
    """An unreadable request kills the process, as a crash in a validator would."""
    good = Request(tuple(BASE), 8, (9, 0), "2.20")
    killer = Request(tuple(BASE), 8, (9, 0), "not a version")
    found = validate([good, killer, good, good], site)
    assert [verdict.ok for verdict in found] == [True, False, True, True]
    assert "ended without a verdict" in str(found[1].no_answer)
    assert [bool(verdict.no_answer) for verdict in found] == [False, True, False, False]


def test_known_versions_ask_for_nothing_that_is_not_answered(site: Path) -> None:
    changes = ((), (*CP4, "2", "2"), ("--use-precision-aware-optimizer",), ("--moe-grouped-gemm", "--num-experts", "8"))
    found = validate([Request((*BASE, *change), 8, (9, 0), "2.20", ONE_CONNECTION) for change in changes], site)
    assert {verdict.unanswered for verdict in found} == {()}


def test_a_transformer_engine_beside_megatron_is_not_imported(tmp_path: Path, site: Path) -> None:
    """As on a GPU machine: compiled for the real torch, it cannot be imported under the stand-ins."""
    (tmp_path / "megatron").symlink_to(site / "megatron")
    for name in ("transformer_engine", "flash_attn", "apex"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('libc10.so: cannot open shared object file')\n")
    [verdict] = validate([Request(tuple(BASE), 8, (9, 0), "2.20", {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})], tmp_path)
    assert verdict.ok, verdict
