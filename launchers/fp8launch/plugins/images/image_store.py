"""Import container images as files: once, completely or not at all, and by digest if a tool can read it.

`NAME.sqsh` or `NAME.sif` comes with `.sha256` (for `sha256sum -c` and manifests of runs) and `.json`, which records
the source of the file, so that a tag that has moved is noticed. The folder may be shared with other users, so no link
in it is followed and no file name in it is trusted.
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
from fp8launch.wording import joined

Kind = Literal["sqsh", "sif"]
Say = Callable[[str], None]

# Words that registry clients print next to a password or token.
_LARGEST_RECORD = 1 << 16
_LOGIN = re.compile(r"(?i)(authorization:\s*\w+\s+|(?:password|token)[ =:]+|//[^/@\s:]{0,256}:)[^\s@\"']{1,4096}")


@dataclass(frozen=True)
class Record:
    """The source of an image file. `digest` is the registry's, or None if no tool knew it; `sha256` is the file's.

    `changed` is the file's ctime in nanoseconds. A file of the same ctime and size need not be read again to verify it.
    Records of older versions have none.
    """

    uri: str
    digest: str | None
    sha256: str
    bytes: int
    tool: str
    imported: str
    changed: int | None = None


def tool_for(kind: Kind | None) -> tuple[Kind, str]:
    """Return the kind of file and the program of this machine that makes it. Raises UserError (exit code 3)."""
    kinds: dict[str, tuple[Kind, str]] = {
        "enroot": ("sqsh", "a .sqsh"), "apptainer": ("sif", "a .sif"), "singularity": ("sif", "a .sif"),
    }  # fmt: skip
    for program, (makes, _) in kinds.items():
        if kind in (None, makes) and (found := shutil.which(program)):
            return makes, found
    needed = joined([program for program, (makes, _) in kinds.items() if kind in (None, makes)], "or")
    raise error(
        "no-import-tool",
        f"importing an image needs {needed}, which this machine does not have",
        "images import",
        "run the command on a compute node, for example under srun; or let pyxis import the image at the start of "
        "each job",
        MACHINE_LACKS,
    )


def import_image(uri: str, file: Path, tool: str, *, update: bool = False, say: Say = print) -> Record:
    """Import the image `uri` (`docker://...` in the notation of `tool`) to `file` unless it is up to date.

    Only one process imports at a time; the others wait and find the file. Raises UserError with exit code 1 if a stale
    or other file is in the way and `update` is off, with 3 if the tool fails or the folder is not writable.
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
    """Return the record of `file`, None without a readable one."""
    try:
        record = Record(**json.loads(read_regular(_next_to(file, "json"), _LARGEST_RECORD)))
    except (OSError, ValueError, TypeError):
        return None
    if not isinstance(record.uri, str) or not isinstance(record.sha256, str):
        return None
    return record


def _what_is_there(file: Path, uri: str, digest: str | None, update: bool, say: Say) -> Record | None:
    """Return the record of an up-to-date image, None if it must be imported again."""
    record = read_record(file)
    if not stat.S_ISREG(file.lstat().st_mode):
        code, what = "image-other", "is a link or a folder, not an imported image file"
    elif record is None:
        code, what = "image-unrecorded", "exists, but no record next to it names its source"
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
    """Return whether a file of the recorded size has other content. It is read only if its ctime changed."""
    if file.stat().st_ctime_ns == record.changed:
        return False
    say(f"checking the content of {file}")
    if _sha256(file) != record.sha256:
        return True
    with suppress(OSError):  # in another user's folder the image is read again each time
        _write_next_to(file, "json", _as_json(replace(record, changed=file.stat().st_ctime_ns)))
    return False


def _import(uri: str, digest: str | None, file: Path, tool: str, say: Say) -> Record:
    for leftover in file.parent.glob(f".{file.name}.*.partial"):
        _remove(leftover)  # its process was killed, because this one has the lock
    # In a private folder no other user can put a link in the way of the tool.
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
        # A crash after this leaves a file without a record, which the next import reports.
        for name in ("json", "sha256"):
            _next_to(file, name).unlink(missing_ok=True)
        partial.replace(file)  # jobs that use the old file keep it open
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
    _write_next_to(file, "sha256", f"{record.sha256}  {file.name}\n")
    _write_next_to(file, "json", _as_json(record))
    return record


def _remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _digest(uri: str, tool: str, say: Say) -> str | None:
    """Return the current digest of the image in the registry, if a tool of this machine can ask."""
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
    """Run a tool without showing its output, which may contain credentials. If it fails, report the end, redacted."""
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
    """Return `text` without passwords and tokens that a registry client may print."""
    known: set[str] = set()
    config = Path(os.environ.get("ENROOT_CONFIG_PATH") or Path.home() / ".config/enroot")
    with suppress(OSError, UnicodeDecodeError):
        known = set(re.findall(r"password\s+(\S+)", (config / ".credentials").read_text(encoding="utf-8")))
    for secret in sorted((value for value in known if len(value) > 3), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return _LOGIN.sub(rf"\1{HIDDEN}", redacted(text))


@contextmanager
def _locked(file: Path, say: Say) -> Iterator[None]:
    """Let only one process import an image, on any node that shares the file system.

    On a file system without locks two processes may import it, and the rename still leaves one whole file.
    """
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


def _next_to(file: Path, name: str) -> Path:
    return file.with_name(f"{file.name}.{name}")


def _write_next_to(file: Path, name: str, text: str) -> None:
    """Write a file next to the image, never through a link."""
    handle, made = tempfile.mkstemp(prefix=f".{file.name}.", suffix=f".{name}.partial", dir=file.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as stream:
        stream.write(text)
    Path(made).chmod(0o644)
    Path(made).replace(_next_to(file, name))


def _as_json(record: Record) -> str:
    return json.dumps(asdict(record), indent=2) + "\n"
