"""Which runs are repeats of each other, which may be compared, and what is said of the rest."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from made_runs import FP8, Made, of, write_log, write_run
from rich.console import Console

from fp8launch.report.comparison import Comparison
from fp8launch.report.export import differences_table, to_markdown, to_terminal


def terminal(comparison: Comparison) -> str:
    out = io.StringIO()
    Console(file=out, width=300).print(to_terminal(comparison))
    return out.getvalue()


def test_a_narrow_terminal_drops_columns_and_breaks_no_number(logs) -> None:
    found = of(*logs(a_run_of_bf16=Made(), a_run_in_fp8=Made(ms=lambda i: 800.0 + 10 * (i % 3), precision=FP8)))
    out = io.StringIO()
    Console(file=out, width=80).print(to_terminal(found, 80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    head = "\n".join(lines[: lines.index("")])
    assert "tokens/s/GPU" in head and "variant" in head and "TFLOP/s" not in head
    for row in found.rows:
        assert any(line.startswith(f"{row.label} ") for line in lines), head
    assert re.search(r"[0-9,]{6} ± [0-9]+ ", head), head


class TestGuard:
    @pytest.mark.parametrize(
        ("other", "reason"),
        [
            (Made(precision=FP8, sequence=8192), "sequence length 8192 against 4096"),
            (Made(precision=FP8, batch=128), "global batch 128 against 64"),
            (Made(precision=FP8, world=16, batch=128), "number of GPUs 16 against 8"),
            (Made(precision=FP8, arguments={"num_layers": 8}), "model (num_layers) 8 against 4"),
            (Made(precision=FP8, arguments={"num_experts": 8}), "model (num_experts) 8 against off"),
            (Made(precision=FP8, arguments={"padded_vocab_size": 32000}), "model (padded_vocab_size)"),
        ],
    )
    def test_unlike_runs_have_no_ratio(self, logs, other: Made, reason: str) -> None:
        base = Made(arguments={"num_experts": None}) if "num_experts" in other.arguments else Made()
        found = of(*logs(base=base, other=other))
        speedup = found.rows[1].speedup
        assert speedup.value is None
        assert not speedup.comparability.comparable
        assert any(reason in text for text in speedup.comparability.unlike), speedup.comparability.unlike
        assert not found.valid
        assert found.rows[1].tokens is not None, "the run's own numbers stay"

    def test_force_gives_the_ratio_with_a_mark(self, logs) -> None:
        found = of(*logs(base=Made(), other=Made(precision=FP8, batch=128)), force=True)
        assert found.rows[1].speedup.value == pytest.approx(2)
        assert not found.valid
        assert "2.00×!" in to_markdown(found)

    @pytest.mark.parametrize(
        ("name", "value"), [("tensor_model_parallel_size", 2), ("micro_batch_size", 2), ("overlap_grad_reduce", True)]
    )
    def test_what_may_change_the_speed_is_noted(self, logs, name: str, value: object) -> None:
        base = Made(arguments={name: 1 if value == 2 else False})
        found = of(*logs(base=base, other=Made(precision=FP8, arguments={name: value})))
        speedup = found.rows[1].speedup
        assert found.valid
        assert speedup.value == 1
        assert any(name in noted for noted in speedup.comparability.noted)
        assert name in {d.name for d in found.differences}
        assert "1.00×\\*" in to_markdown(found)

    @pytest.mark.parametrize(("name", "value"), [("seed", 7), ("lr", 1e-5), ("train_iters", 9)])
    def test_what_changes_the_loss_only_is_listed_as_that(self, logs, name: str, value: object) -> None:
        """`What differs: nothing` was printed while the learning rate differed."""
        found = of(*logs(base=Made(arguments={name: 1}), other=Made(precision=FP8, arguments={name: value})))
        assert found.rows[1].speedup.comparability.noted == ()
        assert [(d.name, d.kind) for d in found.differences] == [("precision", "noted"), (name, "neutral")]
        assert ("changes the loss only", "1", str(value)) in [row[1:] for row in differences_table(found).rows]
        assert f"changes the loss only: {name}" in terminal(found)
        assert name in to_markdown(found)

    def test_what_changes_neither_speed_nor_loss_is_no_difference(self, logs) -> None:
        found = of(*logs(base=Made(arguments={"save": "/a"}), other=Made(precision=FP8, arguments={"save": "/b"})))
        assert [d.name for d in found.differences] == ["precision"]

    def test_a_ratio_has_one_unit(self, tmp_path: Path) -> None:
        """A log with tokens/s next to one without gave a speed-up of tokens over iterations, 79256×."""
        full = write_log(tmp_path / "full.log", Made())
        bare = tmp_path / "bare.log"
        bare.write_text(Made(ms=lambda i: 500.0).text().partition("end of arguments ---------------------\n")[2])
        found = of(full, bare)
        speedup = found.rows[1].speedup
        assert (speedup.value, speedup.unit) == (2.0, "iterations/s")
        assert "bare: speed-up in iterations/s" in terminal(found)
        assert found.rows[0].speedup.unit == "tokens/s/GPU"

    def test_scaling_without_a_sequence_length_counts_samples(self, tmp_path: Path) -> None:
        """Twice the GPUs at half the step time of the same batch is an efficiency of 1, in iterations/s it was 2."""
        logs = []
        for world in (1, 2):
            made = Made(ms=lambda i, world=world: 1000.0 / world, world=world, batch=64)
            text = re.sub(r"  seq_length .*\n", "", made.text())
            logs.append(tmp_path / f"{world}.log")
            logs[-1].write_text(text)
        efficiency = of(*logs).rows[1].efficiency
        assert efficiency.mode == "strong"
        assert efficiency.ratio.value == pytest.approx(1.0)
        assert efficiency.ratio.unit == "samples/s/GPU"

    @pytest.mark.parametrize(
        ("other", "unlike", "unknown"),
        [
            (3_212_749_824, (), False),
            (3_213_136_000, (), False),  # a vocabulary that is padded to another multiple
            (2_917_051_392, ("parameters 2,917,051,392 against 3,212,749,824",), False),
            (None, (), True),
        ],
    )
    def test_models_whose_sizes_are_not_stated_are_told_apart_by_parameters(
        self, tmp_path: Path, other: int | None, unlike: tuple[str, ...], unknown: bool
    ) -> None:
        """Two programs trained a model with 128,256 and with 32,000 words, and their speeds were compared."""
        folders = []
        for name, parameters in (("base", 3_212_749_824), ("other", other)):
            arguments = {"seq_length": 4096, "global_batch_size": 64}
            made = Made(world=1, precision=FP8 if name == "other" else "bf16")
            folders.append(write_run(tmp_path / name, made, arguments=arguments))
            log = folders[-1] / "logs" / "1-0.log"
            text = log.read_text()
            if name == "other":
                text = text.partition("end of arguments ---------------------\n")[2]
            if parameters is not None:
                text = f" > number of parameters on (tensor, pipeline) model parallel rank (0, 0): {parameters}\n{text}"
            log.write_text(text)
        found = of(*folders)
        comparability = found.rows[1].speedup.comparability
        assert comparability.unlike == unlike
        assert any("do not both state num_layers" in note for note in comparability.noted) == unknown
        assert (found.rows[1].speedup.value is None) == bool(unlike)

    def test_logs_of_one_name_in_two_folders_are_two_runs(self, tmp_path: Path) -> None:
        """Two logs without arguments, both called run.log, were one row with `2 ok`, the mean of both."""
        logs = []
        for folder, ms in (("a", 1000.0), ("b", 500.0)):
            logs.append(tmp_path / folder / "run.log")
            logs[-1].parent.mkdir()
            bare = Made(ms=lambda i, ms=ms: ms).text().partition("end of arguments ---------------------\n")[2]
            logs[-1].write_text(bare)
        found = of(*logs)
        assert [(row.label, row.step_time.median) for row in found.rows] == [
            ("a/run", 1000.0),
            ("b/run", 500.0),
        ]
        assert found.rows[1].speedup.value == 2.0

    def test_a_row_of_differences_does_not_repeat_the_header(self, logs) -> None:
        found = of(*logs(a=Made(), b=Made(precision=FP8, arguments={"lr": 1e-5})))
        assert [row[0] for row in differences_table(found).rows] == ["lr"]
        assert [d.name for d in found.differences] == ["precision", "lr"]

    def test_runs_alike_in_all_but_the_seed_are_repeats(self, logs) -> None:
        found = of(*logs(a=Made(), b=Made(arguments={"seed": 5}), c=Made(precision=FP8)))
        assert [(e.label, len(e.runs)) for e in found.rows] == [("bf16", 2), ("tensorwise", 1)]

    def test_another_gpu(self, tmp_path: Path) -> None:
        a = write_run(tmp_path / "a", Made())
        b = write_run(tmp_path / "b", Made(precision=FP8), gpu="b200")
        found = of(a, b, gpu=None)
        assert found.rows[1].speedup.comparability.unlike == ("GPU model b200 against h100",)

    def test_image_environment_and_software_are_noted(self, tmp_path: Path) -> None:
        a = write_run(tmp_path / "a", Made(), image={"image": "x.sqsh", "digest": "sha256:1"}, environment={"N": "1"})
        b = write_run(
            tmp_path / "b", Made(precision=FP8), image={"image": "x.sqsh", "digest": "sha256:2"},
            environment={"N": "2"}, git={"commit": "c" * 40, "dirty": False},
        )  # fmt: skip
        noted = of(a, b, gpu=None).rows[1].speedup.comparability.noted
        assert [text.split(" ")[0] for text in noted] == ["env", "image"]

    def test_what_only_one_run_sets_makes_it_no_repeat_of_the_other(self, tmp_path: Path) -> None:
        a = write_run(tmp_path / "a", Made(), environment={"N": "1"})
        b = write_run(tmp_path / "b", Made(), environment={"N": "1", "NCCL_ALGO": "Tree"})
        c = write_run(tmp_path / "c", Made(), environment={"N": "1", "FP8LAUNCH_CONFIG": '{"fused_rope": true}'})
        d = write_run(tmp_path / "d", Made(), environment={"N": "1"}, recipe={"launch": {"script": "/x/peer.py"}})
        again = write_run(tmp_path / "again", Made(), environment={"N": "1"})
        found = of(a, b, c, d, again, gpu=None)
        labels = [row.label for row in found.rows]
        assert labels == ["bf16", "bf16, NCCL_ALGO=Tree", "bf16, fused_rope=True", "bf16, peer"]
        assert [len(row.runs) for row in found.rows] == [2, 1, 1, 1]
        noted = [row.speedup.comparability.noted for row in found.rows[1:]]
        assert noted[0] == ("env NCCL_ALGO Tree against unset",)
        assert noted[1] == ("config fused_rope on against unset",)
        assert noted[2] == ("script peer.py against fp8launch's entry",)

    def test_logs_that_do_not_say_what_they_were_started_with(self, tmp_path: Path) -> None:
        text = (
            " iteration {}/9 | elapsed time per iteration (ms): {} | tokens/sec/gpu: {} | global batch size: 8 |"
            " lm loss: 2.0 |"
        )
        for name, ms in (("a", 100.0), ("b", 50.0)):
            lines = [text.format(i, ms, 5e5 / ms) for i in range(1, 10)]
            (tmp_path / f"{name}.log").write_text("\n".join(lines))
        found = of(tmp_path / "a.log", tmp_path / "b.log", gpu=None)
        a, b = found.rows
        assert (a.label, b.label) == ("a", "b"), "nobody knows that they are repeats"
        assert b.speedup.value == pytest.approx(2)
        assert any("do not both state" in noted for noted in b.speedup.comparability.noted)


def sweep_beside_logs(root: Path) -> Comparison:
    runs = [write_run(root / f"{lr}", Made(arguments={"lr": lr, "weight_decay": 0.125})) for lr in (1e-4, 3e-4)]
    logs = []
    for precision in ("bf16", FP8):
        made = Made(ms=lambda i: 900.0 + 10 * (i % 3), precision=precision, arguments={"num_layers": 32})
        logs.append(write_log(root / f"{precision}.log", made))
    return of(*runs, *logs, gpu=None)


@pytest.mark.parametrize("width", [80, 120])
def test_a_terminal_breaks_no_interval_and_names_what_it_does_not_show(width: int, tmp_path: Path) -> None:
    """Labels and intervals took five lines each in 80 columns."""
    found = sweep_beside_logs(tmp_path)
    out = io.StringIO()
    Console(file=out, width=width).print(to_terminal(found, width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    table = lines[: lines.index("")]
    assert len(table) <= 2 + 2 * len(found.rows), "\n".join(table)
    for line in table[2:]:
        assert line.count("[") == line.count("]"), line
    if width == 80:
        assert any(line.startswith("not shown in 80 columns, but in --md, --csv and --html: ") for line in lines)


def test_long_lists_are_cut_in_the_terminal(tmp_path: Path) -> None:
    """A line named some thirty arguments; parity repeated for each row that the runs are too short."""
    many = {f"some_argument_{i}": i for i in range(20)}
    logs = [write_log(tmp_path / "bf16.log", Made())]
    for i in (1, 2):
        arguments = {"micro_batch_size": i, **dict.fromkeys(many, i)}
        logs.append(write_log(tmp_path / f"{i}.log", Made(precision=FP8, arguments=arguments)))
    logs[0].write_text(Made(arguments=dict.fromkeys(many, 0)).text())
    text = " ".join(terminal(of(*logs)).split())
    assert " more (--md or --html lists all)" in text
    assert text.count("too short") == 1


def test_only_an_unnamed_difference_is_marked(logs) -> None:
    """`MBS 2` was marked as differing in the micro batch."""
    named = of(*logs(one=Made(), two=Made(arguments={"micro_batch_size": 2})))
    assert named.rows[1].label == "MBS 2"
    assert named.rows[1].speedup.comparability.noted == ()
    both = of(*logs(one=Made(), fp8=Made(precision=FP8, arguments={"micro_batch_size": 2})))
    assert both.rows[1].speedup.comparability.noted == ("micro_batch_size 2 against 1",)
