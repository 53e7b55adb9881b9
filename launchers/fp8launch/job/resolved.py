"""A resolved recipe and its phases as files record them."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import Any

from fp8launch.job.job import Job
from fp8launch.job.phases import Phase
from fp8launch.job.prepared import Prepared
from fp8launch.recipe.write_yaml import write_yaml


def resolved_yaml(prepared: Prepared) -> str:
    """Return the recipe with everything that it extends, in the recipe format."""
    return write_yaml(resolved_recipe(prepared))


def recipe_digest(prepared: Prepared) -> str:
    """Return the SHA-256 of the resolved recipe's text, in hex."""
    return hashlib.sha256(resolved_yaml(prepared).encode()).hexdigest()


def resolved_recipe(prepared: Prepared) -> dict[str, Any]:
    """Return the recipe with everything that it extends, name and description first."""
    plain: dict[str, Any] = prepared.loaded.tree.plain()
    # A run is one point: submitted again, it must not become the whole study.
    ordered = {}
    for key in ("name", "description", *plain):
        if key in plain and key not in ("axes", "nodes"):
            ordered[key] = plain[key]
    return ordered


def engine_record(prepared: Prepared, job: Job) -> dict[str, Any]:
    """Return the engine as manifests have it: its name, what it trains with, and how its logs are read."""
    record = {"name": prepared.engine.name, "entry": job.entry.title, **asdict(prepared.engine.description)}
    if bridge := prepared.engine.bridge_release(prepared.args):
        record["bridge_release"] = bridge
    return record


def phase_entry(one: Phase) -> dict[str, Any]:
    """Return a phase as manifests have it: complete by itself."""
    return {
        "name": one.name,
        "begin": one.begin,
        "end": one.end,
        "environment": one.loaded.recipe.environment,
        "argv": list(one.args.argv),
        "arguments": one.args.recorded,
        "layout": asdict(one.layout),
    }
