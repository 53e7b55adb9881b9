"""One process of a training job: `python worker.py [--script PATH] -- MEGATRON-ARGUMENTS...`

Started once per GPU, by srun (rank from Slurm's variables), by torchrun (variables left alone) or alone. Runs
fp8launch's own pre-training entry, or the script named (a Megatron-LM checkout's pretrain_gpt.py), after the same
preparation. Exit codes are the training's own; 2 is a request that cannot work, 3 something that the machine lacks.
SIGTERM is left to the training, and helper processes outlive the signal; SIGUSR1 prints the stack. A process that has
not ended a minute after its training leaves without waiting longer (`leaving`).

Environment: FP8LAUNCH_DEVICE=cuda (default) or cpu; FP8LAUNCH_PROBE and FP8LAUNCH_PROFILE_ITERATION as in `probe`;
FP8LAUNCH_STOP_AT as in `minutes_left`; FP8LAUNCH_LEAVE_WITHIN as in `leaving`.
"""
# mypy: disable-error-code="import-not-found, no-any-return"

from __future__ import annotations

import time

STARTED = time.time()  # before anything heavy is imported: Megatron reports the time from here to the first step

import gc

# Imports make a million objects that stay. To search them for garbage takes a third of the processor time of a start.
gc.disable()

import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    # Started by its path: imports go by the package's full names, never by bare names in this folder.
    sys.path[0] = str(Path(__file__).resolve().parents[3])

from fp8launch.injob.rank import leaving, node_info, rank_watch, ranks, signals
from fp8launch.injob.rank.compat import before_import, cache_folders, cpu_process, python311
from fp8launch.injob.rank.optional_packages import needs

WRONG_REQUEST = 2
MACHINE_LACKS = 3
# SUPPORTED of megatron/versions.py, which is not here inside the job: a copy that a test compares.
TESTED_MEGATRON = ((0, 17), (0, 18), (0, 19))


def stop(code: int, message: str) -> NoReturn:
    """One line on stderr, then out."""
    print(f"fp8launch: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def option(argv: list[str], flag: str) -> str | None:
    """The value that argparse would take for `flag`: the last one given, as `--flag value` or `--flag=value`."""
    value = None
    for position, argument in enumerate(argv):
        if argument == flag:
            value = ""
            if position + 1 < len(argv):
                value = argv[position + 1]
        elif argument.startswith(flag + "="):
            value = argument.split("=", 1)[1]
    return value


def low_precision_problem(argv: list[str], device: str) -> str | None:
    """Why the FP8 or FP4 that `argv` asks for would not happen; None if none is asked for or it can.

    Megatron itself accepts these and silently trains in bf16: only Transformer Engine's layers look at the format.
    """
    for flag in ("--fp8-format", "--fp4-format"):
        value = option(argv, flag)
        if value is None:
            continue
        asked = f"{flag} {value}"
        if device == "cpu":
            return f"{asked} on a CPU: there is no FP8 without a GPU; use a bf16 recipe"
        if option(argv, "--transformer-impl") == "local":
            return f"{asked} with --transformer-impl local would train in bf16; use transformer_engine"
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines() or [repr(error)]
            return f"{asked} needs Transformer Engine, which {sys.executable} cannot import: {reason[0]}"
    return None


def megatron_version() -> tuple[str, tuple[int, ...]]:
    """Version of the Megatron-Core that would be imported, from its own file: importing it takes seconds."""
    found = importlib.util.find_spec("megatron")
    folders = getattr(found, "submodule_search_locations", None) or []
    for folder in folders:
        info = Path(folder, "core", "package_info.py")
        if info.is_file():
            values = runpy.run_path(str(info))
            return str(values["__version__"]), tuple(values["VERSION"][:2])
    stop(MACHINE_LACKS, f"Megatron-Core (megatron-core {tested_versions()}) is not installed for {sys.executable}")


def tested_versions() -> str:
    return ", ".join(".".join(map(str, minor)) for minor in TESTED_MEGATRON)


def check_packages(argv: list[str]) -> None:
    """Stop before anything heavy is imported if a setting needs a package that is not installed."""
    for need in needs(lambda name: option(argv, "--" + name.replace("_", "-"))):
        if importlib.util.find_spec(need.module) is None:
            message = f"{need.reason} needs {need.module}, which is not installed for {sys.executable}"
            stop(MACHINE_LACKS, f"{message}: {need.install}")


def check_software(script: Path | None) -> None:
    if importlib.util.find_spec("torch") is None:
        stop(MACHINE_LACKS, f"torch is not installed for {sys.executable}")
    version, minor = megatron_version()
    if minor not in TESTED_MEGATRON and os.environ["RANK"] == "0":
        message = f"megatron-core {version} is not one of the tested versions ({tested_versions()})"
        print(f"fp8launch: warning: {message}", file=sys.stderr)
    if script is None and importlib.util.find_spec("megatron.training") is None:
        oldest = ".".join(map(str, TESTED_MEGATRON[0]))
        stop(MACHINE_LACKS, f"megatron-core {version} has no megatron.training; {oldest} or newer has")


def check_gpu() -> None:
    import torch

    visible = torch.cuda.device_count()
    if visible == 0:
        built = "a CPU-only build"
        if torch.version.cuda:
            built = f"CUDA {torch.version.cuda}"
        stop(
            MACHINE_LACKS,
            f"no GPU is visible to torch {torch.__version__} ({built}); for a run without: FP8LAUNCH_DEVICE=cpu",
        )
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= visible:
        stop(
            MACHINE_LACKS,
            f"local rank {local_rank} needs its own GPU but sees only {visible}: give each task all of the node's GPUs "
            "(--gpus-per-node, no --gpus-per-task or --gpu-bind), and no more tasks than GPUs",
        )


def prepare(device: str) -> None:
    """Everything that must be in place before Megatron is imported by the entry, the script or another program."""
    prepare_process(device)
    prepare_megatron(device)


def prepare_process(device: str) -> None:
    """The part that needs neither torch nor Megatron."""
    python311.install()
    signals.tie_helpers_to_rank()
    signals.answer_with_stack()
    if device == "cpu":
        cpu_process.cover()


def prepare_megatron(device: str) -> None:
    """Prepare torch and Megatron, which this imports."""
    if device == "cpu":
        from fp8launch.injob.rank.compat import cpu

        cpu.install()
    else:
        cache_folders.give_triton_a_cache()
        from fp8launch.injob.rank.compat import apex_wgrad, delayed_weights

        apex_wgrad.install()
        delayed_weights.install()
    from fp8launch.injob.rank.compat import datasets_helper, save_queue

    try:
        datasets_helper.install()
    except datasets_helper.HelperProblem as problem:
        stop(MACHINE_LACKS, str(problem))
    save_queue.install()


def refuse_missing_cpu_flags(argv: list[str]) -> None:
    """Stop where the arguments lack what training on a CPU needs."""
    missing = cpu_process.missing_flags(argv)
    if missing:
        stop(WRONG_REQUEST, f"training on a CPU also needs: {' '.join(missing)}")


def watch_megatron() -> None:
    """Have Megatron-LM's training loop watched for evidence of FP8."""
    from fp8launch.injob.rank import probe, tensor_stats

    try:
        tensor_stats.install()
    except tensor_stats.StatsProblem as problem:
        stop(MACHINE_LACKS, str(problem))
    probe.install()


def prepare_at_import(device: str) -> None:
    """Prepare where a script is about to import torch or Megatron."""
    gc.disable()
    prepare_megatron(device)
    watch_megatron()
    collect_garbage()


def minutes_left() -> int | None:
    """The minutes after which to save and exit; None for no limit. FP8LAUNCH_STOP_AT is when (seconds since 1970).

    Counted from here, not from the job's start: a container may take minutes to come up. One rank is enough for all to
    leave: a node whose clock is ahead makes them leave early, and none makes them leave late.
    """
    stop_at = os.environ.get("FP8LAUNCH_STOP_AT")
    if not stop_at:
        return None
    return max(1, int((float(stop_at) - STARTED) // 60))


def stop_arguments(argv: list[str]) -> list[str]:
    """What makes Megatron save and leave in time."""
    minutes = minutes_left()
    if minutes is None or option(argv, "--exit-duration-in-mins") is not None:
        return []
    return ["--exit-duration-in-mins", str(minutes)]


def train(script: Path | None, argv: list[str]) -> None:
    """Train by the script, or by fp8launch's own entry."""
    if script is None:
        run_to_the_end(lambda: run_entry(argv))
    else:
        run_to_the_end(lambda: run_script(script, argv))


def run_to_the_end(training: Callable[[], None]) -> None:
    """Train, and see that this process ends when the training has, however it ends."""
    try:
        training()
    except SystemExit as left:
        # Megatron leaves so at a signal, at the time limit and at --exit-interval, once it has saved.
        leaving.training_is_over(leaving.exit_code(left))
        raise
    except BaseException:
        leaving.training_is_over(1)
        raise
    leaving.everything_is_written()


def collect_garbage() -> None:
    """Let Python collect garbage from here on, without looking at what has been imported."""
    gc.freeze()
    gc.enable()


def run_script(script: Path, argv: list[str]) -> None:
    sys.argv = [str(script), *argv]
    collect_garbage()
    runpy.run_path(str(script), run_name="__main__")


def run_entry(argv: list[str]) -> None:
    sys.argv = [str(Path(__file__).with_name("pretrain.py")), *argv, *python311.defaults(argv)]
    from fp8launch.injob.rank import pretrain

    problems = pretrain.refused(argv)
    if problems:
        stop(WRONG_REQUEST, "; ".join(problems))
    collect_garbage()
    pretrain.main(STARTED)


def own_arguments(arguments: list[str]) -> tuple[Path | None, list[str]]:
    """The script, if one is named, and Megatron's arguments.

    Ours come first. The `--` after them may be gone: torchrun's argument parser eats it.
    """
    script = None
    if arguments[:1] == ["--script"]:
        if len(arguments) < 2:
            stop(WRONG_REQUEST, "--script needs the path of a training script")
        script, arguments = Path(arguments[1]), arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    return script, arguments


def begin() -> str:
    """Make this process a rank of the job; return its device, `cuda` or `cpu`."""
    leaving.skip_native_exit()
    # A log that is read while the job runs must not lag by a block.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    device = os.environ.get("FP8LAUNCH_DEVICE", "cuda")
    if device not in ("cuda", "cpu"):
        stop(WRONG_REQUEST, f"FP8LAUNCH_DEVICE is {device!r}; it may be cuda or cpu")
    try:
        os.environ.update(ranks.rank_environment(os.environ))
    except ranks.EnvironmentProblem as problem:
        stop(WRONG_REQUEST, str(problem))
    if os.environ["WORLD_SIZE"] != "1" and (unresolved := ranks.unresolved_address(os.environ)):
        stop(MACHINE_LACKS, unresolved)
    return device


def announce() -> None:
    """Print this rank's node, and end with the agent that started the rank."""
    node_info.announce()
    agent = os.environ.pop(rank_watch.AGENT, None)
    if agent:
        rank_watch.end_with(int(agent), rank_watch.start_time(int(agent)))


def main() -> None:
    script, argv = own_arguments(sys.argv[1:])
    argv = [*argv, *stop_arguments(argv)]
    device = begin()
    if script is not None:
        if not script.is_file():
            stop(WRONG_REQUEST, f"no such script: {script}")
        # As `python script` would: the checkout's own megatron package comes before an installed one.
        sys.path.insert(0, str(script.resolve().parent))

    check_software(script)
    check_packages(argv)
    if device == "cuda":
        check_gpu()
    problem_found = low_precision_problem(argv, device)
    if problem_found:
        stop(WRONG_REQUEST, problem_found)
    announce()
    if device == "cpu":
        refuse_missing_cpu_flags(argv)
    prepare_process(device)
    if script is not None and device == "cpu":
        # A script that imports neither starts without the seconds that both take.
        before_import.call(lambda: prepare_at_import(device), "torch", "megatron")
    else:
        prepare_megatron(device)
        watch_megatron()
    train(script, argv)


if __name__ == "__main__":
    main()
