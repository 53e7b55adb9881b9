"""Rules of `check` about live tracking. They look at the recipe; `submit` also warns about the cluster profile's."""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fp8launch.check.resolved_run import ResolvedRun
from fp8launch.check.rule import Finding, rule
from fp8launch.plugins.tracking.injob.mlflow_run import SERVER
from fp8launch.plugins.tracking.job_lines import lacking
from fp8launch.plugins.tracking.section import tracking_of


@rule("tracking-library", "warning", source="docs/tracking.md: where the libraries are", scope="hardware")
def tracking_library(run: ResolvedRun) -> Iterator[Finding]:
    """Warn about a tracker whose library no Python of this machine is known to have."""
    recipe = run.loaded.recipe
    tracking = tracking_of(recipe)
    own = [recipe.launch.python] if recipe.launch.python and recipe.container.image is None else []
    for name in tracking.trackers:
        for problem in lacking(name, [tracking.python] if tracking.python else [*own, sys.executable]):
            fix = f"pip install 'fp8launch[{name}]', or set tracking.python to a Python of the first node that has it"
            yield Finding(problem, run.loaded.where("tracking", name), fix)


@rule("tracking-login", "warning", source="wandb.login; mlflow.set_tracking_uri", scope="hardware")
def tracking_login(run: ResolvedRun) -> Iterator[Finding]:
    """Warn about a tracker that the job cannot log in to, as far as this shell shows."""
    tracking = tracking_of(run.loaded.recipe)
    if tracking.wandb and tracking.wandb.mode == "online" and not _is_logged_in():
        message = "the job cannot log in to W&B: WANDB_API_KEY is not set, and ~/.netrc has no login"
        fix = "export WANDB_API_KEY, or set tracking.wandb.mode=offline and `wandb sync` later"
        yield Finding(message, run.loaded.where("tracking", "wandb"), fix)
    if tracking.mlflow and tracking.mlflow.uri is None and not os.environ.get(SERVER):
        message = f"tracking.mlflow has no server: neither `uri` nor {SERVER} is set"
        fix = f"set tracking.mlflow.uri, or export {SERVER}"
        yield Finding(message, run.loaded.where("tracking", "mlflow"), fix)


def _is_logged_in() -> bool:
    """Return whether W&B finds a key: in the environment, or where `wandb login` writes it."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    file = Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    try:
        return file.is_file() and netrc.netrc(str(file)).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
