"""Lines of a job's script that notify of the run's end, so that nobody has to wait for it."""

from __future__ import annotations

import functools
import os
from pathlib import Path

from fp8launch.cli.output import eprint
from fp8launch.job.job import Job
from fp8launch.job.script import host_python
from fp8launch.plugins.notify.notify import load_config

_PROGRAM = '"$code/../plugins/notify/injob/at_end.py"'


def notify_at_end(job: Job) -> list[str]:
    """Return the trap that runs when the script exits or is terminated, if `notify.webhook_variable` is configured.

    The address stays in the variable. Raises UserError for a bad configuration.
    """
    config = load_config().notify
    if config.webhook_variable is None or _is_trial(job):
        return []
    if not os.environ.get(config.webhook_variable):
        _warn(config.webhook_variable)
    words = f'"$run_folder" "$attempt" "$ended" {config.webhook_variable} {config.when}'
    # A local run that is cancelled ends all its processes with SIGTERM.
    act = f'ended=$?; trap "" TERM; {host_python(job)} {_PROGRAM} {words} || true'
    return [
        "# Notify of the run's end (notify.webhook_variable) without changing the exit status.",
        f"trap '{act}' EXIT",
    ]


def _is_trial(job: Job) -> bool:
    """Return whether a search (the plugin `tune`) submits the job: it ends dozens of them, and follows each itself."""
    return job.folder is not None and (Path(job.folder).parent / "tune" / "state.json").is_file()


@functools.cache
def _warn(variable: str) -> None:
    eprint(f"warning: {variable} is not set, so the job cannot notify you")
