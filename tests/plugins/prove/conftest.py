"""Verdicts of these tests are kept nowhere else, and Megatron is imported once for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8launch.plugins.prove import proof_cache, session
from fp8launch.plugins.rehearse.server import Server


@pytest.fixture(autouse=True)
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache."""
    place = tmp_path / "proofs"
    monkeypatch.setattr(proof_cache, "folder", lambda: place)
    return place


@pytest.fixture(scope="session")
def started() -> Iterator[session.Servers]:
    with session.Servers() as servers:
        yield servers


@pytest.fixture(autouse=True)
def imported_once(started: session.Servers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all proofs share the processes that have imported Megatron, except a copy that belongs to one test."""
    of = session.Servers.of

    def shared(self: session.Servers, megatron: Path, device: str) -> Server:
        return of(self if tmp_path in megatron.parents else started, megatron, device)

    monkeypatch.setattr(session.Servers, "of", shared)
