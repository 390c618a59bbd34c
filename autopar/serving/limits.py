"""Define the limits of a server, and the errors that it replies with.

In: options. Out: `Limits`; `RequestError`, an error with an HTTP status, in the form that OpenAI's clients read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: The error type of each status in OpenAI's API.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a server.

    Args:
        max_body_bytes: the largest body of a request. body_s: the time within which it must arrive, and before it its head.
        max_queued_tokens: the largest number of tokens, of prompts and of outputs to generate, in requests of one model that
            wait. A request above it is refused with status 429, unless no other one waits.
        max_connections: requests that are served at once; above it, status 503.
        max_choices: the largest `n`.
        timeout_s: the longest time from a request to the end of its reply.
        shutdown_s: how long running requests may go on after a signal to end.
        api_keys: keys of which a request must have one; none lets all requests in.
        admin_keys: keys for loading, unloading and sleeping; none turns these off.
        hosts: host names that requests may be sent to; none allows all. On loopback this keeps other sites' pages out.
    """

    max_body_bytes: int = 10_000_000
    body_s: float = 30.0
    max_queued_tokens: int = 1_000_000
    max_connections: int = 1000
    max_choices: int = 64
    timeout_s: float = 600.0
    shutdown_s: float = 30.0
    api_keys: frozenset[str] = frozenset()
    admin_keys: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()


class RequestError(Exception):
    """A reply with an error.

    Args:
        status: of HTTP. message: what is wrong, and the way out.
        param: the field of the request. code: a word for programs.
        retry_after_s: when the request may be sent again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.retry_after_s = status, param, code, retry_after_s

    def body(self) -> dict[str, Any]:
        """The reply's body."""
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """The reply's headers."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}
