"""A run, a study, the folder of either and a recipe are taken wherever they make sense."""

from __future__ import annotations

import json
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import only, refused, sitting

from fp8launch.cli import run
from fp8launch.rundir.names import recipe_named, run_named, runs_named, study_named
from fp8launch.rundir.registry import default_root
from fp8launch.rundir.run_dir import RunFolder, create_run_folder
from fp8launch.rundir.study import create_study

FIRST, SECOND, STUDY = "tiny_cpu-20261122-075613-dbcb", "tiny_cpu-20261122-085613-aaaa", "sweep-1a2b3c"
POINTS = ("lr-1", "lr-2")


def made(root: Path, name: str, recipe: str = "tiny_cpu", lr: str = "1.0e-2", hour: int = 7) -> RunFolder:
    manifest: dict[str, Any] = {
        "run_id": name, "name": recipe, "created": f"2026-11-22T{hour:02d}:56:13+00:00", "jobs": [], "backend": "local",
        "command": ["submit", recipe],
    }  # fmt: skip
    text = f"extends: [tiny_cpu]\nname: {recipe}\ntrain: {{lr: {lr}}}\n"
    found = create_run_folder(root, name, {"recipe.yaml": text}, manifest)
    log = (sitting("2026-11-20-verify") / "blockwise.log").read_bytes()
    (found.path / "logs" / "7-0.log").write_bytes(log)
    return found


@pytest.fixture(autouse=True)
def site(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs of tiny_cpu and a study of another recipe with two runs; the run root."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    root = default_root()
    made(root, FIRST, lr="2.0e-2")
    made(root, SECOND, hour=8)
    points = [{"run": point, "recipe": "sweep", "nodes": None, "values": {}, "repeat": 1} for point in POINTS]
    study = create_study(root, STUDY, {"study": STUDY, "points": points})
    for hour, point in enumerate(POINTS, 9):
        made(study.path, point, "sweep", f"{hour}.0e-3", hour)
    return root


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run([*arguments, "--json"]) in (0, 1)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("name", [FIRST, f"{{root}}/{FIRST}", f"{{root}}/{FIRST}/recipe.yaml"])
def test_where_a_recipe_belongs_a_run_stands_for_its_own(
    site: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    name = name.format(root=site)
    for verb in ("check", "render", "recipes"):
        found = as_json(capsys, verb, name)
        assert "0.02" in json.dumps(found) if verb in ("render", "recipes") else found, verb
    assert run(["submit", name, "--backend", "local", "--dry-run"]) == 0
    assert "lr 0.02" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("name", [FIRST, f"{{root}}/{FIRST}", f"{{root}}/{FIRST}/recipe.yaml"])
@pytest.mark.needs_plugin("estimate")
def test_a_run_stands_for_its_recipe_in_estimate(site: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert as_json(capsys, "estimate", name.format(root=site))["tokens"] > 0


@pytest.mark.parametrize("name", [FIRST, f"{{root}}/{FIRST}", f"{{root}}/{FIRST}/recipe.yaml"])
@pytest.mark.needs_plugin("diff")
def test_a_run_stands_for_its_recipe_in_diff(site: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert as_json(capsys, "diff", name.format(root=site), "tiny_cpu")[0]["name"] == "lr"


@pytest.mark.parametrize("name", [FIRST, f"{{root}}/{FIRST}", f"{{root}}/{FIRST}/recipe.yaml"])
@pytest.mark.needs_plugin("plan")
def test_a_run_stands_for_its_recipe_in_plan(site: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert run(["plan", name.format(root=site)]) == 2
    assert "the speed of cpu is not known" in capsys.readouterr().err


def test_a_study_is_checked_run_by_run(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in (STUDY, str(site / STUDY)):
        found = as_json(capsys, "check", name)
        assert [Path(recipe).parent.name for recipe in found["recipes"]] == list(POINTS)
    assert run(["render", STUDY]) == 2
    err = capsys.readouterr().err
    assert f"the study {STUDY} has 2 runs, and this command takes one" in err and ", ".join(POINTS) in err


def test_a_misspelt_recipe_is_never_a_run(site: Path) -> None:
    """`tiny_cp` is the start of two ids, and `tiny_cpu-2026...-d` of one."""
    near = only(refused(recipe_named, "tiny_cp"))
    assert (near.code, "did you mean tiny_cpu?" in str(near.fix)) == ("recipe-not-found", True)
    start = only(refused(recipe_named, FIRST[:-1]))
    assert (start.code, start.fix) == ("recipe-not-found", f"to name that run or study, write its whole id {FIRST}")
    assert recipe_named("latest") == str(site / STUDY / POINTS[1] / "recipe.yaml")
    assert recipe_named("tiny_cpu") == "tiny_cpu"


def test_only_ones_own_run_is_submitted_again(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / FIRST).chmod(0o777)
    assert run(["submit", FIRST, "--backend", "local", "--dry-run"]) == 1
    assert "not-yours" in capsys.readouterr().err
    assert run(["render", FIRST]) == 0


@pytest.mark.parametrize("name", ["tiny_cpu", "recipes/tiny_cpu.yaml", "./mine.yaml", SECOND])
def test_where_a_run_belongs_a_recipe_stands_for_its_newest(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "mine.yaml").write_text("extends: [tiny_cpu]\nname: tiny_cpu\n")
    assert run_named(name).run_id == SECOND
    for verb in ("parse", "verify"):
        assert "run" not in (found := as_json(capsys, verb, name)) or found["run"] == SECOND
    assert run(["logs", name, "--path"]) == 0
    shown = capsys.readouterr()
    assert f"/{SECOND}/logs/7-0.log" in shown.out
    assert (f"the newest of its 2 runs, {SECOND}" in shown.err) == (name != SECOND)


@pytest.mark.needs_plugin("archive")
@pytest.mark.parametrize("name", ["tiny_cpu", "recipes/tiny_cpu.yaml", "./mine.yaml", SECOND])
def test_a_recipe_stands_for_its_newest_run_in_archive(site: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.yaml").write_text("extends: [tiny_cpu]\nname: tiny_cpu\n")
    assert run(["archive", name]) == 0
    with tarfile.open(f"{SECOND}.tar.gz") as archive:
        assert f"{SECOND}/recipe.yaml" in archive.getnames()


def test_where_several_runs_belong_it_stands_for_all(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [one["run"] for one in as_json(capsys, "runs", "tiny_cpu")] == [FIRST, SECOND]
    assert [one.run_id for one in runs_named(STUDY)] == list(POINTS)
    rows = as_json(capsys, "compare", "tiny_cpu")["rows"]
    assert {one["name"] for row in rows for one in row["runs"]} == {FIRST, SECOND}


def test_a_study_is_parsed_and_verified_run_by_run(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("parse", "verify"):
        assert [one["run"] for one in as_json(capsys, verb, STUDY)] == list(POINTS)
        run([verb, STUDY])
        shown = capsys.readouterr().out
        assert all(f"{point}:" in shown for point in POINTS)
    (site / STUDY / POINTS[0] / "logs" / "7-0.log").unlink()
    assert run(["parse", STUDY, "--json"]) in (0, 1)
    shown = capsys.readouterr()
    assert (json.loads(shown.out)["run"], shown.err) == (POINTS[1], f"{POINTS[0]} has no log yet\n")


def test_a_recipe_of_one_study_means_that_study(site: Path, write: Callable[[str, str], str]) -> None:
    recipe = write("sweep.yaml", "extends: [tiny_cpu]\nname: sweep\n")
    found = study_named(recipe)
    assert found is not None and found.study_id == STUDY
    assert study_named("tiny_cpu") is None
    assert [one.run_id for one in runs_named(recipe, newest=True)] == [POINTS[1]]


def test_a_recipe_without_runs_says_so(site: Path) -> None:
    problem = only(refused(run_named, "llama8b_fp8"))
    assert (problem.code, problem.fix) == ("no-run-yet", "fp8launch submit llama8b_fp8")


@pytest.fixture
def places(site: Path, tmp_path: Path) -> list[Path]:
    """An empty folder, and one with a folder of the recipe's name, which the tutorial makes."""
    made(site, "my_model-20261122-075613-aaaa", "my_model")
    made(site, "my_model-20261122-085613-bbbb", "my_model", hour=8)
    empty, folder = tmp_path / "elsewhere", tmp_path / "tutorial"
    empty.mkdir()
    (folder / "my_model").mkdir(parents=True)
    (folder / "my_model" / "config.json").write_text("{}")
    return [empty, folder]


def test_names_mean_the_same_in_every_folder(
    places: list[Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in places:
        monkeypatch.chdir(place)
        for verb in ("check", "parse", "verify", "compare", "runs"):
            assert run([verb, "my_model"]) in (0, 1), (verb, capsys.readouterr())
        capsys.readouterr()
        assert [one["run"][-4:] for one in as_json(capsys, "runs", "my_model")] == ["aaaa", "bbbb"]
    assert run(["compare", "./my_model"]) == 2
    assert "is not a run or a study and contains no *.log" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        pytest.param("diff my_model tiny_cpu", marks=pytest.mark.needs_plugin("diff")),
        pytest.param("export my_model --to tensorboard --dir out", marks=pytest.mark.needs_plugin("tracking")),
    ],
)
def test_names_mean_the_same_to_plugins(places: list[Path], monkeypatch: pytest.MonkeyPatch, words: str) -> None:
    for place in places:
        monkeypatch.chdir(place)
        assert run(words.split()) == 0


def test_a_log_folder_of_a_name_needs_a_slash(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(site / FIRST / "logs", tmp_path / "tiny_cpu")

    def compared(name: str) -> set[str]:
        return {one["name"] for row in as_json(capsys, "compare", name)["rows"] for one in row["runs"]}

    assert compared("./tiny_cpu") == {"7-0"}
    assert compared("tiny_cpu") == {FIRST, SECOND}
    # No recipe or run has this name, so the folder is meant.
    (tmp_path / "tiny_cpu").rename(tmp_path / "mine")
    assert len(as_json(capsys, "compare", "mine")["rows"]) == 1
    # Both readings of the start of an id are shown.
    (tmp_path / "mine").rename(tmp_path / "tiny_c")
    for verb in ("compare", "parse", "verify"):
        assert run([verb, "tiny_c"]) == 2
        err = capsys.readouterr().err
        assert f"'tiny_c' is the start of {FIRST}, {SECOND}, and also a path in this folder [ambiguous-run]" in err
        assert "write a full id, or ./tiny_c for the path" in err


def test_a_run_folder_outside_every_run_root_is_found_by_its_name(site: Path, tmp_path: Path) -> None:
    """sbatch makes run folders in the working folder."""
    other = made(tmp_path, "job-19", "other")
    assert run_named("job-19").path == other.path
    assert recipe_named("job-19") == str(other.path / "recipe.yaml")
    # In a copy of a run root, ids still mean the runs themselves.
    shutil.copytree(site / FIRST, tmp_path / FIRST)
    assert run_named(FIRST).path == site / FIRST
    assert run_named(f"./{FIRST}").path == tmp_path / FIRST
    made(site, "job-191", "other")
    assert only(refused(run_named, "job-19")).code == "ambiguous-run"
    assert run_named("./job-19").path == other.path


def test_a_recipe_is_found_where_its_runs_came_from(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def submitted(folder: str, hour: int) -> str:
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "my.yaml"
        file.write_text("extends: [tiny_cpu]\nname: my_model\n")
        folder_of_run = made(site, f"my_model-{folder}", "my_model", hour=hour)
        folder_of_run.update(recipe_files=[str(file)])
        return str(file)

    made(site, "my_model-old", "my_model").update(recipe_files=["my.yaml"])
    assert recipe_named("my_model") == str(site / "my_model-old" / "recipe.yaml")
    refusal = only(refused(recipe_named, "my_model", True))
    assert (refusal.code, "my_model-old would repeat" in str(refusal.fix)) == ("recipe-not-found", True)
    first = submitted("first", 8)
    for to_run in (False, True):
        assert recipe_named("my_model", to_run) == first
    assert run(["submit", "my_model", "--backend", "local", "--dry-run"]) == 0
    assert f"my_model: {first}\n" in capsys.readouterr().err
    second = submitted("second", 9)
    both = only(refused(recipe_named, "my_model"))
    assert (both.code, first in both.message, second in both.message) == ("ambiguous-recipe", True, True)
    # A file that got another name is another recipe.
    Path(second).write_text("extends: [tiny_cpu]\nname: other\n")
    assert recipe_named("my_model") == first


def test_a_study_named_like_a_recipe_says_what_it_leaves_out(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [{"run": "a-1", "recipe": "tiny_cpu", "nodes": None, "values": {}, "repeat": 1}]
    study = create_study(site, "tiny_cpu", {"study": "tiny_cpu", "points": points})
    made(study.path, "a-1")
    note = "tiny_cpu: the study, without 2 other runs of the recipe tiny_cpu\n"
    for verb in ("runs", "compare"):
        assert run([verb, "tiny_cpu"]) in (0, 1)
        assert capsys.readouterr().err.count(note) == 1
    assert recipe_named("tiny_cpu") == "tiny_cpu"


def test_runs_with_one_id_are_told_apart_by_their_folders(site: Path) -> None:
    points = [{"run": POINTS[0], "recipe": "sweep", "nodes": None, "values": {}, "repeat": 1}]
    again = made(create_study(site, "again", {"study": "again", "points": points}).path, POINTS[0], "sweep")
    problem = only(refused(run_named, POINTS[0]))
    assert (problem.code, str(again.path) in problem.message) == ("ambiguous-run", True)
    assert problem.fix == "write the folder that you mean"


def test_what_acts_on_jobs_wants_a_run(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`cancel RECIPE` would have to guess what is to end."""
    assert run(["cancel", "tiny_cpu"]) == 2
    assert "ambiguous-run" in capsys.readouterr().err
    assert run(["resume", "tiny_cpu"]) == 2
    study = create_study(site, "grid", {"study": "grid", "points": []})
    capsys.readouterr()
    for name in (str(study.path), "grid"):
        assert run(["resume", name]) == 2
        assert "is a study, and a single run is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    "form",
    [
        ["runs"],
        ["runs", "--json"],
        ["runs", "--sort", "loss"],
        ["runs", "--columns", "run,job,train.lr"],
        ["runs", "--tag", "x"],
        ["compare", "tiny_cpu", "--json"],
    ],
)
def test_a_run_that_is_removed_while_it_is_listed_is_left_out(
    site: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    manifest, place = RunFolder.manifest, site / FIRST / "manifest.json"
    content, reads = place.read_text(), 0

    def removed_at_last(self: RunFolder) -> dict[str, Any]:
        nonlocal reads
        if self.run_id == FIRST and (reads := reads + 1) > allowed:
            place.unlink(missing_ok=True)
        return manifest(self)

    monkeypatch.setattr(RunFolder, "manifest", removed_at_last)
    for allowed in range(30):
        reads = 0
        place.write_text(content)
        assert run([*form]) in (0, 1), allowed
        shown = capsys.readouterr().out
        assert SECOND in shown or "--tag" in form
        if place.exists():
            break
    assert 1 < allowed < 29
