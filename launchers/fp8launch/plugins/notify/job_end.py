"""The command of a job that notifies of the run's end, so that nobody has to wait for it."""

from __future__ import annotations

import functools
import os

from fp8launch.cli.output import eprint
from fp8launch.job.job import Job
from fp8launch.job.script import host_python
from fp8launch.plugins.notify.notify import load_config
from fp8launch.rundir.study import is_trial
from fp8launch.schedulers.base import Scheduler

_PROGRAM = '"$code/../plugins/notify/injob/at_end.py"'


def notify_at_end(job: Job, scheduler: Scheduler) -> str | None:
    """Return the command for the end of the script, if `notify.webhook_variable` is configured.

    The address stays in the variable. Raises UserError for a bad configuration.
    """
    config = load_config().notify
    if config.webhook_variable is None or is_trial(job.folder):
        return None
    if not os.environ.get(config.webhook_variable):
        _warn(config.webhook_variable)
    words = f'"$run_folder" "$attempt" "$ended" {config.webhook_variable} {config.when}'
    return f"{host_python(job)} {_PROGRAM} {words}"


@functools.cache
def _warn(variable: str) -> None:
    eprint(f"warning: {variable} is not set, so the job cannot notify you")
