"""One process of a training job: `python worker.py [--script PATH] -- MEGATRON-ARGUMENTS...`

Started once per GPU, by srun (rank from Slurm's variables), by torchrun (variables unchanged) or alone. Prepares the
process, then runs fp8launch's own pre-training entry or the given script (such as pretrain_gpt.py of a Megatron-LM
checkout). Exit codes are the training's own, except 2 for a request that cannot work and 3 if the machine lacks
something. The training handles SIGTERM, and helper processes survive the signal; SIGUSR1 prints the stack. A process
that is still running a minute after its training is made to exit (`leaving`).

Environment: FP8LAUNCH_DEVICE=cuda (default) or cpu; FP8LAUNCH_PROBE as in `probe`; FP8LAUNCH_NODE_TIMES as in
`forward_times`; FP8LAUNCH_STOP_AT as in `minutes_left`; FP8LAUNCH_LEAVE_WITHIN as in `leaving`; variables of the
plugins' measurements.
"""
# mypy: disable-error-code="import-not-found, no-any-return"

from __future__ import annotations

import time

STARTED = time.time()  # before anything heavy is imported: Megatron reports the time from here to the first step

import gc

# Imports create a million permanent objects. Searching them for garbage takes a third of the CPU time of a start.
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

from fp8launch.injob.rank import leaving, node_info, rank_watch, ranks, signals, training_loop
from fp8launch.injob.rank.compat import before_import, cache_folders, cpu_process, python311, tokenizers
from fp8launch.injob.rank.optional_packages import needs

WRONG_REQUEST = 2
MACHINE_LACKS = 3
# SUPPORTED of megatron/versions.py, which is not here inside the job: a copy that a test compares.
TESTED_MEGATRON = ((0, 17), (0, 18), (0, 19))


def stop(code: int, message: str) -> NoReturn:
    """Print a line to stderr and exit."""
    print(f"fp8launch: {message}", file=sys.stderr, flush=True)
    sys.exit(code)


def option(argv: list[str], flag: str) -> str | None:
    """Return the value that argparse takes for `flag`: the last one, as `--flag value` or `--flag=value`."""
    value = None
    for position, argument in enumerate(argv):
        if argument == flag:
            value = argv[position + 1] if position + 1 < len(argv) else ""
        elif argument.startswith(flag + "="):
            value = argument.split("=", 1)[1]
    return value


def low_precision_problem(argv: list[str], device: str) -> str | None:
    """Return why requested FP8 or FP4 would not be used; None if it will be, or is not requested.

    Megatron accepts these arguments and silently trains in bf16: only Transformer Engine's layers read the format.
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
    """Return the version of the Megatron-Core that would be imported, from its files: an import takes seconds."""
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
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU-only build"
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
    """Prepare the process for the entry, the script or another program that imports Megatron."""
    prepare_process(device)
    prepare_megatron(device)


def prepare_process(device: str) -> None:
    """Do the part of the preparation that needs neither torch nor Megatron."""
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
        from fp8launch.injob.rank.compat import apex_wgrad

        apex_wgrad.install()
    from fp8launch.injob.rank.compat import checkpointing, datasets_helper

    if device != "cpu":
        checkpointing.load_weights_with_their_scale()
    checkpointing.report_saves_in_bytes()
    try:
        datasets_helper.install()
    except datasets_helper.HelperProblem as problem:
        stop(MACHINE_LACKS, str(problem))


def refuse_missing_cpu_flags(argv: list[str]) -> None:
    """Exit if the arguments lack what training on a CPU needs."""
    missing = cpu_process.missing_flags(argv)
    if missing:
        stop(WRONG_REQUEST, f"training on a CPU also needs: {' '.join(missing)}")


def watch_megatron() -> None:
    """Have Megatron-LM's training loop watched, for evidence of FP8 and for slow nodes."""
    from fp8launch.injob.rank import forward_times, probe

    forward_times.install()
    try:
        training_loop.install_measurements()
    except training_loop.CannotMeasure as problem:
        stop(MACHINE_LACKS, str(problem))
    probe.install()


def prepare_at_import(device: str) -> None:
    """Prepare when a script is about to import torch or Megatron."""
    gc.disable()
    prepare_megatron(device)
    watch_megatron()
    collect_garbage()


def minutes_left() -> int | None:
    """Return the minutes after which to save and exit; None for no limit.

    FP8LAUNCH_STOP_AT is the time in seconds since 1970. Minutes count from this process's start, not from the job's: a
    container may take minutes to start. All ranks exit as soon as one does, so a clock that is ahead makes them exit
    early, and no clock makes them exit late.
    """
    stop_at = os.environ.get("FP8LAUNCH_STOP_AT")
    if not stop_at:
        return None
    return max(1, int((float(stop_at) - STARTED) // 60))


def stop_arguments(argv: list[str]) -> list[str]:
    """Return the arguments that make Megatron save and exit in time."""
    minutes = minutes_left()
    if minutes is None or option(argv, "--exit-duration-in-mins") is not None:
        return []
    return ["--exit-duration-in-mins", str(minutes)]


def train(script: Path | None, argv: list[str]) -> None:
    """Train with the script, or with fp8launch's own entry."""
    if script is None:
        run_to_the_end(lambda: run_entry(argv))
    else:
        run_to_the_end(lambda: run_script(script, argv))


def run_to_the_end(training: Callable[[], None]) -> None:
    """Train, and make sure that this process ends after the training, however that ends."""
    try:
        training()
    except SystemExit as left:
        # Megatron raises this at a signal, at the time limit and at --exit-interval, after it has saved.
        leaving.training_is_over(leaving.exit_code(left))
        raise
    except BaseException:
        leaving.training_is_over(1)
        raise
    leaving.everything_is_written()


def collect_garbage() -> None:
    """Enable garbage collection from here on, without searching imported objects."""
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
    """Return the script, if there is one, and Megatron's arguments.

    Our arguments come first. The `--` after them may be missing, because torchrun's argument parser removes it.
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
    # The log is read while the job runs, so it must not lag by a block.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]

    device = os.environ.get("FP8LAUNCH_DEVICE", "cuda")
    if device not in ("cuda", "cpu"):
        stop(WRONG_REQUEST, f"FP8LAUNCH_DEVICE is {device!r}; it may be cuda or cpu")
    if device == "cuda":
        cache_folders.give_triton_a_cache()  # before Transformer Engine is imported, which reads it
    try:
        os.environ.update(ranks.rank_environment(os.environ))
    except ranks.EnvironmentProblem as problem:
        stop(WRONG_REQUEST, str(problem))
    training_loop.start_measurements()
    if os.environ["WORLD_SIZE"] != "1" and (unresolved := ranks.unresolved_address(os.environ)):
        stop(MACHINE_LACKS, unresolved)
    return device


def announce() -> None:
    """Print this rank's node, and make the rank end with the agent that started it."""
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
        # As `python script` does: the checkout's megatron package comes before an installed one.
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
        # A script that imports neither starts seconds sooner.
        before_import.call(lambda: prepare_at_import(device), "torch", "megatron")
    else:
        with tokenizers.without_transformers(option(argv, "--tokenizer-type") if script is None else None):
            prepare_megatron(device)
            watch_megatron()
    train(script, argv)


if __name__ == "__main__":
    main()
