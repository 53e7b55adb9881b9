"""Decide whether two trainings computed the same, by how far rounding alone moves each tensor."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8launch.wording import and_more, counted

# Rounding differs between layouts by at most five times what a change of all weights by one machine epsilon makes of a
# tensor. Errors are at least ten thousand times larger.
MARGIN = 30.0
EPSILON = 2.0**-23
# In bf16 and FP8 a layout moves a tensor about as far as a change of all weights by one epsilon of bf16 does, and the
# projection on the reference stays within 1.2 % (measured on an H100). Errors by a factor of two are far outside.
LOW_MARGIN = 4.0
LOW_SCALE = 0.04
# The loss, an average over tokens, moves by less than 0.05 %.
LOW_LOSS = 2.5e-4
# A norm is the root of a sum of thousands of squares, each rounded.
NORM_MARGIN = 100 * EPSILON
# A difference is a factor if this share of the tensor is left when the factor is taken out.
_REST = 0.02


@dataclass(frozen=True)
class Difference:
    """A tensor that differs: `factor` times the reference's, 0 if it is missing, None if it differs otherwise."""

    tensor: str
    factor: float | None
    relative: float | None

    @property
    def text(self) -> str:
        """Describe the difference: `embedding.weight: 0.5 times`."""
        if self.factor == 0:
            return f"{self.tensor}: missing"
        if self.factor is not None:
            return f"{self.tensor}: {self.factor:.4g} times"
        if self.relative is None:
            return f"{self.tensor}: another shape"
        if math.isnan(self.relative):
            return f"{self.tensor}: not a number"
        return f"{self.tensor}: off by {100 * self.relative:.2g} %"

    def as_json(self) -> dict[str, Any]:
        relative = self.relative if self.relative is None or math.isfinite(self.relative) else None
        return {"tensor": self.tensor, "factor": self.factor, "relative": relative}


@dataclass(frozen=True)
class Check:
    """One comparison: its name in JSON, the verdict, a sentence, and what differs."""

    name: str
    ok: bool
    detail: str
    differences: tuple[Difference, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "ok": self.ok,
            "detail": self.detail,
            "differences": [difference.as_json() for difference in self.differences],
        }


Rows = Mapping[str, Mapping[str, Any]]


def different_tensors(perturbed: Rows, candidate: Rows, low_precision: bool = False) -> list[Difference]:
    """Return the tensors that differ by more than rounding, the largest difference first.

    `perturbed` compares the reference with itself after a change of its weights by one machine epsilon, `candidate`
    compares the reference with the layout. Tensors that rounding does not move are judged by how far it moves the
    other tensors of their layer.
    """
    moved = [relative for name in perturbed if (relative := _relative(perturbed[name])) is not None]
    usual = statistics.median(moved) if moved else EPSILON
    found = []
    for name, row in candidate.items():
        relative = _relative(row)
        own = _relative(perturbed[name]) if name in perturbed else None
        limit = (LOW_MARGIN if low_precision else MARGIN) * max(own or 0.0, usual)
        scaled = low_precision and row["scale"] is not None and not abs(row["scale"] - 1) <= LOW_SCALE
        # Nothing is above or below NaN, so what agrees must be shown to be within its limit.
        if relative is None or not relative <= limit or scaled:
            found.append(Difference(name, _factor(row), relative))
    return sorted(found, key=_largest_first)


def identical_tensors(rows: Rows) -> list[Difference]:
    """Return the tensors that are not the same to the last bit."""
    found = [Difference(name, _factor(row), _relative(row)) for name, row in rows.items() if row["difference"] != 0]
    return sorted(found, key=_largest_first)


def _largest_first(one: Difference) -> float:
    return -math.inf if one.relative is None or math.isnan(one.relative) else -one.relative


def _relative(row: Mapping[str, Any]) -> float | None:
    """Return the difference relative to the reference; None without one of the two tensors."""
    difference, first = row["difference"], row["first"]
    if difference is None:
        return None
    if difference == 0:
        return 0.0
    return float(difference / first) if first else math.inf


def _factor(row: Mapping[str, Any]) -> float | None:
    first, second, scale = row["first"], row["second"], row["scale"]
    if second is None or (second == 0 and first):
        return 0.0
    if first is None or scale is None:
        return None
    rest = max(second**2 - (scale * first) ** 2, 0.0) ** 0.5
    return float(scale) if rest < _REST * second and abs(scale - 1) > _REST else None


def check_loss(
    reference: Mapping[str, float],
    perturbed: Mapping[str, float],
    candidate: Mapping[str, float],
    low_precision: bool = False,
) -> Check:
    """Compare the losses of a step, by name."""
    wrong = []
    margin, least = (LOW_MARGIN, LOW_LOSS) if low_precision else (MARGIN, EPSILON)
    for name, loss in reference.items():
        tolerance = margin * max(abs(perturbed[name] / loss - 1), least) if loss else EPSILON
        other = candidate.get(name)
        if other is None or not abs(other - loss) <= tolerance * abs(loss):
            wrong.append(f"{name} is {other} instead of {loss:.7g}")
    if wrong:
        return Check("loss", False, "; ".join(wrong))
    return Check("loss", True, ", ".join(f"{name} {loss:.6g}" for name, loss in reference.items()))


def check_gradients(
    perturbed: Mapping[str, Rows],
    candidate: Mapping[str, Rows],
    copies: Sequence[Difference] = (),
    low_precision: bool = False,
) -> Check:
    """Compare the gradient and the updated weight of every tensor. `copies` are those that differ between ranks."""
    found = different_tensors(perturbed["gradients"], candidate["gradients"], low_precision)
    count = len(candidate["gradients"])
    if found:
        return Check("gradients", False, f"{len(found)} of {count} tensors differ", tuple(found))
    updated = different_tensors(perturbed["weights"], candidate["weights"], low_precision)
    if updated:
        detail = f"all {count} gradients agree, but {len(updated)} updated weights differ"
        return Check("gradients", False, detail, tuple(updated))
    if copies:
        detail = f"all {count} gradients agree, but ranks have different copies of {counted(len(copies), 'tensor')}"
        return Check("gradients", False, detail, tuple(copies))
    return Check("gradients", True, f"{count} tensors and their updates agree")


def different_copies(ranks: Sequence[Mapping[str, Sequence[float]]]) -> list[Difference]:
    """Return the tensors of which ranks have different copies after the step, by the norm and the sum of each part."""
    parts: dict[str, Sequence[float]] = {}
    largest: dict[str, float] = {}
    for rank in ranks:
        for part, (norm, total) in rank.items():
            first = parts.setdefault(part, (norm, total))
            apart = max(abs(norm - first[0]), abs(total - first[1])) / (first[0] or 1.0)
            tensor = part.partition(" ")[0]
            if not apart <= largest.get(tensor, NORM_MARGIN):
                largest[tensor] = apart
    return [Difference(tensor, None, apart) for tensor, apart in largest.items()]


def check_norm(logged: float, members: Mapping[str, float], gradients: Rows) -> Check:
    """Check that the gradient norm is the norm of this layout's own gradients, with each tensor once.

    `members` are the norms that the optimizer finds if the gradients of all other tensors are zero.
    """
    wrong = []
    for name, own in _norms_of_members(members, gradients).items():
        seen = members.get(name, 0.0)
        if not abs(seen - own) <= NORM_MARGIN * max(own, seen):
            factor = seen / own if own and math.isfinite(seen / own) else None
            wrong.append(Difference(name, factor, abs(seen - own) / own if own else None))
    whole = sum(row["second"] ** 2 for row in gradients.values() if row["second"] is not None) ** 0.5
    if wrong:
        detail = (
            f"{len(wrong)} of {len(gradients)} tensors are not counted once in the norm ({logged:.6g}, not {whole:.6g})"
        )
        return Check("grad_norm", False, detail, tuple(wrong))
    if not abs(logged - whole) <= NORM_MARGIN * whole:
        return Check("grad_norm", False, f"{logged:.7g} is logged, but the gradients have the norm {whole:.7g}")
    return Check("grad_norm", True, f"{logged:.6g}, with each of {len(gradients)} tensors counted once")


def _norms_of_members(members: Mapping[str, float], gradients: Rows) -> dict[str, float]:
    """Return the norm of each tensor's gradient. A checkpoint may store parts of one tensor, as `weight.query`."""
    found: dict[str, float] = {}
    for name, row in gradients.items():
        if row["second"] is not None:
            whole = name.rpartition(".")[0]
            member = whole if name not in members and whole in members else name
            found[member] = math.hypot(found.get(member, 0.0), row["second"])
    return found


def listed(differences: Sequence[Difference], most: int = 4) -> str:
    """Return the largest differences as a phrase."""
    return and_more([difference.text for difference in differences], most)
