"""`fp8launch convert` up to the job: names, refusals, the job's script, and what is never done twice.

The conversion itself is in test_convert_program.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import said

from fp8launch.check.checker import check
from fp8launch.injob.supervisor.checkpoint_owner import claim
from fp8launch.injob.supervisor.checkpoints import CONVERSION_RECORD, TRACKER
from fp8launch.job.prepared import prepare
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.convert.conversion import Conversion, conversion, recipe_of
from fp8launch.plugins.convert.injob.checks import _SETTINGS

Ask = Callable[..., Any]
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
LOCAL = ("--backend", "local")
INSTALLED = importlib.util.find_spec("megatron.bridge") is not None


@pytest.fixture
def ask(home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Ask:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.chdir(home)

    def call(*words: object, expect: int = 0) -> tuple[str, str]:
        return said(capsys, "convert", *words, expect=expect)

    return call


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def checkpoint(folder: Path, backend: str = "torch_dist") -> Path:
    """A folder of checkpoints that looks like one; `torn` reads the metadata."""
    place = folder / "iter_0000007"
    place.mkdir(parents=True)
    (folder / TRACKER).write_text("7")
    (place / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    (place / ".metadata").write_bytes(pickle.dumps(types.SimpleNamespace(storage_data={})))
    return place


def test_the_job_gets_the_layout_and_absolute_paths(ask: Ask, model: Path, tmp_path: Path) -> None:
    words = ("--tp", 2, "--pp", 2, "--dtype", "fp32", "--gpu", "h100")
    out, _ = ask("hf-to-megatron", model, tmp_path / "out", *words, "--dry-run", "--backend", "sbatch")
    assert "#SBATCH --gpus-per-node=4" in out and "FP8LAUNCH_DEVICE=cuda" in out
    for word in ("hf-to-megatron", f"--model={model}", f"--out={tmp_path}/out", "--dtype=fp32", "--tp=2", "--pp=2"):
        assert word in out
    assert "plugins/convert/injob/convert.py" in out and not (tmp_path / "out").exists()


def test_a_digest_that_looks_like_a_number_stays_text() -> None:
    wanted = Conversion("hf-to-megatron", "a/b", Path("out"), None, None, "567e354173013886")
    recipe = recipe_of(wanted, {"tp": 1, "pp": 1, "ep": 1}, "cpu", None, ())
    assert recipe.tree.plain()["convert"]["fingerprint"] == "567e354173013886"


def test_sixteen_processes_are_two_nodes_and_twelve_are_refused(ask: Ask, model: Path, tmp_path: Path) -> None:
    words = ("hf-to-megatron", model, tmp_path / "out", "--gpu", "h100", "--dry-run", "--backend", "sbatch")
    assert "#SBATCH --nodes=2" in ask(*words, "--tp", 8, "--pp", 2)[0]
    assert "convert-world" in ask(*words, "--tp", 3, "--pp", 3, expect=2)[1]


def test_an_image_sees_input_and_output(ask: Ask, model: Path, tmp_path: Path) -> None:
    image = tmp_path / "nemo.sif"
    image.write_bytes(b"")
    profile = tmp_path / "site.yaml"
    profile.write_text("runtime: apptainer\n")
    words = ("--image", image, "--cluster", profile, "--dry-run", "--backend", "sbatch")
    (tmp_path / "to").mkdir()
    out, _ = ask("hf-to-megatron", model, tmp_path / "to" / "out", *words)
    assert f"{tmp_path}/to:{tmp_path}/to" in out and f"{model}:{model}" in out


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("./nowhere", "convert-model", "there is no folder"),
        ("a/b/c", "convert-model", "there is no folder"),
        ("empty", "convert-model", "has no config.json"),
        ("weightless", "convert-model", "no weights in *.safetensors"),
        ("unknown", "convert-architecture", "MixtralForCausalLM"),
    ],
)
def test_models_that_cannot_be_converted(ask: Ask, home: Path, name: str, code: str, says: str) -> None:
    for folder in ("empty", "weightless", "unknown"):
        (home / folder).mkdir()
    (home / "weightless/config.json").write_text(json.dumps(CONFIG))
    (home / "unknown/config.json").write_text(json.dumps({"architectures": ["MixtralForCausalLM"]}))
    (home / "unknown/model.safetensors").write_bytes(b"weights")
    expect = 1 if name == "unknown" else 2
    _, err = ask("hf-to-megatron", name, "out", "--dry-run", *LOCAL, expect=expect)
    assert code in err and says in err
    if name == "unknown":
        assert "LlamaForCausalLM" in err and "0.6.0: " in err


def test_a_name_on_the_hub_is_read_with_a_token_by_name(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("hf-to-megatron", "org/model", "out", "--dry-run", "--backend", "sbatch")
    out, err = ask(*words)
    assert "--model=org/model" in out and "HF_TOKEN" not in out
    assert "export HF_TOKEN" in err
    monkeypatch.setenv("HF_TOKEN", "hf_verysecretvalue")
    out, err = ask(*words)
    assert "HF_TOKEN" in out and "verysecret" not in out + err and "export HF_TOKEN" not in err


def test_an_output_is_never_overwritten(ask: Ask, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    assert "exists and is not empty" in ask("hf-to-megatron", model, out, *LOCAL, expect=1)[1]
    assert (out / "notes").read_text() == "mine"
    assert "mkdir -p" in ask("hf-to-megatron", model, tmp_path / "no" / "out", *LOCAL, expect=2)[1]


def test_a_finished_output_is_said_so_until_its_input_changes(ask: Ask, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    done = {"model": str(model), "fingerprint": conversion("hf-to-megatron", str(model), out).fingerprint}
    (out / CONVERSION_RECORD).write_text(json.dumps(done))
    shown, err = ask("hf-to-megatron", model, out, "--json", *LOCAL)
    assert "already converted" in err and json.loads(shown)["status"] == "finished"
    (model / "model.safetensors").write_bytes(b"other weights")
    assert "contains another conversion" in ask("hf-to-megatron", model, out, *LOCAL, expect=1)[1]


def test_checkpoints_that_cannot_be_exported(ask: Ask, model: Path, tmp_path: Path) -> None:
    words = ("--model", model, "--dry-run", *LOCAL)
    (tmp_path / "none").mkdir()
    assert "is not a folder of checkpoints" in ask("megatron-to-hf", tmp_path / "none", "out", *words, expect=2)[1]
    place = checkpoint(tmp_path / "saved")
    assert "there are: 7" in ask("megatron-to-hf", place.parent, "out", *words, "--iteration", 9, expect=1)[1]
    assert "--model" in ask("megatron-to-hf", place.parent, "out", "--dry-run", *LOCAL, expect=2)[1]
    assert f"--checkpoint={place}" in ask("megatron-to-hf", place.parent, "out", *words)[0]
    (place / ".metadata").write_bytes(b"")
    assert "has no .metadata" in ask("megatron-to-hf", place.parent, "out", *words, expect=1)[1]
    other = checkpoint(tmp_path / "fsdp", "fsdp_dtensor")
    assert "has the format fsdp_dtensor" in ask("megatron-to-hf", other.parent, "out", *words, expect=1)[1]


@pytest.mark.parametrize("by", ["record", "run_config"])
def test_a_checkpoint_names_the_model_that_it_is_like(ask: Ask, model: Path, tmp_path: Path, by: str) -> None:
    place = checkpoint(tmp_path / "saved")
    if by == "record":
        (place.parent / CONVERSION_RECORD).write_text(json.dumps({"model": str(model)}))
    else:
        (place / "run_config.yaml").write_text(f"model:\n  hf_model_id: {model}\n")
    assert f"--model={model}" in ask("megatron-to-hf", place.parent, "out", "--dry-run", *LOCAL)[0]


@pytest.mark.parametrize("name", [CONVERSION_RECORD, "iter_0000007/metadata.json", "iter_0000007/run_config.yaml"])
@pytest.mark.parametrize("content", ["pipe", "nested"])
def test_files_of_a_foreign_checkpoint_neither_hang_nor_crash(
    ask: Ask, model: Path, tmp_path: Path, write: Callable[[str, str], str], name: str, content: str
) -> None:
    place = checkpoint(tmp_path / "saved")
    file = place.parent / name
    file.unlink(missing_ok=True)
    if content == "pipe":
        os.mkfifo(file)
    else:
        file.write_text("[" * 100_000)
    expected = 0 if not name.endswith("metadata.json") else 1  # it does not say that it is a torch_dist one
    ask("megatron-to-hf", place.parent, "out", "--model", model, "--dry-run", *LOCAL, expect=expected)
    assert ask("megatron-to-hf", place.parent, "out", "--dry-run", *LOCAL, expect=expected or 2)[0] == ""
    recipe = write("r.yaml", f"extends: tiny_cpu\ncheckpoint: {{load: {place.parent}}}\n")
    assert "converted-weights" not in {each.code for each in check(prepare(recipe), layers=("machine",)).problems}


@pytest.mark.parametrize(
    ("own", "option", "ranks", "says", "fix"),
    [
        ({}, "pp", 2, None, ""),
        ({}, "pp", 3, "32 layers are not a multiple of 3", "use 1, 2, 4, 8, 16, 32"),
        ({}, "tp", 8, None, ""),
        ({"num_attention_heads": 36}, "tp", 3, "8 groups of keys and values", "use 1, 2, 4"),
        ({"vocab_size": 32001}, "tp", 2, "32001 tokens of the vocabulary", "use 1"),
        ({"intermediate_size": 11007}, "tp", 2, "11007 channels of intermediate_size", "use 1"),
        ({}, "ep", 2, "it has no experts", "use 1"),
        ({"num_experts": 8}, "ep", 8, None, ""),
        ({"num_experts": 8}, "ep", 3, "8 experts are not a multiple of 3", "use 1, 2, 4, 8"),
        ({"num_experts": 8, "intermediate_size": 11007}, "tp", 2, None, ""),
        ({"num_hidden_layers": 1, "text_config": {"num_hidden_layers": 6}}, "pp", 4, "6 layers", "use 1, 2, 3, 6"),
        ({"architectures": ["SarvamMoEForCausalLM"]}, "pp", 3, None, ""),
    ],
)
def test_a_model_must_divide_as_asked(
    ask: Ask, model: Path, own: dict[str, Any], option: str, ranks: int, says: str | None, fix: str
) -> None:
    """Bridge's own assertions came after the job's wait in the queue."""
    sizes = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}
    (model / "config.json").write_text(json.dumps({**CONFIG, **sizes, "intermediate_size": 11008, **own}))
    words = ("hf-to-megatron", model, "out", f"--{option}", ranks, "--dry-run", *LOCAL)
    out, err = ask(*words, expect=0 if says is None else 1)
    if says is None:
        assert f"--{option}={ranks}" in out
    else:
        assert f"--{option} {ranks} does not divide" in err and says in err and f"fix: {fix}\n" in err


@pytest.mark.skipif(INSTALLED, reason="Megatron-Bridge is installed")
def test_a_job_without_bridge_fails_and_leaves_no_output(ask: Ask, model: Path, tmp_path: Path) -> None:
    shown, err = ask("hf-to-megatron", model, tmp_path / "out", "--wait", "--json", *LOCAL, expect=1)
    assert json.loads(shown)["status"] == "failed"
    assert "Megatron-Bridge is not installed" in err and "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_no_run_starts_from_weights_of_another_model(
    tmp_path: Path, write: Callable[[str, str], str], ask: Ask
) -> None:
    weights = tmp_path / "weights"
    checkpoint(weights)
    settings = {"rotary_base": 500000.0, "num_layers": 2, "layernorm_epsilon": 1e-5}
    (weights / CONVERSION_RECORD).write_text(json.dumps({"settings": settings}))
    recipe = write("r.yaml", f"extends: tiny_cpu\nmodel: {{rotary_base: 10000}}\ncheckpoint: {{load: {weights}}}\n")

    def found(*overrides: str) -> list[str]:
        result = check(prepare(recipe, overrides), layers=("machine",))
        return [problem.message for problem in result.problems if problem.code == "converted-weights"]

    assert any("no optimizer state to continue from" in message for message in found())
    told = found("megatron.finetune=true")
    assert len(told) == 1 and "rotary_base is 10000, but 500000.0" in told[0]
    same = ("megatron.finetune=true", "model.rotary_base=500000")
    assert found(*same) == []
    (told,) = found(*same, "model.norm_epsilon=0.001")
    assert "layernorm_epsilon is 0.001, but 1e-05" in told


def test_settings_are_compared_by_names_that_megatrons_arguments_have() -> None:
    """Under another name a setting of the run is never found, and never differs."""
    for name in _SETTINGS.values():
        assert load_schema("0.19").setting(name), name


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ("[1]", (), "states no list `architectures`"),
        ('{"a":', (), "cannot be read as JSON"),
        ('{"model_type": "llama"}', (), "states no list `architectures`"),
        ('{"architectures": "LlamaForCausalLM"}', (), "states no list `architectures`"),
        (json.dumps({**CONFIG, "hidden_size": "abc"}), (), "'hidden_size' of"),
        (json.dumps({**CONFIG, "num_hidden_layers": -1}), (), "must be a whole number above 0, not -1"),
        (json.dumps({**CONFIG, "num_attention_heads": 4}), ("--tp", "3"), "4 attention heads are not a multiple of 3"),
    ],
)
def test_a_config_that_no_model_can_be_built_from_is_refused(
    config: str, options: tuple[str, ...], words: str, ask: Ask, model: Path
) -> None:
    """The job would have failed with an exception of transformers or Megatron."""
    (model / "config.json").write_text(config)
    _, err = ask("hf-to-megatron", model, "out", "--dry-run", *LOCAL, *options, expect=1)
    assert words in err


def test_fp8_state_of_a_run_of_ones_own_is_trusted(ask: Ask, model: Path, tmp_path: Path) -> None:
    """Transformer Engine unpickles it in the job: by itself only for what the named run wrote."""
    run = tmp_path / "runs" / "llama-1"
    checkpoint(run / "ck")
    owner = {"run": "llama-1", "recipe": "ab", "created": "2026-11-24"}
    claim(run / "ck", owner, inherited=0)
    (run / "survive.json").write_text(json.dumps({"checkpoint": "ck", "iterations": 7, "owner": owner}))
    manifest = {"run_id": "llama-1", "name": "llama", "jobs": [], "recipe": {"checkpoint": {"dir": "ck"}}}
    (run / "manifest.json").write_text(json.dumps(manifest))
    words = (tmp_path / "out", "--model", model, "--gpu", "h100", "--dry-run", "--backend", "sbatch")
    allowed = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1"
    assert allowed in ask("megatron-to-hf", run, *words)[0]
    assert allowed not in ask("megatron-to-hf", run / "ck", *words)[0]
    (run / "ck" / "iter_0000007").chmod(0o777)
    assert allowed not in ask("megatron-to-hf", run, *words)[0]
    assert allowed in ask("megatron-to-hf", run, *words, "--set", "checkpoint.allow_pickle=true")[0]
