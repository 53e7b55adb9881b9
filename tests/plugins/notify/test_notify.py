"""Notifications: the command and the webhook of the user's configuration get the message, once, as JSON."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support import only, refused

from fp8launch.plugins.notify.notify import Notify, config_file, load_config, notify


@pytest.fixture
def server() -> Iterator[tuple[str, list[bytes]]]:
    """A web server on this machine; its address and what it was asked. /no answers 403, /to/302 a redirect."""
    posted: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path.startswith("/to/"):
                self.send_response(int(self.path.removeprefix("/to/")))
                self.send_header("Location", "/inside")
            else:
                self.send_response(403 if self.path == "/no" else 200)
            self.end_headers()

        def do_GET(self) -> None:
            posted.append(self.path.encode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}", posted
        web.shutdown()
        thread.join()


def test_the_command_gets_json_and_no_shell(tmp_path: Path) -> None:
    file = tmp_path / "told"
    notify(Notify(command=["tee", str(file)]), "r: failed; $(touch x)", True, {"run": "r"})
    assert json.loads(file.read_text()) == {"text": "r: failed; $(touch x)", "run": "r"}


def test_the_webhook_gets_json(server: tuple[str, list[bytes]]) -> None:
    url, posted = server
    notify(Notify(webhook=url), "r: completed", False, {"run": "r"})
    assert json.loads(posted[0])["text"] == "r: completed"


def test_only_failures_where_only_failures_are_wanted(server: tuple[str, list[bytes]]) -> None:
    url, posted = server
    for failed in (False, True):
        notify(Notify(webhook=url, when="failure"), f"failed: {failed}", failed, {})
    assert [json.loads(body)["text"] for body in posted] == ["failed: True"]


def test_what_goes_wrong_is_a_warning_without_the_address(
    server: tuple[str, list[bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    notify(Notify(webhook=f"{server[0]}/no"), "x", True, {})
    notify(Notify(webhook="http://127.0.0.1:1/token"), "x", True, {})
    notify(Notify(command=["false"]), "x", True, {})
    notify(Notify(command=["/nope"]), "x", True, {})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("warning: the notification ") for line in lines)
    assert "403" in lines[0] and "token" not in lines[1]


def test_the_configuration_is_checked(home: Path) -> None:
    assert load_config().notify == Notify()
    config_file().parent.mkdir(parents=True)
    config_file().write_text("notify: {command: [a, b], when: failure}\n")
    assert load_config().notify == Notify(command=["a", "b"], when="failure")
    config_file().write_text("notify: {webhok: 'http://x'}\n")
    assert "webhook" in str(only(refused(load_config)).fix)
    config_file().write_text("notify: {webhook: 'file:///etc/passwd'}\n")
    only(refused(load_config))


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
        b"HTTP/9.9 what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500,
        b"\0" * 100_000,
    ],
)
def test_what_answers_without_http_is_a_warning(answer: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Its words are not shown: they may be anything, also for a terminal."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def talk() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        notify(Notify(webhook=f"http://127.0.0.1:{listening.getsockname()[1]}/token"), "x", True, {})
        thread.join()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("warning: the notification webhook "), lines
    assert "token" not in lines[0] and "OpenSSH" not in lines[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:token/x",
        "http://a..token/x",
        "http://[token/x",
        "http://127.0.0.1:1/tok\x7fen",
        "http:///token",
    ],
)
def test_an_address_that_is_none_is_not_quoted(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It often holds a token, and the errors of Python's library quote it."""
    notify(Notify(webhook=url), "x", True, {})
    said = capsys.readouterr().err
    assert said.startswith("warning: the notification webhook ") and said.count("\n") == 1
    assert "tok" not in said


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(
    server: tuple[str, list[bytes]], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever answers for the webhook could otherwise make this machine ask services of its own network."""
    url, posted = server
    notify(Notify(webhook=f"{url}/to/{code}"), "x", True, {})
    assert len(posted) == 1
    assert f"answered {code} (a redirect, which is not followed" in capsys.readouterr().err
