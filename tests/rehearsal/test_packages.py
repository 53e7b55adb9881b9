"""Stand-ins for compiled packages: shapes that fit together over a dispatch and its way back."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch")


class Group:
    """Four ranks, seen by the second."""

    def size(self) -> int:
        return 4

    def rank(self) -> int:
        return 1


@pytest.fixture
def routes() -> Any:
    """Six tokens, each to two of eight experts: experts 2 and 3 are this rank's."""
    import torch

    return torch.tensor([[0, 2], [2, 3], [3, 7], [4, 5], [1, 6], [0, 2]])


def test_hybrid_ep_gives_each_expert_a_padded_number_of_rows(routes: Any) -> None:
    import torch

    from fp8launch.rehearsal.packages.deep_ep import HybridEPBuffer

    hidden = torch.ones(6, 16)
    chosen = torch.zeros(6, 8, dtype=torch.bool).scatter(1, routes, True)
    buffer = HybridEPBuffer(Group(), 16, 6, 2)
    received, weights, scales, counts, handle = buffer.dispatch_with_permute(
        hidden=hidden, routing_map=chosen, probs=chosen.float(), num_of_experts_per_rank=2, pad_multiple=16
    )
    # 3 and 2 tokens of mine, as many of three other ranks, padded to 16.
    assert counts.tolist() == [16, 16]
    assert received.shape == (32, 16)
    assert weights.shape == (32,)
    assert scales is None
    back, probabilities = buffer.combine_with_unpermute(hidden=received, probs=weights, handle=handle)
    assert back.shape == hidden.shape
    assert probabilities.shape == chosen.shape


def test_hybrid_ep_drops_the_tokens_that_it_has_no_room_for(routes: Any) -> None:
    import torch

    from fp8launch.rehearsal.packages.deep_ep import HybridEPBuffer

    chosen = torch.zeros(6, 8, dtype=torch.bool).scatter(1, routes, True)
    buffer = HybridEPBuffer(Group(), 16, 6, 2)
    received, _, _, counts, _ = buffer.dispatch_with_permute(
        hidden=torch.ones(6, 16), routing_map=chosen, num_of_experts_per_rank=2, pad_multiple=16, num_permuted_tokens=16
    )
    assert received.shape == (16, 16)
    assert counts.tolist() == [16, 0]


def test_deep_ep_receives_each_token_once_a_rank(routes: Any) -> None:
    import torch

    from fp8launch.rehearsal.packages.deep_ep import Buffer

    hidden, weights = torch.ones(6, 16), torch.ones(6, 2)
    buffer = Buffer(Group())
    to_rank, _, per_expert, where, _ = buffer.get_dispatch_layout(routes, 8)
    assert to_rank.tolist() == [3, 4, 1, 2]
    rows, indices, _, counts, handle, _ = buffer.dispatch(
        hidden, topk_idx=routes, topk_weights=weights, num_tokens_per_rank=to_rank, is_token_in_rank=where,
        num_tokens_per_expert=per_expert,
    )  # fmt: skip
    assert rows.shape == (16, 16)
    assert indices.max() < 2
    assert counts == [12, 8]
    assert buffer.combine(rows, handle)[0].shape == hidden.shape


def test_deep_ep_has_no_configuration_for_odd_groups() -> None:
    from fp8launch.rehearsal.packages.deep_ep import Buffer

    with pytest.raises(AssertionError, match="Unsupported number of EP ranks: 12"):
        Buffer.get_dispatch_config(12)
