"""Pipelines whose stages have different numbers of layers, reduced to few stages that still differ."""

from __future__ import annotations

from collections.abc import Mapping

from fp8launch.engines.base import Layout
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.model_arithmetic import parse_layout

LAYOUT = "pipeline_model_parallel_layout"
FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
COUNTED = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_FLAGS = (LAYOUT, FIRST, LAST, *COUNTED)
# Layers of a small stage of which the recipe's has more.
_MOST_LAYERS = 2


def uneven_stages(values: Mapping[str, FlagValue], layout: Layout, small: Layout) -> dict[str, FlagValue]:
    """Return the flags for the stages of the small layout, `num_layers` among them; {} if they are all equal."""
    if not any(values.get(name) for name in _FLAGS):
        return {}
    found: dict[str, FlagValue] = dict.fromkeys(_FLAGS)
    if small.pp == 1:
        return found
    pieces = parse_layout(str(values.get(LAYOUT) or ""))
    if pieces:
        return found | _of_pieces(pieces, small)
    if values.get(FIRST) or values.get(LAST):
        return found | _of_ends(values, layout, small)
    counted = {name: values.get(name) for name in COUNTED}
    chunks = small.pp * small.vp
    return found | counted | {"num_layers": _MOST_LAYERS * chunks - sum(map(bool, counted.values()))}


def stages_were_evened(values: Mapping[str, FlagValue], small: Mapping[str, FlagValue]) -> bool:
    """Return whether the stages of a recipe differ, but not the stages of its small run."""
    divided = small.get("pipeline_model_parallel_size") != 1
    return divided and any(values.get(name) for name in _FLAGS) and not any(small.get(name) for name in _FLAGS)


def _of_pieces(pieces: tuple[str, ...], small: Layout) -> dict[str, FlagValue]:
    """Keep the first and the last pieces of a layout, with fewer layers each."""
    count = min(small.pp * small.vp, len(pieces))
    kept = [*pieces[: -(-count // 2)], *pieces[len(pieces) - count // 2 :]]
    dropped = "".join(pieces[-(-count // 2) : len(pieces) - count // 2])
    shown = []
    for piece in kept:
        layers = min(piece.count("t"), _MOST_LAYERS)
        others = piece.replace("t", "")
        # Layers follow the embedding, and precede the others.
        shown.append("E" * others.count("E") + "t" * layers + others.replace("E", ""))
    # All layers of multi-token prediction stay, because the model has them.
    shown[-1] = shown[-1].replace("L", "m" * dropped.count("m") + "L")
    return {
        LAYOUT: "|".join(shown),
        "num_layers": sum(piece.count("t") for piece in shown),
        "num_virtual_stages_per_pipeline_rank": None,
    }


def _of_ends(values: Mapping[str, FlagValue], layout: Layout, small: Layout) -> dict[str, FlagValue]:
    """Keep whether the first stage has more layers than the last one, fewer, or as many."""
    first, last = (_int(values, name) for name in (FIRST, LAST))
    stated = [size for size in (first, last) if size]
    others = (_int(values, "num_layers") - sum(stated)) // max(layout.pp - len(stated), 1)
    first_size, last_size = first or others, last or others
    sizes = {
        FIRST: small.vp * (_MOST_LAYERS if first_size > last_size else 1),
        LAST: small.vp * (_MOST_LAYERS if last_size > first_size else 1),
    }
    # A flag that the recipe does not set follows from the number of layers.
    found: dict[str, FlagValue] = {name: size for name, size in sizes.items() if values.get(name)}
    return {**found, "num_layers": sum(sizes.values())}


def _int(values: Mapping[str, FlagValue], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0
