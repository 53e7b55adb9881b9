"""`extends`, `--set`, and the place of every value through both."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.recipe.load import MAX_GENERATIONS, LoadedRecipe, find_recipe, load_recipe
from fp8launch.resources import pack_folder

Write = Callable[[str, str], str]


def test_later_parents_win_mappings_merge_and_lists_replace(write: Write) -> None:
    write("a.yaml", "model: {num_layers: 1, hidden_size: 2}\ncontainer: {mounts: [/a, /b]}\n")
    write("b.yaml", "model: {num_layers: 3}\nenv: {X: 1}\n")
    text = "extends: [a, b]\ncontainer: {mounts: [/c]}\nmodel: {ffn_hidden_size: 9}\n"
    recipe = load_recipe(write("r.yaml", text)).recipe
    assert recipe.model == {"num_layers": 3, "hidden_size": 2, "ffn_hidden_size": 9}
    assert recipe.container.mounts == ["/c"]
    assert recipe.env == {"X": "1"}


def test_grandparents_come_before_parents(write: Write) -> None:
    write("top.yaml", "model: {num_layers: 1, hidden_size: 1, ffn_hidden_size: 1}\n")
    write("mid.yaml", "extends: top\nmodel: {num_layers: 2, hidden_size: 2}\n")
    assert load_recipe(write("r.yaml", "extends: mid\nmodel: {num_layers: 3}\n")).recipe.model == {
        "num_layers": 3,
        "hidden_size": 2,
        "ffn_hidden_size": 1,
    }


def test_the_name_of_a_recipe_is_its_own_or_its_file(write: Write) -> None:
    assert load_recipe(write("seven_b.yaml", "model: {}\n")).recipe.name == "seven_b"
    assert load_recipe(write("seven_b.yaml", "name: other\n")).recipe.name == "other"


def test_a_file_name_that_is_no_name_asks_for_one(write: Write) -> None:
    file = write("my recipe.yaml", "model: {}\n")
    problem = only(refused(load_recipe, file))
    assert problem.where == file
    assert "my recipe" in problem.message


def test_files_are_listed_once_with_the_recipe_last(write: Write, tmp_path: Path) -> None:
    write("base.yaml", "model: {}\n")
    write("a.yaml", "extends: base\n")
    write("b.yaml", "extends: base\n")
    loaded = load_recipe(write("r.yaml", "extends: [a, b]\n"))
    assert [file.name for file in loaded.files] == ["base.yaml", "a.yaml", "b.yaml", "r.yaml"]


def places(loaded: LoadedRecipe, *paths: str) -> list[str]:
    return [loaded.where(*path.split(".")).replace(f"{loaded.files[-1].parent}/", "") for path in paths]


def test_places_survive_extends_and_set(write: Write) -> None:
    write("part.yaml", "# a comment\nmodel:\n  num_layers: 1\n  hidden_size: 2\nenv:\n  A: 1\n")
    loaded = load_recipe(
        write("r.yaml", "extends: part\nname: r\n\nmodel:\n  hidden_size: 5\nresources: {nodes: 2}\n"), ["env.B=2"]
    )
    assert places(loaded, "model.num_layers", "model.hidden_size", "env.A", "env.B", "resources.nodes") == [
        "part.yaml:3",
        "r.yaml:5",
        "part.yaml:6",
        "--set env.B=2",
        "r.yaml:6",
    ]


def test_the_place_of_what_is_missing_is_where_it_would_stand(write: Write) -> None:
    loaded = load_recipe(write("r.yaml", "name: r\nresources:\n  nodes: 2\n"))
    assert places(loaded, "resources.time") == ["r.yaml:2"]


def test_a_mistake_in_a_parent_is_reported_with_the_parents_line(write: Write) -> None:
    part = write("part.yaml", "model: {}\n\nresources:\n  nodes: none\n")
    problem = only(refused(load_recipe, write("r.yaml", "extends: part\nname: r\n")))
    assert problem.where == f"{part}:4"


def test_broken_yaml_in_a_parent_is_told_with_the_parents_line(write: Write) -> None:
    part = write("part.yaml", "a: 1\na: 2\n")
    assert only(refused(load_recipe, write("r.yaml", "extends: part\n"))).where == f"{part}:2"


def test_every_missing_parent_is_told_at_once(write: Write) -> None:
    file = write("r.yaml", "name: r\nextends:\n  - nowhere\n  - models/tiny\n  - neither\n")
    problems = refused(load_recipe, file)
    assert [(p.code, p.where) for p in problems] == [("missing-parent", f"{file}:3"), ("missing-parent", f"{file}:5")]
    assert "nowhere" in problems[0].message


@pytest.mark.parametrize(
    ("parent", "fix"),
    [
        ("precision/fp8", "parts there: precision/bf16, precision/blockwise, "),
        ("models/llama3-8b", "did you mean models/llama3_8b?"),
        ("models/lama3_70b", "did you mean models/llama3_70b?"),
        ("nothing_like_it_is_there", "write a path relative to this file"),
    ],
)
def test_a_missing_parent_has_the_names_that_are_there(write: Write, parent: str, fix: str) -> None:
    assert (only(refused(load_recipe, write("r.yaml", f"extends: {parent}\n"))).fix or "").startswith(fix)


def test_a_misspelt_extends_is_a_key_of_a_recipe(write: Write) -> None:
    problem = only(refused(load_recipe, write("r.yaml", "extend: [models/llama3_8b]\n")))
    assert problem.fix == "did you mean 'extends'?"


@pytest.mark.parametrize("value", ["7", "{a: b}", "[[x]]", "[1]", "true", "[null]"])
def test_extends_takes_names_only(write: Write, value: str) -> None:
    file = write("r.yaml", f"name: r\nextends: {value}\n")
    problem = only(refused(load_recipe, file))
    assert problem.where == f"{file}:2"
    assert "'extends'" in problem.message


@pytest.mark.parametrize("value", ["null", "[]", ""])
def test_extending_nothing_is_fine(write: Write, value: str) -> None:
    assert load_recipe(write("r.yaml", f"name: r\nextends: {value}\n")).recipe.name == "r"


def test_a_cycle_names_the_files_in_it(write: Write) -> None:
    write("a.yaml", "extends: b\n")
    write("b.yaml", "extends: c\n")
    write("c.yaml", "extends: a\n")
    problem = only(refused(load_recipe, write("r.yaml", "extends: a\n")))
    assert problem.code == "extends-cycle"
    assert "a.yaml -> b.yaml -> c.yaml -> a.yaml" in problem.message


def test_a_recipe_cannot_extend_itself(write: Write, tmp_path: Path) -> None:
    assert only(refused(load_recipe, write("r.yaml", "extends: r\n"))).code == "extends-cycle"
    (tmp_path / "link.yaml").symlink_to(tmp_path / "s.yaml")
    assert only(refused(load_recipe, write("s.yaml", "extends: link\n"))).code == "extends-cycle"


def test_a_chain_that_never_ends_is_refused(write: Write) -> None:
    for n in range(1200):
        write(f"p{n}.yaml", f"extends: p{n + 1}\n")
    write("p1200.yaml", "name: end\n")
    assert only(refused(load_recipe, write("r.yaml", "extends: p0\n"))).code == "extends-too-deep"


def test_common_parents_cost_no_more_than_a_chain(write: Write) -> None:
    for n in range(MAX_GENERATIONS - 1):
        write(f"p{n}.yaml", f"extends: [{', '.join([f'p{n + 1}'] * 9)}]\n")
    write(f"p{MAX_GENERATIONS - 1}.yaml", "model: {num_layers: 1}\n")
    begin = time.perf_counter()
    assert load_recipe(write("r.yaml", "extends: [p0, p0]\n")).recipe.model == {"num_layers": 1}
    assert time.perf_counter() - begin < 1


@pytest.mark.parametrize("name", ["tiny_cpu", "tiny_cpu.yaml", "recipes/tiny_cpu", "recipes/tiny_cpu.yaml"])
def test_a_recipe_of_the_pack_is_found_by_name_from_anywhere(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == pack_folder("recipes") / "tiny_cpu.yaml"


@pytest.mark.parametrize("name", ["tiny_cpu", "recipes/tiny_cpu"])
def test_a_name_of_the_pack_is_the_pack_s(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Anybody may have put a file of that name into the working folder."""
    monkeypatch.chdir(tmp_path)
    for file in ("tiny_cpu", "tiny_cpu.yaml", "recipes/tiny_cpu", "recipes/tiny_cpu.yaml"):
        write(file, "name: mine\n")
    assert load_recipe(name).recipe.name == "tiny_cpu"


@pytest.mark.parametrize("name", ["./tiny_cpu", "tiny_cpu.yaml", "./tiny_cpu.yaml", "recipes/tiny_cpu.yaml"])
def test_a_path_is_a_file_here(write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("tiny_cpu.yaml", "recipes/tiny_cpu.yaml"):
        write(file, "name: mine\n")
    assert load_recipe(name).recipe.name == "mine"


@pytest.mark.parametrize("place", ["", "a/", "a/b/"])
def test_extends_takes_the_pack_s_part_and_a_path_takes_the_file(write: Write, place: str) -> None:
    write(f"{place}tiny_cpu.yaml", "description: planted\n")
    up = {"": "../../", "a/": "../", "a/b/": "./"}[place]
    by_name = write("a/b/mine.yaml", "extends: tiny_cpu\nname: x\n")
    assert "planted" not in load_recipe(by_name).recipe.description
    by_path = write("a/b/mine.yaml", f"extends: {up}tiny_cpu\nname: x\n")
    assert load_recipe(by_path).recipe.description == "planted"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", ["", "a/", "a/b/"])
def test_a_part_that_another_user_put_there_is_refused(write: Write, place: str) -> None:
    theirs = write(f"{place}common.yaml", "description: planted\n")
    mine = write("a/b/mine.yaml", "extends: common\nname: x\n")
    os.chown(theirs, 65534, 65534)
    problem = only(refused(load_recipe, mine))
    assert problem.code == "foreign-recipe" and problem.where == f"{mine}:1"
    assert "write its path" in (problem.fix or "")
    # A recipe of theirs that the user chose brings its own parts.
    os.chown(mine, 65534, 65534)
    assert load_recipe(mine).recipe.description == "planted"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_recipe_of_another_user_is_named_by_its_path(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    os.chown(write("theirs.yaml", "name: x\n"), 65534, 65534)
    assert only(refused(load_recipe, "theirs")).code == "foreign-recipe"
    assert load_recipe("./theirs.yaml").recipe.name == "x"


def test_parents_are_found_beside_the_child_above_it_and_in_the_pack(write: Write) -> None:
    write("parts/near.yaml", "env: {A: 1}\n")
    write("shared/up.yaml", "env: {B: 2}\n")
    file = write("parts/r.yaml", "extends: [near, shared/up, models/tiny]\n")
    recipe = load_recipe(file).recipe
    assert recipe.env == {"A": "1", "B": "2"}
    assert recipe.model["hidden_size"] == 64


@pytest.mark.parametrize("name", ["nowhere", "", "../../../etc/passwd", "a" * 5000, "x/" * 3000, "nul\0", "~nobody/x"])
def test_a_recipe_that_is_not_there(name: str, write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    only(refused(load_recipe, name))
    if name not in ("", "nul\0", "../../../etc/passwd"):
        problem = only(refused(load_recipe, write("r.yaml", f"name: r\nextends: ['{name}']\n")))
        assert str(problem.where).endswith("r.yaml:2")


def test_a_folder_given_as_a_recipe(tmp_path: Path) -> None:
    problem = only(refused(load_recipe, str(tmp_path)))
    assert (problem.code, problem.where) == ("unreadable-file", str(tmp_path))


def test_a_link_that_leads_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").symlink_to(tmp_path / "b.yaml")
    (tmp_path / "b.yaml").symlink_to(tmp_path / "a.yaml")
    only(refused(load_recipe, str(tmp_path / "a.yaml")))


# --- --set ----------------------------------------------------------------------------------------------------------


def overridden(write: Write, *overrides: str) -> LoadedRecipe:
    text = "name: r\nmodel: {num_layers: 4}\nmegatron: {lr_decay_style: cosine}\n"
    return load_recipe(write("r.yaml", text), overrides)


def test_set_scalars_lists_mappings_and_null(write: Write) -> None:
    recipe = overridden(
        write,
        "model.num_layers=8",
        "train.lr=3e-4",
        "resources.time=01:30:00",
        "description='two words: and more'",
        "container.mounts=[/a, '/b:/c']",
        "megatron={log_interval: 5}",
        "megatron.lr_decay_style=null",
        "env.A=off",
        "env.B=",
        "data.kind=mock",
    ).recipe
    assert recipe.model["num_layers"] == 8
    assert recipe.train.lr == 3e-4
    assert recipe.resources.time == "01:30:00"
    assert recipe.description == "two words: and more"
    assert recipe.container.mounts == ["/a", "/b:/c"]
    assert recipe.megatron == {"lr_decay_style": None, "log_interval": 5}
    assert recipe.environment == {"A": "off"}


def test_the_last_set_wins_and_values_may_hold_equal_signs(write: Write) -> None:
    recipe = overridden(write, "env.A=1", "env.A=x=y=z").recipe
    assert recipe.environment == {"A": "x=y=z"}


def test_a_link_to_nothing_is_not_a_typing_error(tmp_path: Path) -> None:
    """It was answered with "did you mean" and the same name."""
    link = tmp_path / "my.yaml"
    link.symlink_to("elsewhere/my.yaml")
    problem = only(refused(load_recipe, str(link)))
    assert problem.message == "is a symbolic link to elsewhere/my.yaml, which does not exist"


@pytest.mark.parametrize("text", ["model", "", "=", "=3", ".=3", "model.=3", ".model=3", "model..num_layers=3"])
def test_a_set_without_the_right_form(write: Write, text: str) -> None:
    problem = only(refused(overridden, write, text))
    assert (problem.code, problem.where) == ("bad-override", f"--set {text}")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("extends=[llama8b_fp8]", "bad-override"),  # it was ignored
        ("modle.num_layers=3", "unknown-key"),
        ("resources.node=3", "unknown-key"),
        ("resources.nodes=many", "bad-value"),
        ("resources=3", "bad-value"),
        ("model.num_layers=[1", "not-yaml"),
        ("description=a: b", "bad-value"),
        ("env.A=!!python/none", "yaml-tag"),
        ("precision.recipe=fp8", "bad-value"),
        ("precision.recipe=[a]", "bad-value"),
        ("precision.recipe=../models/tiny", "bad-value"),
        ("precision=bf16", "bad-value"),
    ],
)
def test_a_wrong_set_is_reported_with_its_text(write: Write, text: str, code: str) -> None:
    problems = refused(overridden, write, text)
    assert {(p.code, p.where) for p in problems} == {(code, f"--set {text}")}


@pytest.mark.parametrize("char", ["\0", "\udcff"])
def test_a_set_that_is_not_text_is_shown_in_a_form_that_can_be_printed(write: Write, char: str) -> None:
    problem = only(refused(overridden, write, f"env.A=x{char}"))
    assert problem.code == "not-text"
    assert problem.where == "--set env.A=x" + {"\0": "\\x00", "\udcff": "\\udcff"}[char]


def test_a_recipe_cannot_write_to_the_terminal(write: Write) -> None:
    problem = only(refused(load_recipe, write("r.yaml", 'name: r\n"\\e]0;title\\a\\e[31m": 1\n')))
    assert "\x1b" not in str(problem)
    assert "\\x1b[31m" in problem.message


def test_a_misspelt_set_is_answered_with_the_nearest_name(write: Write) -> None:
    assert only(refused(overridden, write, "resources.node=3")).fix == "did you mean 'nodes'?"


def test_another_precision_brings_its_whole_part(write: Write) -> None:
    loaded = load_recipe("llama8b_fp8", ["precision.recipe=delayed"])
    found = loaded.recipe.precision
    assert found is not None
    assert (found.recipe, found.format, found.amax_history, found.amax_algo) == ("delayed", "hybrid", 1024, "max")
    assert found.param_gather  # Stated by the recipe, and every FP8 recipe can do it.


def test_from_fp8_to_bf16_and_back(write: Write) -> None:
    bf16 = load_recipe("llama8b_fp8", ["precision.recipe=bf16"]).recipe.precision
    assert bf16 is not None
    assert not bf16.quantized
    assert not bf16.param_gather
    back = load_recipe("llama8b_fp8", ["precision.recipe=bf16", "precision.recipe=mxfp8"]).recipe.precision
    assert back is not None
    assert (back.recipe, back.format) == ("mxfp8", "e4m3")


def test_a_set_after_the_switch_wins_over_the_part(write: Write) -> None:
    found = load_recipe("llama8b_fp8", ["precision.recipe=blockwise", "precision.format=hybrid"]).recipe.precision
    assert found is not None
    assert (found.recipe, found.format) == ("blockwise", "hybrid")


def test_setting_the_precision_that_is_there_changes_nothing(write: Write) -> None:
    file = write("r.yaml", "extends: precision/delayed\nname: r\nprecision: {amax_history: 16}\n")
    assert load_recipe(file, ["precision.recipe=delayed"]).recipe == load_recipe(file).recipe


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "tensorwise", "blockwise", "mxfp8", "nvfp4"])
def test_every_precision_can_be_switched_to(recipe: str) -> None:
    found = load_recipe("llama8b_fp8", [f"precision.recipe={recipe}"]).recipe.precision
    assert found is not None
    assert found.recipe == recipe


def test_variables_keep_the_digits_that_were_written(write: Write) -> None:
    text = "name: r\nenv: {A: 3.10, B: 007, C: 1e5, D: 0x10, E: 1_000, F: off, G: '', H: null, I: 1.0}\n"
    file = write("r.yaml", text)
    assert load_recipe(file).recipe.environment == {
        "A": "3.10", "B": "007", "C": "1e5", "D": "0x10", "E": "1_000", "F": "off", "G": "", "I": "1.0",
    }  # fmt: skip


def test_loading_is_fast(write: Write) -> None:
    begin = time.perf_counter()
    load_recipe("llama8b_fp8")
    assert time.perf_counter() - begin < 0.5


def test_loading_leaves_the_working_folder_alone() -> None:
    before = Path.cwd()
    load_recipe("llama8b_fp8")
    assert Path.cwd() == before
