"""Groups of a predicted step's terms, and the groups in which two steps differ."""

from __future__ import annotations

from fp8launch.plugins.plan.step_time import StepTime

# In the order of a bar: computation first, then communication and waiting.
GROUPS = (
    "GEMMs",
    "attention",
    "Mamba scan",
    "quantization",
    "elementwise and loss",
    "expert routing",
    "TP communication",
    "CP communication",
    "EP communication",
    "DP communication",
    "PP communication",
    "pipeline bubble",
    "recompute",
    "offloading",
    "optimizer",
    "host",
    "scale",
)
_GROUP_OF = {
    "elementwise": "elementwise and loss",
    "loss": "elementwise and loss",
    "short kernels": "elementwise and loss",
    "expert activation": "elementwise and loss",
    "expert permutation": "expert routing",
    "expert imbalance": "expert routing",
}
# Predictions that differ by less than this fraction are reported as equal.
ALIKE = 0.005
MOST = 3


def grouped(step: StepTime) -> dict[str, float]:
    """Return the milliseconds of each group, which add up to the step. Groups without time are left out."""
    found: dict[str, float] = {}
    for term in step.terms:
        name = term.name.partition(" (")[0]
        if name.startswith("GEMM "):
            name = "GEMMs"
        name = _GROUP_OF.get(name, name)
        found[name] = found.get(name, 0.0) + term.ms
    return {name: found[name] for name in GROUPS if name in found}


def difference(step: StepTime, best: StepTime) -> str:
    """Return how much slower or faster `step` is than `best`, and in which groups.

    The parts are rounded so that the printed numbers add up.
    """
    if abs(step.ms / best.ms - 1) < ALIKE:
        return "as fast as the best, within 0.5 %"
    digits = 1
    if abs(step.ms - best.ms) >= 20:
        digits = 0
    mine, its = grouped(step), grouped(best)
    parts = {name: round(mine.get(name, 0.0) - its.get(name, 0.0), digits) for name in GROUPS}
    total = round(step.ms - best.ms, digits)
    large = sorted(filter(parts.get, GROUPS), key=lambda name: -abs(parts[name]))[:MOST]
    words = [_part(name, parts[name], digits) for name in large]
    rest = round(total - sum(map(parts.__getitem__, large)), digits)
    if rest:
        words.append(_part("everything else", rest, digits))
    slower = "faster"
    if total > 0:
        slower = "slower"
    share = abs(step.ms / best.ms - 1)
    return f"{abs(total):,.{digits}f} ms ({share:.1%}) {slower} a step: {', '.join(words)}"


def _part(group: str, ms: float, digits: int) -> str:
    more = "less"
    if ms > 0:
        more = "more"
    exposed = ""
    if group.endswith("communication"):
        exposed = "exposed "
    return f"{abs(ms):,.{digits}f} ms {more} in {exposed}{group}"
