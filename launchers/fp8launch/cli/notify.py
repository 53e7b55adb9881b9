"""Notification when a run that is waited for has ended: a command or a webhook of the user's own configuration.

The file is `~/.config/fp8launch/config.yaml`; nothing of a recipe reaches the command or the webhook but the message.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from fp8launch.cli.output import eprint
from fp8launch.diagnostics import error
from fp8launch.injob.ownership import why_others_may_change
from fp8launch.recipe.sections import Section
from fp8launch.recipe.yaml_source import is_file, read_yaml

TIMEOUT = 15.0
Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s]+$")]


class Notify(Section):
    """Who is told about the end of a run that is waited for."""

    command: list[str] = Field(default=[], description="words; gets the message as JSON on its standard input")
    webhook: Url | None = Field(default=None, description="gets the message as JSON by POST; `text` is a sentence")
    when: Literal["end", "failure"] = "end"


class UserConfig(Section):
    notify: Notify = Notify()


def config_file() -> Path:
    """Return the file of the user's own configuration."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "fp8launch" / "config.yaml"


def load_config() -> UserConfig:
    """Load the user's configuration; the defaults without a file.

    Raises UserError for a bad one, and for one that other users could have written, because it names a command.
    """
    file = config_file()
    if not is_file(file):
        return UserConfig()
    reason = why_others_may_change(file)
    if reason is not None:
        message = f"other users could change the command and the webhook of your notifications: {reason}"
        raise error("not-yours", message, str(file), "make it your own (chmod go-w), or remove it")
    return UserConfig.from_node(read_yaml(file))


def notify(config: Notify, text: str, failed: bool, message: dict[str, Any]) -> None:
    """Send a message about an end. What goes wrong is a warning: the run has ended either way."""
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
    # Its address often holds a token, so messages never quote it.
    try:
        request = urllib.request.Request(url, data=body.encode(), headers={"Content-Type": "application/json"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT):
            pass
    except urllib.error.HTTPError as exc:
        words = http.client.responses.get(exc.code, "")
        if 300 <= exc.code < 400:
            words = "(a redirect, which is not followed: configure the new address)"
        eprint(f"warning: the notification webhook answered {exc.code} {words}".rstrip())
    except (http.client.InvalidURL, ValueError):
        eprint("warning: the notification webhook has an address that is not valid")
    except http.client.HTTPException:
        eprint("warning: the notification webhook does not answer with HTTP")
    except OSError as exc:
        reason = getattr(exc, "reason", exc)
        words = getattr(reason, "strerror", None) or type(reason).__name__
        eprint(f"warning: the notification webhook cannot be reached: {words}")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Whoever answers for a webhook must not choose another address, such as one of this machine's own services."""

    def redirect_request(self, *arguments: Any) -> None:
        return None
