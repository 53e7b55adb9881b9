"""A published speed stays with the settings that it was published for."""

from __future__ import annotations

import pytest

from fp8launch.job.prepared import prepare, resolved_recipe

QUOTING = "llama70b_tensorwise_h100"


@pytest.mark.parametrize(
    ("overrides", "quoted"),
    [
        ((), True),
        (("train.iterations=7", "name=mine"), True),
        (("precision.recipe=bf16",), False),
        (("parallel.cp=2",), False),
        (("batch.global=64",), False),
        (("reference.source=ours",), True),
    ],
)
def test_a_run_records_a_published_speed_only_with_its_settings(overrides: tuple[str, ...], quoted: bool) -> None:
    """`compare` showed a run in bf16 as a percentage of the speed published for FP8, without a word."""
    assert ("reference" in resolved_recipe(prepare(QUOTING, overrides=overrides))) is quoted


def test_nodes_keep_a_published_speed() -> None:
    """Weak scaling keeps the sequences of a GPU; `compare` says for how many GPUs the figure is."""
    assert "reference" in resolved_recipe(prepare(QUOTING, nodes=16))
