"""Container images as files: imported once, by digest where a tool knows one, complete or not at all.

Beside `NAME.sqsh` or `NAME.sif` are `.sha256` (for `sha256sum -c`, and for a run's manifest) and `.json`, which records
what the file was made of, so that a tag that has moved since is noticed. The folder may be shared with other users:
nothing here follows a link or trusts a file name in it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Literal

from fp8launch.cluster.images import pinned
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, error
from fp8launch.injob.regular_files import open_regular, read_regular
from fp8launch.secrets import HIDDEN, redacted, secret_in

Kind = Literal["sqsh", "sif"]
Say = Callable[[str], None]

# The words that registry clients print next to a password or token.
_LARGEST_RECORD = 1 << 16
_LOGIN = re.compile(r"(?i)(authorization:\s*\w+\s+|(?:password|token)[ =:]+|//[^/@\s:]{0,256}:)[^\s@\"']{1,4096}")


@dataclass(frozen=True)
class Record:
    """What an image file holds. `digest` is the registry's, None where no tool knew it; `sha256` the file's.

    `changed` is when the file was last changed by any means, in nanoseconds as the file system counts them: a file of
    the same time and size needs no reading again. Records of older versions have none.
    """

    uri: str
    digest: str | None
    sha256: str
    bytes: int
    tool: str
    imported: str
    changed: int | None = None


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
        f"importing an image needs {needed}, which this machine does not have",
        "images import",
        "run the command on a compute node, for example under srun; or let pyxis import the image at the start of "
        "each job",
        MACHINE_LACKS,
    )


def import_image(uri: str, file: Path, tool: str, *, update: bool = False, say: Say = print) -> Record:
    """Make `file` of the image `uri` (`docker://...` in the words of `tool`) unless it is there already.

    Only one process imports at a time; the others wait and find the file. Raises UserError: exit code 1 for a file
    that is stale or not what was asked for and `update` is off, 3 when the tool fails or the folder refuses.
    """
    if secret_in(uri):
        fix = (
            "remove it; enroot reads ~/.config/enroot/.credentials, Apptainer the credentials of `apptainer registry "
            "login`"
        )
        raise error("password-in-uri", "the image's URI contains a password, which would be recorded", "image", fix)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file, say):
            digest = _digest(uri, tool, say)
            if os.path.lexists(file):
                kept = _what_is_there(file, uri, digest, update, say)
                if kept is not None:
                    say(f"{file} already exists")
                    if not digest:
                        say("whether it is stale cannot be determined, because no tool here reads digests")
                    return kept
            return _import(uri, digest, file, tool, say)
    except OSError as exc:
        raise error(
            "image-folder", f"cannot keep the image: {exc.strerror or exc}", str(file.parent), "--to", MACHINE_LACKS
        ) from None


def read_record(file: Path) -> Record | None:
    """The source of `file`; None if no readable record states it."""
    try:
        record = Record(**json.loads(read_regular(_beside(file, "json"), _LARGEST_RECORD)))
    except (OSError, ValueError, TypeError):
        return None
    if not isinstance(record.uri, str) or not isinstance(record.sha256, str):
        return None
    return record


def _what_is_there(file: Path, uri: str, digest: str | None, update: bool, say: Say) -> Record | None:
    """The record of a file that is what was asked for; None when it is to be replaced."""
    record = read_record(file)
    if not stat.S_ISREG(file.lstat().st_mode):
        code, what = "image-other", "is a link or a folder, not an imported image file"
    elif record is None:
        code, what = "image-unrecorded", "exists, but no record beside it names its source"
    elif record.uri != uri:
        code, what = "image-other", f"was imported from {record.uri}, not from {uri}"
    elif file.stat().st_size != record.bytes:
        code, what = "image-damaged", f"has {file.stat().st_size} bytes, but had {record.bytes} when it was imported"
    elif _other_content(file, record, say):
        code, what = "image-damaged", "has changed since it was imported"
    elif digest and record.digest and digest != record.digest:
        code, what = "image-stale", f"is stale: {uri} is {digest} now, and was {record.digest} on {record.imported}"
    else:
        return record
    if update:
        return None
    raise error(code, what, str(file), "replace it with --update, or import to another folder with --to", ANSWER_IS_NO)


def _other_content(file: Path, record: Record, say: Say) -> bool:
    """Whether a file of the recorded size holds something else. It is read only if it was changed since the import."""
    if file.stat().st_ctime_ns == record.changed:
        return False
    say(f"checking the content of {file}")
    if _sha256(file) != record.sha256:
        return True
    with suppress(OSError):  # somebody else's image may be read again each time
        _write_beside(file, "json", _as_json(replace(record, changed=file.stat().st_ctime_ns)))
    return False


def _import(uri: str, digest: str | None, file: Path, tool: str, say: Say) -> Record:
    for leftover in file.parent.glob(f".{file.name}.*.partial"):
        _remove(leftover)  # of a process that was killed: the lock is ours
    # A folder of our own: nobody can put a link where the tool writes.
    folder = Path(tempfile.mkdtemp(prefix=f".{file.name}.", suffix=".partial", dir=file.parent))
    partial = folder / file.name
    verb = ["pull"]
    if Path(tool).name == "enroot":
        verb = ["import", "--output"]
    say(f"{Path(tool).name} imports {pinned(uri, digest)}; a large image takes 15 minutes or more")
    try:
        _run([tool, *verb, str(partial), pinned(uri, digest)])
        partial.chmod(0o644)
        sha256, size = _sha256(partial), partial.stat().st_size
        # A crash from here on leaves a file without a record, which the next import reports.
        for name in ("json", "sha256"):
            _beside(file, name).unlink(missing_ok=True)
        partial.replace(file)  # jobs that run from the old file keep it
    finally:
        _remove(folder)
    record = Record(
        uri=uri,
        digest=digest,
        sha256=sha256,
        bytes=size,
        tool=Path(tool).name,
        imported=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        changed=file.stat().st_ctime_ns,
    )
    _write_beside(file, "sha256", f"{record.sha256}  {file.name}\n")
    _write_beside(file, "json", _as_json(record))
    return record


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with all that is in it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _digest(uri: str, tool: str, say: Say) -> str | None:
    """What the registry calls the image now, where something here can ask."""
    if "@sha256:" in uri:
        return uri.rpartition("@")[2]
    if Path(tool).name == "enroot":
        argv = [tool, "digest", uri]
    elif skopeo := shutil.which("skopeo"):  # neither Apptainer nor Singularity can ask
        argv = [skopeo, "inspect", "--format", "{{.Digest}}", uri]
    else:
        say("the digest is not recorded: Apptainer does not report it, and skopeo is not installed")
        return None
    done = subprocess.run(argv, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, check=False)
    found = re.search(r"sha256:[0-9a-f]{64}", done.stdout)
    if found is None:
        say(f"{Path(argv[0]).name} did not report the digest: {_last_lines(done.stderr, 1) or 'no answer'}")
        return None
    return found[0]


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
        f"{Path(argv[0]).name} failed with status {done.returncode}: {said or 'it printed nothing'}",
        argv[-1],
        "for a private registry see docs/containers.md; if space is short, set ENROOT_TEMP_PATH or APPTAINER_TMPDIR",
        MACHINE_LACKS,
    )


def _last_lines(text: str, count: int) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return without_secrets("; ".join(lines[-count:]))


def without_secrets(text: str) -> str:
    """`text` without the passwords and tokens that a registry client could show."""
    known: set[str] = set()
    config = Path(os.environ.get("ENROOT_CONFIG_PATH") or Path.home() / ".config/enroot")
    with suppress(OSError, UnicodeDecodeError):
        known = set(re.findall(r"password\s+(\S+)", (config / ".credentials").read_text(encoding="utf-8")))
    for secret in sorted((value for value in known if len(value) > 3), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _LOGIN.sub(rf"\1{HIDDEN}", redacted(text))


@contextmanager
def _locked(file: Path, say: Say) -> Iterator[None]:
    """Held by one process, on any node where the file system carries locks; where it does not, the rename still holds:
    two may then import, and either's file is whole."""
    path = file.with_name(f".{file.name}.lock")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as exc:
        if exc.errno != errno.ELOOP:
            raise
        message = f"the lock {path} is a link, which was not created by an import"
        raise error(
            "image-folder", message, str(path), "remove it, or import to another folder", MACHINE_LACKS
        ) from None
    try:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process imports this image: waiting for it")
            fcntl.lockf(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _sha256(file: Path) -> str:
    found = hashlib.sha256()
    with open_regular(file) as stream:
        while chunk := stream.read(1 << 22):
            found.update(chunk)
    return found.hexdigest()


def _beside(file: Path, name: str) -> Path:
    return file.with_name(f"{file.name}.{name}")


def _write_beside(file: Path, name: str, text: str) -> None:
    """Write a file anew, whatever lies there: never through a link."""
    handle, made = tempfile.mkstemp(prefix=f".{file.name}.", suffix=f".{name}.partial", dir=file.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    Path(made).chmod(0o644)
    Path(made).replace(_beside(file, name))


def _as_json(record: Record) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"
