"""Folders for data and checkpoints that a cluster profile names: where relative paths lead, and what containers see."""

from __future__ import annotations

from pathlib import Path

import pytest
from indexed_files import write_dataset
from support import only, refused
from support_site import codes, data_problems, indexed, recipe

from fp8launch.cluster.profile import Cluster, Storage
from fp8launch.diagnostics import Problem
from fp8launch.job.build_job import UNPLACED, plan
from fp8launch.job.job import Mount
from fp8launch.job.prepared import prepare
from fp8launch.submit.new_run import checkpoint_links

BOX = "container: {image: /image.sif}\n"
SAVES = "checkpoint: {dir: checkpoints, interval: 10}\n"


def found(folder: Path, text: str, cluster: Cluster) -> list[Problem]:
    return data_problems(prepare(recipe(folder, text), cluster=cluster), cluster)


def stored(folder: Path, **more: object) -> Cluster:
    return Cluster(storage=Storage(data=f"{folder}/data", checkpoints=f"{folder}/saved"), **more)  # type: ignore[arg-type]


def test_relative_prefixes_are_below_the_place_for_data(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data" / "web" / "text", [4000] * 100)
    text = indexed([0.5, "web/text", "0.5", str(tmp_path / "data" / "web" / "text")])
    cluster = stored(tmp_path)
    prepared = prepare(recipe(tmp_path, text), cluster=cluster)
    whole = f"{tmp_path}/data/web/text"
    assert prepared.args.values["data_path"] == ["0.5", whole, "0.5", whole]
    assert found(tmp_path, text, cluster) == []
    assert found(tmp_path, BOX + text, cluster) == []
    missing = only(tuple(found(tmp_path, indexed(["web/txt"]), cluster)))
    assert (missing.code, missing.where) == ("data-missing", f"{tmp_path}/recipe.yaml:2")
    assert f"{tmp_path}/data/web/text" in str(missing.fix)
    alone = only(tuple(found(tmp_path, text, Cluster())))
    assert alone.code == "path-relative" and "storage.data" in str(alone.fix)


def test_the_blends_of_phases_too(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data" / "late", [4000] * 100)
    write_dataset(tmp_path / "data" / "early", [4000] * 100)
    phases = "phases: {a: {iterations: 5}, b: {iterations: 5, data: {blend: [late]}}}\ntrain: {iterations: 10}\n"
    prepared = prepare(recipe(tmp_path, indexed(["early"]) + phases + SAVES), cluster=stored(tmp_path))
    assert [one.args.values["data_path"] for one in prepared.phases] == [
        [f"{tmp_path}/data/early"],
        [f"{tmp_path}/data/late"],
    ]


def test_containers_see_both_places(tmp_path: Path) -> None:
    for name in ("data", "saved", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "image.sif").touch()
    text = f"container: {{image: {tmp_path}/image.sif}}\n" + SAVES

    def mounts(cluster: Cluster) -> tuple[Mount, ...]:
        prepared = prepare(recipe(tmp_path, text), cluster=cluster)
        job = plan(prepared, cluster, UNPLACED, runtime="apptainer")
        assert job.container is not None
        return job.container.mounts

    data, saved = (str(tmp_path / name) for name in ("data", "saved"))
    assert mounts(stored(tmp_path)) == (Mount(data, data), Mount(saved, saved))
    # A mount of the profile that brings one stays as it is stated.
    assert mounts(stored(tmp_path, mounts=[f"{data}:{data}:ro"])) == (Mount(data, data, True), Mount(saved, saved))
    hiding = f"container: {{image: {tmp_path}/image.sif, mounts: ['{tmp_path}/other:{tmp_path}']}}\n" + SAVES
    problem = only(tuple(found(tmp_path, hiding, stored(tmp_path, runtime="pyxis"))))
    assert (problem.code, problem.where) == ("path-not-mounted", "cluster profile: storage.checkpoints")
    assert "is hidden in the container" in problem.message


def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    cluster = Cluster(storage=Storage(checkpoints=str(tmp_path / "file")))
    assert codes(found(tmp_path, SAVES, cluster)) == ["not-writable"]
    monkeypatch.delenv("NOBODY_SETS_THIS", raising=False)
    unset = Cluster(storage=Storage(data="/x/$NOBODY_SETS_THIS"))
    problem = only(refused(prepare, recipe(tmp_path, indexed(["web"])), (), None, unset))
    assert problem.where == "cluster profile: storage.data" and "export NOBODY_SETS_THIS=" in str(problem.fix)


def test_each_run_has_a_folder_for_its_checkpoints(tmp_path: Path) -> None:
    cluster = stored(tmp_path)
    loaded = prepare(recipe(tmp_path, SAVES)).loaded.recipe
    first = checkpoint_links(loaded, cluster, tmp_path / "runs" / "a")
    assert first == {"checkpoints": tmp_path / "saved" / "a"}
    # A run of another study with the same name finds nothing of it there.
    second = checkpoint_links(loaded, cluster, tmp_path / "more" / "a")
    assert second == {"checkpoints": tmp_path / "saved" / "a-2"}
    # A submission that was cut off is made again: its empty folder is not left behind.
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "checkpoints").symlink_to(first["checkpoints"])
    assert checkpoint_links(loaded, cluster, tmp_path / "runs" / "a") == first
    for stated, name in (("/there", None), ("../out", None), ("out/deep", "out")):
        other = prepare(recipe(tmp_path, SAVES.replace("checkpoints", stated))).loaded.recipe
        assert list(checkpoint_links(other, cluster, tmp_path / "b")) == ([name] if name else [])
    logs = prepare(recipe(tmp_path, SAVES.replace("checkpoints", "logs"))).loaded.recipe
    assert only(refused(checkpoint_links, logs, cluster, tmp_path / "c")).code == "checkpoint-dir"
