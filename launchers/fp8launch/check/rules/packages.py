"""Check that the image contains the optional packages that a recipe's settings import."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.cluster.images import packages_in
from fp8launch.injob.rank.optional_packages import needs


@rule("optional-package", "warning", source="Megatron-Core 0.17 to 0.19, see injob/rank/optional_packages.py")
def optional_package(run: ResolvedRun) -> Iterator[Finding]:
    image = run.loaded.recipe.container.image
    if image is None or run.gpu.name == "cpu":
        return  # The check of the machine asks the job's Python.
    known = packages_in(image)
    for need in needs(run.value):
        if need.module not in known:
            message = (
                f"{need.reason} imports {need.module}, which is not known to be in image {image}: without it the job "
                "stops at its start"
            )
            yield Finding(message, run.where(need.setting), f"if it is missing, add it to the image: {need.install}")
