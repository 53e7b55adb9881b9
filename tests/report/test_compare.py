"""What `compare` says of real logs and of studies, beside the speed too, and how it is exported."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
from made_runs import FP8, OUT_OF_MEMORY, Made, of, write_log, write_run, write_study
from support import log_text, real_logs, sitting
from tests.support import only, refused

from fp8launch.cli import run as command
from fp8launch.report.export import to_csv, to_markdown
from fp8launch.report.named_runs import read_runs
from fp8launch.report.read_run import arguments_of, manifest_facts, precision_of

LOGS = real_logs("runs")
H200 = real_logs("h200")
FOUR_GPUS = [str(LOGS / f"llama8b_4gpu_{name}_mbs1.log") for name in ("bf16", "tw")]


class TestRealLogs:
    def test_fp8_over_bf16_on_four_h200(self) -> None:
        """By hand, from iterations 3 to 7: medians 5958.4 and 4317.8 ms, 32 x 8192 tokens over 4 GPUs."""
        found = of(*FOUR_GPUS)
        bf16, fp8 = found.rows
        assert (bf16.label, fp8.label) == ("bf16", "tensorwise")
        assert (bf16.step_time.median, fp8.step_time.median) == (5958.4, 4317.8)
        assert fp8.tokens.median == pytest.approx(32 * 8192 / 4 / 4.3178)
        assert fp8.tokens_total == pytest.approx(32 * 8192 / 4.3178)
        assert fp8.speedup.value == pytest.approx(5958.4 / 4317.8)
        assert bf16.speedup.value == 1
        assert fp8.speedup.interval.low < 5958.4 / 4317.8 < fp8.speedup.interval.high
        assert fp8.speedup.interval.covers == "iterations"
        assert (bf16.tflops.median, fp8.tflops.median) == (566.1, 781.2)
        assert fp8.mfu.median == pytest.approx(781.2 / 1979)
        assert (bf16.peak_tflops, fp8.peak_tflops) == (989, 1979)
        assert fp8.peak_memory_mib == pytest.approx(107804, abs=1)
        assert found.valid
        assert found.baseline == "bf16"

    def test_only_the_precision_differs(self) -> None:
        """The dumps differ in three arguments; the FP8 recipe's default and a flag that follows it are no news."""
        assert [(d.name, d.axis) for d in of(*FOUR_GPUS).differences] == [("precision", True)]

    def test_a_folder_is_read_as_its_logs(self) -> None:
        found = of(H200)
        assert [e.label for e in found.rows] == ["bf16", "blockwise e4m3", "tensorwise"]
        assert [round(e.speedup.value, 3) for e in found.rows] == [1, 1.145, 1.221]

    def test_the_baseline_is_free(self) -> None:
        found = of(H200, baseline="tensorwise")
        assert [round(e.speedup.value, 3) for e in found.rows] == [0.819, 0.938, 1]
        by_run = of(H200, baseline="llama8b_4layers_tensorwise_1gpu")
        assert [e.speedup.value for e in by_run.rows] == [e.speedup.value for e in found.rows]
        assert of(H200, baseline="fp8_recipe=tensorwise").baseline == "tensorwise"

    def test_unknown_baseline(self) -> None:
        problem = only(refused(of, H200, baseline="tensorwize"))
        assert problem.code == "unknown-baseline"
        assert "'tensorwise'" in problem.fix

    def test_one_run_alone(self) -> None:
        found = of(FOUR_GPUS[0])
        assert found.valid
        assert found.rows[0].speedup is None
        assert found.rows[0].efficiency is None

    def test_a_log_without_arguments_is_not_the_baseline_of_logs_with_them(self) -> None:
        logs = sitting("2026-11-28-several-x2")
        found = of(logs / "zero2_te.log", *(logs / f"{name}.log" for name in ("dp2", "fsdp", "tp2")))
        assert found.baseline == "delayed"
        assert [row.speedup.value is None for row in found.rows] == [False] * 4

    def test_layouts_are_variants_and_the_other_model_is_refused(self) -> None:
        found = of(sitting("2026-11-20-layouts"), baseline="dp4_pg")
        by_label = {e.label: e for e in found.rows}
        assert {"tensorwise, CP 2", "tensorwise, TP 2, SP", "tensorwise, FSDP", "tensorwise, PP 2, VP 2"} <= set(
            by_label
        )
        moe = by_label["tensorwise, experts 8, EP 4"]
        assert moe.speedup.value is None
        assert any("num_experts" in reason for reason in moe.speedup.comparability.unlike)
        tp = by_label["tensorwise, TP 2, SP"].speedup
        assert tp.value == pytest.approx(466.45 / 495.8, rel=1e-4)
        assert any("tensor_model_parallel_size 2 against 1" in noted for noted in tp.comparability.noted)
        assert not found.valid


class TestStudies:
    def study(self, tmp_path: Path) -> Path:
        def made(precision: str, nodes: int, ms: float) -> Made:
            return Made(ms=lambda i: ms, world=8 * nodes, batch=64 * nodes, precision=precision)

        points = [
            ({"precision.recipe": precision}, nodes, repeat, made(precision, nodes, ms * slower + repeat))
            for precision, ms in (("bf16", 1000.0), (FP8, 700.0))
            for nodes, slower in ((1, 1.0), (2, 1.05), (4, 1.1))
            for repeat in (1, 2, 3)
        ]
        return write_study(tmp_path, points)

    def test_each_size_has_its_own_baseline(self, tmp_path: Path) -> None:
        found = of(self.study(tmp_path), gpu=None)
        assert [(e.label, e.nodes) for e in found.rows] == [
            (label, nodes) for label in ("bf16", FP8) for nodes in (1, 2, 4)
        ]
        assert found.valid
        for entry, slower in zip(found.rows[3:], (1, 1.05, 1.1), strict=True):
            assert entry.speedup.against == f"bf16, {entry.nodes} node{'s' * (entry.nodes > 1)}"
            assert entry.speedup.value == pytest.approx((1000 * slower + 2) / (700 * slower + 2))
            assert entry.speedup.interval.covers == "runs"
            assert entry.speedup.interval.method == "Welch t over 3 and 3 runs"

    def test_the_axis_is_no_difference_but_two_at_once_are_noted(self, tmp_path: Path) -> None:
        def made(precision: str, tp: int) -> Made:
            return Made(precision=precision, arguments={"tensor_model_parallel_size": tp})

        points = [
            ({"precision.recipe": p, "parallel.tp": tp}, 1, 1, made(p, tp))
            for p, tp in (("bf16", 1), (FP8, 1), (FP8, 2))
        ]
        found = of(write_study(tmp_path, points), gpu=None)
        assert [e.label for e in found.rows] == ["bf16", FP8, f"{FP8}, TP 2"]
        assert found.rows[1].speedup.comparability.noted == ()
        assert found.rows[2].speedup.comparability.noted == ("tensor_model_parallel_size 2 against 1",)

    def test_weak_scaling(self, tmp_path: Path) -> None:
        found = of(self.study(tmp_path), gpu=None)
        four = found.rows[2]
        assert four.efficiency.mode == "weak"
        assert {d.name for d in found.differences if d.axis} == {"precision", "world_size", "global_batch_size"}
        assert four.efficiency.ratio.against == "bf16, 1 node"
        assert four.efficiency.ratio.value == pytest.approx(1002 / 1102)
        assert four.tokens_total == pytest.approx(4 * 64 * 4096 / 1.102)

    def test_strong_scaling(self, logs) -> None:
        one, four = Made(ms=lambda i: 4000.0, world=8), Made(ms=lambda i: 1250.0, world=32)
        found = of(*logs(one=one, four=four))
        assert [e.efficiency.mode for e in found.rows] == ["strong", "strong"]
        assert found.rows[1].efficiency.ratio.value == pytest.approx(4000 / (4 * 1250))
        assert found.valid

    def test_neither_weak_nor_strong(self, logs) -> None:
        """One variant whose batch grows, but not with the GPUs: without a study these are two variants."""
        found = of(*logs(one=Made(world=8, batch=64), four=Made(world=32, batch=128)))
        assert [e.efficiency for e in found.rows] == [None, None]
        assert not found.valid

    def test_neither_in_a_study(self, tmp_path: Path) -> None:
        points = [({}, 1, 1, Made(world=8, batch=64)), ({}, 4, 1, Made(world=32, batch=128))]
        found = of(write_study(tmp_path, points), gpu=None)
        assert found.rows[1].efficiency.mode == "neither"
        assert found.rows[1].efficiency.ratio.value is None
        assert not found.valid

    def test_a_failed_point_is_a_row_without_a_number(self, tmp_path: Path) -> None:
        dead = Made(iterations=1, precision=FP8, end=OUT_OF_MEMORY)
        points = [
            ({"precision.recipe": "bf16"}, 1, 1, Made()),
            ({"precision.recipe": FP8}, 1, 1, dead),
            ({"precision.recipe": "delayed"}, 1, 1, None),
            ({"precision.recipe": "blockwise"}, 1, 1, Made(precision="blockwise", iterations=3, end="")),
            ({"precision.recipe": "blockwise"}, 1, 2, Made(precision="blockwise", iterations=0, end="")),
        ]
        found = of(write_study(tmp_path, points), gpu=None)
        rows = {row["variant"]: row for row in found.as_json()["rows"]}
        assert rows[FP8]["status"] == "failed"
        assert rows[FP8]["status_text"] == "failed: out-of-memory"
        assert rows["delayed"]["status"] == "no_data"
        assert rows["blockwise"]["status_text"] == "1 of 2 ok; no data"
        for label in (FP8, "delayed"):
            assert rows[label]["tokens_per_s_per_gpu"] is None
            assert rows[label]["speedup"]["value"] is None
        assert found.valid, "what failed misleads nobody"

    def test_points_that_never_ran_are_listed(self, tmp_path: Path) -> None:
        """Cut off before its folder was made, and before it got a job."""
        points = [
            ({"precision.recipe": p}, n, r, Made(precision=p, world=8 * n, batch=64 * n))
            for p in ("bf16", FP8)
            for n in (1, 2)
            for r in (1, 2)
        ]
        folder = write_study(tmp_path, points)
        for run in ("run05", "run06", "run07"):
            shutil.rmtree(folder / run)
        write_run(folder / "run07", None, nodes=2, study={"name": folder.name, "point": points[7][0], "repeat": 2})
        found = of(folder, gpu=None)
        rows = {(row["variant"], row["nodes"]): row for row in found.as_json()["rows"]}
        assert rows[FP8, 1]["status_text"] == "1 of 2 ok; not submitted"
        assert rows[FP8, 2]["status"] == "missing"
        assert rows[FP8, 2]["status_text"] == "0 of 2 ok; not submitted"
        assert [run["status"] for run in rows[FP8, 2]["runs"]] == ["missing", "missing"]
        assert len(rows) == 4
        assert found.valid
        assert any("3 runs of the study missing: run05, run06, run07; repeat the same" in note for note in found.notes)

    def test_points_left_out_by_the_check_say_so(self, tmp_path: Path) -> None:
        folder = write_study(tmp_path, [({"precision.recipe": "bf16"}, 1, 1, Made())])
        record = json.loads((folder / "study.json").read_text())
        why = "fails the check: fp8-on-a100"
        record["left_out"] = [{**record["points"][0], "run": "x", "values": {"precision.recipe": FP8}, "why": why}]
        (folder / "study.json").write_text(json.dumps(record))
        found = of(folder, gpu=None)
        assert [e.status for e in found.rows] == ["ok", why]

    def test_nothing_but_failures_is_no_comparison(self, tmp_path: Path) -> None:
        found = of(write_study(tmp_path, [({}, 1, 1, Made(iterations=1, end=OUT_OF_MEMORY))]), gpu=None)
        assert found.problems == ("no run has a speed or a final loss",)

    def test_a_resubmitted_point_counts_once(self, tmp_path: Path) -> None:
        dead = Made(iterations=1, end=OUT_OF_MEMORY)
        found = of(write_study(tmp_path, [({}, 1, 1, dead), ({}, 1, 1, Made()), ({}, 1, 2, Made())]), gpu=None)
        assert found.rows[0].status == "ok"
        assert len(found.rows[0].runs) == 2
        assert "run00 (failed) is replaced by run01" in found.rows[0].notes

    def test_sequence_as_an_axis(self, tmp_path: Path) -> None:
        points = [
            ({"precision.recipe": p, "batch.sequence": s}, 1, 1, Made(ms=lambda i, t=t: t, sequence=s, precision=p))
            for p, t in (("bf16", 1000.0), (FP8, 800.0))
            for s in (2048, 4096)
        ]
        found = of(write_study(tmp_path, points), gpu=None, baseline="precision.recipe=bf16")
        assert [e.label for e in found.rows][2:] == ["tensorwise, seq 2048", "tensorwise, seq 4096"]
        assert [e.speedup.value for e in found.rows] == [1, 1, 1.25, 1.25]
        assert found.rows[3].speedup.against.startswith("bf16, seq 4096")
        assert found.valid


class TestBesideTheSpeed:
    def test_energy_per_token(self, logs) -> None:
        found = of(*logs(a=Made(joules=300.0)))
        assert found.rows[0].energy_per_token == pytest.approx(300 * 8 / (64 * 4096))

    def test_cost_per_million_tokens(self, logs) -> None:
        found = of(*logs(a=Made()), price_per_gpu_hour=3.6)
        per_gpu_second = 64 * 4096 / 8
        assert found.rows[0].cost_per_million_tokens == pytest.approx(0.001 / per_gpu_second * 1e6)

    def test_settings_nested_too_deeply_are_no_facts(self) -> None:
        facts = manifest_facts({"environment": {"FP8LAUNCH_CONFIG": "[" * 100_000}}, Path("/runs/a"))
        assert not [name for name in facts if name.startswith("config ")]

    def test_a_batch_of_nothing_has_no_speed_in_tokens(self, tmp_path: Path) -> None:
        log = write_log(tmp_path / "a.log", Made(batch=0, joules=50.0))
        row = only(of(log, price_per_gpu_hour=2.0).rows)
        assert (row.tokens, row.cost_per_million_tokens, row.energy_per_token) == (None, None, None)
        assert row.step_time.median == 1000

    def test_published_figure(self, tmp_path: Path) -> None:
        reference = {"tokens_per_s_per_gpu": 40000, "tflops_per_gpu": 700, "gpus": 8, "source": "a page, 2026"}
        run = write_run(tmp_path / "a", Made(), recipe={"reference": reference})
        published = of(run, gpu=None).rows[0].published
        assert published.ratio == pytest.approx(64 * 4096 / 8 / 40000)
        assert published.notes == ()
        larger = write_run(tmp_path / "b", Made(world=16, batch=128), recipe={"reference": reference})
        assert of(larger, gpu=None).rows[0].published.notes == ("the published figure is for 8 GPUs",)

    def test_one_published_figure_for_two_variants(self, tmp_path: Path) -> None:
        reference = {"tokens_per_s_per_gpu": 40000, "gpus": 8, "source": "a page, 2026"}
        runs = [
            write_run(tmp_path / p, Made(precision=p), recipe={"reference": reference}) for p in ("bf16", "delayed")
        ]
        assert all("one of them" in e.published.notes[0] for e in of(*runs, gpu=None).rows)

    def test_tflops_of_another_formula_are_not_set_beside_megatrons(self, tmp_path: Path) -> None:
        """The same run, one log with a throughput that counts attention without the causal mask."""
        text = log_text(Path(FOUR_GPUS[0]))
        other = tmp_path / "other.log"
        other.write_text(text.replace("(TFLOP/s/GPU): 56", "(TFLOP/s/GPU): 63"))
        found = of(FOUR_GPUS[1], other)
        assert found.rows[1].tflops.median == pytest.approx(566.1, rel=2e-3)
        assert any("recomputed for all" in note for note in found.notes)


class TestExports:
    def test_json_is_plain_and_complete(self) -> None:
        found = of(H200).as_json()
        assert json.loads(json.dumps(found, allow_nan=False)) == found
        assert found["comparable"] is True
        row = found["rows"][2]
        assert row["speedup"]["comparable"] is True
        assert set(row["step_time_ms"]) == {"median", "runs", "iqr", "n", "ci95_mean"}

    def test_csv_has_a_line_a_row(self) -> None:
        rows = list(csv.DictReader(io.StringIO(to_csv(of(H200)))))
        assert "–" not in to_csv(of(H200)), "an unknown value is an empty cell"
        assert [row["variant"] for row in rows] == ["bf16", "blockwise e4m3", "tensorwise"]
        assert float(rows[2]["step_time_ms"]) == 910.75
        assert float(rows[2]["speedup"]) == pytest.approx(1111.85 / 910.75)

    def test_markdown_survives_hostile_names(self, tmp_path: Path) -> None:
        log = write_log(tmp_path / "a|b*c.log", Made())
        lines = to_markdown(of(log, *FOUR_GPUS)).splitlines()
        table = [line for line in lines if line.startswith("|")]
        cells = {line.replace("\\|", "").count("|") for line in table[: 2 + 3]}
        assert len(cells) == 1


class TestCommand:
    def test_writes_what_is_asked_for(self, tmp_path: Path, home: Path, capsys) -> None:
        files = {option: tmp_path / f"out.{option}" for option in ("csv", "md")}
        options = [word for option, file in files.items() for word in (f"--{option}", str(file))]
        assert command(["compare", *FOUR_GPUS, "--gpu", "h200", "--json", *options]) == 0
        assert json.loads(capsys.readouterr().out)["baseline"] == "bf16"
        assert all(file.read_text() for file in files.values())

    def test_the_answer_is_no_when_runs_are_unlike(self, tmp_path: Path, home: Path, logs, capsys) -> None:
        names = [str(p) for p in logs(base=Made(), other=Made(precision=FP8, batch=128))]
        assert command(["compare", *names]) == 1
        assert "not valid" in capsys.readouterr().out
        assert command(["compare", *names, "--force"]) == 0
        assert "2.00×!" in capsys.readouterr().out

    def test_the_short_form_keeps_what_spoils_the_conclusion(self, home: Path, logs, capsys) -> None:
        jump = Made(loss=lambda i: 10 / (1 + 0.01 * i) if i < 150 else 9.0, iterations=300, precision=FP8)
        made = {
            "base": Made(iterations=300),
            "jump": jump,
            "micro": Made(iterations=300, precision=FP8, arguments={"micro_batch_size": 2}),
            "batch": Made(iterations=300, precision=FP8, batch=128),
            "short": Made(iterations=4, precision=FP8, arguments={"num_workers": 1}),
        }
        names = [str(p) for p in logs(**made)]
        assert command(["compare", *names]) == 1
        short = capsys.readouterr().out.splitlines()
        assert command(["compare", *names, "--details"]) == 1
        assert len(capsys.readouterr().out.splitlines()) > len(short) + 5
        for words in (
            "jump: unhealthy: the loss rises",
            "not valid: speed-up over bf16",
            "micro_batch_size 2 against 1",
            "left after warm-up",
            "--details",
        ):
            assert sum(words in line for line in short) == 1, (words, short)

    def test_a_study_by_its_id(self, home: Path, capsys) -> None:
        write_study(
            home / "fp8launch-runs", [({"precision.recipe": p}, 1, 1, Made(precision=p)) for p in ("bf16", FP8)]
        )
        assert command(["compare", "grid-study", "--json"]) == 0
        assert [row["variant"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["bf16", FP8]

    def test_a_name_that_means_nothing(self, home: Path, capsys) -> None:
        assert command(["compare", "nothing"]) == 2
        assert "nothing" in capsys.readouterr().err

    def test_an_empty_folder(self, home: Path, tmp_path: Path, capsys) -> None:
        assert command(["compare", str(tmp_path)]) == 2
        assert "no *.log" in capsys.readouterr().err

    def test_the_same_run_twice_is_one_run(self) -> None:
        assert len(read_runs([FOUR_GPUS[0], FOUR_GPUS[0]])) == 1


def test_command_line_under_the_names_of_the_dump() -> None:
    argv = "--num-layers 4 --fp8-format hybrid --fp8-recipe tensorwise --bf16 --lr 3e-4 --data-path 0.5 a 0.5 b --x=-1"
    assert arguments_of(argv.split()) == {
        "num_layers": 4, "fp8": "hybrid", "fp8_recipe": "tensorwise", "bf16": True, "lr": 3e-4,
        "data_path": [0.5, "a", 0.5, "b"], "x": -1,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"bf16": True, "fp8": None}, "bf16"),
        ({"bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"}, "tensorwise"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, "blockwise e4m3"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param_gather": True}, "mxfp8 param gather"),
        ({"fp8": "hybrid"}, "delayed history 1"),
        ({"fp8": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 1024}, "delayed"),
        (
            {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
            "tensorwise bf16 1+1",
        ),
        ({"fp4": "e2m1", "fp4_recipe": "nvfp4", "bf16": True}, "nvfp4"),
        ({"fp8": None}, "fp32"),
        ({}, None),
    ],
)
def test_precision_in_a_word(arguments: dict[str, object], name: str | None) -> None:
    assert precision_of(arguments) == name


def test_a_report_into_a_folder_that_is_not_there_names_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["compare", *FOUR_GPUS, "--md", str(tmp_path / "none" / "a.md")]) == 2
    assert f"--md: error: folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err
