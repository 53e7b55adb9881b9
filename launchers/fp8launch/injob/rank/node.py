"""One torchrun per node: `python node.py --nproc-per-node G [--worker PROGRAM] [OPTIONS] -- ARGUMENTS...`

Starts G processes of PROGRAM (worker.py, or another program in the same folder) with OPTIONS and ARGUMENTS on this
node, through torch.distributed.run with a static rendezvous: the job knows its nodes and their order (SLURM_NNODES,
SLURM_NODEID, MASTER_ADDR, MASTER_PORT), so nothing needs discovering, and a second start of the same job cannot meet
the first. Without Slurm's variables this is the only node. The workers write directly to this process's stdout and
stderr.

A job's only process is started without torchrun, which would coordinate nothing and take seconds to import torch.

Three things differ from plain torchrun:

- A signal is passed on to the workers, which may take as long as they need. torchrun kills them after 30 seconds, even
  while they save, and reports a failure.
- The exit code is the first failed worker's, not always 1.
- SIGUSR1 prints the stacks of the ranks one by one: all ranks share one stream, and a stack is written in pieces.
"""
# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from fp8launch.injob.rank import rank_watch, ranks
from fp8launch.injob.supervisor.run_records import parent_of

FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
HANDLED_BY_TORCHRUN = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PORT_TRIES = 5
STACKS_WITHIN = 3.0  # seconds; the hang watchdog waits longer


def launch_arguments(
    env: Mapping[str, str], per_node: int, worker: Path, options: list[str], argv: list[str]
) -> list[str]:
    """Return torchrun's arguments for this node. A single node without MASTER_PORT gets a free port.

    Raises ranks.EnvironmentProblem if several nodes have no common address.
    """
    nodes = env.get("SLURM_NNODES") or "1"
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and nodes != "1":
        raise ranks.EnvironmentProblem(
            f"{' and '.join(missing)} not set for {nodes} nodes; "
            "the job must export the first node's address and one port"
        )
    return [
        f"--nnodes={nodes}",
        f"--node-rank={env.get('SLURM_NODEID') or '0'}",
        f"--nproc-per-node={per_node}",
        "--rdzv-backend=static",
        f"--master-addr={env.get('MASTER_ADDR') or '127.0.0.1'}",
        f"--master-port={env.get('MASTER_PORT') or ranks.free_port()}",
        "--max-restarts=0",
        str(worker),
        *options,
        "--",
        *argv,
    ]


def run_on_a_free_port(start: Callable[[], None]) -> None:
    """Start torchrun, and again if another program took the port between its choice and its use.

    `start` chooses the port, which torchrun binds before it starts any worker. A port that the job sets is tried once.
    """
    tries = 1 if os.environ.get("MASTER_PORT") else PORT_TRIES
    for left in reversed(range(tries)):
        try:
            start()
        except RuntimeError as problem:
            if "EADDRINUSE" not in str(problem) or not left:
                raise
            print("fp8launch: another program took the rendezvous port: choosing another", file=sys.stderr)
        else:
            return


def children(parent: int) -> list[int]:
    """Return the process ids of the direct children of `parent`, from /proc."""
    running = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [pid for pid in running if parent_of(pid) == parent]


def run_alone(worker: Path, options: list[str], argv: list[str]) -> int:
    """Run the job's only process in its own session, as torchrun does, and return its exit code.

    Its failure is reported in torchrun's words, from which the supervisor reads the cause.
    """
    command = [sys.executable, "-u", str(worker), *options, "--", *argv]
    own = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    own["MASTER_ADDR"] = os.environ.get("MASTER_ADDR") or "127.0.0.1"
    own["MASTER_PORT"] = os.environ.get("MASTER_PORT") or str(ranks.free_port())
    process = subprocess.Popen(command, env=os.environ | own, start_new_session=True)
    code = process.wait()
    if code:
        reason = f"failed (exitcode: {code}) local_rank: 0 (pid: {process.pid}) of {worker.name}"
        print(f"fp8launch: {reason}", file=sys.stderr, flush=True)
    return shell_code(code)


def shell_code(code: int) -> int:
    """Return an exit code as a shell gives it: 128 + n for a process that was ended by signal n."""
    return code if code >= 0 else 128 - code


def forward_signals(stacks: Path, numbers: Iterable[signal.Signals]) -> None:
    def forward(number: int, frame: Any) -> None:
        for child in children(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, number)
        if number == signal.SIGUSR1:
            threading.Timer(STACKS_WITHIN, show_stacks, [stacks]).start()

    for number in numbers:
        signal.signal(number, forward)


def show_stacks(folder: Path) -> None:
    """Print the stacks that this node's ranks wrote at SIGUSR1 (signals.py), each line with its rank."""
    for file in sorted(folder.iterdir(), key=lambda f: int(f.name)):
        # Print each stack once: ranks get the signal from Slurm and from this process.
        head, _, stack = file.read_text(errors="replace").partition("\n")
        lines = [head, *stack.partition(head)[0].splitlines()] if head else ["no stack"]
        for line in lines:
            print(f"[rank{file.name}]: {line}", file=sys.stderr, flush=True)


def program(name: str) -> Path:
    """Return the program of that name: a path, a file in this folder, or a file in the `injob` of a plugin."""
    folder = Path(__file__).resolve().parent
    if not (folder / name).exists():
        for found in folder.parents[1].glob(f"plugins/*/injob/{name}"):
            return found
    return folder / name


def main() -> None:
    own, argv = sys.argv[1:], []
    if "--" in own:
        at = own.index("--")
        own, argv = own[:at], own[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="node.py",
        description="All processes of a Megatron training job on this node.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--nproc-per-node", type=int, required=True, metavar="G", help="processes on this node, one per GPU"
    )
    parser.add_argument(
        "--worker",
        default="worker.py",
        metavar="PROGRAM",
        help="a program here or in a plugin, or its path",
    )
    # The remaining options are the program's, such as worker.py's --script.
    ours, options = parser.parse_known_args(own)

    worker = program(ours.worker)

    def arguments() -> list[str]:
        return launch_arguments(os.environ, ours.nproc_per_node, worker, options, argv)

    try:
        arguments()
    except ranks.EnvironmentProblem as problem:
        print(f"fp8launch: {problem}", file=sys.stderr)
        sys.exit(2)
    if unresolved := ranks.unresolved_address(os.environ):
        print(f"fp8launch: {unresolved}", file=sys.stderr)
        sys.exit(3)
    os.environ[rank_watch.AGENT] = str(os.getpid())
    stacks = tempfile.TemporaryDirectory(prefix="fp8launch-stacks-")
    os.environ["FP8LAUNCH_STACKS"] = stacks.name
    if ours.nproc_per_node == 1 and (os.environ.get("SLURM_NNODES") or "1") == "1":
        forward_signals(Path(stacks.name), [*FORWARDED, *HANDLED_BY_TORCHRUN])
        sys.exit(run_alone(worker, options, argv))
    gc.disable()  # the garbage collector takes a fifth of torch's import time and finds nothing
    try:
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    except ImportError as error:
        print(f"fp8launch: torch cannot be imported by {sys.executable}: {error}", file=sys.stderr)
        sys.exit(3)
    gc.enable()

    forward_signals(Path(stacks.name), FORWARDED)
    own = []
    if "--signals-to-handle" in run.get_args_parser().format_help():
        # The signals that torchrun's agent handles itself, without SIGTERM. In older releases, without this
        # option, the agent also handles SIGTERM, and kills the workers after 30 seconds.
        own = [f"--signals-to-handle={','.join(number.name for number in HANDLED_BY_TORCHRUN)}"]
    try:
        run_on_a_free_port(lambda: run.main([*own, *arguments()]))
    except ChildFailedError as error:
        sys.exit(shell_code(error.get_first_failure()[1].exitcode))


if __name__ == "__main__":
    main()
