"""The text dataset: Megatron's own reader finds in it what was written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fp8launch.datasets.index_format import read_index

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "text_dataset.py"
READ = """
import json, sys
sys.path.insert(0, {code!r})
from fp8launch.injob.rank.compat import python311; python311.install()
from fp8launch.injob.rank.compat import cpu; cpu.install()
from megatron.core.datasets.indexed_dataset import IndexedDataset
dataset = IndexedDataset({prefix!r})
print(json.dumps([[int(token) for token in dataset[at]] for at in range(len(dataset))]))
print(json.dumps([int(at) for at in dataset.document_indices]))
"""


def tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(TOOL), *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts, an empty one, one that is no text, and a test, which is left out."""
    place = tmp_path / "texts"
    (place / "a" / "test").mkdir(parents=True)
    (place / "b.txt").write_bytes("häß".encode())
    (place / "a" / "z.py").write_bytes(b"x = 1\n\xff")
    (place / "a" / "test" / "t.py").write_bytes(b"left out")
    (place / "empty.md").write_bytes(b"")
    (place / "picture.png").write_bytes(b"no text")
    return place


def test_our_reader_and_the_record_agree(folder: Path, tmp_path: Path) -> None:
    done = tool(tmp_path / "out" / "text", folder)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record == json.loads((tmp_path / "out" / "text.json").read_text())
    found = read_index(tmp_path / "out" / "text")
    assert (found.documents, found.tokens) == (record["documents"], record["tokens"]) == (2, 8 + 6)


def test_the_same_text_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    records = [json.loads(tool(tmp_path / name, folder).stdout) for name in ("one", "two")]
    assert records[0]["sha256"] == records[1]["sha256"]


def test_this_pythons_library_is_some_million_tokens(tmp_path: Path) -> None:
    record = json.loads(tool(tmp_path / "library").stdout)
    assert record["tokens"] > 5_000_000
    assert record["documents"] > 300


def test_no_text_is_said(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    for place, words in (("nothing", "no .md"), ("absent", "there is no")):
        done = tool(tmp_path / "x", tmp_path / place)
        assert done.returncode == 2
        assert words in done.stderr


@pytest.mark.train
def test_megatron_reads_bytes_and_ends(folder: Path, tmp_path: Path) -> None:
    tool(tmp_path / "text", folder)
    code = READ.format(code=str(ROOT / "launchers"), prefix=str(tmp_path / "text"))
    environment = {**os.environ, "FP8LAUNCH_DEVICE": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    documents, ends = done.stdout.splitlines()[-2:]
    assert json.loads(documents) == [[*b"x = 1\n\xff", 256], [*"häß".encode(), 256]]
    assert json.loads(ends) == [0, 1, 2]
