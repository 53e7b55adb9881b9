"""The cause of death, among all that a dying job prints."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import log_text
from support_logs import DATA, REAL, dump, line

from fp8launch.injob.supervisor.failure_patterns import PATTERNS
from fp8launch.injob.supervisor.failures import NEEDLES, ending_of_attempt, read_ending, traceback_of
from fp8launch.injob.supervisor.hang_watchdog import HUNG
from fp8launch.injob.supervisor.health_rules import Event
from fp8launch.injob.supervisor.health_watch import record_of
from fp8launch.logs import read_log


def cause(*lines: str) -> str | None:
    found = read_ending(enumerate(lines)).failure
    return found.code if found else None


# Lines as the programs print them, with the code that each must give.
LINES = [
    tuple(row.split("\t", 1))
    for row in (Path(__file__).parent / "failure_lines.tsv").read_text().splitlines()
    if not row.startswith("#")
]


@pytest.mark.parametrize(("code", "text"), LINES)
def test_each_line_by_itself(code: str, text: str) -> None:
    assert cause(text) == code
    assert cause("3: " + text) == code


@pytest.mark.parametrize(("code", "text"), LINES)
def test_the_quick_search_lets_each_line_through(code: str, text: str) -> None:
    assert any(needle in text.encode() for needle in NEEDLES)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_whatever_matches_a_pattern_is_found_by_the_quick_search(data: st.DataObject) -> None:
    """The fixed texts are only a shortcut: they may not hide a line that a pattern knows."""
    pattern = data.draw(st.sampled_from([one for each in PATTERNS for one in each.alternatives]))
    text = data.draw(st.from_regex(re.compile(pattern.expression, re.ASCII)))
    assert any(needle in text.encode("utf-8", "replace") for needle in NEEDLES), (pattern.expression, text)
    assert pattern.needle in text
    if text.isascii() and text.isprintable():
        assert pattern.matches(text)


CASCADE = [
    "[rank1]:[E1120 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(Seq=3)",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "srun: error: n1: task 0: Exited with exit code 1",
    "slurmstepd: error: *** STEP 12.0 ON n1 CANCELLED AT 2026-11-20T10:00:00 ***",
]
OOM = "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def test_the_cause_is_named_and_not_what_followed() -> None:
    assert cause(OOM, *CASCADE) == "out-of-memory"


STEP = CASCADE[-1]


def test_a_cancelled_step_is_no_cancelled_job_until_slurm_says_so() -> None:
    """srun ends a step for a process that failed in the same words, and its own may be in another file."""
    assert cause(line(1), STEP) == "step-cancelled"
    assert cause(line(1), STEP, *CASCADE[:3]) == "step-cancelled"
    assert cause(line(1), STEP, STEP.replace("STEP 12.0", "JOB 12")) == "cancelled"
    for reason, code in (("TIME LIMIT", "time-limit"), ("PREEMPTION", "preempted"), ("NODE FAILURE", "node-failure")):
        assert cause(STEP, STEP.replace(" ***", f" DUE TO {reason} ***")) == code
    assert cause(STEP.replace(" ***", " DUE TO TIME LIMIT ***"), STEP) == "time-limit"


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_a_rank_of_torchrun_that_was_killed_is_the_cause_of_what_its_peers_report(order: tuple[int, ...]) -> None:
    """Its own torchrun may report it after the peers on another node have failed."""
    lines = [
        "0: [rank0]: RuntimeError: [/w/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:2",
        "0: E1122 15:19:18.522000 2067 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) "
        "local_rank: 0 (pid: 2243) of binary: /usr/bin/python",
        "1: E1122 15:19:19.243000 1376 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) "
        "local_rank: 1 (pid: 1523) of binary: /usr/bin/python",
    ]
    found = read_ending(enumerate(lines[at] for at in order)).failure
    assert found and (found.code, found.source) == ("killed", lines[2])


@pytest.mark.parametrize("order", list(itertools.permutations([OOM, *CASCADE[:3]])))
def test_order_of_arrival_does_not_hide_the_cause(order: tuple[str, ...]) -> None:
    assert cause(*order) == "out-of-memory"


def test_a_signal_in_torchruns_summary_says_more_than_that_a_child_failed() -> None:
    summary = [
        "pretrain_gpt.py FAILED",
        "  exitcode  : -9 (pid: 12)",
        "  traceback : Signal 9 (SIGKILL) received by PID 12",
    ]
    assert cause(CASCADE[1], *summary, CASCADE[2]) == "killed"


def test_torchrun_that_was_told_to_stop_is_no_program_error() -> None:
    told = ["Received 15 death signal, shutting down workers", "Traceback (most recent call last):"]
    assert cause(*told, '  File "api.py", line 1, in handler', "x.api.SignalException: Process 12 got signal: 15") == (
        "terminated"
    )


KILLED_STEP = ("srun: error: n1: task 0: Exited with exit code 1", "srun: Terminating StepId=12.0", CASCADE[-1])


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["Traceback (most recent call last):", '  File "/x/a.py", line 1, in f', "KeyError: 'x'"], "exception"),
        ([CASCADE[0]], "nccl"),
        (["srun: error: n1: task 0: Segmentation fault (core dumped)"], "segfault"),
        (["srun: error: n1: task 2: Killed"], "killed"),
        ([], "crash"),
    ],
)
def test_a_step_that_srun_ends_after_a_failure_was_cancelled_by_nobody(lines: list[str], code: str) -> None:
    """What `--kill-on-bad-exit` leaves in the log looks like a cancellation."""
    assert cause(*lines, *KILLED_STEP) == code


def test_a_step_that_is_cancelled_while_it_trains_was_cancelled() -> None:
    """`scancel`: the words come first, then the ranks die of the signal."""
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish."
    assert cause(aborted, CASCADE[-1], "srun: error: n1: task 0: Terminated", CASCADE[0]) == "cancelled"


def test_a_step_that_reached_its_limit_while_ranks_complained_reached_its_limit() -> None:
    assert cause(CASCADE[0], CASCADE[-1].replace(" ***", " DUE TO TIME LIMIT ***")) == "time-limit"


@pytest.mark.parametrize(
    "left", ["[exiting program after 58.0 minutes] datetime: now", "[after training is done] datetime: now"]
)
def test_what_ends_the_step_of_a_program_that_has_left_is_no_failure(tmp_path: Path, left: str) -> None:
    path = tmp_path / "log"
    path.write_text("\n".join([dump(a=1), line(1), line(2), line(3), left, CASCADE[-1]]) + "\n")
    assert read_log(path).processes[0].ending.failure is None


def test_a_broken_gpu_is_the_cause_of_the_watchdog_on_the_other_ranks() -> None:
    xid = "[1.2] NVRM: Xid (PCI:0000:3b:00): 79, pid=12, GPU has fallen off the bus."
    assert cause(CASCADE[0], xid, *CASCADE[1:]) == "gpu-failure"


def test_a_time_limit_is_not_blamed_on_the_ranks_that_it_stops() -> None:
    limit = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***"
    assert cause(limit, "Traceback (most recent call last):", "KeyboardInterrupt", *CASCADE) == "time-limit"


def test_a_memory_error_that_hung_the_job_until_its_limit_is_the_cause() -> None:
    assert cause(OOM, "slurmstepd: error: *** JOB 1 ON n CANCELLED AT x DUE TO TIME LIMIT ***") == "out-of-memory"


def test_an_assertion_without_text_is_told_by_its_place() -> None:
    found = read_ending(
        enumerate(
            [
                "[rank0]: Traceback (most recent call last):",
                '[rank0]:   File "/site/megatron/training/arguments.py", line 700, in validate_args',
                "[rank0]:     assert args.tp == 1",
                "[rank0]: AssertionError",
            ]
        )
    ).failure
    assert found is not None
    assert found.code == "bad-arguments"
    assert "validate_args" in found.message


def test_interleaved_tracebacks_are_kept_apart() -> None:
    found = read_ending(
        enumerate(
            [
                "0: Traceback (most recent call last):",
                "1: Traceback (most recent call last):",
                '0:   File "/site/megatron/training/arguments.py", line 7, in validate_args',
                '1:   File "/site/torch/x.py", line 7, in wait',
                "1: RuntimeError: [gloo/pair.cc:1] Connection closed by peer",
                "0: AssertionError: tensor parallel size is wrong",
            ]
        )
    ).failure
    assert found is not None
    assert (found.code, found.offset) == ("bad-arguments", 5)


@pytest.mark.parametrize(
    ("why", "code"),
    [
        ("OSError: [Errno 5] Input/output error", "storage"),
        ("OSError: [Errno 116] Stale file handle", "storage"),
        # As torch 2.11 reports a `.metadata` that cannot be read, or that is missing.
        (
            "AssertionError: metadata is None; global metadata read failed: [Errno 5] Input/output error; rank local "
            "metadata read failed: [Errno 2] No such file or directory: '/ckpt/iter_0000006/__0.metadata'",
            "storage",
        ),
        (
            "AssertionError: metadata is None; global metadata read failed: [Errno 2] No such file or directory: "
            "'/ckpt/iter_0000006/.metadata'",
            "missing-checkpoint",
        ),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/iter_0000006/__0_0.distcp'",
            "missing-checkpoint",
        ),
        ("RuntimeError: PytorchStreamReader failed reading zip archive", "missing-checkpoint"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "out-of-memory"),
        (
            "RuntimeError: Missing key in checkpoint state_dict: decoder.layers.linear_qkv._extra_state",
            "fp8-state-missing",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_missing_only_if_nothing_else_is_known(why: str, code: str) -> None:
    """An error that may pass sent users to look for another checkpoint."""
    found = cause(
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/site/torch/distributed/checkpoint/utils.py", line 289, in all_gather',
        "[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([0])",
        "[rank0]: Traceback (most recent call last): (RANK 0)",
        '[rank0]:   File "/site/torch/distributed/checkpoint/filesystem.py", line 885, in read_data',
        f"[rank0]: {why}",
        "fp8launch: failed (exitcode: 1) local_rank: 0 (pid: 19826) of worker.py",
    )
    assert found == code


@pytest.mark.parametrize(
    "text",
    [
        "/site/torch/x.py:83: UserWarning: barrier(): CUDA out of memory is likely",
        "WARNING: Setting args.overlap_p2p_comm to False since FP8 requires a GPU",
        "[rank2]:[W1120 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called at exit",
        "node1:1:1 [0] NCCL INFO Using network Socket error",
        "  check_for_nan_in_loss_and_grad .................. True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING=1",
        "training ...",
        "                   [--exit-on-missing-checkpoint]",
    ],
)
def test_what_only_sounds_bad_is_no_failure(text: str) -> None:
    assert cause(text) is None


@pytest.mark.parametrize("name", [p.name for p in REAL if p.name.startswith("llama8b") or "rank" in p.name])
def test_real_logs_that_ended_well_show_no_failure(name: str) -> None:
    assert all(p.ending.failure is None for p in read_log(DATA / name).processes)


@pytest.mark.parametrize(
    ("name", "code", "text"),
    [
        ("tiny_cpu_0.19_bad_argument.log", "bad-arguments", "--frobnicate"),
        ("tiny_cpu_0.19_exception.log", "exception", "invalid for input of size"),
        ("tiny_cpu_0.19_nan.log", "nan", "found NaN in local grad norm"),
    ],
)
def test_real_logs_of_failed_runs(name: str, code: str, text: str) -> None:
    path = DATA / name
    failure = read_log(path).processes[-1].ending.failure
    assert failure is not None
    assert failure.code == code
    assert text in failure.message
    assert text in log_text(path).split("\n")[failure.line - 1]


def test_trouble_that_training_outlived_is_no_failure(tmp_path: Path) -> None:
    path = tmp_path / "log"
    early = [dump(a=1), line(1), "Traceback (most recent call last):", "ValueError: one sample was odd"]
    path.write_text("\n".join([*early, *(line(i) for i in range(2, 9))]) + "\n")
    assert read_log(path).processes[0].ending.failure is None


def test_slurms_announcement_counts_although_iterations_follow(tmp_path: Path) -> None:
    path = tmp_path / "log"
    limit = "slurmstepd: error: *** JOB 12 ON n1 CANCELLED AT 2026-11-20T10:00:00 DUE TO TIME LIMIT ***"
    path.write_text("\n".join([line(1), line(2), limit, *(line(i) for i in range(3, 12))]) + "\n")
    failure = read_log(path).processes[0].ending.failure
    assert failure is not None
    assert (failure.code, failure.line) == ("time-limit", 3)


@pytest.mark.parametrize("code", ["unhealthy-training", "hang"])
def test_what_the_supervisor_ended_a_training_for_counts_although_iterations_follow(tmp_path: Path, code: str) -> None:
    """A step of milliseconds is over before the processes are found and killed."""
    event = Event("nan", "the loss is NaN", 1, 2)
    finding = record_of(event) if code == "unhealthy-training" else f"{HUNG}the log has not grown for 99 s"
    text = "\n".join([line(1), line(2), finding, *(line(i) for i in range(3, 12))]) + "\n"
    path = tmp_path / "log"
    path.write_text(text)
    for failure in (read_log(path).processes[0].ending.failure, ending_of_attempt(text).failure):
        assert failure is not None and failure.code == code


def test_a_traceback_is_separated_from_other_ranks() -> None:
    head = "Traceback (most recent call last):"
    lines = [
        f"[rank1]: {head}", f"[rank0]: {head}",
        '[rank1]:   File "a.py", line 1, in one', '[rank0]:   File "b.py", line 2, in two',
        "[rank1]: ValueError: first", "[rank0]: ValueError: second",
    ]  # fmt: skip
    assert traceback_of(lines, lines[4]) == [head, '  File "a.py", line 1, in one', "ValueError: first"]
    assert traceback_of(lines, lines[5]) == [head, '  File "b.py", line 2, in two', "ValueError: second"]
    assert traceback_of(lines, "[rank2]: ValueError: third") == []
    # A line after a finished traceback does not belong to it.
    assert traceback_of([*lines, "[rank0]: CUDA error: x"], "[rank0]: CUDA error: x") == []
