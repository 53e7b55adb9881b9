"""Measured peaks of memory beside `fp8launch estimate`: memory.md, from every log of logs.tar.xz.

    python benchmarks/h200/memory.py            # writes memory.md
    python benchmarks/h200/memory.py --check    # exit 1 where it is stale, or a run is off by more than 6 %

A log says with what arguments it ran, and warns of a loss that was set behind them, so the estimate is of exactly that
run. Runs that ended in their first iteration tell no peak and are left out; so are logs of other programs.
"""

from __future__ import annotations

import re
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8launch.hardware.gpus import gpu
from fp8launch.logs import read_log
from fp8launch.logs.open_log import log_name
from fp8launch.plugins.estimate.memory import MIB, estimate
from fp8launch.report.throughput import read_logs, summarise

HERE = Path(__file__).resolve().parent
TABLE = HERE / "memory.md"
ARCHIVE = HERE / "logs.tar.xz"
OFF = 0.06
# Megatron's warning of Transformer Engine's cross entropy. Its validators refuse the argument, so runs set it in
# Megatron's configuration, and the arguments that they dump say `native`.
TE_LOSS = "Transformer Engine cross entropy loss fusion has known stability issues"
HEAD = """# Memory: measured, and as estimated

PyTorch's `max allocated` of rank 0 in the logs of this folder, beside what `fp8launch estimate` says of the same
arguments for the fullest GPU. Made by `memory.py`; a test keeps it in step, and no run may be off by more than 6 %.

| sitting | run | GPUs | measured (MiB) | estimated (MiB) | difference |
|---|---|---|---|---|---|
"""
NOTES = {
    "op_fuser": "the operation fuser keeps less for backward, which the estimate does not know",
    "asked_but_bf16": "FP8 was taken away by a precision file; the estimate is of what was asked for",
}


@dataclass(frozen=True)
class Peak:
    """One run: MiB measured on rank 0 and estimated for the fullest GPU."""

    sitting: str
    name: str
    gpus: int
    measured: float
    estimated: float

    @property
    def off(self) -> float:
        return self.estimated / self.measured - 1


def logs() -> Iterator[tuple[str, Path]]:
    """Every log with the name of its sitting; they are files until the last one was asked for."""
    with tempfile.TemporaryDirectory() as folder, tarfile.open(ARCHIVE) as packed:
        packed.extractall(folder, filter="data")
        for log in sorted(Path(folder).glob("*/*.log")):
            yield log.parent.name, log


def peaks() -> Iterator[Peak]:
    for sitting, log in logs():
        processes = read_log(log).processes
        arguments = next((p.head.arguments for p in reversed(processes) if p.head.arguments), {})
        report = summarise(read_logs([log]), gpu="h200")
        if not (
            report.peak_memory_mib
            and report.setup.world_size
            and report.setup.global_batch_size
            and report.training.iterations > 1
        ):
            continue
        if not {"micro_batch_size", "data_parallel_size"} <= arguments.keys():
            continue
        args = argument_values(arguments, log)
        micro_batches = report.setup.global_batch_size // (
            int(str(args["micro_batch_size"])) * int(str(args["data_parallel_size"]))
        )
        found = estimate(args, report.setup.world_size, micro_batches, gpu("h200"))
        if found is not None:
            yield Peak(sitting, log_name(log), report.setup.world_size, report.peak_memory_mib, found.peak / MIB)


def argument_values(dumped: Mapping[str, object], log: Path) -> dict[str, object]:
    """Arguments that a log dumps as they were given, and the loss that was set behind them.

    The dump shows types and enumerations as Python does.
    """
    args: dict[str, object] = {}
    for name, value in dumped.items():
        members = _MEMBERS.findall(str(value))
        if name == "attention_backend":
            args[name] = str(value).removeprefix("AttnBackend.")
        elif members:
            args[name] = members
        else:
            args[name] = _TYPES.get(str(value), value)
    if TE_LOSS in log.read_text(encoding="utf-8", errors="replace"):
        args["cross_entropy_fusion_impl"] = "te"
    return args


_MEMBERS = re.compile(r"<CudaGraphModule\.(\w+): \d+>")
_TYPES = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.uint8": "fp8"}


def table(found: list[Peak]) -> str:
    rows = []
    for one in found:
        off = f"{one.off:+.1%}".replace("-0.0%", "0.0%").replace("+0.0%", "0.0%")
        rows.append(f"| {one.sitting} | {one.name} | {one.gpus} | {one.measured:,.0f} | {one.estimated:,.0f} | {off} |")
    notes = [f"- {name}: {NOTES[name]}" for name in NOTES if any(one.name == name for one in found)]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(notes) + "\n"


def main() -> int:
    found = list(peaks())
    for one in found:
        if abs(one.off) > OFF:
            print(f"memory: {one.sitting}/{one.name} is off by {one.off:+.1%}", file=sys.stderr)
    text = table(found)
    if "--check" not in sys.argv[1:]:
        TABLE.write_text(text)
        return 0
    stale = not TABLE.is_file() or TABLE.read_text() != text
    if stale:
        print("memory: memory.md is stale: python benchmarks/h200/memory.py", file=sys.stderr)
    return int(stale or any(abs(one.off) > OFF for one in found))


if __name__ == "__main__":
    sys.exit(main())
