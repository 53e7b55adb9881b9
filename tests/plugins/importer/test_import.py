"""Arguments become a recipe that gives the same arguments again, for published sets and for any flags at all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from flag_values import SIDE_EFFECTS, flag_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from published import published_arguments
from support import as_megatron_parses

from fp8launch.diagnostics import Problem, UserError
from fp8launch.engines.megatron_lm.engine import MegatronLM
from fp8launch.megatron.arguments import FlagValue
from fp8launch.megatron.flag_map import CHOICES, FIELDS
from fp8launch.megatron.flag_problems import emit_argv
from fp8launch.megatron.schema import FlagSchema, load_schema, supported_versions
from fp8launch.plugins.importer.argv import parse_argv
from fp8launch.plugins.importer.from_argv import effective_values, import_text
from fp8launch.plugins.importer.from_values import recipe_from_values
from fp8launch.plugins.importer.shell_interpreter import read_list
from fp8launch.recipe.load import load_recipe
from fp8launch.recipe.write_yaml import write_yaml
from fp8launch.recipe.yaml_source import parse_yaml

DATA = Path(__file__).with_name("data")
PUBLISHED = published_arguments()
SCHEMA = load_schema("0.19")


def arguments(path: Path) -> list[str]:
    return read_list(path.read_text(encoding="utf-8"), path.name)[0]


def back(text: str, folder: Path, schema: FlagSchema = SCHEMA) -> dict[str, FlagValue]:
    """The flags of a recipe's YAML, by way of the file and the argument list."""
    file = folder / "imported.yaml"
    file.write_text(text, encoding="utf-8")
    values, problems = parse_argv(MegatronLM().translate(load_recipe(str(file))).argv, schema)
    assert problems == []
    return values


def recipe_from_argv(argv: Sequence[str], schema: FlagSchema) -> tuple[dict[str, Any], list[Problem]]:
    """Return the recipe that `import` makes of an argument list, and what it reports."""
    values, problems = effective_values(argv, schema)
    return recipe_from_values(values, schema), problems


def section(argv: Sequence[str], name: str) -> Any:
    return recipe_from_argv(argv, SCHEMA)[0].get(name)


# --- round trips


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_published_arguments_come_back_as_they_were(path: Path, tmp_path: Path) -> None:
    text, problems = import_text(path.read_text(encoding="utf-8"), path.name, None)
    assert problems == []
    values, refused = parse_argv(arguments(path), SCHEMA)
    assert refused == []
    assert back(text, tmp_path) == values


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: path.stem)
def test_what_sections_can_say_is_said_by_sections(path: Path) -> None:
    recipe, _ = recipe_from_argv(arguments(path), SCHEMA)
    of_sections = {flag for fields in FIELDS.values() for flag in fields.values()}
    of_sections |= {flag for choices in CHOICES.values() for flags in choices.values() for flag in flags}
    of_sections |= {"bf16", "fp8_format", "fp8_recipe", "fp8_param_gather", "mock_data", "sequence_parallel"}
    # A checkpoint format belongs to FSDP's choice only when FSDP is chosen.
    assert not (of_sections - {"ckpt_format"}) & set(recipe["megatron"])
    assert re.search("_fp8_|nvfp4", path.stem) is None or recipe["precision"]["recipe"] != "bf16"


def test_published_sets_cover_every_precision_and_start_with_their_source() -> None:
    recipes = {section(arguments(path), "precision")["recipe"] for path in PUBLISHED}
    assert recipes == {"bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"}
    for path in PUBLISHED:
        assert re.match(r"# .* on \d+ (H100|H200|B200)\. Source: .+\.$", path.read_text().splitlines()[0]), path


_OF_SECTIONS = [
    *(flag for fields in FIELDS.values() for flag in fields.values()),
    *(flag for choices in CHOICES.values() for flags in choices.values() for flag in flags),
    *("bf16", "fp16", "fp8_format", "fp8_recipe", "fp8_param_gather", "fp4_format", "fp4_recipe", "fp4_param_gather"),
    *("reuse_grad_buf_for_mxfp8_param_ag", "first_last_layers_bf16", "num_layers_at_start_in_bf16"),
    *("use_precision_aware_optimizer", "mock_data", "data_path", "max_position_embeddings", "sequence_parallel"),
]


@st.composite
def flags_and_values(draw: st.DrawFn, schema: FlagSchema) -> dict[str, FlagValue]:
    """Flags of which many belong to a section, with values that need not go together."""
    anything = [f.name for f in schema.flags() if f.name not in SIDE_EFFECTS and f.needs is None]
    known = [name for name in _OF_SECTIONS if schema.find(name)]
    names = draw(st.lists(st.sampled_from(known), max_size=20, unique=True))
    names += draw(st.lists(st.sampled_from(anything), max_size=10, unique=True))
    found = [schema.find(name) for name in dict.fromkeys(names)]
    return {flag.name: draw(flag_values(flag)) for flag in found if flag}


@pytest.mark.parametrize("version", supported_versions())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_arguments_mean_the_same_after_import(version: str, data: st.DataObject, tmp_path: Path) -> None:
    schema = load_schema(version)
    argv = emit_argv(data.draw(flags_and_values(schema).filter(bool)), schema)
    values, _ = parse_argv(argv, schema)
    for kind in ("fp8", "fp4"):
        # Megatron does not look at a recipe without a format; the recipe file must not state it.
        if f"{kind}_format" not in values:
            values.pop(f"{kind}_recipe", None)
    if "vocab_file" in values:
        # The recipe states what pretrain_gpt.py fills in.
        values.setdefault("tokenizer_type", "GPT2BPETokenizer")
    text, problems = import_text(json.dumps(argv), "arguments", version)
    assert [p for p in problems if p.severity == "error"] == []
    again = back(text, tmp_path, schema)
    assert as_megatron_parses(again, schema) == as_megatron_parses(values, schema)


# --- sections


def test_precision_says_what_megatron_would_do_without_a_recipe() -> None:
    recipe, problems = recipe_from_argv(["--bf16", "--fp8-format", "hybrid"], SCHEMA)
    assert recipe["precision"] == {"recipe": "delayed", "format": "hybrid"}
    assert [p.code for p in problems] == ["format-without-recipe"]


def test_a_recipe_without_a_format_is_bf16_and_told() -> None:
    recipe, problems = recipe_from_argv(["--bf16", "--fp8-recipe", "tensorwise"], SCHEMA)
    assert recipe == {"precision": {"recipe": "bf16"}}
    assert [p.code for p in problems] == ["recipe-without-format"]


@pytest.mark.parametrize(
    ("argv", "precision"),
    [
        ("--bf16", {"recipe": "bf16"}),
        ("--fp16", {"recipe": "fp16"}),
        ("--fp16 --loss-scale 1024", {"recipe": "fp16", "loss_scale": 1024.0}),
        ("--fp8-format hybrid --fp8-recipe delayed", None),
        ("--bf16 --fp8-format hybrid --fp8-recipe custom --fp8-quantizer-factory a.b", None),
        ("--bf16 --fp4-format e2m1", {"recipe": "nvfp4", "format": "e2m1"}),
        # Megatron's parser takes both; no section can say that.
        ("--bf16 --fp4-format e2m1 --fp8-format e4m3", None),
        # Parameter gather of MXFP8 always brings the shared buffer, so without it the section cannot be used.
        ("--bf16 --fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather", {"recipe": "mxfp8", "format": "e4m3"}),
        (
            "--bf16 --fp8-format e4m3 --fp8-recipe blockwise --first-last-layers-bf16 --num-layers-at-end-in-bf16 2",
            {"recipe": "blockwise", "format": "e4m3", "bf16_layers": {"start": 1, "end": 2}},
        ),
    ],
)
def test_precision(argv: str, precision: dict[str, Any] | None) -> None:
    assert section(argv.split(), "precision") == precision


@pytest.mark.parametrize(
    ("argv", "name", "expected"),
    [
        ("--use-megatron-fsdp --ckpt-format fsdp_dtensor", "parallel", {"fsdp": "megatron"}),
        ("--use-megatron-fsdp", "parallel", None),
        ("--use-torch-fsdp2", "parallel", {"fsdp": "torch_fsdp2"}),
        ("--num-virtual-stages-per-pipeline-rank 1", "parallel", None),
        ("--exp-avg-dtype bf16", "optimizer", None),
        ("--use-precision-aware-optimizer --exp-avg-dtype bf16", "optimizer", {"exp_avg": "bf16"}),
        ("--accumulate-allreduce-grads-in-fp32", "optimizer", {"grad_reduce": "fp32"}),
        ("--mock-data", "data", None),
        ("--data-path 0.5 /a 1e-1 /b", "data", {"kind": "indexed", "blend": [0.5, "/a", "1e-1", "/b"]}),
        ("--seq-length 8", "model", {"max_position_embeddings": None}),
        ("--seq-length 8 --max-position-embeddings 16", "model", {"max_position_embeddings": 16}),
        ("--train-iters 0", "train", None),
    ],
)
def test_sections_are_used_only_where_they_say_exactly_that(argv: str, name: str, expected: Any) -> None:
    assert section(argv.split(), name) == expected


def test_the_last_of_two_contradicting_flags_counts() -> None:
    flags = ["--no-yarn-correction-range-round-to-int", "--yarn-correction-range-round-to-int"]
    recipe, problems = recipe_from_argv(flags, SCHEMA)
    assert recipe == {"model": {"yarn_correction_range_round_to_int": True}}
    assert [p.code for p in problems] == ["flag-set-twice"]


# --- what is refused


def test_all_unknown_flags_are_told_at_once_with_their_nearest_names() -> None:
    text, problems = import_text("--num-layer 2 --hidden-size 64 --micro-batch-sizes 1 --fp8-recipe fast", "x", None)
    assert [(p.code, p.fix) for p in problems] == [
        ("import-extra-flags", "did you mean num_layers?"),
        ("import-extra-flags", "did you mean micro_batch_size?"),
        ("flag-value", None),
    ]
    assert [p.severity for p in problems] == ["warning", "warning", "error"]
    assert all(p.where == "x" for p in problems)
    assert all(p.message in text for p in problems)


def test_the_version_decides_which_flags_there_are() -> None:
    arguments = "--bf16 --cuda-graph-modules attn"
    text, problems = import_text(arguments, "x", "0.17")
    assert "0.18 and 0.19" in problems[0].message and problems[0].severity == "warning"
    text, problems = import_text(arguments, "x", "0.19")
    assert problems == [] and 'software: {megatron: "0.19"}' in text
    with pytest.raises(UserError, match=r"0\.12"):
        import_text(arguments, "x", "0.12")


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing", "echo hello", "[]", '["a"]', "{}", "--", "\\", "-"])
def test_text_without_arguments_is_one_clear_error(text: str) -> None:
    with pytest.raises(UserError) as caught:
        import_text(text, "file.sh", None)
    assert [p.code for p in caught.value.problems] == ["nothing-to-import"]


# --- the written file


def test_the_file_reads_as_people_write(golden: Callable[[str, str], None]) -> None:
    path = next(one for one in PUBLISHED if one.stem == "llama3_70b_h100_fp8_cs")
    golden("import_llama3_70b.yaml", import_text(path.read_text(encoding="utf-8"), path.name, "0.19")[0])


_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20) | st.sampled_from(
    ["yes", "No", "0.19", "01:00:00", "1e3", "~", "", "a: b", "a #b", "- a", "*a", "&a", "!a", "{a", "0x1f", "null"]
)
_VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _TEXTS
)


@given(st.dictionaries(_TEXTS, _VALUES | st.lists(_VALUES, max_size=4) | st.dictionaries(_TEXTS, _VALUES), max_size=4))
def test_yaml_is_read_back_as_it_was_written(tree: dict[str, Any]) -> None:
    if tree:
        again = parse_yaml(write_yaml(tree, {"": ["one\ntwo\x00\u2028"]}), "x").plain()
        assert json.dumps(again, sort_keys=True) == json.dumps(tree, sort_keys=True)
