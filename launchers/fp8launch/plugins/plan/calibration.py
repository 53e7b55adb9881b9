"""Rates measured on a cluster's own GPUs, and how they compare with the reference.

`plan --calibrate` runs `injob/rates.py` and keeps the result next to the cluster profiles. Kernels that run alone are
faster or slower than the same kernels in a step, so a rate changes a prediction only relative to the rate of the same
kernel on the GPUs that the speed model was calibrated with (`reference_rates.csv`).
"""

from __future__ import annotations

import csv
import functools
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8launch.cluster.profile import Cluster, config_folder
from fp8launch.diagnostics import UserError, error
from fp8launch.hardware.gpus import GPUS, Gpu, gpu_of_model
from fp8launch.injob.regular_files import read_regular
from fp8launch.rundir.atomic_io import write_atomically
from fp8launch.untyped import as_mapping
from fp8launch.wording import counted

PROGRAM = Path(__file__).with_name("injob") / "rates.py"
_REFERENCE = Path(__file__).with_name("reference_rates.csv")
_FORMAT = 1
_MAX_BYTES = 1 << 20
_LONGEST_S = 1200
# A rate that differs more than this from the reference is a broken measurement or another GPU.
MOST = 4.0
GROUPS = ("gemm bf16", "gemm fp8", "attention", "memory", "host")


@dataclass(frozen=True)
class Rates:
    """Measured rates by kernel and shape, with the GPU's name as the driver states it. `units` are by kernel."""

    device: str
    date: str
    rates: Mapping[tuple[str, str], float]
    units: Mapping[str, str]
    skipped: Mapping[str, str]


@dataclass(frozen=True)
class Correction:
    """How a group of kernels compares with the reference.

    `measured` has the rates of the group by shape; `shapes` says how many of them have a reference. Without a `factor`,
    `reason` says why the group changes nothing.
    """

    group: str
    measured: Mapping[str, float]
    unit: str
    shapes: int
    factor: float | None
    reason: str = ""

    @property
    def in_words(self) -> str:
        """What was measured and what it changes."""
        if self.factor is not None:
            return f"{self.factor:.3f} times the reference, {counted(self.shapes, 'shape')}"
        if not self.measured:
            return f"changes nothing, {self.reason}"
        text = f"{counted(len(self.measured), 'shape')} measured"
        if len(self.measured) == 1:
            (rate,) = self.measured.values()
            text = f"{rate:,.0f} {self.unit}"
        return f"{text}; changes nothing, {self.reason}"

    def as_json(self) -> dict[str, Any]:
        return {
            "kernel": self.group,
            "measured": dict(self.measured),
            "unit": self.unit,
            "factor": self.factor,
            "reason": self.reason or None,
        }


@dataclass(frozen=True)
class Calibration:
    """The rates of a cluster that a prediction uses, and what they change."""

    cluster: str
    rates: Rates
    corrections: tuple[Correction, ...]

    @property
    def changes(self) -> bool:
        """Whether any rate has a reference, so that predictions use it."""
        return any(one.factor is not None for one in self.corrections)

    @property
    def in_words(self) -> str:
        text = f"the rates of cluster {self.cluster}, measured on {self.rates.device} on {self.rates.date}"
        if not self.changes:
            return f"Predicted without {text}: none of them changes anything."
        return f"Predicted with {text}."

    def as_json(self) -> dict[str, Any]:
        found = [one.as_json() for one in self.corrections]
        return {"cluster": self.cluster, "device": self.rates.device, "date": self.rates.date, "kernels": found}


def cluster_name(cluster: Cluster) -> str:
    return cluster.name or "default"


def rates_file(cluster: Cluster) -> Path:
    """Return the file that keeps the rates of a cluster. Raises UserError for a profile whose name is no file name."""
    name = cluster_name(cluster)
    if Path(name).name != name or name.startswith("."):
        raise error("cluster-name", f"the rates of a cluster named {name!r} cannot be kept", "name", "use a plain name")
    return config_folder() / f"{name}.rates.json"


def parsed(raw: bytes, where: str) -> Rates:
    """Return the rates of a file's content. Raises UserError if it is not a result of `rates.py`."""
    try:
        found = as_mapping(json.loads(raw.decode()))
    except ValueError:
        found = {}
    rates: dict[tuple[str, str], float] = {}
    units: dict[str, str] = {}
    rows = found.get("rates")
    for row in map(as_mapping, rows if isinstance(rows, list) else []):
        rate = row.get("rate")
        if isinstance(rate, int | float) and math.isfinite(rate) and rate > 0:
            rates[str(row.get("kernel")), str(row.get("shape"))] = float(rate)
            units[str(row.get("kernel"))] = str(row.get("unit", ""))
    if found.get("format") != _FORMAT or not rates:
        raise error("not-rates", "the file has no measured rates", where, "measure again: fp8launch plan --calibrate")
    skipped = {str(name): str(reason) for name, reason in as_mapping(found.get("skipped")).items()}
    return Rates(str(found.get("device")), str(found.get("date")), rates, units, skipped)


def read_file(file: Path) -> bytes:
    """Return the content of a file of rates. Raises UserError if it cannot be read."""
    try:
        return read_regular(file, _MAX_BYTES)
    except (OSError, ValueError) as exc:
        raise error("cannot-read", f"cannot be read: {getattr(exc, 'strerror', None) or exc}", str(file)) from None


def stored_rates(cluster: Cluster, gpu: Gpu) -> Rates | None:
    """Return the rates that were measured for a GPU type on a cluster, if any."""
    try:
        file = rates_file(cluster)
    except UserError:
        return None  # none can have been kept
    if not file.is_file():
        return None
    rates = parsed(read_file(file), str(file))
    measured = gpu_of_model(rates.device)
    if measured is None or measured.name != gpu.name:
        return None
    return rates


def measure(python: str | None, say: Callable[[str], None]) -> bytes:
    """Measure this machine's GPU with a Python that has torch. Return the content of the program's file."""
    interpreter = python or sys.executable
    say(f"Measuring with {interpreter}, less than a minute on a GPU.")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rates.json"
        try:
            done = subprocess.run([interpreter, str(PROGRAM), str(file)], check=False, timeout=_LONGEST_S)
        except subprocess.TimeoutExpired:
            raise error("calibrate", f"the measurement took longer than {_LONGEST_S} s", interpreter) from None
        except OSError as exc:
            raise error(
                "calibrate", f"cannot run: {exc.strerror}", interpreter, "set `python:` in the profile"
            ) from None
        if done.returncode or not file.is_file():
            message = f"the measurement ended with exit code {done.returncode}"
            raise error("calibrate", message, interpreter, "set `python:` in the cluster profile to one with torch")
        return read_file(file)


def keep(raw: bytes, where: str, cluster: Cluster) -> tuple[Rates, Path]:
    """Keep measured rates for a cluster. Raises UserError for rates that were not measured on a GPU."""
    rates = parsed(raw, where)
    if gpu_of_model(rates.device) is None:
        if rates.device == "cpu":
            message = "the rates were measured without a GPU"
            raise error("calibrate", message, where, "measure on a GPU node, for example with srun --gpus=1")
        known = ", ".join(name.upper() for name, each in GPUS.items() if each.model is not None)
        message = (
            f"the speed model has no figures for {rates.device!r}: it knows {known}. H100 and H200 are the SXM cards; "
            "PCIe and NVL cards have other peaks, memory and links"
        )
        raise error("calibrate", message, where, "calibrate on one of these GPUs; other cards cannot be predicted")
    file = rates_file(cluster)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, raw)
    except OSError as exc:
        raise error("cannot-write", f"cannot be written: {exc.strerror}", str(file)) from None
    return rates, file


@functools.cache
def reference_rates() -> Mapping[tuple[str, str, str], float]:
    """Return the rates of the GPUs that the speed model was calibrated with, by GPU, kernel and shape."""
    with _REFERENCE.open(encoding="utf-8", newline="") as file:
        return {(row["gpu"], row["kernel"], row["shape"]): float(row["rate"]) for row in csv.DictReader(file)}


def corrections(rates: Rates, gpu: Gpu) -> list[Correction]:
    """Compare measured rates with the reference of the same GPU type. A factor above 1 is faster."""
    found = []
    for group in GROUPS:
        measured = {shape: rate for (kernel, shape), rate in rates.rates.items() if kernel == group}
        ratios = []
        for shape, rate in measured.items():
            known = reference_rates().get((gpu.name, group, shape))
            if known is not None:
                ratios.append(known / rate if group == "host" else rate / known)
        factor, reason = None, ""
        if ratios:
            factor = math.exp(sum(map(math.log, ratios)) / len(ratios))
            if not 1 / MOST < factor < MOST:
                factor, reason = None, f"{factor:.2g} times the reference is not plausible"
        elif group in rates.skipped:
            reason = f"not measured: {rates.skipped[group]}"
        else:
            reason = f"no reference for {gpu.name} yet"
        found.append(Correction(group, measured, rates.units.get(group, ""), len(ratios), factor, reason))
    return found
