"""What the training tests share: one set of weights, and the run of one process that the parallel runs must repeat."""

from __future__ import annotations

from pathlib import Path

import pytest
from train_jobs import MOCK, Run, forked, from_weights, worker


@pytest.fixture(scope="session")
def weights(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the tiny model before its first real step, for runs that must start from the same weights.

    Megatron draws other initial weights for other parallel sizes, and its first iteration has a learning rate of 0.
    """
    folder = tmp_path_factory.mktemp("weights")
    forked(1, [*MOCK, "--exit-interval", "1", "--save", str(folder), "--save-interval", "1"]).succeeded()
    return folder


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `alone` saves iterations 7 and 10."""
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="session")
def alone(weights: Path, saved: Path) -> Run:
    """Ten iterations of one process from those weights: what every parallel run must repeat."""
    return worker([*MOCK, *from_weights(weights), "--save", str(saved), "--save-interval", "7"]).succeeded()
