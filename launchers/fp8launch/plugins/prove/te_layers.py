"""Let Megatron's own layers do what Transformer Engine's do, so that a CPU trains layouts that are meant for GPUs."""
# mypy: disable-error-code="import-not-found, misc, unused-ignore"

from __future__ import annotations

import functools
import importlib
from contextlib import nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch


def install(like_te: bool) -> None:
    """Extend Megatron's own layers. With `like_te` they divide work as Transformer Engine's do, where that differs."""
    _mark_norms()
    _add_biases_of_experts()
    _recompute_without_fp8()
    _attend_across_ranks()
    _attend_in_other_ways()
    if like_te:
        _duplicate_latent_projections()
        _keep_biases_of_experts_apart()


def _mark_norms() -> None:
    """Let PyTorch's norms serve sequence parallelism, as Transformer Engine's do.

    Megatron refuses them there, because nothing marks their weights: each rank has the gradient of its own part of the
    sequence only, and Megatron sums the gradients of marked weights over the ranks.
    """
    module: Any = importlib.import_module("megatron.core.transformer.torch_norm")
    make = module.WrappedTorchNorm.__new__

    def marked(cls: Any, config: Any, *arguments: Any, **named: Any) -> Any:
        parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            norm = make(cls, config, *arguments, **named)
        finally:
            config.sequence_parallel = parallel
        for weight in norm.parameters():
            weight.sequence_parallel = parallel
        return norm

    module.WrappedTorchNorm.__new__ = marked


def _add_biases_of_experts() -> None:
    """Let experts of a single tensor-parallel rank add their biases in place.

    Without a reduction Megatron's function returns its input, and torch refuses to change such an output in place.
    """
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    function = mappings._ReduceFromModelParallelRegion
    forward = function.forward

    def copied(context: Any, tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        result: torch.Tensor = forward(context, tensor, *rest)
        if result is tensor:
            return result.clone()
        return result

    function.forward = staticmethod(copied)


def _keep_biases_of_experts_apart() -> None:
    """Leave biases of experts unmarked for sequence parallelism, as Transformer Engine does.

    Megatron's own layers mark them, and then sum gradients over tensor-parallel ranks that hold different experts.
    """
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    initialize = layers.RowParallelLinear.__init__

    @functools.wraps(initialize)
    def unmarked(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        if self.explicit_expert_comm and self.bias is not None:
            self.bias.sequence_parallel = False

    layers.RowParallelLinear.__init__ = unmarked


def _recompute_without_fp8() -> None:
    """Let Megatron recompute without Transformer Engine, which it asks whether it trains in FP8."""
    module: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not hasattr(module, "FP8GlobalStateManager"):
        module.FP8GlobalStateManager = SimpleNamespace(is_fp8_enabled=lambda: False)
        module.activation_recompute_forward = module.fp8_autocast = lambda **named: nullcontext()


def _attend_across_ranks() -> None:
    """Let Megatron's own attention serve context parallelism, as Transformer Engine's does.

    Each rank has two chunks of every sequence, one from each end. Its queries attend to the keys of all ranks.
    """
    module: Any = importlib.import_module("megatron.core.transformer.dot_product_attention")
    masks: Any = importlib.import_module("megatron.core.transformer.utils")
    state: Any = importlib.import_module("megatron.core.parallel_state")
    mappings: Any = importlib.import_module("megatron.core.tensor_parallel.mappings")
    attention = module.DotProductAttention
    initialize, forward = attention.__init__, attention.forward

    @functools.wraps(initialize)
    def initialize_part(self: Any, config: Any, *arguments: Any, **named: Any) -> None:
        size, config.context_parallel_size = config.context_parallel_size, 1
        try:
            initialize(self, config, *arguments, **named)
        finally:
            config.context_parallel_size = size
        if size > 1:
            # Megatron would make the mask of a window for queries at the start of the sequence.
            self.window, self.scale_mask_softmax.window_size = self.scale_mask_softmax.window_size, None

    @functools.wraps(forward)
    def forward_part(self: Any, query: Any, key: Any, value: Any, mask: Any, *arguments: Any, **named: Any) -> Any:
        group = state.get_context_parallel_group()
        size = group.size()
        if size == 1:
            return forward(self, query, key, value, mask, *arguments, **named)
        chunks = _chunks(size)
        places = [chunks.index(chunk) for chunk in range(2 * size)]
        whole = []
        for part in (key, value):
            gathered = mappings.gather_from_sequence_parallel_region(part, True, group)
            pieces = gathered.chunk(2 * size)
            whole.append(torch.cat([pieces[place] for place in places]))
        if mask is None or self.window is not None:
            length = whole[0].shape[0]
            if self.window is None:
                every = masks.get_default_causal_mask(length)
            else:
                every = masks.get_sliding_window_causal_mask(length, length, self.window)
            rows = every.chunk(2 * size)
            own = chunks[2 * group.rank() : 2 * group.rank() + 2]
            mask = torch.cat([rows[chunk] for chunk in own])
        return forward(self, query, *whole, mask, *arguments, **named)

    attention.__init__, attention.forward = initialize_part, forward_part


def _chunks(size: int) -> list[int]:
    """Return which chunks of a sequence `size` ranks of context parallelism have, rank after rank."""
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def _attend_in_other_ways() -> None:
    """Let Megatron's own layers build GatedDeltaNet and sparse attention (DSA).

    Megatron requires Transformer Engine and kernels for them, but computes both in PyTorch as well, except for a
    convolution, a norm and a rotation.
    """
    specs: Any = importlib.import_module("megatron.core.models.gpt.experimental_attention_variant_module_specs")
    layers: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    rule = None
    for module in _modules_of_delta_net():
        rule = getattr(module, "torch_chunk_gated_delta_rule", rule)
        module.HAVE_FLA, module.l2norm, module.causal_conv1d = True, _l2norm, _causal_convolution
        module.chunk_gated_delta_rule = rule
    variants = "megatron.core.transformer.experimental_attention_variant"
    sparse: Any = importlib.import_module(f"{variants}.dsa")
    sparse.rotate_activation = _rotated
    for name in ("megatron.core.transformer.multi_latent_attention", f"{variants}.absorbed_mla"):
        with suppress(ImportError):  # absorbed_mla: since 0.19
            importlib.import_module(name).TELinear = DuplicatedLinear  # type: ignore[attr-defined]
    specs._get_backend_spec_provider = _own_layers
    delta_net_spec = specs.get_gated_delta_net_module_spec
    sparse_spec = specs.get_dsa_module_spec_for_backend

    def delta_net_of_own_layers(config: Any, backend: Any = None) -> Any:
        spec = delta_net_spec(config, backend)
        spec.submodules.in_proj = backend.column_parallel_linear()
        spec.metainfo["fuse_input_layernorm"] = False
        return spec

    def sparse_attention_of_own_layers(config: Any, backend: Any = None) -> Any:
        spec = sparse_spec(config, backend)
        spec.metainfo["fuse_input_layernorm"] = False
        if config.qk_layernorm:
            norm = backend.layer_norm(rms_norm=config.normalization == "RMSNorm", for_qk=True)
            spec.submodules.q_layernorm = spec.submodules.kv_layernorm = norm
        return spec

    def attention_of_own_layers(config: Any, backend: Any = None) -> Any:
        options = {name: getattr(config, name) for name in ("qk_layernorm", "multi_latent_attention", "normalization")}
        spec = layers.get_gpt_layer_local_spec(**options).submodules.self_attention
        spec.metainfo["fuse_input_layernorm"] = False
        return spec

    specs.get_gated_delta_net_module_spec = delta_net_of_own_layers
    specs.get_dsa_module_spec_for_backend = sparse_attention_of_own_layers
    variant_spec = specs.get_experimental_attention_variant_module_spec

    def spec_of_variant(config: Any, backend: Any = None) -> Any:
        # In 0.17, Megatron builds sparse attention elsewhere.
        sparse = config.experimental_attention_variant == "dsa"
        return (sparse_attention_of_own_layers if sparse else variant_spec)(config, backend)

    specs.get_experimental_attention_variant_module_spec = spec_of_variant
    specs._get_self_attention_module_spec = attention_of_own_layers
    with suppress(ImportError):  # since 0.19
        _predict_with_linear_attention(importlib.import_module("megatron.training.models.gpt"), layers)


def _predict_with_linear_attention(models: Any, layers: Any) -> None:
    """Build the layers of multi-token prediction like the model's last layer, as Megatron-Bridge does.

    Megatron-LM 0.19 refuses them with an attention variant.
    """
    prediction_spec = models.mtp_block_spec

    def prediction_of_variant(config: Any, spec: Any, vp_stage: int | None = None) -> Any:
        model = config.transformer
        if not model.mtp_num_layers or model.experimental_attention_variant is None or not spec.layer_specs:
            return prediction_spec(config, spec, vp_stage)
        return layers.get_gpt_mtp_block_spec(model, spec, use_transformer_engine=False, vp_stage=vp_stage)

    models.mtp_block_spec = prediction_of_variant


def _own_layers(config: Any) -> Any:
    """Return Megatron's own layers, with a layer for projections that every rank has as a whole."""
    backends: Any = importlib.import_module("megatron.core.models.backends")

    class Layers(backends.LocalSpecProvider):  # type: ignore[name-defined]
        def linear(self) -> type:
            return DuplicatedLinear

        def column_parallel_layer_norm_linear(self) -> Any:
            """Return a layer without a norm, which is built apart."""
            return self.column_parallel_linear()

    return Layers()


def _modules_of_delta_net() -> list[Any]:
    """Return the modules that use the kernels: one until 0.18, several in 0.19."""
    package: Any = importlib.import_module("megatron.core.ssm.gated_delta_net")
    if not hasattr(package, "__path__"):
        return [package]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in ("common", "gdn")]


def _l2norm(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Multiply by the normalized Hadamard matrix."""
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < x.shape[-1]:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return x @ matrix * x.shape[-1] ** -0.5


def _causal_convolution(x: torch.Tensor, weight: torch.Tensor, bias: Any, **others: Any) -> tuple[torch.Tensor, None]:
    """Convolve each channel of x [batch, sequence, channels] with its `weight` [channels, width]; apply SiLU."""
    width = weight.shape[-1]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    result = torch.nn.functional.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])
    return torch.nn.functional.silu(result).transpose(1, 2), None


def _duplicate_latent_projections() -> None:
    """Give every rank the whole down-projections of latent attention, as Transformer Engine's layers do.

    Megatron's own layers divide their columns, and leave a part out of a gradient (advisory mla-kpos-grad).
    """
    module: Any = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    module.TELinear = DuplicatedLinear
    initialize = module.MLASelfAttention.__init__

    @functools.wraps(initialize)
    def with_duplicates(self: Any, config: Any, submodules: Any, *arguments: Any, **named: Any) -> None:
        whole = {"linear_kv_down_proj": DuplicatedLinear}
        if submodules.linear_q_down_proj is not None:
            whole["linear_q_down_proj"] = DuplicatedLinear
        initialize(self, config, replace(submodules, **whole), *arguments, **named)

    module.MLASelfAttention.__init__ = with_duplicates


class DuplicatedLinear(torch.nn.Linear):
    """A linear layer without tensor parallelism, with the interface of Megatron's."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, init_method: Any, **others: Any) -> None:
        super().__init__(input_size, output_size, bias=False, dtype=config.params_dtype)
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[assignment]

    def forward(self, tensor: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the product, and no bias."""
        return super().forward(tensor), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """Return the weight as a tensor of which every tensor-parallel rank has a copy."""
        utils: Any = importlib.import_module("megatron.core.transformer.utils")
        state = self.state_dict(prefix="", keep_vars=True)
        return utils.make_sharded_tensors_for_checkpoint(state, prefix, None, sharded_offsets)
