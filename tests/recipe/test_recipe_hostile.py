"""Whatever the bytes: a recipe, or problems with exit code 2. Never another exception."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import only, refused

from fp8launch.diagnostics import ANSWER_IS_NO, BAD_INPUT, UserError
from fp8launch.engines.megatron_lm.engine import MegatronLM
from fp8launch.engines.megatron_lm.layout import layout
from fp8launch.recipe.load import load_recipe

translate = MegatronLM().translate

SECTIONS = (
    "extends", "name", "description", "model", "precision", "parallel", "batch", "train", "optimizer", "data",
    "checkpoint", "resources", "container", "launch", "software", "env", "secrets", "megatron", "notes",
)  # fmt: skip
FIELDS = (
    "recipe", "format", "param_gather", "bf16_layers", "start", "tp", "pp", "vp", "cp", "fsdp", "sequence", "micro",
    "global", "lr", "iterations", "kind", "blend", "tokenizer", "type", "nodes", "gpus_per_node", "gpu", "time",
    "image", "mounts", "mode", "script", "megatron", "num_layers", "A", "[key]", "str", "0",
)  # fmt: skip
WORDS = (
    "bf16", "tensorwise", "hybrid", "mock", "indexed", "auto", "models/tiny", "h100", "0.19", "01:00:00", "torchrun",
)  # fmt: skip

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)
trees = st.dictionaries(st.sampled_from(SECTIONS) | st.text(max_size=5), values, max_size=6)
quickly = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def load(path: Path | str, *overrides: str) -> Any:
    """The recipe, translated as far as it goes; None when there are problems, each of which can be shown."""
    try:
        loaded = load_recipe(str(path), overrides)
    except UserError as exc:
        assert exc.exit_code == BAD_INPUT
        assert exc.problems
        json.dumps([p.as_json() for p in exc.problems])
        for problem in exc.problems:
            str(problem).encode()
        return None
    try:
        args = translate(loaded)
        assert all(isinstance(word, str) and "\0" not in word for word in args.argv)
        layout(args, loaded)
    except UserError as exc:
        assert exc.exit_code in (ANSWER_IS_NO, BAD_INPUT)
        assert exc.problems
    return loaded


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "r.yaml"


@quickly
@given(content=st.binary(max_size=200))
@example(content=b"\xff\xfe\x00")
@example(content=b"a: *a\n")
@example(content=b"&a : *a")
@example(content=b"? ? ? x")
@example(content=b"%YAML 9.9\n---\na: 1")
@example(content=b"%TAG ! x\n--- !a b")
@example(content=b"name: \xe2\x80\xa8")
def test_any_bytes(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    load(file)


@quickly
@given(content=st.text(alphabet="abc:-[]{}&*!|>'\"%#?,~<@` \n\t01.e", max_size=60))
def test_any_text_of_yaml_marks(file: Path, content: str) -> None:
    file.write_text(content, encoding="utf-8")
    load(file)


@quickly
@given(tree=trees)
@example(tree={"name": "r", "megatron": {"tensor_model_parallel_size": 0}})
@example(tree={"name": "r", "megatron": {"micro_batch_size": 0}})
@example(tree={"name": "r", "megatron": {"global_batch_size": -1, "pipeline_model_parallel_size": -2}})
@example(tree={"name": "r", "resources": {"nodes": 10**30}})
@example(tree={"name": "r", "software": {"megatron": "0.19.99999999999999999999999"}})
def test_any_tree(file: Path, tree: dict[str, Any]) -> None:
    file.write_text(yaml.safe_dump(tree, allow_unicode=True), encoding="utf-8", errors="surrogatepass")
    load(file)


@quickly
@given(path=st.sampled_from([f"{s}.{f}" for s in SECTIONS[3:] for f in FIELDS]), value=values)
def test_any_value_at_any_place_of_a_good_recipe(path: str, value: Any) -> None:
    load("tiny_cpu", f"{path}={json.dumps(value)}")


@quickly
@given(override=st.text(max_size=30))
@example(override="a=\ud800")
@example(override="precision.recipe=\x00")
@example(override=f"precision.recipe={'x' * 5000}")
def test_any_override(override: str) -> None:
    load("tiny_cpu", override)


@quickly
@given(name=st.text(max_size=40))
@example(name="x" * 10_000)
@example(name="\0")
@example(name="\udcff")
@example(name="/dev/null")
@example(name="/proc/self/mem")
def test_any_name_of_a_recipe(name: str) -> None:
    load(name)


@pytest.mark.parametrize(
    "text",
    [
        "notes: [&a '{long}', {aliases}]",
        "env: {{A: &a '{long}', B: [{aliases}]}}",
        "notes: &a [x, {{'{long:.900}': '{long}'}}]\nmegatron: {{x: [{aliases}]}}",
        "notes: [&a [&b '{long}', *b, *b, *b], {aliases}]",
    ],
)
def test_a_long_text_that_is_repeated_is_refused(write: Callable[[str, str], str], text: str) -> None:
    """One text of a megabyte and thousands of aliases for it would become gigabytes in the run's files."""
    full = text.format(long="x" * 900_000, aliases=", ".join(["*a"] * 4000))
    before = time.process_time()
    problem = only(refused(load_recipe, write("r.yaml", f"name: r\n{full}\n")))
    assert problem.code == "yaml-too-large"
    assert time.process_time() - before < 5
