"""What fp8launch's own training entry, and its CPU mode, refuse at the start of a job."""

from __future__ import annotations

from collections.abc import Iterator

from fp8launch.check.facts import Facts
from fp8launch.check.rule import Finding, rule
from fp8launch.megatron.schema import load_schema
from fp8launch.problems import nearest

# train/pretrain.py NOT_HERE and train/cpu.py FLAGS run where torch is and cannot be imported here; a test compares.
NOT_IN_ENTRY = (
    "sft",
    "fim_data",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "perform_rl_step",
    "hybrid_layer_pattern",
    "yaml_cfg",
)
CPU_FLAGS = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "no_rope_fusion": True,
    "no_gradient_accumulation_fusion": True,
    "no_masked_softmax_fusion": True,
    "no_persist_layer_norm": True,
}
# Where the dest of a negative flag is not its name.
_DESTS = {
    "no_rope_fusion": "apply_rope_fusion",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
}


@rule("not-in-entry", "error", source="fp8launch train/pretrain.py NOT_HERE")
def entry_does_what_is_asked(run: Facts) -> Iterator[Finding]:
    for name in NOT_IN_ENTRY if run.own_entry else ():
        if run.on(name):
            message = f"{name} is not something that fp8launch's own training entry does"
            fix = "name Megatron-LM's script that does in launch.script, or drop the flag"
            yield Finding(message, run.where(name), fix)


@rule("cpu-flags", "error", source="fp8launch train/cpu.py FLAGS", says="apply_rope_fusion is not available")
def cpu_mode_has_its_flags(run: Facts) -> Iterator[Finding]:
    if run.gpu.name != "cpu":
        return
    wanted = {_DESTS.get(name, name): (name, value) for name, value in CPU_FLAGS.items()}
    missing = [
        name if value is True else f"{name}: {value}"
        for dest, (name, value) in wanted.items()
        if run.value(dest) != (False if dest != name else value)
    ]
    if missing:
        message = f"a run on CPUs also needs {', '.join(missing)}"
        yield Finding(message, run.where("gpu"), "extend hardware/cpu, which has them all")


@rule("cpu-layers", "error", source="fp8launch train/cpu.py: what Megatron lacks without Transformer Engine")
def cpu_mode_has_the_layers(run: Facts) -> Iterator[Finding]:
    lacking = ("multi_latent_attention", "use_megatron_fsdp", "use_torch_fsdp2")
    for name in lacking if run.gpu.name == "cpu" else ():
        if run.on(name):
            yield Finding(f"{name} does not work on CPUs", run.where(name), "drop it, or name the GPU")


_TYPES = {"bool": (bool,), "int": (int,), "float": (int, float), "str": (str,)}


@rule("config-unknown", "error", source="megatron/core/transformer/transformer_config.py TransformerConfig")
def config_fields_exist(run: Facts) -> Iterator[Finding]:
    launch, where = run.loaded.recipe.launch, run.loaded.where
    if launch.config and not run.own_entry:
        message = "launch.config is for fp8launch's own training entry: another script builds its own config"
        yield Finding(message, where("launch", "config"), "drop it, or launch.script")
    schema = load_schema(".".join(map(str, run.megatron)))
    for name, value in launch.config.items():
        place = where("launch", "config", name)
        kind = schema.config_only.get(name)
        if schema.find(name):
            yield Finding(f"{name} is a flag of Megatron-Core {schema.minor}", place, "set it under `megatron:`")
        elif kind is None:
            near = nearest(name, schema.config_only)
            hint = f"did you mean '{near}'?" if near else f"there are: {', '.join(schema.config_only)}"
            yield Finding(f"TransformerConfig of Megatron-Core {schema.minor} has no plain {name}", place, hint)
        elif not isinstance(value, _TYPES[kind]) or (kind != "bool" and isinstance(value, bool)):
            yield Finding(f"{name} is {value!r}; it takes a value of type {kind}", place, f"write one of type {kind}")
