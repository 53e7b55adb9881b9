"""Weights of datasets in a blend, and how often a run sees each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8launch.datasets.manifest import Manifest
from fp8launch.plugins.data.tokenizer import MEGATRON_TYPES


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


def recipe_lines(shares: Sequence[Share], manifests: Sequence[Manifest | None]) -> str:
    """Return the `data:` lines of a recipe, with the tokenizer if all datasets were built with the same one."""
    pairs = ",\n".join(f"    {share.weight:.6g}, {_quoted(share.prefix)}" for share in shares)
    return "\n".join(["data:", "  kind: indexed", f"  blend: [\n{pairs}]", *_tokenizer_lines(manifests)])


def _tokenizer_lines(manifests: Sequence[Manifest | None]) -> list[str]:
    found = {_type_and_model(manifest) for manifest in manifests}
    type_and_model = found.pop()
    if found or type_and_model is None:
        return []
    name, model = type_and_model
    if model is not None:
        return [f"  tokenizer: {{type: {name}, model: {_quoted(model)}}}"]
    words = max(manifest.vocab_limit for manifest in manifests if manifest is not None)
    return [f"  tokenizer: {{type: {name}}}", f"model: {{vocab_size: {words}}}"]


def _type_and_model(manifest: Manifest | None) -> tuple[str, str | None] | None:
    """Return Megatron's type and file of a dataset's tokenizer; None if the manifest does not say enough."""
    if manifest is None or manifest.tokenizer is None:
        return None
    name, model = MEGATRON_TYPES.get(manifest.tokenizer.kind), manifest.raw["tokenizer"].get("megatron_model")
    if name == "NullTokenizer":
        return name, None
    return (name, model) if name is not None and isinstance(model, str) else None


def _quoted(text: str) -> str:
    plain = text.replace("/", "").replace("-", "").replace("_", "").replace(".", "")
    if plain.isalnum() and plain.isascii():
        return text
    return "'" + text.replace("'", "''") + "'"
