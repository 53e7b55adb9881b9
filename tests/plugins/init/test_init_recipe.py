"""`init recipe` writes recipes that pass the check, with a layout that is estimated to fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8launch.cli import run

TINY = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 255,
}  # fmt: skip


@pytest.fixture
def here(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("model", "gpu", "nodes"),
    [("llama3_8b", "h100", 1), ("llama3_70b", "h100", 4), ("qwen3_30b_a3b", "h200", 2), ("llama3_8b", "a100", 2)],
)
def test_the_recipe_passes_the_check(
    here: Path, capsys: pytest.CaptureFixture[str], model: str, gpu: str, nodes: int
) -> None:
    asked = ["init", "recipe", model, "--gpu", gpu, "--nodes", str(nodes), "--image", "none", "--out", "r.yaml"]
    assert run(asked) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert run(["check", "./r.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"]
    text = (here / "r.yaml").read_text()
    assert yaml.safe_load(text)["resources"]["nodes"] == nodes
    assert ("moe/alltoall" in text) == ("a3b" in model)
    assert text.count("\n#") >= 6


def test_a_configuration_of_hugging_face_is_a_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "config.json").write_text(json.dumps(TINY))
    assert run(["init", "recipe", "config.json", "--gpu", "cpu", "--name", "mine"]) == 0, capsys.readouterr().err
    assert yaml.safe_load((here / "mine.yaml").read_text())["model"]["num_layers"] == 2
    capsys.readouterr()
    assert run(["render", "./mine.yaml", "--as", "args"]) == 0
    assert "--hidden-size" in capsys.readouterr().out


def test_nothing_is_replaced_unasked(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "r.yaml").write_text("mine\n")
    assert run(["init", "recipe", "tiny", "--gpu", "cpu", "--out", "r.yaml"]) == 2
    assert (here / "r.yaml").read_text() == "mine\n"
    assert "already exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["llama3_8B", "--gpu", "h100"], 2, "did you mean 'llama3_8b'?"),
        (["meta-llama/Llama-3.2-1B", "--gpu", "h100"], 2, "download the model's config.json"),
        (["llama3_8b"], 2, "pass --gpu"),
        (["llama3_8b", "--gpu", "h100", "--sequence", "9000"], 2, "8192"),
        (["llama3_70b", "--gpu", "h100"], 1, "use more nodes"),
        (["tiny", "--gpu", "cpu", "--data", "/nope/tokens"], 1, "/nope/tokens"),
    ],
)
def test_errors_say_what_to_do(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert run(["init", "recipe", *arguments]) == code
    assert words in capsys.readouterr().err


def test_a_larger_machine_needs_no_more_parallelism(here: Path) -> None:
    def parallel(gpu: str) -> dict[str, Any]:
        name = f"{gpu}.yaml"
        assert run(["init", "recipe", "llama3_8b", "--gpu", gpu, "--precision", "bf16", "--out", name]) == 0
        found: dict[str, Any] = yaml.safe_load((here / name).read_text())["parallel"]
        return found

    small, large = parallel("h100"), parallel("b300")
    assert small["tp"] * small["pp"] >= large["tp"] * large["pp"] == 1


def test_a_layout_sets_expert_tensor_parallelism_beside_tensor_parallelism(here: Path) -> None:
    asked = ["init", "recipe", "deepseek_v3", "--gpu", "h100", "--nodes", "32", "--image", "none", "--out", "r.yaml"]
    assert run(asked) == 0
    parallel = yaml.safe_load((here / "r.yaml").read_text())["parallel"]
    assert parallel["tp"] > 1 and parallel["etp"] == 1
