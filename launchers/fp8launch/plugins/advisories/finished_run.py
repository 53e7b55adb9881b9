"""The known bugs that a finished run has, by the settings and versions that it recorded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8launch.cluster.images import software_in
from fp8launch.diagnostics import Problem
from fp8launch.logs import LoggedProcesses
from fp8launch.logs.evidence import of_kind
from fp8launch.megatron.schema import parser_defaults
from fp8launch.megatron.versions import SUPPORTED, Release, minor_of, release
from fp8launch.plugins.advisories.advisory import Package, Setup
from fp8launch.plugins.advisories.table import ADVISORIES
from fp8launch.report.throughput import setup_of
from fp8launch.untyped import as_int, as_mapping

# What Megatron's log calls the packages.
_LOGGED: Mapping[Package, str] = {"megatron_core": "Megatron-Core", "transformer_engine": "Transformer Engine"}


def known_bugs(attempts: LoggedProcesses, stated: Mapping[str, object], manifest: Mapping[str, Any]) -> list[Problem]:
    """Return the known bugs of a run or a phase. See `fp8launch.report.verify.Verifier` for the parameters.

    Nothing is reported about a package whose version is in neither the log nor the manifest.
    """
    world = as_int(as_mapping(manifest.get("layout")).get("world"))
    setup = setup_of(attempts, None, None, world, stated)
    versions = _versions(attempts, setup.versions, manifest)
    arguments = setup.arguments
    core = str(as_mapping(manifest.get("megatron")).get("version") or "")
    in_megatron_lm = as_mapping(manifest.get("engine")).get("checks") == "megatron_lm"
    # The log of a job that died early has no list of all arguments.
    if not setup.dump and in_megatron_lm and minor_of(core) in SUPPORTED:
        arguments = {**parser_defaults(core), **arguments}
    recorded = Setup.recorded(arguments, setup.world_size, versions)
    return [row.problem(recorded) for row in ADVISORIES if row.affects(recorded)]


def _versions(
    attempts: LoggedProcesses, printed: Mapping[str, str], manifest: Mapping[str, Any]
) -> dict[Package, Release]:
    """Return the versions in the log, or else the versions that the run was submitted with."""
    recipe = as_mapping(manifest.get("recipe"))
    software = as_mapping(recipe.get("software"))
    stated = as_mapping(recipe.get("container")).get("image")
    # A manifest that was edited by hand may hold any type here.
    image = software_in(stated if isinstance(stated, str) else None)
    found: dict[Package, object] = {
        "megatron_core": as_mapping(manifest.get("megatron")).get("version"),
        "transformer_engine": software.get("transformer_engine") or image.get("transformer_engine"),
        "megatron_bridge": as_mapping(manifest.get("engine")).get("bridge_release"),
    }
    for log, process in attempts:
        for probe in of_kind("probe", log.evidence_of(process)):
            installed = as_mapping(probe.data.get("software")).get("transformer_engine")
            found["transformer_engine"] = installed or found["transformer_engine"]
    for package, title in _LOGGED.items():
        found[package] = printed.get(title) or found[package]
    return {package: known for package, version in found.items() if version and (known := release(version))}
