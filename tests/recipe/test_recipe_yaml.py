"""What YAML text means in a recipe, and what is refused before it means anything."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support import only, refused

from fp8launch.recipe.yaml_source import MAX_BYTES, MAX_DEPTH, MAX_NODES, parse_yaml, read_yaml


def value(text: str) -> Any:
    return parse_yaml(f"k: {text}", "f").plain()["k"]


@pytest.mark.parametrize("word", ["off", "no", "on", "yes", "y", "N", "Off", "NO", "01:00:00", "1:30", "2026-11-20"])
def test_words_that_yaml_1_1_would_turn_into_something_else_stay_words(word: str) -> None:
    assert value(word) == word


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("12", 12),
        ("-3", -3),
        ("+4", 4),
        ("012", 12),
        ("0o17", 15),
        ("0x1F", 31),
        ("3e-4", 3e-4),
        ("3.0e-4", 3e-4),
        ("1E6", 1e6),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.5e1", -5.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ('"12"', "12"),
        ("'true'", "true"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("1.2.3", "1.2.3"),
        ("0x", "0x"),
        ("=", "="),
        ("--flag", "--flag"),
    ],
)
def test_scalars_follow_the_core_schema_of_yaml_1_2(text: str, expected: object) -> None:
    found = value(text)
    assert found == expected
    assert type(found) is type(expected)


def test_nan_is_a_number() -> None:
    assert math.isnan(value(".NaN"))


def test_a_number_keeps_its_text() -> None:
    node = parse_yaml("a: 3.10", "f").find(("a",))
    assert (node.value, node.text) == (3.1, "3.10")


def test_every_value_knows_its_line() -> None:
    tree = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - y: 2\n# comment\nd: |\n  text\n  more\ne: 5\n", "f.yaml")
    places = {path: tree.find(path).where for path in [("a",), ("b",), ("b", "c"), ("b", "c", 1, "y"), ("d",), ("e",)]}
    assert list(places.values()) == ["f.yaml:1", "f.yaml:2", "f.yaml:3", "f.yaml:5", "f.yaml:7", "f.yaml:10"]


def test_an_alias_stands_where_it_is_used() -> None:
    tree = parse_yaml("a: &x 7\nb: *x\n", "f")
    assert tree.plain() == {"a": 7, "b": 7}
    assert tree.find(("b",)).where == "f:2"


@pytest.mark.parametrize(
    ("text", "code", "line"),
    [
        ("a: 1\nb: 2\na: 3\n", "duplicate-key", 3),
        ("x:\n  a: 1\n  'a': 3\n", "duplicate-key", 3),
        ("a: 1\nb: !!python/object/apply:os.system ['true']\n", "yaml-tag", 2),
        ("a: !!str 1\n", "yaml-tag", 1),
        ("!!map {a: 1}\n", "yaml-tag", 1),
        ("base: &b {a: 1}\nc:\n  <<: *b\n", "merge-key", 3),
        ("a: 1\n---\nb: 2\n", "several-documents", 2),
        ("a: *nowhere\n", "unknown-alias", 1),
        ("? [1, 2]\n: x\n", "bad-key", 1),
        ("a: 1\nb: [1, 2\nc: 3\n", "not-yaml", 3),
        ("a: 1\n\tb: 2\n", "not-yaml", 2),
        ("a: b: c\n", "not-yaml", 1),
        ("a: 'open\n", "not-yaml", 2),
        ("a: %x\n", "not-yaml", 1),
        ('a: 1\nb: "nul \\0 here"\n', "not-text", 2),
    ],
)
def test_what_a_recipe_may_not_hold(text: str, code: str, line: int) -> None:
    problem = only(refused(parse_yaml, text, "r.yaml"))
    assert (problem.code, problem.where) == (code, f"r.yaml:{line}")


def test_a_quoted_merge_key_is_an_ordinary_name() -> None:
    assert parse_yaml('"<<": 1', "f").plain() == {"<<": 1}


def test_a_duplicate_names_the_first_one() -> None:
    problem = only(refused(parse_yaml, "a: 1\nb: 2\na: 3\n", "r.yaml"))
    assert "r.yaml:1" in problem.message


def bomb(levels: int, width: int = 9) -> str:
    lines = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    "text",
    [
        bomb(9),
        bomb(500, 2),
        "\n".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" if n else "a0: &a0 {x: 1, y: 2}" for n in range(60)),
        "a: [" * (MAX_DEPTH + 5) + "]" * (MAX_DEPTH + 5),
        "[" * 100_000,
        "{a: " * 50_000,
        "\n".join(" " * n + "k:" for n in range(400)),
        "a:\n" + "- x\n" * (MAX_NODES + 1),
        "- " * 10_000,
    ],
    ids=["laughs", "wide-laughs", "mappings", "deep", "100k-brackets", "50k-braces", "indents", "long", "dashes"],
)
def test_a_bomb_is_refused_fast(text: str) -> None:
    begin = time.process_time()
    problem = only(refused(parse_yaml, text, "r.yaml"))
    assert problem.code in ("yaml-too-large", "not-yaml")
    assert time.process_time() - begin < 2


def test_an_alias_to_what_holds_it_is_refused() -> None:
    assert only(refused(parse_yaml, "a: &a [1, *a]", "f")).code == "unknown-alias"


def test_aliases_cannot_nest_deeper_than_text() -> None:
    lines = ["a0: &a0 [1]"] + [f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 3000)]
    assert only(refused(parse_yaml, "\n".join(lines), "f")).code == "yaml-too-large"


@pytest.mark.parametrize(
    ("content", "code", "line"),
    [
        (b"", "empty-file", ""),
        (b"# only a comment\n\n", "empty-file", ""),
        (b"---\n", "empty-file", ""),
        (b"\xef\xbb\xbf", "empty-file", ""),
        (b"just words\n", "not-a-mapping", ":1"),
        (b"- a\n- b\n", "not-a-mapping", ":1"),
        (b"42", "not-a-mapping", ":1"),
        (b"a: 1\nb: \xff\xfe\n", "not-utf8", ":2"),
        ("a: ü\n".encode("utf-16"), "not-utf8", ":1"),
        (b"a: 1\nb: \x00\n", "not-text", ""),
        (b"a: 1\nb: \x07\n", "not-yaml", None),
        (bytes(range(256)), "not-utf8", None),
        (b"\x7fELF\x02\x01\x01\x00\x00\x00", "not-text", ""),
        (b"a" * (MAX_BYTES + 1), "file-too-large", ""),
        (b"a: 1\n" * (10 << 18), "file-too-large", ""),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_file_that_is_no_recipe(tmp_path: Path, content: bytes, code: str, line: str | None) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(content)
    begin = time.process_time()
    problem = only(refused(read_yaml, file))
    assert problem.code == code
    assert problem.where == f"{file}{line}" if line is not None else str(problem.where).startswith(str(file))
    assert time.process_time() - begin < 1


def test_a_byte_order_mark_and_windows_line_ends_are_no_obstacle(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_bytes(b"\xef\xbb\xbfa: 1\r\nb:\r\n  c: off\r\n")
    tree = read_yaml(file)
    assert tree.plain() == {"a": 1, "b": {"c": "off"}}
    assert tree.find(("b", "c")).where == f"{file}:3"


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    assert only(refused(read_yaml, tmp_path / "none.yaml")).code == "file-not-found"
    assert only(refused(read_yaml, tmp_path)).code == "unreadable-file"


def test_an_endless_file_is_not_read_to_its_end() -> None:
    assert only(refused(read_yaml, Path("/dev/zero"))).code == "file-too-large"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_as_a_user(tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text("name: x\n")
    file.chmod(0)
    assert only(refused(read_yaml, file)).code == "unreadable-file"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_unreadable_file_as_another_user(tmp_path: Path) -> None:
    """The same in a child process that gives root up."""
    file = tmp_path / "r.yaml"
    file.write_text("name: x\n")
    file.chmod(0)
    for folder in (tmp_path, tmp_path.parent, tmp_path.parent.parent):
        folder.chmod(0o755)
    child = os.fork()
    if child == 0:
        status = 9
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            status = 0 if only(refused(read_yaml, file)).code == "unreadable-file" else 1
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
