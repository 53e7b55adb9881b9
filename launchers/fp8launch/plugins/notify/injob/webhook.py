"""Post a message to a webhook. Jobs import this, too, so it uses only Python's standard library."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from typing import Any

TIMEOUT = 15.0
ADDRESS = re.compile(r"https?://[^\s]+")


def post(url: str, body: str) -> str:
    """Post JSON. Return an empty text, or what went wrong as the end of a sentence about the webhook.

    The address often contains a token, so the text never quotes it.
    """
    try:
        request = urllib.request.Request(url, data=body.encode(), headers={"Content-Type": "application/json"})
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=TIMEOUT):
            return ""
    except urllib.error.HTTPError as exc:
        words = http.client.responses.get(exc.code, "")
        if 300 <= exc.code < 400:
            words = "(a redirect, which is not followed: configure the new address)"
        return f"answered {exc.code} {words}".rstrip()
    except (http.client.InvalidURL, ValueError):
        return "has an invalid address"
    except http.client.HTTPException:
        return "does not speak HTTP"
    except OSError as exc:
        reason = getattr(exc, "reason", exc)
        return f"cannot be reached: {getattr(reason, 'strerror', None) or type(reason).__name__}"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: the server of a webhook could otherwise choose an address such as a service of this host."""

    def redirect_request(self, *arguments: Any) -> None:
        return None
