"""The index of a dataset is read as Megatron reads it, and every kind of damage is reported."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from indexed_files import FLOAT32, INT32, UINT16, index_bytes, write_dataset

from fp8launch.datasets.index_format import BrokenIndex, Index, read_index

LENGTHS = [5, 1, 7]
GOOD = index_bytes(LENGTHS)


def test_counts(tmp_path: Path) -> None:
    assert read_index(write_dataset(tmp_path / "a", LENGTHS)) == Index("uint16", 3, 3, 13)
    assert read_index(write_dataset(tmp_path / "b", LENGTHS, INT32)) == Index("int32", 3, 3, 13)


def test_a_multimodal_index_has_modes_behind(tmp_path: Path) -> None:
    assert read_index(write_dataset(tmp_path / "a", LENGTHS, modes=True)).tokens == 13


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + GOOD, "not an index of Megatron"),
        (GOOD[:20], "inside its header"),
        (index_bytes(LENGTHS, version=2), "version 2"),
        (index_bytes(LENGTHS, code=99), "type 99"),
        (index_bytes(LENGTHS, code=FLOAT32), "float32"),
        (GOOD[:-1], "cut short"),
        (GOOD + b"\x00" * 9, "contradicts its own counts"),
        (index_bytes([]), "no documents"),
        (GOOD[:-8] + b"\x63" + b"\x00" * 7, "contradict"),
    ],
)
def test_a_damaged_index_is_reported(tmp_path: Path, index: bytes, says: str) -> None:
    prefix = write_dataset(tmp_path / "a", LENGTHS)
    Path(f"{prefix}.idx").write_bytes(index)
    with pytest.raises(BrokenIndex, match=says):
        read_index(prefix)


@pytest.mark.parametrize(("size", "says"), [(25, "cut short"), (0, "cut short"), (27, "different datasets")])
def test_a_bin_of_another_size_is_reported(tmp_path: Path, size: int, says: str) -> None:
    prefix = write_dataset(tmp_path / "a", LENGTHS)
    Path(f"{prefix}.bin").write_bytes(b"\x00" * size)
    with pytest.raises(BrokenIndex, match=says):
        read_index(prefix)


def test_documents_without_tokens(tmp_path: Path) -> None:
    with pytest.raises(BrokenIndex, match="no tokens"):
        read_index(write_dataset(tmp_path / "a", [0, 0]))


@settings(max_examples=200)
@given(content=st.binary(max_size=120), cut=st.integers(0, 40))
def test_any_bytes_end_in_an_answer(tmp_path_factory: pytest.TempPathFactory, content: bytes, cut: int) -> None:
    prefix = tmp_path_factory.mktemp("any") / "a"
    Path(f"{prefix}.bin").write_bytes(b"\x00" * 26)
    Path(f"{prefix}.idx").write_bytes(GOOD[:cut] + content)
    try:
        assert read_index(prefix).tokens > 0
    except BrokenIndex as exc:
        assert str(exc)


BUILD = """
import sys
sys.path.insert(0, {code!r})
from fp8launch.injob.rank.compat import python311; python311.install()
from fp8launch.injob.rank.compat import cpu; cpu.install()
import numpy, torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
builder = IndexedDatasetBuilder({prefix!r} + ".bin", dtype=numpy.{dtype})
for length in {lengths!r}:
    # Two sequences a document.
    builder.add_document(torch.arange(2 * length) % 250, [length, length])
builder.finalize({prefix!r} + ".idx")
"""


@pytest.mark.train
@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_what_megatron_writes_is_read(tmp_path: Path, dtype: str) -> None:
    if not (importlib.util.find_spec("torch") and importlib.util.find_spec("megatron")):
        pytest.skip("torch or megatron-core is not installed")
    code = Path(__file__).parents[2] / "launchers"
    prefix = str(tmp_path / "real")
    script = BUILD.format(code=str(code), prefix=prefix, dtype=dtype, lengths=LENGTHS)
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    assert read_index(Path(prefix)) == Index(dtype, 6, 3, 26)
    # Ours, byte for byte, where the documents are the same.
    ours = write_dataset(tmp_path / "ours", [5, 5, 1, 1, 7, 7], UINT16 if dtype == "uint16" else INT32)
    theirs = Path(f"{prefix}.idx").read_bytes()
    tables = 34 + 6 * (4 + 8)
    assert theirs[18:26] == Path(f"{ours}.idx").read_bytes()[18:26]
    assert theirs[34:tables] == Path(f"{ours}.idx").read_bytes()[34:tables]
