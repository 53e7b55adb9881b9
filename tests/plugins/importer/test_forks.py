"""Launch scripts of forks of Megatron-LM, whose flags and YAML files differ from Megatron-LM's."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from fp8launch import cli, engines
from fp8launch.diagnostics import Problem, UserError
from fp8launch.megatron.flag_problems import unknown_flag
from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.importer import from_argv
from fp8launch.plugins.importer.from_argv import import_text
from fp8launch.plugins.importer.launch_script import ScriptStart, read_launch
from fp8launch.recipe.load import LoadedRecipe
from fp8launch.recipe.schema import recipe_class
from fp8launch.recipe.yaml_source import parse_yaml

SHAPE = "--num-layers 2 --hidden-size 256 --num-attention-heads 4"


def imported(text: str, name: str = "job.sh") -> tuple[dict[str, Any], list[str]]:
    recipe, problems = import_text(text, name, None)
    assert not [one for one in problems if one.severity == "error"], problems
    return parse_yaml(recipe, "recipe").plain(), [f"{one.message}" for one in problems]


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        ("--xielu --ademamix-beta3 0.9999", {"xielu": True, "ademamix_beta3": 0.9999}),
        ("--deepspeed_config=a.json", {"--deepspeed_config": "a.json"}),
        ("--fork-rate 1e-5 --fork-size 010", {"fork_rate": "1e-5", "fork_size": "010"}),
        ("--fork-list 1 2 three", {"fork_list": [1, 2, "three"]}),
        ("--fork-shift -3 --fork-text 'a b;c'", {"fork_shift": -3, "fork_text": "a b;c"}),
        ("--fork 1 --fork 2", {"fork": 2}),
    ],
)
def test_unknown_flags_are_kept(flags: str, extra: dict[str, Any]) -> None:
    recipe, messages = imported(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}")
    assert recipe["megatron_extra"] == extra
    assert any("megatron_extra" in message for message in messages)


@pytest.mark.parametrize(
    ("flags", "extra"),
    [
        ("--optimizer ademamix", {"optimizer": "ademamix"}),
        ("--tokenizer-type=PretrainedFromHF", {"tokenizer_type": "PretrainedFromHF"}),
        ("--optimizer adam --optimizer ademamix", {"optimizer": "ademamix"}),
        ("--optimizer ademamix --position-embedding-type alibi --xielu",
         {"xielu": True, "optimizer": "ademamix", "position_embedding_type": "alibi"}),
    ],
)  # fmt: skip
def test_values_that_only_a_fork_has_are_kept(flags: str, extra: dict[str, Any]) -> None:
    text, problems = import_text(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}", "job.sh", None)
    assert {one.severity for one in problems} == {"warning"}
    assert parse_yaml(text, "recipe").plain()["megatron_extra"] == extra
    tree = parse_yaml(text, "recipe")
    translated = engines.engine_of(loaded := LoadedRecipe(recipe_class().from_node(tree), tree, ())).translate(loaded)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in extra:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, action="store_true") if name == "xielu" else parser.add_argument(option)
    words = [word for one in (*translated.arguments, *translated.own) for word in one.words]
    assert vars(parser.parse_known_args(words)[0]) == extra


@pytest.mark.parametrize(
    "flags", ["--optimizer ademamix --optimizer adam", "--optimizer", "--fp8-format e3m4", "--lr fast"]
)
def test_other_wrong_values_stay_errors(flags: str) -> None:
    _, problems = import_text(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}", "job.sh", None)
    assert "error" in {one.severity for one in problems}


def test_the_fork_reads_the_same_values() -> None:
    flags = ["--rate", "1e-5", "--names", "a b", "c", "--shift=-x", "--on", "--empty", ""]
    quoted = "--rate 1e-5 --names 'a b' c --shift=-x --on --empty ''"
    text, _ = import_text(f"torchrun pretrain_gpt.py --bf16 {quoted} {SHAPE}", "job.sh", None)
    tree = parse_yaml(text, "recipe")
    loaded = LoadedRecipe(recipe_class().from_node(tree), tree, ())
    words = [word for one in engines.engine_of(loaded).translate(loaded).own for word in one.words]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--rate", "--shift", "--empty"):
        parser.add_argument(name)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--on", action="store_true")
    assert parser.parse_args(words) == parser.parse_args(flags)


YAML = """\
common: &common
  --seq-length: 4096
  --bf16: true
  --lr: 1
MODEL_ARGS:
  <<: *common
  --num-layers: 61
  --hidden-size: 256
  --num-attention-heads: 4
  --lr: 2
  --moe-layer-freq: "'([0]*1+[1]*60)'"
  --num-experts: 8
  --moe-permute-fusion: ${FUSE}
  --moe-grouped-gemm: ${GROUPED:-true}
  --sequence-parallel: false
  --fork-flag: false
"""


def test_yaml_of_the_model_zoo() -> None:
    recipe, messages = imported(YAML, "zoo.yaml")
    assert recipe["model"]["moe_layer_freq"] == "([0]*1+[1]*60)"
    assert recipe["train"]["lr"] == 2
    assert recipe["batch"] == {"sequence": 4096} and recipe["precision"] == {"recipe": "bf16"}
    assert recipe["megatron"] == {"moe_grouped_gemm": True}
    assert "parallel" not in recipe and "megatron_extra" not in recipe
    assert [message for message in messages if "FUSE" in message] == [
        "`--moe-permute-fusion=${FUSE}` is omitted: ${FUSE} of line 13 is not set in the script"
    ]


def test_merge_keys_only_in_foreign_files() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], x: 3}\n"
    assert parse_yaml(text, "f", unique=False).plain()["c"] == {"x": 3, "y": 1, "z": 2}
    with pytest.raises(UserError, match="merge keys"):
        parse_yaml(text, "f")


def test_escapes_of_ansi_c_quotes() -> None:
    recipe, _ = imported(f"torchrun pretrain_gpt.py --bf16 --save $'/\\x41' --fork $'\\x41b' {SHAPE}")
    assert recipe["checkpoint"]["dir"] == "/A"
    assert recipe["megatron_extra"] == {"fork": "Ab"}


def test_a_script_of_unknown_flags_takes_no_longer_than_a_usual_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six thousand of them took ten seconds, in which similar names were looked for."""
    looked_up = []

    def counted(name: str, *rest: Any) -> Problem:
        looked_up.append(name)
        return unknown_flag(name, *rest)

    monkeypatch.setattr(from_argv, "unknown_flag", counted)
    flags = " ".join(f"--flag-{number} {number}" for number in range(3000))
    recipe, messages = imported(f"torchrun pretrain_gpt.py --bf16 {flags} {SHAPE}")
    assert len(recipe["megatron_extra"]) == 3000
    assert len(looked_up) <= from_argv.MOST_PROBLEMS
    assert any(message.endswith("and 2900 more; they are passed on under megatron_extra") for message in messages)


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        # Each script prints its arguments with bash, in the same way as it starts training.
        ('run() { N=$1; shift; show --num-layers $N "$@"; }\nrun 2 --bf16', [], "--num-layers 2 --bf16"),
        ('show --num-layers ${1} --lr "$3"', ["7", "b", "1 2"], "--num-layers 7 --lr 1 2"),
        ('R=\nwhile [[ $# -gt 0 ]]; do case $1 in -n) N=$2; shift 2;; *) R="$R $1"; shift;; esac; done\n'
         "show --num-layers $N $R",
         ["-n", "9", "--bf16"], "--num-layers 9 --bf16"),
        ("set -- 3 4\nshow --num-layers $2 --hidden-size $#", ["1"], "--num-layers 4 --hidden-size 2"),
        ('if [ $1 = 7B ]; then N=32; elif [ $1 = 1B ]; then N=16; fi\nshow --num-layers $N', ["1B"], "--num-layers 16"),
        ('if [ -z $LAYERS ]; then LAYERS=5; fi\nshow --num-layers $LAYERS', [], "--num-layers 5"),
        ('A=\nfor N in 1 2 3; do A="$A $N"; done\nshow --num-layers 2 --data-path$A', [],
         "--num-layers 2 --data-path 1 2 3"),
        ("i=0\nuntil [ $i -ge 4 ]; do i=$((i+1)); done\nshow --num-layers $i", [], "--num-layers 4"),
        ('f() { show --num-layers $1; }\nf 3 "$@"\nM=$1', ["8"], "--num-layers 3"),
    ],
)  # fmt: skip
def test_arguments_are_those_of_bash(
    script: str, arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "show").write_text('#!/bin/sh\nprintf "%s\\n" "$*"\n')
    (tmp_path / "show").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(["bash", "-c", script, "job.sh", *arguments], capture_output=True, text=True, env=env)
    assert done.stdout == f"{expected}\n", done.stderr
    job = tmp_path / "job.sh"
    job.write_text(script.replace("show ", "torchrun pretrain_gpt.py --seq-length 8 "))
    launch = read_launch(job.read_text(), "job.sh", load_schema("0.19"), ScriptStart(arguments or None))
    assert " ".join(launch.argv) == f"--seq-length 8 {expected}"
    assert cli.run(["import", str(job), "--", *arguments]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


def test_variables_of_the_shell_that_starts_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.sh"
    job.write_text("torchrun pretrain_gpt.py --bf16 --num-layers $LAYERS --save ${SAVE:-/a}")
    assert cli.run(["import", str(job), "--env", "LAYERS=3", "--env", "SAVE=/b=c"]) == 0
    recipe = parse_yaml(capsys.readouterr().out, "recipe").plain()
    assert (recipe["model"]["num_layers"], recipe["checkpoint"]["dir"]) == (3, "/b=c")
    assert cli.run(["import", str(job), "--env", "LAYERS"]) == 2
    assert "write --env NAME=VALUE" in capsys.readouterr().err


def test_numbers_that_no_shell_reads_are_left_out() -> None:
    recipe, messages = imported(f"N=1_000\ntorchrun pretrain_gpt.py --bf16 --train-samples $((N*2)) {SHAPE}")
    assert "samples" not in recipe.get("train", {})
    assert any("arithmetic" in message for message in messages)


def test_values_of_an_unknown_flag_are_left_out_with_it() -> None:
    recipe, _ = imported(f"torchrun pretrain_gpt.py --bf16 {SHAPE} --lr 1 --data-$X 1 2 3")
    assert recipe["train"] == {"lr": 1.0}


def test_flags_of_branches_are_named() -> None:
    text = 'if [ $1 = a ]; then O="--bf16 --lr 1"; else O="--fp16"; fi\n'
    _, messages = imported(f"{text}torchrun pretrain_gpt.py $O {SHAPE}")
    assert any("`O=... --bf16 --lr --fp16` is omitted" in message for message in messages)
    # The program itself may depend on a condition.
    text = 'if [ $1 = a ]; then P="deepspeed a.py --load /a"; else P="deepspeed b.py --save /b"; fi\n'
    _, messages = imported(f'{text}eval "$P --bf16 {SHAPE}"')
    assert any("`P=... --load --save` is omitted" in message for message in messages)


def test_placeholders_of_several_words_are_omitted() -> None:
    flags = f"--bf16 --save $OUT/ckpt --load <PATH TO LOAD> {SHAPE}"
    recipe, messages = imported(f'OUT="<some dir>/out"\ntorchrun pretrain_gpt.py {flags} >log 2>&1')
    assert "checkpoint" not in recipe and recipe["model"]["num_layers"] == 2
    assert any("`--save <some dir>/out/ckpt` is omitted: <some dir> of line 1 is a placeholder" in m for m in messages)
    assert any("`--load <PATH TO LOAD>` is omitted" in message for message in messages)


def test_endless_loops_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = " ".join(map(str, range(60)))
    job = tmp_path / "job.sh"
    loops = "".join(f"for x{n} in {words}; do " for n in range(6)) + "((y++)); " + "done; " * 6
    job.write_text(f"{loops}\ntorchrun pretrain_gpt.py --bf16 {SHAPE}")
    assert cli.run(["import", str(job)]) == 2
    assert "takes more than" in capsys.readouterr().err
    job.write_text(f"while true; do sleep 1; done\nX=1\ntorchrun pretrain_gpt.py --bf16 {SHAPE}")
    assert cli.run(["import", str(job)]) == 0


@pytest.mark.parametrize("head", ["for a in {0..63}; do for b in {0..63}; do", "f() {"])
def test_text_that_is_read_again_and_again_is_limited(head: str) -> None:
    body = f"if false; then show {'x ' * 100_000}; fi;"
    rest = "done; done" if head.startswith("for") else "}\n" + "f\n" * 10_000
    began = time.monotonic()
    with pytest.raises(UserError, match="expands to more than"):
        import_text(f"{head} {body} {rest}\ntorchrun pretrain_gpt.py --bf16 {SHAPE}", "job.sh", None)
    assert time.monotonic() - began < 60


FORK = """\
def add_megatron_arguments(parser):
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--num-attention-heads", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--num-experts", type=int, nargs="+", default=[1])
    parser.add_argument("--optimizer", default="adam", choices=["adam", "ademamix"])
    parser.add_argument("--fork-rate", type=float)
    parser.add_argument("--fork-on", action="store_true")
"""


def test_a_fork_by_its_checkout_or_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    core = tmp_path / "my_fork" / "megatron" / "core"
    training = tmp_path / "my_fork" / "megatron" / "training"
    for folder in (core, training):
        folder.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 18\nPATCH = 1\n")
    (training / "arguments.py").write_text(FORK)
    job = tmp_path / "job.sh"
    own = "--fork-rate 0.1 --fork-on --optimizer ademamix --num-experts 4 8"
    job.write_text(f"torchrun pretrain_gpt.py --bf16 {own} {SHAPE}")
    outputs = []
    for name in (str(tmp_path / "my_fork"), "my-fork", "0.18+my-fork"):
        assert cli.run(["import", str(job), "--megatron", name]) == 0
        out, err = capsys.readouterr()
        assert "import-extra" not in err
        outputs.append(out)
    assert len(set(outputs)) == 1
    recipe = parse_yaml(outputs[0], "recipe").plain()
    assert recipe["software"] == {"megatron": "0.18+my-fork"}
    extra = {"fork_rate": 0.1, "fork_on": True, "optimizer": "ademamix", "num_experts": [4, 8]}
    assert recipe["megatron_extra"] == extra
    (tmp_path / "imported.yaml").write_text(outputs[0])
    cli.run(["check", str(tmp_path / "imported.yaml"), "--json"])
    codes = {one["code"] for one in json.loads(capsys.readouterr().out)["problems"]}
    assert not codes & {"extra-flag", "flag-unknown"}
    # A flag that the fork lacks as well is still reported, by its name.
    job.write_text(f"torchrun pretrain_gpt.py --bf16 --neither 1 {SHAPE}")
    assert cli.run(["import", str(job), "--megatron", "my-fork"]) == 0
    assert "fork my-fork of Megatron-Core 0.18 has no flag --neither" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["0.16", "0.19+none", "../x", "./none", "", "a b", "0.19+../x"])
def test_an_unknown_fork(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.sh"
    job.write_text(f"torchrun pretrain_gpt.py --bf16 {SHAPE}")
    assert cli.run(["import", str(job), "--megatron", name]) == 2
    assert "Traceback" not in capsys.readouterr().err
