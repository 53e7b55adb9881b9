"""`fp8launch tune` with real processes on this machine: what is kept, what is repeated, and what survives kill -9."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import wait_for

from fp8launch.cli import run
from fp8launch.cluster.profile import Cluster
from fp8launch.injob.local_job import LOCAL_RUN, processes_with
from fp8launch.job.prepared import prepare
from fp8launch.plugins.plan.calibration import keep, reference_rates
from fp8launch.plugins.plan.step_time import predict_step
from fp8launch.plugins.tune import candidates
from fp8launch.plugins.tune.knobs import knobs
from fp8launch.plugins.tune.output import setup_of
from fp8launch.recipe.load import read_recipe
from fp8launch.rundir.run_dir import RunFolder
from fp8launch.rundir.study import StudyFolder

MACHINE = Path(__file__).with_name("machine.py")


@pytest.fixture
def recipe(write: Callable[[str, str], str], home: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe for the program in `machine.py`, in an empty home."""
    monkeypatch.setattr(candidates, "START_SECONDS", 1.0)
    text = f"""
        extends: [tiny_cpu]
        name: small
        engine: script
        launch: {{script: {MACHINE}, probe: false}}
    """
    return write("small.yaml", text)


@pytest.fixture
def tune(recipe: str, home: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Run `tune` to its end; return its JSON with what it said as `said`."""

    def command(*words: str, expect: int = 0) -> Any:
        capsys.readouterr()
        status = run(["tune", recipe, "--backend", "local", "--run-root", str(home / "runs"), "--json", *words])
        out, err = capsys.readouterr()
        assert status == expect, err
        return {**(json.loads(out) if out.strip() else {}), "said": err}

    return command


def runs_of(found: Any) -> list[RunFolder]:
    return StudyFolder(Path(found["folder"])).runs()


def row(found: Any, change: str) -> Any:
    return next(one for one in found["rows"] if one["change"] == change)


# --- nothing runs -----------------------------------------------------------------------------------------------------


def said(capsys: pytest.CaptureFixture[str], *words: str, expect: int = 2) -> str:
    assert run(["tune", *words]) == expect
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out + err


def test_the_changes_and_the_budget_are_stated_before_anything_runs(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, "llama8b_fp8_h200x2", "--numerics", "allow", "--minutes", "9", "--dry-run", expect=0)
    assert "at most 0.30 GPU-hours" in text
    lines = text.splitlines()
    order = [n for n, line in enumerate(lines) if line.startswith(("delayed scaling", "TE's cross", "blockwise"))]
    assert len(order) == 3 and "delayed" in lines[order[0]] and "blockwise" in lines[order[2]], "best prediction first"
    assert "mxfp8 runs only on" in text, "what the rules refuse is named"
    assert not list(home.rglob("state.json"))


def test_numerics_are_kept_unless_allowed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "llama8b_fp8_h200x2", "--dry-run", expect=0)
    assert "scaling" not in text and "cross entropy" not in text and "CUDA graphs" in text
    assert "add --numerics allow" in said(capsys, "llama8b_fp8_h200x2", "--knobs", "scaling")


def test_the_best_layouts_of_a_plan_are_tuned_together(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["llama3_8b", "--gpu", "h200", "--gpus", "2", "--top", "2", "--write", str(tmp_path / "layout{}.yaml")]
    assert run(["plan", *words]) == 0
    layouts = [str(tmp_path / f"layout{number}.yaml") for number in (1, 2)]
    text = said(capsys, *layouts, "--dry-run", expect=0)
    assert all(layout in text for layout in layouts)
    assert run(["plan", *words]) == 2, "nothing is written over"


@pytest.mark.needs_plugin("bridge")
def test_a_recipe_of_bridge_is_tuned_by_its_own_fields(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_config"
    assert run(["tune", recipe, "--numerics", "allow", "--dry-run", "--json"]) == 0
    [start] = json.loads(capsys.readouterr().out)
    keys = {key for change in start["changes"] for key in change["overrides"]}
    assert {"model.recompute_granularity", "mixed_precision.fp8_param", "batch.micro"} <= keys
    assert not any(key.startswith("megatron.") for key in keys)


@pytest.mark.needs_plugin("diff")
@pytest.mark.parametrize("name", ["llama8b_fp8_h200x2", "qwen3_30b_a3b_tensorwise_h100", "llama70b_tensorwise_h100"])
def test_a_knob_that_keeps_numerics_changes_none_by_the_word_of_diff(name: str, home: Path) -> None:
    from fp8launch.plugins.diff.differences import differences

    source = read_recipe(name)
    base = candidates.base_of(name, source, (), None, None, Cluster())
    found = candidates.begin(base, list(knobs().values()), print)
    assert found.start.candidates
    for one in found.start.candidates:
        _, changed = base.variant(found.overrides[one.name])
        effects = {each.name: each.effect for each in differences(base.prepared, changed, Cluster())}
        if knobs()[one.knob].keeps_numerics:
            assert "numerics" not in effects.values(), (one.name, effects)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["tiny_cpu", "--knobs", "micro-bach"], "did you mean 'micro-batch'?"),
        (["studies/scaling_weak_llama8b"], "makes several runs of the recipe"),
        (["tiny_cpu", "llama8b_fp8_h200x2"], "the recipes differ in GPUs or global batch"),
        (["tiny_cpu", "--write", "/etc/hosts"], "exists"),
        (["tiny_cpu", "--write", "/etc/hosts/best.yaml"], "cannot be written: Not a directory"),
        (["tiny_cpu", "--picture", "best.jpg"], "end it in .png"),
        (["tiny_cpu", "--budget", "0"], "0.0 is not in the range x>0"),
        (["tiny_cpu", "--knobs", "scaling", "--numerics", "allow"], "knobs that do: micro-batch, cpu-threads"),
        pytest.param(
            ["bridge:llama3_8b_pretrain_8gpu_h100_fp8cs_config", "--knobs", "te-activation"],
            "do: recompute, micro-batch",
            marks=pytest.mark.needs_plugin("bridge"),
        ),
        (["no-such-recipe"], "no such recipe"),
    ],
)
def test_bad_input_is_answered_in_a_sentence(
    words: list[str], sentence: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sentence in said(capsys, *words, "--backend", "local", "--dry-run")


def test_a_recipe_that_the_check_refuses_runs_no_trial(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refused = ["tiny_cpu", "--set", "batch.micro=3", "--backend", "local", "--run-root", str(home / "runs")]
    for more in ([], ["--dry-run"]):
        assert "is not a multiple of micro batch 3" in said(capsys, *refused, *more, expect=1)
    assert not list(home.rglob("state.json"))


def test_layouts_of_different_data_parallelism_are_compared_at_one_global_batch(
    home: Path, write: Callable[[str, str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alone would be measured at the least batch of its own layout, and tune refused them."""
    sizes = {"one": "{tp: 1}", "two": "{tp: 2, sequence: true}"}
    layouts = [write(f"{n}.yaml", f"extends: [llama8b_fp8_h200x2]\nparallel: {size}\n") for n, size in sizes.items()]
    single = [said(capsys, one, "--dry-run", expect=0) for one in layouts]
    assert "global batch 16," in single[0] and "global batch 8," in single[1]
    assert "global batch 16," in said(capsys, *layouts, "--dry-run", expect=0)


# --- short runs -------------------------------------------------------------------------------------------------------


def test_the_picture_names_the_gpus_and_the_batch() -> None:
    recipes = [prepare(name) for name in ("llama8b_fp8", "llama8b_bf16")]
    assert setup_of(recipes) == "llama8b_fp8, llama8b_bf16 · 8 × H100 · global batch 128 × 8,192 tokens"


def test_each_trial_is_predicted_once(in_memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was predicted before it ran, and again for its outcome."""
    in_memory.memory.ends_at_once = 0
    predicted = []

    def counted(run: Any) -> Any:
        predicted.append(run)
        return predict_step(run)

    monkeypatch.setattr(candidates, "predict_step", counted)
    words = ["tune", "llama8b_fp8_h200x2", "--backend", in_memory.backend, "--trials", "1", "--knobs", "norms"]
    in_memory(*words, "--dry-run")
    before_any_trial = len(predicted)
    in_memory(*words, expect=1)
    assert len(predicted) == 2 * before_any_trial + 1


@pytest.mark.train
def test_what_is_faster_is_kept_and_written(
    tune: Any, recipe: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "best.yaml"
    found = tune("--trials", "7", "--write", str(file))
    assert found["changes"] == ["micro batch 4"] and found["overrides"] == {"batch.micro": 4}
    kept = row(found, "micro batch 4")
    assert kept["kept"] and kept["low"] > 1 and kept["measured"] == pytest.approx(1.25, rel=0.01)
    assert row(found, "micro batch 1")["why"] == "slower, not kept"
    # A process that really ran out of memory.
    large = row(found, "micro batch 8")
    assert large["why"].startswith("out of memory: ") and "MemoryError" in large["why"] and not large["kept"]
    # Undecided by one run: repeated, with runs of the best for company.
    threads = row(found, "2 threads")
    assert len(threads["runs"]) > 1 and not threads["kept"]
    assert "undecided, will run again" in found["said"]
    assert found["trials"] == len(runs_of(found)) and found["gpu_hours"] > 0
    assert Path(found["picture"]).read_bytes().startswith(b"\x89PNG")
    text = file.read_text()
    assert "# + micro batch 4: +25" in text and kept["runs"][0] in text and "Not kept: " in text
    best = prepare(str(file))
    assert best.layout.micro_batch == 4 and best.args.integer("train_iters", 0) == 20, "a recipe of full length"
    # Once more: everything is known.
    again = tune("--trials", "7")
    assert again["rows"] == found["rows"] and len(runs_of(again)) == len(runs_of(found))
    # By this name it is another search.
    other = tune("--study", Path(found["folder"]).name, "--set", "model.num_layers=4", expect=2)
    assert "is a search from" in other["said"] and "choose another name" in other["said"]
    # A run may be named instead of its recipe, unless other users can change it.
    trial = runs_of(found)[0].path
    command = ["tune", str(trial), "--backend", "local", "--run-root", str(home / "runs"), "--dry-run"]
    assert run(command) == 0
    trial.chmod(0o777)
    assert run(command) == 1
    assert "other users could change it" in capsys.readouterr().err


@pytest.mark.train
def test_the_budget_holds(tune: Any, tmp_path: Path) -> None:
    nothing = tune("--budget", "0.0001", expect=1)
    assert "at most 0.00 GPU-hours" in nothing["said"] and nothing["trials"] == 0
    # Room for a trial as it is expected, and not for one that does not start: it is ended at the budget.
    held = ["--set", f"env.GATE={tmp_path / 'gate'}", "--set", "env.GATE_FOR=2 1"]
    ended = tune("--budget", "0.0004", *held, expect=1)
    assert "the budget was used up during the trial of the unchanged recipe" in ended["ended"]
    assert runs_of(ended)[0].manifest()["cancelled"]


@pytest.mark.train
def test_a_trial_that_the_clock_cuts_off_is_run_again(tune: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    file = tmp_path / "best.yaml"
    held = ["--set", f"env.GATE={gate}", "--set", "env.GATE_FOR=4 1", "--knobs", "micro-batch", "--write", str(file)]
    first = tune(*held, "--trials", "1")
    before = file.read_text()
    minutes = (first["gpu_hours"] * 3600 + 15) / 60
    cut = tune(*held, "--minutes", f"{minutes:.2f}")
    assert "the time limit was reached during the trial of micro batch 4" in cut["ended"] and cut["trials"] == 1
    gate.touch()
    second = tune(*held, "--trials", "2")
    assert second["changes"] == ["micro batch 4"]
    jobs = {folder.run_id: len(folder.manifest()["jobs"]) for folder in runs_of(second)}
    assert sorted(jobs.values()) == [1, 2], "only the one that was cut off was submitted twice"
    assert file.read_text() != before, "a search replaces what it wrote itself"
    file.write_text(f"# mine now\n{file.read_text()}")
    assert "exists" in tune(*held, expect=2)["said"] and file.read_text().startswith("# mine now")


@pytest.mark.train
def test_a_killed_command_goes_on_where_it_was(tune: Any, recipe: str, home: Path, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    held = ["--set", f"env.GATE={gate}", "--set", "env.GATE_FOR=4 1", "--knobs", "micro-batch"]
    words = ["tune", recipe, "--backend", "local", "--run-root", str(home / "runs"), "--trials", "2", *held]
    command = subprocess.Popen([sys.executable, "-m", "fp8launch", *words], env={**os.environ, "HOME": str(home)})
    try:
        # The second trial has started and waits.
        wait_for(lambda: list(home.glob("runs/*/small-4-*/logs/*.log")), 300)
    finally:
        command.send_signal(signal.SIGKILL)
        command.wait()
    gate.touch()
    found = tune(*held, "--trials", "2")
    assert found["changes"] == ["micro batch 4"] and found["trials"] == 2
    assert [len(folder.manifest()["jobs"]) for folder in runs_of(found)] == [1, 1], "nothing runs twice"


@pytest.mark.train
def test_ctrl_c_ends_the_trial_and_keeps_what_was_measured(tune: Any, recipe: str, home: Path, tmp_path: Path) -> None:
    gate, file = tmp_path / "gate", tmp_path / "best.yaml"
    held = ["--set", f"env.GATE={gate}", "--set", "env.GATE_FOR=4 1", "--knobs", "micro-batch", "--trials", "2"]
    words = ["tune", recipe, "--backend", "local", "--run-root", str(home / "runs"), "--json", *held]
    command = subprocess.Popen(
        [sys.executable, "-m", "fp8launch", *words, "--write", str(file)],
        env={**os.environ, "HOME": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        # The second trial has started and waits.
        wait_for(lambda: list(home.glob("runs/*/small-4-*/logs/*.log")), 300)
    finally:
        # As a terminal does it: to the command and all that it has started.
        os.killpg(command.pid, signal.SIGINT)
        out, err = command.communicate()
    assert command.returncode == 130 and "Traceback" not in err, err
    first = json.loads(out)
    assert first["ended"] == "interrupted by Ctrl-C during the trial of micro batch 4" and first["trials"] == 1
    assert row(first, recipe)["tokens_per_s_per_gpu"] > 0, "what was measured is kept"
    assert not file.exists()
    runs = runs_of(first)
    left = [
        Path(f"/proc/{pid}/cmdline").read_bytes() for one in runs for pid in processes_with(LOCAL_RUN, str(one.path))
    ]
    assert not left, f"nothing runs on: {err}"
    assert [bool(one.manifest().get("cancelled")) for one in runs].count(True) == 1
    gate.touch()
    found = tune(*held, "--write", str(file))
    assert found["changes"] == ["micro batch 4"] and found["trials"] == 2 and file.exists()
    jobs = sorted(len(one.manifest()["jobs"]) for one in runs_of(found))
    assert jobs == [1, 2], "only the trial that was interrupted ran again"


def test_the_time_limit_of_the_command_is_that_of_its_trials(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was accepted and had no effect."""
    assert run(["tune", "tiny_cpu", "--backend", "local", "--dry-run", "--time", "soon"]) == 2
    assert "resources.time" in capsys.readouterr().err


@pytest.mark.needs_plugin("accelerate")
def test_what_is_not_predicted_has_no_prediction(capsys: pytest.CaptureFixture[str], home: object) -> None:
    """Accelerate's speed is not predicted, and its norms are not Transformer Engine's."""
    assert run(["tune", "peers/zero_torchao", "--dry-run", "--backend", "local"]) == 0
    shown = capsys.readouterr().out
    assert "micro-batch" in shown and "%" not in shown and "norms" not in shown and "sm-margin" not in shown


def test_changes_that_cannot_fit_alone_are_named_as_such(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Micro batches that the check refuses stood among the changes to try."""
    text = said(capsys, "llama8b_fp8", "--knobs", "micro-batch,attention", "--dry-run", expect=0)
    assert "only together with changes that save memory: micro batch 4: predicted to need 173.9 GiB, of 79.6" in text
    assert not any(line.startswith("micro batch 4") for line in text.splitlines())
    assert "1 change to try" in text


def test_a_dry_run_of_a_search_holds_its_changes(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["tune", "llama8b_fp8_h200x2", "--numerics", "allow", "--dry-run", "--json"]) == 0
    (start,) = json.loads(capsys.readouterr().out)
    changes = {one["change"]: one for one in start["changes"]}
    assert changes["delayed scaling"]["overrides"] == {"precision.recipe": "delayed"}
    gains = [one["predicted"] or 1 for one in start["changes"]]
    assert gains == sorted(gains, reverse=True) and gains[0] > 1
    assert any("mxfp8 runs only on" in one["why"] for one in start["refused"])


def test_predictions_use_the_rates_of_the_cluster(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """FP8 takes twice as long on these GPUs. `tune` predicted the same as on all others."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = tmp_path / "config" / "fp8launch" / "clusters" / "site.yaml"
    profile.parent.mkdir(parents=True)
    profile.write_text("description: H200\n")
    words = ["tune", "llama8b_fp8_h200x2", "--knobs", "te-loss", "--numerics", "allow", "--cluster", "site"]
    gains, seconds, calibrations = [], [], []
    for rate in (None, 0.5 * reference_rates()["h200", "gemm fp8", "8B layer"]):
        if rate is not None:
            row = {"kernel": "gemm fp8", "shape": "8B layer", "rate": rate}
            found = {"format": 1, "device": "NVIDIA H200", "date": "2026-11-26", "rates": [row]}
            keep(json.dumps(found).encode(), "file", Cluster(name="site"))
        assert run([*words, "--dry-run", "--json"]) == 0
        out, said = capsys.readouterr()
        (start,) = json.loads(out)
        gains.append(start["changes"][0]["predicted"])
        seconds.append(int(re.findall(r"about (\d+) s each", said)[0]))
        calibrations.append(start["basis"]["calibration"])
    assert 1 < gains[1] < gains[0] and seconds[1] > seconds[0]
    assert calibrations[0] is None and calibrations[1]["cluster"] == "site"
    assert "Predicted with the rates of cluster site, measured on NVIDIA H200 on 2026-11-26." in said.splitlines()


@pytest.mark.parametrize(
    ("overrides", "ratio"),
    [
        ((), 1.17),
        (
            (
                *("megatron.experimental_attention_variant=gated_delta_net", "megatron.linear_attention_freq=2"),
                *("megatron.cuda_graph_impl=none", "megatron.cuda_graph_modules=null"),
            ),
            1.15,
        ),
    ],
    ids=["predicted", "not predicted"],
)
def test_grouped_gemms_are_predicted_or_taken_from_a_measurement(
    overrides: tuple[str, ...], ratio: float, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(__file__).resolve().parents[3] / "benchmarks/h200/recipes/qwen3_30b_6layers_x1_tuned.yaml"
    overrides = (*overrides, "env.NVTE_USE_CUTLASS_GROUPED_GEMM=null")
    words = [word for text in overrides for word in ("--set", text)]
    assert run(["tune", str(recipe), *words, "--knobs", "grouped-gemm", "--dry-run", "--json"]) == 0
    (start,) = json.loads(capsys.readouterr().out)
    (change,) = start["changes"]
    assert change["predicted"] == pytest.approx(ratio, abs=0.01)
