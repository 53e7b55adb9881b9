"""The rank variables of a process, from torchrun, from Slurm, or alone. Standard library only.

Megatron reads RANK, WORLD_SIZE, LOCAL_RANK and MASTER_ADDR/MASTER_PORT, which torchrun sets. A task started by srun
knows the same under Slurm's names.
"""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Callable, Mapping

# Below the ports of fp8launch's Slurm jobs (20000 to 29999) and Linux's ephemeral ports (32768 and up).
PORTS = range(10000, 20000)
_PORT_TRIES = 100
_reservations: list[socket.socket] = []


class EnvironmentProblem(Exception):
    """The environment does not define this process's rank; the message names what is missing."""


def unresolved_address(env: Mapping[str, str], patience: float = 20.0) -> str | None:
    """Return why this process cannot resolve MASTER_ADDR within `patience` seconds; None if it can.

    torch keeps trying for half an hour or more, without printing the reason.
    """
    address = env.get("MASTER_ADDR")
    end = time.monotonic() + patience
    while address:
        try:
            socket.getaddrinfo(address, None)
        except (OSError, UnicodeError) as error:
            if time.monotonic() < end:
                time.sleep(1)
                continue
            return (
                f"{socket.gethostname()} cannot find the address of {address}, where all processes meet ({error}): the "
                "container needs the host's /etc/hosts and /etc/resolv.conf (Charliecloud brings its own only where "
                "the image has files of these names)"
            )
        return None
    return None


def free_port() -> int:
    """Return a TCP port that is free on this host, and reserve it for as long as this process lives.

    torch binds the port only after its imports, many seconds later. Until then, an abstract Unix socket keeps other
    runs in the same network namespace from choosing it (Linux).
    """
    for port in random.SystemRandom().sample(PORTS, min(_PORT_TRIES, len(PORTS))):
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0fp8launch port {port}")
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", port))
        except OSError:
            reservation.close()
        else:
            _reservations.append(reservation)
            return port
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tasks_per_node(compressed: str) -> list[int]:
    """Expand Slurm's task counts to one number per node: `2(x3),1` is [2, 2, 2, 1].

    Raises EnvironmentProblem for other text.
    """
    counts: list[int] = []
    for part in compressed.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise EnvironmentProblem(f"cannot read Slurm's tasks per node: {compressed!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _integer(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except KeyError:
        raise EnvironmentProblem(f"{name} is not set") from None
    except ValueError:
        raise EnvironmentProblem(f"{name} is {env[name]!r}, not a number") from None


def _slurm_local_world_size(env: Mapping[str, str]) -> int:
    """Return the number of this step's tasks on this node.

    SLURM_NTASKS_PER_NODE is set only if the job used that option. SLURM_STEP_TASKS_PER_NODE is read next, because a
    container runtime may drop either.
    """
    if env.get("SLURM_NTASKS_PER_NODE"):
        return _integer(env, "SLURM_NTASKS_PER_NODE")
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if env.get(name):
            counts = tasks_per_node(env[name])
            node = int(env.get("SLURM_NODEID", "0"))
            if node < len(counts):
                return counts[node]
    return max(1, _integer(env, "SLURM_NTASKS") // int(env.get("SLURM_NNODES", "1")))


def rank_environment(env: Mapping[str, str], port: Callable[[], int] = free_port) -> dict[str, str]:
    """Return the variables that torch.distributed and Megatron need; {} under torchrun.

    If RANK is set, torchrun or the caller has set all of them, and they are not changed. Otherwise SLURM_PROCID and
    SLURM_NTASKS define the rank. Without these this is the only process. MASTER_ADDR and MASTER_PORT are never guessed
    for several processes: only the job knows the address of its first node.

    Raises EnvironmentProblem, naming the variable, if a set of variables is incomplete or contradicts itself.
    """
    if "RANK" in env:
        for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name):
                raise EnvironmentProblem(f"RANK is set but {name} is not; set them all, or none under srun")
        _check_range(_integer(env, "RANK"), _integer(env, "WORLD_SIZE"), "RANK", "WORLD_SIZE")
        return {} if "LOCAL_WORLD_SIZE" in env else {"LOCAL_WORLD_SIZE": "1"}

    if "SLURM_PROCID" in env and "SLURM_NTASKS" in env:
        rank, world = _integer(env, "SLURM_PROCID"), _integer(env, "SLURM_NTASKS")
        _check_range(rank, world, "SLURM_PROCID", "SLURM_NTASKS")
        found = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(_integer(env, "SLURM_LOCALID")),
            "LOCAL_WORLD_SIZE": str(_slurm_local_world_size(env)),
        }
    else:
        found = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}

    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not env.get(name)]
    if missing and found["WORLD_SIZE"] != "1":
        raise EnvironmentProblem(
            f"{' and '.join(missing)} not set for {found['WORLD_SIZE']} processes; "
            "the job must export the first node's address and one port"
        )
    if "MASTER_ADDR" in missing:
        found["MASTER_ADDR"] = "127.0.0.1"
    if "MASTER_PORT" in missing:
        found["MASTER_PORT"] = str(port())
    return found


def _check_range(rank: int, world: int, rank_name: str, world_name: str) -> None:
    if not 0 <= rank < world:
        raise EnvironmentProblem(f"{rank_name}={rank} does not fit {world_name}={world}")
