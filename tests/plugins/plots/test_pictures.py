"""Pictures: files of the right kind, axes that do not lie, and only what there is to show."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations
from math import hypot
from pathlib import Path

import pytest
from made_runs import OUT_OF_MEMORY, RATES, Made, of, write_log, write_rates, write_run, write_study
from support import real_logs, sitting
from tests.support import only, refused

from fp8launch.plugins.plots.curves import rolling
from fp8launch.plugins.plots.figures import figure_of, panel_figure, pictures, write_plots
from fp8launch.plugins.plots.html_page import to_html
from fp8launch.plugins.plots.row_pictures import THROUGHPUT, swept_loss_pictures
from fp8launch.plugins.plots.setup import setup_line
from fp8launch.plugins.plots.style import Picture, time_unit
from fp8launch.report.comparison import Comparison, compare
from fp8launch.report.named_runs import read_runs

matplotlib = pytest.importorskip("matplotlib")
H200 = real_logs("h200")


@pytest.fixture(scope="module")
def real() -> Comparison:
    return compare(read_runs([str(H200)], "h200"))


def named(comparison: Comparison, name: str) -> Picture:
    return next(picture for picture in pictures(comparison) if picture.name == name)


def axes(comparison: Comparison, name: str, panel: int = 0):
    return panel_figure(named(comparison, name).panels[panel]).axes[0]


def words(picture: Picture, panel: int = 0) -> list[str]:
    return [key.text.partition(":")[0] for key in picture.panels[panel].keys]


def sweep(tmp_path: Path, models: int, lengths: Sequence[int], worlds: Sequence[int], **made: object) -> Comparison:
    points = []
    for model in range(models):
        for precision in ("bf16", "tensorwise"):
            for length in lengths:
                for world in worlds:
                    one = Made(
                        ms=lambda i, length=length: length * (1 + i % 3 / 50), sequence=length, world=world,
                        batch=world, precision=precision, arguments={"num_layers": 4 * (model + 1)}, **made,
                    )  # fmt: skip
                    point = {"model.num_layers": 4 * (model + 1), "precision.recipe": precision,
                             "batch.sequence": length, "resources.gpus_per_node": world}  # fmt: skip
                    points.append((point, 1, 1, one))
    return of(write_study(tmp_path, points), gpu=None)


def test_what_real_logs_can_show(real: Comparison) -> None:
    """One picture of step time and throughput over iterations; parity of a few iterations is none."""
    assert [picture.name for picture in pictures(real)] == ["throughput", "step_time", "loss", "memory"]


def test_step_time_is_a_rolling_median(real: Comparison) -> None:
    ax = axes(real, "step_time")
    assert ax.get_ylim()[0] == 0
    assert len(ax.lines) == len(real.rows) > 2
    # Bands of three curves would cover each other.
    assert not ax.collections
    points = [(i, 100.0 + (i == 50) * 900) for i in range(100)]
    found = rolling(points, 9)
    assert {middle for _, _, middle, _ in found} == {100.0}
    assert max(high for *_, high in rolling([(i, 100.0 + i % 2) for i in range(50)], 9)) == 101.0


def test_bars_start_at_zero_and_are_as_long_as_the_numbers(real: Comparison) -> None:
    ax = axes(real, "throughput")
    assert ax.get_xlim()[0] == 0
    assert [bar.get_width() for bar in ax.patches] == [row.tokens.median for row in real.rows]
    assert ax.get_xlabel() == "tokens/s/GPU"
    widths = [bars[2][0].get_segments()[0] for bars in ax.containers if len(bars) == 3 and bars[2]]
    spreads = [row.tokens.spread for row in real.rows]
    assert [(line[1][0] - line[0][0]) / 2 for line in widths] == pytest.approx(spreads)
    memory = axes(real, "memory")
    assert [bar.get_width() * 1024 for bar in memory.patches] == [row.peak_memory_mib for row in real.rows]


def test_an_axis_that_does_not_start_at_zero_says_so(real: Comparison) -> None:
    for panel in (0, 1):
        ax = axes(real, "loss", panel)
        assert (ax.get_ylim()[0] > 0) == ("does not start at 0" in ax.get_ylabel())


def test_the_loss_has_its_last_quarter_and_its_final_values(real: Comparison) -> None:
    loss = named(real, "loss")
    assert [panel.title for panel in loss.panels] == ["all iterations", "last quarter"]
    assert [key.text for key in loss.panels[0].keys] == [f"{e.label}: {e.loss.smoothed:.4f}" for e in real.rows]
    whole, end = (axes(real, "loss", panel) for panel in (0, 1))
    last = max(line.get_xdata()[-1] for line in whole.lines)
    assert min(line.get_xdata()[0] for line in end.lines) >= 0.75 * last


def test_a_sweep_reads_at_a_glance(tmp_path: Path) -> None:
    """Colour is the precision, dash and marker the number of GPUs or the length, a panel a model."""
    comparison = sweep(tmp_path, 2, (2048, 4096), (1, 2), iterations=30)
    found = {picture.name: picture for picture in pictures(comparison)}
    wanted = {"sequence_tflop_s", "sequence_tokens", "sequence_total", "sequence_mfu", "scaling_efficiency", "loss"}
    assert wanted <= set(found)
    tokens = found["sequence_tokens"]
    assert [key.text for key in tokens.keys] == ["bf16", "tensorwise", "1 GPU", "2 GPUs"]
    assert len({key.colour for key in tokens.keys[:2]}) == len({key.dash for key in tokens.keys[2:]}) == 2
    assert [panel.title for panel in tokens.panels] == ["layers 4", "layers 8"]
    ax = panel_figure(tokens.panels[0]).axes[0]
    assert ax.get_ylim()[0] == 0
    assert [bars.lines[0].get_xdata().tolist() for bars in ax.containers] == [[2048, 4096]] * 4
    assert all(bars.has_yerr for bars in ax.containers)
    loss = found["loss"]
    assert [panel.title for panel in loss.panels] == [f"layers {n}, {w}" for n in (4, 8) for w in ("1 GPU", "2 GPUs")]
    every = ["bf16, 2,048 tokens", "bf16, 4,096 tokens", "tensorwise, 2,048 tokens", "tensorwise, 4,096 tokens"]
    for panel in range(4):
        assert words(loss, panel) == every
        whole, end = panel_figure(loss.panels[panel]).axes[0], panel_figure(loss.panels[panel]).axes[0].child_axes[0]
        assert len(whole.lines) == len(end.lines) == 4


def test_the_inset_covers_no_curve(tmp_path: Path) -> None:
    """Losses that rise to the end leave the upper right corner to the inset all the same."""
    comparison = sweep(tmp_path, 3, (2048,), (1,), iterations=100, loss=lambda i: 2.0 + i / 50)
    for panel in named(comparison, "loss").panels:
        figure = panel_figure(panel)
        ax = figure.axes[0]
        figure.draw_without_rendering()
        inset = ax.child_axes[0].get_window_extent()
        for line in ax.lines:
            assert not any(inset.contains(*at) for at in ax.transData.transform(line.get_xydata()))


@pytest.mark.parametrize("worlds", [(1,), (1, 2)])
def test_nothing_over_a_size_with_one_value(tmp_path: Path, worlds: Sequence[int]) -> None:
    names = [picture.name for picture in pictures(sweep(tmp_path, 1, (2048,), worlds))]
    assert not [name for name in names if name.startswith("sequence")]
    assert any(name.startswith("scaling") for name in names) == (len(worlds) > 1)


def test_a_length_of_each_variant_is_no_line(tmp_path: Path) -> None:
    """Two lengths, but no variant has both: the picture was one of single points."""
    logs = [
        write_log(tmp_path / f"{s}.log", Made(sequence=s, arguments={"num_layers": s // 512})) for s in (2048, 4096)
    ]
    assert not [picture.name for picture in pictures(of(*logs)) if picture.name.startswith("sequence")]


def test_the_relative_loss_has_the_noise_and_names_the_baseline(tmp_path: Path) -> None:
    points = []
    for precision, off in (("bf16", 0.0), ("tensorwise", 0.004)):
        for repeat in (1, 2, 3):
            loss = partial(lambda i, by: 8.0 * (1 + by) / (1 + 0.01 * i), by=off + repeat / 1000)
            made = Made(precision=precision, iterations=240, loss=loss)
            points.append(({"precision.recipe": precision}, 1, repeat, made))
    comparison = of(write_study(tmp_path, points), gpu=None)
    panel = named(comparison, "parity").panels[0]
    noise = comparison.parities[0].noise
    keys = [key.text for key in panel.keys]
    assert keys[0].startswith("tensorwise: +0.40 ± ") and keys[0].endswith(" %, within tolerance")
    assert keys[1:] == [f"noise between repeats: ±{100 * noise:.2f} % (95 %)", "tolerance: ±2 %"]
    assert panel_figure(panel).axes[0].get_ylabel() == "loss relative to bf16 (%)"


def test_of_a_study_over_the_learning_rate_pictures_of_the_loss_come_first(tmp_path: Path) -> None:
    points = [({"train.lr": lr}, 1, 1, Made(iterations=30, arguments={"lr": lr})) for lr in (1e-4, 2e-4)]
    names = [picture.name for picture in pictures(of(write_study(tmp_path, points), gpu=None))]
    assert names[:2] == ["loss_end", "loss"]


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_decides(real: Comparison, tmp_path: Path, ending: str, magic: bytes) -> None:
    file = tmp_path / f"all.{ending}"
    assert write_plots(real, file) == [file]
    assert file.read_bytes().startswith(magic)


def test_a_folder_gets_a_file_each(real: Comparison, tmp_path: Path) -> None:
    files = write_plots(real, tmp_path / "pictures")
    assert [f.name for f in files][:2] == ["throughput.png", "step_time.png"]
    assert all(f.stat().st_size > 5000 for f in files)


def test_an_ending_that_nobody_draws(real: Comparison, tmp_path: Path) -> None:
    assert only(refused(write_plots, real, tmp_path / "a.bmp")).code == "bad-ending"


def test_nothing_to_draw(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", Made(iterations=1, end=OUT_OF_MEMORY))
    comparison = compare(read_runs([str(log)]))
    assert only(refused(write_plots, comparison, tmp_path / "a.png")).code == "nothing-to-plot"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, real: Comparison, tmp_path: Path) -> None:
    monkeypatch.setattr("fp8launch.plugins.plots.figures.available", lambda: False)
    problem = only(refused(write_plots, real, tmp_path / "a.png", exit_code=3))
    assert "fp8launch[plots]" in problem.fix


@pytest.mark.parametrize("name", ["x", "a name that is longer than any picture is wide " * 4])
def test_drawing_warns_of_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder, name: str) -> None:
    """Long names left the axes no room: "constrained_layout not applied"."""
    points = [({"env.A": f"{name}{i}"}, 1, 1, Made(iterations=12, loss=lambda i: 3.0)) for i in range(9)]
    comparison = of(write_study(tmp_path, points), gpu=None)
    write_plots(comparison, tmp_path / "a.png")
    to_html(comparison)
    assert [str(warning.message) for warning in recwarn] == []


def test_no_variant_is_cut(tmp_path: Path) -> None:
    """The ninth variant was missing from the pictures of step time and loss."""
    points = [({"lr": i}, 1, 1, Made(ms=lambda n, i=i: 1000.0 + 10 * i, iterations=12)) for i in range(11)]
    comparison = of(write_study(tmp_path, points), gpu=None)
    for name in ("step_time", "loss"):
        panels = [panel for panel in named(comparison, name).panels if panel.keys]
        assert [panel.title.partition(",")[0] for panel in panels] == ["1 of 2", "2 of 2"]
        shown = [key.text.partition(":")[0] for panel in panels for key in panel.keys]
        assert sorted(shown) == sorted(row.label for row in comparison.rows)
        for panel in panels:
            assert len({key.colour for key in panel.keys}) == len(panel.keys)


@pytest.fixture
def mixed(tmp_path: Path) -> Comparison:
    """A log that determines tokens/s beside one that does not."""
    full = write_log(tmp_path / "full.log", Made())
    bare = tmp_path / "_bare.log"
    bare.write_text(Made(ms=lambda i: 500.0).text().partition("end of arguments ---------------------\n")[2])
    return compare(read_runs([str(full), str(bare)]))


def test_an_axis_has_one_unit(mixed: Comparison) -> None:
    """Milliseconds were drawn on the axis of tokens/s."""
    full, bare = mixed.rows
    throughput = axes(mixed, "throughput")
    assert [bar.get_width() for bar in throughput.patches] == [full.tokens.median]
    assert "not known" in [text.get_text() for text in throughput.texts]
    times = axes(mixed, "step_time_bars")
    assert times.get_xlabel() == "ms per iteration"
    assert [bar.get_width() for bar in times.patches] == [full.step_time.median, bare.step_time.median]


def test_names_are_texts_not_formulas(tmp_path: Path) -> None:
    """`$$` in a name ended the command: matplotlib took it for a formula."""
    text = Made().text().partition("end of arguments ---------------------\n")[2]
    logs = [tmp_path / "$$a_{$x.log", tmp_path / "_b.log"]
    for log in logs:
        log.write_text(text)
    comparison = compare(read_runs([str(log) for log in logs]))
    write_plots(comparison, tmp_path / "all.png")
    assert words(named(comparison, "loss")) == ["$$a_{$x", "_b"]
    legend = figure_of([named(comparison, "loss")]).legends[0]
    assert [text.get_text().strip().partition(":")[0] for text in legend.get_texts()] == ["$$a_{$x", "_b"]


def test_a_long_legend_stays_below_its_panel() -> None:
    """The legend of one panel covered the legend of the next one."""
    picture = named(of(sitting("2026-11-20-verify")), "step_time")
    figure = figure_of([picture])
    figure.draw_without_rendering()
    boxes = [legend.get_window_extent() for legend in figure.legends]
    assert len(boxes) == len(picture.panels) > 1
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_the_legend_of_runs_that_did_not_finish_has_no_mean(tmp_path: Path) -> None:
    logs = []
    for precision in ("bf16", "tensorwise"):
        made = Made(precision=precision, iterations=30, end=OUT_OF_MEMORY)
        logs.append(write_log(tmp_path / f"{precision}.log", made))
    assert "mean" not in named(of(*logs), "loss").remark


def test_a_swept_number_is_the_axis_of_its_loss(tmp_path: Path) -> None:
    points = []
    for lr, loss in ((1e-4, 3.0), (1e-3, 2.0), (1e-2, 4.0)):
        for seed in (1, 2, 3):
            made = Made(iterations=40, loss=lambda i, at=loss + seed / 10: at, arguments={"lr": lr, "seed": seed})
            points.append(({"train.lr": lr, "megatron.seed": seed}, 1, 1, made))
    [picture] = [p for p in pictures(of(write_study(tmp_path, points), gpu=None)) if p.name == "loss_end"]
    assert picture.title == "Loss at the end over lr"
    [ax] = panel_figure(picture.panels[0]).axes
    assert ax.get_xscale() == "log"
    assert [tick.get_text() for tick in ax.get_xticklabels()] == ["0.0001", "0.001", "0.01"]
    line = ax.containers[0].lines[0]
    assert list(line.get_xdata()) == [1e-4, 1e-3, 1e-2]
    assert list(line.get_ydata()) == pytest.approx([3.2, 2.2, 4.2])
    [bars] = ax.containers[0].lines[2]
    low, high = bars.get_segments()[0][:, 1]
    # By hand: t(2) * 0.1 / sqrt(3) on either side.
    assert (high - low) / 2 == pytest.approx(4.3027 * 0.1 / 3**0.5, rel=1e-3)


def test_a_loss_is_not_drawn_below_zero(tmp_path: Path) -> None:
    points = []
    for lr, losses in ((1e-4, (4.0, 4.1)), (1e-3, (0.1, 2.0))):
        for seed, loss in enumerate(losses):
            made = Made(iterations=40, loss=lambda i, loss=loss: loss, arguments={"lr": lr, "seed": seed})
            points.append(({"train.lr": lr, "megatron.seed": seed}, 1, 1, made))
    [picture] = swept_loss_pictures(of(write_study(tmp_path, points), gpu=None).rows)
    [axes] = panel_figure(picture.panels[0]).axes
    assert axes.get_ylim()[0] == 0 and axes.get_ylabel() == "loss"
    assert (axes.get_xlabel(), axes.get_xscale()) == ("lr (log scale)", "log")


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return of(write_rates(tmp_path_factory.mktemp("runs")), gpu=None)


def test_step_times_of_all_seeds_agree_with_the_table(rates: Comparison) -> None:
    """The legend had the median of the first seed only."""
    picture = named(rates, "step_time")
    texts = [key.text for key in picture.panels[0].keys]
    assert texts[:-1] == [f"{row.name}: 65.0 ms (80 %: 60.0 to 70.0)" for row in rates.rows]
    assert texts[-1] == "thick: the first seed; thin: the others"
    assert "in the legend the median of the runs' medians as in the table" in picture.remark
    assert len(axes(rates, "step_time").lines) == 8


@pytest.mark.parametrize("panel", [0, 1])
def test_losses_of_all_seeds_on_a_scale_that_tells_them_apart(rates: Comparison, panel: int) -> None:
    loss = axes(rates, "loss", panel)
    assert (loss.get_yscale(), loss.get_ylabel()) == ("log", "loss (log scale)")
    assert len(loss.lines) == 8
    assert named(rates, "loss").panels[0].keys[-1].text == "thick: the first seed; thin: the others"
    assert named(rates, "loss").remark.startswith("in the legend"), "40 points are not smoothed"


def test_single_seeds_are_seen(rates: Comparison) -> None:
    """They were drawn below the marker of their mean."""
    picture = named(rates, "loss_end")
    assert [key.text for key in picture.panels[0].keys] == ["mean over the seeds", "single seeds"]
    assert picture.remark.startswith("mean of the last 5 logged iterations; bars: ")
    assert "cut off at 0, wide for 2 seeds" in picture.remark
    ax = axes(rates, "loss_end")
    ax.figure.canvas.draw()
    rings = [line for line in ax.lines if line.get_markerfacecolor() == "none"]
    shown = [line.get_ydata()[0] for line in rings]
    assert shown == pytest.approx([loss for losses in RATES.values() for loss in losses])
    means = ax.containers[0].lines[0]
    points = [line.get_transform().transform(line.get_xydata())[0] for line in (*rings[:2], means)]
    for a, b in combinations(points, 2):
        assert hypot(*(a - b)) * 72 / ax.figure.dpi > 4
    assert all(ring.get_transform().transform(ring.get_xydata())[0][0] < ax.bbox.x1 for ring in rings)
    # Intervals that reach 0 have no end on a log axis.
    down = [line.get_xdata()[0] for line in ax.lines if line.get_marker() == "v"]
    assert down == [row.facts["lr"] for row in rates.rows if row.loss.interval.low == 0] == [0.01, 0.03]
    throughput = axes(rates, "throughput")
    assert throughput.get_xlabel() == "tokens/s/process"
    assert sum(len(line.get_xdata()) for line in throughput.lines if line.get_markerfacecolor() == "none") == 8


def test_a_sweep_beside_logs_of_another_model_has_its_picture(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"{lr}", Made(arguments={"lr": lr})) for lr in (1e-4, 3e-4)]
    log = write_log(tmp_path / "other.log", Made(arguments={"num_layers": 32}))
    [picture] = swept_loss_pictures(of(*runs, log, gpu=None).rows)
    assert picture.title == "Loss at the end over lr"


def test_bars_give_no_ratio_that_the_table_does_not(tmp_path: Path) -> None:
    """Two single runs whose steps vary more than they differ had a ratio at the end of the bar."""
    logs = []
    for mbs, ms in ((1, 1000), (4, 890)):
        times = partial(lambda i, ms: ms * (0.8 + 0.4 * (7 * i % 11) / 10), ms=ms)
        made = Made(ms=times, iterations=400, arguments={"micro_batch_size": mbs})
        logs.append(write_log(tmp_path / f"{mbs}.log", made))
    entry = of(*logs).rows[1]
    value = THROUGHPUT.value(entry)
    assert value is not None and THROUGHPUT.text(entry, value).endswith("not distinguishable")


def test_the_setup_is_described_above_the_pictures(tmp_path: Path) -> None:
    comparison = sweep(tmp_path, 2, (4096,), (8, 16))
    line = setup_line(comparison)
    sizes = "4 to 8 layers, hidden size 4,096 · 8 to 16 × H100 · global batch 8 to 16 × 4,096 tokens"
    assert line.endswith(f"· {sizes} · 10 iterations")
    texts = [text.get_text() for text in figure_of(pictures(comparison), line).texts]
    assert line in [" ".join(text.split()) for text in texts]
    page = to_html(comparison)
    assert "<dt>Hardware</dt><dd>8 to 16 × H100</dd>" in page
    assert page.index("<dt>Model</dt>") < page.index("<table")


def test_scaling_is_shown_as_efficiency_only(tmp_path: Path) -> None:
    names = [picture.name for picture in pictures(sweep(tmp_path, 1, (4096,), (8, 16)))]
    assert "scaling_efficiency" in names
    assert [name for name in names if name.startswith("scaling")] == ["scaling_efficiency"]


def test_long_step_times_are_in_seconds() -> None:
    assert time_unit([35_076.0, 12_000.0]).text(35_076.0) == "35.1 s"
    assert time_unit([35_076.0, 812.44]).text(812.44) == "812.4 ms"
