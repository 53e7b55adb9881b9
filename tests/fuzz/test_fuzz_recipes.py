"""Arbitrary recipes, overrides and cluster profiles get a readable answer, without side effects."""

from __future__ import annotations

import functools
import os
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from sandbox import Sandbox
from wild import as_yaml, damaged, filled, mutated, share, texts, values

from fp8launch.cluster.profile import Cluster
from fp8launch.job.prepared import prepare, resolved_yaml
from fp8launch.recipe.load import load_recipe
from fp8launch.recipe.schema import Recipe
from fp8launch.resources import pack_folder

SHIPPED = ("tiny_cpu", "llama8b_fp8", "llama8b_nvfp4_b200", "deepseek_v3_mxfp8_gb200", "studies/scaling_weak_llama8b")


@functools.cache
def shipped() -> tuple[Any, ...]:
    """Recipes of the pack, with all that they extend, and some that only extend."""
    whole = [load_recipe(name).tree.plain() for name in SHIPPED]
    more = {"survive": {"attempts": 3, "rules": {"nan": "stop"}}, "checkpoint": {"dir": "ckpt", "interval": 10}}
    return (
        *whole,
        {**whole[0], **more, "env": {"A": "1"}, "secrets": ["X_TOKEN"], "silence": {"a-b": "why"}},
        {"extends": ["tiny_cpu"], "name": "x", "axes": {"train.lr": [0.1, 0.2]}, "nodes": [1, 2]},
        {"extends": "llama8b_fp8", "container": {"image": "nemo-26.04", "mounts": ["/a:/b:ro"]}},
        {"megatron": {"num-layers": 2, "fp8-format": "hybrid"}, "resources": {"nodes": 1}},
    )


def recipe_file(box: Sandbox, content: str | bytes) -> str:
    file = box.work / "r.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    return str(file)


VERBS = (
    ("render",), ("render", "--as", "sbatch"), ("render", "--as", "sbatch", "--portable"), ("render", "--as", "yaml"),
    ("render", "--as", "json"), ("render", "--nodes", "2"), ("estimate",), ("recipes",), ("diff", "tiny_cpu"),
    ("submit", "--dry-run"), ("submit", "--yes", "--dry-run", "--sweep", "train.lr=1,2"),
)  # fmt: skip


@share(0.18)
@given(data=st.data(), verb=st.sampled_from(VERBS))
def test_recipes(box: Sandbox, data: st.DataObject, verb: tuple[str, ...]) -> None:
    tree = filled(data.draw(mutated(shipped(), tuple(Recipe.model_fields))), box.canary)
    box(verb[0], recipe_file(box, as_yaml(tree)), *verb[1:])


@share(0.003)
@given(data=st.data())
def test_checks_of_recipes(box: Sandbox, data: st.DataObject) -> None:
    """With Megatron's validators, which run in a separate Python."""
    tree = filled(data.draw(mutated(shipped(), tuple(Recipe.model_fields))), box.canary)
    box("check", recipe_file(box, as_yaml(tree)), "--json")


@share(0.15)
@given(data=st.data())
def test_yaml(box: Sandbox, data: st.DataObject) -> None:
    """Text that is nearly a recipe, and text that is none."""
    files = [file.read_bytes() for file in sorted(pack_folder("recipes").rglob("*.yaml"))]
    pieces = (
        b"&a ",
        b"*a",
        b"!!python/name:os.system ",
        b"<<: *a\n",
        b"? ",
        b"- ",
        b"{",
        b"[",
        b"---\n",
        b"\t",
        b"%TAG ! x\n",
    )
    content = data.draw(damaged(files, pieces) | st.binary(max_size=80))
    box("render", recipe_file(box, content))


@share(0.15)
@given(data=st.data(), verb=st.sampled_from(VERBS[:7]))
def test_overrides(box: Sandbox, data: st.DataObject, verb: tuple[str, ...]) -> None:
    recipe = data.draw(st.sampled_from(SHIPPED[:3]))
    known = [".".join(map(str, way)) for way in _ways(load_recipe(recipe).tree.plain())]
    sets = []
    for _ in range(data.draw(st.integers(1, 3))):
        key = data.draw(st.sampled_from(known) | texts)
        sign = data.draw(st.sampled_from(("=", "=", "=", "==", "", ":")))
        value = data.draw(texts | values.map(as_yaml))
        word = filled(f"{key}{sign}{value}", box.canary).replace("\0", "")  # no argument holds a NUL
        sets += ["--set", os.fsdecode(word.encode("utf-8", "surrogatepass"))]
    box(verb[0], recipe, *verb[1:], *sets)


def _ways(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(tree, dict):
        return [path]
    return [way for key, value in tree.items() for way in [(*path, key), *_ways(value, (*path, key))]]


@share(0.005)
@given(data=st.data())
def test_grids(box: Sandbox, data: st.DataObject) -> None:
    words = []
    for option in ("--sweep", "--nodes", "--study", "--repeat", "--run-root", "--attempts"):
        if data.draw(st.booleans()):
            value = data.draw(texts)
            word = f"{data.draw(st.sampled_from(('train.lr', 'megatron.seed', 'env.A', value)))}={value}"
            chosen = word if option == "--sweep" else data.draw(st.sampled_from(("1,2", "3", value)))
            words += [
                option,
                os.fsdecode(filled(chosen, box.canary).replace("\0", "").encode("utf-8", "surrogatepass")),
            ]
    box("submit", "tiny_cpu", "--dry-run", *words)


@functools.cache
def profiles() -> tuple[Any, ...]:
    examples = [yaml.safe_load(file.read_text()) for file in sorted(pack_folder("clusters").glob("*.yaml"))]
    more = {
        "account": "a", "partition": "p", "qos": "q", "constraint": "a&b", "nodelist": "n[1-4]", "exclude": "n1",
        "gpus": "gres", "gres_type": "h100", "segment": 2, "exclusive": True, "memory": "0", "requeue": False,
        "continue_by": "dependency", "rules": {"nan": "go-on"}, "ask_gpu_hours": 5,
        "rehearse": {"from_gpu_hours": 1.0e9}, "arrays": False, "mpi": "pmix",
        "launch": "torchrun", "options": {"mail-user": "a@b", "wait-all-nodes": 1}, "setup": ["module load x"],
        "env": {"B": 3.10}, "runtime": "apptainer", "images": {"x": "/a/x.sif"}, "mounts": ["/a:/b"], "python": "/p",
        "run_root": "$HOME/runs", "health_check": True,
    }  # fmt: skip
    return (*examples, more, {**more, "ssh": {"host": "login", "user": "u", "port": 22}})


@share(0.1)
@given(data=st.data(), verb=st.sampled_from(VERBS[1:5] + VERBS[9:]))
def test_cluster_profiles(box: Sandbox, data: st.DataObject, verb: tuple[str, ...]) -> None:
    file = box.work / "c.yaml"
    tree = filled(data.draw(mutated(profiles(), tuple(Cluster.model_fields))), box.canary)
    file.write_text(as_yaml(tree))
    recipe = data.draw(st.sampled_from(("tiny_cpu", "llama8b_fp8")))
    box(verb[0], recipe, *verb[1:], "--cluster", str(file))


@share(0.05)
@given(data=st.data())
def test_a_resolved_recipe_is_the_same_recipe(box: Sandbox, data: st.DataObject) -> None:
    """The run folder has the requested values, even if they look like other types to YAML."""
    tree = filled(data.draw(mutated(shipped(), tuple(Recipe.model_fields))), box.canary)
    file = recipe_file(box, as_yaml(tree))
    if box("render", file)[0]:
        return
    first = prepare(file)
    again = prepare(recipe_file(box, resolved_yaml(first)))
    assert (again.args.version, again.args.argv) == (first.args.version, first.args.argv)
    assert again.loaded.recipe.environment == first.loaded.recipe.environment


@pytest.mark.parametrize(
    "verb",
    [
        pytest.param(verb, marks=[pytest.mark.needs_plugin(verb[0])] if verb[0] in ("diff", "estimate") else [])
        for verb in VERBS
    ],
)
def test_the_recipes_themselves(box: Sandbox, verb: tuple[str, ...]) -> None:
    """What is mutated does work."""
    assert box(verb[0], "tiny_cpu", *verb[1:])[0] == 0
