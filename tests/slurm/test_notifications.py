"""Jobs that notify of their run's end, without anybody who waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Site
from support import wait_for
from webhook_server import webhook

pytestmark = [pytest.mark.needs_plugin("notify")]


def configured(site: Site) -> None:
    folder = Path(site.env["HOME"]) / ".config" / "fp8launch"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("notify: {webhook_variable: MY_WEBHOOK}\n")


def script(site: Site, text: str) -> str:
    file = site.folder / "trains.py"
    file.write_text(text)
    return f"launch.script={file}"


def ended(site: Site, run: str, state: str) -> None:
    wait_for(lambda: site.state(run)["state"] == state, 120)


def test_the_job_sends_one_message(site: Site) -> None:
    configured(site)
    with webhook(site.slurm.site.controller_address) as (url, messages):
        site.env["MY_WEBHOOK"] = url
        fails = script(site, "raise ValueError('a bad shape')\n")
        run = site.submit("--yes", "--set", fails)
        wait_for(lambda: messages, 120)
        ended(site, run, "failed")
        (message,) = messages
        assert (message["run"], message["state"]) == (run, "failed")
        assert "ValueError: a bad shape" in message["text"]
        messages.clear()
        study = site.submit("--yes", "--wait", "--sweep", "train.lr=1e-3,1e-2", "--set", script(site, "print(1)\n"))
        assert sorted(message["state"] for message in messages) == ["completed", "completed"]
        for folder in (site.runs / run, site.runs / study):
            for file in filter(Path.is_file, folder.rglob("*")):
                assert url.encode() not in file.read_bytes(), file


def test_a_job_that_is_requeued_and_then_cancelled(site: Site) -> None:
    configured(site)
    with webhook(site.slurm.site.controller_address) as (url, messages):
        site.env["MY_WEBHOOK"] = url
        sleeps = script(site, "import time\nprint('sleeps', flush=True)\ntime.sleep(600)\n")
        run = site.submit("--yes", "--set", sleeps)

        def attempts() -> int:
            return sum("sleeps" in log.read_text() for log in (site.runs / run / "logs").glob("*-*.log"))

        wait_for(lambda: site.state(run)["state"] == "running" and attempts() == 1, 120)
        site.requeue(run)
        assert "DUE TO JOB REQUEUE" in next((site.runs / run / "logs").glob("*.out")).read_text()
        assert messages == []
        wait_for(lambda: attempts() == 2, 60)
        assert site.run("cancel", run).returncode == 0
        ended(site, run, "cancelled")
        wait_for(lambda: messages, 60)
        assert [message["state"] for message in messages] == ["cancelled"]
