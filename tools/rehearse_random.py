"""Rehearse recipes drawn at random from the pack's parts, of those that `check` passes.

    rehearse_random.py RESULTS.jsonl --count 200 [--first 0] [--jobs 2] [--roles 2]
    rehearse_random.py RESULTS.jsonl --gpus 2 --count 200
    rehearse_random.py RESULTS.jsonl --report
    rehearse_random.py RESULTS.jsonl --select benchmarks/h200

One JSON object per seed goes to RESULTS.jsonl: the recipe, what `check` said, and how the rehearsal ended; seeds that
are there already are not repeated. `--gpus` draws small runs for one or two H200, without a network. `--report` counts.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
import tarfile
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from fp8launch.check.memory import run_estimate
from fp8launch.check.resolved_run import resolve_run
from fp8launch.diagnostics import UserError
from fp8launch.job.prepared import prepare
from rehearsal_runs import checked, close_servers, one

TOP = Path(__file__).resolve().parents[1]
MODELS = sorted(path.stem for path in (TOP / "recipes/models").glob("*.yaml") if path.stem != "tiny")
EXPERTS = ("deepseek_v3", "gpt_oss_120b", "gpt_oss_20b", "kimi_k2", "mixtral_8x7b", "qwen3_235b_a22b", "qwen3_30b_a3b")
LATENT = ("deepseek_v3", "kimi_k2")
HOPPER = ("h100", "h200")
BLACKWELL = ("b200", "b300", "gb200", "gb300")
ON_HOPPER = ("bf16", "tensorwise", "delayed", "blockwise")
ON_BLACKWELL = ("bf16", "tensorwise", "delayed", "mxfp8", "nvfp4")
# Releases of Transformer Engine beside each Megatron.
ENGINES = {"0.17": ("2.14",), "0.18": ("2.16",), "0.19": ("2.20", "2.20", "2.16")}
# Models with too many heads for a hidden size of 2048.
HEADS = {"llama3_1_405b": 32, "nemotron4_340b": 32, "llama3_70b": 32, "nemotron4_15b": 32, "qwen3_14b": 32}
# Models whose attention FlashAttention 3 does not have: other head sizes, or learned sinks.
NO_FLASH = (*LATENT, "gpt_oss_120b", "gpt_oss_20b")
BATCH = 24
# Estimated GiB of a run; six share an H200. What none of its hosts has.
MOST_GIB = 20
NOT_CARRIED = {"DeepEP's kernels", "HybridEP's kernels"}
# What the parts of models set, to be changed where they do.
OF_MODEL = (
    "normalization", "attention_dropout", "hidden_dropout", "qk_layernorm", "mtp_num_layers", "window_size",
    "moe_router_load_balancing_type", "moe_shared_expert_intermediate_size", "add_qkv_bias",
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
            self.pp = self.pick((1, 1, 2, 4, 8))
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
            if self.chance(0.1):
                parallel["sequence"] = self.chance(0.7)
            nodes = max(1, -(-world // gpus_per_node))
            gpus_per_node = min(gpus_per_node, world)
            dp = nodes * gpus_per_node // (self.tp * self.pp * self.cp) or 1
        self.vp = self.pick((2, 4)) if self.pp > 1 and self.chance(0.4) else 1
        if self.vp > 1:
            parallel["vp"] = self.vp
        self.recipe["parallel"] = parallel
        self.recipe["resources"] = {"nodes": nodes, "gpus_per_node": gpus_per_node, "time": "00:30:00"}
        micro = self.pick((1, 1, 2, 4))
        accumulation = self.pick((1, 2, 4)) * self.pp
        self.recipe["batch"] = {
            "micro": micro, "global": micro * dp * accumulation, "sequence": self.pick((1024, 2048, 4096, 8192)),
        }  # fmt: skip
        self.recipe["train"] = {"iterations": 3 if self.gpus else 50, "lr": 3.0e-4, "min_lr": 3.0e-5, "warmup": 1}
        if not self.gpus and self.chance(0.8):
            layers = self.pp * self.vp * self.pick((1, 2, 3, 4))
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
            ("moe_router_load_balancing_type", self.pick(("aux_loss", "seq_aux_loss", "none", "sinkhorn")), 0.15),
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


def examine(seeds: Sequence[int], gpus: int, roles: int, write: Callable[[dict[str, Any]], None]) -> None:
    """Check these seeds' recipes at once, and rehearse those that pass."""
    answers, runs = [], []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            recipe = drawn(seed, gpus)
            answer: dict[str, Any] = {"seed": seed, "recipe": recipe, "verdict": "check", "codes": ["recipe"]}
            answers.append(answer)
            path = Path(folder) / f"{seed}.yaml"
            path.write_text(yaml.safe_dump(recipe))
            try:
                runs.append((answer, prepare(str(path))))
            except UserError as exc:
                answer["message"] = str(exc)[:200]
        found = checked([run for _, run in runs])
    passed = []
    for (answer, run), codes in zip(runs, found, strict=True):
        answer["codes"] = codes
        if not codes:
            passed.append((answer, run))
    for answer in answers:
        if answer["codes"]:
            write(answer)
    for answer, run in passed:
        answer |= one(run, roles)
        print(answer["verdict"], answer["seed"], answer.get("processor_seconds"), answer.get("message", "")[:150],
              answer.get("at", ""), flush=True)  # fmt: skip
        write(answer)


def needed_gib(recipe: Path) -> float:
    """Estimated memory that a run takes of its GPU; without an end where it is not counted."""
    found = [run_estimate(resolve_run(part, {})) for part in prepare(str(recipe)).parts]
    return max((each.total / 2**30 if each else float("inf")) for each in found)


def report(results: Path) -> None:
    """Print what was found, refusals by sentence."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    print(Counter(row["verdict"] for row in rows))
    print("check:", Counter(code for row in rows for code in row.get("codes", [])[:1]).most_common(30))
    kinds: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        if row["verdict"] in ("refused", "unknown", "error"):
            kinds.setdefault((row["verdict"], f"{row.get('message', '')[:300]} ({row.get('at')})"), []).append(
                row["seed"]
            )
    for (verdict, sentence), seeds in sorted(kinds.items(), key=lambda item: -len(item[1])):
        print(len(seeds), verdict, sentence, seeds[:6])


def select(results: Path, top: Path, counts: tuple[int, int], without: Sequence[str], name: str) -> None:
    """Write recipes and the list `name` for benchmarks/h200/run.sh: the passed ones that differ most from each other
    and from those that are there, and refused ones of as many sentences as there are. `without` are seeds, or parts of
    sentences that are known.
    """
    folder = top / "recipes" / "rehearsed"
    archive = folder.with_suffix(".tar.xz")
    if archive.is_file():
        with tarfile.open(archive) as packed:
            packed.extractall(folder.parent, filter="data")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [row for row in map(json.loads, results.read_text().splitlines()) if str(row["seed"]) not in without]
    there = [yaml.safe_load(path.read_text()) for path in folder.glob("passed_*.yaml")]
    passed = [row for row in rows if row["verdict"] == "passed" and not NOT_CARRIED & set(row.get("not_rehearsed", ()))]
    chosen = unlike(passed, there, counts[0], folder)
    refused = refusals([row for row in rows if row["verdict"] == "refused"], without, counts[1], folder)
    # Of a list that is not run to its end both kinds have run.
    every = max(1, len(chosen) // max(len(refused), 1))
    ordered = [row for at, row in enumerate(chosen) for row in ([row, *refused[at // every : at // every + 1]]
                if at % every == every - 1 else [row])]  # fmt: skip
    ordered += [row for row in refused if row not in ordered]
    head = "# Drawn and chosen by tools/rehearse_random.py, of what a rehearsal let pass and of what it refused."
    (top / "lists" / f"{name}.txt").write_text("\n".join([head, *map(line_of, ordered)]) + "\n")
    with lzma.open(archive, "wb", preset=9 | lzma.PRESET_EXTREME) as out, tarfile.open(fileobj=out, mode="w") as packed:
        packed.add(folder, folder.name)
    print(len(chosen), "passed,", len(refused), "refused")


def unlike(rows: Sequence[Any], there: Sequence[Any], most: int, folder: Path) -> list[dict[str, Any]]:
    """Write those of these rows whose features occur least, also among recipes that are there."""
    seen = Counter(feature for recipe in there for feature in features(recipe))
    waiting = list(rows)
    chosen: list[dict[str, Any]] = []
    while waiting and len(chosen) < most:
        best = max(waiting, key=lambda row: sum(1 / (1 + 2 * seen[feature]) for feature in features(row["recipe"])))
        waiting.remove(best)
        if written_small(best, folder):
            chosen.append(best)
            seen.update(features(best["recipe"]))
    return chosen


def refusals(rows: Sequence[Any], without: Sequence[str], most: int, folder: Path) -> list[dict[str, Any]]:
    """Write at most so many refused rows, of each sentence and place one before the second of any."""
    kinds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        said = row.get("message", "")
        if not any(part in said for part in without):
            kinds.setdefault((said[:40], row["at"]), []).append(row)
    turns = [row for turn in zip_longest(*kinds.values()) for row in turn if row is not None]
    chosen: list[dict[str, Any]] = []
    for row in turns:
        if len(chosen) < most and written_small(row, folder):
            chosen.append(row)
    return chosen


def written_small(row: Mapping[str, Any], folder: Path) -> bool:
    """Write the row's recipe; not one that needs so much memory that six of them do not share a GPU."""
    recipe = {"extends": row["recipe"]["extends"], **row["recipe"], "name": f"{row['verdict']}_{row['seed']}"}
    said = "trains"
    if row["verdict"] == "refused":
        said = f"{row['exception']}: {row['message'][:300]} ({row['at']})"
    text = yaml.safe_dump(recipe, sort_keys=False, width=110, default_flow_style=None)
    path = folder / f"{recipe['name']}.yaml"
    path.write_text(f"# Seed {row['seed']}. Rehearsal: {said}\n{text}")
    if needed_gib(path) <= MOST_GIB:
        return True
    path.unlink()
    return False


def line_of(row: Mapping[str, Any]) -> str:
    """The line of a list for run.sh."""
    name = f"{row['verdict']}_{row['seed']}"
    backend = row["recipe"]["megatron"].get("attention_backend")
    # run.sh gives FlashAttention to the lines that name it.
    option = " --set megatron.attention_backend=flash" if backend == "flash" else ""
    return f"{row['recipe']['resources']['gpus_per_node']} {name} rehearsed/{name}{option}"


def features(recipe: Mapping[str, Any]) -> list[str]:
    """What distinguishes a recipe from others: its parts, layout and flags."""
    found = [str(part) for part in recipe["extends"]]
    for section in ("parallel", "megatron", "precision", "model"):
        found += [f"{section}.{name}={value}" for name, value in recipe.get(section, {}).items()]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--count", type=int, default=100, help="seeds to look at")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--roles", type=int, default=2, help="roles of each run, first and last first")
    parser.add_argument("--gpus", type=int, choices=(1, 2), default=0, help="draw small runs for so many H200")
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--select", type=Path, help="write passed and refused recipes here (benchmarks/h200)")
    parser.add_argument("--counts", type=int, nargs=2, default=(30, 10), metavar=("PASSED", "REFUSED"))
    parser.add_argument("--list", default="rehearsed", help="name of the list that --select writes")
    parser.add_argument("--without", nargs="*", default=[], help="seeds, or parts of sentences, not to select")
    options = parser.parse_args()
    if options.select:
        select(options.results, options.select, tuple(options.counts), options.without, options.list)
        return
    if options.report:
        report(options.results)
        return
    known = set()
    if options.results.exists():
        known = {json.loads(line)["seed"] for line in options.results.read_text().splitlines()}
    seeds = [seed for seed in range(options.first, options.first + options.count) if seed not in known]
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    with options.results.open("a") as file, ThreadPoolExecutor(options.jobs) as pool:

        def write(answer: dict[str, Any]) -> None:
            file.write(json.dumps(answer) + "\n")
            file.flush()

        def do(batch: Sequence[int]) -> None:
            try:
                examine(batch, options.gpus, options.roles, write)
            except Exception as exc:
                print("error", batch, repr(exc)[:500], flush=True)

        list(pool.map(do, batches))
    close_servers()


if __name__ == "__main__":
    main()
