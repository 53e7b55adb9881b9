"""Recipes of Megatron-Bridge and their twins of the pack, each as its own code builds it, beside what `diff` says.

`bridge_configurations.json.xz` has what Bridge builds (tools/bridge_configuration.py); where its source is on
PYTHONPATH, a test builds it anew. The twins are built here, by Megatron-LM.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fp8launch.cluster.profile import load_cluster
from fp8launch.job.prepared import prepare
from fp8launch.plugins.bridge.fields import attribute_of

TOOL = Path(__file__).parents[3] / "tools" / "bridge_configuration.py"
MODULE = runpy.run_path(str(TOOL))
MEGATRON, TWINS, RECORD = MODULE["MEGATRON"], MODULE["TWINS"], MODULE["OUT"]
BRIDGE = importlib.util.find_spec("megatron.bridge")
DEFAULT = "Megatron-Core's default"

# Fields that differ and that `diff` leaves out, and why.
WITHOUT_EFFECT = {
    "attention_backend": "unset and auto leave the choice to Transformer Engine",
    "barrier_with_L1_time": "timers: Megatron-LM's parser has it on",
    "data_parallel_sharding_strategy": "without FSDP nothing reads it",
    "embedding_init_method_std": "follows init_method_std, which is compared",
    "expert_tensor_parallel_num_weight_shards": "Megatron-LM fills in the size of the group",
    "inference_sampling_seed": "inference",
    "megatron_fsdp_use_decoupled_grad": "without FSDP nothing reads it",
    "muon_momentum": "another optimizer",
    "num_layers_at_end_in_bf16": "without first_last_layers_bf16 nothing reads it",
    "num_layers_at_start_in_bf16": "without first_last_layers_bf16 nothing reads it",
    "offload_modules": "without fine-grained offload nothing reads it",
    "optimizer_offload_fraction": "without optimizer_cpu_offload nothing reads it",
    "persist_layer_norm": "Transformer Engine's norms do not read it",
    "rotary_base": "Megatron-LM gives it to the model, not to the configuration",
    "rotary_scaling_factor": "Megatron-LM gives it to the model, not to the configuration",
    "tensor_parallel_num_weight_shards": "Megatron-LM fills in the size of the group",
    "te_rng_tracker": "Megatron-LM sets the tracker up from its argument, which is compared",
    "use_cpu_initialization": "unset and off are the same",
    "wgrad_deferral_limit": "without defer_embedding_wgrad_compute nothing reads it",
}
WITHOUT_EFFECT_HERE: Mapping[str, Mapping[str, str]] = {
    "llama8b_fp8": {
        "batch_p2p_comm": "no pipeline",
        "cp_comm_type": "no context parallelism",
        "delay_wgrad_compute": "unset and off are the same",
    },
    "llama405b_tensorwise_h100": {
        "cp_comm_type": "unset is p2p",
        "delay_wgrad_compute": "unset and off are the same",
    },
    "qwen3_30b_a3b_mxfp8_gb200": {"batch_p2p_comm": "no pipeline", "cp_comm_type": "no context parallelism"},
    "deepseek_v3_mxfp8_gb300": {
        "cp_comm_type": "no context parallelism",
        "deallocate_pipeline_outputs": "Megatron-LM always does; Bridge does not for this model, and there is no flag",
        "kv_channels": "latent attention has sizes of its own",
        "moe_router_pre_softmax": "the scores are sigmoids",
    },
    "gpt_oss_120b_mxfp8_gb200": {
        "add_qkv_bias": "all linear layers have biases",
        "batch_p2p_comm": "no pipeline",
        "moe_aux_loss_coeff": "this model's router has no auxiliary loss",
    },
}


@pytest.fixture(scope="module")
def theirs() -> Any:
    return json.loads(lzma.decompress(RECORD.read_bytes()))


@pytest.fixture(scope="module")
def ours() -> Any:
    return built()


def built(*checkout: str) -> Any:
    # The tool's packages are this environment's, and those that PYTHONPATH adds.
    command = [sys.executable, str(TOOL), *checkout]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ}, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def unequal(bridge: Mapping[str, Any], pack: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The fields that differ, by the attribute that `diff` shows them under."""
    for section in ("model", "ddp", "optimizer"):
        a, b = bridge[section], pack[section]
        for field in sorted(a.keys() | b.keys()):
            if a.get(field, DEFAULT) != b.get(field, DEFAULT):
                name = attribute_of(f"{section}.{field}")
                assert name is not None
                yield name, a.get(field, DEFAULT), b.get(field, DEFAULT)


@pytest.mark.needs_plugin("diff")
@pytest.mark.parametrize("name", TWINS)
def test_diff_says_what_differs_between_the_built_configurations(name: str, theirs: Any, ours: Any) -> None:
    from fp8launch.plugins.diff.differences import differences

    twin = TWINS[name]
    found = differences(prepare(f"bridge:{name}"), prepare(twin, MEGATRON), load_cluster(None))
    said = {one.name for one in found if one.part == "arguments"}
    real = {attribute: (a, b) for attribute, a, b in unequal(theirs[name], ours[twin])}
    unsaid = real.keys() - said
    stated = {*WITHOUT_EFFECT, *WITHOUT_EFFECT_HERE[twin]}
    assert unsaid <= stated, {attribute: real[attribute] for attribute in unsaid - stated}
    assert WITHOUT_EFFECT_HERE[twin].keys() <= unsaid, "no longer different, or compared by now"
    assert said <= real.keys(), "the built configurations agree"
    assert len(real) > len(unsaid)


def test_every_reason_is_needed(theirs: Any, ours: Any) -> None:
    real = {attribute for name, twin in TWINS.items() for attribute, _, _ in unequal(theirs[name], ours[twin])}
    assert WITHOUT_EFFECT.keys() <= real


def test_both_compute_the_same_model_in_the_same_precision(theirs: Any, ours: Any) -> None:
    """What must be the same in twins is so in what was built."""
    sizes = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_moe_experts",
        "gated_linear_unit",
        "fp8",
        "fp8_recipe",
    )
    layout = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
    for name, twin in TWINS.items():
        for field in (*sizes, *layout, "virtual_pipeline_model_parallel_size", "context_parallel_size"):
            assert theirs[name]["model"].get(field) == ours[twin]["model"].get(field), (name, field)


@pytest.mark.skipif(BRIDGE is None, reason="runs in .cache/bridge (test_with_bridge.py)")
def test_the_record_is_what_bridge_builds(theirs: Any) -> None:
    assert BRIDGE is not None and BRIDGE.origin is not None
    assert built(str(Path(BRIDGE.origin).parents[3])) == theirs
