"""Turn the folder of a job started by plain `sbatch` into a run folder: `python portable_run.py record|explain ...`.

`record RUN-FOLDER ATTEMPT --name=... -- ARGUMENTS` writes the manifest that `fp8launch submit` writes for its runs, as
far as the script and its job know it. `explain RUN-FOLDER ATTEMPT STATUS` prints to the job's output why the training
failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from fp8launch.injob.regular_files import write_whole
from fp8launch.injob.slurm.commands import slurm
from fp8launch.injob.supervisor.failures import ending_of_attempt
from fp8launch.injob.supervisor.log_lines import say, tail
from fp8launch.injob.supervisor.run_records import MANIFEST, now, record_root, recorded_roots, roots_file

# Other users may read the manifest. Rendered scripts hold no secrets, but scripts are edited by hand.
_SECRET_NAME = re.compile(r"(token|secret|password|passwd|credentials?|_key|apikey)s?$", re.IGNORECASE)
_HIDDEN = "(hidden by fp8launch)"
# The file with the batch script's own output, to which srun writes its errors.
_STDERR = Path("/proc/self/fd/2")
# Characters of a log line that are worth repeating in the job's output.
_LONGEST_MESSAGE = 300


def record(folder: Path, attempt: Path, facts: argparse.Namespace, arguments: list[str]) -> None:
    """Write the manifest, unless a job that was requeued finds its own. Raises OSError."""
    if os.path.lexists(str(folder / MANIFEST)):
        return
    job_id = attempt.name.rpartition("-")[0]
    job = _job_in_slurm(job_id)
    _link_batch_output(folder / "logs" / f"slurm-{job_id}.out")
    write_whole(folder / MANIFEST, json.dumps(_manifest(folder.name, job_id, job, facts, arguments), indent=2) + "\n")
    # The training needs neither: a home folder may be read-only on compute nodes, and Slurm may be busy.
    with contextlib.suppress(OSError, RuntimeError):
        _remember(folder.parent)
    if job is not None:
        _label(job_id, folder.name, job.get("Comment", ""))


def _job_in_slurm(job_id: str) -> dict[str, str] | None:
    """Return the fields of `scontrol show job` that are alone on a line; None if Slurm does not answer."""
    shown = slurm("scontrol", "show", "job", job_id, tries=1)
    if shown is None:
        return None
    lines = [line.strip().partition("=") for line in shown.splitlines()]
    return {name: value for name, _, value in lines}


def _label(job_id: str, run_id: str, comment: str) -> None:
    """Write the run's name into the job's comment, by which `fp8launch cancel` and `runs` recognize the job.

    Job numbers alone are not enough, because Slurm reuses them. `fp8launch.schedulers.slurm.job_comment` reads it.
    """
    if comment.startswith("fp8launch:"):
        return
    words = f"fp8launch:{run_id}"
    if comment not in ("", "(null)"):
        words += f" {comment}"
    slurm("scontrol", "update", f"JobId={job_id}", f"Comment={words}", tries=1)


def _manifest(
    run_id: str, job_id: str, job: dict[str, str] | None, facts: argparse.Namespace, arguments: list[str]
) -> dict[str, Any]:
    created = now()
    nodes, world = _size(facts)
    image = {"image": facts.image} if facts.image else None
    slurm_version = None
    if job is not None:
        slurm_version = (slurm("scontrol", "--version", tries=1) or "").strip().rpartition(" ")[2] or None
    return {
        "format": 1,
        "run_id": run_id,
        "name": facts.name,
        "created": created,
        "started_by": "sbatch",
        "backend": "sbatch",
        "host": None,
        "jobs": [{"id": job_id, "submitted": created}],
        "command": _command(job, facts, arguments),
        "recipe": {
            "name": facts.name,
            "resources": {"nodes": nodes, "gpus_per_node": world // nodes, "gpu": facts.gpu},
        },
        "recipe_digest": facts.digest,
        "engine": {"entry": facts.entry},
        "megatron": {"version": facts.megatron, "argv": arguments},
        "layout": {"world": world},
        "gpu": facts.gpu,
        "environment": _environment(facts.env),
        "secrets": facts.secret,
        "slurm": {"job-name": os.environ.get("SLURM_JOB_NAME", facts.name)},
        "python": facts.python,
        "image": image,
        "runtime": facts.runtime,
        "versions": {
            "fp8launch": facts.fp8launch,
            "python": platform.python_version(),
            "slurm": slurm_version,
        },
    }


def _size(facts: argparse.Namespace) -> tuple[int, int]:
    """Return the nodes and processes of the job as it runs: sbatch's command line may differ from the script."""
    nodes = _number("SLURM_JOB_NUM_NODES") or 1
    if facts.nproc_per_node:
        return nodes, nodes * facts.nproc_per_node  # one task per node, in which torchrun starts these processes
    return nodes, _number("SLURM_NTASKS") or nodes * (_number("SLURM_NTASKS_PER_NODE") or 1)


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def _command(job: dict[str, str] | None, facts: argparse.Namespace, arguments: list[str]) -> list[str]:
    """Return the command that started the job: `sbatch SCRIPT ARGUMENTS`."""
    overrides = arguments[len(arguments) - facts.overrides :]
    script = (job or {}).get("Command", "") or f"{facts.name}.sbatch"
    # Slurm shows the script's arguments after its path.
    shown = " " + " ".join(overrides)
    if overrides and script.endswith(shown):
        script = script[: -len(shown)]
    return ["sbatch", script, *overrides]


def _environment(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        found[name] = _HIDDEN if _SECRET_NAME.search(name) else value
    return found


def _link_batch_output(name: Path) -> None:
    """Hard-link the batch script's output into the run folder, where other runs have this file.

    A hard link shows what is appended later, and unlike a symbolic link it cannot lead elsewhere. If it cannot be made
    (output on another file system, or no output), the run only has its log.
    """
    with contextlib.suppress(OSError):
        source = os.readlink(str(_STDERR))  # noqa: PTH115 (Path.readlink is newer than Python 3.7)
        if _STDERR.is_file() and os.path.samestat(os.lstat(source), os.fstat(2)):
            os.link(source, str(name))


def _remember(root: Path) -> None:
    """Add the run root to the roots that `fp8launch runs` searches."""
    roots_file().parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if str(root) in recorded_roots():
            return
    record_root(root)


def explain(folder: Path, attempt: Path, status: int) -> None:
    """Print why the training failed, as far as its log or srun shows it."""
    log = attempt.with_name(f"{attempt.name}.log")
    output = tail(_STDERR)  # empty for a pipe or a terminal, which cannot be read back
    # Slurm appends to the output of a requeued job; each start names the run folder first.
    failure = ending_of_attempt(tail(log), output.rpartition(f"fp8launch: run folder {folder}")[2]).failure
    if failure is None:
        say(f"the training failed with exit status {status}; its log shows no known cause")
    else:
        say(f"the training failed with exit status {status}: {failure.code}")
        say(f"cause: {failure.message[:_LONGEST_MESSAGE]}")
        say(f"fix: {failure.advice}")
    say(f"log: {log}")


def _facts(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("name", "digest", "gpu", "megatron", "entry", "python", "fp8launch", "image", "runtime"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--overrides", type=int, default=0)
    parser.add_argument("--env", action="append", default=[])
    parser.add_argument("--secret", action="append", default=[])
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    what, folder, attempt = words[0], Path(words[1]), Path(words[2])
    # Whatever the user's umask, nobody else may change the records in a run folder.
    os.umask(os.umask(0o022) | 0o022)
    if what == "explain":
        explain(folder, attempt, int(words[3]))
        return 0
    end = words.index("--")
    try:
        record(folder, attempt, _facts(words[3:end]), words[end + 1 :])
    except OSError as problem:
        say(f"{problem.filename or folder}: {problem.strerror}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
