"""The command `fp8launch prove`."""

from __future__ import annotations

import click

from fp8launch.cli import complete
from fp8launch.cli.output import (
    cluster_option,
    counting_bar,
    echo,
    eprint,
    json_option,
    recipe_options,
    show_json,
    with_options,
)
from fp8launch.cluster.profile import load_cluster
from fp8launch.diagnostics import error, exit_code
from fp8launch.job.prepared import prepare
from fp8launch.plugins.prove.part import Part, onwards_of, parts_of
from fp8launch.plugins.prove.proof import prove_part
from fp8launch.plugins.prove.report import Proof, folded, merged_json
from fp8launch.plugins.prove.session import Servers
from fp8launch.plugins.prove.settings import CPU, CUDA
from fp8launch.plugins.prove.work import STEPS
from fp8launch.rundir.names import recipe_named


@click.command()
@click.argument("recipe", metavar="RECIPE|RUN", shell_complete=complete.recipes)
@with_options(*recipe_options)
@cluster_option
@click.option(
    "--to", "to", metavar="tp=4,pp=2", help="Also load a checkpoint in this layout: changed keys of `parallel`."
)
@click.option(
    "--device",
    type=click.Choice((CPU, CUDA)),
    default=CPU,
    help="Train on the CPU in fp32, or on this machine's GPU in the recipe's precision (default: cpu).",
)
@click.option("--again", is_flag=True, help="Ignore the stored verdict of an identical run.")
@json_option
def prove(
    recipe: str,
    overrides: tuple[str, ...],
    nodes: int | None,
    cluster: str | None,
    to: str | None,
    device: str,
    again: bool,
    as_json: bool,
) -> int:
    """Show that a recipe's layout trains the same model as one rank, and that a resumed run continues identically.

    A small model with the recipe's structure trains on this machine. On a GPU, which all ranks share, the proof also
    covers FP8 and Transformer Engine's layers. Exit code 0: everything compared agrees; 1: something differs; 3: this
    machine cannot run a training.
    """
    profile, name = load_cluster(cluster), recipe_named(recipe, say=eprint)
    parts = parts_of(prepare(name, overrides, nodes, profile), eprint, device=device)
    others: list[Part] = []
    if to is not None:
        if device == CUDA:
            raise error("no-proof", "--to needs --device cpu", "--device", "leave one of the two out")
        changed = [f"parallel.{change.strip()}" for change in to.split(",")]
        others = parts_of(prepare(name, [*overrides, *changed], nodes, profile), eprint)
    onwards = onwards_of(parts, others)
    with Servers() as servers, counting_bar("proving", sum(STEPS + len(following) for following in onwards)) as done:
        proofs = [
            prove_part(part, following, servers, done, again) for part, following in zip(parts, onwards, strict=True)
        ]
    if as_json:
        show_json(merged_json(proofs))
    else:
        for proof in proofs:
            _show(proof)
    return exit_code(all(proof.ok for proof in proofs))


def _show(proof: Proof) -> None:
    if proof.phase:
        echo(f"phase {proof.phase}:")
    for line in proof.lines():
        echo(line)
    compared = f"compared: {proof.compared}"
    if proof.layout != proof.compared.partition(" with ")[0]:
        compared += f" (reduced from {proof.layout})"
    when = "stored verdict of an identical run" if proof.earlier else f"{proof.seconds:.0f} s"
    notes = [f"{compared}, {when}"]
    by_reason: dict[str, list[str]] = {}
    for text in proof.not_covered:
        setting, _, reason = text.partition(": ")
        by_reason.setdefault(reason, []).append(setting)
    for reason, settings in by_reason.items():
        why = f" ({reason})" if reason else ""
        notes.append(f"not covered{why}: {', '.join(settings)}")
    for note in notes:
        eprint("\n".join(folded(note)))
