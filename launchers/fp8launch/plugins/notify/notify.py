"""Notify the user, by a command or a webhook, when a run that `--wait` follows turns unhealthy or ends.

Both are configured in `~/.config/fp8launch/config.yaml`. They get a message and nothing else from a recipe. A webhook
whose address is in an environment variable is notified of the end by the job itself (`job_end`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from fp8launch.cli.output import eprint
from fp8launch.diagnostics import error
from fp8launch.injob.ownership import why_others_may_change
from fp8launch.injob.supervisor.health_rules import HealthProblem, errors_of
from fp8launch.plugins.notify.injob.sent import claim, record_of
from fp8launch.plugins.notify.injob.webhook import ADDRESS, TIMEOUT, post
from fp8launch.recipe.sections import Section
from fp8launch.recipe.yaml_source import is_file, read_yaml
from fp8launch.report.run_report import RunReport
from fp8launch.rundir.attempts import read_attempt_log
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.schedulers.base import JobState

Url = Annotated[str, StringConstraints(pattern=f"^{ADDRESS.pattern}$")]
Variable = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class Notify(Section):
    """Notifications for `--wait`, and from the job."""

    command: list[str] = Field(default=[], description="words; gets the message as JSON on its standard input")
    webhook: Url | None = Field(default=None, description="gets the message as JSON by POST; `text` is a sentence")
    webhook_variable: Variable | None = Field(
        default=None, description="environment variable with the address of a webhook that the job itself notifies"
    )
    when: Literal["end", "failure"] = "end"


class UserConfig(Section):
    notify: Notify = Notify()


def config_file() -> Path:
    """Return the file of the user's own configuration."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "fp8launch" / "config.yaml"


def load_config() -> UserConfig:
    """Load the user's configuration, or return the defaults if there is none.

    Raises UserError if it is invalid, or if other users could have written it, because it names a command.
    """
    file = config_file()
    if not is_file(file):
        return UserConfig()
    reason = why_others_may_change(file)
    if reason is not None:
        message = f"other users could change the command and the webhook of your notifications: {reason}"
        raise error("not-yours", message, str(file), "make it your own (chmod go-w), or remove it")
    return UserConfig.from_node(read_yaml(file))


@dataclass(frozen=True)
class Notifier:
    """Sends the messages about runs."""

    config: Notify

    def unhealthy(self, run: RunFolder, problem: HealthProblem) -> None:
        if problem.severity == "error":
            text = f"{run.run_id}: unhealthy: {problem.code}: {problem.message}"
            message = {**_message(run, JobState("running"), None), "health": [problem.as_json()]}
            notify(self.config, text, True, message)
            self._post_from_here(text, message)

    def ended(self, run: RunFolder, state: JobState, report: RunReport | None, good: bool) -> None:
        text, message = _sentence(run, state, report), _message(run, state, report)
        notify(self.config, text, not good, message)
        # The job itself has sent this, unless it was killed.
        if not (good and self.config.when == "failure") and self.config.webhook_variable and _is_first(run):
            self._post_from_here(text, message)

    def _post_from_here(self, text: str, message: dict[str, Any]) -> None:
        """Post to the webhook of the variable, if this shell has it."""
        address = os.environ.get(self.config.webhook_variable or "", "")
        if ADDRESS.fullmatch(address):
            _post(address, json.dumps({"text": text, **message}))


def notifier() -> Notifier | None:
    """Return the notifier that the user configured, if any. Raises UserError for a bad configuration."""
    config = load_config().notify
    return Notifier(config) if config.command or config.webhook or config.webhook_variable else None


def _is_first(run: RunFolder) -> bool:
    """Record that the end of the run is notified. Return whether its job has not done that."""
    names = [attempt["name"] for attempt in read_attempt_log(run).get("attempts", [])]
    names = names or [attempt.log.stem for attempt in run.attempts()]
    if not names:
        return not any((run.path / "logs").glob("*.notified"))
    with contextlib.suppress(OSError):
        return claim(record_of(run.path, names[-1]))
    return True


def _sentence(run: RunFolder, state: JobState, report: RunReport | None) -> str:
    text = f"{run.run_id}: {state.status}"
    if report is None:
        return text
    if report.failure is not None:
        return f"{text}: {report.failure.code}: {report.failure.message}"
    if report.status == "unhealthy":
        return f"{text}, unhealthy: {errors_of(report.health)[0].message}"
    if report.speed.tokens_per_s_per_gpu is not None:
        return f"{text}, {report.speed.tokens_per_s_per_gpu.median:,.0f} tokens/s/GPU"
    return text


def _message(run: RunFolder, state: JobState, report: RunReport | None) -> dict[str, Any]:
    return {
        "run": run.run_id,
        "state": state.status,
        "detail": state.detail,
        "failure": report and report.failure and report.failure.as_json(),
        "health": [problem.as_json() for problem in report.health] if report else [],
        "loss": report and report.training.loss_last,
        "iteration": report and report.training.iteration_last,
    }


def notify(config: Notify, text: str, failed: bool, message: dict[str, Any]) -> None:
    """Send a message. If that fails, print a warning: the run is not affected."""
    if config.when == "failure" and not failed:
        return
    body = json.dumps({"text": text, **message})
    if config.command:
        _run(config.command, body)
    if config.webhook is not None:
        _post(config.webhook, body)


def _run(command: Sequence[str], body: str) -> None:
    try:
        done = subprocess.run(command, input=body, text=True, capture_output=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        eprint(f"warning: the notification command {command[0]} failed: {exc}")
        return
    if done.returncode:
        words = " ".join(done.stderr.split())[:200]
        eprint(f"warning: the notification command {command[0]} ended with status {done.returncode}: {words}")


def _post(url: str, body: str) -> None:
    problem = post(url, body)
    if problem:
        eprint(f"warning: the notification webhook {problem}")
