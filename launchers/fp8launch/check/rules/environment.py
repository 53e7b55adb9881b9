"""Check environment variables and the image's optional packages against the arguments and the GPU."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.cluster.images import packages_in
from fp8launch.hardware.connections import CONNECTIONS
from fp8launch.injob.rank.optional_packages import needs

_BACKENDS = {"flash": (1, 0, 0), "fused": (0, 1, 0), "unfused": (0, 0, 1), "local": (0, 0, 0), "auto": (1, 1, 1)}
_ATTENTION = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@rule(
    "attention-variables",
    "error",
    source="language_module:LanguageModule._set_attention_backend",
)
def attention_variables(run: ResolvedRun) -> Iterator[Finding]:
    backend = str(run.value("attention_backend"))
    for name, expected in zip(_ATTENTION, _BACKENDS.get(backend, ()), strict=False):
        value = run.env.get(name)
        if value is not None and value != str(expected):
            message = f"{name}={value} contradicts attention_backend {backend}, which sets it to {expected}"
            fix = "remove the variable, and set attention_backend to flash, fused, unfused or auto"
            yield Finding(message, run.where(name, "attention_backend"), fix)


@rule(
    "max-connections-not-1",
    "error",
    source="arguments:validate_args",
    says=r"CUDA_DEVICE_MAX_CONNECTIONS to 1$",
    scope="megatron_lm",
)
def max_connections_not_1(run: ResolvedRun) -> Iterator[Finding]:
    layout = run.layout
    split = [f"{name} {n}" for name, n in (("TP", layout.tp), ("CP", layout.cp)) if n > 1]
    exempt = run.fsdp or run.on("overlap_moe_expert_parallel_comm")
    if split and run.gpu.capability < (10, 0) and not exempt and run.env.get(CONNECTIONS) != "1":
        found = f"is {run.env[CONNECTIONS]}" if CONNECTIONS in run.env else "is not set"
        message = f"{' and '.join(split)} on GPUs before Blackwell needs {CONNECTIONS}=1, but it {found}"
        where = run.where(CONNECTIONS, "tensor_model_parallel_size", "context_parallel_size")
        yield Finding(message, where, f"set `env: {{{CONNECTIONS}: 1}}`")


@rule("optional-package", "warning", source="Megatron-Core 0.17 to 0.19, see injob/rank/optional_packages.py")
def optional_package(run: ResolvedRun) -> Iterator[Finding]:
    image = run.loaded.recipe.container.image
    if image is None or run.gpu.name == "cpu":
        return  # The layer `machine` queries the job's Python instead.
    known = packages_in(image)
    for need in needs(run.value):
        if need.module not in known:
            message = (
                f"{need.reason} imports {need.module}, which may be missing in image {image}: without it, the job "
                "fails at its start"
            )
            yield Finding(message, run.where(need.setting), f"if it is missing, add it to the image: {need.install}")
