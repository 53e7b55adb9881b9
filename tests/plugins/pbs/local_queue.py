"""A queue for one machine with commands and job ids like PBS's: `qsub`, `qstat` (as JSON) and `qdel`.

Jobs are real processes, each with a process that waits for its turn and then for its end. TOY_PBS names a folder with a
file for each job.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HOME = Path(os.environ["TOY_PBS"])
KILLED = 271  # PBS's exit status of a job that was ended by a signal: 256 + SIGTERM


@contextmanager
def locked() -> Iterator[None]:
    with (HOME / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def read(job: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((HOME / f"{job}.json").read_text())
    return content


def update(job: str, **entries: Any) -> dict[str, Any]:
    with locked():
        content = {**read(job), **entries}
        new = HOME / f".{job}.new"
        new.write_text(json.dumps(content))
        new.replace(HOME / f"{job}.json")
    return content


def qsub(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-N", dest="name")
    parser.add_argument("-W", dest="depend", default="")
    parser.add_argument("script")
    asked = parser.parse_args(words)
    with locked():
        job = f"{123 + len(list(HOME.glob('*.json')))}.pbs01"
        content = {"id": job, "name": asked.name, "script": asked.script, "state": "Q", "exit": None, "deleted": False}
        content |= {"after": asked.depend.rpartition(":")[2], "pid": None}
        (HOME / f"{job}.json").write_text(json.dumps(content))
    nowhere = subprocess.DEVNULL
    watcher = [sys.executable, __file__, "watch", job]
    subprocess.Popen(watcher, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)
    print(job)


def watch(job: str) -> None:
    """Wait for the job's turn, run it, and record its end."""
    content = read(job)
    while content["after"] and read(content["after"])["state"] != "F":
        time.sleep(0.05)
    if read(job)["deleted"]:
        update(job, state="F", exit=KILLED)
        return
    nodes = HOME / f"{job}.nodes"
    nodes.write_text(f"{os.uname().nodename}\n")
    env = {**os.environ, "PBS_JOBID": job, "PBS_NODEFILE": str(nodes)}
    output = Path(content["script"]).parent / "logs" / f"pbs-{job}.out"
    with output.open("ab") as out:
        process = subprocess.Popen(
            ["bash", content["script"]], env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            start_new_session=True,
        )  # fmt: skip
    update(job, state="R", pid=process.pid)
    status = process.wait()
    update(job, state="F", exit=status if status >= 0 else KILLED)


def qdel(job: str) -> None:
    content = update(job, deleted=True)
    if content["state"] == "R":
        os.killpg(content["pid"], signal.SIGTERM)


if __name__ == "__main__":
    verb, words = sys.argv[1], sys.argv[2:]
    if verb == "qsub":
        qsub(words)
    elif verb == "watch":
        watch(words[0])
    elif verb == "qdel":
        qdel(words[0])
    else:
        with locked():
            print(json.dumps([json.loads(file.read_text()) for file in sorted(HOME.glob("*.json"))]))
