"""The order of test files in a run of the whole suite."""

from __future__ import annotations

SLURM = "tests/slurm/"
# Files that take more than half a minute, longest first: if a long file starts last, one worker runs it while others
# are idle. Slurm tests come first because only two workers can run them.
LONG = (
    *(f"{SLURM}test_{name}.py" for name in (
        "main_job", "study", "nemo_run", "phases", "slow_nodes", "nothing_twice", "login_node", "grid_acceptance",
        "memory_limits", "stages", "two_users", "health", "cluster", "data_array", "recycled_numbers", "charliecloud",
        "login_shells", "site_checks", "tune_on_slurm", "plain_sbatch", "tracking", "notifications",
    )),
    "tests/plugins/bridge/test_with_bridge.py",
    "tests/docs/test_commands.py",
    "tests/plugins/prove/test_known_bugs.py",
    "tests/injob/test_training.py",
    "tests/plugins/prove/test_plants.py",
    "tests/plugins/accelerate/test_peer.py",
    "tests/plugins/rehearse/test_bridge_rehearsal.py",
    "tests/plugins/prove/test_prove.py",
    "tests/plugins/rehearse/test_resuming.py",
    "tests/plugins/test_selections.py",
    "tests/submit/test_lifecycle.py",
    "tests/submit/test_local_hang.py",
    "tests/plugins/tune/test_tune.py",
    "tests/plugins/plan/test_plan.py",
    "tests/injob/test_checkpoints.py",
    "tests/submit/test_checkout.py",
    "tests/safety/test_foreign_folders.py",
    "tests/submit/test_local_attempts.py",
    "tests/plugins/data/test_build.py",
    "tests/plugins/data/test_bad_input.py",
    "tests/plugins/data/test_tiny_text.py",
    "tests/plugins/validators/test_differential.py",
    "tests/safety/test_nothing_is_executed.py",
    "tests/safety/test_secrets.py",
    "tests/submit/test_cut_off.py",
    "tests/plugins/rehearse/test_rehearsal.py",
    "tests/plugins/rehearse/test_containment.py",
    "tests/plugins/rehearse/test_rehearse_command.py",
    "tests/report/test_flops.py",
    "tests/plugins/tracking/test_trackers.py",
    "tests/plugins/tracking/test_live.py",
    "tests/plugins/pbs/test_new_scheduler.py",
    "tests/plugins/notify/test_job_end.py",
    "tests/check/test_phase_rules.py",
    "tests/injob/test_data.py",
    "tests/pack/test_pack_phases.py",
)  # fmt: skip
# Their tests share no fixture, and together take minutes.
DIVIDED = (
    "tests/plugins/bridge/test_with_bridge.py",
    "tests/docs/test_commands.py",
    "tests/plugins/prove/test_plants.py",
)
_PLACES = {file: number for number, file in enumerate(LONG)}


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def unit(nodeid: str) -> str:
    """Return the group of tests that one worker runs: a file, or a single test of a file in DIVIDED."""
    return nodeid if file_of(nodeid) in DIVIDED else file_of(nodeid)


def place(nodeid: str) -> tuple[bool, int]:
    """Return the sort key of a test's file: Slurm tests, then long files, then all others as collected."""
    file = file_of(nodeid)
    return not file.startswith(SLURM), _PLACES.get(file, len(LONG))
