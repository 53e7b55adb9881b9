"""Known bugs that neither crash nor warn: which runs have them, and how they are reported.

The rows are in `table.py`. A row is a condition on settings, the releases that have the bug, and what to do. It is
evaluated on a `Setup`, made of the run that `check` examines or of what a finished run recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fp8launch.check.checkpoints import continues_another
from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding
from fp8launch.diagnostics import Problem
from fp8launch.engines.base import Layout, Scope
from fp8launch.megatron.model_arithmetic import expert_tensor_size, virtual_stages
from fp8launch.megatron.schema import value_of
from fp8launch.megatron.versions import Release, release
from fp8launch.untyped import as_int
from fp8launch.wording import joined

Package = Literal["megatron_core", "transformer_engine", "megatron_bridge"]
PACKAGES: Mapping[Package, str] = {
    "megatron_core": "Megatron-Core",
    "transformer_engine": "Transformer Engine",
    "megatron_bridge": "Megatron-Bridge",
}
# The releases on PyPI, oldest first; 0.18.1 and 0.19.1 were never published. A release that is missing here was not
# examined, so nothing is reported for it.
PUBLISHED: Mapping[Package, tuple[str, ...]] = {
    "megatron_core": ("0.17.0", "0.17.1", "0.18.0", "0.18.2", "0.19.0", "0.19.2"),
    "transformer_engine": (
        "2.1.0", "2.2.0", "2.3.0", "2.4.0", "2.5.0", "2.6.0", "2.7.0", "2.8.0", "2.9.0", "2.10.0", "2.11.0", "2.12.0",
        "2.13.0", "2.14.0", "2.14.1", "2.15.0", "2.16.0", "2.16.1", "2.17.0", "2.17.1", "2.18.0", "2.19.0", "2.20.2",
    ),
    "megatron_bridge": ("0.4.0", "0.4.1", "0.4.2", "0.5.0", "0.5.1", "0.6.0", "0.6.2"),
}  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """The settings and versions of a run, planned or finished.

    `arguments` are Megatron's, by attribute name. A package whose version is unknown is not in `versions`.
    """

    arguments: Mapping[str, Any]
    layout: Layout
    versions: Mapping[Package, Release]

    @classmethod
    def planned(cls, run: ResolvedRun) -> Setup:
        """Return the setup of a run that is checked. An unstated Transformer Engine counts as the newest."""
        versions: dict[Package, Release] = {}
        if run.megatron:
            versions["megatron_core"] = run.megatron
        versions["transformer_engine"] = release(run.transformer_engine)
        if run.software.megatron_bridge is not None:
            versions["megatron_bridge"] = run.software.megatron_bridge
        return cls(run.arguments, run.layout, versions)

    @classmethod
    def recorded(
        cls, arguments: Mapping[str, Any], world: int | None = None, versions: Mapping[Package, Release] | None = None
    ) -> Setup:
        """Return the setup of a run that recorded these arguments, on `world` ranks."""
        return cls(arguments, layout_of(arguments, world), versions or {})

    def value(self, name: str) -> Any:
        """Return the value of an argument, None if it is unknown. Raises KeyError for a name that no Megatron has."""
        return value_of(self.arguments, name)

    def on(self, name: str) -> bool:
        """Return whether a switch is set, or a value is neither zero nor empty."""
        return bool(self.value(name))

    def number(self, name: str) -> float:
        """Return a number; 0 if the argument is not set, the largest if it is a list."""
        value = self.value(name)
        values = value if isinstance(value, list | tuple) else [value]
        return max((one for one in values if isinstance(one, int | float)), default=0)

    @property
    def tp(self) -> int:
        return self.layout.tp

    @property
    def pp(self) -> int:
        return self.layout.pp

    @property
    def cp(self) -> int:
        return self.layout.cp

    @property
    def ep(self) -> int:
        return self.layout.ep

    @property
    def dp(self) -> int:
        return self.layout.dp

    @property
    def etp(self) -> int:
        return expert_tensor_size(self.arguments)

    @property
    def experts(self) -> bool:
        return self.on("num_experts")

    @property
    def uses_te(self) -> bool:
        return bool(self.value("transformer_impl") == "transformer_engine")

    @property
    def grouped_experts(self) -> bool:
        """Return whether the experts are Transformer Engine's grouped layers."""
        return self.experts and self.on("moe_grouped_gemm") and self.uses_te

    @property
    def sequence_parallel(self) -> bool:
        return self.on("sequence_parallel") and self.tp > 1

    @property
    def checkpoints(self) -> bool:
        """Return whether the run can continue from a checkpoint."""
        return self.on("save") or self.on("load")

    @property
    def masks_tokens(self) -> bool:
        """Return whether the number of tokens in the loss may differ between ranks or micro batches."""
        return self.on("eod_mask_loss") or self.on("sft")

    @property
    def muon(self) -> bool:
        return "muon" in str(self.value("optimizer"))

    def fp8(self, recipe: str) -> bool:
        return self.on("fp8") and bool(self.value("fp8_recipe") == recipe)

    def balances_by(self, loss: str) -> bool:
        """Return whether the router has an auxiliary loss of this kind with a weight above 0."""
        kinds, weights = self.value("moe_router_load_balancing_type"), self.value("moe_aux_loss_coeff")
        kinds = [kinds] if isinstance(kinds, str) else kinds or []
        weights = weights if isinstance(weights, list | tuple) else [weights]
        if len(weights) == 1:
            weights = [*weights] * len(kinds)
        return self.experts and any(kind == loss and weight for kind, weight in zip(kinds, weights, strict=False))

    def at_least(self, package: Package, version: Release) -> bool:
        """Return whether a package has at least this version. An unknown version counts as the newest."""
        known = self.versions.get(package)
        return known is None or known >= version


@dataclass(frozen=True)
class Advisory:
    """A known bug.

    `when` describes the condition `applies` for readers. `affected` has the releases with the bug, by package; if there
    are several packages, all must be affected. An empty `affected` means that the releases are not known yet: the row
    is documented and never reported. `settings` are the arguments to report, with their values and places; `DP` and
    `microbatches` stand for these numbers of the layout.

    `changes` is for bugs in continuing from the checkpoint of another run or phase: it compares that one with this one.
    If nothing is known about the other run, the bug is reported only with `even_if_unknown`.
    """

    id: str
    when: str
    applies: Callable[[Setup], bool]
    affected: Mapping[Package, tuple[str, ...]]
    effect: str
    fix: str
    source: str
    settings: tuple[str, ...] = ()
    scope: Scope = "megatron_core"
    changes: Callable[[Setup, Setup], bool] | None = None
    even_if_unknown: bool = False

    def find(self, run: ResolvedRun) -> Iterator[Finding]:
        """Find the bug in a run that is checked."""
        setup = Setup.planned(run)
        before = None if run.before is None else Setup.recorded(run.before)
        if self.affects(setup, before):
            yield Finding(self.message(setup), run.where(*self.settings), self.fix)

    def affects(self, setup: Setup, before: Setup | None = None) -> bool:
        """Return whether a run has the bug. `before` is the run or phase that it continues, if known."""
        if not self._in_releases(setup.versions) or not self.applies(setup):
            return False
        if self.changes is None:
            return True
        if before is None:
            return self.even_if_unknown and continues_another(setup.arguments)
        return self.changes(before, setup)

    def _in_releases(self, versions: Mapping[Package, Release]) -> bool:
        """Return whether these versions have the bug. An unknown version counts as unaffected."""
        return bool(self.affected) and all(
            package in versions and _covers(package, releases, versions[package])
            for package, releases in self.affected.items()
        )

    def problem(self, setup: Setup) -> Problem:
        """Return the problem that `verify` reports about a run with the bug."""
        return Problem("warning", self.id, self.message(setup), fix=self.fix, kind="advisory", source=self.source)

    def message(self, setup: Setup) -> str:
        """Say what is wrong, in which version, and with which settings of the run."""
        named = [f"{PACKAGES[package]} {'.'.join(map(str, setup.versions[package]))}" for package in self.affected]
        shown = ", ".join(_shown(setup, self.settings))
        text = f"known bug in {joined(named)}: {self.effect}"
        return f"{text} ({shown})" if shown else text


def _covers(package: Package, releases: tuple[str, ...], version: Release) -> bool:
    """Return whether a version is affected. A minor version is affected if all of its releases are."""
    same = [text for text in PUBLISHED[package] if release(text)[: len(version)] == version]
    return bool(same) and set(same) <= set(releases)


def _shown(setup: Setup, names: Iterable[str]) -> Iterator[str]:
    for name in names:
        if name == "DP":
            yield f"DP {setup.dp}"
        elif name == "microbatches":
            yield f"{setup.layout.microbatches} micro batches per step"
        elif isinstance(value := setup.value(name), list | tuple):
            yield f"{name} {' '.join(map(str, value))}"
        elif value is True:
            yield name
        elif value not in (None, False):
            yield f"{name} {value}"


def layout_of(arguments: Mapping[str, Any], world: int | None) -> Layout:
    """Return the layout that these arguments describe. Sizes that they leave out count as 1."""

    def size(name: str) -> int:
        return max(as_int(arguments.get(name)) or 1, 1)

    tp, pp = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    cp, ep = size("context_parallel_size"), size("expert_model_parallel_size")
    dp = max((world or size("world_size")) // (tp * pp * cp), 1)
    micro, batch = size("micro_batch_size"), size("global_batch_size")
    return Layout(
        world=world or size("world_size"),
        tp=tp,
        pp=pp,
        vp=virtual_stages(arguments, pp),
        cp=cp,
        ep=ep,
        dp=dp,
        micro_batch=micro,
        global_batch=batch,
        microbatches=max(batch // (micro * dp), 1),
    )
