"""Check layers added by plugins. They run on request, after the core's layers, on runs without errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from fp8launch import plugin_registry
from fp8launch.check.checker import CheckResult
from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import Prepared

# Given the number of steps, returns a context manager. Call the value it yields after each step.
Progress = Callable[[int], AbstractContextManager[Callable[[], None]]]
# Creates the progress bar of a layer, given its title and the number of steps.
Bar = Callable[[str, int], AbstractContextManager[Callable[[], None]]]


def no_progress(steps: int) -> AbstractContextManager[Callable[[], None]]:
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class LayerRequest:
    """The input of a layer.

    `results` has one result for each run in `runs`. `asked_by` is the option or profile field that requests the layer.
    """

    runs: Sequence[Prepared]
    results: Sequence[CheckResult]
    cluster: Cluster
    say: Callable[[str], None]
    progress: Progress
    asked_by: str


@dataclass(frozen=True)
class ExtraLayer:
    """A check layer of a plugin. Its name in the registry becomes the option, such as `--rehearse`.

    name           key of its state and its report in JSON
    doing          title of its progress bar
    check_help     help of the option of `check`
    submit_help    help of the option of `submit`
    run            returns results extended by problems, the layer's state in `layers`, and its report in `extra`
    runs_scripts   whether it runs the script of a recipe, so that recipes of other users must be refused
    profile_field  field of a cluster profile with which a site requests the layer for `submit`
    wanted         returns whether the cluster profile requests the layer for a run
    notes          returns notes about all reports, printed once
    verdict        returns a phrase about all reports for the summary, or an empty string
    """

    name: str
    doing: str
    check_help: str
    submit_help: str
    run: Callable[[LayerRequest], list[CheckResult]]
    runs_scripts: bool = False
    profile_field: str = ""
    wanted: Callable[[Prepared, Cluster], bool] = lambda run, cluster: False
    notes: Callable[[Sequence[Any]], Sequence[str]] = lambda reports: ()
    verdict: Callable[[Sequence[Any]], str] = lambda reports: ""


def extra_layers() -> dict[str, ExtraLayer]:
    """Return the layers of active plugins by option."""
    return dict(plugin_registry.loaded("check_layers"))


def with_extra_layers(
    runs: Sequence[Prepared],
    results: Sequence[CheckResult],
    cluster: Cluster,
    asked: Mapping[str, bool | None],
    say: Callable[[str], None],
    bar: Bar,
) -> list[CheckResult]:
    """Run the requested layers.

    `asked` maps each option to the user's choice. For None, the cluster profile decides for each run.
    """
    found = list(results)
    for option, layer in extra_layers().items():
        choice = asked.get(option, False)
        places = [place for place, run in enumerate(runs) if (layer.wanted(run, cluster) if choice is None else choice)]
        if not places:
            continue
        asked_by = (
            plugin_registry.option_of(option) if choice else f"cluster profile {cluster.name}: {layer.profile_field}"
        )
        chosen = [runs[place] for place in places], [found[place] for place in places]
        request = LayerRequest(*chosen, cluster, say, partial(bar, layer.doing), asked_by)
        for place, result in zip(places, layer.run(request), strict=True):
            found[place] = result
    return found
