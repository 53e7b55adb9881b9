"""Recipes drawn at random from the pack's parts and Megatron's flags, for rehearse_random.py."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp8launch.megatron.schema import load_schema

TOP = Path(__file__).resolve().parents[1]
# A tiny model, models with layers without positions, whose number Megatron restricts, and experimental attention.
NOT_DRAWN = ("tiny", "llama4_scout", "llama4_maverick", "qwen3_next_80b_a3b", "deepseek_v3_2")
MODELS = sorted(path.stem for path in (TOP / "recipes/models").glob("*.yaml") if path.stem not in NOT_DRAWN)
EXPERTS = (
    "deepseek_v3", "glm4_5", "glm4_5_air", "gpt_oss_120b", "gpt_oss_20b", "kimi_k2", "mixtral_8x7b", "qwen3_235b_a22b",
    "qwen3_30b_a3b",
)  # fmt: skip
LATENT = ("deepseek_v3", "kimi_k2")
# Mostly one GPU of each kind: a rehearsal imports its software anew for another.
HOPPER = ("h100", "h100", "h100", "h100", "h200")
BLACKWELL = ("b200", "b200", "b200", "gb300", "gb300", "gb300", "b300", "gb200")
ON_HOPPER = ("bf16", "tensorwise", "delayed", "blockwise")
ON_BLACKWELL = ("bf16", "tensorwise", "delayed", "mxfp8", "nvfp4")
# Releases of Transformer Engine to draw for each Megatron.
ENGINES = {"0.17": ("2.14",), "0.18": ("2.16",), "0.19": ("2.20", "2.20", "2.16")}
# Models with too many heads for a hidden size of 2048.
HEADS = dict.fromkeys(
    ("glm4_5", "glm4_5_air", "llama3_1_405b", "llama3_70b", "nemotron4_15b", "nemotron4_340b", "qwen3_14b"), 32
)
# Models whose attention FlashAttention 3 does not have: other head sizes, or learned sinks.
NO_FLASH = (*LATENT, "gpt_oss_120b", "gpt_oss_20b")
# Flags that belong in the section `model` of a recipe.
OF_MODEL = (
    "normalization", "attention_dropout", "hidden_dropout", "qk_layernorm", "mtp_num_layers", "window_size",
    "moe_router_load_balancing_type", "moe_shared_expert_intermediate_size", "add_qkv_bias", "position_embedding_type",
    "rotary_percent", "untie_embeddings_and_output_weights", "disable_bias_linear", "squared_relu", "softmax_type",
    "moe_router_score_function", "moe_router_enable_expert_bias", "moe_router_pre_softmax", "moe_shared_expert_gate",
    "moe_router_topk_scaling_factor", "moe_layer_freq",
)  # fmt: skip

# Flags that few recipes set: values to pick from, and the probability of one.
RARE: tuple[tuple[str, Sequence[Any], float], ...] = (
    ("untie_embeddings_and_output_weights", (True, None), 0.05),
    ("disable_bias_linear", (True, None), 0.05),
    ("position_embedding_type", ("none", "learned_absolute"), 0.03),
    ("rotary_percent", (0.5,), 0.03),
    ("rotary_interleaved", (True,), 0.03),
    ("squared_relu", (True,), 0.02),
    ("softmax_type", ("off-by-one", "learnable"), 0.03),
    ("qk_l2_norm", (True,), 0.02),
    ("no_rope_freq", (2,), 0.02),
    ("window_attn_skip_freq", (2,), 0.02),
    ("apply_layernorm_1p", (True,), 0.03),
    ("fp32_residual_connection", (True,), 0.02),
    ("apply_residual_connection_post_layernorm", (True,), 0.01),
    ("cross_entropy_loss_fusion", (None,), 0.06),
    ("mtp_use_repeated_layer", (True,), 0.02),
    ("mtp_detach_heads", (True,), 0.01),
    ("disable_fp8_wgrad", (True,), 0.03),
    ("fp8_output_proj", (True,), 0.03),
    ("fp8_margin", (1,), 0.02),
    ("keep_fp8_transpose_cache", (True,), 0.03),
    ("no_bias_dropout_fusion", (True,), 0.04),
    ("no_bias_swiglu_fusion", (True,), 0.04),
    ("use_te_activation_func", (True,), 0.03),
    ("disable_jit_fuser", (True,), 0.02),
    ("distribute_saved_activations", (True,), 0.03),
    ("ddp_bucket_size", (40000000, None), 0.05),
    ("ddp_num_buckets", (4,), 0.03),
    ("ddp_pad_buckets_for_high_nccl_busbw", (True,), 0.03),
    ("ddp_reduce_scatter_with_fp32_accumulation", (True,), 0.03),
    ("no_gradient_reduce_div_fusion", (True,), 0.03),
    ("no_align_grad_reduce", (True,), 0.02),
    ("no_align_param_gather", (True,), 0.02),
    ("overlap_p2p_communication_warmup_flush", (True,), 0.03),
    ("pipeline_model_parallel_comm_backend", ("nccl",), 0.02),
    ("use_tp_pp_dp_mapping", (True,), 0.03),
    ("cp_comm_type", (["p2p"], ["all_gather"], ["a2a"]), 0.05),
    ("high_priority_stream_groups", (["tp"], ["ep", "dp"]), 0.02),
    ("create_all_gather_group", (True,), 0.02),
    ("decoupled_lr", (1.0e-4,), 0.03),
    ("clip_grad", (0.0,), 0.03),
    ("check_for_large_grads", (True,), 0.02),
    ("no_check_for_nan_in_loss_and_grad", (None,), 0.05),
    ("empty_unused_memory_level", (1, 2), 0.03),
    ("disable_bf16_reduced_precision_matmul", (True,), 0.02),
    ("lr_decay_style", ("constant", "WSD", "inverse-square-root"), 0.03),
    ("optimizer", ("lion", "sgd", "muon"), 0.03),
    ("init_model_with_meta_device", (True,), 0.03),
    ("use_torch_fsdp2", (True,), 0.2),
    ("data_parallel_sharding_strategy", ("no_shard", "optim", "optim_grads"), 0.04),
    ("fsdp_double_buffer", (True,), 0.04),
    ("wgrad_deferral_limit", (2,), 0.02),
    ("use_mup", (True,), 0.01),
    ("no_create_attention_mask_in_dataloader", (None,), 0.03),
    ("reset_attention_mask", (True,), 0.02),
    ("eod_mask_loss", (True,), 0.02),
    ("rerun_mode", ("validate_results", "report_stats"), 0.03),
    ("mla_down_proj_fusion", (True,), 0.05),
    ("cache_mla_latents", (True,), 0.02),
    ("batch_invariant_mode", (True,), 0.01),
    ("symmetric_ar_type", ("two_shot",), 0.01),
    ("torch_fsdp2_no_reshard_after_forward", (True,), 0.01),
    ("use_grouped_gemm_for_dense_mlp", (True,), 0.02),
)  # fmt: skip
RARE_OF_EXPERTS: tuple[tuple[str, Sequence[Any], float], ...] = (
    ("moe_router_score_function", ("sigmoid", "softmax", "sqrtsoftplus"), 0.08),
    ("moe_router_enable_expert_bias", (True,), 0.05),
    ("moe_router_pre_softmax", (True, None), 0.06),
    ("moe_router_topk_scaling_factor", (2.5,), 0.04),
    ("moe_token_drop_policy", ("position",), 0.05),
    ("moe_input_jitter_eps", (0.01,), 0.03),
    ("moe_layer_recompute", (True,), 0.03),
    ("moe_layer_freq", (2,), 0.04),
    ("moe_shared_expert_gate", (True,), 0.03),
    ("moe_latent_size", (1024,), 0.03),
    ("moe_single_grouped_weight", (True,), 0.03),
    ("moe_single_grouped_bias", (True,), 0.02),
    ("moe_mlp_glu_interleave_size", (32,), 0.02),
    ("moe_paged_stash", (True,), 0.02),
    ("use_grouped_gemm_for_shared_expert", (True,), 0.03),
    ("moe_router_quantile_balancing_ema", (0.9,), 0.02),
    ("moe_enable_routing_replay", (True,), 0.02),
    ("overlap_dispatch_backward_with_experts_wgrad", (True,), 0.03),
    ("ep_overlap_early_attn_memory_release", (True,), 0.03),
    ("high_priority_a2a_comm_stream", (True,), 0.03),
    ("moe_flex_dispatcher_num_sms", (16,), 0.03),
    ("cuda_graph_modules", (["moe_router"], ["attn", "moe_router"], ["moe_router", "moe_preprocess"]), 0.04),
)  # fmt: skip


class Draw:
    """One recipe from one seed."""

    def __init__(self, seed: int, gpus: int) -> None:
        self.random = random.Random(seed)
        self.gpus = gpus
        self.extends: list[str] = []
        self.megatron: dict[str, Any] = {}
        self.recipe: dict[str, Any] = {"name": f"random_{seed}"}

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, choices: Sequence[Any]) -> Any:
        return self.random.choice(choices)

    def made(self) -> dict[str, Any]:
        """The recipe as a mapping."""
        self.model = self.pick(EXPERTS if self.chance(0.5) else [m for m in MODELS if m not in EXPERTS])
        self.experts = self.model in EXPERTS
        self._hardware()
        self._parts()
        self._layout()
        self._flags()
        self._rare_flags()
        self._reconcile()
        if self.gpus:
            self._small()
        if self.gpus == 1:
            self._for_one_gpu()
        self.recipe["extends"] = self.extends
        self.recipe["megatron"] = self.megatron
        return self.recipe

    def _hardware(self) -> None:
        hopper = self.gpus or self.chance(0.5)
        self.gpu = "h200" if self.gpus else self.pick(HOPPER if hopper else BLACKWELL)
        self.precision = self.pick(ON_HOPPER if hopper else ON_BLACKWELL)
        version = "0.19" if self.gpus else self.pick(("0.17", "0.18", "0.19", "0.19", "0.19"))
        engine = "2.20" if self.gpus else self.pick(ENGINES[version])
        self.recipe["software"] = {"megatron": version, "transformer_engine": engine}
        self.extends += [
            f"models/{self.model}",
            "parts/pretrain",
            f"hardware/{self.gpu}",
            f"precision/{self.precision}",
        ]

    def _parts(self) -> None:
        self.fsdp = self.chance(0.12)
        self.sharded = not self.fsdp and self.chance(0.85)
        if self.fsdp:
            self.extends.append("parts/megatron_fsdp")
        if self.sharded:
            self.extends.append("parts/distributed_optimizer")
        gated = not self.model.startswith(("nemotron", "gpt_oss"))
        for part, probability in (("fused_kernels", 0.3 if gated else 0.02), ("pipeline", 0.1),
                                  ("tensor_overlap", 0.0 if self.gpus else 0.06),
                                  ("optimizer_step_overlap", 0.03), ("full_iteration_graph", 0.05),
                                  ("mxfp8_output", 0.1 if self.precision == "mxfp8" else 0.0)):  # fmt: skip
            if self.chance(probability):
                self.extends.append(f"parts/{part}")
        if not self.gpus and self.chance(0.1):
            self.extends.append("parts/flash3")
        if self.sharded and self.chance(0.25):
            self.extends.append(f"optimizer/{self.pick(('bf16_moments', 'msamp_o1', 'msamp_o2', 'msamp_o3'))}")
        if self.precision != "bf16":
            precision: dict[str, Any] = {}
            if self.chance(0.5):
                precision["param_gather"] = self.chance(0.7)
            if self.chance(0.2):
                precision["bf16_layers"] = {"start": 1, "end": 1}
            self.recipe["precision"] = precision
        if self.experts:
            self._expert_parts()

    def _expert_parts(self) -> None:
        dispatchers = ("alltoall",) if self.gpus else ("alltoall", "alltoall", "hybridep", "hybridep_nvl8", "base")
        self.extends.append(f"moe/{self.pick(dispatchers)}")
        for part, probability in (("expert_overlap", 0.2), ("layer_graphs", 0.2), ("full_iteration_graph", 0.07)):
            if self.chance(probability):
                self.extends.append(f"moe/{part}")

    def _layout(self) -> None:
        if self.gpus:
            kinds = ["none", "tp", "pp", "cp", "none"] + (["ep", "ep", "ep"] if self.experts else [])
            kind = self.pick(kinds) if self.gpus > 1 else "none"
            parallel: dict[str, Any] = {} if kind == "none" else {kind: 2}
            gpus_per_node, nodes, dp = self.gpus, 1, 1
            if kind in ("none", "ep"):
                dp = gpus_per_node
            self.tp, self.pp, self.cp = (2 if kind == name else 1 for name in ("tp", "pp", "cp"))
        else:
            self.tp = self.pick((1, 1, 2, 4, 8))
            self.pp = self.pick((1, 1, 1, 2, 2, 4)) if not self.fsdp else 1
            self.cp = self.pick((1, 1, 1, 2, 4))
            if self.experts and self.chance(0.6):
                self.tp = 1
            parallel = {"tp": self.tp, "pp": self.pp, "cp": self.cp}
            gpus_per_node = 4 if self.gpu.startswith("g") else 8
            world = self.tp * self.pp * self.cp * self.pick((1, 2, 4, 8))
            ep = 1
            if self.experts:
                ep = self.pick((2, 4, 8, 8, 16))
                parallel["ep"] = ep
                if self.chance(0.3):
                    parallel["etp"] = 1
                world = max(world, ep * self.pp * self.pick((1, 2)))
            if self.tp > 1 and (self.experts or self.chance(0.8)):
                parallel["sequence"] = True
            nodes = max(1, -(-world // gpus_per_node))
            gpus_per_node = min(gpus_per_node, world)
            dp = nodes * gpus_per_node // (self.tp * self.pp * self.cp) or 1
        self.vp = self.pick((2, 4)) if self.pp > 1 and self.chance(0.4) else 1
        if self.vp > 1:
            parallel["vp"] = self.vp
        self.recipe["parallel"] = parallel
        self.recipe["resources"] = {"nodes": nodes, "gpus_per_node": gpus_per_node, "time": "00:30:00"}
        micro = self.pick((1, 1, 2, 4) if self.gpus else (1, 1, 2))
        accumulation = self.pick((1, 2, 4) if self.pp < 4 else (1, 2)) * self.pp
        self.recipe["batch"] = {
            "micro": micro, "global": micro * dp * accumulation, "sequence": self.pick((1024, 2048, 4096, 8192)),
        }  # fmt: skip
        self.recipe["train"] = {"iterations": 3 if self.gpus else 50, "lr": 3.0e-4, "min_lr": 3.0e-5, "warmup": 1}
        if not self.gpus and (self.chance(0.95) or self.pp > 1):
            layers = self.pp * self.vp * self.pick((1, 1, 2) if self.pp > 1 else (1, 2, 3))
            self.recipe.setdefault("model", {}).update({"num_layers": layers, **self._fewer(layers)})

    def _fewer(self, layers: int) -> dict[str, Any]:
        """What of a model lists its layers."""
        fewer: dict[str, Any] = {}
        if self.model in LATENT:
            dense = min(1, layers - 1)
            fewer["moe_layer_freq"] = f"[0]*{dense}+[1]*{layers - dense}"
        return fewer

    def _for_one_gpu(self) -> None:
        """What lets six runs share a GPU, and their three iterations reach what they are about."""
        flags = self.megatron
        model = self.recipe["model"]
        if self.experts:
            model |= {"num_layers": 3, **self._fewer(3), "num_experts": 8, "moe_router_topk": 2}
            if self.model == "deepseek_v3":
                model["moe_router_num_groups"] = 2
                model["moe_router_group_topk"] = 1
        if flags.get("attention_backend") == "flash":
            if self.model in NO_FLASH:
                flags["attention_backend"] = "fused"
            else:
                model["kv_channels"] = 128  # the size that benchmarks/h200/flash3 holds
        # Megatron captures after three iterations otherwise.
        if "cuda_graph_impl" in flags or any("graph" in part for part in self.extends):
            flags["cuda_graph_warmup_steps"] = 1

    def _flags(self) -> None:
        flags = self.megatron
        if self.chance(0.6):
            flags["attention_backend"] = self.pick(("fused", "fused", "unfused", "auto", "flash"))
            if self.gpus == 2 and flags["attention_backend"] == "flash":
                flags["attention_backend"] = "fused"
        self._recompute()
        self._offload()
        if self.chance(0.12) and not any("graph" in part for part in self.extends):
            flags["cuda_graph_impl"] = self.pick(("local", "transformer_engine"))
            flags["te_rng_tracker"] = True
            self.recipe.setdefault("env", {})["NCCL_GRAPH_REGISTER"] = 0
            if self.chance(0.7):
                flags["cuda_graph_modules"] = self.pick((["attn"], ["mlp"], ["attn", "mlp"]))
        for name, value, probability in (
            ("overlap_grad_reduce", None, 0.1),
            ("overlap_param_gather", None, 0.1),
            ("no_gradient_accumulation_fusion", True, 0.08),
            ("no_masked_softmax_fusion", True, 0.05),
            ("no_rope_fusion", True, 0.06),
            ("delay_wgrad_compute", True, 0.06),
            ("defer_embedding_wgrad_compute", True, 0.05),
            ("calculate_per_token_loss", True, 0.08),
            ("use_transformer_engine_op_fuser", True, 0.06),
            ("accumulate_allreduce_grads_in_fp32", True, 0.05),
            ("use_precision_aware_optimizer", True, 0.05),
            ("attention_softmax_in_fp32", True, 0.04),
            ("apply_query_key_layer_scaling", True, 0.03),
            ("window_size", "1024,0", 0.04),
            ("normalization", "LayerNorm", 0.05),
            ("num_distributed_optimizer_instances", 2, 0.04),
            ("optimizer", "sgd", 0.04),
            ("optimizer", "muon", 0.0 if self.gpus else 0.02),
            ("log_max_attention_logit", True, 0.04),
            ("qk_clip", True, 0.04),
            ("first_last_layers_bf16", True, 0.03),
            ("deterministic_mode", True, 0.03),
            ("no_overlap_p2p_communication", True, 0.06),
            ("microbatch_group_size_per_virtual_pipeline_stage", 2, 0.04),
            ("account_for_embedding_in_pipeline_split", True, 0.04),
            ("account_for_loss_in_pipeline_split", True, 0.04),
            ("cp_comm_type", ["a2a"], 0.06),
            ("log_params_norm", True, 0.04),
            ("log_num_zeros_in_grad", True, 0.05),
            ("use_cpu_initialization", True, 0.03),
            ("attention_dropout", 0.1, 0.03),
            ("hidden_dropout", 0.1, 0.03),
            ("reset_position_ids", True, 0.02),
            ("add_qkv_bias", True, 0.05),
            ("attention_output_gate", True, 0.04),
            ("qk_layernorm", True, 0.05),
            ("mtp_num_layers", 1, 0.06),
            ("reuse_grad_buf_for_mxfp8_param_ag", True, 0.04),
            ("disable_tp_comm_overlap_rs", True, 0.02),
            ("fused_residual_rmsnorm", True, 0.05),
            ("use_fused_weighted_squared_relu", True, 0.03),
            ("no_persist_layer_norm", True, 0.03),
        ):
            if self.chance(probability):
                self._set(name, value)
        if self.experts:
            self._expert_flags()

    def _rare_flags(self) -> None:
        for name, values, probability in RARE:
            if self.chance(probability):
                self._set(name, self.pick(values))
        if self.experts:
            for name, values, probability in RARE_OF_EXPERTS:
                if self.chance(probability):
                    self._set(name, self.pick(values))
        if self.sharded and self.chance(0.12):
            flags = self.megatron
            flags |= {
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": self.pick(("bf16", "fp16", "fp8", "fp32")),
            }
            flags |= {"exp_avg_sq_dtype": flags["exp_avg_dtype"], "main_grads_dtype": self.pick(("fp32", "bf16"))}
            flags["main_params_dtype"] = self.pick(("fp32", "fp16"))
        if self.model in LATENT and self.chance(0.06):
            self.megatron |= {"experimental_attention_variant": "dsa", "dsa_indexer_n_heads": 64,
                              "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 512,
                              "dsa_indexer_loss_coeff": 0.001}  # fmt: skip
        elif self.model not in LATENT and self.chance(0.02):
            self.megatron |= {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 2,
                              "linear_num_key_heads": 16, "linear_num_value_heads": 32}  # fmt: skip

    def _reconcile(self) -> None:
        """Remove what a rule of `check` says of two flags by themselves: it is known, and the draw would be wasted."""
        flags, extends = self.megatron, self.extends
        model, env = self.recipe.setdefault("model", {}), self.recipe.setdefault("env", {})
        normed = self.model.startswith("qwen3") or "qk_layernorm" in model
        if (normed or flags.get("no_rope_fusion")) and "parts/fused_kernels" in extends:
            extends.remove("parts/fused_kernels")
        if "overlap_grad_reduce" in flags or "overlap_param_gather" in flags:
            flags |= {"overlap_grad_reduce": None, "overlap_param_gather": None}
        if flags.get("calculate_per_token_loss"):
            flags["ddp_average_in_collective"] = None
        if flags.get("apply_query_key_layer_scaling"):
            env["NVTE_APPLY_QK_LAYER_SCALING"] = 1
        if flags.get("fine_grained_activation_offloading"):
            env["NVTE_CPU_OFFLOAD_V1"] = 1
        if flags.get("deterministic_mode"):
            flags["cross_entropy_loss_fusion"] = None
            env |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": 0, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        if flags.get("moe_router_dtype") == "fp64" or flags.get("moe_router_padding_for_quantization"):
            flags["moe_router_fusion"] = None
        if flags.get("moe_pad_expert_input_to_capacity"):
            flags["moe_expert_capacity_factor"] = 1.25
        if flags.get("moe_apply_probs_on_input"):
            model["moe_router_topk"] = 1
        if "lr_decay_style" in flags and flags["lr_decay_style"] == "WSD":
            flags["lr_wsd_decay_iters"] = 10
        if flags.get("use_te_activation_func"):
            flags["no_bias_swiglu_fusion"] = True
        if model.get("squared_relu"):
            model["swiglu"] = None
        if model.get("moe_router_topk") == 1:
            model["moe_router_pre_softmax"] = True
        schema = load_schema(self.recipe["software"]["megatron"])
        sharded_adam = self.sharded and flags.get("optimizer", "adam") == "adam"
        for name, fits in (
            ("use_transformer_engine_op_fuser", not self.experts),
            ("reuse_grad_buf_for_mxfp8_param_ag", self.precision == "mxfp8"),
            ("cpu_offloading_num_layers", self.pp == 1 and "recompute_granularity" not in flags),
            ("defer_embedding_wgrad_compute", self.pp > 1),
            ("first_last_layers_bf16", self.precision not in ("delayed", "bf16")),
            ("fp8_output_proj", self.precision != "bf16"),
            ("fused_residual_rmsnorm", "normalization" not in model),
            ("delay_wgrad_compute", any("expert_overlap" in part for part in extends)),
            ("ep_overlap_early_attn_memory_release", any("expert_overlap" in part for part in extends)),
            ("distribute_saved_activations", self.tp > 1 and not self.recipe["parallel"].get("sequence")),
            ("mla_down_proj_fusion", self.model in LATENT),
            ("cache_mla_latents", self.model in LATENT),
            ("optimizer", sharded_adam or not self.sharded),
            ("num_distributed_optimizer_instances", sharded_adam),
            ("use_precision_aware_optimizer", sharded_adam or self.fsdp),
            ("use_torch_fsdp2", not (self.experts or self.sharded or self.fsdp) and self.pp == 1),
            ("fsdp_double_buffer", self.fsdp),
            ("data_parallel_sharding_strategy", self.fsdp),
            ("moe_paged_stash", "moe_expert_rank_capacity_factor" in flags),
        ):
            if not fits:
                flags.pop(name, None)
        if flags.get("use_torch_fsdp2"):
            flags |= {"no_gradient_accumulation_fusion": True, "ckpt_format": "torch_dist"}
            model["untie_embeddings_and_output_weights"] = True
        for section in (flags, model):
            for name in [name for name in section if schema.find(name) is None]:
                del section[name]
        if self.cp > 1:
            model.pop("window_size", None)
            if flags.get("attention_backend") == "unfused":
                del flags["attention_backend"]
        if self.tp == 1 or not self.recipe["parallel"].get("sequence"):
            extends[:] = [part for part in extends if part != "parts/tensor_overlap"]
        precision = self.recipe.get("precision", {})
        if self.precision == "delayed":
            precision.pop("bf16_layers", None)
        if not (self.sharded or self.fsdp):
            precision.pop("param_gather", None)
        if self.precision == "bf16":
            extends[:] = [part for part in extends if not part.startswith("optimizer/msamp")]

    def _recompute(self) -> None:
        flags = self.megatron
        if self.chance(0.35):
            if self.chance(0.4):
                flags |= {"recompute_granularity": "full", "recompute_method": self.pick(("uniform", "block")),
                          "recompute_num_layers": 1}  # fmt: skip
                return
            modules = ["core_attn", "mlp", "layernorm"]
            if self.experts:
                modules = ["core_attn", "moe", "moe_act", "layernorm", "shared_experts"]
            if self.model in LATENT:
                modules += ["mla_up_proj", "mlp"]
            flags["recompute_granularity"] = "selective"
            flags["recompute_modules"] = self.random.sample(modules, self.pick((1, 2)))

    def _offload(self) -> None:
        flags = self.megatron
        if self.chance(0.05):
            flags["cpu_offloading_num_layers"] = self.pick((1, 2))
        elif self.chance(0.06):
            modules = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
            if self.experts:
                modules += ["expert_fc1", "moe_act"]
            flags["fine_grained_activation_offloading"] = True
            flags["offload_modules"] = self.random.sample(modules, self.pick((1, 2)))
        elif self.chance(0.06):
            flags["optimizer_cpu_offload"] = True
            flags["optimizer_offload_fraction"] = self.pick((0.5, 1.0))
            flags["use_precision_aware_optimizer"] = True

    def _expert_flags(self) -> None:
        for name, value, probability in (
            ("moe_router_padding_for_quantization", True, 0.02 if self.precision == "bf16" else 0.4),
            ("moe_permute_fusion", None, 0.1),
            ("moe_grouped_gemm", None, 0.1),
            ("moe_router_fusion", None, 0.15),
            ("moe_router_dtype", self.pick(("fp32", "fp64")), 0.15),
            ("moe_shared_expert_overlap", True, 0.12),
            ("moe_router_force_load_balancing", None, 0.3),
            (
                "moe_router_load_balancing_type",
                self.pick(("aux_loss", "seq_aux_loss", "none", "sinkhorn", "quantile_balancing")),
                0.15,
            ),
            ("moe_expert_capacity_factor", 1.25, 0.1),
            ("moe_pad_expert_input_to_capacity", True, 0.08),
            ("moe_z_loss_coeff", 1.0e-3, 0.1),
            ("moe_apply_probs_on_input", True, 0.03),
            ("moe_shared_expert_intermediate_size", 1024, 0.06),
            ("moe_flex_dispatcher_backend", "deepep", 0.08),
            ("moe_token_dispatcher_type", "allgather", 0.05),
            ("moe_permute_fusion_into_hybridep", True, 0.04),
            ("moe_per_layer_logging", True, 0.05),
        ):
            if self.chance(probability):
                self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        """A flag, in the section that a model part would set it in."""
        section = self.recipe.setdefault("model", {}) if name in OF_MODEL else self.megatron
        section[name] = value

    def _small(self) -> None:
        """Four to six layers and few experts, quick to build; mock data of random tokens."""
        layers = 4 if self.vp == 2 else self.pp * self.vp if self.pp > 1 else self.pick((4, 6))
        model: dict[str, Any] = {
            "num_layers": layers, **self._fewer(layers), "vocab_size": 32768, "hidden_size": 2048,
            "ffn_hidden_size": 5632,
        }  # fmt: skip
        if self.model in HEADS:
            model |= {"num_attention_heads": HEADS[self.model], "num_query_groups": 8}
        if self.experts:
            model |= {"num_experts": 16, "moe_ffn_hidden_size": 1024}
            if self.model == "deepseek_v3":
                model |= {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
            if self.model in LATENT:
                model["num_attention_heads"] = 16
        self.recipe["model"] = {**self.recipe.get("model", {}), **model}
        batch = self.recipe["batch"]
        batch["sequence"] = min(batch["sequence"], 2048)


def drawn(seed: int, gpus: int) -> dict[str, Any]:
    """The recipe of a seed, for one or two GPUs, or for a cluster (0)."""
    return Draw(seed, gpus).made()
