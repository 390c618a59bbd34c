"""Let each process keep the programs of its own devices in JAX's compilation cache.

JAX writes to the cache from process 0 alone, so that processes that compile the same program do not write the same entry. A stage of a
pipeline in another process is compiled by that process only, and would be compiled again after each restart.
"""

from __future__ import annotations

import threading
from typing import Any

from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import distributed as _distributed

_HERE = threading.local()


def keep_own_programs() -> None:
    """Keep the programs of this process's own devices from now on. Nothing changes in process 0, with a JAX whose functions have other
    names, or at a second call."""
    compiled = getattr(_compiler, "_compile_and_write_cache", None)
    write = getattr(_compiler, "_cache_write", None)
    if compiled is None or write is None or compiled.__module__ == __name__ or not _distributed.global_state.process_id:
        return

    def compiling(*args: Any, **kwargs: Any) -> Any:
        devices = [one for one in (*args, *kwargs.values()) if hasattr(one, "is_fully_addressable")]
        _HERE.is_own = bool(devices) and all(one.is_fully_addressable for one in devices)
        return compiled(*args, **kwargs)

    def writing(
        cache_key: str, compile_time_secs: float, module_name: str, backend: Any, executable: Any, *rest: Any
    ) -> None:
        if not _HERE.is_own:
            write(cache_key, compile_time_secs, module_name, backend, executable, *rest)
        elif compile_time_secs >= _config.persistent_cache_min_compile_time_secs.value:
            seconds = int(compile_time_secs)
            _compilation_cache.put_executable_and_time(cache_key, module_name, executable, backend, seconds)

    compiling.__module__ = __name__
    _compiler._compile_and_write_cache = compiling
    _compiler._cache_write = writing
