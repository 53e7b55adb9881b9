"""Engines: which one a recipe is for, what each starts in the job, and what its attempts start with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import only, refused

from fp8launch import plugin_registry
from fp8launch.cluster.profile import Cluster
from fp8launch.engines import by_name, names
from fp8launch.engines.base import Entry
from fp8launch.job.build_job import plan
from fp8launch.job.job import Job
from fp8launch.job.prepared import Prepared, prepare
from fp8launch.job.script import process_command
from fp8launch.job.shell_quoting import flag_lines
from fp8launch.megatron.arguments import words_of
from fp8launch.submit.grid import Point, point_key

Write = Callable[[str, str], str]


@pytest.fixture
def recipe(write: Write) -> Callable[[str], Prepared]:
    return lambda text: prepare(write("r.yaml", f"extends: tiny_cpu\nname: r\n{text}\n"))


def job(one: Prepared) -> Job:
    return plan(one, Cluster(), Path("/r"), check_paths=False)


@pytest.mark.parametrize("name", names())
def test_every_name_has_its_engine(name: str) -> None:
    engine = by_name(name)
    assert engine.name == name
    assert engine.description.log_dialect in ("megatron", *plugin_registry.offered("log_dialects"))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("", "megatron_lm"),
        ("engine: megatron_lm", "megatron_lm"),
        ("launch: {script: /m/pretrain_gpt.py}", "script"),
        ("engine: script\nlaunch: {script: /m/pretrain_gpt.py}", "script"),
    ],
)
def test_a_recipe_is_for_the_engine_that_it_states_or_means(
    text: str, name: str, recipe: Callable[[str], Prepared]
) -> None:
    assert recipe(text).engine.name == name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine: script", "needs `launch.script`"),
        ("engine: megatron_lm\nlaunch: {script: /m/pretrain_gpt.py}", "`launch.script` needs `engine: script`"),
        ("engine: megatron", "megatron_lm"),
        ("launch: {arguments: [--x]}", "`launch.arguments` are passed to `launch.script`"),
    ],
)
def test_an_engine_that_does_not_fit_is_refused(text: str, message: str, write: Write) -> None:
    problem = only(refused(prepare, write("r.yaml", f"name: r\n{text}\n")))
    assert message in f"{problem.message} {problem.fix}"


def test_each_engine_starts_its_own_program(recipe: Callable[[str], Prepared]) -> None:
    assert job(recipe("")).entry == Entry("worker.py")
    by_script = job(recipe("launch: {script: /m/pretrain_gpt.py}")).entry
    assert by_script == Entry("worker.py", ("--script", "/m/pretrain_gpt.py"), "/m/pretrain_gpt.py", "pretrain_gpt.py")


@pytest.mark.parametrize("mode", ["srun", "torchrun"])
def test_another_program_is_started_beside_the_worker(mode: str, recipe: Callable[[str], Prepared]) -> None:
    """An engine with its own program needs no change in the batch script."""
    one = job(recipe(f"launch: {{mode: {mode}}}"))
    other = Entry("other.py", ("--model", "m"))
    words = [getattr(word, "text", word) for word in process_command(Job(**{**vars(one), "entry": other}))[0]]
    start = ['"$python"', '"$code/rank/other.py"']
    if mode == "torchrun":
        start = ['"$python"', '"$code/rank/node.py"', "--nproc-per-node=1", "--worker=other.py"]
    assert words == [*start, "--model", "m", "--", '"${megatron_args[@]}"']


@pytest.mark.parametrize("script", ["", "launch: {script: /m/pretrain_gpt.py}"])
def test_a_resume_drops_what_prepares_a_first_start(script: str, recipe: Callable[[str], Prepared]) -> None:
    flags = "megatron: {finetune: true, no_load_optim: true}"
    one = recipe(f"checkpoint: {{dir: ckpt, interval: 5, load: /base}}\n{flags}\n{script}")
    attempts = one.engine.attempts(one.args)
    assert attempts is not None
    assert {argument.flag for argument in attempts.first_start} == {"load", "finetune", "no_load_optim"}
    assert words_of(attempts.resume) == ("--load", "ckpt")
    assert words_of(attempts.always)[-1] == "--exit-signal-handler"
    together = {*attempts.always[:-1], *attempts.first_start}
    assert together == set(one.args.arguments)


def test_a_run_that_saves_nothing_has_one_kind_of_attempt(recipe: Callable[[str], Prepared]) -> None:
    one = recipe("")
    assert one.engine.attempts(one.args) is None
    assert job(one).arguments == one.args.arguments


def test_a_script_gets_its_own_arguments_after_megatrons(recipe: Callable[[str], Prepared]) -> None:
    one = recipe("launch: {script: /m/train.py, arguments: [--my-flag, 3, --other=a b, -x, -1]}")
    own = ("--my-flag", "3", "--other=a b", "-x", "-1")
    assert one.args.argv == (*words_of(one.args.arguments), *own)
    assert flag_lines(one.args.own) == ["--my-flag 3", "'--other=a b' -x -1"]
    assert words_of(job(one).arguments) == one.args.argv
    assert one.args.own_values == {"my_flag": "3", "other": ["a b", "-x", "-1"]}


def test_own_arguments_are_there_on_a_resume_too(recipe: Callable[[str], Prepared]) -> None:
    one = recipe("checkpoint: {dir: c, interval: 1}\nlaunch: {script: /m/train.py, arguments: [--my-flag, 3]}")
    attempts = one.engine.attempts(one.args)
    assert attempts is not None and words_of(attempts.always)[-3:] == ("--my-flag", "3", "--exit-signal-handler")


def test_a_field_that_is_not_set_changes_no_key_of_a_study(recipe: Callable[[str], Prepared]) -> None:
    point = Point("r", None)
    plain = recipe("launch: {script: /m/train.py}")
    assert point_key(point, plain) != point_key(point, recipe("launch: {script: /m/train.py, arguments: [--x]}"))
    assert point_key(point, plain) == point_key(point, recipe("launch: {script: /m/train.py, arguments: []}"))
