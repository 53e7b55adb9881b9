"""Options of Transformer Engine that only environment variables reach."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8launch.check.checker import check
from fp8launch.job.prepared import prepare
from fp8launch.plugins.validators.te_options import OPTIONS

CODES = {"te-option", "te-option-ignored", "four-over-six"}
B200 = "hardware/b200"


def codes(folder: Path, precision: str, te: str, env: str, more: str = "") -> set[str]:
    recipe = folder / "run.yaml"
    recipe.write_text(
        f"extends: [models/llama3_8b, parts/pretrain, parts/benchmark, precision/{precision}, {B200}]\n"
        "batch: {micro: 1, global: 128, sequence: 4096}\nparallel: {tp: 1}\n"
        f'software: {{megatron: "0.19", transformer_engine: "{te}"}}\nenv: {{{env}}}\n{more}'
    )
    return {one.code for one in check(prepare(str(recipe)), layers=("schema", "rules")).problems} & CODES


@pytest.mark.parametrize(
    ("precision", "te", "env", "found"),
    [
        ("tensorwise", "2.20", "NVTE_BACKWARD_OVERRIDE: high_precision", set()),
        ("mxfp8", "2.16", "NVTE_BACKWARD_OVERRIDE: dequantized", set()),
        ("mxfp8", "2.20", "NVTE_BACKWARD_OVERRIDE: bf16", {"te-option"}),
        ("delayed", "2.20", "NVTE_BACKWARD_OVERRIDE: dequantized", {"te-option"}),
        ("mxfp8", "2.14", "NVTE_BACKWARD_OVERRIDE: dequantized", {"te-option-ignored"}),
        ("bf16", "2.20", "NVTE_BACKWARD_OVERRIDE: dequantized", {"te-option-ignored"}),
        ("nvfp4", "2.20", "NVTE_NVFP4_ROW_SCALED_ACTIVATION: 1", set()),
        ("mxfp8", "2.20", "NVTE_NVFP4_ROW_SCALED_ACTIVATION: 1", {"te-option-ignored"}),
        ("mxfp8", "2.20", "NVTE_NVFP4_ROW_SCALED_ACTIVATION: 0", set()),
        ("nvfp4", "2.20", "NVTE_NVFP4_4OVER6: weights", {"four-over-six"}),
        ("nvfp4", "2.20", "NVTE_NVFP4_4OVER6: none", set()),
        ("nvfp4", "2.20", "NVTE_NVFP4_4OVER6: all", {"four-over-six", "te-option"}),
        ("nvfp4", "2.20", "NVTE_NVFP4_4OVER6: all, NVTE_NVFP4_DISABLE_RHT: 1", {"four-over-six"}),
        ("nvfp4", "2.16", "NVTE_NVFP4_4OVER6: weights", {"te-option-ignored"}),
        ("nvfp4", "2.20", "NVTE_NVFP4_4OVER6_ERR_MODE: mse", set()),
        ("nvfp4", "2.20", "NVTE_NVFP4_4OVER6_ERR_MODE: mean", {"te-option"}),
    ],
)
def test_what_is_reported(precision: str, te: str, env: str, found: set[str], tmp_path: Path) -> None:
    assert codes(tmp_path, precision, te, env) == found


def test_no_warning_after_pretraining(tmp_path: Path) -> None:
    more = "megatron: {finetune: true}\n"
    assert codes(tmp_path, "nvfp4", "2.20", "NVTE_NVFP4_4OVER6: weights", more) == set()


@pytest.mark.needs_plugin("diff")
@pytest.mark.parametrize("name", OPTIONS)
def test_differences_are_numerics(name: str) -> None:
    from fp8launch.plugins.diff.differences import _of_variable

    assert _of_variable(name) == "numerics"
