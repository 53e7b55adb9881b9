"""The committed flag schemas: looked up by any spelling, loaded fast, and the same as Megatron's own parser."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fp8launch.diagnostics import UserError
from fp8launch.megatron import schema as schemas
from fp8launch.megatron.schema import load_schema, other_names, supported_versions, versions_with

TOOL = Path(__file__).resolve().parents[2] / "tools" / "flag_schemas.py"


def test_a_flag_is_found_by_any_spelling() -> None:
    schema = load_schema("0.19")
    flag = schema.find("fp8_format")
    assert flag is not None
    assert flag.dest == "fp8"
    assert flag.choices == ("e4m3", "hybrid")
    assert all(schema.find(name) is flag for name in ("fp8-format", "--fp8-format", "--fp8_format"))
    assert schema.find("disable_fp8_wgrad") is schema.find("--no-fp8-wgrad")
    assert schema.find("fp8") is None


@pytest.mark.parametrize("version", ["0.19", "0.19.2", "v0.19.0", "0.19.0rc1"])
def test_a_patch_release_has_the_schema_of_its_minor(version: str) -> None:
    assert load_schema(version).minor == "0.19"


@pytest.mark.parametrize("version", ["0.16", "0.190", "1.19", "", "newest", "0"])
def test_an_unknown_version_names_the_supported_ones(version: str) -> None:
    with pytest.raises(UserError, match=r"0\.17, 0\.18, 0\.19"):
        load_schema(version)


def test_history() -> None:
    assert versions_with("use-legacy-models") == ("0.17",)
    assert versions_with("cuda_graph_modules") == ("0.18", "0.19")
    assert [flag.options[0] for flag in other_names("cuda_graph_modules", load_schema("0.17"))] == [
        "--cuda-graph-scope"
    ]
    assert [flag.options[0] for flag in other_names("cuda_graph_scope", load_schema("0.19"))] == [
        "--cuda-graph-modules"
    ]


@pytest.mark.parametrize("old, new", schemas.RENAMED.items())
def test_a_renamed_flag_leads_to_one_that_exists(old: str, new: str) -> None:
    assert versions_with(new)


def test_kitchen_flags_say_what_they_need() -> None:
    flag = load_schema("0.19").find("kitchen_config_file")
    assert flag is not None
    assert flag.needs == "nvidia-kitchen"


def test_loading_takes_milliseconds() -> None:
    schemas._load.cache_clear()
    begin = time.process_time()
    load_schema("0.19").find("fp8_format")
    assert time.process_time() - begin < 0.015


@pytest.mark.parametrize("version", supported_versions())
def test_no_help_text_is_committed(version: str) -> None:
    data = json.loads(schemas.schema_text(version))
    allowed = {
        "flags",
        "dest",
        "action",
        "type",
        "choices",
        "nargs",
        "default",
        "required",
        "hidden",
        "deprecated",
        "needs",
    }
    assert {key for flag in data["flags"] for key in flag} <= allowed


def test_the_committed_schema_is_what_megatron_has(minor: str, site: Path) -> None:
    spec = importlib.util.spec_from_file_location("flag_schemas", TOOL)
    assert spec and spec.loader
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(TOOL), "--describe", str(site)], capture_output=True, text=True, check=True
    )
    described = json.loads(done.stdout.splitlines()[-1])
    assert tool.schema_text(described) == schemas.schema_text(minor)
