"""Runs in W&B, MLflow and TensorBoard: written by their own libraries and read back."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from made_runs import Made, write_log, write_run, write_study
from tests.support import only, refused, sitting

from fp8launch.cli import run as command
from fp8launch.diagnostics import UserError
from fp8launch.plugins.tracking.injob.wandb_run import records_in
from fp8launch.plugins.tracking.trackers import Tracked, export, readable, tracked
from fp8launch.report.comparison_files import comparison_files
from fp8launch.report.named_runs import read_runs
from fp8launch.secrets import HIDDEN

ROOT = Path(__file__).resolve().parents[3]
FP8 = "tensorwise"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    speeds = {"bf16": 1000.0, FP8: 800.0}
    points = [({"precision.recipe": p}, 1, 1, Made(precision=p, ms=lambda i, t=t: t)) for p, t in speeds.items()]
    return write_study(tmp_path / "runs", points)


@pytest.fixture
def records(study: Path) -> list[Tracked]:
    return [tracked(run) for run in read_runs([str(study)])]


TRACKERS = ROOT / ".cache/trackers/lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"

# pytest-xdist imports the module of a warning in its main process, which does not see that environment.
OWN_WARNINGS = pytest.mark.filterwarnings("ignore")


def need(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B and MLflow may be in a separate environment, where tools/setup.sh installs them."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(TRACKERS)])
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed (pip install 'fp8launch[{library}]')")


class TestWhatIsHandedOver:
    def test_every_line_once_with_its_units(self, records: list[Tracked]) -> None:
        fp8 = records[1]
        assert [row.step for row in fp8.history] == list(range(1, 11))
        step, row = fp8.history[4].step, fp8.history[4].values
        # 64 x 4096 tokens over 8 GPUs in 0.8 s.
        assert row["tokens_per_s_per_gpu"] == pytest.approx(64 * 4096 / 8 / 0.8)
        assert (step, row["step_time_ms"], row["counted"]) == (5, 800.0, 1.0)
        assert row["loss"] == pytest.approx(10 / 1.05, rel=1e-5)
        assert fp8.history[0].values["counted"] == 0.0

    def test_medians_and_what_the_run_was(self, records: list[Tracked]) -> None:
        fp8 = records[1]
        assert fp8.summary["step_time_ms_median"] == 800.0
        assert fp8.summary["nan_iterations"] == 0
        assert fp8.config["precision"] == FP8
        assert fp8.config["axis precision.recipe"] == FP8
        assert fp8.config["num_layers"] == 4
        assert (fp8.name, fp8.identity.group, fp8.status) == ("run01", "grid-study-abc123", "ok")

    def test_a_lost_loss_is_left_out_and_not_zero(self, tmp_path: Path) -> None:
        log = write_log(tmp_path / "x.log", Made(loss=lambda i: None if i > 4 else 2.0))
        (run,) = read_runs([str(log)])
        assert "loss" not in tracked(run).history[6].values


class TestTensorBoard:
    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        need("tensorboard", monkeypatch)

    def read(self, place: Path):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(place), size_guidance={"scalars": 0})
        events.Reload()
        return events

    def test_scalars_and_hyperparameters(self, records: list[Tracked], tmp_path: Path) -> None:
        places = export(records, "tensorboard", "p", tmp_path / "out", offline=False)
        assert places == [str(tmp_path / "out/p/run00"), str(tmp_path / "out/p/run01")]
        events = self.read(Path(places[1]))
        assert [(e.step, e.value) for e in events.Scalars("step_time_ms")][2:4] == [(3, 800.0), (4, 800.0)]
        assert events.Scalars("summary/step_time_ms_median")[0].value == 800.0
        assert any("hparams" in tag for tag in events.Tags()["tensors"]) or events.PluginTagToContent("hparams")

    def test_a_second_export_replaces_the_first(self, records: list[Tracked], tmp_path: Path) -> None:
        for _ in range(2):
            (place, _) = export(records, "tensorboard", "p", tmp_path / "out", offline=False)
        assert len(list(Path(place).iterdir())) == 1
        assert len(self.read(Path(place)).Scalars("loss")) == 10

    def test_the_command(self, study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        status = command(["export", str(study), "--to", "tensorboard", "--dir", str(tmp_path / "tb"), "--json"])
        out, err = capsys.readouterr()
        assert status == 0
        assert [row["run"] for row in json.loads(out)] == ["run00", "run01"]
        assert f"tensorboard --logdir {tmp_path}/tb/grid-study-abc123" in err

    @pytest.mark.parametrize("name", ["../../../elsewhere", "..", "/etc/x", ".", "a/../../b"])
    def test_a_study_s_name_leads_nowhere(self, tmp_path: Path, name: str) -> None:
        """A manifest's study name with `/` or `..` made the export write, and delete, elsewhere."""
        victim = tmp_path / "elsewhere" / "run00" / "events.fp8launch"
        victim.parent.mkdir(parents=True)
        victim.write_text("mine")
        run = write_run(tmp_path / "a" / "b" / "run00", Made(), study={"name": name, "point": {}, "repeat": 1})
        out = tmp_path / "x" / "y" / "tb"
        assert command(["export", str(run), "--to", "tensorboard", "--dir", str(out)]) == 0
        assert victim.read_text() == "mine"
        written = [file for file in tmp_path.rglob("*.fp8launch") if file != victim]
        assert written and all(file.is_relative_to(out) for file in written)

    def test_a_link_in_the_folder_is_refused(self, records: list[Tracked], tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "victim").mkdir()
        (tmp_path / "out" / "p").symlink_to(tmp_path / "victim")
        assert only(refused(export, records, "tensorboard", "p", tmp_path / "out", False)).code == "output-is-a-link"
        assert not list((tmp_path / "victim").iterdir())


@OWN_WARNINGS
class TestWandb:
    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        need("wandb", monkeypatch)
        for name in [n for n in os.environ if n.startswith("WANDB_")]:
            monkeypatch.delenv(name)

    def test_offline_files_hold_the_run(self, records: list[Tracked], tmp_path: Path) -> None:
        places = export(records, "wandb", "p", tmp_path, offline=True)
        (file,) = Path(places[1]).glob("run-*.wandb")
        # W&B's own process writes the file, at times after `finish` has returned.
        end = time.monotonic() + 30
        found = list(records_in(file))
        while not any(r.HasField("exit") for r in found):
            assert time.monotonic() < end, found
            time.sleep(0.02)
            found = list(records_in(file))
        items = [r.history.item for r in found if r.HasField("history")]
        rows = [{i.key or i.nested_key[0]: json.loads(i.value_json) for i in row} for row in items]
        assert [row["_step"] for row in rows] == list(range(1, 11))
        assert rows[4]["step_time_ms"] == 800.0
        (made,) = [r.run for r in found if r.HasField("run")][:1]
        assert (made.display_name, made.run_group, made.project) == ("run01", "grid-study-abc123", "p")
        assert json.loads({u.key: u.value_json for u in made.config.update}["precision"]) == FP8

    def test_without_a_login_it_says_what_to_do(
        self, records: list[Tracked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(tmp_path / "none"))
        with pytest.raises(UserError) as caught:
            export(records, "wandb", "p", tmp_path, offline=False)
        assert caught.value.problems[0].code == "tracker-refused"
        assert "WANDB_API_KEY" in str(caught.value.problems[0].fix)


@OWN_WARNINGS
class TestMlflow:
    @pytest.fixture(autouse=True)
    def _library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        need("mlflow", monkeypatch)
        monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def test_a_database_holds_the_runs_once(self, records: list[Tracked], tmp_path: Path) -> None:
        from mlflow import MlflowClient

        for _ in range(2):
            export(records, "mlflow", "p", tmp_path, offline=True)
        client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
        experiment = client.get_experiment_by_name("p").experiment_id
        runs = {run.info.run_name: run for run in client.search_runs([experiment])}
        assert set(runs) == {"run00", "run01"}
        fp8 = runs["run01"]
        assert fp8.data.metrics["step_time_ms_median"] == 800.0
        assert fp8.data.params["precision"] == FP8
        assert fp8.info.status == "FINISHED"
        whole = client.download_artifacts(fp8.info.run_id, "config.json", str(tmp_path))
        assert json.loads(Path(whole).read_text())["precision"] == FP8
        history = client.get_metric_history(fp8.info.run_id, "step_time_ms")
        assert {m.step: m.value for m in history}[5] == 800.0

    def test_without_a_server_it_says_what_to_do(self, records: list[Tracked], tmp_path: Path) -> None:
        with pytest.raises(UserError) as caught:
            export(records, "mlflow", "p", tmp_path, offline=False)
        assert "MLFLOW_TRACKING_URI" in str(caught.value.problems[0].fix)

    def test_a_server_that_refuses_is_told_without_its_password(
        self, records: list[Tracked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:hush@127.0.0.1:9")
        with pytest.raises(UserError) as caught:
            export(records, "mlflow", "p", tmp_path, offline=False)
        told = str(caught.value.problems[0])
        assert "tracker-refused" in told and "hush" not in told


@pytest.mark.parametrize("to", ["wandb", "mlflow", "tensorboard"])
def test_a_missing_library_names_its_extra(to: str, study: Path, tmp_path: Path) -> None:
    """In a process whose library is hidden."""
    code = (
        "import importlib.util as u, sys; real = u.find_spec;"
        f"u.find_spec = lambda name, *a: None if name == {to!r} else real(name, *a);"
        f"from fp8launch.cli import run; sys.exit(run(['export', {str(study)!r}, '--to', {to!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 3
    assert f"pip install 'fp8launch[{to}]'" in done.stderr
    assert "Traceback" not in done.stderr


HOSTILE = "a/../b?c#d%2e e\ud800\x00\u202e\n'`;"
TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWx"


@pytest.fixture
def hostile(tmp_path: Path) -> list[Tracked]:
    """A run whose manifest somebody else has written: names that lead elsewhere, numbers beyond measure, secrets."""
    environment = {HOSTILE: HOSTILE, "X!": "1", "X?": "2", "MY_TOKEN": "hush-hush", "INDEX": "https://me:p/w@h/x"}
    write_run(
        tmp_path / "runs" / "run00",
        Made(),
        study={
            "name": f"{HOSTILE} {TOKEN}",
            "point": {HOSTILE: 10**39, "a": TOKEN, "env.API_KEY": "hush-hush", TOKEN: 1},
            "repeat": 10**39,
        },
        environment=environment,
        command=["submit", HOSTILE, "--set", f"env.A={TOKEN}"],
        megatron={"argv": ["--seed", "9" * 400, "--wandb-project", HOSTILE]},
    )
    return [tracked(run) for run in read_runs([str(tmp_path / "runs" / "run00")])]


def test_what_is_published_holds_no_secret(hostile: list[Tracked], tmp_path: Path) -> None:
    """Trackers and reports are read by others: a manifest or a log may hold a secret that no rule of ours has seen."""
    [run] = hostile
    assert run.config["env MY_TOKEN"] == HIDDEN
    assert not [secret for secret in ("p/w", "hush-hush", TOKEN) if secret in str(run)]
    for option in [name for name, file in comparison_files().items() if not file.may_be_folder]:
        out = tmp_path / "out"
        folder = str(tmp_path / "runs" / "run00")
        assert command(["compare", folder, folder, f"--{option}", str(out), "--force"]) in (0, 1)
        text = out.read_text(errors="replace")
        assert "hush-hush" not in text and TOKEN not in text and "p/w" not in text


@OWN_WARNINGS
@pytest.mark.parametrize("to", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.parametrize("project", ["p", "a?b#c%2e", "x" * 300, ""], ids=["plain", "marks", "long", "empty"])
def test_a_hostile_run_is_exported_or_refused_in_words(
    hostile: list[Tracked], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str, project: str
) -> None:
    need(to, monkeypatch)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    folder = tmp_path / "x" / "y" / "out"
    before = set(tmp_path.rglob("*"))
    with contextlib.suppress(UserError, OSError):  # the command reports both errors
        places = export(hostile, to, project, folder, offline=True)
        assert places
    written = set(tmp_path.rglob("*")) - before
    above = {folder.parent, folder.parent.parent}
    assert all(path.is_relative_to(folder) or path in above for path in written)


def test_nothing_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.log").write_text("nothing\n")
    assert command(["export", str(tmp_path / "empty.log"), "--to", "tensorboard"]) == 1
    assert "nothing-to-export" in capsys.readouterr().err


def test_the_readable_settings_are_facts_and_changes_of_defaults() -> None:
    log = sitting("2026-11-20-verify") / "blockwise.log"
    config = tracked(read_runs([str(log)])[0]).config
    few = readable({**config, "axis lr": 0.1, "env NCCL_DEBUG": "WARN"})
    assert len(config) > 400 and len(few) < 120
    assert {"num_layers", "lr", "global_batch_size", "precision", "axis lr"} <= set(few)
    assert not {"adlr_autoresume", "env NCCL_DEBUG", "params_dtype"} & set(few)
