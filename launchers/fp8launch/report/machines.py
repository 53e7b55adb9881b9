"""The machines of a run. Its nodes print their names and GPUs (`injob/rank/node_info.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8launch.hardware.gpus import gpu_of_model
from fp8launch.logs import ParsedLog
from fp8launch.logs.evidence import of_kind
from fp8launch.report.steady_state import consecutive
from fp8launch.rundir.run_dir import natural_order
from fp8launch.untyped import as_mapping


@dataclass(frozen=True)
class Machines:
    """Names in order; `gpus` are the driver's model names. All are empty if the log does not contain them."""

    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()

    @property
    def gpu(self) -> str | None:
        """The GPU by its name in `hardware.gpus`; None for several models, or an unknown one."""
        if len(self.gpus) != 1:
            return None
        known = gpu_of_model(self.gpus[0])
        return None if known is None else known.name

    def facts(self) -> dict[str, object]:
        facts = {"node set": compressed(self.nodes), "GPU": ", ".join(self.gpus), "driver": ", ".join(self.drivers)}
        return {name: value for name, value in facts.items() if value}


def machines_of(logs: Sequence[ParsedLog]) -> Machines:
    """Return the machines of the newest attempt whose log names any: a run may continue on other nodes."""
    for log in reversed(logs):
        nodes: set[str] = set()
        models: set[str] = set()
        drivers: set[str] = set()
        said = of_kind("node", log.evidence)
        for evidence in said:
            data = evidence.data
            models.update(map(_name, as_mapping(data.get("gpus"))))
            if data.get("node"):
                nodes.add(_name(data["node"]))
            if data.get("driver"):
                drivers.add(_name(data["driver"]))
        if said:
            return Machines(tuple(sorted(nodes, key=natural_order)), tuple(sorted(models)), tuple(sorted(drivers)))
    return Machines()


def _name(value: object) -> str:
    """Cut a name: a log may contain anything, and a host name has at most 255 characters."""
    return str(value)[:255]


def compressed(nodes: Iterable[str]) -> str:
    """Write host names as Slurm does: `n[1-3,7],login`."""
    groups: dict[tuple[str, str | None], list[str]] = {}
    for node in sorted(set(nodes), key=natural_order):
        found = re.fullmatch(r"(.*?)(\d{1,18})(\D*)", node)
        # `gpu` does not belong to `gpu[1-2]`, so names without a number are grouped apart.
        head, number, tail = found.groups() if found else (node, "", None)
        groups.setdefault((head, tail), []).append(number)
    names = []
    for (head, tail), numbers in groups.items():
        ranges = ",".join(map("-".join, consecutive(numbers)))
        names.append(f"{head}{ranges if len(numbers) == 1 else f'[{ranges}]'}{tail or ''}")
    return ",".join(names)
