"""Write the throughput that NVIDIA publishes for Megatron-Bridge's recipes, one record per row.

    python tools/bridge_published.py CHECKOUT

Reads the tables of `docs/performance-summary.md` and `docs/performance-summary-archive.md`. A row may state two
precisions or two layouts, the second one in parentheses, which makes two records.
"""

from __future__ import annotations

import json
import lzma
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "launchers" / "fp8launch" / "plugins" / "bridge" / "published.json.xz"
PAGES = ("docs/performance-summary.md", "docs/performance-summary-archive.md")
COLUMNS = {
    "Model": "model",
    "System": "system",
    "#-GPUs": "gpus",
    "Precision": "precision",
    "GBS": "global_batch",
    "MBS": "micro_batch",
    "Sequence Length": "sequence",
    "FSDP": "fsdp",
    "TP": "tp",
    "PP": "pp",
    "CP": "cp",
    "VP": "vp",
    "EP": "ep",
    "Tokens / sec / GPU": "tokens_per_s_per_gpu",
    "Model TFLOP / sec / GPU": "tflops_per_gpu",
}
TEXT = ("model", "system", "precision")


def rows(page: str) -> Iterator[dict[str, str]]:
    """Yield the table rows of a page, with their headings."""
    release = task = ""
    of_heading: dict[str, str] = {}
    names: list[str] = []
    for line in page.splitlines():
        heading = re.fullmatch(r"(#+) (.*)", line.strip())
        if heading:
            names = []
            text = heading.group(2)
            container = re.match(r"(\d\d\.\d\d(?:\.\d+)?) NeMo Container", text)
            if container:
                release = container.group(1)
            elif text.endswith("Performance"):
                task = text.removesuffix("Performance").strip().lower()
            elif ":" in text:
                kind, value = text.split(":", 1)
                of_heading = {kind.strip(): value.strip()}
            continue
        if not line.lstrip().startswith("|"):
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not names:
            names = cells
        elif not set(line) <= set("|-: "):
            named = {**of_heading, **dict(zip(names, cells, strict=True))}
            yield {
                "container": release,
                "task": task,
                **{COLUMNS[name]: cell for name, cell in named.items() if name in COLUMNS},
            }


def records(row: dict[str, str]) -> Iterator[dict[str, Any]]:
    """Yield one record for each figure of a row: `FP8-CS (FP8-MX)` with `37556 (36108)` makes two."""
    cells = {name: alternatives(text) for name, text in row.items()}
    count = len(cells["tokens_per_s_per_gpu"])
    for at in range(count):
        record: dict[str, Any] = {}
        for name, values in cells.items():
            value = values[at] if len(values) == count else values[0]
            if name == "model" and at and len(values) == count:
                value = f"{values[0]} ({value})"  # the same model in another way, such as with tokens dropped
            record[name] = value if name in (*TEXT, "container", "task") else number(value)
        yield record


def alternatives(text: str) -> list[str]:
    """Return `a (b)` as two values, without footnote marks."""
    text = re.sub(r"\[\^[^]]*\]", "", text).strip()
    found = re.fullmatch(r"(.*?)\s*\((.*)\)", text)
    return [found.group(1), found.group(2)] if found and found.group(1) else [text]


def number(text: str) -> int | float | None:
    text = text.replace(",", "")
    if not re.fullmatch(r"[\d.]+", text):
        return None
    return float(text) if "." in text else int(text)


def main() -> None:
    checkout = Path(sys.argv[1])
    found = [record for page in PAGES for row in rows((checkout / page).read_text()) for record in records(row)]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_bytes(lzma.compress(json.dumps(found, separators=(",", ":")).encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(found)} records, {OUT.stat().st_size} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()
