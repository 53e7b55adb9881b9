"""Bad input: counted, named by file and line, and either left out or the end of the build."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from dataset_support import as_bytes, build, data, make_texts, peak_kib, read, write_jsonl

# Reason to a line that has it.
LINES = {
    "broken-json": b'{"text": "never closed\n',
    "not-an-object": b'["text"]\n',
    "no-field": b'{"content": "x"}\n',
    "not-text": b'{"text": null}\n',
    "invalid-utf8": b'{"text": "\xff\xfe"}\n',
    "too-long": b'{"text": "' + b"x" * (1 << 20) + b'"}\n',
    "empty": b'{"text": ""}\n',
}


def _lines(texts: list[str]) -> list[bytes]:
    return [json.dumps({"text": text}).encode() + b"\n" for text in texts]


def test_all_of_it_is_counted_and_the_rest_is_used(tmp_path: Path) -> None:
    texts = make_texts(60)
    lines = _lines(texts)
    for at, bad in enumerate(LINES.values()):
        lines.insert(9 * at, bad)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines) + b"\n  \n")
    words = [tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out", "--max-document", 1]
    made = build(*words, "--on-error", "skip", "--shard-bytes", 100_000)
    assert made["skipped"] == dict.fromkeys(LINES, 1)
    assert read(tmp_path / "out") == as_bytes(texts)
    # The first few, by their lines in the whole file, though shards count their own.
    places = {each["reason"]: each["place"] for each in made["examples"]}
    for at, reason in enumerate(LINES):
        if reason in places:
            assert places[reason] == f"{tmp_path / 'a.jsonl'}:{9 * at + 1}"
    assert len(places) == 5


@pytest.mark.parametrize("reason", [reason for reason in LINES if reason != "empty"])
def test_a_build_that_may_not_skip_names_file_and_line(tmp_path: Path, reason: str) -> None:
    lines = _lines(make_texts(30))
    lines.insert(17, LINES[reason])
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    words = ["build", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out", "--max-document", 1]
    size = 500 if reason != "too-long" else 10**6
    done = data(*words, "--shard-bytes", size, expect=1)
    assert f"{tmp_path / 'a.jsonl'}:18: error:" in done.stderr
    assert " at at " not in done.stderr
    assert f"[data-{reason}]" in done.stderr and "--on-error skip" in done.stderr
    assert not list(tmp_path.glob("out.*n*x")) and not (tmp_path / "out.bin").exists()
    # The same command with skip goes on from there.
    done = data(*words, "--shard-bytes", size, "--on-error", "skip")
    assert "29 documents" not in done.stdout and "30 documents" in done.stdout


def test_empty_documents_never_end_a_build(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES["empty"] + b"".join(_lines(["x"])))
    done = data("build", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert "left out: 1 no text" in done.stderr and "a.jsonl:1: no text" in done.stderr


def test_blank_lines_between_documents_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\r\n\r\n\n")
    done = data("build", tmp_path / "a.txt", "--format", "lines", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert done.returncode == 0 and "left out" not in done.stderr
    assert done.stdout.startswith("2 documents") or "2 documents" in done.stderr


def test_what_an_unfinished_build_left_out_is_not_let_through_later(tmp_path: Path) -> None:
    """With skip a full disk ends the build, here a folder in the way of the last shard; then one without skip."""
    (tmp_path / "a.jsonl").write_bytes(LINES["no-field"] + b"".join(_lines(make_texts(30))))
    words = ["build", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "o", "--shard-bytes", 1000]
    size = (tmp_path / "a.jsonl").stat().st_size
    in_the_way = tmp_path / "o.build" / f"{(size - 1) // 1000:06d}.bin"
    in_the_way.mkdir(parents=True)
    assert "contains 0000" in data(*words, expect=1).stderr
    in_the_way.rmdir()
    started = data(*words, "--on-error", "skip", "--workers", 1)
    assert "1 the field is missing" in started.stderr


@pytest.mark.parametrize("form", ["gz", "zst"])
def test_a_truncated_file_gives_what_is_before_its_end(tmp_path: Path, form: str) -> None:
    import pyarrow as arrow

    texts = make_texts(2000)
    raw = b"".join(_lines(texts))
    whole = gzip.compress(raw) if form == "gz" else arrow.compress(raw, codec="zstd", asbytes=True)
    file = tmp_path / f"a.jsonl.{form}"
    file.write_bytes(whole[: len(whole) // 2])
    words = ["build", file, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    assert "[data-cut-short]" in data(*words, expect=1).stderr
    made = build(*words[1:], "--on-error", "skip")
    assert made["skipped"] == {"cut-short": 1}
    found = read(tmp_path / "out")
    assert 0 < len(found) < 2000
    assert found == as_bytes(texts)[: len(found)]


def test_damaged_tables_and_missing_columns_are_named(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    parquet.write_table(arrow.table({"body": ["x", "y"]}), tmp_path / "a.parquet")
    words = ["--tokenizer", "bytes", "--out", tmp_path / "out"]
    done = data("build", tmp_path / "a.parquet", *words, expect=1)
    assert "the field is missing ('text'; columns: body)" in done.stderr
    build(tmp_path / "a.parquet", *words, "--field", "body", "--restart")
    assert read(tmp_path / "out") == as_bytes(["x", "y"])
    (tmp_path / "b.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:-9])
    assert (
        "[data-cut-short]"
        in data("build", tmp_path / "b.parquet", *words[:2], "--out", "o", expect=1, cwd=tmp_path).stderr
    )


def test_ids_outside_the_vocabulary(tmp_path: Path, bpe: Path) -> None:
    documents: list[object] = [[1, 2], [3, 9], [4], [-1], "text", [1.5], [True], [2**70], [5]]
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    words = [source, "--tokenizer", "ids", "--vocab-size", 9, "--no-eod", "--out", tmp_path / "out"]
    made = build(*words, "--on-error", "skip")
    assert made["skipped"] == {"not-text": 4, "beyond-vocabulary": 2}
    assert read(tmp_path / "out") == [[1, 2], [4], [5]]
    # A model with fewer embeddings than the tokenizer has tokens.
    texts = write_jsonl(tmp_path / "b.jsonl", ["the", "~~~"])
    done = data("build", texts, "--tokenizer", bpe, "--vocab-size", 90, "--out", tmp_path / "b", expect=1)
    assert "a token id is outside the vocabulary (id " in done.stderr and "the vocabulary has 90" in done.stderr


def test_memory_does_not_grow_with_the_longest_line(tmp_path: Path) -> None:
    """A line of 600 MB, read by a process that uses less than half of that."""
    file = tmp_path / "a.jsonl"
    with file.open("wb") as stream:
        stream.write(b'{"text": "')
        for _ in range(600):
            stream.write(b"x" * 1_000_000)
        stream.write(b'"}\n{"text": "after it"}\n')
    used = peak_kib("build", file, "--tokenizer", "bytes", "--out", tmp_path / "out", "--on-error", "skip")
    assert read(tmp_path / "out") == as_bytes(["after it"])
    assert used < 300_000


def test_nothing_usable_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES["empty"] * 3)
    done = data("build", tmp_path / "a.jsonl", "--tokenizer", "bytes", "--out", tmp_path / "out", expect=1)
    assert f"no document can be used: 3 no text; the first is {tmp_path}/a.jsonl:1: no text" in done.stderr
    assert not (tmp_path / "out.bin").exists()


def bombs(folder: Path) -> list[Path]:
    """Files of some bytes to kilobytes that unpack to gigabytes."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    found = [folder / name for name in ("a.parquet", "page.parquet", "a.jsonl.zst")]
    same = arrow.DictionaryArray.from_arrays(arrow.array([0] * 60_000, arrow.int32()), arrow.array(["x" * 100_000]))
    parquet.write_table(arrow.table({"text": same}), found[0], compression="zstd", store_schema=False)
    parquet.write_table(arrow.table({"text": ["x" * 500_000_000]}), found[1], compression="zstd")
    lines = (json.dumps({"text": "x" * 1000}) + "\n").encode() * 1000
    with arrow.output_stream(found[2], compression="zstd") as packed:
        for _ in range(3000):
            packed.write(lines)
    return found


def test_a_file_that_unpacks_to_far_more_than_text_does_is_refused(tmp_path: Path) -> None:
    """A Parquet file of 523 bytes filled a disk with 6 GB."""
    for file in bombs(tmp_path):
        assert file.stat().st_size < 1_000_000, file
        out = tmp_path / "out" / file.name
        words = ["build", file, "--tokenizer", "bytes", "--out", out, "--format", form_of(file), "--workers", 1]
        said = data(*words, expect=1).stderr
        assert "[data-unpacks-too-far]" in said or "[data-not-text]" in said or "[data-too-long]" in said, said
        # Without a document that can be used it ends with 1.
        used = peak_kib(*words, "--on-error", "skip", check=False)
        assert used < 1_000_000, file
        manifest = json.loads(Path(f"{out}.manifest.json").read_text()) if Path(f"{out}.bin").exists() else {}
        assert manifest.get("skipped", {"unpacks-too-far": 1})["unpacks-too-far"] == 1
        assert sum(each.stat().st_size for each in out.parent.rglob("*") if each.is_file()) < 1_000_000_000


def form_of(file: Path) -> str:
    if file.suffix == ".parquet":
        return "parquet"
    return "lines"
