"""Measure everyday commands in multiples of the start of an empty Python process in the same environment.

    python benchmarks/startup.py [RUNS]

Each command runs RUNS times (default 15). They take turns, so that other work on the machine slows all of them alike;
ratios of CPU time (user and system, of the command and its child processes) hold on a busy machine, ratios of elapsed
time only on an idle one. "first" runs without Megatron's verdicts in the cache, "repeated" with them. The row `import
nemo_run` is present if `make test` has created NeMo-Run's environment. Prints a table.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
RECIPE = "recipes/llama8b_fp8.yaml"
CHECK = (str(BIN / "fp8launch"), "check", RECIPE)
NEMO_RUN = ROOT / ".cache/nemo_run/bin/python"
BASE = "`python -c pass`"


@dataclass
class Command:
    """A command and the seconds that each of its runs took. `fresh` empties the cache of verdicts before each run."""

    words: tuple[str, ...]
    fresh: bool = False
    cpu: list[float] = field(default_factory=list)
    elapsed: list[float] = field(default_factory=list)

    def run(self, environment: dict[str, str]) -> None:
        """Run it once and record the time."""
        if self.fresh:
            shutil.rmtree(Path(environment["XDG_CACHE_HOME"], "fp8launch/verdicts"), ignore_errors=True)
        begin = time.perf_counter()
        process = subprocess.Popen(
            self.words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _, status, usage = os.wait4(process.pid, 0)
        self.elapsed.append(time.perf_counter() - begin)
        self.cpu.append(usage.ru_utime + usage.ru_stime)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            sys.exit(f"startup: {' '.join(self.words)} ended with {process.returncode}")


def commands() -> dict[str, Command]:
    """Return the commands by their names in the table; ratios are relative to the first one."""
    program = str(BIN / "fp8launch")
    found = {
        BASE: Command((sys.executable, "-c", "pass")),
        "`fp8launch --help`": Command((program, "--help")),
        "`fp8launch render llama8b_fp8`": Command((program, "render", RECIPE)),
        "`fp8launch check llama8b_fp8`, repeated": Command(CHECK),
        "`fp8launch check llama8b_fp8`, first": Command(CHECK, fresh=True),
    }
    if NEMO_RUN.exists():
        found["`python -c 'import nemo_run'`"] = Command((str(NEMO_RUN), "-c", "import nemo_run"))
    return found


def main(runs: int) -> None:
    """Measure and print a markdown table of medians."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as cache:
        environment["XDG_CACHE_HOME"] = cache
        measured = commands()
        # The first round writes byte code and fetches or unpacks Megatron's wheel.
        for command in measured.values():
            command.run(environment)
            command.cpu.clear()
            command.elapsed.clear()
        for _ in range(runs):
            for command in measured.values():
                command.run(environment)
    base = measured[BASE]
    print(f"| median of {runs} | CPU time | to an empty process | elapsed | to an empty process |")
    print("|---|---|---|---|---|")
    for name, command in measured.items():
        cells = [name]
        for own, of_base in ((command.cpu, base.cpu), (command.elapsed, base.elapsed)):
            median = statistics.median(own)
            cells += [f"{median * 1000:.0f} ms", f"{median / statistics.median(of_base):.1f}"]
        print(f"| {' | '.join(cells)} |")
    print(f"\n{os.cpu_count()} processors, Python {sys.version.split()[0]}", file=sys.stderr)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
