"""The engine accelerate: what its recipes start, and what they refuse before a job is queued."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from support import only, refused

from fp8launch.check.checker import check
from fp8launch.check.summary import summary
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import ANSWER_IS_NO
from fp8launch.job.build_job import plan
from fp8launch.job.prepared import prepare
from fp8launch.plugins.accelerate import engine
from fp8launch.plugins.accelerate.engine import READ
from fp8launch.rundir.run_dir import create_run_folder
from fp8launch.schedulers.slurm.batch_script import batch_script

PEER = "peers/zero_torchao"


def test_the_job_starts_accelerate_with_what_it_reads() -> None:
    prepared = prepare("peers/fsdp2_torchao_rowwise")
    words = prepared.args.argv
    assert words[-4:] == ("--sharding", "fsdp2", "--fp8-library", "torchao")
    assert words[words.index("--fp8-recipe") + 1] == "rowwise"
    assert "--swiglu" not in words and "--use-megatron-fsdp" not in words
    assert prepared.args.attributes["fp8_recipe"] == "rowwise"
    script = batch_script(plan(prepared, Cluster(), Path("/r"), check_paths=False))
    assert 'plugins/accelerate/injob/accelerate_train.py"' in script


def test_every_argument_is_one_that_the_program_reads() -> None:
    program = Path(engine.__file__).parent / "injob" / "accelerate_train.py"
    text = program.read_text()
    for flag in READ:
        spelled = flag.replace("_", "-")
        assert f'"{spelled}"' in text or f'"--{spelled}"' in text, flag


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_comparisons_know_how_it_is_sharded(sharding: str) -> None:
    args = prepare(PEER, [f"accelerate.sharding={sharding}"]).args
    assert args.recorded["sharding"] == sharding


RECOMPUTE = ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=1")
NO_BALANCING = ("moe_router_load_balancing_type=none", "moe_aux_loss_coeff=null")


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("llama3_2_3b", (), "--use-rope-scaling --rope-scaling-factor 32.0"),
        ("qwen3_4b", RECOMPUTE, "--qk-layernorm --recompute-granularity full"),
        ("qwen3_30b_a3b", NO_BALANCING, "--num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8"),
    ],
)
def test_models_of_the_pack_train_on_one_gpu(
    write: Callable[[str, str], str], model: str, settings: tuple[str, ...], words: str
) -> None:
    text = f"""\
        extends: [models/{model}, precision/tensorwise, hardware/h100]
        name: r
        engine: accelerate
        accelerate: {{sharding: fsdp2, fp8: torchao}}
        batch: {{micro: 1, global: 16, sequence: 4096}}
        train: {{iterations: 4, lr: 1.0e-4}}
        resources: {{gpus_per_node: 1}}
    """
    args = prepare(write("r.yaml", dedent(text)), [f"model.{each}" for each in settings]).args
    assert set(words.split()) <= set(args.argv)
    assert "--untie-embeddings-and-output-weights" in args.argv or model != "qwen3_30b_a3b"


def test_memory_and_speed_are_not_estimated() -> None:
    """Megatron's models of them would come with an accuracy that nobody has measured for Accelerate."""
    assert "memory  not estimated for this run" in summary(prepare(PEER))
    assert not check(prepare(PEER, ["batch.micro=8"]), layers=("memory",)).problems


@pytest.mark.needs_plugin("tune")
def test_tuning_predicts_nothing() -> None:
    from fp8launch.plugins.tune.candidates import Prediction, predict

    assert predict(prepare(PEER)) == Prediction()


def test_one_option_turns_it_to_bf16() -> None:
    args = prepare(PEER, ["precision.recipe=bf16"]).args
    assert not args.attributes.get("fp8") and "--fp8-library" not in args.argv


@pytest.mark.parametrize(
    ("settings", "code", "words", "exit_code"),
    [
        (["accelerate.fp8=msamp"], "msamp-abandoned", ["not maintained", "torchao", "studies/levels"], 2),
        (["accelerate.fp8=null"], "no-fp8-library", ["accelerate.fp8", "torchao"], 2),
        (["accelerate.fp8=transformer_engine"], "recipe-not-in-library", ["tensorwise", "accelerate.fp8=torchao"], 2),
        (["precision.recipe=blockwise"], "recipe-not-in-library", ["blockwise", "precision.recipe=tensorwise"], 2),
        (["accelerate.rowwise=true"], "format-not-in-library", ["rowwise", "precision.format=e4m3"], 2),
        (["precision.param_gather=true"], "no-fp8-gather", ["fsdp2"], 2),
        (["checkpoint.dir=ckpt"], "key-of-other-engine", ["checkpoint.dir", "saves nothing"], 2),
        (["parallel.fsdp=megatron"], "key-of-other-engine", ["accelerate.sharding"], 2),
        (["accelerate.sharding=null"], "no-sharding", ["zero2"], 2),
        (["parallel.tp=2"], "not-in-accelerate", ["tensor_model_parallel_size is 2", "use 1"], ANSWER_IS_NO),
        (["megatron.num_experts=8"], "not-in-accelerate", ["num_experts is 8"], ANSWER_IS_NO),
        (
            ["model.recompute_granularity=full"],
            "not-in-accelerate",
            ["zero2", "accelerate.sharding=fsdp2"],
            ANSWER_IS_NO,
        ),
        (["model.normalization=LayerNorm"], "not-in-accelerate", ["LayerNorm", "use RMSNorm"], ANSWER_IS_NO),
        (["launch.tensor_stats=5"], "no-such-evidence", ["tensor statistics"], 2),
        (["launch.script=/m/train.py"], "key-of-other-engine", ["launch.script"], 2),
        (["megatron_extra.fork=1"], "key-of-other-engine", ["megatron_extra"], 2),
    ],
)
def test_what_it_cannot_do_is_refused(settings: list[str], code: str, words: list[str], exit_code: int) -> None:
    problem = only(refused(prepare, PEER, settings, exit_code=exit_code))
    assert problem.code == code
    said = f"{problem.message} {problem.fix}"
    assert [word for word in words if word not in said] == []


def test_fp8_needs_the_gpu_that_has_it() -> None:
    from fp8launch.check.checker import check_all

    (result,) = check_all([prepare(PEER, ["resources.gpu=a100"])], layers=("schema", "rules"))
    assert "fp8-needs-newer-gpu" in [problem.code for problem in result.problems]


def test_its_keys_mean_the_engine(write: Callable[[str, str], str]) -> None:
    text = """\
        extends: [models/llama3_8b, precision/bf16, hardware/h200]
        name: r
        batch: {micro: 1, global: 8, sequence: 64}
        train: {iterations: 4, lr: 1.0e-4}
        accelerate: {sharding: zero1}
    """
    recipe = write("r.yaml", dedent(text))
    assert prepare(recipe).engine.name == "accelerate"


def test_the_job_finds_the_program_in_the_run_folder(tmp_path: Path) -> None:
    run = create_run_folder(tmp_path, "run", {}, {})
    code = run.path / "code"
    program = code / "fp8launch" / "plugins" / "accelerate" / "injob" / "accelerate_train.py"
    ask = f"from fp8launch.injob.rank import node; print(node.program({program.name!r}))"
    for command in (["-c", ask], [str(program), "--help"]):
        done = subprocess.run([sys.executable, *command], cwd=code, capture_output=True, text=True, check=True)
        assert str(program) in done.stdout or "--sharding" in done.stdout
