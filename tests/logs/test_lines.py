"""One line at a time: versions, forks, prefixes, cuts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_logs import line

from fp8launch.logs.lines import (
    argument_value,
    parse_argument,
    parse_checkpoint_save,
    parse_iterations,
    parse_peak_memory,
    parse_step_time,
    parse_validation,
    split_prefix,
)

LONG = "inference_dynamic_batching_unified_memory_level_of_this_long_name"

# As printed by the versions and forks named; numbers are made up.
DIALECTS = {
    "megatron 0.12": (
        " [2025-03-02 10:11:12] iteration      100/    1000 | consumed samples:         3200 | elapsed time per"
        " iteration (ms): 1234.5 | throughput per GPU (TFLOP/s/GPU): 345.6 | learning rate: 1.0E-04 |"
        " global batch size:    32 | lm loss: 5.0E+00 | loss scale: 1.0 | grad norm: 0.500 | num zeros: 12 |"
        " number of skipped iterations:   0 | number of nan iterations:   0 |"
    ),
    "no time stamp": (
        " iteration      100/    1000 | consumed samples: 3200 | elapsed time per iteration (ms): 1234.5 |"
        " throughput per GPU (TFLOP/s/GPU): 345.6 | global batch size: 32 | lm loss: 5.0E+00 |"
    ),
    "primus": (
        "[20251023 12:39:12][rank-63/64][INFO ] [--------trainer.py:2382] :  iteration      100/   1000 | consumed"
        " samples: 3200 | elapsed time per iteration (ms): 1234.5/1300.1 | hip mem usage/free/total/usage_ratio:"
        " 253.38GB/2.60GB/255.98GB/98.98% | throughput per GPU (TFLOP/s/GPU): 345.6/340.0 | tokens per GPU"
        " (tokens/s/GPU): 246.7/238.1 | global batch size:    32 | lm loss: 5.0E+00 |"
    ),
    "primus, newer": (
        " iteration 100/1000 | elapsed time per iteration (ms): 1,234.5/1,300.1 | compute per GPU (TFLOP/s/GPU): 345.6"
        " (avg 340.0) | tokens/s/GPU inst/harmonic mean: 246.7/238.1 | global batch size: 32 | lm loss: 5.0E+00 |"
    ),
    "other order, other company": (
        " iteration 100/1000 | lm loss: 5.0E+00 | shoe size: 43 | load_balancing_loss: 1.0 | global batch size: 32 |"
        " throughput per GPU (TFLOP/s/GPU): 345.6 | elapsed time per iteration (ms): 1234.5 |"
    ),
    "bridge": (
        "run/0  [2025-12-22 15:18:33] iteration      100/    1000 | elapsed time per iteration (ms): 1234.5 | 345.6"
        " MODEL_TFLOP/s/GPU | global batch size: 32 | lm loss: 5.0E+00 |"
    ),
    "bigscience, in seconds": (
        " [default7]: iteration      100/    1000 | consumed samples: 3200 | consumed tokens:  6553600 | elapsed"
        " time per iteration (s): 1.2345 | learning rate: 5.0E-05 | global batch size:    32 | lm loss:"
        " 5.000000E+00 | grad norm: 0.174 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan"
        " iterations:   0 | samples per second: 25.921 | TFLOPs: 345.60 |"
    ),
    "deepspeed, with sequence length and tgs": (
        "        iteration      100/    1000 | consumed samples: 3200 | elapsed time per iteration (ms): 1234.5 |"
        " learning rate: 2.4E-04 | global batch size:    32 | lm loss: 5.000000E+00 | loss scale: 8192.0 | actual"
        " seqlen:  4096 | number of skipped iterations:   0 | samples per second: 25.921 | tokens per gpu per"
        " second (tgs): 1146.733 | TFLOPs: 345.60 |"
    ),
    "ascend, misspelt": (
        " iteration  100/1000 | consumed samples: 3200 | elapsed time per iteration (ms):  1234.5 | learning rate:   "
        " 1.4E-07 | gloabl batch size:  32 | lm loss:  5.000000E+00 | loss scale:  1.0 | grad norm:    9.216 | actual"
        " seqlen:  2048 | number of skipped iterations: 0 | samples per second: 25.9 | TFLOPs: 345.60 |"
    ),
    "no blank before the unit": (
        "[2024-02-27 15:45:08] iteration 100 / 1000 | consumed samples: 3200 | elapsed time per iteration(ms):"
        " 1234.5 | learning rate: 7.3 | global batch size: 32 | lm loss: 5.000000E+00 | loss scale: 1.0 |total"
        " grad norm: 2.773 | TFLOPs: 345.60 | "
    ),
    "hardware and model flops": (
        " iteration      100/    1000 | elapsed time per iteration (ms): 1234.5 | global batch size:  32 | lm loss:"
        " 5.000000E+00 | TFLOPs (Hardware): 400.1 | TFLOPs (Model): 345.60 | TFLOPs GPU (Hardware): 410.49 |"
    ),
    "hyphens and a rank in brackets": (
        "2023-10-26 21:31:16,318 [Rank 15]:  iteration      100/ 1000 | elapsed time per iteration (ms): 1234.5 |"
        " global batch size:    32 | lm loss: 5.000000E+00 | TFLOPs: 345.60 | tokens-per-second-per-gpu: 2114.61"
        " |"
    ),
    "token and flop throughput": (
        " [2025-03-02 10:11:12] iteration      100/    1000 | elapsed time per iteration (ms): 1234.5 | throughput"
        " (token/sec/GPU): 2114.6 | flop throughput (TFLOP/sec/GPU): 345.6 | global batch size: 32 | lm loss: 5.0E+00 |"
    ),
    "without a last bar": (
        "iteration      100/    1000 | elapsed time per iteration (ms): 1234.5 | 345.6 MODEL_TFLOP/s/GPU | global batch"
        " size:    32 | lm loss: 5.000000E+00"
    ),
    "before version 2, without colons": (
        " iteration      100/    1000 | elapsed time per iteration (ms): 1234.5 | learning rate 1.2E-04 | TFLOPs"
        " 345.6 | global batch size 32 | lm loss 5.000000E+00 | loss scale 1.0 |"
    ),
    "nemo 2": (
        "retraining/0 [default0]:Training epoch 0, iteration 100/1000 | lr: 1.961e-07 | global_batch_size: 32 |"
        " global_step: 100 | peak_memory_usage: 70833405952 | memory_allocated: 44271689728 | reduced_train_loss: 5.0 |"
        " train_step_timing in s: 1.2345 | tokens_per_sec_per_gpu: 1.073e+04 | TFLOPS_per_GPU: 345.6 |"
        " consumed_samples: 3200 | val_loss: 9.9"
    ),
}
NEOX = (
    " samples/sec: 25.921 | iteration      100/    1000 | elapsed time per iteration (ms): 1234.5 | learning rate:"
    " 1.2E-04 | approx flops per GPU: {} | lm_loss: 5.000000E+00 | number of skipped iterations:   0 |"
)


@pytest.mark.parametrize(("flops", "value"), [("345.6TFLOPS", 345.6), ("912.3GFLOPS", None)])
def test_neox_states_its_unit(flops: str, value: float | None) -> None:
    (found,) = parse_iterations(NEOX.format(flops))
    assert found.values.get("tflops_per_gpu") == value
    assert (found.number, found.step_time_ms, found.loss) == (100, 1234.5, 5.0)
    assert found.losses == {"lm loss": 5.0}


def test_nemos_units_are_converted_and_its_other_losses_are_none() -> None:
    (found,) = parse_iterations(DIALECTS["nemo 2"])
    assert found.values["memory_used_gib"] == pytest.approx(70833405952 / 2**30)
    assert found.values["tokens_per_s_per_gpu"] == 10730
    assert found.losses == {"reduced_train_loss": 5.0}
    assert found.rank == 0


@pytest.mark.parametrize("text", DIALECTS.values(), ids=DIALECTS)
def test_every_dialect_gives_the_same_numbers(text: str) -> None:
    (found,) = parse_iterations(text)
    assert (found.number, found.planned) == (100, 1000)
    assert found.step_time_ms == 1234.5
    assert found.values["tflops_per_gpu"] == 345.6
    assert found.values["global_batch_size"] == 32
    assert found.loss == 5.0


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("tokens/sec/gpu: 246.7", 246.7),
        ("Tokens per second per GPU (Tok/s/GPU): 246.7", 246.7),
        ("tokens per GPU (tokens/s/GPU): 246.7/238.1", 246.7),
        ("tokens/s/GPU inst/harmonic mean: 246.7/238.1", 246.7),
        ("tokens per gpu per second (tgs): 246.7", 246.7),
        ("tokens per gpu per second(tgs): 246.7", 246.7),
        ("tokens-per-second-per-gpu: 246.7", 246.7),
    ],
)
def test_forks_tokens_per_second(label: str, value: float) -> None:
    (found,) = parse_iterations(f" iteration 1/2 | elapsed time per iteration (ms): 1.0 | {label} |")
    assert found.values["tokens_per_s_per_gpu"] == value


def test_mtp_and_moe_losses_keep_their_names_and_lm_loss_is_the_loss() -> None:
    (found,) = parse_iterations(
        " iteration 1/2 | elapsed time per iteration (ms): 1.0 | mtp_1 loss: 9.0E+00 | lm loss: 2.0E+00 | z_loss: 0.5 |"
    )
    assert found.losses == {"mtp_1 loss": 9.0, "lm loss": 2.0, "z_loss": 0.5}
    assert found.loss == 2.0


def test_a_nan_loss_that_megatron_leaves_out_is_none() -> None:
    (found,) = parse_iterations(line(7, loss=None, nan=1))
    assert found.loss is None
    assert found.values["nan_iterations"] == 1


@pytest.mark.parametrize(
    ("prefix", "rank"),
    [
        ("7: ", 7),
        ("[default7]:", 7),
        ("[rank7]:", 7),
        ("  12: ", 12),
        ("3: [default1]:", 1),
        ("", None),
        ("train/0 ", None),
        ("train/0 [default3]:", 3),
        ("10.0.0.7: ", None),
        ("2026-11-20T14:55:23+08:00 ", None),
        ("[Rank 4]:", 4),
    ],
)
def test_launchers_prefixes_change_nothing_but_the_rank(prefix: str, rank: int | None) -> None:
    (plain,) = parse_iterations(line(3))
    (found,) = parse_iterations(prefix + line(3))
    assert found.values == plain.values
    assert found.rank == rank


@given(st.sampled_from(["", "\x1b[32m", "\x1b[1;31m"]), st.integers(0, 400))
def test_colours_change_nothing(colour: str, at: int) -> None:
    text = line(3)
    at = min(at, len(text))
    assert parse_iterations(text[:at] + colour + text[at:]) == parse_iterations(text)


def test_a_progress_bar_before_the_line_is_passed_over() -> None:
    bar = " 50%|#####     | 5/10 [00:01<00:01]\r"
    assert parse_iterations(bar + line(3)) == parse_iterations(line(3))


def test_two_records_in_one_line_are_two() -> None:
    both = parse_iterations(line(3, ms=30.0) + line(4, ms=40.0))
    assert [(r.number, r.step_time_ms) for r in both] == [(3, 30.0), (4, 40.0)]


@given(st.integers(0, 500))
def test_a_cut_line_never_gives_a_wrong_number(cut: int) -> None:
    """What is left of a line says the same as the whole line, or nothing."""
    (whole,) = parse_iterations(line(3, ms=4317.8, loss=12.13451))
    for found in parse_iterations(line(3, ms=4317.8, loss=12.13451)[:cut]):
        assert (found.number, found.planned) == (whole.number, whole.planned)
        assert found.values.items() <= whole.values.items()


@given(st.text())
def test_no_text_raises(text: str) -> None:
    for parse in (
        parse_iterations, parse_peak_memory, parse_validation, parse_checkpoint_save, parse_step_time, parse_argument,
        argument_value, split_prefix,
    ):  # fmt: skip
        parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: 2.5 | reserved: 3.0",
        " 4: [Rank 0] (after 2 iterations) memory (MB) | allocated: 1 | max allocated: 2.5 | device memory used: 9 |",
    ],
)
def test_memory(text: str) -> None:
    assert parse_peak_memory(text) == 2.5
    assert parse_peak_memory(text.replace("max allocated: 2.5", "max allocated: x")) is None


@pytest.mark.parametrize(
    ("text", "iteration", "name"),
    [
        (" validation loss at iteration 10 | lm loss value: 1.5E+00 | lm loss PPL: 4.4E+00 | ", 10, ""),
        (
            " validation loss at iteration 10 on test set | lm loss value: 1.5E+00 | lm loss PPL: 4.4E+00 | ",
            10,
            "on test set",
        ),
        (
            " validation-code loss at iteration 10 on validation set | lm loss value: 1.5E+00 |",
            10,
            "code on validation set",
        ),
    ],
)
def test_validation(text: str, iteration: int, name: str) -> None:
    found = parse_validation(text)
    assert found is not None
    assert (found.iteration, found.losses["lm loss"]) == (iteration, 1.5)
    assert found.name.split() == name.split()


def test_bridge_step_time() -> None:
    found = parse_step_time("run/0 Step Time : 9.09s GPU utilization: 663.5MODEL_TFLOP/s/GPU")
    assert found is not None
    assert (found.seconds, found.tflops_per_gpu) == (9.09, 663.5)


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("  fp8 ............................................. hybrid", ("fp8", "hybrid")),
        (f"  {LONG[:47]} . 0", (LONG[:47], "0")),
        (f"  {LONG}  True", (LONG, "True")),
        ("  blend ........................................... ['a b', 'c']", ("blend", "['a b', 'c']")),
    ],
)  # fmt: skip
def test_argument(text: str, pair: tuple[str, str]) -> None:
    assert parse_argument(text) == pair


@pytest.mark.parametrize("text", ["training ...", "INFO: something ... done", "", "----------------"])
def test_prose_is_no_argument(text: str) -> None:
    assert parse_argument(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [("None", None), ("True", True), ("3e-05", 3e-05), ("[0, 1]", [0, 1]), ("AttnBackend.fused", "AttnBackend.fused")],
)
def test_argument_value(text: str, value: object) -> None:
    assert argument_value(text) == value
