"""The HTML report: what it holds, that nothing in it reaches out, and how a real browser lays it out."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import OUT_OF_MEMORY, Made, write_log, write_study
from support import real_logs

from fp8launch.cli.compare import read_runs
from fp8launch.report.comparison import Comparison, compare
from fp8launch.report.html import to_html
from fp8launch.report.plots import available
from fp8launch.report.steady_state import RULE_NOTE

H200 = real_logs("h200")
needs_matplotlib = pytest.mark.skipif(not available(), reason="matplotlib is not installed")
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Tags that are open, everything that a page could load, tables as rows of cells, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action")]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Three precisions on up to four nodes, with repeats and one point that ran out of memory."""
    reference = {"tokens_per_s_per_gpu": 30000, "tflops_per_gpu": 700, "gpus": 8, "source": "https://example.org/page"}
    points = []
    for precision, ms in (("bf16", 1000.0), ("tensorwise", 750.0), ("delayed", 730.0)):
        for nodes in (1, 2, 4):
            for repeat in (1, 2, 3):
                made = Made(
                    ms=lambda i, ms=ms, r=repeat: ms + r, iterations=220, world=8 * nodes, batch=64 * nodes,
                    precision=precision, joules=500.0,
                )  # fmt: skip
                if (precision, nodes) == ("delayed", 4):
                    made = Made(iterations=1, world=32, batch=256, precision=precision, end=OUT_OF_MEMORY)
                points.append(({"precision.recipe": precision}, nodes, repeat, made))
    folder = write_study(tmp_path_factory.mktemp("runs"), points, recipe={"reference": reference})
    return compare(read_runs([str(folder)]), price_per_gpu_hour=2.5)


@pytest.fixture(scope="module")
def text(large: Comparison) -> str:
    return to_html(large)


def test_one_file_that_loads_nothing(text: str) -> None:
    page = Page(text)
    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(page.tags)
    assert all(target.startswith("#") for target in page.loads)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert len(text) < 600_000


def test_results_differences_runs_and_rule(text: str, large: Comparison) -> None:
    page = Page(text)
    results, differences, runs = page.tables
    assert [row[0] for row in results[1:]] == [entry.row.label for entry in large.entries]
    assert {"tokens/s/GPU", "step time (ms)", "MFU (% of peak)", "energy (mJ/token)"} <= set(results[0])
    assert any("out-of-memory" in cell for cell in results[-1])
    assert {row[0] for row in differences[1:]} >= {"precision", "world_size", "global_batch_size"}
    assert len(runs) == 1 + 27
    assert RULE_NOTE in text
    assert len(RULE_NOTE.split()) < 15
    assert "fp8launch submit made" in text


def test_names_are_text_not_markup(tmp_path: Path) -> None:
    log = write_log(tmp_path / "<script>alert(1)</script>&.log".replace("/", "_"), Made())
    other = write_log(tmp_path / "<script>x.log", Made(arguments={"tensor_model_parallel_size": '"><img src=x>'}))
    text = to_html(compare(read_runs([str(log), str(other)])))
    page = Page(text)
    assert "script" not in page.tags
    assert "img" not in page.tags


@needs_matplotlib
@pytest.mark.parametrize("name", ["font: 1px ", "font-family: ", ' xmlns="a"', "#303338", "<metadata>", 'id="text_1"'])
def test_a_name_that_looks_like_svg_leaves_the_pictures_whole(tmp_path: Path, name: str) -> None:
    """What is cut from matplotlib's tags was cut from labels too, with the tags behind them."""
    logs = [str(write_log(tmp_path / f"{name}{i}.log", Made())) for i in (1, 2)]
    text = to_html(compare(read_runs(logs)))
    page = Page(text)
    assert page.open == []
    assert "svg" in page.tags


def test_an_invalid_comparison_says_so_first(tmp_path: Path) -> None:
    logs = [
        write_log(tmp_path / f"{s}.log", Made(sequence=s, precision=p)) for s, p in ((4096, "bf16"), (8192, "delayed"))
    ]
    text = to_html(compare(read_runs([str(log) for log in logs])))
    assert text.index("This comparison is not valid") < text.index("<table")
    assert "sequence length 8192 against 4096" in text


@needs_matplotlib
def test_pictures_take_the_colours_of_the_page(text: str) -> None:
    assert text.count("<svg") == 8
    assert "var(--ink)" in text
    assert "#303338" not in text


def test_without_matplotlib_everything_else_is_there(monkeypatch: pytest.MonkeyPatch, large: Comparison) -> None:
    monkeypatch.setattr("fp8launch.report.html.available", lambda: False)
    text = to_html(large)
    assert "<svg" not in text
    assert len(Page(text).tables) == 3


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture
def browser(tmp_path: Path):
    """Opens a page in headless Chromium and returns its document once scripts have run. No network is needed."""
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")

    def document(page: Path, width: int, *flags: str) -> str:
        command = [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
            f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000", "--virtual-time-budget=2000",
            "--dump-dom", *flags, page.as_uri(),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return document


# An iframe is as wide as we say; a headless window is never narrower than 500 pixels.
PROBE = """<!doctype html><title>waiting</title><iframe id="f" width="{width}" height="2000"></iframe>
<script>
const frame = document.getElementById("f");
frame.onload = () => {{
  const inner = frame.contentDocument, root = inner.documentElement;
  const out = [...inner.querySelectorAll("h1, h2, p, li, .scroll, figure, pre, .verdict")]
    .filter(e => e.getBoundingClientRect().right > root.clientWidth + 0.5).map(e => e.tagName);
  const letters = [...inner.querySelectorAll("svg text")].map(e => e.getBoundingClientRect().height).filter(h => h > 0);
  const loaded = frame.contentWindow.performance.getEntriesByType("resource").map(e => e.name);
  document.title = JSON.stringify({{width: root.clientWidth, scroll: root.scrollWidth, out, loaded,
    tables: inner.querySelectorAll("table").length, small: Math.min(...letters), pictures:
    inner.querySelectorAll("svg").length, ink: frame.contentWindow.getComputedStyle(inner.body).color}});
}};
frame.srcdoc = {text};
</script>"""


def probe(browser, tmp_path: Path, text: str, width: int, *flags: str) -> dict:
    import html
    import json

    page = tmp_path / "probe.html"
    page.write_text(PROBE.format(width=width, text=json.dumps(text).replace("</", "<\\/")), encoding="utf-8")
    found = re.search(r"<title>(.*?)</title>", browser(page, max(width + 100, 600), *flags), re.S)
    return json.loads(html.unescape(found[1]))


@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_shows_it_without_sideways_scrolling(browser, tmp_path: Path, text: str, width: int) -> None:
    found = probe(browser, tmp_path, text, width)
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["out"] == []
    assert found["tables"] == 3
    assert found["loaded"] == []
    if available():
        assert found["pictures"] == 8
        assert found["small"] >= 8, "letters in the pictures stay legible"


def test_dark_where_the_reader_is_dark(browser, tmp_path: Path, text: str) -> None:
    light = probe(browser, tmp_path, text, 390)["ink"]
    dark = probe(browser, tmp_path, text, 390, "--blink-settings=preferredColorScheme=0")["ink"]
    assert sum(map(int, re.findall(r"\d+", light))) < 200 < 600 < sum(map(int, re.findall(r"\d+", dark)))


def test_real_logs_in_a_browser(browser, tmp_path: Path) -> None:
    text = to_html(compare(read_runs([str(H200)], "h200")))
    found = probe(browser, tmp_path, text, 390)
    assert found["scroll"] <= 390
    assert found["out"] == []
