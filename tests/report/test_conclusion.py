"""The sentence that reports open with: honest where a difference may be noise."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from made_runs import OUT_OF_MEMORY, Made, of, write_log, write_run, write_study

from fp8launch.report.columns import main_table, ratio_text
from fp8launch.report.conclusion import conclusion


def learning(root: Path, gap: float, repeats: int) -> str:
    """The conclusion of a study over three learning rates, whose losses differ by `gap` and by the noise of repeats."""
    points = []
    for step, lr in enumerate((1e-4, 3e-4, 1e-3)):
        for repeat in range(1, repeats + 1):
            noise = 0.01 * repeat + 0.001 * step
            loss = partial(lambda i, off: 2 + off + 8 / (1 + i / 10), off=gap * step + noise)
            made = Made(iterations=60, loss=loss, arguments={"lr": lr, "seed": repeat})
            points.append(({"train.lr": lr, "megatron.seed": repeat}, 1, 1, made))
    return conclusion(of(write_study(root, points), gpu=None))


def test_of_learning_rates_it_is_about_the_loss(tmp_path: Path) -> None:
    assert learning(tmp_path / "a", 0.1, 3).startswith("Lowest loss at the end: lr 0.0001 with 3.2059 ± 0.0100, ")
    assert "; 3 seeds each cannot separate lr " in learning(tmp_path / "b", 0.0, 3)
    single = learning(tmp_path / "c", 0.1, 1)
    assert single.startswith("Lowest loss at the end: lr 0.0001 with ")
    assert "The order may be chance, because each has a single seed: --seeds 1,2,3 measures the noise" in single


def test_of_two_programs_it_is_about_the_speed(tmp_path: Path) -> None:
    """Beside a peer that learns otherwise, the loss of three repeats each was called the result."""
    folders = []
    for program, lr, ms in (("Megatron-Bridge 0.6.0", 3e-4, 750), ("Hugging Face Accelerate", 3e-5, 1000)):
        for repeat in (1, 2, 3):
            made = Made(ms=lambda i, ms=ms: ms + 7 * i % 11, iterations=40, arguments={"lr": lr})
            folders.append(write_run(tmp_path / f"{program}{repeat}", made, engine={"entry": program}))
    found = conclusion(of(*folders, gpu=None))
    assert found.startswith("Megatron-Bridge 0.6 was fastest: Hugging Face Accelerate reached 0.75× its speed (")


def pair(root: Path, ms: float, spread: float) -> str:
    slow = Made(ms=lambda i: 1000 + spread * (7 * i % 11 - 5) / 5, iterations=40)
    fast = Made(ms=lambda i: ms + spread * (4 * i % 11 - 5) / 5, iterations=40, precision="tensorwise")
    return conclusion(of(write_log(root / "bf16.log", slow), write_log(root / "fp8.log", fast)))


@pytest.mark.parametrize(
    ("ms", "spread", "begin"),
    [
        (750, 5, "tensorwise was fastest: 1.33× bf16 (95 % interval 1.3"),
        (1250, 5, "bf16 was fastest: tensorwise reached 0.80× its speed ("),
        (1000, 200, "No difference in speed seen between bf16 and tensorwise ("),
    ],
)
def test_of_precisions_it_is_about_the_speed(tmp_path: Path, ms: float, spread: float, begin: str) -> None:
    found = pair(tmp_path, ms, spread)
    assert found.startswith(begin)
    assert found.endswith("within these single runs); losses not judged: too few iterations.")


def test_without_a_number_it_says_so(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", Made(iterations=1, end=OUT_OF_MEMORY))
    assert conclusion(of(log)) == "No run has a speed or a final loss (failed: out-of-memory)."
    assert conclusion(of(write_log(tmp_path / "b.log", Made()))).endswith("with nothing to compare it to.")


def test_logs_without_arguments_have_no_winner(tmp_path: Path) -> None:
    """They may have done different work."""
    logs = []
    for name, ms in (("slow", 1000), ("fast", 750)):
        log = write_log(tmp_path / f"{name}.log", Made(ms=lambda i, ms=ms: ms + i % 3, iterations=40))
        log.write_text("".join(line for line in log.read_text().splitlines(True) if "iteration " in line))
        logs.append(log)
    said = conclusion(of(*logs))
    assert said.startswith("It is unknown which of these runs is faster: the logs of slow and fast do not contain all")


def test_single_runs_whose_steps_vary_more_than_they_differ_have_no_winner(tmp_path: Path) -> None:
    """The interval of the median over 400 steps is narrow, but says nothing of another run."""
    logs = [
        write_log(tmp_path / f"{mbs}.log", Made(
            ms=lambda i, ms=ms: ms * (0.8 + 0.4 * (7 * i % 11) / 10), iterations=400,
            arguments={"micro_batch_size": mbs},
        ))
        for mbs, ms in ((1, 1000), (4, 890))
    ]  # fmt: skip
    found = of(*logs)
    [ratio] = [row.speedup for row in found.rows if row.speedup and row.speedup.value != 1]
    assert ratio.interval is not None and ratio.interval.low > 1
    assert conclusion(found).startswith("No winner can be named among MBS 1 and MBS 4: single runs that differ by ")
    assert ratio_text(ratio, "×", 2).startswith("not distinguishable")


def test_losses_of_different_models_are_not_ranked(tmp_path: Path) -> None:
    """ "Lowest loss" was said of logs of models of different sizes."""
    logs = []
    for layers, lr in ((2, 1e-4), (4, 3e-4), (8, 1e-3)):
        made = Made(iterations=60, loss=lambda i, off=layers: 9 - off / 2, arguments={"lr": lr, "num_layers": layers})
        logs.append(write_log(tmp_path / f"{layers}.log", made))
    assert "loss" not in conclusion(of(*logs, gpu=None)).split("losses not judged")[0]


def test_each_task_has_its_own_best_rate(tmp_path: Path) -> None:
    points = []
    for layers in (2, 4):
        for lr in (1e-4, 3e-4):
            loss = partial(lambda i, off: 5 - off, off=layers + 1e3 * lr)
            made = Made(iterations=60, loss=loss, arguments={"lr": lr, "num_layers": layers})
            points.append(({"train.lr": lr, "model.num_layers": layers}, 1, 1, made))
    found = conclusion(of(write_study(tmp_path, points), gpu=None))
    for layers in (2, 4):
        assert f"Lowest loss at the end: lr 0.0003, layers {layers} with " in found


def test_the_global_batch_is_about_loss_and_speed(tmp_path: Path) -> None:
    points = []
    for batch, loss in ((4, 2.0), (8, 1.5)):
        ms = 25.0 * batch
        made = Made(iterations=60, batch=batch, ms=lambda i, ms=ms: ms + i % 3, loss=lambda i, loss=loss: loss)
        points.append(({"batch.global": batch}, 1, 1, made))
    found = of(write_study(tmp_path, points), gpu=None)
    assert "GBS 8 with 1.5000, next GBS 4 with 2.0000" in conclusion(found)
    assert "different numbers of tokens" in conclusion(found)


def test_a_batch_that_ramps_up_counts_with_the_size_of_each_line(tmp_path: Path) -> None:
    """All iterations counted with the last batch size, so that a ramp was as long as a run without one."""
    logs = []
    for lr, first in ((1e-4, 8), (3e-4, 4)):
        made = Made(iterations=60, batch=8, loss=lambda i, lr=lr: 2 + lr, arguments={"lr": lr})  # type: ignore[misc]
        logs.append(write_log(tmp_path / f"{first}.log", made))
        text = logs[-1].read_text()
        for i in range(1, 21):
            begin = text.index(f"iteration {i:8d}/")
            text = text[:begin] + text[begin:].replace(f"size: {8:5d}", f"size: {first:5d}", 1)
        logs[-1].write_text(text)
    found = of(*logs, gpu=None)
    assert "different numbers of tokens" in conclusion(found)
    constant, ramped = (row.runs[0] for row in found.rows)
    assert [constant.tokens_until(i) for i in (1, 60)] == [8 * 4096, 60 * 8 * 4096]
    assert [ramped.tokens_until(i) for i in (1, 20, 60)] == [4 * 4096, 20 * 4 * 4096, (20 * 4 + 40 * 8) * 4096]


def test_rows_are_ranked_by_the_mean_that_the_interval_is_of(tmp_path: Path) -> None:
    """By the median the first rate is better, by the mean of its skewed seeds it is worse."""
    points = []
    for lr, losses in ((1e-4, (2.0, 2.0, 3.5)), (3e-4, (2.1, 2.1, 2.1))):
        for seed, loss in enumerate(losses):
            made = Made(iterations=60, loss=lambda i, loss=loss: loss, arguments={"lr": lr, "seed": seed})
            points.append(({"train.lr": lr, "megatron.seed": seed}, 1, 1, made))
    found = of(write_study(tmp_path, points), gpu=None)
    assert [row.loss.text.split(" ")[0] for row in found.rows] == ["2.5000", "2.1000"]
    assert conclusion(found).startswith("Lowest loss at the end: lr 0.0003 with 2.1000 ")
    assert "; 3 seeds each cannot separate lr 0.0003 from lr 0.0001 (" in conclusion(found)


def test_of_seeds_alone_it_states_the_loss(tmp_path: Path) -> None:
    points = []
    for seed in (1, 2, 3):
        made = Made(iterations=60, loss=lambda i, seed=seed: 2 + 0.1 * seed, arguments={"seed": seed})
        points.append(({"megatron.seed": seed}, 1, 1, made))
    found = of(write_study(tmp_path, points), gpu=None)
    assert "loss 2.2000 ± 0.1000 at the end, mean ± standard deviation of 3 seeds" in conclusion(found)
    assert "loss at the end (perplexity)" in main_table(found.rows).headers


def test_a_sweep_that_changes_no_speed_has_no_speed_up(tmp_path: Path) -> None:
    points = []
    for decay in (0.0, 0.1):
        made = Made(iterations=60, arguments={"weight_decay": decay, "end_weight_decay": decay})
        points.append(({"megatron.weight_decay": decay}, 1, 1, made))
    found = of(write_study(tmp_path, points), gpu=None)
    assert not any(header.startswith("speed-up") for header in main_table(found.rows).headers)
    assert "fastest" not in conclusion(found)
    assert [one.name for one in found.differences] == ["weight_decay"]


def test_losses_are_ranked_by_setting_and_not_by_size(tmp_path: Path) -> None:
    """The same seeds on one and on two nodes were the two lowest losses, and nothing was said of the rates."""
    points = []
    for nodes in (1, 2):
        for lr in (1e-4, 3e-4):
            for seed in (1, 2, 3):
                loss = partial(lambda i, off: 2 + off, off=1e3 * lr + 0.01 * seed)
                made = Made(iterations=60, world=nodes, loss=loss, arguments={"lr": lr, "seed": seed})
                points.append(({"train.lr": lr, "megatron.seed": seed}, nodes, 1, made))
    found = conclusion(of(write_study(tmp_path, points), gpu=None))
    assert found.startswith("Lowest loss at the end: lr 0.0001 with 2.1200 ± 0.0100, next lr 0.0003 with 2.3200")
    assert "% of the speed per GPU of lr 0.0001, 1 node" in found


def test_a_clearly_worse_rate_is_named_next_to_those_without_a_difference(tmp_path: Path) -> None:
    points = []
    for lr, losses in ((1e-4, (2.0, 2.1, 2.2)), (3e-4, (2.1, 2.2, 2.3)), (1e-3, (4.0, 4.1, 4.2))):
        for seed, loss in enumerate(losses):
            made = Made(iterations=60, loss=lambda i, loss=loss: loss, arguments={"lr": lr, "seed": seed})
            points.append(({"train.lr": lr, "megatron.seed": seed}, 1, 1, made))
    found = conclusion(of(write_study(tmp_path, points), gpu=None))
    assert found.startswith("Lowest loss at the end: lr 0.0001 with 2.1000 ± 0.1000, next lr 0.0003 with 2.2000")
    assert "; 3 seeds each cannot separate lr 0.0001 from lr 0.0003 (lr 0.0003 minus lr 0.0001: -" in found
    assert found.endswith("; lr 0.001 is worse than lr 0.0001 after 60 iterations (95 %).")


def rates(seeds: dict[float, int], root: Path, **bad: Made) -> str:
    """The conclusion of learning rates with different numbers of seeds."""
    points = []
    for lr, count in seeds.items():
        for seed in range(1, count + 1):
            loss = partial(lambda i, off: 2 + off, off=1e3 * lr + 0.01 * seed)
            made = Made(iterations=60, loss=loss, arguments={"lr": lr, "seed": seed})
            points.append(({"train.lr": lr, "megatron.seed": seed}, 1, 1, bad.get(f"lr{lr}seed{seed}", made)))
    return conclusion(of(write_study(root, points), gpu=None))


def test_of_rows_with_and_without_seeds_it_names_those_without(tmp_path: Path) -> None:
    """ "Of single seeds" was said of a row with three seeds."""
    assert "because lr 0.0003 has a single seed" in rates({1e-4: 3, 3e-4: 1}, tmp_path / "one")
    assert "because lr 0.0001 and lr 0.0003 have a single seed" in rates({1e-4: 1, 3e-4: 1, 1e-3: 3}, tmp_path / "two")


def test_seeds_without_a_result_are_named(tmp_path: Path) -> None:
    """A rate at which two of three seeds ended was ranked by the third one alone, without a word."""
    gone = Made(iterations=1, end=OUT_OF_MEMORY)
    found = rates({1e-4: 3, 3e-4: 3}, tmp_path, **{"lr0.0001seed2": gone, "lr0.0001seed3": gone})
    assert found.endswith("Only 1 of 3 runs of lr 0.0001 count (failed: out-of-memory).")
    none = rates({1e-4: 1, 3e-4: 1, 1e-3: 1}, tmp_path / "none", **{"lr0.0001seed1": gone})
    assert none.endswith(" No result: lr 0.0001 (failed: out-of-memory).")


def test_seeds_of_precisions_are_about_speed_and_parity(tmp_path: Path) -> None:
    """Losses of bf16 and FP8 were ranked, next to the verdict of their comparison iteration by iteration."""
    points = []
    for precision, ms in (("bf16", 1000), ("tensorwise", 750)):
        for seed in (1, 2, 3):
            loss = partial(lambda i, off: 2 + off + 8 / (1 + i / 10), off=0.001 * seed)
            times = partial(lambda i, ms: ms + i % 3, ms=ms + seed)
            made = Made(ms=times, iterations=300, loss=loss, precision=precision, arguments={"seed": seed})
            points.append(({"precision.recipe": precision, "megatron.seed": seed}, 1, 1, made))
    found = of(write_study(tmp_path, points), gpu=None)
    assert conclusion(found).startswith("tensorwise was fastest: 1.33× bf16 (")
    assert conclusion(found).endswith("losses agree (within 2 % of bf16).")
    assert "loss at the end (perplexity)" in main_table(found.rows).headers


def test_a_sweep_beside_logs_of_another_model_has_its_ranking(tmp_path: Path) -> None:
    """The headline named only the speeds of the logs, and rows of one speed had ratios."""
    points = []
    for lr in (1e-4, 3e-4):
        made = Made(iterations=60, loss=lambda i, lr=lr: 2 + 1e3 * lr, arguments={"lr": lr})
        points.append(({"train.lr": lr}, 1, 1, made))
    logs = []
    for precision, ms in (("bf16", 1000), ("tensorwise", 750)):
        made = Made(ms=lambda i, ms=ms: ms + i % 3, iterations=60, precision=precision, arguments={"num_layers": 8})
        logs.append(write_log(tmp_path / f"{precision}.log", made))
    found = of(write_study(tmp_path, points), *logs, gpu=None)
    said = conclusion(found)
    assert said.startswith("Lowest loss at the end: ") and "lr 0.0001 with 2.1000, next " in said
    assert "tensorwise, layers 8 was fastest: 1.33× bf16, layers 8" in said
    table = main_table(found.rows)
    at = table.headers.index("speed-up [95 % interval]")
    assert [row[at] for row in table.rows[:3]] == ["1.00×", "1.00×", "1.00×"]


def test_scaling_says_whether_the_batch_grew(tmp_path: Path) -> None:
    logs = []
    for world, ms in ((1, 1000), (2, 600)):
        made = Made(ms=lambda i, ms=ms: ms + i % 3, iterations=40, world=world, batch=8)
        logs.append(write_log(tmp_path / f"{world}.log", made))
    found = conclusion(of(*logs, gpu=None))
    assert found.startswith("Strong scaling: bf16, 2 GPUs kept 83.3 % of the speed per GPU of bf16, 1 GPU (")
