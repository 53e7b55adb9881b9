"""tools/intake.py: what it prints of a release, without a download."""

from __future__ import annotations

import importlib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"

pytestmark = [
    pytest.mark.needs_plugin("bridge"),
    pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"),
]


@pytest.fixture
def intake(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("intake")


def schema(**defaults: object) -> dict[str, Any]:
    flags = [{"flags": [f"--{name.replace('_', '-')}"], "default": value} for name, value in defaults.items()]
    return {"flags": flags, "added_by_parse_args": [], "config_only": {}}


def test_changed_defaults_of_numerics_are_marked(intake: Any, capsys: pytest.CaptureFixture[str]) -> None:
    intake.compare_flags(
        schema(a=1, gone=1, adam_eps=1, port=1), schema(a=1, new=1, adam_eps=2, port=2), intake.Report()
    )
    said = capsys.readouterr().out
    assert "new flags: 1\n  --new\n" in said and "removed flags: 1\n  --gone\n" in said
    assert "--adam-eps: 1 -> 2 (may change numerics)\n" in said and "--port: 1 -> 2\n" in said


def test_changes_of_a_recipe_are_listed_by_field(intake: Any) -> None:
    before = {"release": "1", "layout": {"tp": 1, "pp": 2}, "gpus": 8}
    after = {"release": "2", "layout": {"tp": 1, "pp": 4, "vp": 2}, "gpus": 8}
    assert intake.changed_fields(before, after) == ["layout.pp: 2 -> 4", "layout.vp: None -> 2"]


def test_a_wheel_with_another_hash_is_refused(
    intake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    index = tmp_path / "index"
    index.mkdir()
    with zipfile.ZipFile(index / "nemo_run-9.9-py3-none-any.whl", "w") as wheel:
        info = "nemo_run-9.9.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nemo-run\nVersion: 9.9\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    (tmp_path / "first").mkdir()
    assert intake.download("nemo-run", "9.9", tmp_path / "first", intake.Report()).name.startswith("nemo_run-9.9")
    assert "not recorded before" in capsys.readouterr().out
    monkeypatch.setattr(intake, "recorded_hash", lambda package, version: "0" * 64)
    (tmp_path / "again").mkdir()
    with pytest.raises(SystemExit) as refused:
        intake.download("nemo-run", "9.9", tmp_path / "again", intake.Report())
    assert refused.value.code == 3 and f"but {'0' * 64} is recorded" in capsys.readouterr().err
