"""Damaged, hostile or incomplete run folders are read or refused with a message. Nothing outside is touched."""

from __future__ import annotations

import functools
import json
import pickle
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sandbox import Sandbox
from support import log_bytes, real_logs
from wild import as_yaml, damaged, filled, mutated, share, texts

from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import prepare
from fp8launch.schedulers.slurm.slurm_scheduler import SlurmScheduler
from fp8launch.submit.new_run import Origin, make_run, plan_run

RECORD = {
    "attempts": [
        {"name": "12-0", "job": "12", "nodes": "n[1-2]", "began": 1.0, "before": 0, "after": 10, "counts": True,
         "cause": "time-limit", "then": "time-limit: attempt 1 of 3", "ended": 2.0, "phase": None},
    ],
    "waiting": "13", "excluded": ["n1"], "stopped": None, "owner": "12", "finished": False,
}  # fmt: skip


@functools.cache
def manifest(root: Path) -> dict[str, Any]:
    """What a real submission writes of a run with checkpoints."""
    prepared = prepare("tiny_cpu", ["survive.attempts=3", "checkpoint.dir=ckpt", "checkpoint.interval=10"])
    backend = SlurmScheduler()
    place = root / "whole"
    shutil.rmtree(place, ignore_errors=True)
    job = plan_run(prepared, Cluster(), place / "r-1", backend)
    origin = Origin({"commit": "c" * 40, "branch": "b", "dirty": False}, "", {"fp8launch": "1"})
    study = {"name": "s", "point": {"train.lr": 0.1}, "repeat": 1}
    run = make_run(prepared, Cluster(), job, backend, origin, study=study, check={"ok": True})
    run.update(jobs=[{"id": "12", "submitted": "2026-01-01T00:00:00+00:00"}])
    found: dict[str, Any] = run.manifest()
    found["survive"] = json.loads((run.path / "survive.json").read_text())
    return found


@functools.cache
def log() -> bytes:
    return log_bytes(real_logs("runs") / "tiny_cpu_0.17_1rank.log")


class Evil:
    def __reduce__(self) -> Any:
        return (open, ("CANARY", "w"))


METADATA = pickle.dumps({"storage_data": {"a": Evil()}})


def make(box: Sandbox, files: dict[str, bytes]) -> Path:
    """The run folder `r-1` of a study `s`, with these files over those that every run has."""
    shutil.rmtree(box.runs, ignore_errors=True)
    run = box.runs / "s" / "r-1"
    (run / "logs").mkdir(parents=True)
    (run / "ckpt" / "iter_0000010").mkdir(parents=True)
    whole = dict(manifest(box.root))
    plan = whole.pop("survive")
    # Local runs: there is no Slurm to query here.
    usual = {
        "manifest.json": as_yaml(whole).encode(), "attempts.json": as_yaml(RECORD).encode(),
        "survive.json": as_yaml({**plan, "checkpoint": str(run / "ckpt")}).encode(),
        "../study.json": b'{"points": [{"run": "r-1"}, {"run": "r-2"}]}', "logs/12-0.log": log()[-30_000:],
        "logs/12-0.exit": b"0\n", "logs/slurm-12.out": b"fp8launch: x\n", "job.sbatch": b"#!/bin/bash\n",
        "ckpt/latest_checkpointed_iteration.txt": b"10", "ckpt/iter_0000010/.metadata": METADATA,
        "ckpt/iter_0000010/metadata.json": b"{}",
    }  # fmt: skip
    for name, content in {**usual, **files}.items():
        (run / name).write_bytes(content)
    return run


VERBS = (
    ("runs",), ("runs", "--json"), ("runs", "s"), ("runs", "s", "--json"), ("runs", "r-1"), ("logs", "r-1"),
    ("logs", "r-1", "-n", "5"), ("logs", "r-1", "--batch"), ("cancel", "r-1"), ("cancel", "s"), ("resume", "r-1"),
    ("parse", "r-1"), ("parse", "r-1", "--json"), ("verify", "r-1"), ("compare", "s", "--force"),
    ("compare", "s", "--csv", "o.csv", "--md", "o.md", "--force"), ("runs", "12"), ("logs", "latest"),
)  # fmt: skip
NAMES = ("manifest.json", "attempts.json", "survive.json", "../study.json")


@share(0.03)
@given(data=st.data(), verb=st.sampled_from(VERBS), name=st.sampled_from(NAMES))
def test_records(box: Sandbox, data: st.DataObject, verb: tuple[str, ...], name: str) -> None:
    whole = dict(manifest(box.root))
    plan = whole.pop("survive")
    point = {"run": "r-1", "key": "k", "recipe": "tiny_cpu", "nodes": 1, "values": {}, "repeat": 1}
    points = {"points": [point], "left_out": [{**point, "why": "x"}], "created": "2026-01-01", "command": []}
    tree = {"manifest.json": whole, "attempts.json": RECORD, "survive.json": plan, "../study.json": points}[name]
    new = filled(data.draw(mutated([tree], tuple(tree))), box.canary)
    make(box, {name: as_yaml(new).encode()})
    box(*verb)


@share(0.015)
@given(data=st.data(), verb=st.sampled_from(VERBS), name=st.sampled_from(NAMES))
def test_records_that_are_no_json(box: Sandbox, data: st.DataObject, verb: tuple[str, ...], name: str) -> None:
    whole = as_yaml(manifest(box.root)).replace(", ", ",\n").encode()
    make(box, {name: data.draw(damaged([whole], (b"[" * 100_000, b"9" * 5000, b"\xff")) | st.binary(max_size=20))})
    box(*verb)


@share(0.01)
@given(
    data=st.data(),
    tracker=st.sampled_from((b"10", b"20", b"", b"release", b"-1", b"\xb2", "²".encode(), b"9" * 5000, b"1\n2"))
    | st.binary(max_size=8),
)
def test_checkpoints(box: Sandbox, talk: dict[str, tuple[int, str, str]], data: st.DataObject, tracker: bytes) -> None:
    talk.update(squeue=(0, "", ""), sacct=(0, "12|TIMEOUT|0:0|None|tiny_cpu|", ""), sbatch=(0, "14", ""))
    metadata = bytearray(METADATA)
    for _ in range(data.draw(st.integers(0, 4))):
        metadata[data.draw(st.integers(0, len(metadata) - 1))] = data.draw(st.integers(0, 255))
    ckpt = "ckpt/iter_0000010"
    record = as_yaml({**RECORD, "waiting": None}).encode()
    files = {"ckpt/latest_checkpointed_iteration.txt": tracker, f"{ckpt}/.metadata": bytes(metadata)}
    make(box, {**files, "attempts.json": record})
    box("resume", "r-1")


class Tags(HTMLParser):
    """Counts what a page holds that could run."""

    def __init__(self) -> None:
        super().__init__()
        self.active: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.active += [f"<{tag} {name}" for name, _ in attrs if name.startswith("on")]
        if tag in ("script", "iframe", "object", "embed", "img", "base", "form"):
            self.active.append(tag)


HOSTILE = st.sampled_from(
    (
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "'><svg/onload=alert(1)>",
        "</style><script>x</script>",
    )
)


def active(page: Path) -> list[str]:
    found = Tags()
    found.feed(page.read_text())
    return found.active


@pytest.mark.needs_plugin("plots")
@share(0.002)
@given(data=st.data())
def test_reports_as_html_of_hostile_names(box: Sandbox, data: st.DataObject) -> None:
    page = box.work / "o.html"
    make(box, {})
    box("compare", "s", "--html", "o.html", "--force")
    harmless = active(page)
    whole = dict(manifest(box.root))
    whole.pop("survive")
    evil = data.draw(HOSTILE | texts)
    for key in ("name", "run_id", "cluster", "gpu"):
        whole[key] = evil
    whole["study"] = {"name": evil, "point": {evil: evil}, "repeat": 1}
    whole["environment"] = {evil: evil}
    whole["command"] = [evil]
    whole["git"] = {"commit": evil, "branch": evil, "dirty": True}
    make(
        box,
        {
            "manifest.json": as_yaml(whole).encode(),
            "logs/12-0.log": log().replace(b"tiny", evil.encode("utf-8", "replace")),
        },
    )
    box("compare", "s", "--html", "o.html", "--force")
    assert active(page) == harmless


@pytest.mark.parametrize("verb", VERBS)
def test_the_run_itself(box: Sandbox, verb: tuple[str, ...]) -> None:
    make(box, {})
    assert box(*verb)[0] in (0, 1, 3)
