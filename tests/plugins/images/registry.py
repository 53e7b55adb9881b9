"""A registry that holds one image, as the OCI distribution protocol has it: what a real enroot pulls from in tests."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import platform
import tarfile
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())


class Registry:
    """`with Registry() as r:` serves on localhost; `push` makes the image that the tag `1` of `tiny` means from now."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.tag = ""
        self.asked: list[str] = []
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.do_GET(body=False)

            def do_GET(self, body: bool = True) -> None:
                registry.asked.append(self.path)
                wanted = self.path.rpartition("/")[2]
                digest = registry.tag if wanted == "1" else wanted
                blob = registry.blobs.get(digest)
                self.send_response(200 if blob is not None else 404)
                self.send_header("Content-Length", str(len(blob or b"")))
                if blob is not None:
                    self.send_header("Docker-Content-Digest", digest)
                    self.send_header("Content-Type", MANIFEST if "/manifests/" in self.path else "application/gzip")
                self.end_headers()
                if body:
                    self.wfile.write(blob or b"")

            def log_message(self, *arguments: object) -> None:
                """Silent."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def uri(self) -> str:
        """The image, as a recipe names it."""
        return f"localhost:{self._server.server_port}/library/tiny:1"

    def push(self, files: Mapping[str, str]) -> str:
        """An image of one layer with these files; its digest."""
        layer = io.BytesIO()
        with tarfile.open(fileobj=layer, mode="w") as tar:
            for name, text in files.items():
                entry = tarfile.TarInfo(name)
                entry.size, entry.mode = len(text.encode()), 0o755
                tar.addfile(entry, io.BytesIO(text.encode()))
        packed = gzip.compress(layer.getvalue(), mtime=0)
        config = {
            "architecture": ARCHITECTURE,
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["/bin/sh"]},
            "rootfs": {"type": "layers", "diff_ids": [_digest(layer.getvalue())]},
        }
        described = json.dumps(config).encode()
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _entry("application/vnd.oci.image.config.v1+json", self._keep(described), described),
            "layers": [_entry("application/vnd.oci.image.layer.v1.tar+gzip", self._keep(packed), packed)],
        }
        self.tag = self._keep(json.dumps(manifest).encode())
        return self.tag

    def _keep(self, blob: bytes) -> str:
        self.blobs[_digest(blob)] = blob
        return _digest(blob)

    def __enter__(self) -> Registry:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _digest(blob: bytes) -> str:
    return "sha256:" + hashlib.sha256(blob).hexdigest()


def _entry(kind: str, digest: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": digest, "size": len(blob)}
