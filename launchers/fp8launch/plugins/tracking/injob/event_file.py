"""TensorBoard's event files, written with the standard library: images and hosts often lack TensorBoard.

A file is a sequence of records (length, checksum, data, checksum), the format of TFRecord. Each record is a
message `Event` of TensorFlow's event.proto, encoded here by hand.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fp8launch.injob.regular_files import read_regular
from fp8launch.plugins.tracking.injob.log_rows import Row

SUFFIX = ".fp8launch"
_LARGEST_FILE = 4 << 30


class EventFile:
    """A new event file in the folder of a run. `last` is the newest iteration in the files that are there already."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        self.place = str(folder)
        self.last = newest_step(folder)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time.time()):010d}.{os.uname().nodename}.{os.getpid()}{SUFFIX}"
        self._file = (folder / name).open("xb")
        self.add(_number(1, time.time()) + _text(3, b"brain.Event:2"))

    def log(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.add(event(row.time, row.step, row.values))
            self.last = row.step
        self._file.flush()

    def add(self, message: bytes) -> None:
        """Write one event."""
        length = struct.pack("<Q", len(message))
        self._file.write(length + _checksum(length) + message + _checksum(message))

    def close(self, state: str, failed: bool) -> None:
        self._file.close()


def event(seconds: float, step: int, values: Mapping[str, float]) -> bytes:
    """Encode an `Event` with a scalar for each value."""
    summary = b"".join(_text(1, _text(1, name.encode()) + _single(2, value)) for name, value in values.items())
    return _number(1, seconds) + _varint(2 << 3) + _varint(step) + _text(5, summary)


def newest_step(folder: Path) -> int:
    """Return the newest iteration in our event files of a folder, 0 if there is none."""
    steps = [0]
    for file in sorted(folder.glob(f"events.out.tfevents.*{SUFFIX}")):
        steps += map(_step_of, _messages(file))
    return max(steps)


def _messages(file: Path) -> Iterator[bytes]:
    """Yield the complete events of a file. The last one may be cut off, and TensorBoard ignores it, too."""
    data, at = read_regular(file, _LARGEST_FILE), 0
    while at + 12 <= len(data):
        (length,) = struct.unpack("<Q", data[at : at + 8])
        message = data[at + 12 : at + 12 + length]
        if len(data) < at + 16 + length or data[at + 12 + length : at + 16 + length] != _checksum(message):
            return
        yield message
        at += 16 + length


def _step_of(message: bytes) -> int:
    """Return the step of an event: its second field, after the time."""
    if message[9:10] != b"\x10":
        return 0
    step = shift = 0
    for byte in message[10:20]:
        step |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return step


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


def _number(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _single(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC_TABLE = _crc_table()


def _checksum(data: bytes) -> bytes:
    """Return the masked CRC-32C of TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC_TABLE[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
