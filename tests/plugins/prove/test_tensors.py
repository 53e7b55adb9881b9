"""How checkpoints are compared."""

from __future__ import annotations

import io
import pickle
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("torch") is None:
    pytest.skip("needs torch", allow_module_level=True)

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from fp8launch.plugins.prove import resuming, tensors


def test_gradients_come_from_the_first_moments_of_all_optimizers() -> None:
    state = {
        "optimizer.state.exp_avg.decoder.weight": torch.tensor([0.5]),
        "chained_1.optimizer.state.exp_avg.experts.weight": torch.tensor([2.0]),
        "optimizer.state.exp_avg_sq.decoder.weight": torch.tensor([9.0]),
        "decoder.weight": torch.tensor([1.0]),
    }
    assert tensors.gradients(state) == {"decoder.weight": 5.0, "experts.weight": 20.0}
    assert list(tensors.weights(state)) == ["decoder.weight"]


def test_a_tensor_is_described_by_norms_and_scale() -> None:
    found = tensors._compare({"a": torch.tensor([3.0, 4.0])}, {"a": torch.tensor([6.0, 8.0]), "b": torch.ones(1)})
    assert found["a"] == {"first": 5.0, "second": 10.0, "difference": 5.0, "scale": 2.0}
    assert found["b"]["first"] is None


def test_objects_are_the_same_by_their_values() -> None:
    one = {"iteration": 4, "states": [torch.ones(2), np.ones(2)], "args": "these folders"}
    other = {"iteration": 4, "states": [torch.ones(2), np.ones(2)], "args": "others"}
    assert tensors.differences("state", [one], [other]) == []
    assert tensors.differences("state", [one], [{**other, "iteration": 5}]) == ["state.0.iteration (5 instead of 4)"]
    assert tensors.differences("state", one, {**other, "states": [torch.ones(2), np.zeros(2)]}) == ["state.states.1"]
    assert tensors.differences("state", one, {**other, "more": 1}) == ["state.more (1 instead of None)"]


def test_stored_objects_are_loaded() -> None:
    stream = io.BytesIO()
    torch.save({"step": 1}, stream)
    assert tensors._loaded("state", stream) == {"step": 1}
    assert tensors._loaded("state", 7) == 7


@pytest.mark.parametrize("form", ["tensor", "stream"])
def test_states_of_fp8_are_the_same_by_their_values(tmp_path: Path, form: str) -> None:
    name = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"

    def saved(folder: str, state: object) -> str:
        content = pickle.dumps(state)
        whole = io.BytesIO(content) if form == "stream" else torch.frombuffer(bytearray(content), dtype=torch.uint8)
        planner = DefaultSavePlanner(flatten_state_dict=False)
        dcp.save({name: [whole]}, storage_writer=FileSystemWriter(tmp_path / folder), planner=planner, no_dist=True)
        return str(tmp_path / folder)

    once, twice = "recipe", "".join(["rec", "ipe"])
    one = {"names": [once, once], "scale_fwd": torch.ones(2)}
    other = {"names": [once, twice], "scale_fwd": torch.ones(2)}
    assert pickle.dumps(one) != pickle.dumps(other)
    first = saved("first", one)
    assert tensors._different_objects(first, saved("equal", other)) == []
    changed = saved("changed", {**other, "scale_fwd": torch.zeros(2)})
    assert tensors._different_objects(first, changed) == [f"{name}.0.scale_fwd"]


def test_only_streams_of_random_numbers_that_are_drawn_from_count() -> None:
    def rank(drawn: str, expert: str) -> dict[str, object]:
        states = [{"drawn": first, "expert": expert} for first in ("a", drawn)]
        return {"losses": [], "norms": [], "batches": [], "random": states}

    assert resuming._different_records([rank("b", "x")], [rank("b", "y")]) == []
    assert resuming._different_records([rank("b", "x")], [rank("c", "x")]) == ["random numbers (drawn)"]
