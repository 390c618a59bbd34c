"""Run XLA's compiler in a worker process that starts ahead of the work.

In: a lowered step as bytes, a hardware profile, the numbers of devices and hosts. Out: `CompiledStep`: the optimized
HLO as text, its memory, and the step time that XLA's scheduler estimates. A separate process (`worker_deviceless`,
`worker_local`) is necessary: XLA reads its flags once per process and writes its estimate only to the log, and JAX
warns about a missing GPU unless JAX_PLATFORMS selects the CPU. The worker starts early so that it imports JAX while the
step is planned.
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

from autopar.errors import VerifyError
from autopar.hardware.profile import HardwareProfile
from autopar.system.source_paths import PACKAGE
from autopar.xla_compiler.gpu_target import gpus_per_slice, require_wheels, target_text, topology_text

#: XLA flags of every compile, besides the user's XLA_FLAGS: the latency-hiding scheduler with its analytical estimator.
SCHEDULER_FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_analytical_sol_latency_estimator=true",
)
#: XLA flags of a compile for absent GPUs. Autotuning is off because it runs kernels. Split-K is off because autotuning
#: seldom chooses it and the estimator prices it far too high.
FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_experimental_force_split_k=1", *SCHEDULER_FLAGS)
#: The GPUs of an NVLink domain. Where neither `partition_size` nor the topology says it, the estimator charges every
#: collective between domains 5 ms. XLA counts the GPUs of a ring by `gpus_per_node`, by default 8.
_ESTIMATOR_FLAG = "--xla_gpu_analytical_latency_estimator_options"
_GPUS_PER_SLICE = 8

#: Kernels that XLA fails to compile for absent GPUs (JAX 0.12.0.1): what its log then has, and the flag that avoids them.
#: The one-shot kernel of a small all-reduce, on 64 GPUs, is NCCL's then; all GEMMs are cuBLAS's, if one has no tiling even
#: without what is fused into it (`_NO_TILING`).
_NO_TRITON_GEMM = "--xla_gpu_enable_triton_gemm=false"
_NO_TILING = re.compile(r'No supported config found for HLO: .*op_name="([^"]*)"')
_AVOIDABLE = {
    "TRITON_ONE_SHOT": "--xla_gpu_unsupported_use_all_reduce_one_shot_kernel=false",
    "No supported config found for HLO": _NO_TRITON_GEMM,
}

#: The lowest log level at which XLA's scheduler logs its estimate; level 2 costs seconds and 20 MB of log.
_LOG_MODULES = "latency_hiding_scheduler=1"
_TIME = re.compile(r"\] (?:Wasted cycles for ([\w\- ]+)|(Total cycles)): ([\d.e+\-]+)$", re.M)
_LOG_LINE = re.compile(r"^[IWEF]\d{4} ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measured runs on the devices.

    Args:
        step_time_s: median of `runs_s`.
        peak_bytes: peak memory of the fullest device; None where the device does not report it.
    """

    step_time_s: float
    runs_s: tuple[float, ...]
    peak_bytes: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """The inputs of a measured step; their values are random.

    Args:
        mesh_axes, mesh_sizes: the device mesh.
        inputs: shape, dtype and mesh axes per dim of each input that the step reads.
        donated: positions in `inputs` of donated buffers.
        carried: pairs of a position in `inputs` and the position of the output that replaces it in the next step.
    """

    mesh_axes: tuple[str, ...]
    mesh_sizes: tuple[int, ...]
    inputs: tuple[tuple[tuple[int, ...], str, tuple[tuple[str, ...], ...]], ...]
    donated: tuple[int, ...]
    carried: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A step as XLA compiled it. Bytes are per device.

    Args:
        hosts: host of each device, in mesh order.
        step_time_s: XLA's estimate; None where XLA made none.
        exposed_s: kind of collective -> exposed time by XLA's estimate; positive entries only.
        compile_s: compile time.
        flags: XLA_FLAGS of the compile.
        hlo_text: the optimized HLO.
        measured: measured runs; None where the step was not run.
        output_shardings: XLA's shardings of the outputs, by `jax_interop.absent_devices`; empty for one device, None where
            they are unknown.
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
    output_shardings: tuple[str, ...] | None = field(default=None, repr=False)

    @property
    def peak_bytes(self) -> float:
        return self.argument_bytes + self.temp_bytes + self.output_bytes - self.alias_bytes


class _AvoidableError(VerifyError):
    """XLA failed to compile a kernel that `flag` avoids.

    Args:
        matmul: the name of the matmul without a Triton tiling, if it is one.
    """

    def __init__(self, text: str, flag: str, matmul: str = "") -> None:
        super().__init__(text)
        self.flag, self.matmul = flag, matmul


class Compiler:
    """A worker process that compiles; it starts at once and ends with `close`.

    On a machine with GPUs the worker first opens those. If they differ from the profile's, or are too few, it compiles
    for absent GPUs instead. The worker ends when this process ends, for whatever reason. Use it in a `with` statement.

    Args:
        platform: JAX's name of the local devices to use; None for absent devices. By default GPUs, where the machine
            seems to have any and JAX_PLATFORMS allows them.

    Raises:
        VerifyError: the wheels are missing.
    """

    def __init__(self, platform: str | None = "") -> None:
        require_wheels()
        self._jobs = 0
        self._per_slice = _GPUS_PER_SLICE
        self._avoiding: tuple[str, ...] = ()
        self._read = 0  # bytes of the log that have been read
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
        """XLA_FLAGS of the worker. Autotuning stays on for local GPUs."""
        own = own_flags(os.environ.get("XLA_FLAGS", ""))
        size, own_options = self._per_slice, tuple[str, ...]()
        if not any(flag.startswith(_ESTIMATOR_FLAG) for flag in own):
            per_node = "" if size == _GPUS_PER_SLICE else f",gpus_per_node={size}"
            own_options = (f"{_ESTIMATOR_FLAG}=partition_size={size}{per_node}",)
        return (*own, *(FLAGS if self._platform is None else SCHEDULER_FLAGS), *own_options, *self._avoiding)

    def check_may_run(self) -> None:
        """Check, before a long planning run, that this machine seems to have GPUs to run on.

        Raises:
            VerifyError: it has none.
        """
        if self._platform is None:
            raise VerifyError(
                "running the step needs GPUs on this machine, and there are none: no /dev/nvidia*, or JAX_PLATFORMS or"
                " CUDA_VISIBLE_DEVICES excludes them; leave out --run (run=True) to compile for absent GPUs"
            )

    def is_present(self, profile: HardwareProfile, num_devices: int, num_hosts: int) -> bool:
        """Whether the target devices are local. If not, the worker restarts to compile for absent devices."""
        if self._platform is None:
            return False
        here = self._here
        if here is None:
            assert self._child.stdout is not None
            line = self._child.stdout.readline()  # empty where JAX finds no such device
            here = self._here = json.loads(line) if line else {"kind": "none", "count": 0}
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
        """Compile a step that is lowered for the profile's platform, and run it if `arguments` are given.

        Args:
            module: the serialized module.
            options: XLA compile options of this step.

        Raises:
            VerifyError: XLA fails to compile the program, XLA assigns devices to hosts differently from the mesh, or
                `arguments` are given and the devices are not local.
            HardwareError: the profile has no description of the GPU for XLA.
            MeshError: the devices do not divide evenly among the hosts.
        """
        per_slice = gpus_per_slice(profile, num_devices, num_hosts)
        is_one = per_slice == num_devices <= self._per_slice  # one domain, whatever the flag has above that
        if per_slice != self._per_slice and not is_one:  # XLA reads this flag at startup only
            self._per_slice = per_slice
            self._restart()
        if _NO_TRITON_GEMM in self._avoiding:  # it changes every program, but was needed for the last one only
            self._avoiding = tuple(flag for flag in self._avoiding if flag != _NO_TRITON_GEMM)
            self._restart()
        job = Path(self._folder.name, str(self._jobs))
        self._jobs += 1
        job.mkdir()
        (job / "module").write_bytes(module)
        (job / "options").write_text(json.dumps(dict(options or {})), encoding="utf-8")
        (job / "apart").write_text("[]", encoding="utf-8")  # the names of matmuls that nothing is fused into
        if self.is_present(profile, num_devices, num_hosts):
            (job / "num_devices").write_text(str(num_devices), encoding="utf-8")
            if arguments is not None:
                (job / "arguments").write_text(json.dumps(asdict(arguments)), encoding="utf-8")
        elif arguments is not None:
            here = f"{self._here['count']} of kind {self._here['kind']!r}" if self._here else "no GPU"
            raise VerifyError(
                f"running the step needs {num_devices} {' or '.join(map(repr, profile.device_kinds))} on this machine,"
                f" which has {here}; leave out --run (run=True) to compile for absent GPUs"
            )
        else:
            (job / "target").write_text(target_text(profile), encoding="utf-8")
            (job / "topology").write_text(topology_text(profile, num_devices, num_hosts), encoding="utf-8")
        log = self._compiled(job.name)
        figures = json.loads((job / "figures").read_text(encoding="utf-8"))
        text = (job / "program").read_text(encoding="utf-8")
        hosts, ran = tuple(figures.pop("hosts")), figures.pop("measured", None)
        shardings = tuple(figures.pop("output_shardings"))
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
            output_shardings=shardings,
        )

    def close(self) -> None:
        """Kill the worker."""
        self._end()
        self._folder.cleanup()

    def _restart(self) -> None:
        """Start a new worker with the current flags."""
        self._end()
        self._read = 0
        self._child = self._start()

    def _end(self) -> None:
        self._child.kill()
        self._child.wait()
        for pipe in (self._child.stdin, self._child.stdout):
            with contextlib.suppress(OSError):  # unread input of the killed worker
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
        # XLA dumps the HLO text itself, which takes half as long as `executable.hlo_modules()`.
        own_dump = any(flag.startswith("--xla_dump_to") for flag in self.flags)
        dump = () if own_dump else (f"--xla_dump_to={folder}/dump", "--xla_dump_hlo_as_text")
        env = os.environ | {
            "JAX_PLATFORMS": self._platform or "cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # the parent process may hold most of a GPU's memory
            "XLA_FLAGS": " ".join((*self.flags, *dump)),
            "TF_CPP_VMODULE": _LOG_MODULES,
            "TF_CPP_MIN_LOG_LEVEL": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH")))),
        }
        with self._log.open("wb") as log:
            # A new session: Ctrl-C then reaches this process only, which kills the worker.
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

    def _compiled(self, job: str) -> str:
        """Run a job, again without each kernel that XLA fails to compile for absent GPUs; return XLA's log."""
        apart = list[str]()
        while True:
            try:
                return self._done(job)
            except _AvoidableError as error:
                if error.flag in self._avoiding or self._platform is not None:
                    raise
                if error.matmul and error.matmul not in apart:  # a GPU's autotuner, too, would fuse nothing into it
                    apart.append(error.matmul)
                    Path(self._folder.name, job, "apart").write_text(json.dumps(apart), encoding="utf-8")
                else:
                    self._avoiding = (*self._avoiding, error.flag)
                self._restart()

    def _done(self, job: str) -> str:
        """Run a job in the worker, and return what XLA logged meanwhile."""
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the worker has died; the empty answer below reports it
            print(job, file=self._child.stdin, flush=True)
        answer = self._child.stdout.readline()
        with self._log.open("rb") as file:
            file.seek(self._read)
            log = file.read()
        self._read += len(log)
        text = log.decode("utf-8", errors="replace")
        if answer.strip() != job:
            code = self._child.wait()
            lines = [line for line in text.splitlines() if line.strip() and not _LOG_LINE.match(line)]
            text_of_error = (
                f"XLA could not compile the planned step (exit code {code}); the end of its log:\n  "
                + "\n  ".join(line[:500] for line in lines[-6:])
            )
            flag = next((flag for marker, flag in _AVOIDABLE.items() if marker in text), None)
            if flag is None:
                raise VerifyError(text_of_error)
            matmul = _NO_TILING.search(text)
            raise _AvoidableError(text_of_error, flag, matmul[1] if matmul else "")
        return text


def _platform_here() -> str | None:
    """`cuda` where the machine seems to have GPUs and the environment allows them; else None."""
    allowed = os.environ.get("JAX_PLATFORMS", "")
    forbidden = (allowed and not {"cuda", "gpu"} & set(allowed.split(","))) or (
        os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    )
    return "cuda" if not forbidden and any(Path("/dev").glob("nvidia[0-9]*")) else None


def _check_hosts(hosts: tuple[int, ...], num_hosts: int) -> None:
    """Check that XLA assigns the mesh's devices to hosts in order, as the plan assumes."""
    wanted = tuple(n * num_hosts // len(hosts) for n in range(len(hosts)))
    numbers = {host: n for n, host in enumerate(dict.fromkeys(hosts))}
    if tuple(numbers[host] for host in hosts) != wanted:
        raise VerifyError(
            f"XLA assigns the devices to hosts {list(hosts)}, but the mesh assumes {list(wanted)}; please report it"
        )


def read_times(log: str) -> tuple[float | None, dict[str, float]]:
    """Parse the last estimate in XLA's log, that of the step: seconds, and exposed seconds by kind of collective.

    The scheduler logs "cycles" that are microseconds.
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
    """The user's XLA flags without those of the CPU and those that `FLAGS` sets."""
    ours = {flag.split("=")[0] for flag in FLAGS}
    of_cpu = ("--xla_force_host_platform_device_count", "--xla_cpu_")
    return [f for f in text.split() if f.split("=")[0] not in ours and not f.startswith(of_cpu)]
