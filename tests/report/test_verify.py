"""Did FP8 run? The verdict from every mixture of evidence, and what parse and the command line make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import log_text, parse_paths, real_logs, sitting

from fp8launch.cli import run as command
from fp8launch.logs.evidence import Evidence, parse_evidence
from fp8launch.logs.open_log import log_name
from fp8launch.report.throughput import read_logs
from fp8launch.report.verify import judge, verify_logs

DATA = real_logs("h200")
TENSORWISE = DATA / "llama8b_4layers_tensorwise_1gpu.log"
BF16 = DATA / "llama8b_4layers_bf16_1gpu.log"

ASKED = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "fp4": None, "fp8_param_gather": False}
NOT_ASKED = {"fp8": None, "fp8_recipe": "delayed", "fp4": None}


def probe(fp8: int, unexplained: int = 0, explained: int = 0, **more: Any) -> Evidence:
    recipe = more.pop("recipe", "Float8CurrentScaling")
    groups = [{"modules": "fc1", "role": "linear", "ran_fp8": True, "recipe": recipe}] if fp8 else []
    if unexplained:
        groups.append({"modules": "decoder.layers.*.fc2", "role": "linear", "ran_fp8": False, "class": "TELinear"})
    totals = {
        "linears": fp8 + unexplained + explained, "fp8": fp8, "explained": explained, "unexplained": unexplained,
        "weights": 16, "fp8_weights": more.pop("fp8_weights", 0),
    }  # fmt: skip
    return Evidence("probe", 0, {"v": 1, "rank": 0, "totals": totals, "groups": groups, **more})


def kernels(fp8: int, bf16: int, iteration: int = 6) -> Evidence:
    families = {"fp8_gemm": {"count": fp8, "ms": 1.0 * fp8}, "gemm": {"count": bf16, "ms": 2.0 * bf16}}
    return Evidence("kernels", 0, {"v": 1, "rank": 0, "iteration": iteration, "families": families})


@pytest.mark.parametrize(
    ("arguments", "probes", "profiles", "verdict", "ok"),
    [
        (ASKED, [probe(16)], [kernels(96, 3)], "verified", True),
        (ASKED, [probe(16)], [], "verified", True),
        (ASKED, [], [kernels(96, 3)], "verified", True),
        (ASKED, [], [], "requested only", False),
        (ASKED, [probe(0, 16)], [], "not FP8", False),
        (ASKED, [probe(0, 0, 16)], [], "not FP8", False),
        (ASKED, [], [kernels(0, 99)], "not FP8", False),
        (ASKED, [], [kernels(0, 0)], "requested only", False),
        # Modules say so and no kernel shows it: perhaps a GPU whose kernel names are not known, so neither is proven.
        (ASKED, [probe(16)], [kernels(0, 99)], "requested only", False),
        (ASKED, [probe(16)], [kernels(0, 0)], "verified", True),
        (ASKED, [probe(0, 16)], [kernels(96, 3)], "verified", True),
        # The second pipeline stage holds nothing but layers that stay in bf16; then one that should not.
        (ASKED, [probe(8), probe(0, 0, 8)], [], "verified", True),
        (ASKED, [probe(8), probe(0, 8)], [], "not FP8", False),
        (NOT_ASKED, [probe(0, 0, 16)], [kernels(0, 99)], "not FP8", True),
        (NOT_ASKED, [], [], "not FP8", True),
        ({}, [], [], "no evidence", False),
    ],
)
def test_verdict(arguments: Any, probes: list[Evidence], profiles: list[Evidence], verdict: str, ok: bool) -> None:
    found = judge(arguments, probes, profiles)
    assert (found.verdict, found.ok) == (verdict, ok)
    assert found.refuted == (not ok and verdict == "not FP8")


def test_the_strongest_evidence_stands_first() -> None:
    assert [f.kind for f in judge(ASKED, [probe(16)], [kernels(96, 3)]).findings] == ["kernels", "modules", "arguments"]


def test_what_was_asked_is_read_from_the_probe_where_the_log_has_no_arguments() -> None:
    found = judge({}, [probe(0, 16, asked=ASKED)])
    assert (found.asked, found.recipe, found.verdict) == (True, "tensorwise", "not FP8")


@pytest.mark.parametrize(
    ("arguments", "evidence", "warning"),
    [
        (ASKED, probe(16, recipe="DelayedScaling"), "tensorwise is requested, but the modules ran DelayedScaling"),
        (ASKED, probe(12, 4), "decoder.layers.*.fc2, TELinear: not in FP8, for no known reason"),
        ({**ASKED, "fp8_param_gather": True}, probe(16), "no weight is an FP8 tensor"),
    ],
)
def test_what_is_not_as_asked_is_a_warning(arguments: Any, evidence: Evidence, warning: str) -> None:
    found = judge(arguments, [evidence])
    assert found.verdict == "verified"
    assert any(warning in each for each in found.warnings)


def test_modules_in_fp8_without_a_recipe_are_not_called_none() -> None:
    found = judge(ASKED, [probe(16, recipe=None)])
    assert (found.verdict, found.warnings) == ("verified", ())
    assert "None" not in found.findings[0].text


def test_kernels_of_both_formats_are_named() -> None:
    families = {"fp8_gemm": {"count": 2, "ms": 1.0}, "fp4_gemm": {"count": 6, "ms": 1.0}}
    profile = Evidence("kernels", 0, {"rank": 0, "iteration": 6, "families": families})
    assert judge(ASKED, [], [profile]).findings[0].text.startswith("8 FP8 and FP4 GEMM kernels of 8 ")


def test_a_number_of_modules_that_is_none_is_read() -> None:
    line = 'fp8launch-probe: {"totals": {"linears": 1}, "groups": [{"role": "linear", "why": "router", "n": 1e999}]}'
    evidence = parse_evidence(line)
    assert evidence
    assert judge(ASKED, [evidence]).verdict == "not FP8"


def test_fp8_weights_silence_the_warning_about_parameter_gather() -> None:
    assert judge({**ASKED, "fp8_param_gather": True}, [probe(16, fp8_weights=16)]).warnings == ()


@pytest.mark.parametrize(
    "line",
    [
        "fp8launch-probe: {",
        'fp8launch-probe: {"v":1,"ra 12: fp8launch-probe: {"v"',
        "fp8launch-probe: []",
        "fp8launch-other: {}",
        "fp8launch: the FP8 probe failed, training continues",
        "",
    ],
)
def test_a_torn_or_foreign_line_is_no_evidence(line: str) -> None:
    assert parse_evidence(line) is None


@pytest.mark.parametrize("prefix", ["", "3: ", "[rank3]: ", "[default3]:", "> building "])
def test_a_launcher_prefix_and_words_of_another_rank_do_no_harm(prefix: str) -> None:
    found = parse_evidence(prefix + 'fp8launch-probe: {"v":1}iteration 1/ 3')
    assert found is not None
    assert found.data == {"v": 1}


# --- Whole logs

VERIFY = "2026-11-20-verify"


@pytest.mark.parametrize(
    ("name", "verdict", "ok", "says"),
    [
        ("bf16", "not FP8", True, "0 of 16 linears"),
        ("tensorwise", "verified", True, "16 of 16 linears ran in FP8 with Float8CurrentScaling"),
        ("delayed", "verified", True, "16 of 16 linears ran in FP8 with TEDelayedScaling"),
        ("blockwise", "verified", True, "16 of 16 linears ran in FP8 with Float8BlockScaling"),
        ("tensorwise_bf16_ends", "verified", True, "8 of 16 linears"),
        ("moe_tensorwise", "verified", True, "16 of 16 linears"),
        ("tensorwise_param_gather_x4", "verified", True, "16 of 17 weights are FP8 tensors"),
        ("tensorwise_pp2_tp2_x4", "verified", True, "32 of 32 linears"),
        ("asked_but_bf16", "not FP8", False, "0 of 16 linears"),
        ("tensorwise_no_probe", "requested only", False, "is requested"),
    ],
)
def test_what_ran_on_h200(name: str, verdict: str, ok: bool, says: str) -> None:
    """`asked_but_bf16` is a real run whose FP8 a per-module precision file took away without a word."""
    found = verify_logs(read_logs([sitting(VERIFY) / f"{name}.log"]))
    assert (found.verdict, found.ok, found.warnings) == (verdict, ok, ())
    assert found.strongest is not None
    assert says in found.strongest.text


def test_only_the_run_that_lost_its_fp8_has_failed() -> None:
    failed = {log_name(log): parse_paths([log]).failure for log in sitting(VERIFY).glob("*.log")}
    assert [name for name, failure in failed.items() if failure] == ["asked_but_bf16"]


def test_an_8b_step_on_h200_shows_its_kernels_and_its_profiled_iterations_do_not_count() -> None:
    (log,) = read_logs([sitting("2026-11-20-profile") / "base.log"])
    found = verify_logs([log])
    assert [(f.kind, f.shows) for f in found.findings] == [("kernels", True), ("modules", True), ("arguments", None)]
    profiled = next(e.data["iteration"] for e in log.evidence if e.kind == "kernels")
    assert isinstance(profiled, int)
    dropped = parse_paths([log.path]).steady_state.dropped
    assert {profiled, profiled + 1} <= {number for numbers in dropped.values() for number in numbers}


# --- Whole logs with lines put in


def log_with(folder: Path, source: Path, *lines: str) -> Path:
    """A real log with our lines where a job prints them: before the first iteration line."""
    text = log_text(source)
    at = text.rfind("\n", 0, text.index("elapsed time per iteration")) + 1
    path = folder / f"{log_name(source)}.log"
    path.write_text(text[:at] + "".join(f"{line}\n" for line in lines) + text[at:])
    return path


def line(evidence: Evidence) -> str:
    return f"fp8launch-{evidence.kind}: {json.dumps(evidence.data)}"


def test_a_run_that_asked_for_fp8_and_shows_none_has_failed(tmp_path: Path) -> None:
    report = parse_paths([log_with(tmp_path, TENSORWISE, line(probe(0, 16)))], gpu="h200")
    assert report.status == "failed"
    failure = report.as_json()["failure"]
    assert isinstance(failure, dict)
    assert failure["code"] == "fp8-not-running"
    said = (tmp_path / f"{log_name(TENSORWISE)}.log").read_text().splitlines()[failure["line"] - 1]
    assert said.startswith("fp8launch-probe: ")


def test_a_run_that_shows_fp8_is_ok_and_says_how_it_is_known(tmp_path: Path) -> None:
    report = parse_paths([log_with(tmp_path, TENSORWISE, line(probe(16)), line(kernels(96, 3)))], gpu="h200")
    assert report.status == "ok"
    assert report.fp8 is not None
    assert (report.fp8["verified"], report.fp8["evidence"]) == (True, "kernels")


def test_a_log_without_our_lines_is_read_as_before_and_said_to_prove_nothing() -> None:
    report = parse_paths([TENSORWISE], gpu="h200")
    assert report.status == "ok"
    assert report.fp8 is not None
    assert (report.fp8["verdict"], report.fp8["evidence"]) == ("requested only", "arguments")


def test_profiled_iterations_do_not_count(tmp_path: Path) -> None:
    plain = parse_paths([TENSORWISE])
    report = parse_paths([log_with(tmp_path, TENSORWISE, line(kernels(96, 3, iteration=7)))])
    assert report.steady_state.dropped["profiled"] == (7, 8)
    assert plain.speed.step_time_ms is not None
    assert report.speed.step_time_ms is not None
    assert report.speed.step_time_ms.n == plain.speed.step_time_ms.n - 2


@pytest.mark.parametrize(
    ("source", "lines", "code", "word"),
    [
        (TENSORWISE, [line(probe(16))], 0, "verified"),
        (TENSORWISE, [], 1, "requested only"),
        (TENSORWISE, [line(probe(0, 16))], 1, "not FP8"),
        (BF16, [line(probe(0, 0, 16))], 0, "not FP8"),
        (BF16, [], 0, "not FP8"),
    ],
)
def test_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source: Path, lines: list[str], code: int, word: str
) -> None:
    log = str(log_with(tmp_path, source, *lines))
    assert command(["verify", log]) == code
    shown = capsys.readouterr()
    assert shown.out.startswith(word)
    # Lines were as long as their evidence, up to 118 columns here.
    assert all(len(line) <= 80 for line in (*shown.out.splitlines(), *shown.err.splitlines()))
    assert command(["verify", log, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["verdict"] == word


@pytest.mark.parametrize("text", ["", "hello\n", " iteration 1/9 | elapsed time per iteration (ms): 10.0 |\n"])
def test_a_log_without_evidence_is_no_proof_of_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """It was `not FP8`, exit code 0."""
    log = tmp_path / "a.log"
    log.write_text(text)
    assert command(["verify", str(log)]) == 1
    assert capsys.readouterr().out.startswith("no evidence")
    assert command(["verify", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "no evidence"
    # The length of a sequence says nothing about the precision: this was "FP8: not requested".
    command(["parse", str(log), "--json", "--world-size", "8", "--seq-length", "4096"])
    assert json.loads(capsys.readouterr().out)["fp8"] is None


def test_arguments_that_are_cut_off_before_the_precision_are_no_proof_of_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was `not FP8`, exit code 0: the file system was full, or the log is still being written."""
    text = log_text(TENSORWISE)
    log = tmp_path / "a.log"
    log.write_text(text[: text.index("  fp8 ...")])
    assert command(["verify", str(log)]) == 1
    assert capsys.readouterr().out.startswith("no evidence")
    assert parse_paths([log]).fp8 is None
    log.write_text(text[: text.index("  micro_batch_size ...")])
    assert command(["verify", str(log)]) == 1
    assert capsys.readouterr().out.startswith("requested only")


def test_the_reason_for_higher_precision_is_stated() -> None:
    """`2 in higher precision for a stated reason` stated none."""
    edge = {"role": "linear", "ran_fp8": False, "why": "one of the first or last layers", "n": 2}
    own = {"role": "linear", "ran_fp8": False, "why": "a precision of its own", "n": 1}
    router = {"role": "router", "ran_fp8": False, "why": "routing", "n": 5}
    one = probe(13, 0, 2)
    one.data["groups"].extend([edge, router])  # type: ignore[attr-defined]
    assert "2 in higher precision (one of the first or last layers)" in judge(ASKED, [one]).findings[0].text
    several = probe(13, 0, 3)
    several.data["groups"].extend([edge, own])  # type: ignore[attr-defined]
    text = judge(ASKED, [several]).findings[0].text
    assert "3 in higher precision (2: one of the first or last layers; 1: a precision of its own)" in text


def test_a_name_that_is_neither_run_nor_log_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["verify", "nothing-like-it", "neither"]) == 2
    assert "no run 'nothing-like-it'" in capsys.readouterr().err
