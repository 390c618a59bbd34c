"""JAX's coordination service as a small store of bytes that all processes see.

In: keys like paths, bytes. Out: the same. It runs inside process 0, starts with `jax.distributed.initialize`, and needs
neither devices nor a compiled program. A call lets other threads run while it waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import ProcessError
from autopar.jax_interop.processes import coordination_client


class ServiceLostError(ProcessError):
    """The coordination service does not answer: process 0 is gone, or the network to it."""


@dataclass(frozen=True, slots=True)
class Service:
    """The store, and this process's place.

    Args:
        client: JAX's own.
        index, count: of processes.
    """

    client: Any
    index: int
    count: int

    def put(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """Set a key.

        Raises:
            ServiceLostError: where process 0 does not answer.
        """
        with _Lost():
            self.client.key_value_set_bytes(key, value, allow_overwrite=overwrite)

    def get(self, key: str, wait_s: float) -> bytes | None:
        """The value of a key, once it has one; None where it has none in time."""
        with _Lost():
            try:
                return self.client.blocking_key_value_get_bytes(key, max(1, int(wait_s * 1000)))
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                    return None
                raise

    def folder(self, key: str) -> dict[str, bytes]:
        """Everything under a key, by what follows it."""
        with _Lost():
            found = self.client.key_value_dir_get_bytes(f"{key}/")
        return {name.removeprefix(f"{key}/"): value for name, value in found}

    def count_up(self, key: str) -> int:
        """Add one to a number, and return it; the first is 1."""
        with _Lost():
            return self.client.key_value_increment(key, 1)

    def delete(self, key: str) -> None:
        """Drop a key and all under it."""
        with _Lost():
            self.client.key_value_delete(f"{key}/")


class _Lost:
    """Turns what a dead service raises into `ServiceLostError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise ServiceLostError(
                "process 0 does not answer, which runs JAX's coordination service: it has died, or the network to it is"
                f" down ({str(error).splitlines()[0]})"
            ) from error


def service_of_jax() -> Service | None:
    """The service that `jax.distributed.initialize` started; None before that, and where there is one process."""
    client, index, count = coordination_client()
    return None if client is None or count == 1 else Service(client, index, count)
