"""The table of rules: every name in it is known, and a condition about a value that is not set does not hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sets import Set

from fp8launch.check.resolved_run import resolve_run
from fp8launch.check.rules.table import Case, Names, cases_of, names_in, table
from fp8launch.megatron.schema import value_of


def conditions() -> Iterator[str]:
    yield from table().names.values()
    for entry in table().rules.values():
        yield from (case.when for case in cases_of(entry))
    yield from (row["when"] for row in table().without_effect)
    yield from (row["when"] for row in table().phases.values() if "when" in row)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Names:
    return Names(resolve_run(Set().prepare(tmp_path_factory.mktemp("run"))))


def test_every_name_is_known(names: Names) -> None:
    for condition in conditions():
        for name in names_in(condition):
            names[name]  # raises KeyError for an argument that no supported Megatron has


def test_messages_and_places_name_what_exists(names: Names) -> None:
    for code, entry in table().rules.items():
        for case in cases_of(entry):
            for name in re.findall(r"\{(\w+)\}", f"{case.message} {case.fix}"):
                if name == "flag":
                    assert case.flags, code
                else:
                    names[name]
            for name in (*case.where, *case.flags):
                if name not in ("flag", "gpu") and not name.isupper() and "." not in name:
                    value_of({}, name)


def test_phases_compare_arguments() -> None:
    for row in table().phases.values():
        for name in row["compares"]:
            value_of({}, name)


def test_every_shared_condition_is_used() -> None:
    used = {name for condition in conditions() for name in names_in(condition)}
    assert set(table().names) <= used


def test_a_key_that_no_rule_has_is_refused() -> None:
    with pytest.raises(TypeError, match="fixes"):
        cases_of({"when": "fp8", "message": "...", "fixes": "..."})


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ("loss_scale > 1", False),
        ("loss_scale <= 1", False),
        ("'attn' in offload_modules", False),
        ("loss_scale is None", True),
        ("te >= (2, 20) and cuda < (13, 1)", True),
        ("fp8_recipe == 'tensorwise' and not fp4", True),
        ("CUDA_DEVICE_MAX_CONNECTIONS == '1'", True),
        ("NCCL_DEBUG is None", True),
    ],
)
def test_conditions(condition: str, holds: bool, names: Names) -> None:
    assert names.satisfy(condition) == holds


def test_a_misspelt_name_is_no_condition(names: Names) -> None:
    with pytest.raises(NameError, match="fp8_recipee"):
        names.satisfy("fp8_recipee == 'tensorwise'")


def test_the_place_is_the_first_setting_of_the_recipe(tmp_path: Path) -> None:
    run = resolve_run(Set({"qk_layernorm": True, "ffn_hidden_size": 14344}).prepare(tmp_path))
    case = Case("qk_l2_norm is None or qk_layernorm and ffn_hidden_size", "{ffn_hidden_size} by {precision}", "{tp}")
    finding = case.finding(run)
    assert finding is not None
    assert (finding.message, finding.fix) == ("14344 by tensorwise", "1")
    path, _, line = finding.where.rpartition(":")
    assert "qk_layernorm" in Path(path).read_text().splitlines()[int(line) - 1]
