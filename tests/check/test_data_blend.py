"""Problems of a recipe's data are reported before the run waits in a queue."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from indexed_files import write_dataset
from support_site import codes, data_problems, indexed, ready

from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem

# The tiny recipe asks for 20 iterations of 16 sequences of 64 tokens or so; this is more than it.
PLENTY = [1000] * 200


def look(tmp_path: Path, text: str, *overrides: str, cluster: Cluster | None = None) -> list[Problem]:
    return data_problems(ready(tmp_path, text, *overrides), cluster)


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def asked(tmp_path: Path) -> int:
    """Tokens that the tiny recipe asks for."""
    prepared = ready(tmp_path)
    values = prepared.args
    return values.integer("train_iters", 0) * values.integer("seq_length", 0) * prepared.layout.global_batch


def test_good_data_is_no_problem(tmp_path: Path) -> None:
    a, b = (write_dataset(tmp_path / "data" / name, PLENTY) for name in "ab")
    assert look(tmp_path, indexed([str(a)])) == []
    assert look(tmp_path, indexed([0.3, str(a), 0.7, str(b)], split="98,1,1")) == []
    assert look(tmp_path, indexed([str(a), str(b)])) == []


def test_mock_data_needs_nothing(tmp_path: Path) -> None:
    assert look(tmp_path, "") == []


def test_missing_files_are_told_with_file_and_line(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "data" / "web_text_document", PLENTY)
    problem = only(look(tmp_path, "data:\n  kind: indexed\n  split: '1,0,0'\n  blend:\n  - 1\n"
                        f"  - {a}\n  - 2\n  - {tmp_path}/data/web_txt_document\n"))  # fmt: skip
    assert (problem.code, problem.severity) == ("data-missing", "error")
    assert ".bin and no .idx" in problem.message
    assert problem.where == f"{tmp_path}/recipe.yaml:9"
    assert problem.fix == f"did you mean {a}?"


@pytest.mark.parametrize("missing", ["bin", "idx"])
def test_one_of_two_files_is_missing(tmp_path: Path, missing: str) -> None:
    """The fix was "did you mean" with the same name, or with an unrelated dataset."""
    a = write_dataset(tmp_path / "a", PLENTY)
    write_dataset(tmp_path / "unrelated", PLENTY)
    Path(f"{a}.{missing}").unlink()
    problem = only(look(tmp_path, indexed([str(a)])))
    assert f"has no .{missing} file" in problem.message
    assert problem.fix == "copy it next to the other file, or build the dataset again"


def test_a_prefix_with_its_ending(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", PLENTY)
    problem = only(look(tmp_path, indexed([f"{a}.bin"])))
    assert problem.code == "data-missing"
    assert problem.fix is not None and problem.fix.startswith("remove the extension")


def test_a_folder_in_place_of_a_prefix(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "data" / "a", PLENTY)
    assert only(look(tmp_path, indexed([str(a.parent)]))).fix == f"did you mean {a}?"


def test_a_broken_index(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", PLENTY)
    Path(f"{a}.bin").write_bytes(b"\x00")
    problem = only(look(tmp_path, indexed([str(a)])))
    assert problem.code == "data-broken"
    assert str(a) in problem.message and "cut short" in problem.message


@pytest.mark.parametrize("path", ["data/a", "./a", "../a"])
def test_a_relative_path_would_be_in_the_run_folder(tmp_path: Path, path: str) -> None:
    assert only(look(tmp_path, indexed([path]))).code == "path-relative"


@pytest.mark.parametrize("path", ["~/data/a", "$DATA/a", "/data/$USER/a"])
def test_no_shell_expands_paths(tmp_path: Path, path: str) -> None:
    assert "path-not-expanded" in codes(look(tmp_path, indexed([path])))
    assert "data-missing" not in codes(look(tmp_path, indexed([path]))) or path.startswith("/")


def test_object_stores_are_not_looked_into(tmp_path: Path) -> None:
    assert look(tmp_path, indexed(["s3://bucket/data"])) == []


@pytest.mark.parametrize("blend", [[0.3, "/a", "/b"], ["/a", 0.3], [0.3, "/a", "/b", 0.7]])
def test_weights_and_paths_out_of_step(tmp_path: Path, blend: list[str | float]) -> None:
    problem = only(look(tmp_path, indexed(blend)))
    assert (problem.code, problem.severity) == ("data-blend", "error")


def test_weights_that_are_none(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", PLENTY)
    for weight in (0, -1):
        assert only(look(tmp_path, indexed([weight, str(a)]))).code == "data-blend"


def test_a_split_that_leaves_no_document(tmp_path: Path) -> None:
    """Megatron counts epochs of nothing, for ever."""
    a = write_dataset(tmp_path / "a", [20000] * 20)
    problem = only(look(tmp_path, indexed([str(a)], split="99,1,0")))
    assert (problem.code, problem.severity) == ("data-split", "error")
    assert "20 documents" in problem.message and "valid" in problem.message and "hang" in problem.message
    assert problem.fix is not None and "the share of valid to 0" in problem.fix
    assert look(tmp_path, indexed([str(a)], split="9,1,0")) == []


def test_the_split_that_megatron_takes_without_one(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", [20000] * 20)
    problems = look(tmp_path, indexed([str(a)], split=None))
    # 969, 30, 1 of 20 documents: 19.38, 19.98 and 20, so 19, 1 and none.
    assert "for test rounds to none" in only(problems).message


@pytest.mark.parametrize("split", ["1,2,3,4", "0,0,0", "none", "-1,2"])
def test_a_split_that_is_none(tmp_path: Path, split: str) -> None:
    a = write_dataset(tmp_path / "a", PLENTY)
    assert "data-split" in codes(look(tmp_path, indexed([str(a)], split=split)))


def test_epochs_are_counted(tmp_path: Path) -> None:
    tokens = asked(tmp_path)
    a = write_dataset(tmp_path / "a", [tokens // 40] * 10)
    problem = only(look(tmp_path, indexed([str(a)])))
    assert (problem.code, problem.severity) == ("data-epochs", "warning")
    assert "4 times" in problem.message
    almost = write_dataset(tmp_path / "almost", [99_990] * 10)
    assert "which has 1 M for training" in only(look(tmp_path, indexed([str(almost)]), "train.iterations=9999")).message
    b = write_dataset(tmp_path / "b", [tokens] * 2)
    problem = only(look(tmp_path, indexed([1, str(a), 1, str(b)])))
    assert f"tokens of {a}" in problem.message and "2 times" in problem.message


def test_a_run_that_exits_early_needs_less_data(tmp_path: Path) -> None:
    """`exit_interval` was ignored: a warning counted epochs that the run does not reach."""
    tokens = asked(tmp_path)
    a, b = (write_dataset(tmp_path / name, [tokens // 40] * 10) for name in "ab")
    iterations = ready(tmp_path).args.integer("train_iters", 0)
    for blend, code in (([str(a)], "data-epochs"), ([str(a), str(b)], "data-too-short")):
        assert only(look(tmp_path, indexed(blend))).code == code
        assert look(tmp_path, indexed(blend), f"megatron.exit_interval={iterations // 5}") == []
    longer = only(look(tmp_path, indexed([str(a)]), f"megatron.exit_interval={iterations // 2}"))
    assert "2 times" in longer.message


def test_a_blend_without_weights_is_used_once(tmp_path: Path) -> None:
    tokens = asked(tmp_path)
    a, b = (write_dataset(tmp_path / name, [tokens // 40] * 10) for name in "ab")
    problem = only(look(tmp_path, indexed([str(a), str(b)])))
    assert (problem.code, problem.severity) == ("data-too-short", "error")
    assert look(tmp_path, indexed([str(a), str(b)]), "megatron.dataloader_type=cyclic") == []


def test_data_flags_without_a_section(tmp_path: Path) -> None:
    """People who come with an argument list have no `data:`."""
    a = write_dataset(tmp_path / "a", PLENTY)
    base = "data: null\nmegatron:\n  tokenizer_type: NullTokenizer\n"
    assert look(tmp_path, f"{base}  train_data_path: [{a}]\n") == []
    assert only(look(tmp_path, f"{base}  train_data_path: [{a}x]\n")).code == "data-missing"
    assert only(look(tmp_path, f"{base}  train_data_path: [{a}x]\n")).where == f"{tmp_path}/recipe.yaml:5"


@pytest.mark.parametrize("weights", [("nan", 1), (1, "nan"), ("inf", 1)])
def test_weights_that_are_no_numbers(tmp_path: Path, weights: tuple[object, object]) -> None:
    a, b = (write_dataset(tmp_path / name, PLENTY) for name in "ab")
    listed = tmp_path / "blend.txt"
    listed.write_text(f"{weights[0]} {a} {weights[1]} {b}")
    flags = f"data: null\nmegatron:\n  tokenizer_type: NullTokenizer\n  data_args_path: {listed}\n  split: '1,0,0'\n"
    assert only(look(tmp_path, flags)).code == "data-blend"


def test_blends_in_files_of_their_own(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", PLENTY)
    base = "data: null\nmegatron:\n  tokenizer_type: NullTokenizer\n"
    listed = tmp_path / "blend.txt"
    listed.write_text(f"0.5 {a} 0.5 {a}_gone")
    problem = only(look(tmp_path, f"{base}  data_args_path: {listed}\n  split: '1,0,0'\n"))
    assert (problem.code, problem.where) == ("data-missing", str(listed))
    listed.write_text("\n")
    problem = only(look(tmp_path, f"{base}  data_args_path: {listed}\n  split: '1,0,0'\n"))
    assert (problem.code, problem.where) == ("data-blend", str(listed))
    splits = tmp_path / "splits.json"
    splits.write_text(json.dumps({"train": [str(a)], "valid": f"1 {a}_gone", "test": []}))
    problem = only(look(tmp_path, f"{base}  per_split_data_args_path: {splits}\n"))
    assert (problem.code, problem.where) == ("data-missing", str(splits))
    for text in ("{", "[" * 100_000):
        splits.write_text(text)
        assert only(look(tmp_path, f"{base}  per_split_data_args_path: {splits}\n")).code == "data-blend"
    splits.unlink()
    assert only(look(tmp_path, f"{base}  per_split_data_args_path: {splits}\n")).code == "file-missing"


@pytest.mark.parametrize("flag", ["data_args_path", "per_split_data_args_path"])
@pytest.mark.parametrize(
    ("content", "why"),
    [("/data/für".encode("latin-1"), "not UTF-8"), (b" " * (4 << 20) + b"/gone", "larger than 4 MiB")],
)
def test_a_list_that_is_not_checked_is_reported(tmp_path: Path, flag: str, content: bytes, why: str) -> None:
    listed = tmp_path / "blend.txt"
    listed.write_bytes(content)
    flags = f"data: null\nmegatron:\n  tokenizer_type: NullTokenizer\n  {flag}: {listed}\n"
    problem = only(look(tmp_path, flags))
    assert (problem.code, problem.severity, problem.where) == ("data-blend-unread", "warning", str(listed))
    assert why in problem.message and flag in problem.message


def test_the_index_cache_next_to_read_only_data(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "data" / "a", PLENTY)
    box = "container: {image: nemo-26.04, mounts: ['%s:/data:ro']}\n" % (tmp_path / "data")
    problem = only(look(tmp_path, box + indexed(["/data/a"])))
    assert (problem.code, problem.severity) == ("data-cache", "error")
    assert "read-only" in problem.message
    assert look(tmp_path, box + indexed(["/data/a"], cache="cache")) == []
    Path(a).write_text("a file where Megatron would make a folder")
    assert only(look(tmp_path, indexed([str(a)]))).code == "data-cache"


def test_paths_below_a_mount_are_those_of_its_source(tmp_path: Path) -> None:
    write_dataset(tmp_path / "real" / "web" / "a", PLENTY)
    write_dataset(tmp_path / "other" / "a", PLENTY)
    mounts = f"mounts: ['{tmp_path}/real:/data', '{tmp_path}/other:/data/other']"
    box = f"container: {{image: nemo-26.04, {mounts}}}\n"
    assert look(tmp_path, box + indexed([1, "/data/web/a", 1, "/data/other/a"])) == []
    problem = only(look(tmp_path, box + indexed(["/data/web/b"])))
    assert f"(on this machine {tmp_path}/real/web/b)" in problem.message
    assert problem.fix == "did you mean /data/web/a?"
    # A cluster profile's mounts count, and without a container the paths are the machine's own.
    profile = Cluster(mounts=[f"{tmp_path}/real:/data"])
    box = "container: {image: nemo-26.04}\n"
    assert look(tmp_path, box + indexed(["/data/web/a"]), cluster=profile) == []
    bare = profile.model_copy(update={"runtime": "none"})
    assert only(look(tmp_path, box + indexed(["/data/web/a"]), cluster=bare)).code == "data-missing"


def test_data_that_the_recipe_says_the_image_has_is_not_judged(tmp_path: Path) -> None:
    box = "container: {{image: nemo-26.04, contains: [{}]}}\n"
    data = indexed(["/in/the/image"])
    assert look(tmp_path, box.format("/in/the") + data) == []
    assert only(look(tmp_path, box.format("/in/them") + data)).code == "path-not-mounted"


def test_a_forgotten_mount_is_reported(tmp_path: Path) -> None:
    a = write_dataset(tmp_path / "a", PLENTY)
    problem = only(look(tmp_path, "container: {image: nemo-26.04}\n" + indexed([str(a)])))
    assert (problem.code, problem.severity) == ("path-not-mounted", "error")
    assert f"container: {{mounts: [{tmp_path}]}}" in (problem.fix or "")
