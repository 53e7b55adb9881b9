"""injob/convert.py as the process that a job starts; the conversion where Megatron-Bridge is installed.

It runs in .cache/bridge (tests/plugins/bridge/test_with_bridge.py). Real jobs of conversions are in
stages/test_five_stages.py.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import train_jobs

from fp8launch.check.checker import check
from fp8launch.injob.supervisor.checkpoints import CONVERSION_RECORD
from fp8launch.job.prepared import prepare
from fp8launch.plugins.convert.injob import checks as convert_checks
from fp8launch.plugins.convert.injob import convert

INSTALLED = importlib.util.find_spec("megatron.bridge") is not None
needs_bridge = pytest.mark.skipif(not INSTALLED, reason="runs in .cache/bridge (bridge/test_with_bridge.py)")
# With compare_logits.py.
PATH = f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}"
SIZES = {**tiny_models.SIZES, "max_position_embeddings": 64, "rope_theta": 500000.0}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", SIZES, ""),
    "qwen3_moe": (
        "Qwen3Moe",
        {**SIZES, **EXPERTS, "norm_topk_prob": True},
        "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --qk-layernorm --kv-channels 16",
    ),
}
# Its settings equal SIZES, except for these.
TRAINING = [*train_jobs.MOCK, *shlex.split("--rotary-base 500000 --norm-epsilon 1e-5 --vocab-size 511 --lr 5e-3")]
# Rounding of bf16 in two orders of summation: units in the last place of the largest logit.
BF16_STEPS = 4


def job(*words: str, processes: int = 1) -> train_jobs.Run:
    return train_jobs.forked(processes, words, None, PATH, "bridge", convert.__name__)


def to_megatron(model: Path, out: Path, *more: str, processes: int = 1) -> Path:
    job("hf-to-megatron", f"--model={model}", f"--out={out}", *more, processes=processes).succeeded()
    return out / "iter_0000000"


def to_hf(model: Path, checkpoint: Path, out: Path, *more: str, processes: int = 1) -> Path:
    words = (f"--model={model}", f"--checkpoint={checkpoint}", f"--out={out}", *more)
    job("megatron-to-hf", *words, processes=processes).succeeded()
    return out


def make_model(name: str, folder: Path) -> Path:
    """A random model whose norms are not all ones, and whose logits are not all near 0."""
    import torch

    transformers: Any = pytest.importorskip("transformers")
    kind, sizes, _ = MODELS[name]
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def weights(folder: Path) -> dict[str, Any]:
    load: Any = pytest.importorskip("safetensors.torch").load_file
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load(str(file)).items()}


def same_bits(one: Path, other: Path) -> bool:
    mine, theirs = weights(one), weights(other)
    return mine.keys() == theirs.keys() and all(
        tensor.dtype == theirs[name].dtype and bool((tensor == theirs[name]).all()) for name, tensor in mine.items()
    )


def logits(model: Path, checkpoint: Path, dtype: str) -> tuple[float, float]:
    """The largest difference of the logits of both, and the largest logit."""
    words = (str(model), str(checkpoint), dtype)
    done = train_jobs.forked(1, words, None, PATH, "bridge", "compare_logits").succeeded()
    line = next(line for line in done.output.splitlines() if line.startswith("logits "))
    return float(line.split()[1]), float(line.split()[2])


def agree(model: Path, checkpoint: Path) -> None:
    """The same weights have the same logits, computed in fp32."""
    difference, largest = logits(model, checkpoint, "fp32")
    assert largest > 0.5 and difference < 1e-5 * largest


def train(name: str, folder: Path, iterations: int, *more: str) -> train_jobs.Run:
    own = shlex.split(MODELS[name][2])
    words = [*TRAINING, *own, "--train-iters", str(iterations), "--save-interval", str(iterations), *more]
    return train_jobs.forked(1, words, folder, PATH, "bridge").succeeded()


# --- Without Megatron-Bridge ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("separator", [["--"], []])
def test_options(separator: list[str]) -> None:
    """torchrun's own parser takes the separator away."""
    found = convert.arguments([*separator, "hf-to-megatron", "--model=a/b", "--out=/o", "--tp=2"])
    assert (found.model, found.out, found.tp, found.pp, found.dtype) == ("a/b", Path("/o"), 2, 1, None)


def test_only_what_both_state_can_differ() -> None:
    model = {"rotary_base": 500000.0, "num_query_groups": 2, "swiglu": True}
    assert convert_checks.differences(model, {"rotary_base": 500000, "num_query_groups": None}) == []
    assert convert_checks.differences(model, {"rotary_base": 10000}) == [
        "rotary_base is 10000 in the checkpoint and 500000.0 in the model"
    ]


@pytest.mark.skipif(INSTALLED, reason="Megatron-Bridge is installed")
def test_a_machine_without_bridge_says_so(tmp_path: Path) -> None:
    started = train_jobs.start(convert.__file__, ["--", "hf-to-megatron", "--model=m", f"--out={tmp_path}/out"])
    run = train_jobs.finish([started])
    assert run.codes == [3]
    assert "Megatron-Bridge is not installed" in run.output and "Traceback" not in run.output


# --- With Megatron-Bridge -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def imported_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Return a model with a tokenizer, and its checkpoint."""

    @functools.cache
    def imported(name: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp(name)
        model = make_model(name, folder / "model")
        (model / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        (model / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        return model, to_megatron(model, folder / "imported")

    return imported


@pytest.mark.train
@needs_bridge
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_with_a_training_between(
    name: str, imported_model: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    model, imported = imported_model(name)
    agree(model, imported)
    if name == "llama":  # in bf16, ties in a router are broken differently
        difference, largest = logits(model, imported, "bf16")
        assert difference <= BF16_STEPS * 2**-8 * largest
    back = to_hf(model, imported, tmp_path / "back")
    assert same_bits(model, back)
    assert (back / "tokenizer.json").read_text() == (model / "tokenizer.json").read_text()

    first = train(name, tmp_path, 12, "--load", str(imported.parent), "--finetune", "--save", "trained")
    assert sorted(first.losses) == list(range(1, 13)) and first.losses[12] < first.losses[1]
    trained = tmp_path / "trained" / "iter_0000012"
    exported = to_hf(model, trained, tmp_path / "exported")
    assert not same_bits(model, exported)
    agree(exported, trained)

    if name == "llama":  # how a training begins with weights does not depend on the kind of model
        to_megatron(exported, tmp_path / "again")
        again = train(name, tmp_path, 3, "--load", str(tmp_path / "again"), "--finetune", "--save", "b")
        direct = train(name, tmp_path, 3, "--load", str(tmp_path / "trained"), "--finetune", "--save", "c")
        assert again.losses == direct.losses
        assert again.losses[1] < first.losses[1]


@pytest.mark.train
@needs_bridge
def test_another_type_of_the_weights(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model")
    imported = to_megatron(model, tmp_path / "imported", "--dtype=fp32")
    back = to_hf(model, imported, tmp_path / "back", "--dtype=fp32")
    assert json.loads((back / "config.json").read_text())["dtype"] == "float32"
    found, stated = weights(back), weights(model)
    assert {str(tensor.dtype) for tensor in found.values()} == {"torch.float32"}
    assert found.keys() == stated.keys() and all(bool((found[name] == stated[name].float()).all()) for name in stated)


@pytest.mark.train
@needs_bridge
@pytest.mark.parametrize("size", ["tp", "pp", "ep"])
def test_a_divided_model_is_the_same(size: str, tmp_path: Path) -> None:
    model = make_model("qwen3_moe", tmp_path / "model")
    imported = to_megatron(model, tmp_path / "imported", f"--{size}=2", processes=2)
    # And the checkpoint loads in another layout.
    assert same_bits(model, to_hf(model, imported, tmp_path / "whole"))
    assert same_bits(model, to_hf(model, imported, tmp_path / "parts", f"--{size}=2", processes=2))


@pytest.mark.train
@needs_bridge
def test_what_would_be_lost_is_refused(imported_model: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    model, imported = imported_model("llama")
    stated = json.loads((model / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    stated["rope_parameters"]["rope_theta"] = 10000.0
    (other / "config.json").write_text(json.dumps(stated))
    words = (f"--checkpoint={imported}", f"--out={tmp_path / 'out'}")
    refused = job("megatron-to-hf", f"--model={other}", *words)
    assert refused.codes == [2]
    assert "rotary_base is 500000.0 in the checkpoint and 10000.0 in the model" in refused.output
    assert not (tmp_path / "out").exists()

    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    taken = job("hf-to-megatron", f"--model={model}", f"--out={tmp_path / 'taken'}")
    assert taken.codes == [2] and "exists and is not empty" in taken.output

    biased, trained = tmp_path / "biased", [word for word in TRAINING if word != "--disable-bias-linear"]
    words = (*trained, "--train-iters", "3", "--save", str(biased), "--save-interval", "3")
    train_jobs.forked(1, words, tmp_path, PATH, "bridge").succeeded()
    words = (f"--checkpoint={biased / 'iter_0000003'}", f"--out={tmp_path / 'out'}")
    lost = job("megatron-to-hf", f"--model={model}", *words)
    assert lost.codes == [2] and "tensors that the Hugging Face model lacks" in lost.output and "bias" in lost.output
    assert not (tmp_path / "out").exists()


@needs_bridge
def test_the_check_reads_the_record_of_a_conversion(
    imported_model: Callable[[str], tuple[Path, Path]], tmp_path: Path
) -> None:
    """What a run must state to start from the weights, as in docs/convert.md."""
    _, imported = imported_model("llama")
    assert (imported.parent / CONVERSION_RECORD).is_file()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    load = (f"checkpoint.load={imported.parent}", "megatron.finetune=true")
    found = []
    for base in ("500000", "10000"):
        prepared = prepare(str(tmp_path / "recipe.yaml"), [*load, f"model.rotary_base={base}"])
        problems = check(prepared, layers=("machine",)).problems
        found.append([problem.message for problem in problems if problem.code == "converted-weights"])
    assert found[0] == [] and "rotary_base" in found[1][0]


TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": {"type": "Whitespace"},
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {f"t{number}": number for number in range(512)}, "unk_token": "t0"},
}
RECIPE = """\
extends: tiny_cpu
name: continued
model: {vocab_size: 511, rotary_base: 500000, norm_epsilon: 1.0e-5}
train: {iterations: 3}
"""
