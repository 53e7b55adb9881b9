"""Slurm's commands as processes. Their text has the same fields from 22.05 to 25.11; their JSON does not."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

from fp8launch.schedulers.environment import clean_environment

# The exit status of a command that did not answer in time.
NO_ANSWER = 124
# For this long after its start a controller may not have heard from some nodes, and refuses jobs for them.
RESTART_SECONDS = 180.0


def call(*command: str, timeout: float = 30) -> subprocess.CompletedProcess[str]:
    """Run a Slurm command in a clean environment; the exit status is 124 if it does not answer in time."""
    env = clean_environment()
    conf = env.get("SLURM_CONF")
    if conf is not None and not Path(conf).is_file():
        # Slurm's commands would wait a minute for the file.
        words = f"SLURM_CONF is {conf}, which is not a file"
        return subprocess.CompletedProcess(command, 1, "", words)
    submits = command[0] == "sbatch"
    if not submits:  # an sbatch's environment becomes the job's
        # Without BITSTR_LEN the tasks of an array are cut off after 64 characters.
        env |= {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "SLURM_BITSTR_LEN": "0"}
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            timeout=timeout,
            check=False,
            # Ctrl-C does not interrupt a submission, which holds the run's lock until it is done.
            start_new_session=submits,
            close_fds=not submits,
        )
    except subprocess.TimeoutExpired:
        words = f"{command[0]} did not answer within {timeout:.0f} s"
        return subprocess.CompletedProcess(command, NO_ANSWER, "", words)
    except OSError as exc:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {exc.strerror}")


def one_line(text: str, length: int = 200) -> str:
    """Return a command's output as one line of at most `length` characters."""
    return " ".join(text.split())[:length]


def reasons(stderr: str, prefix: str) -> str:
    """Return the different lines of a command's errors, without the regular expression `prefix`, in one line."""
    found: dict[str, None] = {}
    for line in stderr.splitlines():
        found[re.sub(prefix, "", line.strip()).strip()] = None
    return "; ".join(filter(None, found))


def trouble(shown: subprocess.CompletedProcess[str]) -> str:
    """Return why a command failed, as `squeue: reason`; its own `squeue: error:` is not repeated."""
    command = str(shown.args[0])
    reason = one_line(reasons(shown.stderr, rf"^(?:{re.escape(command)}: )?(?:error: )?"))
    return f"{command}: {reason or f'ended with status {shown.returncode}'}"


def version() -> str | None:
    """Return Slurm's version as sbatch prints it; None without Slurm."""
    shown = call("sbatch", "--version")
    if shown.returncode or not shown.stdout:
        return None
    return shown.stdout.split()[-1]


def array_limit() -> int:
    """Return how many tasks an array may have here: MaxArraySize, or 1 if the controller does not answer."""
    shown = call("scontrol", "show", "config")
    match = re.search(r"^MaxArraySize\s*=\s*(\d{1,18})\b", shown.stdout, re.M)
    return 1 if match is None else max(1, int(match[1]))


def seconds_since_restart() -> float | None:
    """Return the seconds since the controller started; None if it does not say."""
    shown = call("scontrol", "show", "config", timeout=10)
    match = re.search(r"^BOOT_TIME\s*=\s*(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", shown.stdout, re.M)
    if match is None:
        return None
    try:
        return time.time() - time.mktime(time.strptime(match[1], "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def waits_for_nodes(refusal: str) -> bool:
    """Return whether a refusal may be due to nodes that have not reported back to a controller that just started."""
    if "node configuration" not in refusal.lower():
        return False
    seconds = seconds_since_restart()
    return seconds is not None and -60 < seconds < RESTART_SECONDS and not _every_node_responds()


def _every_node_responds() -> bool:
    """Return whether all nodes have reported to the controller; False if sinfo does not say."""
    shown = call("sinfo", "-h", "-N", "-o", "%T", timeout=10)
    states = shown.stdout.split()
    # A trailing * marks a node that does not respond.
    return bool(states) and not any(state.endswith("*") or state.startswith("unk") for state in states)
