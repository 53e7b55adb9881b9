"""A recipe's sections become exactly the flags that they state, and what contradicts itself is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import only, refused

from fp8launch.diagnostics import ANSWER_IS_NO
from fp8launch.engines.base import EngineArguments
from fp8launch.engines.megatron_lm.engine import MegatronLM
from fp8launch.engines.megatron_lm.layout import layout
from fp8launch.megatron.schema import load_schema, supported_versions
from fp8launch.recipe.load import load_recipe

Write = Callable[[str, str], str]


translate = MegatronLM().translate


@pytest.fixture
def args(write: Write) -> Callable[..., EngineArguments]:
    """The arguments of a recipe with just this text."""
    return lambda text, *overrides: translate(load_recipe(write("r.yaml", f"name: r\n{text}\n"), overrides))


@pytest.fixture
def wrong(write: Write) -> Callable[..., tuple]:
    """The problems of a recipe with just this text, when it is translated."""
    return lambda text, *overrides: refused(
        translate, load_recipe(write("r.yaml", f"name: r\n{text}\n"), overrides), exit_code=ANSWER_IS_NO
    )


@pytest.mark.parametrize(
    ("text", "argv"),
    [
        ("model: {}", ""),
        ("model: {num_layers: 2, swiglu: true, norm_epsilon: 1.0e-5}", "--num-layers 2 --swiglu --norm-epsilon 1e-5"),
        ("model: {position_embedding_type: rope}", "--position-embedding-type rope"),
        ("batch: {micro: 1, global: 8}", "--micro-batch-size 1 --global-batch-size 8"),
        ("batch: {sequence: 64}", "--seq-length 64 --max-position-embeddings 64"),
        (
            "model: {max_position_embeddings: 128}\nbatch: {sequence: 64}",
            "--max-position-embeddings 128 --seq-length 64",
        ),
        (
            "train: {iterations: 5, lr: 3.0e-4, min_lr: 0, warmup: 2}",
            "--train-iters 5 --lr 0.0003 --min-lr 0.0 --lr-warmup-iters 2",
        ),
        ("precision: {recipe: bf16}", "--bf16"),
        (
            "precision: {recipe: tensorwise, format: hybrid}",
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise",
        ),
        (
            "precision: {recipe: delayed, format: e4m3, amax_history: 16, amax_algo: max}",
            "--bf16 --fp8-format e4m3 --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max",
        ),
        (
            "precision: {recipe: blockwise, format: e4m3, param_gather: true}",
            "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather",
        ),
        (
            "precision: {recipe: mxfp8, format: e4m3, param_gather: true}",
            "--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --reuse-grad-buf-for-mxfp8-param-ag",
        ),
        (
            "precision: {recipe: tensorwise, format: hybrid, bf16_layers: {start: 2, end: 0}}",
            "--bf16 --fp8-format hybrid --fp8-recipe tensorwise --first-last-layers-bf16"
            " --num-layers-at-start-in-bf16 2 --num-layers-at-end-in-bf16 0",
        ),
        ("precision: {recipe: fp16}", "--fp16"),
        ("precision: {recipe: fp16, loss_scale: 4096.0}", "--fp16 --loss-scale 4096.0"),
        ("precision: {recipe: fp32}", ""),
        ("precision: {recipe: nvfp4, format: e2m1}", "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"),
        (
            "parallel: {tp: 2, pp: 4, vp: 2, cp: 2, ep: 8, etp: 1}",
            "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
            " --context-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1",
        ),
        ("parallel: {tp: 1, vp: 1, sequence: auto}", "--tensor-model-parallel-size 1"),
        ("parallel: {tp: 2, sequence: auto}", "--tensor-model-parallel-size 2 --sequence-parallel"),
        ("parallel: {tp: 2, sequence: false}", "--tensor-model-parallel-size 2"),
        ("parallel: {tp: 2}", "--tensor-model-parallel-size 2"),
        ("parallel: {tp: 1, sequence: true}", "--tensor-model-parallel-size 1 --sequence-parallel"),
        ("parallel: {tp: 2, sequence: auto}\nresources: {gpu: cpu}", "--tensor-model-parallel-size 2"),
        ("parallel: {fsdp: none}", ""),
        (
            "parallel: {fsdp: megatron}",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --ckpt-format fsdp_dtensor",
        ),
        (
            "parallel: {fsdp: megatron_optim_grads}",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads --ckpt-format fsdp_dtensor",
        ),
        (
            "parallel: {fsdp: megatron_optim}",
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim --ckpt-format fsdp_dtensor",
        ),
        ("parallel: {fsdp: torch_fsdp2}", "--use-torch-fsdp2 --ckpt-format torch_dist"),
        ("optimizer: {grad_reduce: bf16}", "--grad-reduce-in-bf16"),
        ("optimizer: {grad_reduce: fp32}", "--accumulate-allreduce-grads-in-fp32"),
        (
            "optimizer: {exp_avg: fp8, exp_avg_sq: bf16, main_grads: bf16, main_params: fp16}",
            "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype bf16 --main-grads-dtype bf16"
            " --main-params-dtype fp16",
        ),
        ("data: {kind: mock}", "--mock-data --tokenizer-type NullTokenizer"),
        ("data: {kind: mock, split: '99,1,0'}", "--mock-data --tokenizer-type NullTokenizer --split 99,1,0"),
        (
            "data: {kind: indexed, blend: [0.3, /data/a, 0.7, /data/b], cache: /c, "
            "tokenizer: {type: HuggingFaceTokenizer, model: /m}}",
            "--data-path 0.3 /data/a 0.7 /data/b --tokenizer-type HuggingFaceTokenizer --tokenizer-model /m"
            " --data-cache-path /c",
        ),
        ("checkpoint: {dir: ck, interval: 10, load: /l}", "--save ck --save-interval 10 --load /l"),
        ("megatron: {use-distributed-optimizer: true, lr_decay_style: cosine}",
         "--use-distributed-optimizer --lr-decay-style cosine"),
        ("megatron: {adam_beta1: 0.9, log_interval: 1}", "--adam-beta1 0.9 --log-interval 1"),
    ],
)  # fmt: skip
def test_each_section_becomes_its_flags(args: Callable[..., EngineArguments], text: str, argv: str) -> None:
    assert " ".join(args(text).argv) == argv


def test_values_with_spaces_are_one_argument(args: Callable[..., EngineArguments]) -> None:
    assert args("megatron: {wandb_project: 'two words; $(id)'}").argv == ("--wandb-project", "two words; $(id)")


def test_a_value_that_looks_like_a_flag_is_joined_to_its_own(args: Callable[..., EngineArguments]) -> None:
    assert args("megatron: {wandb_project: --lr}").argv == ("--wandb-project=--lr",)


def test_null_drops_an_inherited_flag(write: Write) -> None:
    write("part.yaml", "megatron: {log_interval: 5, manual_gc: true}\nmodel: {num_layers: 2}\n")
    text = "extends: part\nmegatron: {manual_gc: null}\nmodel: {num_layers: null}\n"
    assert translate(load_recipe(write("r.yaml", text))).argv == ("--log-interval", "5")


def test_places_name_the_file_and_line_that_set_a_flag(write: Write) -> None:
    part = write("part.yaml", "\nmodel:\n  num_layers: 2\n")
    file = write("r.yaml", "extends: part\nname: r\nparallel: {tp: 2, sequence: auto}\n")
    places = translate(load_recipe(file, ["batch.micro=1"])).places
    assert places["num_layers"] == f"{part}:3"
    assert places["sequence_parallel"] == f"{file}:3"
    assert places["micro_batch_size"] == "--set batch.micro=1"


# --- contradictions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "megatron"),
    [
        ("batch: {micro: 1}", "micro_batch_size: 2"),
        ("batch: {micro: 1}", "micro-batch-size: 2"),
        ("batch: {sequence: 8}", "seq_length: 16"),
        ("parallel: {tp: 2}", "tensor_model_parallel_size: 4"),
        ("precision: {recipe: tensorwise, format: hybrid}", "fp8_recipe: delayed"),
        ("precision: {recipe: tensorwise, format: hybrid}", "fp8_format: e4m3"),
        ("train: {lr: 1.0e-4}", "lr: 1.0e-3"),
        ("model: {num_layers: 2}", "num_layers: 3"),
        ("data: {kind: mock}", "tokenizer_type: GPTSentencePieceTokenizer"),
        ("parallel: {fsdp: megatron}", "data_parallel_sharding_strategy: optim"),
        ("optimizer: {exp_avg: fp8}", "exp_avg_dtype: fp32"),
    ],
)
def test_a_flag_from_two_places_with_two_values_names_both(
    write: Write, wrong: Callable[..., tuple], section: str, megatron: str
) -> None:
    problem = only(wrong(f"{section}\nmegatron:\n  {megatron}"))
    assert problem.code == "flag-set-twice"
    assert str(problem.where).endswith("r.yaml:4")
    assert "r.yaml:2" in problem.message


def test_the_same_value_twice_is_fine(args: Callable[..., EngineArguments]) -> None:
    text = "batch: {micro: 1}\nprecision: {recipe: bf16}\nmegatron: {micro-batch-size: 1, bf16: true}"
    assert args(text).argv == ("--micro-batch-size", "1", "--bf16")


def test_two_spellings_of_one_flag_contradict_each_other(wrong: Callable[..., tuple]) -> None:
    problems = wrong("model: {no_bias_swiglu_fusion: true}\nmegatron: {bias_swiglu_fusion: true}")
    assert {p.code for p in problems} <= {"flag-set-twice", "flag-unknown"}


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        ("fp8_format: hybrid", "format-without-recipe"),
        ("fp8_recipe: delayed", "recipe-without-format"),
        ("fp4_format: e2m1", "format-without-recipe"),
        ("fp4_recipe: nvfp4", "recipe-without-format"),
    ],
)
def test_format_and_recipe_come_together(wrong: Callable[..., tuple], flags: str, code: str) -> None:
    problem = only(wrong(f"megatron:\n  {flags}"))
    assert (problem.code, str(problem.where).rpartition(":")[2]) == (code, "3")


@pytest.mark.parametrize(
    "text",
    [
        "precision: {recipe: tensorwise, format: hybrid}",
        "precision: {recipe: nvfp4, format: e2m1}",
        "megatron: {fp8_format: hybrid, fp8_recipe: delayed}",
        "megatron: {--fp8-format: hybrid, fp8-recipe: delayed}",
    ],
)
def test_fp8_on_a_cpu_is_an_error(wrong: Callable[..., tuple], text: str) -> None:
    assert only(wrong(f"resources: {{gpu: cpu}}\n{text}")).code == "fp8-on-cpu"


@pytest.mark.parametrize(
    ("flag", "code"),
    [
        ("num_layers: two", "flag-value"),
        ("num_layers: 2.5", "flag-value"),
        ("num_layers: [1, 2]", "flag-value"),
        ("swiglu: 1", "flag-value"),
        ("swiglu: false", "flag-value"),
        ("position_embedding_type: rotary", "flag-value"),
        ("lr: fast", "flag-value"),
        ("not_a_flag: 1", "flag-unknown"),
        ("num-layer: 1", "flag-unknown"),
    ],
)
def test_a_wrong_flag_is_found_at_its_line(wrong: Callable[..., tuple], flag: str, code: str) -> None:
    problem = only(wrong(f"megatron:\n  log_interval: 1\n  {flag}"))
    assert (problem.code, str(problem.where).rpartition(":")[2]) == (code, "4")


def test_all_wrong_flags_come_at_once(wrong: Callable[..., tuple]) -> None:
    problems = wrong("megatron: {num_layers: two, nothing_like_it: 1, fp8_format: hybrid}\nbatch: {micro: 1}")
    assert {p.code for p in problems} == {"flag-value", "flag-unknown", "format-without-recipe"}


def flag_of_one_version() -> tuple[str, str, list[str]]:
    """A bare flag that the newest Megatron has and an older one lacks: (flag, a version without it, those with it)."""
    *older, newest = supported_versions()
    for flag in load_schema(newest).flags():
        without = [version for version in older if load_schema(version).find(flag.name) is None]
        if without and not flag.takes_value and not flag.name.startswith("no_"):
            return flag.name, without[0], [v for v in supported_versions() if load_schema(v).find(flag.name)]
    raise AssertionError("every flag is in every version")


def test_a_flag_of_another_version_names_those_that_have_it(write: Write) -> None:
    flag, without, having = flag_of_one_version()
    text = f"name: r\nmegatron: {{{flag}: true}}\nsoftware: {{megatron: '%s'}}\n"
    problem = only(refused(translate, load_recipe(write("r.yaml", text % without)), exit_code=ANSWER_IS_NO))
    assert problem.code == "flag-unknown"
    assert all(version in problem.message for version in having)
    assert translate(load_recipe(write("r.yaml", text % having[-1]))).argv


def test_an_unsupported_megatron_names_the_supported_ones(write: Write) -> None:
    loaded = load_recipe(write("r.yaml", "name: r\nsoftware: {megatron: '0.12'}\n"))
    problem = only(refused(translate, loaded))
    assert all(version in problem.message for version in supported_versions())


@pytest.mark.parametrize("precision", ["bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_every_precision_of_the_pack_translates(precision: str) -> None:
    argv = translate(load_recipe("llama8b_fp8", [f"precision.recipe={precision}"])).argv
    assert "--bf16" in argv
    assert ("--fp8-recipe" in argv) == (precision not in ("bf16", "nvfp4"))
    assert ("--fp8-recipe" in argv) == ("--fp8-format" in argv)


# --- layout ---------------------------------------------------------------------------------------------------------


def laid_out(write: Write, text: str) -> object:
    loaded = load_recipe(write("r.yaml", f"name: r\n{text}\n"))
    return layout(translate(loaded), loaded)


def test_data_parallel_is_what_is_left(write: Write) -> None:
    found = laid_out(
        write,
        "parallel: {tp: 2, pp: 2, cp: 2}\nbatch: {micro: 2, global: 64}\nresources: {nodes: 4, gpus_per_node: 8}",
    )
    assert (found.dp, found.world, found.microbatches) == (4, 32, 8)  # type: ignore[attr-defined]


def test_without_a_global_batch_a_step_is_one_micro_batch(write: Write) -> None:
    found = laid_out(write, "batch: {micro: 2}\nresources: {gpus_per_node: 4}")
    assert (found.global_batch, found.microbatches) == (8, 1)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("parallel: {pp: 2, vp: 4}", 4),
        ("parallel: {pp: 2}\nmegatron: {pipeline_model_parallel_layout: 'Et|(t|)*6tL'}", 4),
        ("parallel: {pp: 2}\nmodel: {num_layers: 12}\nmegatron: {num_layers_per_virtual_pipeline_stage: 2}", 3),
        ("parallel: {pp: 2}", 1),
    ],
)
def test_virtual_stages_count_however_they_are_stated(write: Write, text: str, stages: int) -> None:
    assert laid_out(write, f"{text}\nresources: {{gpus_per_node: 2}}").vp == stages  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("text", "code", "line", "says"),
    [
        ("resources: {gpus_per_node: 8}\nparallel: {tp: 3}", "world-size", 3, "8 GPUs"),
        ("resources: {gpus_per_node: 2}\nparallel: {tp: 4}", "world-size", 3, "2 GPUs"),
        ("resources: {gpus_per_node: 8}\nmegatron:\n  pipeline_model_parallel_size: 16", "world-size", 4, "PP 16"),
        ("resources: {gpus_per_node: 8}\nbatch: {micro: 1, global: 12}", "batch-size", 3, "8"),
        ("resources: {gpus_per_node: 8}\nbatch: {micro: 2, global: 8}", "batch-size", 3, "16"),
        ("resources: {gpus_per_node: 8}\nmegatron: {global_batch_size: 9}", "batch-size", 3, "9"),
        ("megatron: {tensor_model_parallel_size: 0}", "size", 2, "0"),
        ("megatron:\n  micro_batch_size: -1", "size", 3, "-1"),
    ],
)
def test_what_does_not_divide(write: Write, text: str, code: str, line: int, says: str) -> None:
    loaded = load_recipe(write("r.yaml", f"name: r\n{text}\n"))
    problem = only(refused(layout, translate(loaded), loaded, exit_code=ANSWER_IS_NO))
    assert problem.code == code
    assert says in problem.message
    assert str(problem.where).endswith(f"r.yaml:{line}")
