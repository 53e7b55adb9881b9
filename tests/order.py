"""The order in which a run of the whole suite takes the files."""

from __future__ import annotations

SLURM = "tests/slurm/"
# Files that take more than half a minute, the longest first by a run's durations: a long one that starts last is waited
# for by one processor. Those on Slurm come first of all, because two workers alone can run them.
LONG = (
    *(f"{SLURM}test_{name}.py" for name in (
        "main_job", "nemo_run", "phases", "study", "charliecloud", "memory_limits", "grid_acceptance", "cluster",
        "nothing_twice", "two_users", "health", "login_shells", "login_node", "site_checks", "recycled_numbers",
    )),
    "tests/docs/test_commands.py",
    "tests/injob/test_training.py",
    "tests/submit/test_lifecycle.py",
    "tests/submit/test_local_hang.py",
    "tests/rehearsal/test_bridge_rehearsal.py",
    "tests/injob/test_checkpoints.py",
    "tests/submit/test_checkout.py",
    "tests/safety/test_foreign_folders.py",
    "tests/submit/test_local_attempts.py",
    "tests/tuning/test_tune.py",
    "tests/rehearsal/test_counts.py",
    "tests/check/test_differential.py",
    "tests/safety/test_nothing_is_executed.py",
    "tests/safety/test_secrets.py",
    "tests/submit/test_cut_off.py",
    "tests/report/test_flops.py",
    "tests/report/test_trackers.py",
    "tests/rehearsal/test_rehearse_command.py",
    "tests/planning/test_plan.py",
    "tests/check/test_phase_rules.py",
    "tests/injob/test_data.py",
    "tests/datasets/test_tiny_text.py",
    "tests/pack/test_pack_phases.py",
)  # fmt: skip
_PLACES = {file: number for number, file in enumerate(LONG)}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def place(nodeid: str) -> tuple[bool, int]:
    """Where a test's file comes in a run: Slurm's first, then the long ones, then the others as they were collected."""
    file = file_of(nodeid)
    return not file.startswith(SLURM), _PLACES.get(file, len(LONG))
