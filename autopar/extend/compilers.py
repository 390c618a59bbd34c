"""XLA's compiler in a worker process, for local devices or for devices that are absent."""

from autopar.xla_compiler.compiler import CompiledStep as CompiledStep
from autopar.xla_compiler.compiler import Compiler as Compiler
