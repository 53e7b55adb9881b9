"""`verify` names the known bugs of a finished run, by what its log and its manifest say of settings and versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import Made, write_run

from fp8launch.cli import run as command

ARGUMENTS = {
    "num_experts": 8,
    "moe_router_load_balancing_type": "global_aux_loss",
    "moe_aux_loss_coeff": 0.01,
    "rampup_batch_size": "[8, 8, 1000]",
    "transformer_impl": "transformer_engine",
    "expert_model_parallel_size": 8,
    "expert_tensor_parallel_size": 1,
}
END = "-------------------- end of arguments ---------------------"


def log(folder: Path, versions: dict[str, str], **arguments: object) -> Path:
    lines = [f"> {package} version ......... {version}" for package, version in versions.items()]
    made = Made(arguments={**ARGUMENTS, **arguments}).text()
    path = folder / "train.log"
    path.write_text(made.replace(END, "\n".join([END, *lines]), 1), encoding="utf-8")
    return path


def advisories(capsys: pytest.CaptureFixture[str], *names: object) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert command(["verify", *map(str, names), "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["advisories"]
    return found


@pytest.mark.parametrize(
    ("megatron", "expected"),
    [
        ("0.17.1", {"global-aux-dp"}),
        ("0.18.2", {"global-aux-dp", "rampup-ignored"}),
        ("0.19.2", {"global-aux-dp", "rampup-ignored"}),
        ("0.20.0", set()),
    ],
)
def test_a_log_says_which_release_ran(
    megatron: str, expected: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advisories(capsys, log(tmp_path, {"Megatron-Core": megatron}))
    assert {one["code"] for one in found} == expected
    assert all(one["kind"] == "advisory" and one["source"] and megatron in one["message"] for one in found)


def test_a_log_without_versions_has_no_advisories(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert advisories(capsys, log(tmp_path, {})) == []


def test_the_layout_is_that_of_the_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    split = {"tensor_model_parallel_size": 2, "moe_grouped_gemm": True, "expert_model_parallel_size": 4}
    versions = {"Megatron-Core": "0.18.2"}
    codes = {one["code"] for one in advisories(capsys, log(tmp_path, versions, **split))}
    assert "moe-tp-ep-norm" in codes
    # Without the mark of Transformer Engine 2.12, the experts are all in the norm.
    older = log(tmp_path, {**versions, "Transformer Engine": "2.12.0"}, **split)
    assert "moe-tp-ep-norm" not in {one["code"] for one in advisories(capsys, older)}


def test_the_probe_says_which_transformer_engine_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sinks = {"softmax_type": "learnable", "context_parallel_size": 2, "cp_comm_type": "['a2a']"}
    path = log(tmp_path, {}, **sinks)
    assert advisories(capsys, path) == []
    probe = {"v": 1, "rank": 0, "asked": {"fp8": None}, "software": {"transformer_engine": "2.20.2"}, "groups": []}
    totals = {"linears": 1, "fp8": 0, "explained": 1, "unexplained": 0, "weights": 1, "fp8_weights": 0}
    text = f"fp8launch-probe: {json.dumps({**probe, 'totals': totals})}"
    path.write_text(path.read_text(encoding="utf-8").replace(END, f"{END}\n{text}", 1), encoding="utf-8")
    assert [one["code"] for one in advisories(capsys, path)] == ["sinks-a2a-grad"]


def test_text_names_them_after_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = log(tmp_path, {"Megatron-Core": "0.18.2"})
    assert command(["verify", str(path)]) == 0
    text = capsys.readouterr().out
    assert text.index("not FP8") < text.index("warning: known bug in Megatron-Core 0.18.2: ")
    assert "    source: https://github.com/NVIDIA/Megatron-LM/issues/3672" in text
    assert all(len(line) <= 80 for line in text.splitlines() if "source:" not in line)


def test_a_run_has_the_versions_that_it_was_submitted_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    megatron = {"version": "0.18.0", "argv": []}
    arguments = {"rampup_batch_size": [8, 8, 1000]}
    folder = write_run(tmp_path / "run-1", Made(), megatron=megatron, arguments=arguments)
    assert [one["code"] for one in advisories(capsys, folder)] == ["rampup-ignored"]


def test_a_damaged_manifest_only_hides_what_it_does_not_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = {"megatron": {"version": ["0.18.0"], "argv": []}, "arguments": {"num_experts": "many", "lr": {}}}
    folder = write_run(tmp_path / "run-1", Made(), recipe={"container": {"image": 7}, "software": [1]}, **odd)
    assert advisories(capsys, folder) == []
