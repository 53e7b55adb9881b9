"""Loss parity: verdicts on curves whose truth is known, and on runs that may not be compared."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import Made, write_log
from support import real_logs

from fp8launch.report.losses import losses, smooth
from fp8launch.report.parity import Parity, parity
from fp8launch.report.read_run import run_from_logs
from fp8launch.report.run_report import RunReport

LOGS = real_logs("runs")


def curve(i: int) -> float:
    return 2 + 8 * 0.98**i + 0.05 * ((i * 7919) % 13 - 6) / 6


@pytest.fixture
def pair(tmp_path: Path):
    def make(
        loss: Callable[[int], float | None], tolerance: float = 0.02, iterations: int = 400, **arguments
    ) -> Parity:
        def run(name: str, made: Made) -> RunReport:
            return run_from_logs(name, [write_log(tmp_path / f"{name}.log", made)])

        base = run("bf16", Made(loss=curve, iterations=iterations))
        fp8 = Made(loss=loss, iterations=iterations, precision="tensorwise", arguments=arguments)
        return parity([run("fp8", fp8)], [base], tolerance, ("fp8", "bf16"))

    return make


def test_the_same_curve(pair) -> None:
    found = pair(curve)
    assert found.verdict == "within tolerance"
    assert found.last_quarter == 0
    assert found.diverged_at is None


def test_one_percent_worse_is_within_two_and_beyond_half(pair) -> None:
    assert pair(lambda i: 1.01 * curve(i)).verdict == "within tolerance"
    found = pair(lambda i: 1.01 * curve(i), tolerance=0.005)
    assert found.verdict == "apart"
    assert found.last_quarter == pytest.approx(0.01, rel=1e-3)
    assert found.diverged_at == 1


def test_a_curve_that_leaves_says_where(pair) -> None:
    """From iteration 200 on 0.05 % more with every iteration: beyond 2 % after 40 more."""
    found = pair(lambda i: curve(i) * (1 + 0.0005 * max(0, i - 200)))
    assert found.verdict == "apart"
    assert found.diverged_at == pytest.approx(240, abs=6)


def test_a_bump_that_heals_is_no_divergence(pair) -> None:
    found = pair(lambda i: curve(i) * (1.3 if 100 < i < 150 else 1))
    assert found.verdict == "within tolerance"
    assert found.diverged_at is None


def test_a_lower_loss_is_called_lower(pair) -> None:
    found = pair(lambda i: 0.95 * curve(i))
    assert found.verdict == "lower"
    assert "lower loss, -5.00 %" in found.sentence()
    assert "higher loss, +5.00 %" in pair(lambda i: 1.05 * curve(i)).sentence()


def test_a_loss_that_is_gone(pair) -> None:
    found = pair(lambda i: curve(i) if i < 300 else None)
    assert (found.verdict, found.diverged_at) == ("diverged", 300)
    assert "NaN from iteration 300" in found.sentence()


def test_a_loss_that_was_never_there(pair) -> None:
    assert pair(lambda i: None).verdict == "diverged"


def test_short_runs_say_nothing(pair) -> None:
    found = pair(curve, iterations=60)
    assert found.verdict == "too short"
    assert "are too few" in found.sentence()


def test_real_logs_are_too_short() -> None:
    runs = [run_from_logs(n, [LOGS / f"llama8b_4gpu_{n}_mbs1.log"]) for n in ("tw", "bf16")]
    found = parity(*([run] for run in runs), 0.02, ("tw", "bf16"))
    assert found.verdict == "too short"
    assert found.iterations == (1, 2, 3, 4, 5, 6, 7)
    assert found.difference[-1] == pytest.approx((9.872743 - 10.02474) / 10.02474, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("data_path", "other"),
        ("lr", 1e-4),
        ("global_batch_size", 32),
        ("hidden_size", 2048),
        ("split", "1"),
    ],
)
def test_other_data_or_schedule_is_not_comparable(pair, name: str, value: object, tmp_path: Path) -> None:
    extra = {"data_path": "mine", "split": "99,1,0"}
    base = run_from_logs("b", [write_log(tmp_path / "b.log", Made(loss=curve, iterations=300, arguments=extra))])
    made = Made(loss=curve, iterations=300, precision="delayed", arguments={**extra, name: value})
    if name == "global_batch_size":
        made = Made(loss=curve, iterations=300, precision="delayed", batch=32, arguments=extra)
    found = parity([run_from_logs("a", [write_log(tmp_path / "a.log", made)])], [base], 0.02, ("a", "b"))
    assert found.verdict == "not comparable"
    assert any(name in r or "global batch" in r for r in found.reasons)


def test_another_layout_has_other_initial_weights(pair) -> None:
    found = pair(curve, tensor_model_parallel_size=2)
    assert found.verdict == "within tolerance"
    assert any("tensor_model_parallel_size 2 against 1" in note for note in found.notes)


def test_without_arguments_nothing_is_known(tmp_path: Path) -> None:
    text = " iteration {}/9 | elapsed time per iteration (ms): 10.0 | global batch size: 8 | lm loss: 2.0 |"
    log = tmp_path / "a.log"
    log.write_text("\n".join(text.format(i) for i in range(1, 10)))
    found = parity([run_from_logs("a", [log])], [run_from_logs("b", [log])], 0.02, ("a", "b"))
    assert found.verdict == "not comparable"
    assert any("do not both state seed" in reason for reason in found.reasons)


@pytest.fixture
def repeated(tmp_path: Path):
    """Runs of a variant and its baseline, given as factors on the curve, or as (factor, seed)."""

    def side(name: str, precision: str, factors: Sequence[float | tuple[float, int]]) -> list[RunReport]:
        runs = []
        for i, one in enumerate(factors):
            factor, seed = one if isinstance(one, tuple) else (one, 1234)
            loss = lambda n, f=factor, s=seed: f * curve(n + s % 10)  # noqa: E731
            made = Made(loss=loss, iterations=400, precision=precision, arguments={"seed": seed})
            runs.append(run_from_logs(f"{name}{i}", [write_log(tmp_path / f"{name}{i}.log", made)]))
        return runs

    def make(variant, base, tolerance: float = 0.02) -> Parity:
        return parity(side("fp8", "tensorwise", variant), side("bf16", "bf16", base), tolerance, ("fp8", "bf16"))

    return make


class TestRepeats:
    def test_the_difference_is_that_of_the_means(self, repeated) -> None:
        """(1.00 + 1.02 + 1.01) / 3 over (1.00 + 0.99 + 0.995) / 3; pooled deviation 0.8 %, t(4) = 2.776."""
        found = repeated([1.0, 1.02, 1.01], [1.0, 0.99, 0.995])
        assert found.last_quarter == pytest.approx(1.01 / 0.995 - 1, rel=1e-3)
        a = statistics.variance([1.0, 1.02, 1.01]) / 0.995**2
        b = statistics.variance([1.0, 0.99, 0.995]) / 0.995**2
        assert found.noise == pytest.approx(2.776445 * ((a + b) / 2 * 2 / 3) ** 0.5, rel=1e-3)
        assert found.runs == (3, 3)
        # 1.51 % ± 1.84 %: the interval reaches beyond 2 %.
        assert found.verdict == "undecided"
        assert "between repeats" in found.sentence() and "3 against 3 runs" in found.sentence()

    def test_beyond_the_tolerance_and_beyond_the_noise(self, repeated) -> None:
        assert repeated([1.04, 1.041, 1.042], [1.0, 1.001]).verdict == "apart"

    def test_beyond_the_tolerance_but_so_are_repeats(self, repeated) -> None:
        found = repeated([1.0, 1.1, 1.0], [1.0, 1.06, 0.95])
        assert abs(found.last_quarter) > 0.02
        assert found.verdict == "undecided"
        assert "more repeats are needed" in found.sentence()

    def test_a_wide_interval_decides_nothing(self, repeated) -> None:
        """`within tolerance, -0.99 % ± 16.52 %` was printed."""
        found = repeated([0.94, 1.04], [1.06, 0.96])
        assert abs(found.last_quarter) < 0.02 < found.noise
        assert found.verdict == "undecided"

    def test_a_narrow_interval_inside_the_tolerance(self, repeated) -> None:
        assert repeated([1.005, 1.0055, 1.0045], [1.0, 1.0005, 0.9995]).verdict == "within tolerance"

    def test_one_bad_repeat_is_not_hidden_behind_the_first(self, repeated) -> None:
        assert repeated([1.0, 1.3, 1.3], [1.0, 1.0, 1.0], tolerance=0.1).verdict != "within tolerance"

    def test_a_repeat_that_lost_its_loss(self, repeated, tmp_path: Path) -> None:
        found = repeated([1.0, float("nan")], [1.0])
        assert found.verdict == "diverged"
        assert "fp81: the loss is NaN from iteration" in found.sentence()

    def test_repeats_of_other_seeds_are_held_against_their_own(self, repeated) -> None:
        """Each seed has its own curve, and the variant is 1 % above it."""
        found = repeated([(1.01, 1), (1.01, 2)], [(1.0, 2), (1.0, 1)])
        assert found.last_quarter == pytest.approx(0.01, rel=1e-3)
        assert found.noise == pytest.approx(0, abs=1e-5)

    def test_a_seed_without_a_partner_is_left_out(self, repeated) -> None:
        found = repeated([(1.01, 1), (1.5, 3)], [(1.0, 1), (1.0, 2)])
        assert found.last_quarter == pytest.approx(0.01, rel=1e-3)
        assert "1 of 2 runs had other data" in found.sentence()

    def test_without_repeats_there_is_no_noise(self, repeated) -> None:
        assert repeated([1.01], [1.0]).noise is None


def test_second_lines_are_about_their_own_iteration() -> None:
    """Megatron printed 9.022447 for iteration 2 and 8.919405 for 7, after a resume: means with the one before."""
    found = losses(run_from_logs("x", [LOGS / "tiny_cpu_0.19_resumed.log"]))
    assert set(found) == set(range(1, 13))
    assert (found[1], found[2], found[3]) == (9.017347, pytest.approx(9.027547, abs=1e-6), 9.019219)
    assert (found[6], found[7], found[8]) == (8.952121, pytest.approx(8.886689, abs=1e-6), 8.954555)


def test_second_lines_are_left_out_where_nobody_knows_what_they_mix(tmp_path: Path) -> None:
    text = (LOGS / "tiny_cpu_0.19_resumed.log").read_text()
    lines = [line for line in text.splitlines(keepends=True) if "elapsed time per iteration" in line]
    (tmp_path / "tail.log").write_text("".join(lines[:5]))
    assert set(losses(run_from_logs("x", [tmp_path / "tail.log"]))) == {1, 3, 4, 5}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(0, 20))
def test_smoothing_stays_between_the_extremes(values: list[float], half: int) -> None:
    found = smooth(values, 2 * half + 1)
    assert len(found) == len(values)
    slack = 1e-6 * max(map(abs, values)) + 1e-9
    assert all(min(values) - slack <= v <= max(values) + slack for v in found)
    assert half or found == pytest.approx(values, abs=slack)


@pytest.mark.parametrize("difference", [-1e-7, 0.0, 1e-7])
def test_no_difference_has_no_minus(difference: float) -> None:
    sentence = Parity("a", "b", "within tolerance", 0.02, last_quarter=difference).sentence()
    assert ", +0.00 % over the last quarter" in sentence
