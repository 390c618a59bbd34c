"""XLA's compiler in a worker process, for devices that are absent or here."""

from autopar.xla_compiler.compiler import CompiledStep as CompiledStep
from autopar.xla_compiler.compiler import Compiler as Compiler
