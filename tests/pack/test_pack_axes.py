"""The axes of a study are read as strictly as the rest of a recipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support import only, refused

from fp8launch.recipe.load import load_recipe

Write = Callable[[str, str], str]


def test_axes_and_nodes(write: Write) -> None:
    text = (
        "axes: {precision.recipe: [bf16, mxfp8], batch.global: [8, 16], megatron.lr: [null, 1.0e-4]}\nnodes: [1, 2]\n"
    )
    recipe = load_recipe(write("s.yaml", text)).recipe
    assert recipe.axes == {"precision.recipe": ["bf16", "mxfp8"], "batch.global": [8, 16], "megatron.lr": [None, 1e-4]}
    assert recipe.nodes == [1, 2]
    assert recipe.is_study
    assert not load_recipe(write("r.yaml", "train: {iterations: 1}\n")).recipe.is_study


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("axes: {precision.recpe: [bf16]}", 1, ["precision has no 'recpe'", "did you mean 'recipe'?"]),
        ("axes: {batsh.global: [8]}", 1, ["'batsh' is not a section", "did you mean 'batch'?"]),
        ("axes: {batch.global_: [8]}", 1, ["batch has no 'global_'", "'global'"]),
        ("axes: {reference.gpus: [8]}", 1, ["'reference' is not a section"]),
        ("axes: {name: [a]}", 1, ["a section and a key, such as precision.recipe"]),
        ("axes:\n  batch.micro: []", 2, ["axes.batch.micro"]),
        ("axes:\n  batch.micro: 4", 2, ["must be a list, not 4"]),
        ("axes: {batch.micro: [1, 2, 1]}", 1, ["axis batch.micro has the same value twice"]),
        ("axes: {batch.micro: [[1, 2]]}", 1, ["axes.batch.micro.0"]),
        ("nodes: [0]", 1, ["greater than 0"]),
        ("nodes: []", 1, ["'nodes'"]),
        ("nodes: [2, 2]", None, ["`nodes` has the same number twice"]),
        ("nodes: [2]\naxes: {resources.nodes: [1]}", None, ["use `nodes`"]),
        ("reference: {tokens_per_s_per_gpu: 0, gpus: 8, source: x}", 1, ["greater than 0"]),
        ("reference: {tokens_per_s_per_gpu: 5, gpus: 8}", 1, ["'reference.source' is missing"]),
    ],
)
def test_wrong_studies_are_refused_with_their_place(
    text: str, line: int | None, words: list[str], write: Write
) -> None:
    path = write("s.yaml", text + "\n")
    problem = only(refused(load_recipe, path))
    assert all(word in f"{problem.message} {problem.fix}" for word in words), problem
    assert (problem.where or "").startswith(path if line is None else f"{path}:{line}")
