"""Argument sets for the check: a base that is fine, and named changes to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from published import listed_values

from fp8launch.job.prepared import Prepared, prepare
from fp8launch.megatron.schema import load_schema

TESTS = Path(__file__).parent
RULES = ("schema", "megatron", "rules")

# Llama-3 8B, current scaling, one node of H100.
BASE: dict[str, Any] = {
    **listed_values(TESTS / "megatron/llama3_8b_fp8.args", load_schema("0.19")),
    "eval_interval": 1000,
}
SOFTWARE = {"megatron": "0.19", "transformer_engine": "2.20", "cuda": "13.0"}
ENV = {"CUDA_DEVICE_MAX_CONNECTIONS": 1}

# Groups of changes that many sets share; None drops a flag.
BF16 = {"fp8_format": None, "fp8_recipe": None, "fp8_param_gather": None}
FP16 = {**BF16, "bf16": None, "fp16": True, "grad_reduce_in_bf16": None}
FP32 = {**BF16, "bf16": None, "grad_reduce_in_bf16": None}
DELAYED = {"fp8_recipe": "delayed", "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "max"}
BLOCKWISE = {"fp8_recipe": "blockwise", "fp8_param_gather": None}
MXFP8 = {"fp8_recipe": "mxfp8", "fp8_format": "e4m3", "reuse_grad_buf_for_mxfp8_param_ag": True}
NVFP4 = {**BF16, "fp4_format": "e2m1", "fp4_recipe": "nvfp4"}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
FSDP = {
    "use_megatron_fsdp": True,
    "data_parallel_sharding_strategy": "optim_grads_params",
    "ckpt_format": "fsdp_dtensor",
    "no_gradient_accumulation_fusion": True,
    "ddp_average_in_collective": None,
}
LLAMA_70B = {"num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64}
LLAMA_405B = {"num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128}
# Qwen3-30B-A3B's shape.
MOE = {
    "num_layers": 48,
    "hidden_size": 2048,
    "ffn_hidden_size": 6144,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "num_experts": 128,
    "moe_ffn_hidden_size": 768,
    "moe_router_topk": 8,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_dtype": "fp32",
    "expert_model_parallel_size": 8,
}
MLA = {
    "group_query_attention": None,
    "num_query_groups": None,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "qk_layernorm": True,
    "rope_type": "yarn",
}


@dataclass(frozen=True)
class Set:
    """`BASE` with changes, on 8 H100 unless said otherwise.

    `code` and `severity` are what the check must report, which may take a plugin (`needs`).
    """

    change: Mapping[str, Any] = field(default_factory=dict)
    code: str = ""
    severity: str = "error"
    gpu: str = "h100"
    nodes: int = 1
    gpus: int = 8
    env: Mapping[str, Any] = field(default_factory=lambda: ENV)
    software: Mapping[str, Any] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    plugin: str | None = None

    @property
    def needs(self) -> str | None:
        """The plugin that the code comes from. Only Megatron's own validators report its codes."""
        return "validators" if self.code.startswith("megatron-") else self.plugin

    def recipe(self) -> dict[str, Any]:
        values = {**BASE, **self.change}
        return {
            "resources": {"nodes": self.nodes, "gpus_per_node": self.gpus, "gpu": self.gpu},
            "software": {**SOFTWARE, **self.software},
            "env": dict(self.env),
            "megatron": {name: value for name, value in values.items() if value is not None},
            **self.more,
        }

    def prepare(self, folder: Path, name: str = "set") -> Prepared:
        """As the command does it, from a file. Raises UserError for what the schema or the layout refuses."""
        safe = "".join(c if c.isalnum() else "_" for c in name)
        path = folder / f"{safe}.yaml"
        path.write_text(yaml.safe_dump({"name": safe[:60], **self.recipe()}), encoding="utf-8")
        return prepare(str(path))
