"""The HTML report: what it holds, that nothing in it reaches out, and how a real browser lays it out."""

from __future__ import annotations

import re
import shutil
from functools import partial
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_runs import FP8, OUT_OF_MEMORY, WHOLE, Made, of, write_log, write_phases, write_rates, write_study
from support import real_logs

from fp8launch.cli import run as command
from fp8launch.plugins.plots.figures import available, pictures
from fp8launch.plugins.plots.html_page import to_html
from fp8launch.report.comparison import Comparison, compare
from fp8launch.report.conclusion import conclusion
from fp8launch.report.export import to_markdown
from fp8launch.report.named_runs import read_runs
from fp8launch.report.read_run import run_from_folder
from fp8launch.report.steady_state import RULE
from fp8launch.rundir.run_dir import RunFolder

H200 = real_logs("h200")
needs_matplotlib = pytest.mark.skipif(not available(), reason="matplotlib is not installed")
VOID = {"meta", "br", "wbr", "hr", "img", "input", "link"}


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
        if {"td", "th"} & set(self.open):
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
    assert [row[0] for row in results[1:]] == [row.label for row in large.rows]
    assert {"tokens/s/GPU", "step time (ms)", "MFU (% of peak)", "energy (mJ/token)"} <= set(results[0])
    assert any("out-of-memory" in cell for cell in results[-1])
    assert {row[0] for row in differences[1:]} >= {"precision", "world_size", "global_batch_size"}
    assert len(runs) == 1 + 27
    assert f"iterations that count for the speed: a{RULE[1:]}" in unescape(text), "a reader of the page has no docs/"
    assert "docs/" not in text
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


@pytest.fixture(scope="module")
def rates(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return of(write_rates(tmp_path_factory.mktemp("runs")), gpu=None)


def test_a_study_is_explained_below_its_table(rates: Comparison) -> None:
    """The meaning of ± and the few seeds were told at the end of the page, the seeds' losses nowhere."""
    text = to_html(rates)
    table, pictures_begin = text.index("</table>"), text.index("<h2>Remarks")
    # A phone shows the pictures before the table, and the headline has a ±.
    assert text.index("</h1>") < text.index("±: standard deviation") < text.index("<dl>")
    assert text.count("±: standard deviation") == 1
    for words in ("only 2 seeds", "speed: differences not tested", "loss at the end: mean of the last 5 "):
        assert table < text.index(words) < pictures_begin
        assert text.count(words) == 1
    assert "lr&nbsp;0.01 with 0.0070&nbsp;±&nbsp;0.0028, next" in text, "numbers of the headline stay on one line"
    runs = Page(text).tables[-1]
    assert runs[0] == ["run", "variant", "seed", "status", "loss at the end", "step time (ms)", "log lines counted",
                       "dropped as warm-up"]  # fmt: skip
    assert runs[1][1:5] == ["lr 0.001", "1", "ok", "2.2000"]
    assert runs[2][1:5] == ["lr 0.001", "2", "ok", "2.3000"]
    assert "GPU" not in re.sub(r"(?s)<pre>.*?</pre>", "", text)


def test_the_head_says_what_was_trained(tmp_path: Path) -> None:
    runs = []
    for lr in (1e-4, 3e-4):
        arguments = {
            "lr": lr, "min_lr": 1e-5, "lr_decay_style": "cosine", "lr_warmup_iters": 20, "optimizer": "adam",
            "mock_data": False, "data_path": "['0.3', '/data/web_text_document', '0.7', '/data/code_text_document']",
            "tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "/models/llama3",
        }  # fmt: skip
        runs.append(write_log(tmp_path / f"{lr}.log", Made(arguments=arguments)))
    text = to_html(of(*runs))
    facts = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text.replace("<wbr>", "")))
    assert facts["Data"] == "web_text_document, code_text_document"
    assert facts["Tokenizer"] == "HuggingFaceTokenizer, llama3, vocabulary 128,256"
    assert facts["Optimizer"] == "adam"
    assert facts["Learning rate"] == "0.0001 to 0.0003, cosine, minimum 1e-05, 20 warm-up iterations"
    assert facts["Precision"] == "bf16"
    assert facts["Loss"] == "training loss (nats)"
    assert "<title>Comparison – fp8launch</title>" in text


def test_the_head_of_a_study(rates: Comparison) -> None:
    text = to_html(rates)
    assert "<title>grid-study-abc123 – fp8launch</title>" in text
    assert "<dt>Data</dt><dd>mock data</dd>" in text
    assert "no other differences in the settings" in text


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """Three runs of the same work and one of longer sequences, the only one in bf16."""
    root = tmp_path_factory.mktemp("unlike")
    made = [("tensorwise", 4096, 900.0), ("delayed", 4096, 700.0), ("blockwise", 4096, 880.0), ("bf16", 8192, 2000.0)]
    logs = []
    for precision, length, ms in made:
        name = f"a_run_of_{precision}_whose_name_is_longer_than_a_phone_is_wide_{length}.log"
        one = Made(ms=partial(lambda i, ms: ms + i % 3, ms=ms), iterations=30, sequence=length, precision=precision)
        logs.append(write_log(root / name, one))
    return of(*logs)


def test_only_the_row_that_is_unlike_is_condemned(unlike: Comparison) -> None:
    """The whole comparison was called invalid, and no other row had a ratio."""
    ratios = {row.facts["precision"]: row.speedup.value for row in unlike.rows}
    assert [name for name, value in ratios.items() if value is None] == ["bf16"]
    text = to_html(unlike)
    assert text.count('<tr class="bad">') == 1
    assert "not valid" not in text
    sentence = conclusion(unlike)
    assert sentence.startswith("delayed") and "fastest: 1.29×" in sentence
    assert sentence.endswith(". bf16, seq 8192 cannot be compared with the rest.")
    assert to_markdown(unlike).startswith("**delayed")


@needs_matplotlib
def test_pictures_take_the_colours_of_the_page(text: str, large: Comparison) -> None:
    assert text.count('<svg role="img"') == sum(len(picture.panels) for picture in pictures(large))
    assert "var(--ink)" in text
    assert "#303338" not in text


def test_without_matplotlib_everything_else_is_there(monkeypatch: pytest.MonkeyPatch, large: Comparison) -> None:
    monkeypatch.setattr("fp8launch.plugins.plots.html_page.available", lambda: False)
    text = to_html(large)
    assert "<svg" not in text
    assert len(Page(text).tables) == 3


def test_the_differences_and_phases_are_on_the_page(tmp_path: Path) -> None:
    """A difference that changes only the loss is on the page, and phases are where a run has several."""
    logs = [
        write_log(tmp_path / "base.log", Made(arguments={"lr": 1})),
        write_log(tmp_path / "other.log", Made(precision=FP8, arguments={"lr": 1e-5})),
    ]
    text = to_html(of(*logs))
    assert "changes the loss only" in text and "1e-05" in text
    assert "Phases" not in text


def test_phases_are_in_a_table_and_in_the_pictures(tmp_path: Path) -> None:
    phased = write_phases(tmp_path / "phased", *WHOLE)
    text = to_html(compare([run_from_folder(RunFolder(phased))]))
    assert "<h2>Phases</h2>" in text
    if available():
        # The borders in the pictures of the speed and of the loss.
        assert text.count("cooldown") > 1


def test_compare_writes_the_page(tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.html"
    assert command(["compare", str(H200), "--html", str(file)]) == 0
    assert f"wrote {file}" in capsys.readouterr().err
    assert file.read_text().startswith("<!doctype html>")
    assert command(["compare", str(H200), "--html", str(tmp_path / "none" / "a.html")]) == 2
    assert f"--html: error: folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The first text of the page, what is wider than the page or cut, and names that break inside a word.
PROBE = """() => {
  const root = document.documentElement, seen = e => e.getClientRects().length > 0;
  const box = e => e.getBoundingClientRect();
  const outside = [...document.querySelectorAll("h1, h2, h3, h4, p, li, th, td, figure, svg, pre, .scroll, .name span")]
    .filter(e => seen(e) && (box(e).right > root.clientWidth + 0.5 || box(e).left < -0.5))
    .filter(e => !e.closest("pre") && !e.closest(".interval"));
  const broken = [];
  for (const e of document.querySelectorAll("tbody th.name, .key li span")) {
    if (!seen(e)) continue;
    if (e.scrollWidth > e.clientWidth + 1 && getComputedStyle(e).display !== "inline") broken.push(e.textContent);
    const walker = document.createTreeWalker(e, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
      const text = walker.currentNode.data, range = document.createRange();
      for (const word of text.matchAll(/[A-Za-z0-9]+/g)) {
        range.setStart(walker.currentNode, word.index);
        range.setEnd(walker.currentNode, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map(r => r.top)).size > 1) broken.push(e.textContent);
      }
    }
  }
  for (const e of document.querySelectorAll("td"))
    if (seen(e) && e.scrollWidth > e.clientWidth + 1) broken.push(e.textContent);
  const drawn = [...document.querySelectorAll(".panel > svg")];
  return {width: root.clientWidth, scroll: root.scrollWidth, outside: outside.map(e => e.outerHTML.slice(0, 200)),
    broken,
    first: document.querySelector("main").innerText.split("\\n")[0], bad: document.querySelectorAll("tr.bad").length,
    tables: document.querySelectorAll("table").length, pictures: drawn.length,
    small: Math.min(...drawn.flatMap(e => [...e.querySelectorAll("text")].map(t => box(t).height)).filter(h => h > 0)),
    empty: drawn.filter(e => e.querySelectorAll("path, use").length < 5 || box(e).height < 60).length,
    loaded: performance.getEntriesByType("resource").map(e => e.name), ink: getComputedStyle(document.body).color};
}"""


@pytest.fixture(scope="module")
def chromium():
    """The distribution's Chromium, driven by Playwright. No network is needed."""
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("Chromium is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=180_000)
        yield browser
        browser.close()


def probe(chromium, tmp_path: Path, text: str, width: int, scheme: str = "light") -> dict:
    file = tmp_path / "report.html"
    file.write_text(text, encoding="utf-8")
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.set_default_timeout(180_000)
    page.goto(file.as_uri())
    found = page.evaluate(PROBE)
    page.close()
    return found


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["large", "unlike", "real"])
def test_a_browser_shows_it_whole(chromium, tmp_path: Path, request, name: str, width: int) -> None:
    """The conclusion first, nothing beyond the page, no name cut or broken inside a word, no picture empty."""
    comparison = of(H200) if name == "real" else request.getfixturevalue(name)
    found = probe(chromium, tmp_path, to_html(comparison), width)
    assert found["first"].replace("\N{NO-BREAK SPACE}", " ") == conclusion(comparison)
    assert found["width"] == width
    assert found["scroll"] <= width
    assert found["broken"] == []
    assert found["outside"] == []
    assert found["bad"] == (name == "unlike")
    assert found["tables"] == (3 if name == "large" else 2)
    assert found["loaded"] == []
    if available():
        assert found["pictures"] == sum(len(picture.panels) for picture in pictures(comparison)) > 3
        assert found["empty"] == 0
        assert found["small"] >= 8, "letters in the pictures stay legible"


@pytest.mark.parametrize("width", [390, 1280])
def test_commands_are_wrapped_between_words(chromium, tmp_path: Path, rates: Comparison, width: int) -> None:
    """They were cut off on a phone."""
    text = to_html(rates)
    text = text.replace("</main>", f"<pre>{' '.join(['<span>--option=1</span>'] * 30)}</pre></main>")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    page = chromium.new_page(viewport={"width": width, "height": 900})
    page.set_default_timeout(180_000)
    page.goto((tmp_path / "report.html").as_uri())
    cut = "() => [...document.querySelectorAll('pre')].map(e => e.scrollWidth > e.clientWidth)"
    assert page.evaluate(cut) == [False, False]
    lines = "() => [...document.querySelectorAll('pre span')].map(e => e.getClientRects().length)"
    assert set(page.evaluate(lines)) == {1}
    page.close()


def test_dark_where_the_reader_is_dark(chromium, tmp_path: Path, text: str) -> None:
    light, dark = (probe(chromium, tmp_path, text, 400, scheme)["ink"] for scheme in ("light", "dark"))
    assert sum(map(int, re.findall(r"\d+", light))) < 200 < 600 < sum(map(int, re.findall(r"\d+", dark)))
