"""Test the check as a whole: layers, silenced rules, the place of problems, and a missing Megatron."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sets import BF16, DELAYED, MXFP8, RULES, TP2, Set

from fp8launch.check.checker import LAYERS, CheckResult, check, check_all
from fp8launch.diagnostics import UserError
from fp8launch.plugins.validators import megatron_core
from fp8launch.plugins.validators.megatron_core import NoMegatron, cache_folder, megatron_for

CODE = "delayed-short-history"
SHORT = {**DELAYED, "fp8_amax_history_len": None, "fp8_amax_compute_algo": None}


def checked(case: Set, folder: Path) -> CheckResult:
    return check(case.prepare(folder), layers=RULES)


# --- silence


def test_a_silenced_warning_is_kept_with_its_reason(tmp_path: Path) -> None:
    assert [p.code for p in checked(Set(SHORT), tmp_path).problems] == [CODE]
    result = checked(Set(SHORT, more={"silence": {CODE: "we compare with an old run"}}), tmp_path)
    assert result.problems == ()
    assert result.ok
    [silenced] = result.as_json()["silenced"]
    assert (silenced["code"], silenced["reason"]) == (CODE, "we compare with an old run")
    assert silenced["where"]


def test_an_error_cannot_be_silenced(tmp_path: Path) -> None:
    result = checked(Set(MXFP8, more={"silence": {"mxfp8-needs-blackwell": "I know better"}}), tmp_path)
    assert {p.code for p in result.problems} == {"mxfp8-needs-blackwell", "cannot-silence"}
    assert not result.ok


def test_an_unknown_code_is_named_with_its_nearest(tmp_path: Path) -> None:
    result = checked(Set(more={"silence": {"delayed-short-histroy": "typo"}}), tmp_path)
    [problem] = result.problems
    assert (problem.severity, problem.code) == ("error", "unknown-code")
    assert problem.fix == f"did you mean '{CODE}'?"
    assert problem.where is not None and ".yaml:" in problem.where


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_a_silence_needs_a_reason(reason: object, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="silence"):
        Set(SHORT, more={"silence": {CODE: reason}}).prepare(tmp_path)


# --- Megatron's verdict in the user's terms


@pytest.mark.needs_plugin("validators")
def test_megatron_points_at_the_line_that_it_speaks_of(tmp_path: Path) -> None:
    [problem] = checked(Set({"max_position_embeddings": 4096}), tmp_path).problems
    path, _, line = str(problem.where).rpartition(":")
    assert "max_position_embeddings: 4096" in Path(path).read_text().splitlines()[int(line) - 1]
    assert "max_position_embeddings (4096)" in problem.message
    assert problem.fix == "set `model: {max_position_embeddings: 8192}`, or lower batch.sequence"


@pytest.mark.needs_plugin("validators")
def test_a_misleading_message_is_put_right(tmp_path: Path) -> None:
    [problem] = checked(Set({"eval_global_batch_size": 12}), tmp_path).problems
    assert "eval_global_batch_size" in str(problem.fix)
    assert "Megatron rejects" not in problem.message


def test_a_rule_speaks_instead_of_megatron(tmp_path: Path) -> None:
    [problem] = checked(Set(TP2, env={}), tmp_path).problems
    assert problem.code == "max-connections-not-1"
    assert "not set" in problem.message


# --- layers and targets


@pytest.mark.needs_plugin("validators")
def test_every_layer_says_whether_it_looked(tmp_path: Path) -> None:
    layers = check(Set(BF16).prepare(tmp_path)).layers
    assert tuple(layers) == LAYERS
    assert {name: state for name, state in layers.items() if state != "ran"} == {}
    some = checked(Set(), tmp_path).layers
    assert some["machine"] == "not run: not requested"


@pytest.mark.needs_plugin("validators")
def test_runs_of_several_versions_are_checked_in_one_call(tmp_path: Path) -> None:
    cases = {
        "new": Set(),
        "old": Set(software={"megatron": "0.17"}),
        "old and bad": Set({"min_lr": 1.0}, software={"megatron": "0.17"}),
        "new and bad": Set({"min_lr": 1.0}),
    }
    found = check_all([case.prepare(tmp_path, name) for name, case in cases.items()], layers=RULES)
    assert [result.ok for result in found] == [True, True, False, False]


def test_the_clusters_environment_counts_and_the_recipe_overrides_it(tmp_path: Path) -> None:
    from fp8launch.cluster.profile import Cluster

    site = Cluster(env={"CUDA_DEVICE_MAX_CONNECTIONS": 1})
    assert check(Set(TP2, env={}).prepare(tmp_path), site, layers=RULES).ok
    assert not check(Set(TP2, env={"CUDA_DEVICE_MAX_CONNECTIONS": 8}).prepare(tmp_path), site, layers=RULES).ok


# --- where Megatron comes from


@pytest.fixture
def no_megatron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("FP8LAUNCH_MEGATRON", raising=False)
    monkeypatch.setattr("fp8launch.plugins.validators.megatron_core._installed", lambda: iter(()))
    yield cache_folder()


@pytest.mark.needs_plugin("validators")
def test_offline_without_a_wheel_the_other_layers_still_look(
    no_megatron: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FP8LAUNCH_OFFLINE", "1")
    result = checked(Set(MXFP8), tmp_path)
    assert result.layers["megatron"].startswith("not run: no megatron-core 0.19")
    assert "FP8LAUNCH_OFFLINE" in result.layers["megatron"]
    assert [p.code for p in result.problems] == ["mxfp8-needs-blackwell"]
    assert checked(Set(), tmp_path).ok


def test_a_download_that_fails_is_no_error_and_not_tried_again_at_once(
    no_megatron: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FP8LAUNCH_OFFLINE", raising=False)
    # pip without any index.
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    told: list[str] = []
    with pytest.raises(NoMegatron, match="could not be fetched"):
        megatron_for("0.19", told.append)
    assert len(told) == 1 and "megatron-core 0.19" in told[0]
    begin = time.perf_counter()
    with pytest.raises(NoMegatron, match="next attempt in an hour"):
        megatron_for("0.19", told.append)
    assert time.perf_counter() - begin < 0.5
    assert len(told) == 1
    # After an hour it is.
    [marker] = no_megatron.glob(".failed-*")
    os.utime(marker, (0, 0))
    with pytest.raises(NoMegatron, match=r"could not be fetched: (?!.*next attempt)"):
        megatron_for("0.19", told.append)
    assert len(told) == 2


def test_a_wheel_is_fetched_by_one_of_many(no_megatron: Path, tmp_path: Path) -> None:
    """Two checks at once: one fetches, from a folder of wheels here, the other finds what it brought."""
    source = tmp_path / "wheels"
    source.mkdir()
    name = "megatron_core-0.19.2-cp312-cp312-manylinux_2_24_x86_64.manylinux_2_28_x86_64.whl"
    _write_wheel(source / name)
    environment = {
        **os.environ, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(source), "PIP_CONFIG_FILE": os.devnull,
        "PYTHONPATH": str(Path(megatron_core.__file__).parents[3]), "FP8LAUNCH_OFFLINE": "0",
    }  # fmt: skip
    digest = hashlib.sha256((source / name).read_bytes()).hexdigest()
    code = (
        "from fp8launch.plugins.validators import megatron_core; megatron_core._installed = lambda: iter(())\n"
        f"megatron_core.WHEELS = {{'0.19.2': '{digest}'}}\n"
        "print(megatron_core.megatron_for('0.19', lambda m: print('SAID', m)))"
    )
    both = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0] for process in both]
    assert all(process.returncode == 0 for process in both)
    assert all(text.strip().endswith(name) for text in said)
    assert sum("SAID" in text for text in said) == 1
    assert [path.name for path in no_megatron.glob("*.whl")] == [name]
    assert not list(no_megatron.glob(".fetch-*"))


def _write_wheel(path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("megatron/core/package_info.py", "MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
        archive.writestr("megatron/training/arguments.py", "")
        info = "megatron_core-0.19.2.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.19.2\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
