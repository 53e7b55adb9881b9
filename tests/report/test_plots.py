"""Pictures: files of the right kind, axes that do not lie, and only what there is to show."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import OUT_OF_MEMORY, Made, write_log, write_study
from support import real_logs
from tests.support import only, refused

from fp8launch.cli.compare import read_runs
from fp8launch.report.comparison import Comparison, compare
from fp8launch.report.plots import figure_of, pictures, write_plots

matplotlib = pytest.importorskip("matplotlib")
H200 = real_logs("h200")


@pytest.fixture(scope="module")
def real() -> Comparison:
    return compare(read_runs([str(H200)], "h200"))


def axes(comparison: Comparison, name: str):
    picture = next(p for p in pictures(comparison) if p.name == name)
    return figure_of([picture]).axes[0]


def test_what_real_logs_can_show(real: Comparison) -> None:
    assert [p.name for p in pictures(real)] == ["throughput", "tflops", "step_time", "speed", "loss", "parity"]


@pytest.mark.parametrize("name", ["step_time", "speed"])
def test_axes_start_at_zero(real: Comparison, name: str) -> None:
    assert axes(real, name).get_ylim()[0] == 0


def test_bars_start_at_zero_and_are_as_long_as_the_numbers(real: Comparison) -> None:
    ax = axes(real, "throughput")
    assert ax.get_xlim()[0] == 0
    assert [bar.get_width() for bar in ax.patches] == [e.tokens.median for e in real.entries]
    assert ax.get_xlabel() == "tokens/s/GPU"


def test_an_axis_that_does_not_start_at_zero_says_so(real: Comparison) -> None:
    ax = axes(real, "loss")
    assert (ax.get_ylim()[0] > 0) == ("does not start at 0" in ax.get_ylabel())


def test_what_is_beyond_the_frame_is_counted(real: Comparison) -> None:
    """The first two lines of each of the three runs take seconds."""
    assert "▲ 6 beyond the frame" in axes(real, "step_time").get_xlabel()


def test_scaling_and_sequence_appear_where_they_vary(tmp_path: Path) -> None:
    points = [
        ({"precision.recipe": p, "batch.sequence": s}, n, 1,
         Made(ms=lambda i, s=s: float(s), sequence=s, world=8 * n, batch=64 * n, precision=p))
        for p in ("bf16", "delayed") for s in (2048, 4096) for n in (1, 2)
    ]  # fmt: skip
    comparison = compare(read_runs([str(write_study(tmp_path, points))]))
    names = {p.name for p in pictures(comparison)}
    assert {"scaling", "efficiency", "sequence_step", "sequence_tokens", "sequence_tflop_s", "sequence_mfu"} <= names
    ax = axes(comparison, "sequence_tokens")
    assert ax.get_ylim()[0] == 0
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["bf16, 8 GPUs", "bf16, 16 GPUs", "delayed, 8 GPUs", "delayed, 16 GPUs"]
    assert axes(comparison, "efficiency").get_ylim()[0] == 0


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_the_ending_decides(real: Comparison, tmp_path: Path, ending: str, magic: bytes) -> None:
    file = tmp_path / f"all.{ending}"
    assert write_plots(real, file) == [file]
    assert file.read_bytes().startswith(magic)


def test_a_folder_gets_a_file_each(real: Comparison, tmp_path: Path) -> None:
    files = write_plots(real, tmp_path / "pictures")
    assert [f.name for f in files][:2] == ["throughput.png", "tflops.png"]
    assert all(f.stat().st_size > 5000 for f in files)


def test_an_ending_that_nobody_draws(real: Comparison, tmp_path: Path) -> None:
    assert only(refused(write_plots, real, tmp_path / "a.bmp")).code == "bad-ending"


def test_nothing_to_draw(tmp_path: Path) -> None:
    log = write_log(tmp_path / "a.log", Made(iterations=1, end=OUT_OF_MEMORY))
    comparison = compare(read_runs([str(log)]))
    assert only(refused(write_plots, comparison, tmp_path / "a.png")).code == "nothing-to-plot"


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch, real: Comparison, tmp_path: Path) -> None:
    monkeypatch.setattr("fp8launch.report.plots.available", lambda: False)
    problem = only(refused(write_plots, real, tmp_path / "a.png", exit_code=3))
    assert "fp8launch[plots]" in problem.fix


def test_drawing_warns_of_nothing(real: Comparison, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write_plots(real, tmp_path / "a.svg")
    assert [str(w.message) for w in recwarn] == []


def test_no_variant_is_cut(tmp_path: Path) -> None:
    """The ninth variant was missing from the pictures of step time, speed and loss."""
    points = [({"lr": i}, 1, 1, Made(ms=lambda n, i=i: 1000.0 + 10 * i, iterations=12)) for i in range(11)]
    comparison = compare(read_runs([str(write_study(tmp_path, points))]))
    found = pictures(comparison)
    for name in ("step_time", "speed", "loss"):
        mine = [picture for picture in found if picture.name.startswith(name)]
        assert len(mine) == 2
        assert mine[1].title.endswith("(2 of 2)")
        drawn = [axis for picture in mine for axis in figure_of([picture]).axes]
        labels = [text.get_text() for axis in drawn for text in axis.get_legend().get_texts()]
        assert sorted(labels) == sorted(entry.row.label for entry in comparison.entries)
        for axis in drawn:
            colours = [line.get_color() for line in axis.get_legend().get_lines()]
            assert len(set(colours)) == len(colours)
    files = write_plots(comparison, tmp_path / "pictures")
    assert {"loss.png", "loss_2.png"} <= {file.name for file in files}


def test_sizes_that_a_picture_leaves_out_are_named(tmp_path: Path) -> None:
    points = [
        ({"lr": i}, nodes, 1, Made(iterations=12, world=8 * nodes, batch=64 * nodes))
        for i in range(5)
        for nodes in (1, 2)
    ]
    found = pictures(compare(read_runs([str(write_study(tmp_path, points))])))
    assert next(p for p in found if p.name == "loss").remark == "each variant at its smallest size"


@pytest.fixture
def mixed(tmp_path: Path) -> Comparison:
    """A log that determines tokens/s beside one that does not."""
    full = write_log(tmp_path / "full.log", Made())
    bare = tmp_path / "_bare.log"
    bare.write_text(Made(ms=lambda i: 500.0).text().partition("end of arguments ---------------------\n")[2])
    return compare(read_runs([str(full), str(bare)]))


def test_an_axis_has_one_unit(mixed: Comparison) -> None:
    """Milliseconds were drawn on the axis of tokens/s."""
    full, bare = mixed.entries
    throughput = axes(mixed, "throughput")
    assert [bar.get_width() for bar in throughput.patches] == [full.tokens.median]
    assert "not known" in [text.get_text() for text in throughput.texts]
    times = axes(mixed, "step_time_bars")
    assert times.get_xlabel() == "ms"
    assert [bar.get_width() for bar in times.patches] == [full.step_time.median, bare.step_time.median]
    speed = next(picture for picture in pictures(mixed) if picture.name == "speed")
    assert speed.remark == "not shown, tokens/s/GPU not known:  _bare"


def test_names_are_texts_not_formulas(tmp_path: Path) -> None:
    """`$$` in a name ended the command: matplotlib took it for a formula."""
    text = Made().text().partition("end of arguments ---------------------\n")[2]
    logs = [tmp_path / "$$a_{$x.log", tmp_path / "_b.log"]
    for log in logs:
        log.write_text(text)
    comparison = compare(read_runs([str(log) for log in logs]))
    write_plots(comparison, tmp_path / "all.png")
    labels = [text.get_text() for text in axes(comparison, "loss").get_legend().get_texts()]
    assert labels == ["$$a_{$x", " _b"]
