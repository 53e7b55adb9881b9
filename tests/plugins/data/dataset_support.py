"""Generated text, builds in separate processes, and an independent reader of Megatron's format."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_WORDS = """the of and to in is that for it as was with be by on not he his but at are this have from or had an they
which one Straße naïve 東京 42 3.14 don't x=f(y);"""
WORDS = [*_WORDS.split(), "", "\t", "\n\n"]


def make_texts(count: int, seed: int = 0, longest: int = 60) -> list[str]:
    """Documents of random words, some of one word."""
    choose = random.Random(seed)
    return [" ".join(choose.choices(WORDS, k=choose.randint(1, longest))) or "x" for _ in range(count)]


def write_jsonl(path: Path, contents: Iterable[Any], field: str = "text") -> Path:
    lines = (json.dumps({field: content}, ensure_ascii=False) + "\n" for content in contents)
    path.write_text("".join(lines), encoding="utf-8")
    return path


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "fp8launch", "data", *map(str, words)]


def data(*words: object, expect: int = 0, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `fp8launch data ...`; every way to end is an exit code and words."""
    done = subprocess.run(command(*words), capture_output=True, text=True, check=False, timeout=600, **options)
    assert "Traceback" not in done.stderr
    assert "a bug in fp8launch" not in done.stderr
    assert done.returncode == expect, done.stderr + done.stdout
    return done


def build(*words: object, expect: int = 0) -> dict[str, Any]:
    """Build, and return what --json prints."""
    done = data("build", *words, "--json", expect=expect)
    found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
    return found


def peak_kib(*words: object, check: bool = True) -> int:
    """Run `fp8launch data ...`; return the most memory that a process had in use. `check`: it must succeed."""
    code = f"import resource, subprocess, sys; subprocess.run(sys.argv[1:], check={check})\n"
    code += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    wrapped = [sys.executable, "-c", code, *command(*words)]
    return int(subprocess.run(wrapped, capture_output=True, text=True, check=True).stdout.split()[-1])


def read(prefix: Path) -> list[list[int]]:
    """The documents of a dataset, by the format alone."""
    index = Path(f"{prefix}.idx").read_bytes()
    assert index[:9] == b"MMIDIDX\x00\x00"
    code, count = index[17], int.from_bytes(index[18:26], "little")
    lengths = np.frombuffer(index, "<i4", count, 34)
    tokens = np.fromfile(f"{prefix}.bin", {8: "<u2", 4: "<i4"}[code])
    assert lengths.sum() == len(tokens)
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


def content(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def as_bytes(texts: Sequence[str]) -> list[list[int]]:
    """What --tokenizer bytes makes of texts."""
    return [[*text.encode(), 256] for text in texts]


def in_megatron(code: str, *words: object) -> Any:
    """Run code with Megatron importable; return the JSON of its last line."""
    root = Path(__file__).parents[3]
    start = (
        f"import sys, json; sys.path.insert(0, {str(root / 'launchers')!r})\n"
        "from fp8launch.injob.rank.compat import python311, cpu; python311.install(); cpu.install()\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", start + code, *map(str, words)],
        capture_output=True, text=True, check=False, env={**os.environ, "FP8LAUNCH_DEVICE": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
