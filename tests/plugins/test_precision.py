"""A plugin adds a precision: a recipe file names it, and every part of the program knows it from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PLUGIN = """
from fp8launch.plugins import Plugin

PLUGIN = Plugin("acme", precisions={"acme_scaled": "acme.precision:SCALED"}, in_job=("acme.injob",))
"""
PRECISION = """
from fp8launch.hardware.quantization import QuantizationRecipe

SCALED = QuantizationRecipe(
    "acme_scaled", "fp8", ("hybrid",), ("CustomRecipe",), saved_bytes=0.78, weight_bytes=0.78,
    factory="acme.injob.quantizers.make", least_capability=(10, 3), least_te=(3, 1), least_cuda=(13, 4),
    feature_multiple=96, token_multiple=48, gather_is_proven=True,
)
"""
PROGRAM = """
import json, sys
from fp8launch.plugins.estimate.fit import run_estimate
from fp8launch.check.resolved_run import resolve_run
from fp8launch.check.rule import all_rules
from fp8launch.job.prepared import prepare
from fp8launch.report.read_run import precision_of
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
asked = {"fp8": "hybrid", "fp8_recipe": "custom", "fp8_quantizer_factory": "acme.injob.quantizers.make"}
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
    "others": precision_of({**asked, "fp8_quantizer_factory": "other.make"}),
    "warnings": list(judge(asked, [Evidence("probe", 0, probe)]).warnings),
    "wrong_format": wrong_format,
}))
"""
RECIPE = """
extends: [models/llama3_8b, data/mock]
name: scaled
model: {num_layers: 32, hidden_size: 6144, ffn_hidden_size: 12288, num_attention_heads: 48, num_query_groups: 12,
        kv_channels: 128, max_position_embeddings: 16384}
precision: {recipe: acme_scaled, format: hybrid, param_gather: true}
batch: {micro: 1, global: 8, sequence: 9216}
train: {iterations: 10, lr: 1.0e-4}
resources: {gpu: gb300, gpus_per_node: 8}
software: {megatron: "0.19", transformer_engine: "3.1", cuda: "13.4"}
megatron: {use_distributed_optimizer: true, rerun_mode: disabled}
"""


def test_a_plugin_adds_a_precision(home: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    package, metadata = site / "acme", site / "acme-1.0.dist-info"
    (package / "injob").mkdir(parents=True)
    metadata.mkdir()
    for name, text in (("__init__", ""), ("plugin", PLUGIN), ("precision", PRECISION), ("injob/__init__", "")):
        (package / f"{name}.py").write_text(text)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[fp8launch.plugins]\nacme = acme.plugin:PLUGIN\n")
    recipe = tmp_path / "scaled.yaml"
    recipe.write_text(RECIPE, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(site)}

    command = [sys.executable, "-c", PROGRAM, str(recipe)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    words = " ".join(found["argv"])
    assert "--fp8-format hybrid --fp8-recipe custom --fp8-quantizer-factory acme.injob.quantizers.make" in words
    assert "--fp8-param-gather" in words
    problems = {"acme_scaled-needs-blackwell", "acme_scaled-needs-cuda", "te-too-old", "fp8-dimension", "fp8-tokens"}
    assert not problems & set(found["good"])
    assert "acme_scaled-needs-blackwell" in found["b200"]
    assert {"acme_scaled-needs-cuda", "te-too-old"} <= set(found["old"])
    assert "fp8-dimension" in found["odd"]
    assert "fp8-tokens" in found["tokens"]
    assert found["bytes"] > 1.5
    assert (found["label"], found["others"]) == ("acme_scaled", "custom")
    assert found["warnings"] == ["acme_scaled is requested, but the modules ran MXFP8BlockScaling"]
    assert "needs `format: hybrid`, not e4m3" in found["wrong_format"]

    # Megatron's own parser and validation accept the arguments, and a listing of what recipes may say knows the name.
    check = [sys.executable, "-m", "fp8launch", "check", str(recipe), "--json"]
    done = subprocess.run(check, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert [p["code"] for p in json.loads(done.stdout)["problems"] if p["severity"] == "error"] == [], done.stdout
    env["FP8LAUNCH_PLUGINS"] = ""
    done = subprocess.run(check, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "acme_scaled" in done.stdout + done.stderr
