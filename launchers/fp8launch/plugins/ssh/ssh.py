"""A cluster's login node through the system's ssh, which brings the user's keys, agents, jump hosts and known hosts.

ssh gives one line to the login shell there, whichever that is: `_words` makes it. Values that must not be seen in a
list of processes go through stdin.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import shlex
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from fp8launch.cluster.profile import Login
from fp8launch.diagnostics import UserError, advice_on, error

# ssh's own exit status for a connection that could not be made or was lost.
FAILED = 255
NOT_FOUND = 127

# Prints the folder where the files of the tar on stdin are, under a name made from their content.
# Others must not be able to replace what is read there later: the folder and the two above it become the user's alone,
# and what holds these must keep other users from renaming them.
_RECEIVE = r"""umask 077
cache=${XDG_CACHE_HOME:-$HOME/.cache}
folder=$cache/fp8launch/at/$1
mkdir -p "$folder" || exit
refuse() {
    echo "other users could replace the recipe: $1; set XDG_CACHE_HOME there to a folder of your own" >&2
    exit 1
}
for place in "$cache/fp8launch" "$cache/fp8launch/at" "$folder"; do
    if [ -L "$place" ] || [ ! -O "$place" ]; then refuse "$place is not yours"; fi
    chmod go-w "$place" || exit
done
if [ ! -k "$cache" ]; then
    case $(stat -Lc %A "$cache") in
    ????????w?) refuse "everybody can write to $cache" ;;
    ?????w????) [ "$(stat -Lc %G "$cache")" = "$(id -un)" ] || refuse "its group can write to $cache" ;;
    esac
fi
tar -xf - -C "$folder" && printf '%s\n' "$folder"
"""
# What a login prints (greetings, module systems) goes to stderr: stdout is for the command's data.
_LOGIN = 'exec 3>&1 >&2; exec bash -lc "$0" "$@"'
# An empty line first, because what was printed before may not end its line.
_SAY_MARK = "printf '\\n%s\\n' \"$0\""
# Variables come as NAME=value, each ended by a NUL byte; `export` takes them as they are.
_WITH_SECRETS = 'while IFS= read -r -d "" pair; do export "$pair"; done; exec -- "$@" < /dev/null'
_PLAIN = 'exec -- "$@"'


def run_there(login: Login, command: Sequence[str], secrets: Mapping[str, str] | None = None) -> int:
    """Run a command on the login node with this terminal, or this process's stdout and stderr; its exit status.

    `secrets` are variables that it gets through stdin, which then is all that it has there.
    """
    if secrets:
        text = "".join(f"{name}={value}\0" for name, value in secrets.items()).encode()
        return _relayed(login, _WITH_SECRETS, command, text)
    # With its own terminal, the remote command ends by Ctrl-C here, and draws progress bars.
    if sys.stdin.isatty() and sys.stdout.isatty():
        return subprocess.run([*_ssh(login, "-t"), _words(_PLAIN, *command)], check=False).returncode
    return _relayed(login, _PLAIN, command, b"")


def _relayed(login: Login, script: str, command: Sequence[str], text: bytes) -> int:
    """Run a command with `text` as its stdin, and pass its stdout on without what the login shell printed before it.

    A .bashrc, .cshrc or config.fish that prints something does so before any command, and JSON must stay JSON.
    """
    mark = _mark()
    with (
        subprocess.Popen(
            [*_ssh(login), _words(f"{_SAY_MARK}\n{script}", *command, mark=mark)],
            stdin=subprocess.PIPE if text else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        ) as process,
        open(1, "wb", closefd=False) as out,
    ):
        stream = process.stdout
        assert stream is not None
        try:
            before = _after_login(process, mark, text)
            sys.stderr.write(before.decode(errors="replace").removesuffix("\n"))
            while chunk := stream.read1(1 << 16):  # type: ignore[attr-defined]
                out.write(chunk)
                out.flush()
        except BaseException:
            process.kill()
            raise
    return process.returncode


def _after_login(process: subprocess.Popen[bytes], mark: str, text: bytes) -> bytes:
    """Wait for the mark, then send `text`; return what the login printed before the mark.

    A `read` in a start-up file, such as a question with a time limit, would take what is sent earlier.
    """
    stream = process.stdout
    assert stream is not None
    before = []
    for line in stream:
        if line == mark.encode() + b"\n":
            break
        before.append(line)
    if process.stdin:
        # The pipe is broken if ssh failed, which its exit status and its messages say.
        with suppress(BrokenPipeError), process.stdin as given:
            given.write(text)
    return b"".join(before)


def _mark() -> str:
    """Return a line that no login prints."""
    return f"fp8launch-{os.urandom(8).hex()}"


def put(login: Login, files: Mapping[str, str]) -> Path:
    """Put text files into a folder of the login node's user; the folder there. Raises UserError (exit code 3)."""
    packed = io.BytesIO()
    digest = hashlib.sha256()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in sorted(files.items()):
            content = text.encode()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o600
            tar.addfile(entry, io.BytesIO(content))
    mark = _mark()
    words = _words(f"{_SAY_MARK}\n{_RECEIVE}", digest.hexdigest()[:16], mark=mark)
    # A file, not a pipe: the connection that stays open for the next command would keep a pipe open too.
    with (
        tempfile.TemporaryFile() as complaints,
        subprocess.Popen(
            [*_ssh(login), words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints
        ) as done,
    ):
        assert done.stdout is not None
        try:
            _after_login(done, mark, packed.getvalue())
            folder = done.stdout.read().decode(errors="replace").rstrip("\n")
        except BaseException:
            done.kill()
            raise
        done.wait()
        complaints.seek(0)
        complaint = complaints.read().decode(errors="replace")
    if done.returncode or not folder.startswith("/"):
        raise failed(login, complaint)
    return Path(folder)


def failed(login: Login, words: str, fix: str | None = None) -> UserError:
    """Return the error for an ssh that failed, in its own words; `fix` where they do not suggest one."""
    message = " ".join(words.split())
    advice = {
        "host key verification failed": f"compare the host's key with the site's, then `ssh {login.host}` by hand once",
        "permission denied": f"make `ssh {login.host}` work without a question: a key, an agent, or `identity:`",
        "could not resolve": "correct `ssh.host` in the cluster profile, or connect to the site's network",
    }
    found = advice_on(message, advice, fix)
    return error(
        "ssh-failed", f"ssh to {login.host}: {message or 'it printed no reason'}", "cluster profile: ssh", found, 3
    )


def _ssh(login: Login, *options: str) -> list[str]:
    """Return ssh and its options up to the command."""
    stated = {
        "ConnectTimeout": "20",
        "ServerAliveInterval": "15",
        "ServerAliveCountMax": "4",
        # Where nobody can answer, a question is a failure and not a silence.
        "BatchMode": "no" if sys.stdin.isatty() else "yes",
    }
    sockets = _sockets()
    if sockets is not None:
        # A second connection within a minute costs nothing.
        stated |= {"ControlMaster": "auto", "ControlPath": f"{sockets}/%C", "ControlPersist": "60"}
    command = ["ssh", *options]
    if login.config:
        command += ["-F", str(Path(login.config).expanduser())]
    if login.identity:
        command += ["-i", str(Path(login.identity).expanduser())]
    if login.port:
        command += ["-p", str(login.port)]
    if login.user:
        command += ["-l", login.user]
    for name, value in stated.items():
        command += ["-o", f"{name}={value}"]
    return [*command, "--", login.host]


def _sockets() -> Path | None:
    """Return a private folder for ssh's sockets, whose whole path must stay below 104 characters."""
    folder = Path("/tmp") / f"fp8launch-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return None
    return folder


def _words(script: str, *arguments: str, mark: str = "") -> str:
    """Return a bash script with arguments as a line for any login shell; `-l` sets PATH as at a login.

    The script's own name, $0, is `mark`.

    Every shell has its own quoting rules (csh ends quotes at a line end, fish reads backslashes in them), but none
    finds anything special in base64.
    """
    line = shlex.join(["bash", "-c", _LOGIN, f"exec >&3 3>&-\n{script}", mark or "fp8launch", *arguments])
    return (
        f"exec bash -c 'eval \"$(base64 -d <<< {base64.b64encode(line.encode(errors='surrogateescape')).decode()})\"'"
    )
