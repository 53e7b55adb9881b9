"""Launch scripts shaped like those of public projects, through the command: the recipe, and what is reported.

The inputs in `data/projects` are our own. Each has the shell constructs, and some of the flags, that were seen in:

| input | seen in |
|---|---|
| positional_sizes | Alibaba's Pai-Megatron-Patch |
| config_json_and_launcher | BigScience's BLOOM (Megatron-DeepSpeed) |
| deepspeed_tokens | Microsoft's Megatron-DeepSpeed, MoE examples |
| mpirun_in_pbs | LLM-jp, on ABCI |
| prefix_and_resume | Swiss AI's Megatron-LM |
| defaults_for_everything | AMD's Megatron-LM |
| options_of_its_own | Hygon's Megatron-LM |
| container_and_shell | NVIDIA's Nemotron and Mamba examples |
| underscores | EPFL's Megatron-LLM |
| yaml_and_a_starter | EleutherAI's GPT-NeoX |
| hpu_defaults | Intel's Habana examples of Megatron-DeepSpeed |
| npu_strings | Huawei's MindSpeed-LLM |
| placeholders | NVIDIA's Megatron-FSDP examples |
| one_long_command | tests of Megatron-Bridge |
| a_script_that_writes_one | launchers on CSCS's Alps |
| two_phases | academic ablations, a function for each run |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fp8launch import cli
from fp8launch.recipe.yaml_source import parse_yaml

PROJECTS = Path(__file__).with_name("data") / "projects"
BF16 = {"recipe": "bf16"}


@dataclass(frozen=True)
class Expected:
    """`recipe` is a part of the recipe, by dotted path; `reported` are pieces of what standard error says."""

    recipe: dict[str, Any] = field(default_factory=dict)
    reported: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    exit_code: int = 0


CASES = {
    "positional_sizes.sh": Expected(
        {
            "model.moe_layer_freq": "([0]*1+[1]*47)",
            "batch": {"sequence": 4096},
            "resources": {"gpus_per_node": 8},
            "launch.script": "pretrain_patched.py",
            "launch.arguments": ["--max-padding-length", "4096", "--patch-tokenizer-type", "Patch"],
        },
        (
            "`--num-layers LAYERS=...` is omitted",
            "`--packing-length ${PACK}` is omitted",
            "`expert_opts=... --num-experts --moe-router-topk` is omitted",
        ),
        ("import-other-command",),
    ),
    "config_json_and_launcher.slurm": Expected(
        {
            "model.num_layers": 70,
            "parallel": {"tp": 4, "pp": 12},
            "resources": {"nodes": 48, "gpus_per_node": 8, "time": "100:00:00", "cpus_per_task": 64},
            "megatron.rampup_batch_size": [192, 16, 9765625],
        },
        ("--zero-stage", "no choice 'alibi'", "`--kill-switch-path $SWITCH` is omitted", "--account"),
        ("import-other-command",),
    ),
    "deepspeed_tokens.sh": Expected(
        {"model.num_experts": 64, "resources": {"nodes": 8, "gpus_per_node": 8}, "precision": {"recipe": "fp16"}},
        ("--train-tokens", "--moe-expert-parallel-size", "--deepspeed"),
        ("import-other-command", "import-condition"),
    ),
    "mpirun_in_pbs.sh": Expected(
        {
            "batch": {"micro": 2, "global": 1024, "sequence": 8192},
            "resources": {"nodes": 4, "gpus_per_node": 8},
            "env": {"NCCL_DEBUG": "WARN"},
        },
        ("--use-mpi",),
        ("import-resources",),
    ),
    "prefix_and_resume.sbatch": Expected(
        {
            "model.num_layers": 32,
            "batch": {"micro": 1, "global": 128, "sequence": 8192},
            "resources": {"nodes": 16, "gpus_per_node": 4},
            "train": {"lr": 1e-4},
        },
        ("`COMMAND=... --mock-data` is omitted", "`COMMAND=... --profile` is omitted", "--xielu"),
        ("was not read",),
    ),
    "defaults_for_everything.sh": Expected(
        {
            "precision": {"recipe": "delayed", "format": "hybrid"},
            "parallel": {"tp": 2},
            "train": {"iterations": 12},
            "env": {"NVTE_CK_USES_BWD_V3": 1},
        },
        ("format-without-recipe", "GPU_MAX_HW_QUEUES"),
        ("is omitted:",),
    ),
    "options_of_its_own.sh": Expected(
        {"batch": {"micro": 1, "global": 256, "sequence": 4096}, "precision": BF16, "megatron.split": "949,50,1"},
        (
            "`--data-path data_path=...` is omitted",
            "`--rank $OMPI_COMM_WORLD_RANK` is omitted",
            "`APP=... --profile --profile-ranks` is omitted",
        ),
        ("no flag",),
    ),
    "container_and_shell.sh": Expected(
        {
            "model.hybrid_layer_pattern": "M-M-M*-",
            "container": {"image": "nvcr.io#nvidia/pytorch:25.09-py3", "mounts": ["/data:/data", "/home:/home"]},
            "resources": {"nodes": 4, "gpus_per_node": 8, "time": "4:00:00"},
            "launch.script": "pretrain_mamba.py",
        },
        ("-A, -p, --exclusive, --mem belong in a cluster profile", "whose path in the job is not known"),
    ),
    "underscores.sh": Expected(
        {
            "model.num_layers": 24,
            "model.hidden_size": 1024,
            "batch": {"sequence": 1024},
            "precision": {"recipe": "fp16"},
        },
        (
            "--num_layers, --hidden_size",
            "Megatron spells these flags with dashes",
            "`--save <Specify path>` is omitted",
        ),
    ),
    "yaml_and_a_starter.sh": Expected(reported=("nothing-to-import",), exit_code=2),
    "hpu_defaults.sh": Expected(
        {"parallel": {"tp": 4}, "batch": {"micro": 1, "global": 256, "sequence": 2048}, "resources.nodes": 1},
        ("`CMD=... --tensorboard-dir` is omitted", "--use_hpu"),
    ),
    "npu_strings.sh": Expected(
        {
            "model.max_position_embeddings": 32768,
            "resources": {"nodes": 2, "gpus_per_node": 8},
            "checkpoint": {"dir": "your", "interval": 100},
        },
        ("'model'", "--use-fused-rotary-pos-emb"),
        (),
        1,
    ),
    "placeholders.sbatch": Expected(
        {
            "precision": {"recipe": "blockwise", "format": "e4m3"},
            "megatron.data_parallel_sharding_strategy": "optim_grads_params",
        },
        ("--nodes your_own_number was not read", "--time your_own_time was not read"),
        ("error",),
    ),
    "one_long_command.sh": Expected(
        {
            "model.num_query_groups": 8,
            "data": {"kind": "mock", "tokenizer": {"type": "NullTokenizer"}},
            "checkpoint": {"load": "/ckpts/in"},
            "resources": {"gpus_per_node": 4},
            "env": {"CUDA_DEVICE_MAX_CONNECTIONS": 1},
        },
        ("CUDA_VISIBLE_DEVICES",),
        ("import-unresolved",),
    ),
    "a_script_that_writes_one.sh": Expected(reported=("nothing-to-import",), exit_code=2),
    "two_phases.sh": Expected(
        {
            "model.num_layers": 12,
            "batch": {"sequence": 1024},
            "train": {"iterations": 100},
            "checkpoint": {"dir": "/ckpt", "interval": 100},
            "resources": {"gpus_per_node": 4},
        },
        ("another training command was not imported",),
    ),
}


def at(recipe: dict[str, Any], path: str) -> Any:
    found: Any = recipe
    for key in path.split("."):
        found = found[key]
    return found


@pytest.mark.parametrize("name", CASES)
def test_the_recipe_and_what_is_reported(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    expected = CASES[name]
    status = cli.run(["import", str(PROJECTS / name)])
    out, err = capsys.readouterr()
    assert status == expected.exit_code, err
    recipe = parse_yaml(out, name).plain() if out else {}
    assert {path: at(recipe, path) for path in expected.recipe} == expected.recipe
    assert [piece for piece in expected.reported if piece not in err] == []
    assert [piece for piece in expected.absent if piece in err] == []


def test_every_input_has_its_expectation() -> None:
    assert {path.name for path in PROJECTS.iterdir()} == set(CASES)
