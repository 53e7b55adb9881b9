"""Which recipe of the pack has which known bug, in the release that its image holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from advisory_sets import problems
from pack_support import HEADLINE, PACK, PEERS, STUDIES, case, name_of, runs

from fp8launch.check.resolved_run import resolve_run

# Each recipe says in a comment why it keeps the setting.
EXPECTED: dict[str, set[str]] = {
    "deepseek_v3_tensorwise_h100": {"moe-tp-ep-norm"},
    "gpt_oss_120b_mxfp8_gb200": {"opfuser-fc2-bias"},
    "llama405b_mxfp8_gb200": {"mxfp8-paramgather-forced"},
    "llama70b_mxfp8_b200": {"mxfp8-paramgather-forced"},
    "llama70b_mxfp8_gb200": {"mxfp8-paramgather-forced"},
    "llama8b_mxfp8_b200": {"mxfp8-paramgather-forced"},
    "qwen3_235b_a22b_mxfp8_gb200": {"global-aux-dp"},
    "qwen3_235b_a22b_tensorwise_h100": {"global-aux-dp", "moe-tp-ep-norm"},
    "qwen3_30b_a3b_mxfp8_b300": {"global-aux-dp"},
    "qwen3_30b_a3b_mxfp8_gb200": {"global-aux-dp"},
    "qwen3_30b_a3b_tensorwise_h100": {"global-aux-dp"},
}


def advisories(file: Path) -> set[str]:
    parts = [part for run in runs(file) for part in run.parts]
    return {problem.code for part in parts for problem in problems(resolve_run(part))}


@pytest.mark.parametrize(
    "file",
    [case(file) for file in (*HEADLINE, *STUDIES, *PEERS)],
    ids=name_of,
)
def test_a_recipe_has_these_known_bugs(file: Path) -> None:
    assert advisories(file) == EXPECTED.get(name_of(file), set())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_explains_each(name: str) -> None:
    files = runs(PACK / f"{name}.yaml")[0].loaded.files
    text = " ".join(" ".join(file.read_text(encoding="utf-8") for file in files).split())
    assert all(f"advisory {code}" in text.replace("# ", "") for code in EXPECTED[name])
