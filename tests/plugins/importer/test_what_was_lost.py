"""Launch scripts and files of which an import once lost something without a word, or that it could not read at all."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support import only, refused

from fp8launch.cli import run
from fp8launch.diagnostics import Problem
from fp8launch.job.prepared import prepare
from fp8launch.megatron.schema import load_schema, supported_versions
from fp8launch.plugins.importer.from_argv import import_text
from fp8launch.plugins.importer.launch_script import read_launch
from fp8launch.recipe.yaml_source import parse_yaml

SCHEMA = load_schema("0.19")
SHAPE = "--num-layers 2 --hidden-size 256 --num-attention-heads 4"


def imported(text: str, name: str = "job.sh", megatron: str | None = None) -> tuple[dict[str, Any], list[Problem]]:
    recipe, problems = import_text(text, name, megatron)
    return parse_yaml(recipe, "recipe").plain(), problems


def codes(problems: list[Problem]) -> list[str]:
    return [problem.code for problem in problems]


# --- what is started


@pytest.mark.parametrize(
    "start",
    [
        "torchrun --nproc-per-node 8 -m mypkg.train",
        "python -m mypkg.train",
        "python3.12 -u -m mypkg.train",
        "python -m torch.distributed.run --nproc-per-node 8 -m mypkg.train",
        "accelerate launch --num_processes 8 --module mypkg.train",
    ],
)
def test_a_module_is_an_error_and_all_its_flags_are_seen(start: str) -> None:
    _, problems = imported(f"{start} --my-flag 3 --model-provider vlm {SHAPE}")
    assert codes(problems) == ["import-module", "import-extra-flags"]
    assert [p.severity for p in problems] == ["error", "warning"]
    assert "mypkg.train" in problems[0].message and "--my-flag, --model-provider" in problems[1].message


def test_a_launchers_module_is_not_the_trainings() -> None:
    recipe, problems = imported(f"python -m torch.distributed.launch --nproc_per_node 4 pretrain_gpt.py {SHAPE} --bf16")
    assert recipe["resources"] == {"gpus_per_node": 4}
    assert codes(problems) == ["default-tokenizer"]


@pytest.mark.parametrize("script", ["/opt/train.py", "train.py", "$HOME_OF/train.py"])
def test_flags_of_a_script_of_ones_own_go_to_it(script: str) -> None:
    recipe, problems = imported(f"torchrun {script} --mine 3 {SHAPE} --also=x --data.path a b --bf16")
    own = ["--mine", "3", "--also=x", "--data.path", "a", "b"]
    assert recipe["launch"] == {"script": script if "$" not in script else "train.py", "arguments": own}
    assert "import-own-arguments" in codes(problems)


def test_an_unknown_flag_of_megatrons_own_script_is_a_forks() -> None:
    recipe, problems = imported(f"pretrain_bert.py --mine 3 {SHAPE}")
    assert recipe["megatron_extra"] == {"mine": 3}
    assert ("warning", "import-extra-flags") in [(p.severity, p.code) for p in problems]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (f"mytrainer --mine 3 {SHAPE}", ["--mine", "3"]),
        (f"srun -N 2 mytrainer --mine 3 {SHAPE}", ["--mine", "3"]),
        (f"torchrun --nproc-per-node 8 $SCRIPT --mine 3 {SHAPE}", ["--mine", "3"]),
        # Nobody knows where a launcher's own options end.
        (f"srun --label --nodes=2 {SHAPE}", []),
        (f"torchrun --standalone {SHAPE}", []),
    ],
)
def test_flags_before_the_first_known_one(command: str, flags: list[str]) -> None:
    argv = list(read_launch(command, "x", SCHEMA).argv)
    assert argv == [*flags, *SHAPE.split()]


@pytest.mark.parametrize(
    ("launcher", "resources"),
    [
        ("accelerate launch --num_processes 4 --num_machines 2", {"nodes": 2, "gpus_per_node": 2}),
        ("accelerate launch --num_processes=8", {"gpus_per_node": 8}),
        ("accelerate launch --multi_gpu --num-machines 4 --num-processes 32", {"nodes": 4, "gpus_per_node": 8}),
        ("deepspeed --num_nodes 2 --num_gpus 8", {"nodes": 2, "gpus_per_node": 8}),
    ],
)
def test_processes_of_other_launchers(launcher: str, resources: dict[str, int]) -> None:
    assert read_launch(f"{launcher} /a.py --bf16", "x", SCHEMA).sections["resources"] == resources


def test_processes_that_do_not_divide_are_reported() -> None:
    found = read_launch("accelerate launch --num_processes 5 --num_machines 2 /a.py --bf16", "x", SCHEMA)
    assert found.sections["resources"] == {"nodes": 2}
    assert "5 processes cannot be divided over 2 nodes" in found.problems[0].message


def test_braces_are_several_words() -> None:
    recipe, _ = imported("torchrun pretrain_gpt.py --bf16 --data-path {0.5,/a,0.5,/b}")
    assert recipe["data"]["blend"] == [0.5, "/a", 0.5, "/b"]


# --- what Megatron-LM's scripts fill in


@pytest.mark.parametrize(
    ("text", "tokenizer"),
    [
        ("torchrun pretrain_gpt.py --bf16 --vocab-file /v --merge-file /m", "GPT2BPETokenizer"),
        ("torchrun pretrain_gpt.py --bf16 --num-layers 2", "GPT2BPETokenizer"),
        ("--bf16 --vocab-file /v --merge-file /m", "GPT2BPETokenizer"),
        ("--bf16 --num-layers 2", None),
        ("torchrun /mine.py --bf16 --vocab-file /v", None),
        ("torchrun pretrain_gpt.py --bf16 --tokenizer-type NullTokenizer --vocab-size 8", "NullTokenizer"),
    ],
)
def test_the_default_tokenizer_of_pretrain_gpt_is_stated(text: str, tokenizer: str | None) -> None:
    recipe, problems = imported(text)
    stated = recipe.get("data", {}).get("tokenizer", {}).get("type") or recipe.get("megatron", {}).get("tokenizer_type")
    assert stated == tokenizer
    assert ("default-tokenizer" in codes(problems)) == (tokenizer == "GPT2BPETokenizer")


@pytest.mark.parametrize("version", supported_versions())
def test_fp8_without_a_recipe_is_delayed_in_every_version(version: str) -> None:
    recipe, problems = imported("--bf16 --fp8-format hybrid --num-layers 2", megatron=version)
    assert recipe["precision"] == {"recipe": "delayed", "format": "hybrid"}
    assert codes(problems) == ["format-without-recipe"]
    assert problems[0].severity == "warning"


# --- values


@pytest.mark.parametrize("words", ['"2 2"', "2 2", "2 '2'", '" 2  2 "'])
def test_several_numbers_in_one_word(words: str) -> None:
    recipe, problems = imported(f"--bf16 --hierarchical-context-parallel-sizes {words}")
    assert recipe["megatron"] == {"hierarchical_context_parallel_sizes": [2, 2]}
    assert problems == []


def test_several_choices_in_one_word() -> None:
    recipe, problems = imported('--bf16 --cuda-graph-modules "attn mlp"')
    assert (recipe["megatron"]["cuda_graph_modules"], problems) == (["attn", "mlp"], [])


def test_a_text_with_spaces_stays_one_word() -> None:
    recipe, _ = imported("--bf16 --wandb-project 'two words' --data-path '/with space/a'")
    assert recipe["megatron"]["wandb_project"] == "two words"
    assert recipe["data"]["blend"] == ["/with space/a"]


# --- files that only define arguments


def test_text_variables_alone_are_taken() -> None:
    text = """
    TP=${TP:-2}
    MODEL_OPTIONS=" \\
        --num-layers 4 --hidden-size $((128 * TP)) \\
        --num-attention-heads 8"
    NAME="a model"
    TRAINING="--lr 1e-4 --bf16"
    ALL="$MODEL_OPTIONS $TRAINING"
    HELP="use --lr"
    """
    recipe, problems = imported(text)
    assert recipe["model"] == {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 8}
    assert recipe["train"] == {"lr": 1e-4}
    assert [p.message for p in problems] == [
        "no training command was found; the variable ALL was taken as its arguments"
    ]


def test_variables_and_arrays_that_do_not_contain_each_other_are_added() -> None:
    recipe, problems = imported('A="--num-layers 4"\nB=(--lr 1e-4)\nC=(--num-layers 4)\nD=4')
    assert (recipe["model"], recipe["train"]) == ({"num_layers": 4}, {"lr": 1e-4})
    assert "the variables B, C were" in problems[0].message or "the variables A, B were" in problems[0].message


def test_what_a_variable_needs_from_elsewhere_is_left_out_and_reported() -> None:
    recipe, problems = imported('MODEL_ARGS="--num-layers 4 --load $CHECKPOINT --bf16"')
    assert (recipe["model"], recipe["precision"]) == ({"num_layers": 4}, {"recipe": "bf16"})
    assert "`--load $CHECKPOINT` is omitted" in problems[1].message


# --- YAML

TEST_CASE = """
# a comment first
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
  NVTE_FLASH_ATTN: "0"
  SKIP_THIS: yes
  NCCL_ALGO: ^NVLS
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512 # why
  --lr: 1.0e-5
  --weight-decay: 1e-2
  --bf16: true
  --swiglu: "true"
  --data-path: ${DATA_PATH}/text
  --split: 949,50,1
  --cuda-graph-modules: "[attn mlp]"
  --hierarchical-context-parallel-sizes: 2 2
  --moe-layer-freq: ([0]*1+[1]*3)
  --pipeline-model-parallel-layout: Et*3|(tt|)*2L
  --wandb-project: it's "quoted" \\ `x`
  --fp8-format: hybrid
TEST_TYPE: regular
MODEL_ARGS_2:
  --num-layers: 24
"""


def test_a_test_case_of_megatron_is_read() -> None:
    recipe, problems = imported(TEST_CASE, "model_config.yaml")
    assert recipe["env"] == {"CUDA_DEVICE_MAX_CONNECTIONS": 1, "NVTE_FLASH_ATTN": 0, "NCCL_ALGO": "^NVLS"}
    assert recipe["model"]["num_layers"] == 12 and recipe["model"]["swiglu"] is True
    assert recipe["train"] == {"lr": 1e-5}
    assert recipe["precision"] == {"recipe": "delayed", "format": "hybrid"}
    flags = recipe["megatron"] | recipe["model"]
    assert flags["cuda_graph_modules"] == ["attn", "mlp"]
    assert flags["hierarchical_context_parallel_sizes"] == [2, 2]
    assert flags["moe_layer_freq"] == "([0]*1+[1]*3)"
    assert flags["pipeline_model_parallel_layout"] == "Et*3|(tt|)*2L"
    assert flags["wandb_project"] == 'it\'s "quoted" \\ `x`'
    assert flags["split"] if "split" in flags else recipe["data"]["split"] == "949,50,1"
    messages = [f"{p.where}: {p.message}" for p in problems]
    line = TEST_CASE.splitlines().index("  --data-path: ${DATA_PATH}/text") + 1
    assert any(
        m.startswith(f"model_config.yaml:{line}: `--data-path ${{DATA_PATH}}/text` is omitted") for m in messages
    )
    assert any("MODEL_ARGS_2" in m for m in messages)
    assert {p.severity for p in problems} == {"warning"}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("work_group: a\nmodules:\n  pre_trainer:\n    framework: megatron\n    overrides: {lr: 1}\n", "Primus"),
        ("model:\n  _target_: megatron.bridge.models.Llama\ntrain: {train_iters: 1}\n", "Megatron-Bridge"),
        ("trainer: {devices: 8}\nexp_manager: {name: x}\nmodel: {num_layers: 2}\n", "NeMo"),
        ("defaults: [_self_]\nstages: [training]\ncluster_type: bcm\n", "NeMo-Framework-Launcher"),
        ("language_model: {num_layers: 2}\nmodel_parallel: {bf16: true}\n", "--yaml-cfg"),
        ("general: {workload: x}\nrun: {gpu: h100}\ncontainer: {}\n", "DGX Cloud"),
        ("extends: [models/llama3_8b]\nresources: {nodes: 2}\n", "already a recipe of fp8launch"),
        ("kind: Pod\nmetadata: {name: x}\n", "unknown format"),
        ("MODEL_ARGS:\n  trainer.max_steps: 10\n", "unknown format"),
    ],
)  # fmt: skip
def test_yaml_of_other_projects_is_named_with_what_to_do(text: str, what: str) -> None:
    problem = only(refused(import_text, text, "config.yaml", None))
    assert problem.code == "import-format" and what in problem.message
    assert problem.fix


def test_the_last_of_a_key_that_is_given_twice_counts_in_a_test_case() -> None:
    recipe, _ = imported("MODEL_ARGS:\n  --num-layers: 1\n  --lr: 0.1\n  --num-layers: 2\n", "model_config.yaml")
    assert recipe["model"] == {"num_layers": 2}


@pytest.mark.parametrize("text", ["a: [\n", "a: 1\n b: 2\n", "x: &a [*a]\n"])
def test_broken_yaml_is_said_to_be_broken(text: str) -> None:
    assert refused(import_text, text, "config.yaml", None)


# --- marks of what is not known never show


@pytest.mark.parametrize(
    "script",
    [
        'A=$(date)\nif [ -f x ]; then B=(--save "$A" --load "$A-1234567890123456789012345678901234567890"); fi\n'
        'pretrain_gpt.py --bf16 "${B[@]}"',
        'A=$(a)\neval "B=\\$(($A * 2))"\npretrain_gpt.py --num-layers $B --bf16',
        'A=$(a)\nbash -c "pretrain_gpt.py --num-layers ${A}x${A}${A}${A}${A}${A}${A}${A} --bf16 --lr \\${B[$A]}"',
        "N=$(x)\nsrun --nodes=$N --container-image=$N torchrun --nnodes $N $N/train.py --bf16 --mine $N",
        "export NCCL_A=$(x)$(y)\nM=$(z)\npython -m pkg.$M --bf16 --num-layers 1",
        'A=$(x)\nfor i in 1; do L+=" --lr $A$A$A$A$A$A$A$A$A"; done\npretrain_gpt.py --bf16 $L',
    ],
)
def test_no_internal_mark_shows(script: str) -> None:
    recipe, problems = import_text(script, "job.sh", None)
    shown = recipe + "".join(map(str, problems))
    assert "\ue000" not in shown and "\ue001" not in shown and "ue00" not in shown


# --- bounds


# A variable of half a megabyte.
DOUBLED = "x=aaaaaaaaaaaaaaaa\n" + "x=$x$x\n" * 15


@pytest.mark.parametrize(
    "text",
    [
        'echo "b$x"\n' * 15_000,
        'A+=" --lr $x"\n' * 10_000 + "pretrain_gpt.py --bf16 $A",
        "pretrain_gpt.py " + " ".join(f"--unknown-flag-{i} {i}" for i in range(9_000)),
        "pretrain_gpt.py --bf16 " + "$x " * 50_000,
        DOUBLED + 'echo "b$x"\n' * 15_000,
        DOUBLED + "".join(f"y{i}=$x\n" for i in range(15_000)),
        "".join(f"export A{i}=1\n" for i in range(9_000)) + "echo a\n" * 9_000,
        "[ " + "a -a " * 50_000 + "b ]\npretrain_gpt.py --bf16\n",
        "pretrain_gpt.py " + "--num-layers 2 " * 20_000,
    ],
    ids=[
        "echo",
        "append",
        "unknown-flags",
        "holes",
        "large-words",
        "large-variables",
        "exports",
        "tests",
        "repeated-flags",
    ],
)
def test_large_scripts_take_seconds(text: str) -> None:
    begun = time.process_time()
    try:
        _, problems = import_text(text, "job.sh", None)
    except Exception as exc:
        problems = list(getattr(exc, "problems", []))
        assert problems, exc
    assert time.process_time() - begun < 5
    assert len(problems) < 200


def test_an_endless_file_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "/dev/zero"]) == 2
    assert "larger than 1 MiB" in capsys.readouterr().err


def test_a_pipe_is_read_as_a_file_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = subprocess.Popen([sys.executable, "-c", f"open({str(pipe)!r}, 'w').write('--bf16 --num-layers 2')"])
    assert run(["import", str(pipe)]) == 0
    assert writer.wait(20) == 0
    assert "num_layers: 2" in capsys.readouterr().out


# --- what a script sets up before training


def test_setup_and_checkout_are_reported_also_inside_bash_c() -> None:
    text = f"""#!/bin/bash
module load cuda/12.4
source /opt/venv/bin/activate
srun bash -c '
  cd /home/me/Megatron-LM
  module load nccl
  . env.sh
  torchrun --nproc_per_node 8 pretrain_gpt.py {SHAPE}
'
echo done
"""
    _, problems = imported(text)
    setup, checkout = (problem for problem in problems if problem.code in ("import-setup", "import-checkout"))
    for line in ("module load cuda/12.4", "source /opt/venv/bin/activate", "module load nccl", ". env.sh"):
        assert f"`{line}`" in setup.message
    assert setup.where == "job.sh:2" and "echo" not in setup.message
    assert checkout.message.startswith("/home/me/Megatron-LM was omitted")
    assert "launch: {script: /home/me/Megatron-LM/pretrain_gpt.py}" in str(checkout.fix)


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "./pretrain_gpt.py"])
def test_a_script_without_setup_and_with_an_unknown_folder_has_nothing_to_report(script: str) -> None:
    _, problems = imported(f"python {script} {SHAPE}")
    assert not {"import-setup", "import-checkout"} & set(codes(problems))


def test_variables_that_env_sets() -> None:
    start = "env NCCL_DEBUG=INFO HF_TOKEN=$HF_TOKEN OMP_NUM_THREADS=2 torchrun --nproc-per-node 8"
    recipe, problems = imported(f"{start} pretrain_gpt.py {SHAPE}")
    assert recipe["env"] == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": 2}
    assert recipe["secrets"] == ["HF_TOKEN"]
    assert codes(problems) == ["default-tokenizer"]
    recipe, _ = imported(f"torchrun pretrain_gpt.py {SHAPE} --save NCCL_DEBUG=INFO")
    assert "env" not in recipe


@pytest.mark.parametrize("name", ["tiny_cpu", "llama70b_tensorwise_h100"])
def test_a_script_of_this_project_is_its_recipe_again(name: str) -> None:
    recipe, problems = imported((Path(__file__).parents[3] / "slurm" / f"{name}.sbatch").read_text())
    assert set(codes(problems)) <= {"import-unresolved", "import-env"}
    assert "launch" not in recipe
    values = prepare(name).args.values
    assert recipe["model"]["num_layers"] == values["num_layers"]
    assert recipe["batch"]["global"] == values["global_batch_size"]
    assert (recipe["train"]["iterations"], recipe["train"]["lr"]) == (values["train_iters"], values["lr"])
    assert recipe["env"]["CUDA_DEVICE_MAX_CONNECTIONS"] == 1
