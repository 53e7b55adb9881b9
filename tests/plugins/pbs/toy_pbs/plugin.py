"""A scheduler in a package of its own, as a site would write it."""

from fp8launch.plugins import Plugin

PLUGIN = Plugin("toy_pbs", schedulers={"pbs": "toy_pbs.scheduler:PbsScheduler"}, in_job=("toy_pbs.injob",))
