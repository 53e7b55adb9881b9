"""Phases of a recipe: what is laid on what, how long each is, and what is wrong with one is told by name and line."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import only, refused

from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import Phase, prepare, resolved_yaml
from fp8launch.recipe.sections import Phase as Section
from fp8launch.submit.grid import Point, point_key

SAVED = "checkpoint: {dir: ckpt, interval: 10}\n"
THREE = """
train: {iterations: 30}
phases:
  warmup: {iterations: 10}
  body: {batch: {micro: 1}, megatron: {log_params_norm: true}, env: {LEVEL: 3.10}}
  cooldown: {iterations: 10}
"""
FP8 = """
extends: [llama8b_bf16]
name: fp8
checkpoint: {dir: ckpt, interval: 10}
train: {iterations: 30}
phases:
  warmup: {iterations: 10}
  body: {precision: {recipe: delayed}}
"""


@pytest.fixture
def phases(write: Callable[[str, str], str]) -> Callable[..., tuple[Phase, ...]]:
    def load(text: str, *overrides: str) -> tuple[Phase, ...]:
        head = "" if "extends" in text else "extends: [tiny_cpu]\nname: r\n" + SAVED
        return prepare(write("r.yaml", head + text), overrides).phases

    return load


def spans(found: tuple[Phase, ...]) -> list[tuple[str, int, int]]:
    return [(p.name, p.begin, p.end) for p in found]


def test_a_recipe_without_phases_has_none(phases: Callable[..., tuple[Phase, ...]]) -> None:
    assert phases("") == phases(THREE, "phases=null") == ()


def test_one_phase_gets_the_rest(phases: Callable[..., tuple[Phase, ...]]) -> None:
    found = phases(THREE)
    assert spans(found) == [("warmup", 0, 10), ("body", 10, 20), ("cooldown", 20, 30)]
    assert spans(phases(THREE, "train.iterations=100"))[1] == ("body", 10, 90)


def test_without_a_total_it_is_their_sum(phases: Callable[..., tuple[Phase, ...]]) -> None:
    text = "train: {iterations: null}\nphases: {a: {iterations: 3}, b: {iterations: 4}}\n"
    found = phases(text)
    assert spans(found) == [("a", 0, 3), ("b", 3, 7)]
    assert [p.args.values["train_iters"] for p in found] == [7, 7]


def test_every_phase_is_told_the_whole_length_and_its_own_end(phases: Callable[..., tuple[Phase, ...]]) -> None:
    found = phases(THREE)
    assert [p.args.values["train_iters"] for p in found] == [30, 30, 30]
    # Megatron leaves at multiples: only the phase's own end may be one within it.
    assert [p.args.values.get("exit_interval") for p in found] == [10, 20, None]
    for phase in found[:-1]:
        multiples = [i for i in range(phase.begin + 1, phase.end + 1) if i % phase.end == 0]
        assert multiples == [phase.end]


def test_values_are_laid_on_the_recipe_s_for_that_phase_alone(phases: Callable[..., tuple[Phase, ...]]) -> None:
    warmup, body, cooldown = phases(THREE)
    assert [p.args.values["micro_batch_size"] for p in (warmup, body, cooldown)] == [2, 1, 2]
    assert ["log_params_norm" in p.args.values for p in (warmup, body, cooldown)] == [False, True, False]
    # Text for the environment, as it was written.
    assert body.loaded.recipe.environment["LEVEL"] == "3.10"
    assert "LEVEL" not in warmup.loaded.recipe.environment


def test_the_resolved_recipe_is_the_same_run(write: Callable[[str, str], str]) -> None:
    one = prepare(write("r.yaml", "extends: [tiny_cpu]\nname: r\n" + SAVED + THREE), ["phases.body.env.B=1e3"])
    again = prepare(write("again.yaml", resolved_yaml(one)))
    assert [p.args.argv for p in again.phases] == [p.args.argv for p in one.phases]
    environments = [p.loaded.recipe.environment for p in again.phases]
    assert environments == [p.loaded.recipe.environment for p in one.phases]
    assert (environments[1]["LEVEL"], environments[1]["B"]) == ("3.10", "1e3")


def test_another_precision_brings_its_part(phases: Callable[..., tuple[Phase, ...]]) -> None:
    warmup, body = phases(FP8)
    assert "fp8_format" not in warmup.args.values
    assert (body.args.values["fp8_format"], body.args.values["fp8_amax_history_len"]) == ("hybrid", 1024)
    _, body = phases(FP8, "phases.body.precision.recipe=blockwise")
    assert (body.args.values["fp8_recipe"], body.args.values["fp8_format"]) == ("blockwise", "e4m3")
    assert "fp8_amax_history_len" not in body.args.values


def test_a_change_of_recipe_leaves_nothing_of_the_old_one(phases: Callable[..., tuple[Phase, ...]]) -> None:
    text = FP8.replace("recipe: delayed", "recipe: delayed, format: hybrid, amax_history: 16, param_gather: true")
    _, body = phases(text, "phases.body.precision.recipe=blockwise")
    assert (body.args.values["fp8_format"], body.args.values["fp8_param_gather"]) == ("e4m3", True)
    assert "fp8_amax_history_len" not in body.args.values


@pytest.mark.parametrize(
    ("overrides", "code", "words"),
    [
        (["phases.body.iterations=11"], "phase-iterations", "the phases add up to 31"),
        (["train.iterations=20"], "phase-iterations", "none are left for phase body"),
        (["train.iterations=null"], "phase-iterations", "train.iterations is not set either"),
        (["phases.more={}"], "phase-iterations", "phases body, more do not set iterations"),
        (["phases.body.train.iterations=4"], "phase-iterations", "phase body"),
        (["megatron.exit_interval=7"], "phase-exit", "exit_interval conflicts with phases"),
        (["phases.body.megatron.exit-interval=7"], "phase-exit", "phase body: exit-interval"),
        (["checkpoint.dir=null"], "bad-value", "`phases` need `checkpoint.dir`"),
        (["phases.body=null"], "bad-value", "'phases.body' must be a mapping"),
        (["phases.body.precison.recipe=bf16"], "unknown-key", "unknown key 'phases.body.precison'"),
        (["phases.body.batch.micros=1"], "unknown-key", "phase body: unknown key 'batch.micros'"),
        (["phases.body.resources.nodes=2"], "unknown-key", "'phases.body.resources'"),
        (['phases="a b"'], "bad-value", "'phases' must be a mapping"),
        (["phases.body.iterations=0"], "bad-value", "greater than 0"),
        (["phases={'a b': {}}"], "bad-value", "letters, digits, '_' or '-'"),
    ],
)
def test_mistakes_are_reported(
    phases: Callable[..., tuple[Phase, ...]], overrides: list[str], code: str, words: str
) -> None:
    problem = only(refused(phases, THREE, *overrides))
    assert problem.code == code
    assert words in problem.message


def test_places_are_those_of_the_phase(phases: Callable[..., tuple[Phase, ...]]) -> None:
    problem = only(refused(phases, THREE.replace("micro: 1", "micro: 3"), exit_code=1))
    assert problem.message.startswith("phase body: global batch 8 is not a multiple")
    assert phases(THREE)[1].args.places["micro_batch_size"].endswith("r.yaml:8")


def test_a_problem_of_all_phases_is_reported_once(phases: Callable[..., tuple[Phase, ...]]) -> None:
    problem = only(refused(phases, THREE, "megatron.no_such_flag=1", exit_code=1))
    assert not problem.message.startswith("phase")


scalars = (
    st.none() | st.booleans() | st.integers() | st.sampled_from(["bf16", "delayed", "a b", "1e3"]) | st.text(max_size=5)
)
fields = st.sampled_from(["recipe", "iterations", "tp", "global", "micro", "lr", "kind", "exit_interval", "A", ""])
values = (
    scalars
    | st.lists(scalars, max_size=2)
    | st.dictionaries(fields, scalars | st.dictionaries(fields, scalars), max_size=3)
)


@settings(max_examples=200, deadline=None)
@given(
    phases=st.dictionaries(
        st.text(max_size=3), st.dictionaries(st.sampled_from([*Section.model_fields, "model"]), values)
    )
)
@example(phases={"a": {"iterations": 10**30}})
@example(phases={"a": {"precision": {"recipe": {"recipe": []}}}})
@example(phases={str(i): {"iterations": 1} for i in range(60)})
def test_whatever_is_in_them_is_a_run_or_a_problem(phases: dict[str, object]) -> None:
    overrides = ["checkpoint={dir: c, interval: 5}", "train.iterations=null", f"phases={json.dumps(phases)}"]
    try:
        found = prepare("tiny_cpu", overrides).phases
        assert [p.name for p in found] == list(phases)
    except UserError as exc:
        assert exc.problems and all(str(p).encode() for p in exc.problems)


def test_runs_that_differ_in_one_phase_are_different_runs(write: Callable[[str, str], str]) -> None:
    file = write("r.yaml", "extends: [tiny_cpu]\nname: r\n" + SAVED + THREE)
    point = Point(file, None)
    same, other = prepare(file), prepare(file, ["phases.cooldown.env.A=1"])
    assert point_key(point, same) == point_key(point, prepare(file)) != point_key(point, other)
    assert json.dumps(other.phases[2].loaded.recipe.environment).count('"A"') == 1
