"""Compare tokens/s of `fp8launch data build` and Megatron's tools/preprocess_data.py on this machine.

    python benchmarks/data/compare_builders.py MEGATRON-LM-CHECKOUT [--megabytes 40] [--workers 2] [--rounds 1]

Both read the same JSON lines with the same tokenizer.json (32,000 tokens, trained here) on as many processes, one after
the other in each round, and must write the same bytes. The text is Python files of this interpreter, cut into documents
of 3 kB. Times are of whole commands; "steady" is the difference to the same with a tenth of the text, so that no
start-up counts. CPU seconds are summed over all processes. Needs `fp8launch[data,megatron]` and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

LAUNCHERS = Path(__file__).resolve().parents[2] / "launchers"
# Starts Megatron's tool with megatron-core's wheel and torch for the CPU, prepared as for a training on a CPU.
RUN_TOOL = """
import runpy, sys
sys.path.insert(0, {launchers!r})
from fp8launch.injob.rank.compat import cpu, python311
python311.install(); cpu.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def documents() -> Iterator[str]:
    """Return real text that every machine has."""
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_path(name)).rglob("*.py")):
            try:
                text = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            for begin in range(0, len(text), 3000):
                yield text[begin : begin + 3000]


def write_corpus(path: Path, size: int) -> int:
    written = 0
    with path.open("w", encoding="utf-8") as file:
        for text in documents():
            written += file.write(json.dumps({"text": text}) + "\n")
            if written >= size:
                break
    return written


def timed(command: list[str], environment: dict[str, str] | None = None) -> tuple[float, float]:
    """Run a command; return its seconds and the CPU seconds of its processes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - begun
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        sys.exit(f"{command}: {done.stderr[-2000:]}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the speed of two builders of datasets.")
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--megabytes", type=int, default=40)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    tool = options.checkout / "tools" / "preprocess_data.py"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_corpus(folder / "text.jsonl", options.megabytes << 20)
        write_corpus(folder / "small.jsonl", (options.megabytes << 20) // 10)
        fp8launch = [sys.executable, "-m", "fp8launch", "data"]
        train = ["tokenizer", str(folder / "text.jsonl"), "--vocab-size", "32000", "--out", str(folder / "tokenizer")]
        timed([*fp8launch, *train])
        here = {**os.environ, "FP8LAUNCH_DEVICE": "cpu", "PYTHONPATH": str(LAUNCHERS)}
        ours = [*fp8launch, "build", str(folder / "text.jsonl"), "--tokenizer", str(folder / "tokenizer")]
        ours += ["--out", str(folder / "ours"), "--workers", str(options.workers), "--overwrite", "--json"]
        slow = [*ours, "--engine", "tokenizers"]
        theirs = [sys.executable, "-W", "ignore", "-c", RUN_TOOL.format(launchers=str(LAUNCHERS)), str(tool)]
        theirs += ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "theirs"), "--append-eod"]
        theirs += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
        theirs += ["--workers", str(options.workers)]
        rows = {label: _Row() for label in ("megatron", "fp8launch", "fp8launch, tokenizers")}
        for _ in range(options.rounds):
            for part in ("small", "text"):
                for label, command in (("megatron", theirs), ("fp8launch, tokenizers", slow), ("fp8launch", ours)):
                    command = [word.replace("text.jsonl", f"{part}.jsonl") for word in command]
                    wall, cpu = timed(command, here)
                    rows[label].of(part).append((wall, cpu))
                    if label != "megatron":
                        _require_same(folder, label)
        tokens = {"text": 0, "small": 0}
        for part in tokens:
            tokens[part] = _tokens(folder, part, ours, here)
    print(f"{size / 1e6:.1f} MB, {tokens['text']:,} tokens, {options.workers} processes, {options.rounds} rounds")
    base, base_steady = rows["megatron"].wall("text"), rows["megatron"].steady(tokens)
    for label, row in rows.items():
        wall, (steady, per_cpu) = row.wall("text"), row.steady(tokens)
        print(f"{label:22} {wall:7.1f} s {tokens['text'] / wall / 1e6:7.3f} M tokens/s {base / wall:5.1f} x", end="")
        print(f"; steady {steady / 1e6:.3f} M tokens/s {steady / base_steady[0]:.1f} x", end="")
        print(f", {per_cpu / 1e6:.3f} M per CPU second {per_cpu / base_steady[1]:.1f} x")


class _Row:
    """Return the seconds and CPU seconds of a builder, by part of the text."""

    def __init__(self) -> None:
        self._times: dict[str, list[tuple[float, float]]] = {"text": [], "small": []}

    def of(self, part: str) -> list[tuple[float, float]]:
        return self._times[part]

    def wall(self, part: str) -> float:
        return statistics.median(wall for wall, _ in self._times[part])

    def steady(self, tokens: dict[str, int]) -> tuple[float, float]:
        more = tokens["text"] - tokens["small"]
        cpu = {part: statistics.median(cpu for _, cpu in times) for part, times in self._times.items()}
        return more / (self.wall("text") - self.wall("small")), more / (cpu["text"] - cpu["small"])


def _require_same(folder: Path, label: str) -> None:
    """Check that both wrote the same bytes, and remove ours so that the next one is built."""
    for ending in ("bin", "idx"):
        ours, theirs = folder / f"ours.{ending}", folder / f"theirs_text_document.{ending}"
        assert ours.read_bytes() == theirs.read_bytes(), f"{label}: .{ending} differs"
        ours.unlink()
    (folder / "ours.manifest.json").unlink()


def _tokens(folder: Path, part: str, ours: list[str], environment: dict[str, str]) -> int:
    timed([word.replace("text.jsonl", f"{part}.jsonl") for word in ours], environment)
    return int(json.loads((folder / "ours.manifest.json").read_text())["tokens"])


if __name__ == "__main__":
    main()
