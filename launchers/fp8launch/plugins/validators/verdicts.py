"""Ask Megatron-Core itself whether it accepts an argument list on a described machine, without torch or a GPU.

`validate` runs Megatron's parser, `validate_args`, its configuration classes and the micro batch calculator on any
number of requests, in one process (about 0.4 s to start, 10 ms a request). What Megatron does not check is not checked
here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from fp8launch.plugins.validators.megatron_core import site_of, unusable

Stage = Literal[
    "parse_args",
    "validate_args",
    "TransformerConfig",
    "DistributedDataParallelConfig",
    "OptimizerConfig",
    "num_microbatches",
]

# Importing Megatron takes a second, and a request some milliseconds. Both take much longer on a busy file system.
START_SECONDS = 120
REQUEST_SECONDS = 1
# The worker's first line, as in validate_worker.py.
READY = "ready"

_WORKER = Path(__file__).with_name("validate_worker.py")
# Everything of ours that runs in the worker's process.
WORKER_FILES = (_WORKER, _WORKER.with_name("torch_stubs.py"))
# Variables that the worker inherits. Megatron reads some variables when it is imported, so it gets no others.
_INHERITED = ("HOME", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "PATH", "TMPDIR")


@dataclass(frozen=True)
class Request:
    """An argument list and the machine that it is for.

    `world_size` is in GPUs, `compute_capability` a pair such as (9, 0), and `te_version` the version of Transformer
    Engine, None without it. `env` is the whole environment that Megatron sees, except rank and world size. The checks
    end after `last_stage`. `with_args` adds Megatron's resolved arguments to the verdict.
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
    """Megatron's verdict on an argument list.

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
    """Return Megatron's verdict on each request, in order.

    `megatron` is a wheel of megatron-core, or a folder that holds the `megatron` package. `python` (3.10 or later)
    must have `packaging`, PyYAML and typing_extensions. `real_torch` uses its torch and numpy instead of our
    stand-ins. Raises `UserError` when this Megatron cannot be used at all.
    """
    site = site_of(megatron)
    # -I keeps PYTHONPATH, the working directory and the user's packages from replacing the requested Megatron.
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
            raise unusable(megatron, reason)
        verdicts += [verdict_from_json(json.loads(line)) for line in answers[1:]]
        if len(verdicts) < len(requests):
            # The next request ended the process. It gets no verdict, and the requests after it run again.
            ended = f"Megatron's validators ended without a verdict: {reason}"
            verdicts.append(MegatronVerdict(False, "parse_args", None, None, None, (), 0.0, no_answer=ended))
    return verdicts


def _run(command: Sequence[str], lines: str, timeout: float) -> tuple[str, list[str]]:
    """Run the worker on requests. Return why it ended early, if it did, and its complete lines of answers."""
    try:
        environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
        # Others must not be able to write to the folders that Python makes for its byte code.
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
        # Leave out a line that the worker did not finish.
        whole = text[: text.rfind("\n") + 1]
        return f"no answer within {timeout:.0f} s", whole.splitlines()
    reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return reason, done.stdout.splitlines()


def verdict_from_json(data: Mapping[str, Any]) -> MegatronVerdict:
    """Return the verdict that the worker wrote."""
    return MegatronVerdict(
        **{**data, "warnings": tuple(data["warnings"]), "unanswered": tuple(data.get("unanswered", ()))}
    )
