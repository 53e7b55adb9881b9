"""A training script in a checkout: it runs as a rank of the world, with the checkout's own Megatron."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from fp8launch.check.checker import check_all
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import MACHINE_LACKS
from fp8launch.job.prepared import prepare
from fp8launch.plugins.rehearse.layer import LAYER, with_rehearsal

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")

RECIPE = """
name: scripted
extends: [models/llama3_8b, parts/pretrain, parts/distributed_optimizer, precision/tensorwise, hardware/h200]
software: {megatron: "0.19", transformer_engine: "2.20"}
batch: {micro: 1, global: 4, sequence: 8192}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
"""
SCRIPT = """
import megatron.core
import torch.distributed as dist
from checkout_helper import NAME
from megatron.training.arguments import parse_args

def more(parser):
    parser.add_argument("--stop")
    return parser

args = parse_args(more)
rank, place = f"{dist.get_rank()}/{dist.get_world_size()}", megatron.core.__file__
assert args.stop == "no", f"{args.stop} {args.num_attention_heads} {NAME} {rank} {place}"
"""


@needs_torch
@pytest.mark.train
@pytest.mark.parametrize("stop", ["no", "yes"])
def test_a_script_runs_with_its_checkout_and_its_own_arguments(
    write: Callable[[str, str], str], tmp_path: Path, stop: str
) -> None:
    found = find_spec("megatron.core")
    if found is None or found.origin is None:
        pytest.skip("needs megatron-core")
    script = Path(write("checkout/pretrain_mine.py", SCRIPT))
    write("checkout/checkout_helper.py", "NAME = 'helper'\n")
    (script.parent / "megatron").symlink_to(Path(found.origin).parents[1])
    run = prepare(write("r.yaml", RECIPE + f"launch: {{script: {script}, arguments: [--stop, 'word-{stop}']}}\n"))
    if stop == "no":
        script.write_text(SCRIPT.replace('== "no"', '== "word-no"'))
    [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster())
    assert result.layers[LAYER] == "ran"
    if stop == "no":
        assert result.ok
        return
    problems = [problem.message for problem in result.problems if problem.code == LAYER]
    for rank, message in enumerate(problems):
        assert f"AssertionError: word-yes 32 helper {rank}/2 {script.parent}/megatron/core/__init__.py" in message
    assert len(problems) == 2


def test_a_script_that_only_the_image_has_is_not_rehearsed(write: Callable[[str, str], str]) -> None:
    text = RECIPE + "launch: {script: /opt/megatron-lm/pretrain_gpt.py}\ncontainer: {image: nemo-26.04}\n"
    run = prepare(write("r.yaml", text))
    [result] = with_rehearsal([run], check_all([run], layers=("schema",)), Cluster())
    assert result.layers[LAYER].startswith(
        "not run: the script /opt/megatron-lm/pretrain_gpt.py is not on this machine"
    )
    assert result.exit_code == MACHINE_LACKS
