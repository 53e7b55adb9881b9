"""`fp8launch data sample`: continue a text with a trained model."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from fp8launch.cli import complete
from fp8launch.cli.output import FiniteRange, echo, eprint, json_option, show_json
from fp8launch.datasets.manifest import read_manifest
from fp8launch.diagnostics import ANSWER_IS_NO, MACHINE_LACKS, error
from fp8launch.injob.ownership import why_others_may_change
from fp8launch.plugins.data.encoders import encoder_of
from fp8launch.plugins.data.find_tokenizer import find_tokenizer
from fp8launch.plugins.data.tokenizer import Encoder
from fp8launch.resources import in_job_folder
from fp8launch.rundir.names import run_named
from fp8launch.rundir.registry import need_mine
from fp8launch.rundir.run_dir import RunFolder

REQUEST = "FP8LAUNCH_GENERATE"  # of plugins/data/injob/generate.py


@click.command()
@click.argument("run", shell_complete=complete.runs)
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--tokenizer", metavar="NAME", help="Tokenizer (default: of the run's first dataset).")
@click.option("--tokens", type=click.IntRange(1, 4096), default=60, help="Tokens to add (default: 60).")
@click.option(
    "--temperature",
    type=FiniteRange(min=0),
    default=0.7,
    help="Sampling temperature; 0 takes the likeliest token (default: 0.7).",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Seed of the sampling (default: 0).")
@json_option
def sample(
    run: str, prompt: str, tokenizer: str | None, tokens: int, temperature: float, seed: int, as_json: bool
) -> None:
    """Continue a text with the newest checkpoint of RUN, for a quick look at a small GPT model.

    The model runs on this machine in one process, on the CPU or a GPU, and needs torch and Megatron-Core.
    """
    if importlib.util.find_spec("torch") is None or importlib.util.find_spec("megatron") is None:
        message = f"{sys.executable} has no torch and Megatron-Core"
        raise error("no-megatron", message, "data sample", "pip install 'fp8launch[megatron]'", MACHINE_LACKS)
    folder = run_named(run, eprint)
    need_mine(folder)  # Megatron unpickles parts of a checkpoint, which runs whatever code they hold
    argv: list[str] = list(folder.manifest()["megatron"]["argv"])
    checkpoints = _checkpoints(folder, argv)
    encoder = _encoder(argv, tokenizer)
    ids, _ = encoder.encode([prompt])
    if len(ids) == 0:
        raise error("data-sample", "the prompt has no tokens", "--prompt", "write a word")
    request = {"ids": list(map(int, ids)), "tokens": tokens, "temperature": temperature, "seed": seed}
    text = encoder.decode(_generate(argv, checkpoints, folder.path, request))
    if as_json:
        show_json({"run": folder.run_id, "prompt": prompt, "text": text})
        return
    echo(text)


def _checkpoints(folder: RunFolder, argv: list[str]) -> Path:
    saved = _words_after("--save", argv)
    if not saved or not (folder.path / saved[0] / "latest_checkpointed_iteration.txt").is_file():
        message = f"{folder.run_id} has no checkpoint"
        raise error("data-sample", message, "RUN", "set checkpoint.dir and checkpoint.interval", ANSWER_IS_NO)
    place = folder.path / saved[0]
    stated = folder.manifest()["recipe"].get("checkpoint") or {}
    reason = why_others_may_change(place)
    if reason is not None and stated.get("allow_pickle") is not True:
        message = f"loading a checkpoint can run code that it contains, and {reason}"
        fix = "copy it to a folder that only you can write to; checkpoint.allow_pickle: true in the recipe trusts it"
        raise error("data-sample", message, str(place), fix, ANSWER_IS_NO)
    return place


def _words_after(flag: str, argv: list[str]) -> list[str]:
    """Return all words that follow a flag."""
    if flag not in argv:
        return []
    return argv[argv.index(flag) + 1 :]


def _encoder(argv: list[str], tokenizer: str | None) -> Encoder:
    if tokenizer is None:
        manifest = None
        # A weight may precede the first prefix.
        for word in _words_after("--data-path", argv)[:2]:
            if word.startswith("/"):
                manifest = read_manifest(Path(word))
                break
        if manifest is None or manifest.tokenizer is None:
            message = "no manifest of the run's data names a tokenizer"
            raise error("data-sample", message, "--tokenizer", "name the tokenizer of the data")
        tokenizer = manifest.tokenizer.file or manifest.tokenizer.kind
    return encoder_of(find_tokenizer(tokenizer, append_eod=False))


def _generate(argv: list[str], checkpoints: Path, folder: Path, request: dict[str, Any]) -> list[int]:
    worker = in_job_folder() / "rank" / "worker.py"
    script = Path(__file__).parents[1] / "injob" / "generate.py"
    environment = {**os.environ, REQUEST: json.dumps(request), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    environment["FP8LAUNCH_DEVICE"] = "cuda"
    if "--use-cpu-initialization" in argv and "gloo" in argv:
        environment["FP8LAUNCH_DEVICE"] = "cpu"
    more = ["--load", str(checkpoints), "--no-load-optim", "--no-load-rng", "--micro-batch-size", "1"]
    command = [sys.executable, str(worker), "--script", str(script), "--", *argv, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=folder)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(f"{REQUEST} "):
            found: list[int] = json.loads(line.partition(" ")[2])
            return found
    eprint("\n".join(done.stderr.splitlines()[-5:]))
    message = f"Megatron ended with exit status {done.returncode}; its last lines are above"
    raise error("data-sample", message, str(folder), "models of one GPU or CPU only", ANSWER_IS_NO)
