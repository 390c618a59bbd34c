"""XLA's compiler in a process of its own, started ahead of the work.

In: a lowered step as bytes, a hardware profile, how many devices on how many hosts. Out:
`CompiledStep`: XLA's program as text, its memory, and how long XLA's scheduler thinks it takes. The
process is another one (`compile_absent`) because XLA reads its flags once per process, its estimate
is only in its log, and JAX complains of the missing GPU unless told to use the CPU. It is started
before there is anything to compile: it imports JAX while the step is planned.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from autopar.cost.hardware_profile import HardwareProfile
from autopar.errors import VerifyError
from autopar.system.source_paths import PACKAGE
from autopar.xla_compiler.gpu_target import require_wheels, target_text, topology_text

#: What XLA is told besides a user's own XLA_FLAGS, wherever it compiles: the scheduler that overlaps
#: communication, with its analytical estimate of times.
SCHEDULER_FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_analytical_sol_latency_estimator=true",
)
#: The same for GPUs that are not there. No autotuning, for it runs kernels; then no split-K either,
#: which autotuning would seldom choose and the estimator prices far too dear.
FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_experimental_force_split_k=1", *SCHEDULER_FLAGS)
#: Without this the estimator charges a flat 5 ms for any collective between hosts; with it, by bytes and latency.
_GPUS_PER_HOST_FLAG = "--xla_gpu_analytical_latency_estimator_options=partition_size="
_GPUS_PER_HOST = 8

#: XLA sums a few bytes by a kernel of its own, which its compiler (jax 0.12.0.1) cannot make for 64 GPUs: so the log
#: names it then, and so XLA is told to leave it to NCCL.
_OWN_KERNEL, _NO_OWN_KERNEL_FLAG = "TRITON_ONE_SHOT", "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false"

#: The least at which XLA's scheduler logs its estimate; 2 takes seconds, and 20 MB of log.
_LOG_MODULES = "latency_hiding_scheduler=1"
_TIME = re.compile(r"\] (?:Wasted cycles for ([\w\- ]+)|(Total cycles)): ([\d.e+\-]+)$", re.M)
_LOG_LINE = re.compile(r"^[IWEF]\d{4} ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Runs on the devices themselves: the median of `runs_s`, and the most memory that one device
    held, None where the device does not say."""

    step_time_s: float
    runs_s: tuple[float, ...]
    peak_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a step is run on: values are made up.

    Args:
        mesh_axes, mesh_sizes: how the devices are laid out.
        inputs: shape, dtype and the mesh axes of each dim, of the inputs that the step reads.
        donated: positions in `inputs` whose buffers the step takes.
        carried: positions in `inputs`, and those of the outputs that are the next step's.
    """

    mesh_axes: tuple[str, ...]
    mesh_sizes: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], str, tuple[tuple[str, ...], ...]], ...]
    donated: tuple[int, ...]
    carried: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """What XLA made of a step. Bytes are per device.

    Args:
        hosts: the host of each device, in the mesh's order.
        step_time_s: XLA's estimate; None where it made none.
        exposed_s: by collective kind, the part of it that no computation hides; above zero only.
        compile_s: what XLA took.
        flags: XLA_FLAGS it was compiled with.
        measured: what a run took; None where it was not run.
    """

    argument_bytes: float
    temp_bytes: float
    output_bytes: float
    alias_bytes: float
    hosts: tuple[int, ...]
    step_time_s: float | None
    exposed_s: dict[str, float]
    compile_s: float
    flags: tuple[str, ...]
    hlo_text: str = field(repr=False)
    measured: Measured | None = None

    @property
    def peak_bytes(self) -> float:
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


class _OwnKernelError(VerifyError):
    """XLA ended over a kernel of its own for an all-reduce."""


class Compiler:
    """A process that compiles: started at once, ended by `close`.

    Where there may be GPUs it first takes these; if they turn out to be others than the profile's, or
    too few, it compiles for GPUs that are not there. It ends with this process, however that ends,
    and never outlives an error: use it in a `with`.

    Args:
        platform: JAX's name of the devices to look for here; None to look for none; by default GPUs,
            where the machine seems to have any and JAX_PLATFORMS does not forbid them.

    Raises:
        VerifyError: the wheels are missing.
    """

    def __init__(self, platform: str | None = "") -> None:
        require_wheels()
        self._jobs = 0
        self._per_host = _GPUS_PER_HOST
        self._own_kernel = True
        self._read = 0  # bytes of the log
        self._here: dict[str, Any] | None = None
        self._platform = _platform_here() if platform == "" else platform
        self._folder = tempfile.TemporaryDirectory(prefix="autopar-verify-")
        try:
            self._child = self._start()
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def flags(self) -> tuple[str, ...]:
        """XLA_FLAGS of the process. Kernels can be tried out on GPUs that are here, and are."""
        own = own_flags(os.environ.get("XLA_FLAGS", ""))
        if any(flag.startswith(_GPUS_PER_HOST_FLAG.split("=")[0]) for flag in own):
            own_options: tuple[str, ...] = ()
        else:
            own_options = (f"{_GPUS_PER_HOST_FLAG}{self._per_host}",)
        own_options += () if self._own_kernel else (_NO_OWN_KERNEL_FLAG,)
        return (*own, *(FLAGS if self._platform is None else SCHEDULER_FLAGS), *own_options)

    def check_may_run(self) -> None:
        """Refuse to run anything where no device is looked for: before planning, which may take long.

        Raises:
            VerifyError: there seem to be no GPUs here.
        """
        if self._platform is None:
            raise VerifyError(
                "to run the step takes GPUs on this machine, and there are none: no /dev/nvidia*, or JAX_PLATFORMS or"
                " CUDA_VISIBLE_DEVICES forbids them; leave out --run (run=True) to compile for GPUs that are not there"
            )

    def is_present(self, profile: HardwareProfile, num_devices: int, num_hosts: int) -> bool:
        """Whether the devices to compile for are here. From then on, if not, others are compiled for."""
        if self._platform is None:
            return False
        here = self._here
        if here is None:
            assert self._child.stdout is not None
            said = self._child.stdout.readline()  # nothing where JAX finds no such device
            here = self._here = json.loads(said) if said else {"kind": "none", "count": 0}
        kinds = {kind.lower() for kind in profile.device_kinds}
        if here["kind"].lower() in kinds and here["count"] >= num_devices and num_hosts == 1:
            return True
        self._platform = None
        self._restart()
        return False

    def compile(
        self,
        module: bytes,
        profile: HardwareProfile,
        num_devices: int,
        num_hosts: int,
        arguments: Arguments | None = None,
        *,
        options: Mapping[str, int] | None = None,
    ) -> CompiledStep:
        """Compile a step lowered for the profile's platform, and run it where `arguments` are given.

        Args:
            options: of XLA's, for this step alone.

        Raises:
            VerifyError: XLA refuses the program, or numbers the devices otherwise than the mesh does; or
                it is to be run and the devices are not here.
            HardwareError: the profile does not describe a GPU to XLA.
            MeshError: the devices cannot be spread evenly over the hosts.
        """
        if num_hosts > 1 and num_devices // num_hosts != self._per_host:  # a flag, which XLA reads at its start
            self._per_host = num_devices // num_hosts
            self._restart()
        job = Path(self._folder.name, str(self._jobs))
        self._jobs += 1
        job.mkdir()
        (job / "module").write_bytes(module)
        (job / "options").write_text(json.dumps(dict(options or {})), encoding="utf-8")
        if self.is_present(profile, num_devices, num_hosts):
            (job / "num_devices").write_text(str(num_devices), encoding="utf-8")
            if arguments is not None:
                (job / "arguments").write_text(json.dumps(asdict(arguments)), encoding="utf-8")
        elif arguments is not None:
            here = f"{self._here['count']} of kind {self._here['kind']!r}" if self._here else "none found"
            raise VerifyError(
                f"to run the step takes {num_devices} {' or '.join(map(repr, profile.device_kinds))} on this machine,"
                f" but of such GPUs here: {here}; leave out --run (run=True) to compile for GPUs that are not there"
            )
        else:
            (job / "target").write_text(target_text(profile), encoding="utf-8")
            (job / "topology").write_text(topology_text(num_devices, num_hosts), encoding="utf-8")
        try:
            log = self._done(job.name)
        except _OwnKernelError:
            if not self._own_kernel or self._platform is not None:
                raise
            self._own_kernel = False
            self._restart()
            log = self._done(job.name)
        figures = json.loads((job / "figures").read_text(encoding="utf-8"))
        text = (job / "program").read_text(encoding="utf-8")
        hosts, ran = tuple(figures.pop("hosts")), figures.pop("measured", None)
        _check_hosts(hosts, num_hosts)
        total, exposed = read_times(log)
        return CompiledStep(
            **figures,
            hosts=hosts,
            step_time_s=total,
            exposed_s=exposed,
            flags=self.flags,
            hlo_text=text,
            measured=Measured(**ran | {"runs_s": tuple(ran["runs_s"])}) if ran else None,
        )

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._end()
        self._folder.cleanup()

    def _restart(self) -> None:
        """A new process, which reads the flags as they are now."""
        self._end()
        self._read = 0
        self._child = self._start()

    def _end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):  # what the process will not read any more
                assert pipe is not None
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _log(self) -> Path:
        return Path(self._folder.name, "log")

    def _start(self) -> subprocess.Popen[str]:
        folder = self._folder.name
        # XLA writes the text of its program for us, which is quicker than to ask the executable for it.
        own_dump = any(flag.startswith("--xla_dump_to") for flag in self.flags)
        dump = () if own_dump else (f"--xla_dump_to={folder}/dump", "--xla_dump_hlo_as_text")
        env = os.environ | {
            "JAX_PLATFORMS": self._platform or "cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the process that asks may hold most of a GPU
            "XLA_FLAGS": " ".join((*self.flags, *dump)),
            "TF_CPP_VMODULE": _LOG_MODULES,
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH")))),
        }
        with self._log.open("wb") as log:
            # A session of its own: Ctrl-C reaches this process alone, which then ends the compiler.
            return subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    f"autopar.xla_compiler.worker_{'deviceless' if self._platform is None else 'local'}",
                    folder,
                ],
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    def _done(self, job: str) -> str:
        """Have a job done; what XLA logged meanwhile."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has died already: no answer will come
            print(job, file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        with self._log.open("rb") as file:
            file.seek(self._read)
            log = file.read()
        self._read += len(log)
        text = log.decode("utf-8", errors="replace")
        if answer.strip() != job:
            code = self._child.wait()
            said = [line for line in text.splitlines() if line.strip() and not _LOG_LINE.match(line)]
            kind = _OwnKernelError if _OWN_KERNEL in text else VerifyError
            raise kind(
                f"XLA could not compile the planned step (exit code {code}); its last words:\n  "
                + "\n  ".join(line[:500] for line in said[-6:])
            )
        return text


def _platform_here() -> str | None:
    """`cuda` where the machine seems to have GPUs and nobody forbids them; only a process that takes them can tell."""
    allowed = os.environ.get("JAX_PLATFORMS", "")
    forbidden = (allowed and not {"cuda", "gpu"} & set(allowed.split(","))) or (
        os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    )
    return "cuda" if not forbidden and any(Path("/dev").glob("nvidia[0-9]*")) else None


def _check_hosts(hosts: tuple[int, ...], num_hosts: int) -> None:
    """Device n of the mesh must lie on the host that the plan thinks: the first ones on the first host."""
    wanted = tuple(n * num_hosts // len(hosts) for n in range(len(hosts)))
    numbers = {host: n for n, host in enumerate(dict.fromkeys(hosts))}
    if tuple(numbers[host] for host in hosts) != wanted:
        raise VerifyError(
            f"XLA spreads the devices over the hosts as {list(hosts)}, not as the mesh does, {list(wanted)}; please"
            " report it"
        )


def read_times(log: str) -> tuple[float | None, dict[str, float]]:
    """The last estimate in XLA's log, that of the whole step: seconds, and exposed seconds by kind.

    The scheduler says cycles and means microseconds.
    """
    exposed: dict[str, float] = {}
    total, last = None, {}
    for kind, _, number in _TIME.findall(log):
        if kind:
            exposed[kind] = float(number) * 1e-6
        else:
            total, last, exposed = float(number) * 1e-6, exposed, {}
    return total, {kind: seconds for kind, seconds in sorted(last.items()) if seconds > 0}


def own_flags(text: str) -> list[str]:
    """A user's flags for a run, but those of the CPU and those that `FLAGS` sets."""
    ours = {flag.split("=")[0] for flag in FLAGS}
    passed_over = ("--xla_force_host_platform_device_count", "--xla_cpu_")
    return [f for f in text.split() if f.split("=")[0] not in ours and not f.startswith(passed_over)]
