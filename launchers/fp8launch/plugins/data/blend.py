"""Weights of datasets in a blend, and how often a run sees each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """A dataset in a blend. `epochs` is how often a run sees its training tokens, None if its length is unknown."""

    prefix: str
    tokens: int
    weight: float
    epochs: float | None


def shares_of(
    datasets: Sequence[tuple[str, int, float | None]], temperature: float, asked: int | None, train_share: float
) -> list[Share]:
    """Return the shares of datasets, each given by its prefix, tokens, and weight or None.

    Missing weights are computed as tokens ** (1 / temperature): at 1 all tokens are equally likely, larger values
    favour small datasets. Given and computed weights are never mixed. `asked` is the number of tokens of a run.
    """
    weights = []
    for _, tokens, given in datasets:
        if given is None:
            given = tokens ** (1 / temperature)
        weights.append(given)
    total = sum(weights)
    found = []
    for (prefix, tokens, _), weight in zip(datasets, weights, strict=True):
        share = weight / total
        epochs = None
        if asked is not None:
            epochs = asked * share / (tokens * train_share)
        found.append(Share(prefix, tokens, share, epochs))
    return found


def recipe_lines(shares: Sequence[Share]) -> str:
    """Return the `data:` lines of a recipe."""
    pairs = ",\n".join(f"    {share.weight:.6g}, {_quoted(share.prefix)}" for share in shares)
    return f"data:\n  kind: indexed\n  blend: [\n{pairs}]"


def _quoted(text: str) -> str:
    plain = text.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
    if plain.isalnum() and plain.isascii():
        return text
    return "'" + text.replace("'", "''") + "'"
