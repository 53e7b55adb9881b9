"""FlashAttention 3 for the H200, small enough to carry: cut.py FOLDER.

Takes the library that the wheel of xformers 0.0.34 brings (BSD; built from Dao-AILab's flash-attention for torch's
stable ABI), checks the wheel's hash, and empties every kernel but those of Hopper in bf16 with head size 128: 356 MB
become 4 MB once packed. FOLDER gets `flash_attn_interface.py` (beside this file), the library, and metadata under the
name by which Transformer Engine looks for it, `flash-attn-3`. Needs `c++filt` of binutils.
"""

import hashlib
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

ATTENTION = "xformers==0.0.34", "381cc47f43e95893e21b7f04f1aa31dc10a81fc95ba92482e4465a5064c77743"
LIBRARY = "xformers/flash_attn_3/_C.so"
# The library was built with CUDA 12, and torch for CUDA 13 does not bring that runtime.
RUNTIME = "nvidia-cuda-runtime-cu12==12.8.90", "adade8dcbd0edf427b7204d480d6066d33902cab2a4707dcfc48a2d0fd44ab90"
RUNTIME_LIBRARY = "nvidia/cuda_runtime/lib/libcudart.so.12"
FATBIN_MAGIC = 0xBA55ED50
CUBIN, HOPPER = 2, 90
TILE = re.compile(r"cute::C<1>, cute::C<1> >, cute::tuple<cute::C<\d+>, cute::C<\d+>, cute::C<(\d+)>")


def main(folder: Path) -> None:
    """Write the package into `folder`; SystemExit says what is wrong with the wheel or the machine."""
    if not shutil.which("c++filt"):
        raise SystemExit("cut.py: c++filt is missing (package binutils)")
    folder.mkdir(parents=True, exist_ok=True)
    library = bytearray(_member(*ATTENTION, LIBRARY))
    for start, size in _unneeded(library):
        library[start : start + size] = bytes(size)
    (folder / "flash_attn_3_library.so").write_bytes(library)
    (folder / "libcudart.so.12").write_bytes(_member(*RUNTIME, RUNTIME_LIBRARY))
    shutil.copy(Path(__file__).with_name("flash_attn_interface.py"), folder)
    about = folder / "flash_attn_3-3.0.0.dist-info"
    about.mkdir(exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: flash-attn-3\nVersion: 3.0.0\n", encoding="utf-8")


def _member(package: str, sha256: str, name: str) -> bytes:
    """The file `name` of a package's wheel for the host, whose hash must be the one expected."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    target = ["--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux2014_x86_64"]
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([*pip, *target, "--dest", scratch, package], check=True)
        wheel = next(Path(scratch).glob("*.whl"))
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != sha256:
            raise SystemExit(f"cut.py: {wheel.name} has the SHA-256 {found}, expected {sha256}")
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name)


def _unneeded(library: bytes) -> Iterator[tuple[int, int]]:
    """Offset and size in bytes of the code of every kernel that an H200 does not need at this head size."""
    for kind, architecture, start, size in _code(library):
        if kind != CUBIN or architecture != HOPPER or not _is_needed(library[start : start + size]):
            yield start, size


def _is_needed(code: bytes) -> bool:
    mangled = b"\n".join(sorted(set(re.findall(rb"\.text\.(_Z\w+)", code))))
    names = subprocess.run(["c++filt"], input=mangled, capture_output=True, check=True).stdout.decode().splitlines()
    attention = [name for name in names if "CollectiveMainloop" in name and "arch::Sm90" in name]
    if not attention:
        return not any("CollectiveMainloop" in name for name in names)
    return any("bfloat16_t" in name and (tile := TILE.search(name)) and tile[1] == "128" for name in attention)


def _code(library: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, offset and size of every piece of device code in the section `.nv_fatbin` of an ELF file."""
    start, size = _section(library, b".nv_fatbin")
    at = start
    while at < start + size:
        magic, _, header, length = struct.unpack_from("<IHHQ", library, at)
        if magic != FATBIN_MAGIC:
            at += 8
            continue
        entry, end = at + header, at + header + length
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", library, entry)
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            yield kind, architecture, entry + entry_header, entry_size
            entry += entry_header + entry_size
        at = end


def _section(library: bytes, wanted: bytes) -> tuple[int, int]:
    (table,) = struct.unpack_from("<Q", library, 40)
    count, names_index = struct.unpack_from("<HH", library, 60)
    headers = [struct.unpack_from("<IIQQQQ", library, table + 64 * index) for index in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        if library[names + name : names + name + len(wanted) + 1] == wanted + b"\0":
            return offset, size
    raise SystemExit(f"cut.py: {LIBRARY} has no section {wanted.decode()}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]))
