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

    from fp8launch.plugins.rehearse.packages.deep_ep import HybridEPBuffer

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

    from fp8launch.plugins.rehearse.packages.deep_ep import HybridEPBuffer

    chosen = torch.zeros(6, 8, dtype=torch.bool).scatter(1, routes, True)
    buffer = HybridEPBuffer(Group(), 16, 6, 2)
    received, _, _, counts, _ = buffer.dispatch_with_permute(
        hidden=torch.ones(6, 16), routing_map=chosen, num_of_experts_per_rank=2, pad_multiple=16, num_permuted_tokens=16
    )
    assert received.shape == (16, 16)
    assert counts.tolist() == [16, 0]


def test_deep_ep_receives_each_token_once_a_rank(routes: Any) -> None:
    import torch

    from fp8launch.plugins.rehearse.packages.deep_ep import Buffer

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
    from fp8launch.plugins.rehearse.packages.deep_ep import Buffer

    with pytest.raises(AssertionError, match="Unsupported number of EP ranks: 12"):
        Buffer.get_dispatch_config(12)


def test_megatron_0_17_finds_the_version_that_it_wants() -> None:
    """Its Muon looks for a version of emerging-optimizers, not for the package."""
    from fp8launch.plugins.rehearse.packages import VERSIONS

    assert tuple(map(int, VERSIONS["emerging-optimizers"].split("."))) >= (0, 2)


def test_muons_update_passes_megatrons_orthogonalization() -> None:
    import torch

    from fp8launch.plugins.rehearse.packages.emerging_optimizers import OrthogonalizedOptimizer, get_muon_scale_factor

    weight = torch.nn.Parameter(torch.ones(4, 2))
    without = torch.nn.Parameter(torch.ones(4, 2))
    seen = []

    def orthogonalize(update: Any) -> Any:
        seen.append(update.clone())
        return torch.ones_like(update)

    optimizer = OrthogonalizedOptimizer(
        [weight, without], 0.5, 0.9, 0.0, nesterov=False, weight_decay_method="decoupled", fp32_matmul_prec="medium",
        scaled_orthogonalize_fn=orthogonalize,
    )  # fmt: skip
    weight.grad = torch.full((4, 2), 2.0)
    optimizer.step()
    assert torch.allclose(seen[0], torch.full((4, 2), 0.2))
    assert torch.allclose(weight.data, torch.full((4, 2), 0.5))
    assert torch.equal(without.data, torch.ones(4, 2)) and without not in optimizer.state
    # Megatron asks for the state of all parameters before it plans a checkpoint.
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=False)
    assert optimizer.state[without]["momentum_buffer"].shape == (4, 2)
    with pytest.raises(ValueError, match="Invalid mode"):
        get_muon_scale_factor(4, 2, "other")


def test_the_hadamard_transform_gives_shapes_and_gradients() -> None:
    import torch

    from fp8launch.plugins.rehearse.packages.fast_hadamard_transform import hadamard_transform

    x = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
    out = hadamard_transform(x, scale=0.5)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    out.sum().backward()
    assert x.grad is not None


def test_linear_attention_wants_shapes_that_fit_and_gives_gradients() -> None:
    import torch

    from fp8launch.plugins.rehearse.packages.fla import causal_conv1d, chunk_gated_delta_rule, l2norm

    q, k = (torch.ones(1, 8, 4, 16, requires_grad=True) for _ in range(2))
    v, gate = torch.ones(1, 8, 4, 32, requires_grad=True), torch.ones(1, 8, 4, requires_grad=True)
    out, state = chunk_gated_delta_rule(q, k, v, g=gate, beta=gate, output_final_state=False)
    assert out.shape == v.shape and state is None
    out.sum().backward()
    assert q.grad is not None and gate.grad is not None
    with pytest.raises(ValueError, match="do not fit together"):
        chunk_gated_delta_rule(q, k[:, :, :2], v, g=gate, beta=gate)
    assert causal_conv1d(x=torch.ones(1, 8, 12), weight=torch.ones(12, 4))[0].shape == (1, 8, 12)
    with pytest.raises(ValueError, match="12 channels over 16"):
        causal_conv1d(x=torch.ones(1, 8, 16), weight=torch.ones(12, 4))
    assert torch.allclose(l2norm(torch.full((2, 4), 3.0)), torch.full((2, 4), 0.5))


def test_a_stream_is_a_context_as_torchs_is() -> None:
    """Transformer Engine 2.20 enters the stream of a replayed graph."""
    import torch

    from fp8launch.injob.rank.compat.cpu import _Stream

    assert hasattr(torch.Stream, "__enter__")
    with _Stream() as stream:
        assert stream.query()
