"""Tokenizers, checkpoints, and every other file or folder that a Megatron flag names."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from indexed_files import write_dataset
from support_site import codes, data_problems, indexed, ready

from fp8launch import schedulers
from fp8launch.check import files, login_node
from fp8launch.cluster.profile import Cluster
from fp8launch.diagnostics import Problem
from fp8launch.megatron.path_flags import PATH_FLAGS
from fp8launch.megatron.schema import load_schema, supported_versions
from fp8launch.schedulers.slurm import preflight


def only(problems: list[Problem]) -> Problem:
    assert len(problems) == 1, problems
    return problems[0]


def with_tokenizer(tmp_path: Path, kind: str, model: str | None = None, more: str = "") -> list[Problem]:
    a = write_dataset(tmp_path / "a", [1000] * 200)
    tokenizer = {"type": kind} | ({"model": model} if model else {})
    return data_problems(ready(tmp_path, indexed([str(a)], tokenizer=tokenizer) + more), environment={})


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer", "TikTokenizer"])
def test_a_tokenizer_of_one_file(tmp_path: Path, kind: str) -> None:
    model = tmp_path / "tok" / "tokenizer.model"
    problem = only(with_tokenizer(tmp_path, kind, str(model)))
    assert (problem.code, problem.severity) == ("tokenizer-missing", "error")
    assert problem.where == f"{tmp_path}/recipe.yaml:2"
    model.parent.mkdir()
    model.write_bytes(b"x")
    assert with_tokenizer(tmp_path, kind, str(model)) == []
    assert only(with_tokenizer(tmp_path, kind, str(model.parent))).fix == f"write {model}"
    assert only(with_tokenizer(tmp_path, kind)).code == "tokenizer-missing"


def test_a_tokenizer_folder_of_hugging_face(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    assert only(with_tokenizer(tmp_path, "HuggingFaceTokenizer", str(folder))).code == "tokenizer-missing"
    folder.mkdir()
    assert "contains none of" in only(with_tokenizer(tmp_path, "HuggingFaceTokenizer", str(folder))).message
    (folder / "tokenizer.json").write_text("{}")
    assert with_tokenizer(tmp_path, "HuggingFaceTokenizer", str(folder)) == []
    assert only(with_tokenizer(tmp_path, "HuggingFaceTokenizer", "./llama")).code == "path-relative"


def test_a_tokenizer_from_the_hub_is_a_warning_until_it_is_in_the_cache(tmp_path: Path) -> None:
    name, cache = "meta-llama/Llama-3.1-8B", tmp_path / "hf"
    setting = f"env: {{HF_HOME: {cache}}}\n"
    problem = only(with_tokenizer(tmp_path, "HuggingFaceTokenizer", name, setting))
    assert (problem.code, problem.severity) == ("tokenizer-from-network", "warning")
    snapshot = cache / "hub" / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    assert codes(with_tokenizer(tmp_path, "HuggingFaceTokenizer", name, setting)) == ["tokenizer-from-network"]
    (snapshot / "tokenizer.json").write_text("{}")
    assert with_tokenizer(tmp_path, "HuggingFaceTokenizer", name, setting) == []


def test_gpt2_needs_vocabulary_and_merges(tmp_path: Path) -> None:
    problem = only(with_tokenizer(tmp_path, "GPT2BPETokenizer"))
    assert (problem.code, problem.severity) == ("tokenizer-from-network", "warning")
    assert "vocab_file and merge_file" in problem.message
    (tmp_path / "vocab.json").write_text("{}")
    flags = f"megatron: {{vocab_file: {tmp_path}/vocab.json, merge_file: {tmp_path}/merges.txt}}\n"
    problem = only(with_tokenizer(tmp_path, "GPT2BPETokenizer", more=flags))
    assert problem.code == "file-missing" and "merge_file" in problem.message


def load(tmp_path: Path, text: str, *overrides: str) -> list[Problem]:
    return data_problems(ready(tmp_path, f"checkpoint: {{{text}}}\n", *overrides))


def test_checkpoints_that_megatron_would_not_find(tmp_path: Path) -> None:
    """It would start from random weights."""
    folder = tmp_path / "ckpt"
    problem = only(load(tmp_path, f"load: {folder}"))
    assert (problem.code, problem.severity) == ("checkpoint-missing", "error")
    assert problem.where == f"{tmp_path}/recipe.yaml:2"
    folder.mkdir()
    assert "random weights" in only(load(tmp_path, f"load: {folder}")).message
    (folder / "iter_0000100").mkdir()
    assert "ckpt_step: 100" in (only(load(tmp_path, f"load: {folder}")).fix or "")
    assert f"use its parent folder, {folder}" in (only(load(tmp_path, f"load: {folder}/iter_0000100")).fix or "")
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text("100\n")
    assert "empty iter_0000100" in only(load(tmp_path, f"load: {folder}")).message
    (folder / "iter_0000100" / "common.pt").write_bytes(b"x")
    assert load(tmp_path, f"load: {folder}") == []
    assert load(tmp_path, f"load: {folder}", "megatron.ckpt_step=100") == []
    assert "iter_0000050" in only(load(tmp_path, f"load: {folder}", "megatron.ckpt_step=50")).message
    for text in ("200", "soon", "", "release"):
        tracker.write_text(text)
        assert codes(load(tmp_path, f"load: {folder}")) == ["checkpoint-missing"], text


def test_a_hugging_face_checkpoint_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    assert "convert" in (only(load(tmp_path, f"load: {folder}")).fix or "")


def test_the_first_start_of_a_run_that_goes_on_from_its_own_checkpoints(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    assert load(tmp_path, f"dir: {folder}, interval: 5, load: {folder}") == []
    assert load(tmp_path, "dir: ckpt, interval: 5, load: ckpt") == []
    assert codes(load(tmp_path, "dir: ckpt, interval: 5, load: other")) == ["path-relative"]
    # Checkpoints without a tracker are no first start.
    (folder / "iter_0000005").mkdir(parents=True)
    assert codes(load(tmp_path, f"dir: {folder}, interval: 5, load: {folder}/")) == ["checkpoint-missing"]


def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    problem = only(load(tmp_path, f"dir: {tmp_path}/file/ckpt, interval: 5"))
    assert (problem.code, problem.severity) == ("not-writable", "error")
    assert f"{tmp_path}/file is not a folder" in problem.message
    box = f"container: {{image: nemo-26.04, mounts: ['{tmp_path}:/out:ro']}}\n"
    problem = only(data_problems(ready(tmp_path, box + "megatron: {tensorboard_dir: /out/tb}\n")))
    assert problem.code == "not-writable" and "read-only" in problem.message
    # Made by the run, or in its own folder.
    assert load(tmp_path, f"dir: {tmp_path}/new/ckpt, interval: 5", "megatron.tensorboard_dir=tb") == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_of_someone_else(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir(mode=0o555)
    assert codes(load(tmp_path, f"dir: {tmp_path}/theirs/ckpt, interval: 5")) == ["not-writable"]


def test_checkpoints_that_would_be_lost_with_the_container(tmp_path: Path) -> None:
    text = f"container: {{image: nemo-26.04}}\ncheckpoint: {{dir: {tmp_path}, interval: 5}}\n"
    problem = only(data_problems(ready(tmp_path, text)))
    assert (problem.code, problem.severity) == ("path-not-mounted", "error")
    # Charliecloud brings /tmp.
    told = codes(data_problems(ready(tmp_path, text), Cluster(runtime="charliecloud")))
    assert told == ([] if tmp_path.is_relative_to("/tmp") else ["path-not-mounted"])


def test_files_that_flags_name(tmp_path: Path) -> None:
    flags = f"megatron: {{tp_comm_overlap_cfg: {tmp_path}/tp.yaml, te_precision_config_file: precision.yaml}}\n"
    found = {p.code: p for p in data_problems(ready(tmp_path, flags))}
    assert found.keys() == {"file-missing", "path-relative"}
    assert "tp_comm_overlap_cfg" in found["file-missing"].message
    (tmp_path / "tp.yaml").write_text("")
    assert codes(data_problems(ready(tmp_path, flags))) == ["path-relative"]


@pytest.mark.parametrize("path", ["/" + "x" * 5000, "/a\x07b", "//", "/\u00e9\U0001f600"])
def test_no_path_ends_in_a_traceback(tmp_path: Path, path: str) -> None:
    quoted = json.dumps(path, ensure_ascii=False)
    kept = f"checkpoint: {{load: {quoted}, dir: {quoted}, interval: 1}}\n"
    tokenizer = {"type": "TikTokenizer", "model": path}
    problems = data_problems(ready(tmp_path, kept + indexed([path], tokenizer=tokenizer, cache=path)))
    assert {"data-missing", "tokenizer-missing"} <= set(codes(problems))


# Flags whose names sound like paths and that name none.
NO_PATHS = re.compile(
    r"dist_ckpt_format|fim_.*|.*_json|.*prompt_format|tokenizer_special_tokens|offload_modules|.*_run_name|one_logger.*"
)


@pytest.mark.parametrize("version", supported_versions())
def test_the_table_has_every_flag_that_sounds_like_a_path(version: str) -> None:
    sounds = re.compile(
        r"file|path|dir$|folder|model$|cfg|load|save|ckpt|checkpoint|json|yaml|trace|dump|snapshot|config|script"
    )
    texts = {f.name for f in load_schema(version).flags() if f.type == "str" and not f.choices}
    assert {name for name in texts if sounds.search(name) and not NO_PATHS.fullmatch(name)} <= set(PATH_FLAGS)


def test_the_table_has_no_flag_that_no_version_knows() -> None:
    assert set(PATH_FLAGS) <= set().union(*(set(load_schema(v).names()) for v in supported_versions()))


def test_every_code_is_announced() -> None:
    """`silence:` in a recipe accepts the codes that a layer announces."""
    from fp8launch.check import checkpoints, data, job_paths, tokenizers

    said: set[tuple[str, str]] = set()
    for module in (data, files, login_node, preflight, checkpoints, job_paths, tokenizers):
        text = Path(str(module.__file__)).read_text()
        said |= set(re.findall(r'Problem\(\s*"(error|warning)",\s*"([a-z-]+)"', text))
    announced = {**login_node.CODES, **schedulers.problem_codes()}
    assert said and {code: severity for severity, code in said}.items() <= announced.items()
    assert len({code for _, code in said}) == len(said), "a code has one severity"


def test_home_of_the_hub_cache_in_a_container_is_not_ours(tmp_path: Path) -> None:
    """The job's home is not mounted, so a filled cache there helps nobody."""
    snapshot = tmp_path / ".cache/huggingface/hub/models--gpt2/snapshots/1"
    snapshot.mkdir(parents=True)
    (snapshot / "vocab.json").write_text("{}")
    text = "data: {tokenizer: {type: HuggingFaceTokenizer, model: gpt2}}\n"
    home = {"HOME": str(tmp_path)}
    assert data_problems(ready(tmp_path, text), environment=home) == []
    box = "container: {image: nemo-26.04}\n"
    assert codes(data_problems(ready(tmp_path, box + text), Cluster(), home)) == ["tokenizer-from-network"]
