"""A build that is killed, or whose disk is full: nothing finished is lost, and nothing half-made has a final name."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from dataset_support import build, command, content, data, make_texts, peak_kib, write_jsonl

from fp8launch.datasets.index_format import read_index


def _finished(folder: Path) -> dict[str, int]:
    """The records of finished shards, and when each was written."""
    found = {}
    for path in folder.glob("[0-9]*.json"):
        with contextlib.suppress(FileNotFoundError):  # a build that ends removes its folder
            found[path.name] = path.stat().st_mtime_ns
    return found


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_kill_9_at_random_moments(tmp_path: Path, bpe: Path, seed: int) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(4000, seed=seed))
    build(source, "--tokenizer", bpe, "--out", tmp_path / "whole", "--shard-bytes", 20_000)
    words = command(
        "build", source, "--tokenizer", bpe, "--out", tmp_path / "out", "--shard-bytes", 20_000, "--workers", 2
    )
    choose, folder = random.Random(seed), tmp_path / "out.build"
    kills, before = 0, {}
    for _ in range(8):
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        # So many more shards, and then some: anywhere in a shard, a merge or the end.
        wanted = len(before) + choose.randint(0, 8)
        while process.poll() is None and len(_finished(folder)) < wanted:
            time.sleep(0.01)
        time.sleep(choose.random() * 0.3)
        process.kill()  # its processes end with it
        if process.wait() == 0:
            if kills:
                break
            for path in tmp_path.glob("out.*"):  # done before it was killed: once more from the beginning
                path.unlink()
            continue
        kills += 1
        if not (tmp_path / "out.manifest.json").exists():  # else it was killed while it removed its folder
            there = _finished(folder)
            assert before.items() <= there.items(), "a finished shard was built again"
            before = there
        if (tmp_path / "out.idx").exists():
            assert read_index(tmp_path / "out").documents == 4000
        elif (tmp_path / "out.bin").exists():
            assert (tmp_path / "out.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert kills > 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz"])
def test_memory_does_not_grow_with_the_input(tmp_path: Path, bpe: Path, form: str) -> None:
    """Of 20 and of 160 MB: shards by two processes, and a single packed file that both encode."""
    block = write_jsonl(tmp_path / "block", make_texts(10_000, seed=6)).read_bytes()
    used = {}
    for size in (20 << 20, 160 << 20):
        source = tmp_path / f"{size}.{form}"
        with gzip.open(source, "wb", 1) if form == "jsonl.gz" else source.open("wb") as stream:
            for _ in range(size // len(block)):
                stream.write(block)
        words = ["build", source, "--tokenizer", bpe, "--out", tmp_path / f"{size}", "--workers", 2]
        used[size] = peak_kib(*words)
    small, large = used.values()
    assert (tmp_path / f"{160 << 20}.bin").stat().st_size > 7 * (tmp_path / f"{20 << 20}.bin").stat().st_size
    assert large < small + 50_000 and large < 400_000


def test_killed_processes_of_a_build_end_with_it(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(3000))
    words = command(
        "build", source, "--tokenizer", "bytes", "--out", tmp_path / "out", "--shard-bytes", 2000, "--workers", 2
    )
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None and not _finished(tmp_path / "out.build"):
        time.sleep(0.01)
    process.kill()
    process.wait()
    end = time.monotonic() + 60
    while _of_session(process.pid):
        assert time.monotonic() < end
        time.sleep(0.05)


def _of_session(session: int) -> list[str]:
    found = subprocess.run(["ps", "-s", str(session), "-o", "pid=,stat="], capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if "Z" not in line]


def test_two_builds_of_one_dataset_do_not_meet(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(3000))
    words = ["build", source, "--tokenizer", "bytes", "--out", tmp_path / "out", "--shard-bytes", 2000]
    process = subprocess.Popen(command(*words), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not _finished(tmp_path / "out.build"):
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        assert "another process is building this dataset" in data(*words, expect=3).stderr
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert process.wait() == 0


def test_an_unfinished_build_of_other_input_is_not_continued(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "a.jsonl", make_texts(20)).read_bytes()
    (tmp_path / "a.jsonl").write_bytes(lines + b"broken\n")
    words = ["build", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out"]
    data(*words, "--shard-bytes", 300, expect=1)
    (tmp_path / "a.jsonl").write_bytes(lines)
    done = data(*words, expect=1)
    assert "is an unfinished build with other sources" in done.stderr and "--restart" in done.stderr
    data(*words, "--restart")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs root to mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_loses_nothing(tmp_path: Path, small_disk: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(5000, seed=4))
    words = ["build", source, "--tokenizer", "bytes", "--out", small_disk / "out", "--shard-bytes", 50_000]
    done = data(*words, expect=3)
    assert "No space left on device" in done.stderr and "MB free: make room" in done.stderr
    assert done.stderr.startswith(str(small_disk)) and not list(small_disk.glob("out.build/*.partial"))
    assert not (small_disk / "out.bin").exists() and not (small_disk / "out.idx").exists()
    kept = _finished(small_disk / "out.build")
    merged = json.loads((small_disk / "out.build" / "merge.json").read_text())
    assert len(kept) > 2 and merged["shards"] > 0
    subprocess.run(["mount", "-o", "remount,size=16m", str(small_disk)], check=True)
    data(*words)
    build(source, "--tokenizer", "bytes", "--out", tmp_path / "whole")
    assert content(small_disk / "out") == content(tmp_path / "whole")
