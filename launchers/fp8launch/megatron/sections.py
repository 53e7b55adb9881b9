"""Which Megatron flag each field of a recipe's sections sets: the one table that translation and import share.

Only fields that set one flag by their own value are here, and the named choices that stand for a fixed set of flags.
What depends on more than one field is code, in `translate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

Path: TypeAlias = "tuple[str, ...]"

# Section to field to flag, in the order in which the arguments are written.
FIELDS: Mapping[Path, Mapping[str, str]] = {
    ("batch",): {"micro": "micro_batch_size", "global": "global_batch_size", "sequence": "seq_length"},
    ("train",): {"iterations": "train_iters", "lr": "lr", "min_lr": "min_lr", "warmup": "lr_warmup_iters"},
    ("precision",): {"amax_history": "fp8_amax_history_len", "amax_algo": "fp8_amax_compute_algo"},
    ("parallel",): {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "vp": "num_virtual_stages_per_pipeline_rank",
        "cp": "context_parallel_size",
        "ep": "expert_model_parallel_size",
        "etp": "expert_tensor_parallel_size",
    },
    ("optimizer",): {
        "exp_avg": "exp_avg_dtype",
        "exp_avg_sq": "exp_avg_sq_dtype",
        "main_grads": "main_grads_dtype",
        "main_params": "main_params_dtype",
    },
    ("data", "tokenizer"): {"type": "tokenizer_type", "model": "tokenizer_model"},
    ("data",): {"split": "split", "cache": "data_cache_path"},
    ("checkpoint",): {"dir": "save", "interval": "save_interval", "load": "load"},
}

# Named choices: the field's value stands for these flags together.
CHOICES: Mapping[Path, Mapping[str, Mapping[str, bool | str]]] = {
    ("parallel", "fsdp"): {
        "torch_fsdp2": {"use_torch_fsdp2": True, "ckpt_format": "torch_dist"},
        **{
            name: {
                "use_megatron_fsdp": True,
                "data_parallel_sharding_strategy": strategy,
                "ckpt_format": "fsdp_dtensor",
            }
            for name, strategy in {
                "megatron": "optim_grads_params",
                "megatron_optim_grads": "optim_grads",
                "megatron_optim": "optim",
            }.items()
        },
    },
    ("optimizer", "grad_reduce"): {
        "bf16": {"grad_reduce_in_bf16": True},
        "fp32": {"accumulate_allreduce_grads_in_fp32": True},
    },
}
