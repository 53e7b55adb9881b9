"""The machines that a run ran on, by the line that the first process of each node prints (`train/machine.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fp8launch.logs import ParsedLog

# The driver's names of the parts whose peaks `hardware.gpus` has; PCIe and NVL cards have other peaks.
_MODELS = (
    ("a100", r"A100-(?:SXM|PCI)"),
    ("h100", r"H100 80GB HBM3|H100 SXM"),
    ("h200", r"\bH200(?! NVL)"),
    ("gb200", r"\bGB200"),
    ("gb300", r"\bGB300"),
    ("b200", r"\bB200"),
    ("b300", r"\bB300"),
)


@dataclass(frozen=True)
class Machines:
    """Names in order; `gpus` are the driver's model names. All empty where the log does not say."""

    nodes: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    drivers: tuple[str, ...] = ()

    @property
    def gpu(self) -> str | None:
        """The GPU by its name in `hardware.gpus`; None for several models, or one that it does not have."""
        known = {name for model in self.gpus for name, pattern in _MODELS if re.search(pattern, model)}
        return known.pop() if len(self.gpus) == 1 and len(known) == 1 else None

    def facts(self) -> dict[str, object]:
        facts = {"node set": compressed(self.nodes), "GPU": ", ".join(self.gpus), "driver": ", ".join(self.drivers)}
        return {name: value for name, value in facts.items() if value}

    def as_json(self) -> dict[str, object]:
        return {"nodes": list(self.nodes), "gpus": list(self.gpus), "drivers": list(self.drivers)}


def machines_of(logs: Sequence[ParsedLog]) -> Machines:
    """Those of the newest attempt that says any: a run may go on elsewhere."""
    for log in reversed(logs):
        said = [evidence.data for evidence in log.evidence if evidence.kind == "node"]
        if said:
            models = {str(model) for data in said if isinstance(gpus := data.get("gpus"), dict) for model in gpus}
            nodes = {str(data["node"]) for data in said if data.get("node")}
            drivers = {str(data["driver"]) for data in said if data.get("driver")}
            return Machines(tuple(sorted(nodes, key=_natural)), tuple(sorted(models)), tuple(sorted(drivers)))
    return Machines()


def compressed(nodes: Iterable[str]) -> str:
    """Host names as Slurm writes them: `n[1-3,7],login`."""
    groups: dict[tuple[str, str], list[str]] = {}
    for node in sorted(set(nodes), key=_natural):
        found = re.fullmatch(r"(.*?)(\d{1,18})(\D*)", node)
        head, digits, tail = found.groups() if found else (node, "", "")
        groups.setdefault((head, tail), []).append(digits)
    return ",".join(head + _numbers(digits) + tail for (head, tail), digits in groups.items())


def _numbers(digits: Sequence[str]) -> str:
    if len(digits) == 1:
        return digits[0]
    runs: list[list[str]] = []
    for each in digits:
        if runs and int(each) == int(runs[-1][-1]) + 1:
            runs[-1][1:] = [each]
        else:
            runs.append([each])
    return f"[{','.join('-'.join(run) for run in runs)}]"


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", name)]
