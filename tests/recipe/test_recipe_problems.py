"""Every section refuses what does not belong, with the field, the value, what is allowed, and the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import only, refused

from fp8launch.recipe.load import load_recipe

Write = Callable[[str, str], str]


@pytest.mark.parametrize(
    ("text", "field", "says"),
    [
        ("name: [a]", "name", "text"),
        ("name: 'has space'", "name", "letters, digits"),
        ("name: '../up'", "name", "letters, digits"),
        ("name: ''", "name", "letters, digits"),
        (f"name: {'x' * 81}", "name", "at most 80"),
        ('name: "a\\n"', "name", "letters, digits"),
        ("description: 3", "description", "text"),
        ("model: [a]", "model", "a mapping"),
        ("model: {num_layers: {a: 1}}", "model.num_layers", "a list"),
        ("megatron: {lr: .inf}", "megatron.lr", "finite"),
        ("megatron: {data_path: [a, [b]]}", "megatron.data_path.1", "text"),
        ("precision: bf16", "precision", "a mapping"),
        ("precision: {recipe: off}", "precision.recipe", "'tensorwise'"),
        ("precision: {recipe: tensorwise, format: e5m2}", "precision.format", "'hybrid'"),
        ("precision: {recipe: bf16, param_gather: 1}", "precision.param_gather", "true or false"),
        ("precision: {recipe: fp16, loss_scale: 0}", "precision.loss_scale", "greater than 0"),
        ("precision: {recipe: bf16, amax_history: 0}", "precision.amax_history", "greater than 0"),
        ("precision: {recipe: bf16, amax_algo: mean}", "precision.amax_algo", "'most_recent'"),
        ("precision: {recipe: bf16, bf16_layers: 2}", "precision.bf16_layers", "a mapping"),
        ("precision: {recipe: bf16, bf16_layers: {start: -1}}", "precision.bf16_layers.start", "at least 0"),
        ("parallel: {tp: 0}", "parallel.tp", "greater than 0"),
        ("parallel: {pp: 2.0}", "parallel.pp", "whole number"),
        ("parallel: {cp: '2'}", "parallel.cp", "whole number"),
        ("parallel: {ep: true}", "parallel.ep", "whole number"),
        ("parallel: {sequence: 3}", "parallel.sequence", "true or false or 'auto'"),
        ("parallel: {fsdp: zero3}", "parallel.fsdp", "'torch_fsdp2'"),
        ("batch: {micro: none}", "batch.micro", "whole number"),
        ("batch: {scaling: medium}", "batch.scaling", "'strong'"),
        ("train: {iterations: 1.5}", "train.iterations", "whole number"),
        ("train: {lr: fast}", "train.lr", "a number"),
        ("train: {lr: -1}", "train.lr", "at least 0"),
        ("train: {lr: .nan}", "train.lr", "finite"),
        ("train: {warmup: -1}", "train.warmup", "at least 0"),
        ("optimizer: {exp_avg: int8}", "optimizer.exp_avg", "'fp8'"),
        ("optimizer: {grad_reduce: fp16}", "optimizer.grad_reduce", "'bf16'"),
        ("data: {kind: real}", "data.kind", "'mock'"),
        ("data: mock", "data", "a mapping"),
        ("data: {kind: mock, split: [99, 1, 0]}", "data.split", "text"),
        ("data: {kind: mock, tokenizer: gpt2}", "data.tokenizer", "a mapping"),
        ("checkpoint: {interval: 0}", "checkpoint.interval", "greater than 0"),
        ("checkpoint: {dir: 7}", "checkpoint.dir", "text"),
        ("resources: {nodes: 0}", "resources.nodes", "greater than 0"),
        ("resources: {gpus_per_node: eight}", "resources.gpus_per_node", "whole number"),
        ("resources: {gpu: h101}", "resources.gpu", "'h100'"),
        ("resources: {time: 1h}", "resources.time", "HH:MM:SS"),
        ("resources: {time: 1:2:3:4}", "resources.time", "HH:MM:SS"),
        ("resources: {time: ٣}", "resources.time", "HH:MM:SS"),
        (f"resources: {{time: '{10**400}'}}", "resources.time", "HH:MM:SS"),
        ("resources: {time: 1.5}", "resources.time", "text"),
        ("container: nemo", "container", "a mapping"),
        ("container: {mounts: /a}", "container.mounts", "a list"),
        ("container: {mounts: [/a, 7]}", "container.mounts.1", "text"),
        ("launch: {mode: mpirun}", "launch.mode", "'torchrun'"),
        ("software: {megatron: 0.19}", "software.megatron", "text (quote it)"),
        ("software: {megatron: newest}", "software.megatron", "a version in quotes"),
        ("env: [A]", "env", "a mapping"),
        ("env: {A: true}", "env.A", "text (quote it) or a number"),
        ("env: {A: [1]}", "env.A", "text (quote it) or a number"),
        ("env: {A-B: 1}", "env.A-B", "letters, digits and '_'"),
        ("env: {1A: 1}", "env.1A", "not starting with a digit"),
        ("env: {A=B: 1}", "env.A=B", "letters, digits and '_'"),
        ("secrets: [WANDB-KEY]", "secrets.0", "letters, digits and '_'"),
        ("secrets: {A: 1}", "secrets", "a list"),
        ("notes: none", "notes", "a list"),
    ],
)
def test_a_wrong_value_names_field_value_and_what_is_allowed(write: Write, text: str, field: str, says: str) -> None:
    file = write("r.yaml", f"# first line\n{text}\n")
    problem = only(refused(load_recipe, file))
    assert problem.code == "bad-value"
    assert problem.where == f"{file}:2"
    assert f"'{field}' must be " in problem.message
    assert says in problem.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("precision: {recipe: tensorwise}", "needs `format: e4m3 or hybrid`"),
        ("precision: {recipe: bf16, format: hybrid}", "does not take a `format`"),
        ("precision: {recipe: rowwise}", "a torchao recipe; Transformer Engine does not scale per row"),
        ("precision: {recipe: fp16, format: e4m3}", "does not take a `format`"),
        ("precision: {recipe: fp32, param_gather: true}", "fp32 does not take `param_gather`"),
        ("precision: {recipe: bf16, loss_scale: 128}", "does not take a `loss_scale`; fp16 does"),
        ("precision: {recipe: nvfp4, format: hybrid}", "needs `format: e2m1`"),
        ("precision: {recipe: mxfp8, format: e2m1}", "needs `format: e4m3 or hybrid`"),
        ("precision: {recipe: bf16, param_gather: true}", "does not take `param_gather`"),
        ("precision: {recipe: bf16, bf16_layers: {start: 1}}", "does not take"),
        ("data: {kind: indexed}", "needs `blend"),
        ("data: {kind: mock, blend: [/a]}", "kind mock does not take a blend"),
    ],
)
def test_fields_that_do_not_belong_together(write: Write, text: str, says: str) -> None:
    file = write("r.yaml", f"name: r\n{text}\n")
    problem = only(refused(load_recipe, file))
    assert says in problem.message
    assert problem.where == f"{file}:2"


@pytest.mark.parametrize(
    ("text", "unknown", "near"),
    [
        ("modle: {}", "modle", "model"),
        ("precison: {}", "precison", "precision"),
        ("Batch: {}", "Batch", "batch"),
        ("precision: {recipe: bf16, param-gather: true}", "precision.param-gather", "param_gather"),
        ("precision: {recipe: delayed, format: hybrid, bf16_layers: {begin: 1}}", "precision.bf16_layers.begin", None),
        ("parallel: {tpp: 1}", "parallel.tpp", "tp"),
        ("parallel: {data: 1}", "parallel.data", None),
        ("batch: {global_: 8}", "batch.global_", "global"),
        ("data: {kind: mock, tokenizer: {modle: a}}", "data.tokenizer.modle", "model"),
        ("resources: {gpus-per-node: 8}", "resources.gpus-per-node", "gpus_per_node"),
        ("resources: {qqq: 8}", "resources.qqq", None),
        ("launch: {scripts: a}", "launch.scripts", "script"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_or_all(
    write: Write, text: str, unknown: str, near: str | None
) -> None:
    problem = only(refused(load_recipe, write("r.yaml", f"name: r\n{text}\n")))
    assert (problem.code, problem.message) == ("unknown-key", f"unknown key '{unknown}'")
    assert problem.fix is not None
    assert problem.fix == f"did you mean '{near}'?" if near else problem.fix.startswith("valid keys: ")


def test_all_problems_come_at_once_each_with_its_line(write: Write) -> None:
    part = write("part.yaml", "parallel:\n  tp: none\n  xp: 1\n")
    file = write("r.yaml", "extends: part\nname: r\nmodle: {}\ntrain:\n  lr: x\nprecision: {}\nenv: {A: true}\n")
    problems = refused(load_recipe, file, ["resources.nodes=-1"])
    assert {(p.code, p.where) for p in problems} == {
        ("bad-value", f"{part}:2"),
        ("unknown-key", f"{part}:3"),
        ("unknown-key", f"{file}:3"),
        ("bad-value", f"{file}:5"),
        ("missing-key", f"{file}:6"),
        ("bad-value", f"{file}:7"),
        ("bad-value", "--set resources.nodes=-1"),
    }


def test_a_missing_key_is_named_in_full(write: Write) -> None:
    problem = only(refused(load_recipe, write("r.yaml", "name: r\nprecision: {param_gather: true}\n")))
    assert (problem.message, problem.fix) == ("'precision.recipe' is missing", "add 'recipe:'")


def test_a_long_value_is_cut_in_the_message(write: Write) -> None:
    problem = only(refused(load_recipe, write("r.yaml", f"name: r\nresources: {{gpu: {'x' * 10_000}}}\n")))
    assert len(problem.message) < 400


def test_true_is_told_as_it_was_written(write: Write) -> None:
    assert "not true" in only(refused(load_recipe, write("r.yaml", "name: r\nenv: {A: true}\n"))).message


def test_a_time_may_be_minutes(write: Write) -> None:
    for time in ("30", "90:00", "1-00", "1-12:30", "2-01:00:00", "01:00:00"):
        assert load_recipe(write("r.yaml", f"name: r\nresources: {{time: {time}}}\n")).recipe.resources.time == time
