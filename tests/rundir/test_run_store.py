"""Runs are found again from any shell: by folder, id, start of an id, job id, or as the latest."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.rundir.registry import all_runs, default_root, find_run, job_ids, known_roots, remember_root
from fp8launch.rundir.run_dir import RunFolder, create_run_folder

Make = Callable[..., RunFolder]


@pytest.fixture
def make(home: Path) -> Make:
    def create(
        run_id: str, created: str = "2026-01-01T00:00:00+00:00", *jobs: str, root: Path | None = None
    ) -> RunFolder:
        manifest = {"created": created, "jobs": [{"id": job} for job in jobs]}
        return create_run_folder(root or default_root(), run_id, {}, manifest)

    return create


def test_runs_are_found_in_every_way(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = make("llama-20260101-000000-aaaa", "2026-01-01T00:00:00+00:00", "41", "42")
    second = make("tiny-20260102-000000-bbbb", "2026-01-02T00:00:00+00:00", "43")
    for name in (first.run_id, "llama", "llama-2026", "41", "42", str(first.path)):
        assert find_run(name).path == first.path
    assert find_run("43").path == find_run("latest").path == second.path
    monkeypatch.chdir(first.path.parent)
    assert find_run(first.run_id + "/").path == first.path
    assert job_ids(first) == ["41", "42"]


def test_a_whole_id_wins_over_a_longer_one(make: Make) -> None:
    short = make("a-1")
    make("a-12")
    assert find_run("a-1").path == short.path


def test_what_fits_several_runs_is_refused(make: Make) -> None:
    make("a-1")
    make("a-2")
    problem = only(refused(find_run, "a-"))
    assert problem.code == "ambiguous-run"
    assert "a-1, a-2" in problem.message


def test_what_fits_none_is_answered_with_the_nearest(make: Make) -> None:
    make("llama8b-1")
    problem = only(refused(find_run, "lama8b-1"))
    assert (problem.code, problem.fix) == ("unknown-run", "did you mean 'llama8b-1'?")


def test_a_log_that_is_not_there_is_no_unknown_run(home: Path) -> None:
    assert only(refused(find_run, "nosuch.log")).code == "path-not-found"


def test_latest_without_runs(home: Path) -> None:
    assert only(refused(find_run, "latest")).message == "you have no runs yet"


@pytest.mark.parametrize("name", ["latest", "x", "7", "", "\0", "a" * 5000])
def test_without_runs_nothing_is_found(home: Path, name: str) -> None:
    refused(find_run, name)


def test_the_latest_is_the_newest_in_every_time_zone(make: Make) -> None:
    newest = make("a", "2026-03-29T01:30:00+00:00")
    make("b", "2026-03-29T03:15:00+02:00")
    make("c", "2026-03-28T23:00:00-01:00")
    assert find_run("latest").path == newest.path
    assert [run.run_id for run in all_runs()] == ["c", "b", "a"]


def test_one_damaged_run_does_not_hide_the_others(make: Make) -> None:
    good, bad = make("good-1"), make("bad-1")
    (bad.path / "manifest.json").write_text("{")
    assert [run.run_id for run in all_runs()] == ["good-1"]
    assert find_run("latest").path == good.path
    assert only(refused(find_run(str(bad.path)).manifest)).code == "bad-manifest"


def test_roots_are_remembered_across_shells(make: Make, tmp_path: Path) -> None:
    other = tmp_path / "scratch"
    run = make("far-1", root=other)
    refused(find_run, "far-1")
    remember_root(other)
    remember_root(other)
    assert find_run("far-1").path == run.path
    assert known_roots().count(other) == 1


def test_a_root_that_is_gone_is_no_trouble(make: Make, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    remember_root(gone)
    gone.rmdir()
    make("a-1")
    assert [run.run_id for run in all_runs()] == ["a-1"]


def test_a_state_folder_that_cannot_be_written_is_no_trouble(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    remember_root(tmp_path)
    assert tmp_path not in known_roots()


def test_the_default_root(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_root() == home / "fp8launch-runs"
    monkeypatch.setenv("FP8LAUNCH_RUNS", str(tmp_path / "elsewhere"))
    assert default_root() == tmp_path / "elsewhere"


def test_a_thousand_runs_are_listed_quickly(make: Make) -> None:
    root = default_root()
    for n in range(1000):
        (root / f"r-{n:04}").mkdir(parents=True)
        stamp = datetime.fromtimestamp(n, timezone.utc).isoformat()
        (root / f"r-{n:04}" / "manifest.json").write_text(f'{{"created": "{stamp}", "jobs": [{{"id": "{n}"}}]}}')
    begin = time.process_time()
    assert find_run("latest").run_id == "r-0999"
    assert time.process_time() - begin < 1
    assert find_run("777").run_id == "r-0777"
