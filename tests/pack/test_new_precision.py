"""A new quantization recipe is one row of the table: every part of the program knows it from there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# MXFP6 does not exist in Megatron: the row is added before anything else is imported, and the choice that a new
# Megatron's flag schema would bring is added to the schema.
PROGRAM = """
import json, sys
from fp8launch.hardware import quantization

quantization.QUANTIZATION["mxfp6"] = quantization.QuantizationRecipe(
    "mxfp6", "fp8", ("e3m2",), ("MXFP6BlockScaling",), saved_bytes=0.78, weight_bytes=0.78,
    least_capability=(10, 3), least_te=(3, 1), least_cuda=(13, 4), feature_multiple=96, token_multiple=48,
    gather_flags=("reuse_grad_buf_for_mxfp8_param_ag",), gather_is_proven=True,
)
quantization.PRECISIONS = (*quantization.PRECISIONS, "mxfp6")
quantization.FORMATS = (*quantization.FORMATS, "e3m2")

from fp8launch.megatron.schema import _load
raw = _load("0.19")._raw
raw["fp8_recipe"]["choices"].append("mxfp6")
raw["fp8_format"]["choices"].append("e3m2")

from fp8launch.check.memory import run_estimate
from fp8launch.check.resolved_run import resolve_run
from fp8launch.check.rule import all_rules
from fp8launch.job.prepared import prepare
from fp8launch.report.run_data import precision_of
from fp8launch.report.verify import judge
from fp8launch.logs import Evidence

def run(*more):
    return resolve_run(prepare(sys.argv[1], more))

def codes(found):
    return sorted(p.code for rule in all_rules().values() for p in rule.problems(found))

def weights(found):
    return sum(term.bytes for term in run_estimate(found).terms if "weights" in term.name)

good = run()
probe = {"totals": {"linears": 1, "fp8": 1}, "groups": [{"ran_fp8": 1, "recipe": "MXFP8BlockScaling"}]}
asked = {"fp8": "e3m2", "fp8_recipe": "mxfp6"}
try:
    wrong_format = ""
    run("precision.format=e4m3")
except Exception as refused:
    wrong_format = str(refused)
print(json.dumps({
    "argv": list(good.args.argv),
    "good": codes(good),
    "b200": codes(run("resources.gpu=b200")),
    "old": codes(run('software.transformer_engine="3.0"', 'software.cuda="13.3"')),
    "odd": codes(run("model.ffn_hidden_size=14416")),
    "tokens": codes(run("batch.sequence=8200")),
    "bytes": weights(run("precision.param_gather=false")) / weights(run()),
    "label": precision_of(asked),
    "warnings": list(judge(asked, [Evidence("probe", 0, probe)]).warnings),
    "wrong_format": wrong_format,
}))
"""
RECIPE = """
extends: [models/llama3_8b, data/mock]
name: sixbits
model: {num_layers: 32, hidden_size: 6144, ffn_hidden_size: 12288, num_attention_heads: 48, num_query_groups: 12,
        kv_channels: 128}
precision: {recipe: mxfp6, format: e3m2, param_gather: true}
batch: {micro: 1, global: 8, sequence: 9216}
train: {iterations: 10, lr: 1.0e-4}
resources: {gpu: gb300, gpus_per_node: 8}
software: {megatron: "0.19", transformer_engine: "3.1", cuda: "13.4"}
megatron: {use_distributed_optimizer: true, rerun_mode: disabled}
"""


def test_a_precision_is_one_row(tmp_path: Path) -> None:
    recipe = tmp_path / "sixbits.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    command = [sys.executable, "-c", PROGRAM, str(recipe)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    words = " ".join(found["argv"])
    assert "--fp8-format e3m2 --fp8-recipe mxfp6 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag" in words
    assert "mxfp6-needs-blackwell" in found["b200"]
    assert {"mxfp6-needs-cuda", "te-too-old"} <= set(found["old"])
    assert "fp8-dimension" in found["odd"]
    assert "fp8-tokens" in found["tokens"]
    # What is wrong with the others is wrong with none of what they were made from.
    assert not {"mxfp6-needs-blackwell", "mxfp6-needs-cuda", "te-too-old", "fp8-dimension", "fp8-tokens"} & set(
        found["good"]
    )
    assert found["bytes"] > 1.5
    assert found["label"] == "mxfp6"
    assert found["warnings"] == ["mxfp6 is requested, but the modules ran MXFP8BlockScaling"]
    assert "needs `format: e3m2`, not e4m3" in found["wrong_format"]
