"""Prove a run, from the stored verdict of an identical run or by training, and report it in the recipe's terms."""

from __future__ import annotations

import time
from collections.abc import Sequence

from fp8launch.megatron.schema import load_schema
from fp8launch.plugins.prove import proof_cache
from fp8launch.plugins.prove.part import Part, cannot_prove
from fp8launch.plugins.prove.reduced_layout import layout_text, reduce_layout
from fp8launch.plugins.prove.report import Proof
from fp8launch.plugins.prove.session import NoVerdict, Servers, Session
from fp8launch.plugins.prove.settings import CUDA, compares_context_parallel, has_part, not_computed, why_left_out
from fp8launch.plugins.prove.small import RECOMPUTED_BY_TE
from fp8launch.plugins.prove.work import Done, Findings, carry_out, work_of
from fp8launch.plugins.validators.refusals import recipe_field

MOST_SETTINGS = 8
# Fields that state sizes of the model, which no layout changes.
_SIZES = (
    "model.num_", "model.hidden_", "model.ffn_", "model.kv_", "model.moe_ffn", "model.norm", "model.disable_bias",
    "model.init_", "model.q_", "model.qk_", "model.v_", "batch.",
)  # fmt: skip


def prove_part(part: Part, onwards: Sequence[Part], servers: Servers, done: Done, again: bool = False) -> Proof:
    """Prove a part of a run; its checkpoints are also loaded in the layouts of `onwards`.

    With `again`, the stored verdict of an identical run is ignored. Raises UserError (exit code 3) without a verdict.
    """
    began = time.monotonic()
    work = work_of(part, onwards)
    found, earlier = Findings(()), True
    with Session(work.version, part.megatron, part.device, servers) as session:
        for piece in work.pieces():
            entry = proof_cache.entry_of(piece, part.megatron)
            known = None if again else proof_cache.read(entry)
            if known is None:
                earlier = False
                try:
                    known = carry_out(piece, session, done)
                except NoVerdict as missing:
                    name = missing.name.rstrip(" 0123456789")
                    raise cannot_prove(f"the training of {name} ended with {missing}") from None
                proof_cache.keep(entry, known)
            else:
                for _ in range(piece.steps):
                    done()
            found += known
    return _proof(part, found, earlier, time.monotonic() - began)


def earlier_proof(part: Part) -> Proof | None:
    """Return the proof of a part from the stored verdict of an identical run, or None if there is none."""
    found = Findings(())
    for piece in work_of(part, ()).pieces():
        known = proof_cache.read(proof_cache.entry_of(piece, part.megatron))
        if known is None:
            return None
        found += known
    return _proof(part, found, True, 0.0)


def _proof(part: Part, findings: Findings, earlier: bool, seconds: float) -> Proof:
    reduced = reduce_layout(part.values, part.seen.layout, compares_context_parallel(part.values, part.device))
    return Proof(
        checks=findings.checks,
        not_covered=(*_not_covered(part, reduced.lost), *findings.unknown),
        layout=layout_text(part.seen.layout),
        compared=f"{reduced.text} with 1 rank",
        phase=part.phase,
        settings=_settings(part, findings),
        right=findings.right,
        tried=findings.tried,
        earlier=earlier,
        seconds=seconds,
    )


def _settings(part: Part, findings: Findings) -> tuple[str, ...]:
    """Return the recipe settings that the code around the tensors reads that differ."""
    found: dict[str, None] = {}
    schema = load_schema(part.seen.args.version)
    for check in findings.checks:
        for difference in check.differences:
            for attribute in findings.readers.get(difference.tensor, ()):
                for flag in (schema.find(attribute), *schema.setting(attribute)):
                    name = flag.name if flag else ""
                    value = part.values.get(name)
                    on = bool(value) and not (value == 1 and name.endswith("_size"))
                    if on and has_part(name) and not why_left_out(name, value, part.device):
                        field = recipe_field(part.seen, name) or name
                        if not field.startswith(_SIZES):
                            found[f"{field} ({_shown(value)})"] = None
    return tuple(found)[:MOST_SETTINGS]


def _not_covered(part: Part, lost: Sequence[str]) -> tuple[str, ...]:
    """Return the settings of the recipe that no comparison reached, each with the reason."""
    found = [*lost]
    for name, reason in not_computed(part.values, part.device).items():
        found.append(f"{recipe_field(part.seen, name) or name} ({_shown(part.values[name])}): {reason}")
    modules = part.values.get("recompute_modules")
    if isinstance(modules, list) and part.device != CUDA:
        by_te = [module for module in modules if module in RECOMPUTED_BY_TE]
        found += [f"megatron.recompute_modules ({module}): needs Transformer Engine" for module in by_te]
    return tuple(dict.fromkeys([*found, *part.without]))


def _shown(value: object) -> str:
    if value is True:
        return "true"
    return str(value)
