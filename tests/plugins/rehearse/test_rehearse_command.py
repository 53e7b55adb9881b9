"""`check --rehearse` as users meet it: limits, interruption, refusals, JSON, and a machine without torch."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import wait_for

from fp8launch.check.checker import CheckResult, check_all
from fp8launch.check.resolved_run import resolve_run
from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS
from fp8launch.job.prepared import prepare
from fp8launch.plugins.rehearse.failure import settings_read
from fp8launch.plugins.rehearse.layer import LAYER, problem_of, with_rehearsal
from fp8launch.plugins.rehearse.rehearse import Outcome, Role
from fp8launch.plugins.rehearse.workers import Limits

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

# The user's own, also where a test has a home of its own: it has Megatron's and Transformer Engine's packages.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")

SMALL = """
name: small
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, hardware/h200]
precision: {recipe: bf16}
batch: {micro: 1, global: 4, sequence: 8192}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
"""
# Refused by Megatron when its first layer of experts runs.
REFUSED = """
name: refused
extends: [models/qwen3_30b_a3b, parts/pretrain, parts/distributed_optimizer, precision/tensorwise, moe/alltoall,
          hardware/h200]
batch: {micro: 1, global: 4, sequence: 4096}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
model: {num_layers: 4, moe_router_load_balancing_type: quantile_balancing}
megatron: {moe_router_fusion: true}
"""


def limited(recipe: str, limits: Limits) -> CheckResult:
    one = prepare(recipe)
    return with_rehearsal([one], check_all([one], layers=("schema",)), Cluster(), limits=limits)[0]


@needs_torch
@pytest.mark.parametrize(
    ("limits", "sentence"),
    [
        (Limits(memory_gib=0.02), "it needs more than 0.02 GiB of memory, the limit of a rehearsal"),
        (Limits(processor_seconds=0.02), "it needs more than 0.02 s of processor time, the limit of a rehearsal"),
        (Limits(seconds=0.1), "it took longer than 0.1 s, the limit of a rehearsal"),
    ],
)
def test_a_role_that_exceeds_a_limit_ends_with_a_sentence(
    write: Callable[[str, str], str], limits: Limits, sentence: str
) -> None:
    result = limited(write("r.yaml", SMALL), limits)
    assert result.layers[LAYER] == f"not run to its end: no verdict on the first rank: {sentence}"
    assert result.exit_code == MACHINE_LACKS
    assert not [problem for problem in result.problems if problem.code == LAYER]
    assert [role.result for role in result.extra["rehearsal"].roles] == ["no verdict", "no verdict"]


def workers_below(process: int) -> list[int]:
    import psutil

    try:
        children = psutil.Process(process).children(recursive=True)
        return [child.pid for child in children if "fp8launch.plugins.rehearse.forked" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def alive(process: int) -> bool:
    import psutil

    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


@needs_torch
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_command(number: signal.Signals) -> None:
    # One that takes long: on a loaded machine a short one is over before it is interrupted.
    command = [sys.executable, "-m", "fp8launch", "check", "deepseek_v3_tensorwise_h100", "--rehearse"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        found: list[int] = []
        wait_for(lambda: found.extend(workers_below(process.pid)) or found, 120)
        process.send_signal(number)
        _, messages = process.communicate(timeout=120)
    wait_for(lambda: not any(map(alive, found)))
    assert "Traceback" not in messages
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert messages.splitlines()[-1] == "interrupted"


@needs_torch
@pytest.mark.train
def test_a_refusal_reads_like_any_other_problem(
    unlearned: None, write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write("bad.yaml", REFUSED)
    assert run(["check", recipe, "--rehearse", "-v"]) == 1
    captured = capsys.readouterr()
    shown = captured.out
    assert re.search(
        r"bad.yaml:9: error: fails in a rehearsal of the first rank: AssertionError: Quantile balancing routing does "
        r"not support moe_router_fusion\. \(megatron/core/transformer/moe/router.py:\d+\) \[rehearsal\]\n"
        r"    fix: change megatron.moe_router_fusion \(true\)",
        shown,
    )
    assert "first rank (rank 0), last rank (rank 1):\nTraceback (most recent call last):" in shown
    assert "0 of 2 roles rehearsed without an error" in captured.err


@needs_torch
@pytest.mark.train
def test_json_has_every_role_and_names_what_no_rehearsal_runs(
    write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write("r.yaml", SMALL + "checkpoint: {dir: /a_shared_folder/ckpt, interval: 2}\n")
    assert run(["check", recipe, "--rehearse", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["layers"]["rehearsal"] == "ran"
    found = data["rehearsal"]
    assert found["not_rehearsed"] == ["the parts of a checkpoint that other ranks write"]
    assert [(role["role"], role["rank"], role["result"]) for role in found["roles"]] == [
        ("first rank", 0, "passed"),
        ("last rank", 1, "passed"),
    ]
    assert all(0 < role["memory_gib"] < 4 and role["seconds"] > 0 for role in found["roles"])


def test_a_sentence_that_names_nothing_leads_to_the_settings_that_its_code_reads(
    write: Callable[[str, str], str],
) -> None:
    recipe = write("r.yaml", SMALL + "megatron: {cross_entropy_loss_fusion: true}\n")
    seen = resolve_run(prepare(recipe))
    outcome = Outcome(
        Role(0, "first rank"),
        False,
        exception="AssertionError",
        message="not possible",
        settings=("cross_entropy_loss_fusion",),
    )
    problem = problem_of(seen, outcome)
    assert problem.where == f"{recipe}:8"
    assert problem.fix == "change megatron.cross_entropy_loss_fusion (true)"


def test_the_settings_around_a_statement_are_the_innermost_first(tmp_path: Path) -> None:
    file = tmp_path / "layer.py"
    text = (
        "def forward(self, config):\n"
        "    other = config.unrelated\n"
        "    if config.outer:\n"
        "        for _ in config.many:\n"
        "            if not self.config.inner:\n"
        "                assert self.config.first <= \\\n"
        "                    self.config.second, 'not possible'\n"
    )
    file.write_text(text, encoding="utf-8")
    names = [name for name in settings_read(file, 7) if name != "config"]
    assert names == ["first", "second", "inner", "outer"]


def test_check_imports_nothing_of_the_rehearsal(write: Callable[[str, str], str]) -> None:
    code = (
        "import sys; from fp8launch.cli import run; run(['check', sys.argv[1]]);"
        "heavy = ('torch', 'psutil', 'einops', 'fp8launch.plugins.rehearse.layer');"
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, write("r.yaml", SMALL)]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_without_torch_check_says_how_to_get_it_and_else_works(
    write: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write("r.yaml", SMALL)
    monkeypatch.setattr("fp8launch.plugins.rehearse.rehearse.importlib.util.find_spec", lambda name: None)
    assert run(["check", recipe, "--rehearse"]) == MACHINE_LACKS
    shown = capsys.readouterr().err
    assert "torch, numpy, einops, psutil" in shown
    assert "pip install 'fp8launch[rehearse]'" in shown
    monkeypatch.undo()
    assert run(["check", recipe]) == 0


@needs_torch
@pytest.mark.train
def test_submit_rehearses_what_the_profile_wants_rehearsed(
    unlearned: None, write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str], home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    recipe = write("bad.yaml", REFUSED.replace("gpus_per_node: 2", "gpus_per_node: 1"))
    words = ["submit", recipe, "--backend", "local", "--dry-run"]
    assert run(words) == 0
    assert run([*words, "--rehearse"]) == 1
    assert "Quantile balancing routing does not support moe_router_fusion" in capsys.readouterr().err
    # One GPU for an hour.
    assert run([*words, "--cluster", write("more.yaml", "rehearse: {from_gpu_hours: 1.1}\n")]) == 0
    cheap = write("less.yaml", "rehearse: {from_gpu_hours: 0.9}\n")
    assert run([*words, "--cluster", cheap, "--no-rehearse"]) == 0
    assert "rehearsal" not in capsys.readouterr().err
    assert run([*words, "--cluster", cheap]) == 1
    assert "Quantile balancing routing does not support moe_router_fusion" in capsys.readouterr().err


def test_a_profile_that_wants_rehearsals_needs_torch_here(
    write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(CACHE))
    monkeypatch.setattr("fp8launch.plugins.rehearse.rehearse.importlib.util.find_spec", lambda name: None)
    profile = write("c.yaml", "name: big\nrehearse: {from_gpu_hours: 0}\n")
    words = ["submit", write("r.yaml", SMALL), "--backend", "local", "--dry-run", "--cluster", profile]
    assert run(words) == MACHINE_LACKS
    assert "cluster profile big: rehearse.from_gpu_hours: error:" in capsys.readouterr().err


def test_a_terminal_shows_how_many_roles_are_done() -> None:
    code = (
        "from fp8launch.cli.output import counting_bar\n"
        "with counting_bar('rehearsing roles', 3) as done:\n"
        "    [done() for _ in range(3)]\n"
        "with counting_bar('nothing', 0) as done:\n"
        "    pass\n"
    )
    reader, writer = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    with subprocess.Popen([sys.executable, "-c", code], stderr=writer, env=environment) as process:
        os.close(writer)
        shown = b""
        try:
            while block := os.read(reader, 4096):
                shown += block
        except OSError:  # how Linux says that the other side is closed
            pass
    os.close(reader)
    assert process.returncode == 0
    text = shown.decode()
    assert "rehearsing roles" in text
    assert "3/3" in text
    assert "nothing" not in text


@needs_torch
@pytest.mark.train
def test_each_phase_is_rehearsed(write: Callable[[str, str], str], tmp_path: Path) -> None:
    text = (
        f"extends: tiny_cpu\nname: phased\ncheckpoint: {{dir: {tmp_path}, interval: 5}}\n"
        "phases:\n  one: {iterations: 5}\n  two: {megatron: {clip_grad: 0.5}}\n"
    )
    one = prepare(write("r.yaml", text))
    [result] = with_rehearsal([one], check_all([one], layers=("schema",)), Cluster())
    assert result.layers[LAYER] == "ran"
    assert [(role.phase, role.result) for role in result.extra["rehearsal"].roles] == [
        ("one", "passed"),
        ("two", "passed"),
    ]


@needs_torch
def test_runs_that_do_the_same_are_rehearsed_once(write: Callable[[str, str], str]) -> None:
    totals: list[int] = []

    def progress(roles: int) -> AbstractContextManager[Callable[[], None]]:
        totals.append(roles)
        return nullcontext(lambda: None)

    runs = [prepare(write("r.yaml", SMALL), overrides) for overrides in ([], [], ["train.lr=1.0e-4"])]
    checked = check_all(runs, layers=("schema",))
    results = with_rehearsal(runs, checked, Cluster(), progress=progress, limits=Limits(seconds=0.1))
    assert totals == [4]
    assert [len(result.extra["rehearsal"].roles) for result in results if "rehearsal" in result.extra] == [2, 2, 2]
