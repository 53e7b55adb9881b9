"""Container images as files: imported once, by digest where the tool tells one, whole or not at all.

Beside `NAME.sqsh` or `NAME.sif` lie `.sha256` (for `sha256sum -c`, and for a run's manifest) and `.json`, which says
what the file was made of: by that a tag that has moved since is noticed.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from fp8launch.problems import ANSWER_IS_NO, MACHINE_LACKS, error

Kind = Literal["sqsh", "sif"]
Say = Callable[[str], None]

_SECRET_NAME = re.compile(r"(PASSWORD|TOKEN|SECRET|_KEY)$")
_SECRET_TEXT = re.compile(r"(?i)(authorization:\s*\w+\s+|password[ =:]+|token[=:]\s*|//[^/@\s:]*:)[^\s@\"']+")


@dataclass(frozen=True)
class Record:
    """What an image file holds. `digest` is the registry's, None where no tool could tell it; `sha256` the file's."""

    uri: str
    digest: str | None
    sha256: str
    bytes: int
    tool: str
    imported: str


def tool_for(kind: Kind | None) -> tuple[Kind, str]:
    """Kind of file and the program that makes it: what is asked for, else what this machine has. Exit code 3."""
    kinds: dict[str, tuple[Kind, str]] = {
        "enroot": ("sqsh", "a .sqsh"), "apptainer": ("sif", "a .sif"), "singularity": ("sif", "a .sif"),
    }  # fmt: skip
    for program, (makes, _) in kinds.items():
        if kind in (None, makes) and (found := shutil.which(program)):
            return makes, found
    needed = " or ".join(program for program, (makes, _) in kinds.items() if kind in (None, makes))
    raise error(
        "no-import-tool",
        f"this machine has no {needed} to import an image with",
        "images import",
        "run it where jobs run, for example under srun; or let pyxis import at the start of each job",
        MACHINE_LACKS,
    )


def import_image(uri: str, file: Path, tool: str, *, update: bool = False, say: Say = print) -> Record:
    """Make `file` of the image `uri` (`docker://...` in the words of `tool`) unless it is there already.

    Only one process imports at a time; the others wait and find the file. Raises UserError: exit code 1 for a file
    that is stale or not what was asked for and `update` is off, 3 when the tool fails or the folder refuses.
    """
    if re.search(r"//[^/@#]*:[^/@#]*@", uri):
        fix = (
            "leave it out; enroot reads ~/.config/enroot/.credentials, Apptainer what `apptainer registry login` keeps"
        )
        raise error("password-in-uri", "the image's URI holds a password, which would be recorded", "image", fix)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file, say):
            digest = _digest(uri, tool, say)
            if file.exists():
                kept = _what_is_there(file, uri, digest, update)
                if kept is not None:
                    say(f"{file} is there already" + ("" if digest else "; whether it is stale cannot be told"))
                    return kept
            return _import(uri, digest, file, tool, say)
    except OSError as exc:
        raise error(
            "image-folder", f"cannot keep the image: {exc.strerror or exc}", str(file.parent), "--to", MACHINE_LACKS
        ) from None


def read_record(file: Path) -> Record | None:
    """What `file` was made of; None where nothing readable says so."""
    try:
        return Record(**json.loads(_beside(file, "json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def pinned(uri: str, digest: str | None) -> str:
    """The URI with the digest in place of its tag."""
    if digest is None or "@sha256:" in uri:
        return uri
    head, separator, last = re.match(r"(.*)([/#])(.*)", uri, re.S).groups()  # type: ignore[union-attr]
    return f"{head}{separator}{last.partition(':')[0]}@{digest}"


def _what_is_there(file: Path, uri: str, digest: str | None, update: bool) -> Record | None:
    """The record of a file that is what was asked for; None when it is to be replaced."""
    record = read_record(file)
    if record is None:
        code, what = "image-unrecorded", "is there, and nothing beside it says what it was made of"
    elif record.uri != uri:
        code, what = "image-other", f"was made of {record.uri}, not of {uri}"
    elif file.stat().st_size != record.bytes:
        code, what = "image-damaged", f"has {file.stat().st_size} bytes, and had {record.bytes} when it was imported"
    elif digest and record.digest and digest != record.digest:
        code, what = "image-stale", f"is stale: {uri} is {digest} now, and was {record.digest} on {record.imported}"
    else:
        return record
    if update:
        return None
    raise error(code, what, str(file), "replace it with --update, or import to another folder with --to", ANSWER_IS_NO)


def _import(uri: str, digest: str | None, file: Path, tool: str, say: Say) -> Record:
    for leftover in file.parent.glob(f".{file.name}.*.partial"):
        leftover.unlink()  # of a process that was killed: the lock is ours
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    verb = ["import", "--output"] if Path(tool).name == "enroot" else ["pull"]
    say(f"{Path(tool).name} imports {pinned(uri, digest)}; a large image takes a quarter of an hour and more")
    try:
        _run([tool, *verb, str(partial), pinned(uri, digest)])
        record = Record(
            uri=uri,
            digest=digest,
            sha256=_sha256(partial),
            bytes=partial.stat().st_size,
            tool=Path(tool).name,
            imported=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        )
        partial.chmod(0o644)
        # A crash from here on leaves a file without a record, which the next import tells.
        for name in ("json", "sha256"):
            _beside(file, name).unlink(missing_ok=True)
        partial.replace(file)  # jobs that run from the old file keep it
        _beside(file, "sha256").write_text(f"{record.sha256}  {file.name}\n", encoding="utf-8")
        _beside(file, "json").write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    finally:
        partial.unlink(missing_ok=True)
    return record


def _digest(uri: str, tool: str, say: Say) -> str | None:
    """What the registry calls the image now, where something here can ask."""
    if "@sha256:" in uri:
        return uri.rpartition("@")[2]
    if Path(tool).name == "enroot":
        argv = [tool, "digest", uri]
    elif skopeo := shutil.which("skopeo"):  # neither Apptainer nor Singularity can ask
        argv = [skopeo, "inspect", "--format", "{{.Digest}}", uri]
    else:
        say("the digest is not recorded: Apptainer cannot tell it, and there is no skopeo here")
        return None
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False)
    found = re.search(r"sha256:[0-9a-f]{64}", done.stdout)
    if found is None:
        say(f"{Path(argv[0]).name} could not tell the digest: {_last_lines(done.stderr, 1) or 'no answer'}")
    return found[0] if found else None


def _run(argv: list[str]) -> None:
    """The tool's own messages are kept back, for they can hold credentials, and shown cleaned when it fails."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        done = subprocess.run(argv, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode == 0:
            return
        output.seek(0)
        said = _last_lines(output.read(), 5)
    raise error(
        "import-failed",
        f"{Path(argv[0]).name} failed with status {done.returncode}: {said or 'it said nothing'}",
        argv[-1],
        "for a private registry see docs/containers.md; for space set ENROOT_TEMP_PATH or APPTAINER_TMPDIR",
        MACHINE_LACKS,
    )


def _last_lines(text: str, count: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return without_secrets("; ".join(lines[-count:]))


def without_secrets(text: str) -> str:
    """`text` without the passwords and tokens that a registry client could show."""
    known = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    config = Path(os.environ.get("ENROOT_CONFIG_PATH") or Path.home() / ".config/enroot")
    with suppress(OSError, UnicodeDecodeError):
        known |= set(re.findall(r"password\s+(\S+)", (config / ".credentials").read_text(encoding="utf-8")))
    for secret in sorted((value for value in known if len(value) > 3), key=len, reverse=True):
        text = text.replace(secret, "***")
    return _SECRET_TEXT.sub(r"\1***", text)


@contextmanager
def _locked(file: Path, say: Say) -> Iterator[None]:
    """Held by one process, on any node where the file system carries locks; where it does not, the rename still holds:
    two may then import, and either's file is whole."""
    with file.with_name(f".{file.name}.lock").open("w") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process imports this image: waiting for it")
            fcntl.lockf(lock, fcntl.LOCK_EX)
        yield


def _sha256(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


def _beside(file: Path, name: str) -> Path:
    return file.with_name(f"{file.name}.{name}")
