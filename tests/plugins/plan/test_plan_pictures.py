"""`fp8launch plan --picture`, and how a recipe's own layout differs from the best."""

from __future__ import annotations

import json
import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fp8launch.cli import run
from fp8launch.hardware.gpus import gpu
from fp8launch.plugins.plan.known_runs import Situation
from fp8launch.plugins.plan.speeds import speeds
from fp8launch.plugins.plan.step_time import StepTime, TimeTerm
from fp8launch.plugins.plan.term_groups import GROUPS, difference, grouped
from fp8launch.plugins.plots.figures import available

needs_matplotlib = pytest.mark.skipif(not available(), reason="matplotlib is not installed")
_NUMBER = r"([\d,]+(?:\.\d)?) ms"


def _signed(sentence: str) -> tuple[float, float, list[float]]:
    """The total and the percentage of a sentence, and its parts, longer times positive."""
    head, _, tail = sentence.partition(" a step: ")
    total = re.search(_NUMBER + r" \(([\d.]+)%\) (slower|faster)$", head)
    assert total, sentence
    sign = 1 if total[3] == "slower" else -1
    parts = re.findall(_NUMBER + " (more|less) in ", tail)
    values = [float(number.replace(",", "")) * (1 if word == "more" else -1) for number, word in parts]
    return sign * float(total[1].replace(",", "")), sign * float(total[2]), values


def test_the_last_line_says_why_another_layout_is_preferred(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "wide.yaml"
    file.write_text("extends: llama8b_fp8\nname: wide\nparallel: {tp: 8}\n")
    assert run(["plan", str(file), "--top", "1"]) == 0
    shown = capsys.readouterr().out
    last = shown.splitlines()[-1]
    assert last.startswith("The recipe's own layout (TP 8, ")
    assert "ms more in exposed TP communication" in last
    total, percent, parts = _signed(last)
    assert total > 0 and sum(parts) == pytest.approx(total, abs=0.05)
    best = float(next(line for line in shown.splitlines() if line.startswith("1  ")).split()[3].replace(",", ""))
    assert percent == pytest.approx(100 * total / best, abs=0.1)


def test_a_model_has_no_layout_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama3_8b", "--gpus", "8", "--top", "1"]) == 0
    assert "own layout" not in capsys.readouterr().out


def test_an_own_layout_that_does_not_fit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--set", "batch.micro=4"]
    assert run(["plan", "llama8b_fp8", "--top", "1", *words]) == 0
    assert re.search(r"own layout \(micro batch 4.*\) needs \d+ GiB, more than 94% of 79.6", capsys.readouterr().out)


_TERMS = st.dictionaries(
    st.sampled_from(["GEMM fc1", "attention", "elementwise", "loss", "TP communication (NVLink)", "pipeline bubble"]),
    st.floats(0.01, 5000),
    min_size=1,
)


def _step(terms: dict[str, float]) -> StepTime:
    known = speeds(gpu("h100"))
    assert known is not None
    situation = Situation("h100", "dense", "bf16", "4096 x 32", 1, 4096, 0.0)
    return StepTime(tuple(TimeTerm(name, ms) for name, ms in terms.items()), 1000, 1, None, situation, known)


@given(_TERMS, _TERMS)
def test_the_numbers_of_a_difference_add_up(mine: dict[str, float], best: dict[str, float]) -> None:
    sentence = difference(_step(mine), _step(best))
    if "as fast" in sentence:
        assert _step(mine).ms == pytest.approx(_step(best).ms, rel=0.006)
        return
    total, _, parts = _signed(sentence)
    assert total == pytest.approx(_step(mine).ms - _step(best).ms, abs=0.51)
    assert sum(parts) == pytest.approx(total, abs=0.05)


@given(_TERMS)
def test_groups_add_up_to_the_step(terms: dict[str, float]) -> None:
    step = _step(terms)
    assert sum(grouped(step).values()) == pytest.approx(step.ms)


def test_every_term_of_a_plan_has_a_group() -> None:
    from fp8launch.plugins.plan.inputs import base_of, source_of, target_of
    from fp8launch.plugins.plan.search import search

    for recipe in ("llama8b_fp8", "gpt_oss_120b_tensorwise_h100"):
        source, _ = source_of(recipe, None, (), Path())
        for layout in search([base_of(source, (), None)], target_of(source, (), (), None), 3).layouts:
            assert sum(grouped(layout.step).values()) == pytest.approx(layout.step.ms)
            assert set(grouped(layout.step)) <= set(GROUPS)


@needs_matplotlib
def test_the_picture_shows_the_front_the_terms_and_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    file = tmp_path / "plan.svg"
    assert run(["plan", "llama8b_fp8", "--top", "2", "--json", "--picture", str(file)]) == 0
    shown = capsys.readouterr()
    assert f"wrote {file}" in shown.err
    first = json.loads(shown.out)[0]["layout"].split(", ")
    text = file.read_text(encoding="utf-8")
    for words in (
        "Memory against speed",
        "Pareto front",
        "the recipe's own",
        "Where the time of a step goes",
        ">attention<",
        f"1  {first[0]}, {first[1]}",
        "Time against the number of GPUs",
        ">64<",
    ):
        assert words in text, words


@needs_matplotlib
def test_on_the_front_less_memory_is_slower() -> None:
    from fp8launch.plugins.plan.inputs import base_of, source_of, target_of
    from fp8launch.plugins.plan.pictures import pareto
    from fp8launch.plugins.plan.search import search

    source, _ = source_of("llama8b_fp8", None, (), Path())
    found = search([base_of(source, (), None)], target_of(source, (), (), None), 10**9).layouts
    front = pareto(found)
    assert len(front) > 2 and front[-1].step.ms == found[0].step.ms
    for one in found:
        beaten = [other for other in front if other.memory.peak <= one.memory.peak and other.step.ms <= one.step.ms]
        assert beaten


@needs_matplotlib
def test_a_single_size_has_no_panel() -> None:
    from fp8launch.plugins.plan.pictures import PlanPoints, Shown, plan_pictures

    step = _step({"GEMM fc1": 10.0, "loss": 1.0})
    points = PlanPoints([(10.0, 100.0)], [(10.0, 100.0)], [Shown("TP 2", step, 10.0)], None, 80.0, {8: step})
    assert [picture.name for picture in plan_pictures(points)] == ["plan_memory", "plan_terms"]


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp8launch.plugins.plots.figures.available", lambda: False)
    file = tmp_path / "plan.png"
    assert run(["plan", "llama8b_fp8", "--picture", str(file)]) == 3
    shown = capsys.readouterr()
    assert "--picture" in shown.err and "pip install 'fp8launch[plots]'" in shown.err
    assert not shown.out and not file.exists()


@needs_matplotlib
def test_a_suffix_that_cannot_be_drawn_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama8b_fp8", "--picture", str(tmp_path / "plan.doc")]) == 2
    assert "end it in .png, .svg, .pdf" in capsys.readouterr().err


_DOTS = st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=1, max_size=8, unique=True)


@needs_matplotlib
@given(_DOTS)
def test_leader_lines_do_not_cross(dots: list[tuple[float, float]]) -> None:
    """Layouts of nearly the same speed had lines that crossed, as the fastest had the highest label."""
    from fp8launch.plugins.plan.pictures import label_levels

    levels = label_levels(dots, 110.0, 110.0)
    assert len({round(level, 6) for level in levels}) == len(dots)
    for (x1, y1, end1), (x2, y2, end2) in combinations(
        [(*dot, level) for dot, level in zip(dots, levels, strict=True)], 2
    ):
        begin = max(x1, x2)
        first = y1 + (end1 - y1) * (begin - x1) / (110 - x1)
        second = y2 + (end2 - y2) * (begin - x2) / (110 - x2)
        assert (first - second) * (end1 - end2) > -1e-6
