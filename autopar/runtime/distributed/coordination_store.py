"""Use JAX's coordination service as a key-value store between processes.

In: keys like paths, and bytes.
Out: the same in every process. The service runs in process 0 from `jax.distributed.initialize` on and needs neither
devices nor a compiled program. Other threads run while a call waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import ProcessError
from autopar.jax_interop.processes import coordination_client


class ServiceLostError(ProcessError):
    """The coordination service does not answer: process 0 has ended, or the network to it is down."""


@dataclass(frozen=True, slots=True)
class Service:
    """The store and this process's index.

    Args:
        client: JAX's client.
        index: this process's index.
        count: the number of processes.
    """

    client: Any
    index: int
    count: int

    def put(self, key: str, value: bytes, *, overwrite: bool = False) -> None:
        """Set a key.

        Raises:
            ServiceLostError: process 0 does not answer.
        """
        with _Lost():
            self.client.key_value_set_bytes(key, value, allow_overwrite=overwrite)

    def get(self, key: str, wait_s: float) -> bytes | None:
        """Wait for a key's value; None after `wait_s` seconds without one."""
        with _Lost():
            try:
                return self.client.blocking_key_value_get_bytes(key, max(1, int(wait_s * 1000)))
            except Exception as error:
                if "DEADLINE_EXCEEDED" in str(error) or "NOT_FOUND" in str(error):
                    return None
                raise

    def folder(self, key: str) -> dict[str, bytes]:
        """The values of all keys below this key, by the part of the key that follows it."""
        with _Lost():
            found = self.client.key_value_dir_get_bytes(f"{key}/")
        return {name.removeprefix(f"{key}/"): value for name, value in found}

    def count_up(self, key: str) -> int:
        """Increment a counter and return it; the first value is 1."""
        with _Lost():
            return self.client.key_value_increment(key, 1)

    def delete(self, key: str) -> None:
        """Delete a key and all keys below it."""
        with _Lost():
            self.client.key_value_delete(f"{key}/")


class _Lost:
    """Converts errors of a dead service to `ServiceLostError`."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception):
            raise ServiceLostError(
                "process 0, which runs JAX's coordination service, does not answer: it has died, or the network to it is"
                f" down ({str(error).splitlines()[0]})"
            ) from error


def service_of_jax() -> Service | None:
    """The service that `jax.distributed.initialize` started; None before that and with a single process."""
    client, index, count = coordination_client()
    return None if client is None or count == 1 else Service(client, index, count)
