"""A web server on this machine that keeps the JSON posted to it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any


@contextmanager
def webhook(host: str = "127.0.0.1") -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The server's address, with a token as such addresses have, and the messages so far."""
    messages: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer((host, 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        yield f"http://{host}:{web.server_port}/s3cr3t-t0ken", messages
        web.shutdown()
        thread.join()
