"""Ask Megatron-Core itself whether it would take an argument list on a described machine, without torch or a GPU.

`find_megatron` says where a Megatron-Core of the right version lies, `validate` runs its parser, `validate_args`, its
configuration classes and the micro batch calculator on any number of requests, in one process of their own (about
0.4 s to start, 10 ms a request). What Megatron does not check, it does not check here either.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp8launch import wheels
from fp8launch.diagnostics import MACHINE_LACKS, error
from fp8launch.injob.ownership import (
    make_private_folder,
    take_write_permission,
    why_others_may_change,
    why_others_may_replace,
)
from fp8launch.megatron.versions import Release, release

Stage = Literal[
    "parse_args",
    "validate_args",
    "TransformerConfig",
    "DistributedDataParallelConfig",
    "OptimizerConfig",
    "num_microbatches",
]

# Importing Megatron takes a second, and a request some milliseconds; a file system of a busy cluster multiplies both.
START_SECONDS = 120
REQUEST_SECONDS = 1
# The worker's first line, as in validate_worker.py.
READY = "ready"

_WORKER = Path(__file__).with_name("validate_worker.py")
# Everything of ours that runs in the worker's process.
WORKER_FILES = (_WORKER, _WORKER.with_name("torch_stubs.py"))
# What the worker's process gets of this one's environment: Megatron reads some variables when it is imported.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR")
# Where a folder is recognized as holding Megatron-Core with its training part, which wheels have since 0.17.
_ARGUMENTS = Path("megatron/training/arguments.py")
_PACKAGE_INFO = Path("megatron/core/package_info.py")


@dataclass(frozen=True)
class Request:
    """An argument list and the machine it is meant for.

    `world_size` is in GPUs, `compute_capability` such as (9, 0), `te_version` that of Transformer Engine there, None
    if there is none. `env` is the whole environment that Megatron shall see, beside rank and world size. The checks
    end after `last_stage`. `with_args` asks for Megatron's resolved arguments in the verdict.
    """

    argv: tuple[str, ...]
    world_size: int
    compute_capability: tuple[int, int]
    te_version: str | None
    env: Mapping[str, str] = field(default_factory=dict)
    last_stage: Stage | None = None
    with_args: bool = False


@dataclass(frozen=True)
class MegatronVerdict:
    """The verdict of Megatron.

    `stage` is the one that refused, or the last one that ran. `message` is Megatron's own, for a bare assertion the
    line that asserts; `at` is the place in Megatron that raised. `warnings` is what it printed, logged or warned.
    `unanswered` names stand-ins for torch whose value took part in the verdict, which is then not certain. `no_answer`
    says why there is no verdict at all: this run's arguments ended the process, and `ok` is False.
    `args` and `config` hold the attributes of its namespace and TransformerConfig that JSON can hold (enums by name).
    """

    ok: bool
    stage: Stage
    exception: str | None
    message: str | None
    at: str | None
    warnings: tuple[str, ...]
    seconds: float
    unanswered: tuple[str, ...] = ()
    no_answer: str | None = None
    args: Mapping[str, Any] | None = None
    config: Mapping[str, Any] | None = None


def validate(
    requests: Sequence[Request], megatron: Path, python: str = sys.executable, real_torch: bool = False
) -> list[MegatronVerdict]:
    """Megatron's verdict on each request, in order.

    `megatron` is a wheel of megatron-core, or a folder that holds the `megatron` package. `python` (3.10 or later)
    must have `packaging`, PyYAML and typing_extensions. `real_torch` uses its torch and numpy instead of our
    stand-ins. Raises `UserError` when this Megatron cannot be used at all.
    """
    site = site_of(megatron)
    # -I keeps PYTHONPATH, the working directory and the user's packages from standing in for the Megatron named.
    command = [python, "-I", str(_WORKER), str(site)]
    if real_torch:
        command.append("--real-torch")
    verdicts: list[MegatronVerdict] = []
    while len(verdicts) < len(requests):
        rest = requests[len(verdicts) :]
        lines = "".join(json.dumps(asdict(request)) + "\n" for request in rest)
        timeout = START_SECONDS + REQUEST_SECONDS * len(rest)
        reason, answers = _run(command, lines, timeout)
        if not answers or answers[0] != READY:
            raise _unusable(megatron, reason)
        verdicts += [verdict_from_json(json.loads(line)) for line in answers[1:]]
        if len(verdicts) < len(requests):
            # The next request ended the process: it alone has no verdict, those behind it are asked again.
            ended = f"Megatron's validators ended without a verdict: {reason}"
            verdicts.append(MegatronVerdict(False, "parse_args", None, None, None, (), 0.0, no_answer=ended))
    return verdicts


def _run(command: Sequence[str], lines: str, timeout: float) -> tuple[str, list[str]]:
    """Run the worker on requests; why it ended early, if it did, and its whole lines of answers."""
    try:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        # Python makes the folders of its byte code under the umask: others must not be able to write there.
        done = subprocess.run(
            command,
            input=lines,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=environment,
            umask=0o022,
        )
    except OSError as failure:
        return str(failure), []
    except subprocess.TimeoutExpired as slow:
        out = slow.stdout or b""
        text = out.decode(errors="replace") if isinstance(out, bytes) else out
        # Without the beginning of a line that the worker had not finished.
        whole = text[: text.rfind("\n") + 1]
        return f"no answer within {timeout:.0f} s", whole.splitlines()
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return reason, done.stdout.splitlines()


def verdict_from_json(data: Mapping[str, Any]) -> MegatronVerdict:
    """The verdict that the worker wrote."""
    return MegatronVerdict(
        **{**data, "warnings": tuple(data["warnings"]), "unanswered": tuple(data.get("unanswered", ()))}
    )


def _unusable(megatron: Path, reason: str) -> Exception:
    return error(
        "megatron-unusable",
        f"the validators of {megatron} cannot be run: {reason}",
        fix="name a wheel of megatron-core, or a folder that holds its megatron package, in FP8LAUNCH_MEGATRON",
        exit_code=MACHINE_LACKS,
    )


def find_megatron(version: str, path: Path | None = None) -> Path | None:
    """The folder of a Megatron-Core of this minor version, or None.

    Looked at, in this order: `path`; the folder or wheel that FP8LAUNCH_MEGATRON names; the megatron-core that is
    installed beside this package; the newest in the user's cache. A place may be a wheel, a folder that holds the
    `megatron` package (an unpacked wheel, site-packages, a Megatron-LM checkout), or a folder of such.
    Raises `UserError` when `path` is given and has no such version.
    """
    minor = release(version)[:2]
    if path is not None:
        found = _newest(_candidates(path), minor)
        if found is None:
            raise error(
                "megatron-path",
                f"{path} holds no Megatron-Core {version}",
                fix="name a wheel of megatron-core, or a folder that holds its megatron package",
            )
        return found
    named = os.environ.get("FP8LAUNCH_MEGATRON")
    places = [_installed(), _candidates(cache_folder())]
    if named:
        places.insert(0, _candidates(Path(named).expanduser()))
    return next(filter(None, (_newest(place, minor) for place in places)), None)


def cache_folder() -> Path:
    """The folders of this user's copies of Megatron-Core."""
    return wheels.cache_folder("megatron")


def megatron_version(place: Path) -> str | None:
    """The version of the Megatron-Core in a wheel or folder, None if there is none or it lacks the training part."""
    if place.suffix == ".whl":
        match = re.match(r"megatron_core-([^-]+)-", place.name)
        if match is None or not place.is_file():
            return None
        return match[1]
    if not (place / _ARGUMENTS).is_file():
        return None
    try:
        text = (place / _PACKAGE_INFO).read_text(encoding="utf-8")
    except OSError:
        return None
    parts = dict(re.findall(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", text, re.MULTILINE))
    if len(parts) != 3:
        return None
    return f"{parts['MAJOR']}.{parts['MINOR']}.{parts['PATCH']}"


def _candidates(place: Path) -> Iterator[Path]:
    yield place
    if place.is_dir() and not (place / "megatron").is_dir():
        yield from sorted(place.iterdir())


def _installed() -> Iterator[Path]:
    """Yield the folder of each installed megatron-core, as Python would look for it."""
    for folder in map(Path, sys.path):
        # importlib.metadata finds it by the same name; importing it takes as long as reading a recipe.
        if any(folder.glob("megatron_core-*.dist-info")):
            yield folder


def _newest(places: Iterable[Path], minor: Release) -> Path | None:
    matching = []
    for place in places:
        version = megatron_version(place)
        if version and release(version)[:2] == minor:
            matching.append((release(version), place))
    return max(matching, default=(None, None))[1]


def site_of(megatron: Path) -> Path:
    """Return the folder with the `megatron` package. A wheel is unpacked into the user's cache."""
    if megatron.suffix == ".whl":
        return _unpacked(megatron)
    return megatron


def _unpacked(wheel: Path) -> Path:
    """The wheel's content as a folder of the user's cache, where byte code can be kept.

    The wheel itself where that fails, or where other users could change the code in that folder.
    """
    import tempfile
    import zipfile

    try:
        target = cache_folder() / f"{megatron_version(wheel)}-{zlib.crc32(wheel.read_bytes()):08x}"
        if target.is_dir() and not why_others_may_change(target):
            return target
        if target.is_dir() or why_others_may_replace(target):
            return wheel
        make_private_folder(target.parent)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpack-") as folder:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(folder) / "site")
            take_write_permission(Path(folder) / "site")
            # Of two that unpack at once, the second finds a folder there and uses it.
            (Path(folder) / "site").rename(target)
    except zipfile.BadZipFile as failure:
        raise _unusable(wheel, str(failure)) from None
    except OSError:
        if not target.is_dir():
            return wheel
    return target
