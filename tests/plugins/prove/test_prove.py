"""`fp8launch prove` as users meet it, with the real Megatron on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from support import wait_for

from fp8launch.cli import run

pytestmark = [pytest.mark.train, pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")]

Write = Callable[[str, str], str]

DENSE = """
name: dense
extends: [models/tiny, parts/pretrain, parts/distributed_optimizer, precision/bf16, hardware/h100]
batch: {micro: 1, global: 16, sequence: 64}
train: {iterations: 3, lr: 3.0e-4, min_lr: 3.0e-5, warmup: 1}
resources: {nodes: 1, gpus_per_node: 2}
software: {megatron: "0.19"}
"""
EXPERTS = """
extends: [dense.yaml]
name: experts
model: {num_experts: 4, moe_ffn_hidden_size: 64, moe_router_topk: 2, moe_router_load_balancing_type: aux_loss,
        moe_aux_loss_coeff: 0.1}
"""


@pytest.fixture
def recipes(write: Write) -> Callable[[str], str]:
    """Path of one of the recipes above."""
    files = {"dense": write("dense.yaml", DENSE), "experts": write("experts.yaml", EXPERTS)}
    return files.__getitem__


def prove(capsys: pytest.CaptureFixture[str], recipe: str, *overrides: str, expect: int = 0) -> dict[str, object]:
    words = ["prove", recipe, "--json"]
    for override in overrides:
        words += ["--set", override]
    status = run(words)
    answer = capsys.readouterr()
    assert status == expect, answer.err + answer.out
    found: dict[str, object] = json.loads(answer.out)
    return found


def checks(found: dict[str, object]) -> dict[str, dict[str, object]]:
    return {check["name"]: check for check in found["checks"]}  # type: ignore[attr-defined]


def test_tensor_and_pipeline_parallel_with_sequence_parallel_agree(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    sizes = ("parallel={tp: 2, pp: 2, vp: 2, sequence: auto}", "model.num_layers=8", "resources.gpus_per_node=8")
    found = prove(capsys, recipes("dense"), *sizes)
    assert found["ok"]
    assert found["compared"] == "TP 2 x PP 2 (2 virtual stages) x DP 2 with 1 rank"
    assert {"loss", "gradients", "grad_norm"} <= checks(found).keys()
    assert "megatron.bf16 (true): computed in fp32" in found["not_covered"]  # type: ignore[operator]


def test_a_loss_that_data_parallelism_divides_is_found(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    """Megatron-LM issue 3672; the usual loss of the same model agrees."""
    assert prove(capsys, recipes("experts"), "parallel.ep=2")["ok"]
    wrong = "model.moe_router_load_balancing_type=global_aux_loss"
    found = prove(capsys, recipes("experts"), "parallel.ep=2", wrong, expect=1)
    gradients = checks(found)["gradients"]
    assert gradients["differences"][0]["tensor"] == "decoder.layers.mlp.router.weight"  # type: ignore[index]
    assert "model.moe_router_load_balancing_type (global_aux_loss)" in found["settings"]  # type: ignore[operator]
    assert found["nearest_right"] == "model.moe_router_load_balancing_type=aux_loss"
    assert checks(found)["loss"]["ok"]


def test_a_sink_that_is_left_out_of_the_norm_is_found(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    """Megatron-LM issue 7452, finding 8: offsets are divided by heads, and only one rank's are in the norm."""
    found = prove(capsys, recipes("dense"), "parallel.tp=2", "model.softmax_type=learnable", expect=1)
    assert checks(found)["gradients"]["ok"]
    names = [one["tensor"] for one in checks(found)["grad_norm"]["differences"]]  # type: ignore[attr-defined]
    assert names == ["decoder.layers.self_attention.core_attention.softmax_offset"]


def test_tied_embeddings_with_token_prediction_cannot_be_saved_in_a_pipeline(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    """Megatron-LM pull request 7577. The step itself is right."""
    tied = ("model={mtp_num_layers: 1, untie_embeddings_and_output_weights: null}", "parallel.pp=2")
    found = checks(prove(capsys, recipes("dense"), *tied, expect=1))
    assert [name for name, check in found.items() if not check["ok"]] == ["resume"]
    assert "cannot save a checkpoint of tied embeddings" in found["resume"]["detail"]  # type: ignore[operator]


def test_a_stage_without_experts_agrees(capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]) -> None:
    sizes = ("parallel={pp: 2, ep: 2}", "resources.gpus_per_node=4", "model={num_layers: 2, moe_layer_freq: '[0]+[1]'}")
    found = prove(capsys, recipes("experts"), *sizes)
    assert checks(found).keys() == {"loss", "gradients", "grad_norm", "resume"}


def test_an_engine_without_megatron_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["prove", "peers/ddp_te"]) == 3
    assert "does not train with Megatron-Core" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "words"), [(signal.SIGINT, ("prove", "--again")), (signal.SIGTERM, ("check", "--prove"))]
)
def test_nothing_is_left_after_an_interruption(
    recipes: Callable[[str], str], tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    env = {**os.environ, "TMPDIR": str(place), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "fp8launch", *words, recipes("dense")]
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: any(place.glob("fp8launch-*/**/0.log")), 120)
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in message
    assert not list(place.iterdir())


SHARDS = "megatron.dist_ckpt_optim_fully_reshardable=true"


def to(capsys: pytest.CaptureFixture[str], layout: str, *words: str, expect: int) -> dict[str, object]:
    assert run(["prove", *words, "--to", layout, "--json"]) == expect
    return checks(json.loads(capsys.readouterr().out))["reshard"]


def test_a_checkpoint_goes_on_in_another_layout(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    for layout, title in (("tp=2", "DP 2 to TP 2"), ("pp=2", "DP 2 to PP 2")):
        check = to(capsys, layout, recipes("dense"), "--set", SHARDS, expect=0)
        assert title in check["detail"]  # type: ignore[operator]


def test_random_numbers_of_data_loaders_are_no_difference(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    """A loader of shuffled data takes one for each epoch, and one more after a resume. The model does not see them."""
    prove(capsys, recipes("dense"), "resources.gpus_per_node=1", "megatron.dataloader_type=cyclic")


def test_a_vocabulary_that_is_padded_otherwise_is_found(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    """Nothing of Megatron says that the loss changes by ln(252 / 250)."""
    words = ["--set", SHARDS, "--set", "model={vocab_size: 250, make_vocab_size_divisible_by: 1}"]
    check = to(capsys, "tp=4", recipes("dense"), "--set", "resources.gpus_per_node=4", *words, expect=1)
    assert "the padded vocabulary has another size" in check["detail"]  # type: ignore[operator]


def test_experts_that_cannot_be_loaded_elsewhere_are_found(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    words = ["--set", SHARDS, "--set", "parallel.ep=2"]
    check = to(capsys, "ep=1", recipes("experts"), *words, expect=1)
    assert "the checkpoint does not load" in check["detail"]  # type: ignore[operator]


@pytest.mark.slow
def test_dropout_resumes_with_the_same_random_numbers(
    capsys: pytest.CaptureFixture[str], recipes: Callable[[str], str]
) -> None:
    found = prove(capsys, recipes("dense"), "model.hidden_dropout=0.1", "parallel.tp=2")
    assert "model.hidden_dropout (0.1): random numbers differ between layouts" in found["not_covered"]  # type: ignore[operator]
