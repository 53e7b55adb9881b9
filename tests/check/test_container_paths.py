"""Every path of a run as its container has it: what no mount brings there is refused, under each runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support_site import codes, data_problems, ready

from fp8launch.check import job_paths
from fp8launch.cluster.profile import Cluster
from fp8launch.cluster.runtimes import Runtime
from fp8launch.diagnostics import Problem
from fp8launch.job.container import covering, on_host
from fp8launch.job.job import Mount
from fp8launch.megatron.path_flags import PATH_FLAGS
from fp8launch.megatron.schema import load_schema, supported_versions

RUNTIMES: list[Runtime] = ["pyxis", "apptainer", "charliecloud"]
# Blends and what a training of GPT from our entry never reads.
ELSEWHERE = {"tokenizer_model", "bert_load", "ict_load", "titles_data_path", "evidence_data_path"}


def boxed(
    folder: Path, text: str, runtime: Runtime | None = None, mounts: str = "", contains: str = ""
) -> list[Problem]:
    box = f"container: {{image: nemo-26.04, mounts: [{mounts}], contains: [{contains}]}}\n"
    return data_problems(ready(folder, box + text), Cluster(runtime=runtime))


def flags() -> Iterator[str]:
    known = set(load_schema(supported_versions()[-1]).names())
    return (name for name in PATH_FLAGS if name in known and name not in ELSEWHERE)


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("place", ["/nope/base", "/nope"])
def test_a_checkpoint_outside_every_mount(tmp_path: Path, runtime: Runtime, place: str) -> None:
    """Neither loaded from there (random weights would take its place) nor written there (it would be lost)."""
    text = f"checkpoint: {{load: {place}, dir: {place}/new, interval: 10}}\n"
    problems = boxed(tmp_path, text, runtime)
    assert [(p.code, p.severity) for p in problems] == [("path-not-mounted", "error")] * 2
    load, save = problems
    assert "checkpoint.load" in load.message and "will not find it" in load.message
    assert "checkpoint.dir" in save.message and "deleted with the container" in save.message
    assert "container: {mounts: [/nope]}" in str(load.fix) and "container: {mounts: [/nope]}" in str(save.fix)
    assert load.where == f"{tmp_path}/recipe.yaml:3"
    assert data_problems(ready(tmp_path, text), Cluster(runtime=runtime))[0].code == "checkpoint-missing"


@pytest.mark.parametrize("flag", sorted(flags()))
def test_every_flag_with_a_path(tmp_path: Path, flag: str) -> None:
    """Absent here or present here: what counts is what the container shows."""
    value = ["/nope/x"] if flag in ("data_path", "train_data_path", "valid_data_path", "test_data_path") else "/nope/x"
    text = f"data: null\nsoftware: {{megatron: '0.19'}}\nmegatron: {json.dumps({flag: value})}\n"
    if flag == "save":
        text = "checkpoint: {dir: /nope/x, interval: 10}\n"
    assert "path-not-mounted" in codes(boxed(tmp_path, text)), flag
    assert "path-not-mounted" not in codes(boxed(tmp_path, text, mounts="/nope"))
    assert "path-not-mounted" not in codes(data_problems(ready(tmp_path, text)))


def test_a_training_script_and_an_interpreter(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    text = f"launch: {{script: {script}}}\n"
    assert codes(boxed(tmp_path, text)) == ["path-not-mounted"]
    assert boxed(tmp_path, text, mounts=str(tmp_path)) == []
    assert boxed(tmp_path, "launch: {script: /opt/megatron-lm/pretrain_gpt.py}\n", contains="/opt/megatron-lm") == []
    assert codes(boxed(tmp_path, f"launch: {{script: {tmp_path}/gone.py}}\n", mounts=str(tmp_path))) == [
        "script-missing"
    ]
    assert codes(boxed(tmp_path, "launch: {script: train.py}\n")) == ["path-not-mounted"]
    assert boxed(tmp_path, "launch: {script: train.py}\n", mounts=str(tmp_path)) == []
    assert codes(boxed(tmp_path, f"launch: {{python: {tmp_path}/venv/bin/python}}\n")) == ["path-not-mounted"]
    assert boxed(tmp_path, "launch: {python: /opt/venv/bin/python}\n") == []


def test_a_path_that_leads_out_of_the_run_folder(tmp_path: Path) -> None:
    text = "checkpoint: {dir: ../shared, interval: 10}\n"
    assert codes(boxed(tmp_path, text)) == ["path-not-mounted"]
    assert data_problems(ready(tmp_path, text)) == []
    assert boxed(tmp_path, "checkpoint: {dir: a/../ckpt, interval: 10}\n") == []


def test_a_link_inside_a_mount_is_followed_as_the_container_follows_it(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "ckpt").symlink_to(tmp_path / "big")
    (tmp_path / "home" / "near").symlink_to("../home/real")
    text = f"checkpoint: {{dir: {tmp_path}/home/ckpt/new, interval: 10}}\n"
    [problem] = boxed(tmp_path, text, mounts=f"{tmp_path}/home")
    assert problem.code == "path-not-mounted" and f"a link to {tmp_path}/big/new" in problem.message
    assert f"mounts: [{tmp_path}/big]" in str(problem.fix)
    assert boxed(tmp_path, text, mounts=f"{tmp_path}/home, {tmp_path}/big") == []
    # A mount of the link itself is a mount of what it leads to.
    assert boxed(tmp_path, text, mounts=f"{tmp_path}/home/ckpt") == []
    assert boxed(tmp_path, text.replace("ckpt/new", "near/new"), mounts=f"{tmp_path}/home") == []
    (tmp_path / "home" / "ring").symlink_to("ring")
    assert boxed(tmp_path, text.replace("home/ckpt", "home/ring"), mounts=f"{tmp_path}/home") == []  # and ends


def test_each_runtime_mounts_its_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    at_home = f"checkpoint: {{dir: {home}/ckpt, interval: 10}}\n"
    in_tmp = "checkpoint: {dir: /tmp/ckpt, interval: 10}\n"
    assert boxed(tmp_path, at_home, "apptainer") == []
    assert boxed(tmp_path, in_tmp, "apptainer") == [] == boxed(tmp_path, in_tmp, "charliecloud")
    assert codes(boxed(tmp_path, in_tmp, "pyxis")) == ["path-not-mounted"]
    assert boxed(tmp_path, in_tmp, "none") == []


def test_what_the_site_binds_for_apptainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "apptainer.conf"
    config.write_text(
        "# bind path = /no\nbind path = /etc/localtime\nbind path = /scratch:/datasets:ro\n bind path=/lustre\n"
    )
    monkeypatch.setattr(job_paths, "_APPTAINER_CONFIGS", (tmp_path / "none", config))
    for place, expected in (("/lustre/a", []), ("/no/a", ["path-not-mounted"]), ("/datasets/a", ["not-writable"])):
        text = f"checkpoint: {{dir: {place}, interval: 10}}\n"
        found = [code for code in codes(boxed(tmp_path, text, "apptainer")) if code != "not-writable" or expected]
        assert found == expected, place


def test_what_an_image_that_is_a_folder_holds(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "opt").mkdir(parents=True)
    (image / "opt" / "tp.yaml").write_text("")
    cluster = Cluster(runtime="charliecloud", images={"tiny": str(image)})
    for name, expected in (("tp.yaml", []), ("other.yaml", ["path-not-mounted"])):
        text = f"container: {{image: tiny}}\nmegatron: {{tp_comm_overlap_cfg: /opt/{name}}}\n"
        assert codes(data_problems(ready(tmp_path, text), cluster)) == expected


def test_mounts_hide_each_other_in_the_order_in_which_they_are_made() -> None:
    """As pyxis and ch-run do it, tried with both."""
    outer, inner = Mount("/b", "/data"), Mount("/a", "/data/x")
    assert on_host((outer, inner), "/data/x/f") == "/a/f"
    assert on_host((outer, inner), "/data/y") == "/b/y"
    assert on_host((inner, outer), "/data/x/f") == "/b/x/f"
    assert on_host((outer,), "//data/./x/../f/") == "/b/f"
    assert on_host((outer,), "/database") is None
    assert covering((Mount("/", "/"),), "/x/y") == Mount("/", "/")
    assert on_host((Mount("/", "/host"),), "/host/x") == "/x"
