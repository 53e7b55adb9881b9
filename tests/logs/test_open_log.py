"""Compressed logs are read as plain ones are."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from support import log_bytes, only, refused
from support_logs import REAL

from fp8launch.cli import run as command
from fp8launch.logs import read_log
from fp8launch.logs.file_slices import LineCounter
from fp8launch.logs.open_log import log_name, logs_in, open_log
from fp8launch.report.throughput import read_logs

Pack = Callable[[bytes], bytes]
FORMS = [("gz", gzip.compress), ("xz", lzma.compress), ("bz2", lambda data: bz2.compress(data, 1))]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A log of two attempts, the second of which resumed."""
    source = next(path for path in REAL if "resumed" in path.name)
    path = tmp_path / "run.log"
    path.write_bytes(log_bytes(source))
    return path


@pytest.mark.parametrize(("suffix", "pack"), FORMS)
def test_a_compressed_log_says_what_the_plain_one_says(plain: Path, suffix: str, pack: Pack) -> None:
    packed = plain.with_name(f"run.log.{suffix}")
    packed.write_bytes(pack(plain.read_bytes()))
    mine, other = read_log(packed), read_log(plain)
    assert (mine.processes, mine.disturbed_rows) == (other.processes, other.disturbed_rows)
    assert list(mine.iterations) == list(other.iterations)
    assert len(mine.processes) > 1
    end = mine.processes[-1].begin
    assert LineCounter(packed).number(end) == LineCounter(plain).number(end) > 1


def test_the_content_decides_and_not_the_name(plain: Path) -> None:
    renamed = plain.with_name("node1")
    renamed.write_bytes(gzip.compress(plain.read_bytes()))
    assert len(read_log(renamed).iterations) == len(read_log(plain).iterations)


def test_a_log_that_was_compressed_anew_is_read_anew(plain: Path) -> None:
    packed = plain.with_name("run.log.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    before = len(read_log(packed).iterations)
    packed.write_bytes(gzip.compress(plain.read_bytes() + plain.read_bytes()))
    assert before < len(read_log(packed).iterations) + read_log(packed).duplicates


def test_no_more_than_a_few_temporary_files_are_left(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    for number in range(10):
        packed = tmp_path / f"{number}.log.gz"
        packed.write_bytes(gzip.compress(plain.read_bytes()))
        read_log(packed)
    assert len(list(folder.iterdir())) <= 4


@pytest.mark.parametrize(("suffix", "pack"), FORMS)
@pytest.mark.parametrize("damage", ["cut", "altered"])
def test_a_damaged_file_is_refused_in_words(plain: Path, suffix: str, pack: Pack, damage: str) -> None:
    data = pack(plain.read_bytes())
    middle = len(data) // 2
    packed = plain.with_name(f"run.log.{suffix}")
    packed.write_bytes(data[:middle] if damage == "cut" else data[:middle] + b"\xff" * 64 + data[middle + 64 :])
    problem = only(refused(read_logs, [packed]))
    assert problem.code == "unreadable-log"


def test_zstd_is_named(plain: Path) -> None:
    packed = plain.with_name("run.log.zst")
    packed.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    assert "unpack the file first" in only(refused(read_logs, [packed])).message


def test_the_commands_take_compressed_logs(plain: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = plain.parent
    for name in ("bf16", "fp8"):
        (folder / f"{name}.log.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert [log_name(path) for path in logs_in(folder)] == ["bf16", "fp8"]
    assert command(["parse", str(folder / "bf16.log.gz"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iterations"] > 0
    command(["compare", str(folder), "--json", "--force"])
    said = capsys.readouterr().out
    assert '"bf16"' in said
    assert '"fp8"' in said


@pytest.mark.parametrize(("suffix", "pack"), FORMS)
def test_a_file_that_unpacks_to_too_much_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suffix: str, pack: Pack
) -> None:
    """Some kilobytes of zeros fill a disk."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("fp8launch.logs.open_log.MAX_UNPACKED", 8 << 20)
    bomb = tmp_path / f"bomb.log.{suffix}"
    bomb.write_bytes(pack(bytes(16 << 20)))
    assert bomb.stat().st_size < 100_000
    assert command(["parse", str(bomb)]) == 2
    assert "larger than 8 MiB when it is unpacked" in capsys.readouterr().err
    assert list(folder.iterdir()) == []


def test_an_xz_file_that_asks_for_much_memory_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.log.xz"
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 1 << 20}]
    data = bytearray(lzma.compress(b"x" * 1000, lzma.FORMAT_XZ, filters=filters))
    # The size of the dictionary is the last byte of the filter's flags; the header's checksum follows.
    header = (data[12] + 1) * 4
    at = data.index(b"\x21\x01", 12) + 2
    data[at] = 40  # 4 GiB - 1
    data[12 + header - 4 : 12 + header] = zlib.crc32(data[12 : 12 + header - 4]).to_bytes(4, "little")
    log.write_bytes(bytes(data))
    assert command(["parse", str(log)]) == 2
    assert "Memory usage limit exceeded" in capsys.readouterr().err


def test_several_xz_streams_are_one_log(tmp_path: Path) -> None:
    with open_log(write(tmp_path / "a.log.xz", lzma.compress(b"a\n") + bytes(8) + lzma.compress(b"b\n"))) as stream:
        assert stream.read() == b"a\nb\n"


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def test_an_archive_of_logs_is_not_read_as_one_run(plain: Path, tmp_path: Path) -> None:
    for name, mode in (("a.tar", "w"), ("a.tar.xz", "w:xz")):
        with tarfile.open(tmp_path / name, mode) as archive:
            archive.add(plain, "one.log")
        assert "unpack it" in only(refused(read_logs, [tmp_path / name])).message


def test_a_killed_process_leaves_no_unpacked_log(plain: Path, tmp_path: Path) -> None:
    """It may have 1 GiB, and a batch system ends what is in the way with SIGTERM, or SIGKILL."""
    packed = plain.with_name("run.log.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    code = (
        "import os, signal, sys; from pathlib import Path; from fp8launch.logs.open_log import open_log\n"
        "assert open_log(Path(sys.argv[1])).read(10)\n"
        "os.kill(os.getpid(), int(sys.argv[2]))"
    )
    for number in (signal.SIGTERM, signal.SIGKILL):
        words = [sys.executable, "-c", code, str(packed), str(int(number))]
        done = subprocess.run(words, env={**os.environ, "TMPDIR": str(temporary)}, check=False)
        assert done.returncode == -number
        assert list(temporary.iterdir()) == []


def test_readers_of_one_unpacked_log_do_not_move_each_other(plain: Path) -> None:
    packed = plain.with_name("run.log.gz")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    whole = plain.read_bytes()
    with open_log(packed) as one, open_log(packed) as other:
        assert one.read(100) == whole[:100]
        assert other.seek(-50, 2) == len(whole) - 50
        assert (one.tell(), other.read(), other.read()) == (100, whole[-50:], b"")
        assert one.seek(10, 1) == 110
        assert one.read() == whole[110:]
