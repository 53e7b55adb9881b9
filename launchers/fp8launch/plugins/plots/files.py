"""What `compare --html` and `compare --plot` write. The pictures are drawn by matplotlib, which is imported on use."""

from __future__ import annotations

from pathlib import Path

from fp8launch.report.comparison import Comparison
from fp8launch.report.comparison_files import ComparisonFile, write_text


def _write_html(comparison: Comparison, path: Path) -> list[str]:
    from fp8launch.plugins.plots.figures import available
    from fp8launch.plugins.plots.html_page import to_html

    messages = [write_text(path, "--html", to_html(comparison))]
    if not available():
        install = "pip install 'fp8launch[plots]'"
        messages.append(f"the HTML report has no plots, because matplotlib is not installed ({install})")
    return messages


def _write_plots(comparison: Comparison, path: Path) -> list[str]:
    from fp8launch.plugins.plots.figures import write_plots

    return [f"wrote {file}" for file in write_plots(comparison, path)]


HTML = ComparisonFile("Write an HTML report to this file.", _write_html)
PLOT = ComparisonFile(
    "Write plots to a .png, .svg or .pdf file, or PNGs to a folder.", _write_plots, may_be_folder=True
)
