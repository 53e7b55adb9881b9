"""Rehearsals save a checkpoint, load it and continue, with Megatron's and Transformer Engine's own code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8launch.check.resolved_run import resolve_run
from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import prepare
from fp8launch.plugins.rehearse.layer import plan_of
from fp8launch.plugins.rehearse.not_rehearsed import not_rehearsed
from fp8launch.plugins.rehearse.rehearse import Outcome, Role, rehearse, request_of
from fp8launch.plugins.rehearse.resuming import ALLOWS_PICKLE, later
from fp8launch.plugins.rehearse.shrink import shrink

pytestmark = [pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"), pytest.mark.train]

SAVES = ("checkpoint.dir=/a_shared_folder/ck", "checkpoint.interval=5")
# Releases that refuse to unpickle FP8 state.
NEWEST = ("software.megatron=0.19.2", "software.transformer_engine=2.20.2")


def rehearsed(recipe: str, *overrides: str) -> list[Outcome]:
    run = prepare(recipe, (*SAVES, *overrides))
    [outcomes] = rehearse([plan_of(run, resolve_run(run), Cluster())])
    return outcomes


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("llama8b_delayed_h100", (*NEWEST, "precision.param_gather=true")),
        ("llama8b_delayed_h100", ("software.megatron=0.17.1",)),
        ("llama8b_mxfp8_b200", ()),  # 0.18
        ("llama8b_fp8", ("megatron.ckpt_format=torch",)),
        ("qwen3_30b_a3b_tensorwise_h100", NEWEST[:1]),
    ],
    ids=["gathered", "0.17", "mxfp8", "torch", "experts"],
)
def test_a_run_continues_from_its_own_checkpoint(recipe: str, overrides: tuple[str, ...]) -> None:
    for outcome in rehearsed(recipe, *overrides):
        assert outcome.ok, outcome.traceback


def test_state_that_transformer_engine_refuses_to_unpickle_is_found() -> None:
    """The job sets the variable for its own checkpoints; a value that the user set is respected, in rehearsals too."""
    for outcome in rehearsed("llama8b_delayed_h100", *NEWEST, f"env.{ALLOWS_PICKLE}=0"):
        assert not outcome.ok and not outcome.unknown
        assert outcome.message.startswith("continuing from its checkpoint: Refusing to load pickled"), outcome.message
        assert outcome.at.startswith("transformer_engine/pytorch/_extra_state.py")


@pytest.mark.parametrize(
    ("broken", "exception"),
    [
        ("from megatron.core.models.gpt import GPTModel; GPTModel.sharded_state_dict = lambda *_, **__: 1 // 0",
         "ZeroDivisionError"),
        ("from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler as S\n"
         "S.load_state_dict = lambda self, state: state['a key that nobody saves']", "KeyError"),
        ("from megatron.training import training\n"
         "load = training.load_checkpoint\n"
         "training.load_checkpoint = lambda *a, **k: (load(*a, **k)[0] - 1, 0)", "RuntimeError"),
    ],
    ids=["saving", "loading", "another iteration"],
)  # fmt: skip
def test_a_checkpoint_that_cannot_be_made_or_loaded_is_refused(broken: str, exception: str, tmp_path: Path) -> None:
    run = prepare("tiny_cpu", SAVES)
    plan = plan_of(run, resolve_run(run), Cluster())
    request = request_of(plan, Role(0, "first rank"), shrink(plan.args.values, plan.layout))
    content = json.dumps({**request.content, "result": str(tmp_path / "result")})
    program = """
import json, sys
from fp8launch.plugins.rehearse import worker
request = json.loads(sys.argv[1])
worker.prepare_software(request)
worker.import_megatron(request)
exec(sys.argv[2])
result = worker.result_of(request)
print("\\n" + json.dumps([result["ok"], result.get("exception")]))
"""
    for broken_by, expected in (("", [True, None]), (broken, [False, exception])):
        command = [sys.executable, "-c", program, content, broken_by]
        paths = os.pathsep.join([*request.python_path, *filter(None, sys.path)])
        ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
        assert json.loads(ran.stdout.splitlines()[-1]) == expected, ran.stderr


def test_the_forked_process_keeps_the_state_of_then(tmp_path: Path) -> None:
    value = ["then"]
    seen = tmp_path / "seen"
    run = later(lambda: seen.write_text(value[0]) and None)
    value[0] = "now"
    run(True)
    assert seen.read_text() == "then"
    later(seen.unlink)(False)
    assert seen.exists()


def test_what_is_not_rehearsed_of_checkpoints_is_named() -> None:
    def named(*overrides: str) -> set[str]:
        return {name for name in not_rehearsed(resolve_run(prepare("llama8b_fp8", overrides))) if "checkpoint" in name}

    assert named() == set()
    assert named(*SAVES) == {"the parts of a checkpoint that other ranks write"}
    assert "loading a checkpoint of another run" in named(*SAVES, "megatron.pretrained_checkpoint=/elsewhere")
    assert "loading checkpoints of FSDP" in named(*SAVES, "parallel.fsdp=megatron")
