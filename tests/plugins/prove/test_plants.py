"""Ten errors, each planted in a copy of Megatron, are found and named. Without them the same recipes agree."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cli import run
from fp8launch.plugins.prove import work
from fp8launch.plugins.validators.megatron_core import megatron_for, site_of

pytestmark = [
    pytest.mark.train,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
]

BASE = """
name: planted
extends: [models/tiny, parts/pretrain, parts/distributed_optimizer, precision/bf16, hardware/h100]
batch: {micro: 1, global: 32, sequence: 64}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
software: {megatron: "0.19"}
"""
TENSOR = "parallel={tp: 2, pp: 1, sequence: auto}"
PIPELINE = "parallel={tp: 1, pp: 2}"
EXPERTS = "model={num_experts: 4, moe_ffn_hidden_size: 64, moe_router_topk: 2, moe_router_load_balancing_type: none}"
TIED = "model.untie_embeddings_and_output_weights=null"


@dataclass(frozen=True)
class Plant:
    """In `file`, `right` is replaced by `wrong`. It shows in the layout `overrides`, in `check`, as `text`."""

    file: str
    right: str
    wrong: str
    overrides: tuple[str, ...]
    check: str
    text: str


PLANTS = {
    "gradients of norms doubled under tensor parallelism": Plant(
        "core/distributed/finalize_model_grads.py",
        "                buf.copy_(synced)\n",
        "                buf.copy_(2 * synced)\n",
        (TENSOR,),
        "gradients",
        r"layer_?norm.*: 2 times",
    ),
    "gradients of tokens that another rank's experts had": Plant(
        "core/tensor_parallel/mappings.py",
        "                ctx.group,\n                *grad_output,\n",
        "                ctx.group,\n                *(ctx.group.size() * one for one in grad_output),\n",
        (EXPERTS, "parallel.ep=2", "megatron.moe_token_dispatcher_type=alltoall"),
        "gradients",
        r"router\.weight: off by",
    ),
    "gradients of inputs not summed over tensor parallel ranks": Plant(
        "core/tensor_parallel/layers.py",
        "ctx.allreduce_dgrad = allreduce_dgrad",
        "ctx.allreduce_dgrad = False",
        ("parallel={tp: 2, pp: 1, sequence: false}",),
        "gradients",
        r"word_embeddings\.weight: ",
    ),
    "tied embeddings not summed over the pipeline": Plant(
        "core/distributed/finalize_model_grads.py",
        "        get_pg_size(embd_group) > 1\n",
        "        get_pg_size(embd_group) > 9\n",
        (PIPELINE, TIED),
        "gradients",
        r"word_embeddings\.weight: ",
    ),
    "gradient of the loss wrong on the second part of the vocabulary": Plant(
        "core/tensor_parallel/cross_entropy.py",
        "softmax_update = 1.0 - target_mask.view(-1).float()",
        "softmax_update = 0.5 + 0.0 * target_mask.view(-1).float()",
        (TENSOR,),
        "gradients",
        r"output_layer\.weight: ",
    ),
    "copies of a tensor counted twice in the gradient norm": Plant(
        "core/tensor_parallel/layers.py",
        "        return tp_group.rank() == 0\n",
        "        return True\n",
        (TENSOR,),
        "grad_norm",
        r"layernorm\.weight: 1\.414 times",
    ),
    "a moment that is not loaded": Plant(
        "core/optimizer/distrib_optimizer.py",
        "                dst_tensors[key].copy_(tensors[key])\n",
        "                dst_tensors[key].copy_(0 * tensors[key] if key == 'exp_avg_sq' else tensors[key])\n",
        (TENSOR,),
        "resume",
        r"exp_avg_sq\.",
    ),
    "a schedule that starts again": Plant(
        "core/optimizer_param_scheduler.py",
        "        self.step(increment=num_steps)\n",
        "        self.step(increment=0)\n",
        (),
        "resume",
        r"weight: off by",
    ),
    "random numbers that are not restored": Plant(
        "training/checkpointing.py",
        "                torch.set_rng_state(rng_state['torch_rng_state'])\n"
        "                torch.cuda.set_rng_state(rng_state['cuda_rng_state'])\n"
        "                # Check for empty",
        "                # Check for empty",
        ("model.hidden_dropout=0.1",),
        "resume",
        r"weight: off by",
    ),
    "data that starts again": Plant(
        "training/datasets/data_samplers.py",
        "for idx in range(self.consumed_samples, self.total_samples):",
        "for idx in range(self.total_samples):",
        (),
        "resume",
        r"weight: off by",
    ),
}


@pytest.fixture
def megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the installed Megatron, which the proofs use."""
    place = tmp_path / "site"
    installed = site_of(megatron_for("0.19"))
    shutil.copytree(installed / "megatron", place / "megatron", copy_function=os.symlink)
    monkeypatch.setenv("FP8LAUNCH_MEGATRON", str(place))
    # No setting of a recipe is right with an error of this kind, so nothing is gained by trying some.
    monkeypatch.setattr(work, "MOST_TRIALS", 0)
    return place / "megatron"


def prove(capsys: pytest.CaptureFixture[str], recipe: str, overrides: tuple[str, ...]) -> tuple[int, dict[str, Any]]:
    words = ["prove", recipe, "--json"]
    for override in overrides:
        words += ["--set", override]
    status = run(words)
    answer = capsys.readouterr()
    assert status in (0, 1), answer.err
    found: dict[str, Any] = json.loads(answer.out)
    return status, found


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_error_is_found(
    capsys: pytest.CaptureFixture[str],
    write: Callable[[str, str], str],
    megatron: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    plant = PLANTS[name]
    # The trainings of the other checks are the same as without the error, or come after it was found.
    monkeypatch.setattr(work, "small_run" if plant.check == "resume" else "resumed_run", lambda *_: None)
    file = megatron / plant.file
    text = file.read_text(encoding="utf-8")
    assert text.count(plant.right) >= 1
    file.unlink()
    file.write_text(text.replace(plant.right, plant.wrong), encoding="utf-8")
    status, found = prove(capsys, write("planted.yaml", BASE), plant.overrides)
    assert status == 1, found
    check = next(check for check in found["checks"] if not check["ok"])
    assert check["name"] == plant.check, found["checks"]
    texts = []
    for one in check["differences"]:
        factor, tensor = one["factor"], one["tensor"]
        texts.append(f"{tensor}: off by {one['relative']}" if factor is None else f"{tensor}: {factor:.4g} times")
    assert any(re.search(plant.text, text) for text in texts), texts


@pytest.mark.parametrize("overrides", sorted({plant.overrides for plant in PLANTS.values()}), ids=str)
def test_without_it_the_recipe_agrees(
    capsys: pytest.CaptureFixture[str], write: Callable[[str, str], str], overrides: tuple[str, ...]
) -> None:
    status, found = prove(capsys, write("planted.yaml", BASE), overrides)
    assert status == 0, found["checks"]
