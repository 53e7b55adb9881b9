"""The order of the tests (order.py): no long file starts last, and those on Slurm come first."""

from __future__ import annotations

from pathlib import Path

from order import LONG, SLURM, place

ROOT = Path(__file__).parents[1]


def test_the_files_that_are_named_exist() -> None:
    assert [file for file in LONG if not (ROOT / file).is_file()] == []
    assert len(set(LONG)) == len(LONG)


def test_slurm_then_the_long_files_then_the_others_as_they_were() -> None:
    others = ["tests/a.py::test_1", "tests/a.py::test_2"]
    slurm = [f"{SLURM}test_new.py::test_1"]
    long = [f"{file}::test_1" for file in LONG]
    on_slurm = [nodeid for nodeid in long if nodeid.startswith(SLURM)]
    expected = [*on_slurm, *slurm, *(nodeid for nodeid in long if nodeid not in on_slurm), *others]
    assert sorted([*others, *slurm, *reversed(long)], key=place) == expected
