"""What comes with fp8launch, and what NVIDIA publishes for its own hardware, has no errors."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from published import listed_values, published_arguments
from sets import RULES, TESTS

from fp8launch.check.checker import check_all
from fp8launch.job.prepared import prepare
from fp8launch.megatron.schema import load_schema

PUBLISHED = published_arguments()
SHIPPED = sorted((TESTS.parent / "recipes").glob("*.yaml"))
# What Megatron-Bridge sets beside what it publishes, and Megatron-LM's flags need to be told: 61 layers in 16 stages;
# experts whole on each rank; the biases of GPT-OSS unfused; no average in the collectives of Megatron-FSDP.
COMPLETED: dict[str, dict[str, object]] = {
    "deepseek_v3_b200_fp8_mx": {
        "num_virtual_stages_per_pipeline_rank": None,
        "pipeline_model_parallel_layout": "Et*3|(t*4|)*14t*2mL",
    },
    "qwen3_235b_a22b_h100_fp8_cs": {"expert_tensor_parallel_size": 1},
    "gpt_oss_120b_h100_bf16": {"no_bias_dropout_fusion": True},
    "llama3_8b_h100_fp8_cs_fsdp": {"ddp_average_in_collective": None},
}


def published(path: Path, folder: Path) -> str:
    """A published set as a recipe for its own hardware: GPU and number from the file's name and first line."""
    text = path.read_text(encoding="utf-8")
    values: dict[str, object] = {**listed_values(path, load_schema("0.19")), **COMPLETED.get(path.stem, {})}
    gpu = next(gpu for gpu in ("h100", "h200", "b200") if f"_{gpu}_" in path.stem)
    found = re.search(r"on (\d+) ", text.partition("\n")[0])
    gpus = int(found[1]) if found else 8
    # As Megatron-Bridge launches them: one connection where Hopper splits tensors or contexts, many elsewhere.
    divided = any(values.get(f"{kind}_parallel_size", 1) != 1 for kind in ("tensor_model", "context"))
    one_connection = gpu[0] == "h" and divided and not values.get("use_megatron_fsdp")
    recipe = {
        "name": path.stem,
        "resources": {"gpu": gpu, "nodes": max(1, gpus // 8), "gpus_per_node": min(8, gpus), "time": "1-00:00:00"},
        "env": {"CUDA_DEVICE_MAX_CONNECTIONS": 1 if one_connection else 32},
        "software": {"megatron": "0.19", "transformer_engine": "2.20", "cuda": "13.0"},
        "megatron": {name: value for name, value in values.items() if value is not None},
    }
    file = folder / f"{path.stem}.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return str(file)


def test_published_sets_are_clean_on_their_own_hardware(tmp_path: Path) -> None:
    names = [path for path in PUBLISHED if path.stem != "common_base"]
    runs = [prepare(published(path, tmp_path)) for path in names]
    found = check_all(runs, layers=RULES)
    told = {path.stem: [str(p) for p in result.problems] for path, result in zip(names, found, strict=True)}
    assert {name: problems for name, problems in told.items() if problems} == {}
    assert len(told) > 20


def test_shipped_recipes_are_clean() -> None:
    found = check_all([prepare(str(path)) for path in SHIPPED], layers=RULES)
    told = {}
    for path, result in zip(SHIPPED, found, strict=True):
        # tests/plugins/advisories/test_pack_advisories.py has the known bugs of Megatron.
        told[path.stem] = [str(problem) for problem in result.problems if problem.kind != "advisory"]
    assert {name: problems for name, problems in told.items() if problems} == {}
