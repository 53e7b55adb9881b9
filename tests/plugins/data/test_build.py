"""`data build`: the bytes of Megatron's own builder, from every kind of source, in shards of any size."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
from dataset_support import as_bytes, build, content, data, in_megatron, make_texts, read, write_jsonl

from fp8launch import cli
from fp8launch.plugins.data import workers
from fp8launch.plugins.data.cli import build as build_command
from fp8launch.plugins.data.tokenizer import _PATTERNS

MEGATRON_BUILDS = """
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
import torch
cases = json.load(open(sys.argv[1]))
for case in cases:
    builder = IndexedDatasetBuilder(case["prefix"] + ".bin", dtype=DType.optimal_dtype(case["vocab_size"]))
    for document in case["documents"]:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(case["prefix"] + ".idx")
    ours = IndexedDataset(case["ours"])
    assert [ours[at].tolist() for at in range(len(ours))] == case["documents"]
    assert ours.document_indices.tolist() == list(range(len(case["documents"]) + 1))
print(json.dumps("done"))
"""


@pytest.mark.train
def test_bytes_are_those_of_megatrons_builder(tmp_path: Path) -> None:
    choose = random.Random(1)
    cases = []
    for vocab_size in (1000, 65499, 65500, 70000):
        for ends in (["--no-eod"], ["--eod-token", str(vocab_size - 1)]):
            name = f"{vocab_size}{ends[0]}"
            documents = [choose.choices(range(vocab_size), k=choose.randint(1, 50)) for _ in range(300)]
            source = write_jsonl(tmp_path / f"{name}.jsonl", documents)
            arguments = ["--tokenizer", "ids", "--vocab-size", vocab_size, *ends, "--out", tmp_path / name]
            build(source, *arguments, "--shard-bytes", 20_000)
            end = [] if ends[0] == "--no-eod" else [vocab_size - 1]
            cases.append(
                {
                    "prefix": str(tmp_path / f"megatron-{name}"),
                    "ours": str(tmp_path / name),
                    "vocab_size": vocab_size,
                    "documents": [[*document, *end] for document in documents],
                }
            )
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    in_megatron(MEGATRON_BUILDS, tmp_path / "cases.json")
    for case in cases:
        assert content(Path(case["ours"])) == content(Path(case["prefix"]))


@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_ids_are_those_of_the_tokenizers_own_library(tmp_path: Path, bpe: Path, engine: str) -> None:
    from tokenizers import Tokenizer

    texts = [*make_texts(400), "<|endoftext|> inside <|begin|>", " ", "\x00\x7f"]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    made = build(source, "--tokenizer", bpe, "--out", tmp_path / "out", "--engine", engine, "--shard-bytes", 9000)
    assert made["tokenizer"]["engine"] == engine
    own = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    assert read(tmp_path / "out") == [[*own.encode(text).ids, 1] for text in texts]


def test_a_template_is_applied_as_megatron_does(tmp_path: Path, bpe: Path) -> None:
    """Llama's tokenizers put a token before every text; transformers and so Megatron leave it there."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_file(str(bpe / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    tokenizer.enable_truncation(5)  # in the file, and without effect in transformers
    folder = tmp_path / "with-template"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    texts = make_texts(50)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    build(source, "--tokenizer", folder, "--out", tmp_path / "with")
    assert read(tmp_path / "with") == [[*tokenizer.encode(text).ids, 1] for text in texts]
    build(source, "--tokenizer", folder, "--out", tmp_path / "without", "--no-special-tokens", "--no-eod")
    assert read(tmp_path / "without") == [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


def test_a_tokenizer_that_gigatoken_does_not_know_is_used_all_the_same(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "the": 1, "of": 2, "##s": 3, "</s>": 4}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "wordpiece.json"))
    source = write_jsonl(tmp_path / "a.jsonl", ["the ofs of", "other"])
    done = data("build", source, "--tokenizer", tmp_path / "wordpiece.json", "--out", tmp_path / "out")
    assert "encoding with the library tokenizers, which is slower: gigatoken does not know" in done.stderr
    assert read(tmp_path / "out") == [[1, 2, 3, 2, 4], [0, 4]]


MEGATRON_TOKENIZES = """
from megatron.core.tokenizers.text.libraries import SentencePieceTokenizer, TikTokenTokenizer
texts = json.load(open(sys.argv[1]))
pieces = SentencePieceTokenizer(sys.argv[2])
ranks = TikTokenTokenizer(sys.argv[3], vocab_size=int(sys.argv[4]))
print(json.dumps([[each.text_to_ids(text) + [each.eos_id] for text in texts] for each in (pieces, ranks)]))
"""


@pytest.mark.train
def test_sentencepiece_and_tiktoken_give_megatrons_ids(tmp_path: Path, sentencepiece_model: Path) -> None:
    import base64

    texts = make_texts(200)
    merges = [bytes([at]) for at in range(256)] + [b"th", b"the", b" a", b" an", b"in"]
    entries = [
        {"rank": at, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for at, token in enumerate(merges)
    ]
    vocabulary = tmp_path / "vocabulary.json"
    vocabulary.write_text(json.dumps(entries))
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    expected = in_megatron(
        MEGATRON_TOKENIZES, tmp_path / "texts.json", sentencepiece_model, vocabulary, 1000 + len(merges)
    )
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    for tokenizer, ids in zip((sentencepiece_model, vocabulary), expected, strict=True):
        build(source, "--tokenizer", tokenizer, "--out", tmp_path / tokenizer.stem)
        assert read(tmp_path / tokenizer.stem) == ids


def _write(form: str, folder: Path, texts: list[str]) -> Path:
    """The texts as a source of this form."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    plain = write_jsonl(folder / "plain.jsonl", texts)
    table = arrow.table({"id": range(len(texts)), "text": texts})
    if form == "jsonl":
        return plain
    if form == "jsonl.gz":
        half = len(plain.read_bytes()) // 2
        # Two members, as after `cat a.gz b.gz`.
        raw = plain.read_bytes()
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(raw[:half]) + gzip.compress(raw[half:]))
        return folder / "a.jsonl.gz"
    if form == "jsonl.zst":
        with arrow.output_stream(folder / "a.jsonl.zst", compression="zstd") as stream:
            stream.write(plain.read_bytes())
        return folder / "a.jsonl.zst"
    if form == "parquet":
        parquet.write_table(table, folder / "a.parquet", row_group_size=37)
        return folder / "a.parquet"
    if form == "hugging face":
        saved = folder / "saved"
        saved.mkdir()
        names = [f"data-{at:05d}-of-00002.arrow" for at in range(2)]
        (saved / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
        # Of a `map`, `datasets` leaves such files beside the others.
        for name, part in zip([*names, "cache-0123.arrow"], (table.slice(0, 70), table.slice(70), table), strict=True):
            with arrow.ipc.new_stream(saved / name, table.schema) as stream:
                stream.write_table(part, max_chunksize=13)
        return saved
    files = folder / "files"
    files.mkdir()
    for at, text in enumerate(texts):
        (files / f"{at:05d}.txt").write_text(text, encoding="utf-8")
    return files


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "hugging face", "text files"])
def test_every_source_gives_the_same_dataset(tmp_path: Path, form: str) -> None:
    texts = make_texts(200)
    source = _write(form, tmp_path, texts)
    made = build(source, "--tokenizer", "bytes", "--out", tmp_path / "out", "--shard-bytes", 3000)
    assert read(tmp_path / "out") == as_bytes(texts)
    assert (made["documents"], made["token_type"], made["skipped"]) == (200, "uint16", {})
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.bin", "out.idx", "out.manifest.json"]


def test_lines_of_text_are_documents_where_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo\nlast without an end".encode())
    build(tmp_path / "a.txt", "--format", "lines", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert read(tmp_path / "out") == as_bytes(["one", "two", "last without an end"])


@pytest.mark.parametrize(("size", "count"), [(1, 2), (50, 10), (700, 40)])
def test_shards_of_any_size_give_the_same_bytes(tmp_path: Path, size: int, count: int) -> None:
    texts = make_texts(count, longest=12)
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    build(source, "--tokenizer", "bytes", "--out", tmp_path / "out", "--shard-bytes", size, "--workers", 2)
    assert read(tmp_path / "out") == as_bytes(texts)


def test_a_single_packed_file_is_encoded_by_all_processes(
    tmp_path: Path, bpe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = random.Random(5)
    texts = [choose.randbytes(3000).hex() for _ in range(900)]
    lines = write_jsonl(tmp_path / "a.jsonl", [*texts[:450], 7, *texts[450:]])
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes(), 1))
    words = ["--tokenizer", str(bpe), "--on-error", "skip", "--json"]
    monkeypatch.setattr(workers, "SMALLEST_SHARD", 1 << 20)

    def run(file: str, processes: int) -> Any:
        out = tmp_path / f"{processes}"
        status = cli.run(
            ["data", "build", str(tmp_path / file), *words, "--workers", str(processes), "--out", str(out)]
        )
        assert status == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    run("a.jsonl.gz", 1)
    # This process may read, but not encode.
    monkeypatch.delattr(workers, "encoder_of")
    made = run("a.jsonl.gz", 2)
    assert content(tmp_path / "2") == content(tmp_path / "1")
    assert (made["documents"], made["skipped"]) == (900, {"not-text": 1})
    assert made["examples"][0]["place"] == f"{tmp_path}/a.jsonl.gz:451"


def test_the_same_command_again_builds_nothing(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    words = ["build", source, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    data(*words)
    before = (tmp_path / "out.bin").stat().st_ino
    assert "already exists" in data(*words).stderr
    assert (tmp_path / "out.bin").stat().st_ino == before


def test_what_another_process_built_meanwhile_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dataset is finished after the command has looked for it, and before it has the lock."""
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    words = ["build", source, "--tokenizer", "bytes", "--out", tmp_path / "out"]
    begin = build_command.make_folder

    def late(folder: Path) -> None:
        data(*words)
        begin(folder)

    monkeypatch.setattr(build_command, "make_folder", late)
    assert cli.run(["data", *map(str, words), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["built"] is False
    assert not (tmp_path / "out.build").exists()


def test_another_dataset_is_replaced_only_when_asked(tmp_path: Path) -> None:
    first, second = (write_jsonl(tmp_path / f"{at}.jsonl", make_texts(20, seed=at)) for at in range(2))
    build(first, "--tokenizer", "bytes", "--out", tmp_path / "out")
    kept = content(tmp_path / "out")
    refused = data("build", second, "--tokenizer", "bytes", "--out", tmp_path / "out", expect=1)
    assert "[data-exists]" in refused.stderr and "--overwrite" in refused.stderr
    assert content(tmp_path / "out") == kept
    build(second, "--tokenizer", "bytes", "--out", tmp_path / "out", "--overwrite")
    assert read(tmp_path / "out") == as_bytes(make_texts(20, seed=1))


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["absent.jsonl"], 2, "there is no file or folder absent.jsonl"),
        (["a.xyz"], 2, "set --format jsonl|text|lines|parquet|arrow"),
        (["empty"], 2, "contains no file"),
        (["a.jsonl", "--out", "o.bin"], 2, "--out is the part of the names before .bin and .idx"),
        (["a.jsonl", "--out", "empty"], 2, "is a folder"),
        (["a.jsonl", "--tokenizer", "./nothing"], 2, "there is no tokenizer ./nothing"),
        (["a.jsonl", "--tokenizer", "empty"], 2, "contains none of tokenizer.json"),
        (["a.jsonl", "--tokenizer", "ids"], 2, "add --vocab-size"),
        (["a.jsonl", "--tokenizer", "broken.json"], 2, "is not a tokenizer"),
        (["a.jsonl", "--vocab-size", "100"], 2, "the end of document has id 256"),
    ],
)
def test_wrong_usage_is_one_sentence_and_a_fix(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "a.xyz").write_text("x")
    (tmp_path / "broken.json").write_text('{"model": {"type": "Nothing"}}')
    (tmp_path / "empty").mkdir()
    defaults: list[Any] = [] if "--tokenizer" in words else ["--tokenizer", "bytes"]
    defaults += [] if "--out" in words else ["--out", "out"]
    done = data("build", *words, *defaults, expect=code, cwd=tmp_path)
    assert message in done.stderr
    assert done.stderr.count("error:") == 1


def test_published_files_of_ranks_have_their_own_pattern_and_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files as long as those of cl100k_base and Llama 3, encoded by tiktoken itself with what those publish."""
    import base64

    import tiktoken
    from tiktoken_ext import openai_public

    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: {})  # it would download the ranks
    # Every two bytes of a piece are merged, so that the pattern decides the ids.
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    pairs += [bytes([a, b, 101]) for a in range(256) for b in range(256)]
    texts = ["it's 12345 WE'LL go\n\n  on", *make_texts(20)]
    source = write_jsonl(tmp_path / "a.jsonl", texts)
    ranks = {bytes([at]): at for at in range(256)} | {pair: 256 + at for at, pair in enumerate(pairs)}
    for count, pattern, end, vocabulary in (
        (100_256, "cl100k", 100_257, 100_277),
        (128_000, "llama3", 128_001, 128_256),
    ):
        file = tmp_path / f"{pattern}.tiktoken"
        file.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % at for t, at in ranks.items() if at < count))
        made = build(source, "--tokenizer", file, "--out", tmp_path / pattern)
        assert (made["tokenizer"]["eod"], made["tokenizer"]["vocab_size"]) == (end, vocabulary)
        kept = {token: at for token, at in ranks.items() if at < count}
        splits = openai_public.cl100k_base()["pat_str"] if pattern == "cl100k" else _PATTERNS[pattern]
        plain = tiktoken.Encoding(pattern, pat_str=splits, mergeable_ranks=kept, special_tokens={})
        assert read(tmp_path / pattern) == [[*plain.encode(text), end] for text in texts]


def test_a_name_of_the_hub_is_read_from_the_cache_alone(
    tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    import huggingface_hub

    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    source = write_jsonl(tmp_path / "a.jsonl", make_texts(20))
    words = [source, "--tokenizer", "some-org/Some-Model-8B", "--out", tmp_path / "named"]
    absent = data("build", *words, expect=3).stderr
    assert f"{tmp_path}/hf/hub has no tokenizer of that name" in absent
    assert "hf download some-org/Some-Model-8B" in absent and "HF_TOKEN" in absent
    model = tmp_path / "hf" / "hub" / "models--some-org--Some-Model-8B"
    shutil.copytree(bpe, model / "snapshots" / "b0b0")
    (model / "snapshots" / "a0a0").mkdir()
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("b0b0")
    made = build(*words)
    cached = huggingface_hub.try_to_load_from_cache(
        "some-org/Some-Model-8B", "tokenizer.json", cache_dir=tmp_path / "hf" / "hub"
    )
    assert made["tokenizer"]["file"] == cached
    build(source, "--tokenizer", bpe, "--out", tmp_path / "folder")
    assert content(tmp_path / "named") == content(tmp_path / "folder")
