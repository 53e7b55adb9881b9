"""Model, Accelerator and optimizer of `accelerate_train.py`."""

# mypy: disable-error-code="import-not-found, import-untyped"

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import Any

STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}


def switched(name: str) -> bool:
    return os.environ.get(name, "1") != "0"


def model_family(args: argparse.Namespace) -> str:
    """Return how transformers names the classes of the model."""
    if args.num_experts:
        return "Qwen3Moe"
    if args.qk_layernorm:
        return "Qwen3"
    return "Llama"


def rope(args: argparse.Namespace) -> dict[str, object]:
    """Return the rotary embedding; Llama 3.1 scales its frequencies, with constants that Megatron has too."""
    base = {"rope_type": "default", "rope_theta": args.rotary_base}
    if not args.use_rope_scaling:
        return base
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return {**base, "rope_type": "llama3", "factor": args.rope_scaling_factor, **bands}


def model_for(args: argparse.Namespace, device: Any) -> Any:
    import torch
    import transformers

    family = model_family(args)
    experts: dict[str, object] = {}
    if args.num_experts:
        experts = {
            "num_experts": args.num_experts,
            "num_experts_per_tok": args.moe_router_topk,
            "moe_intermediate_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "norm_topk_prob": True,
            "experts_implementation": "grouped_mm",
        }
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=args.num_layers,
        hidden_size=args.hidden_size,
        intermediate_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_key_value_heads=args.num_query_groups or args.num_attention_heads,
        head_dim=args.kv_channels or args.hidden_size // args.num_attention_heads,
        max_position_embeddings=args.seq_length,
        rope_parameters=rope(args),
        rms_norm_eps=args.norm_epsilon,
        initializer_range=args.init_method_std,
        vocab_size=args.vocab_size,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        attn_implementation="sdpa",
        use_cache=False,
        **experts,
    )
    # Weights are created in fp32 and become the master weights, because Accelerate's upcast of bf16 weights fails with
    # torchao's FP8 (FSDP2: "expects uniform original parameter dtype"). They are created on the device, because a CPU
    # takes minutes for 8 billion.
    with device:
        return getattr(transformers, f"{family}ForCausalLM")._from_config(config, dtype=torch.float32)


def zero_config(args: argparse.Namespace, micro_batches: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration, with the communication settings that its documentation recommends."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": args.clip_grad,
        "bf16": {"enabled": args.bf16},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": STAGES[args.sharding],
            "overlap_comm": True,
            "contiguous_gradients": True,
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "steps_per_print": 10**9,
    }


def fp8_handler(args: argparse.Namespace, on_cpu: bool) -> Any:
    """Return Accelerate's settings for the FP8 library and recipe."""
    if args.fp8_library == "torchao":
        from accelerate.utils import AORecipeKwargs
        from torchao.float8 import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name(args.fp8_recipe)
        # Without FP8 tensor cores, torchao multiplies the rounded values in fp32.
        values = {name: getattr(config, name) for name in config.__dataclass_fields__}
        values |= {"enable_fsdp_float8_all_gather": args.fp8_param_gather, "emulate": on_cpu}
        return AORecipeKwargs(config=Float8LinearConfig(**values))
    from accelerate.utils import TERecipeKwargs

    if args.fp8_recipe == "mxfp8":
        return TERecipeKwargs(fp8_format=args.fp8_format.upper(), use_mxfp8_block_scaling=True)
    return TERecipeKwargs(
        fp8_format=args.fp8_format.upper(),
        amax_history_len=args.fp8_amax_history_len,
        amax_compute_algo=args.fp8_amax_compute_algo,
    )


def accelerator_for(args: argparse.Namespace, micro_batches: int, on_cpu: bool) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import (
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        TorchDynamoPlugin,
    )

    if on_cpu:
        distribute_on_cpu(args.sharding)
    options: dict[str, Any] = {}
    if args.sharding == "fsdp2":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=switched("PEER_RESHARD"),
            cpu_ram_efficient_loading=False,  # torchao's weights cannot be loaded this way
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[f"{model_family(args)}DecoderLayer"],
            activation_checkpointing=args.recompute_granularity is not None,
        )
    elif args.sharding in STAGES:
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=zero_config(args, micro_batches))
    if args.fp8_format:
        options["kwargs_handlers"] = [fp8_handler(args, on_cpu)]
    if not on_cpu and args.fp8_library != "transformer_engine" and switched("PEER_COMPILE"):
        options["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
    precision = "no"
    if args.fp8_format:
        precision = "fp8"
    elif args.bf16:
        precision = "bf16"
    accumulation = GradientAccumulationPlugin(num_steps=micro_batches, sync_each_batch=not switched("PEER_NO_SYNC"))
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_plugin=accumulation, **options)
    if args.sharding in STAGES and accelerator.te_recipe_handler is not None:
        tell_deepspeed_the_recipe(accelerator)
    return accelerator


def tell_deepspeed_the_recipe(accelerator: Any) -> None:
    """`_prepare_deepspeed` of 1.15 reads another name than the other paths, and so would always take delayed scaling.

    `fp8_backend` then asks what has this name for its library. The class answers, because each attribute of the
    settings themselves becomes an argument of the recipe.
    """
    settings = accelerator.te_recipe_handler
    type(settings).backend = "TE"
    accelerator.fp8_recipe_handler = settings


def distribute_on_cpu(sharding: str) -> None:
    """Have Accelerate shard on a CPU, for tests: `AcceleratorState` of 1.15 knows FSDP on accelerators only.

    With ACCELERATE_USE_CPU it drops the plugins of FSDP and DeepSpeed without a message: `verify` sees that.
    """
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    if sharding in STAGES:
        import deepspeed

        # Its operator for shared memory is compiled at the start, by every rank; gloo does without.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() not in ("1", "true"):
        PartialState(cpu=True)
        if sharding == "fsdp2":
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU


def prepared(args: argparse.Namespace, accelerator: Any, model: Any) -> tuple[Any, Any]:
    import torch

    betas = (args.adam_beta1, args.adam_beta2)
    optimizer: Any = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=betas, eps=args.adam_eps, weight_decay=args.weight_decay, fused=True
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if args.sharding == "fsdp2" and args.fp8_library == "transformer_engine":
        # `_prepare_fsdp2` of 1.15 converts the layers and never turns FP8 on for them, as `prepare_model` does for DDP.
        from accelerate.utils import apply_fp8_autowrap

        model = apply_fp8_autowrap(model, accelerator.te_recipe_handler)
    return model, optimizer


def attention(on_cpu: bool) -> Any:
    """Return torch's attention kernels, the requested one first. The others serve shapes that it refuses."""
    if on_cpu:
        return nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if os.environ.get("PEER_ATTENTION", "cudnn") == "flash":
        kernels.reverse()
    return sdpa_kernel(kernels, set_priority=True)
