"""Define the errors that autopar raises for a user's mistakes: one class per cause, each a `ValueError`.

A message names the rule, the offending value, the way out and, if known, the place in the user's code. Tracebacks and
the command line add a note with the page of the documentation about the class. This module imports nothing.
"""


class AutoparError(ValueError):
    """The base class of all errors that a user can cause and fix."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        public = next(
            one for one in type(self).__mro__ if one.__module__ == __name__
        )  # not a subclass defined elsewhere
        self.add_note(f"More on this: docs/troubleshooting.md#{public.__name__.lower()}")


class MeshError(AutoparError):
    """A mesh that cannot be read, or does not match the devices there are."""


class ClusterError(AutoparError):
    """A cluster that is inconsistent, or whose kind of device is unknown."""


class HardwareError(AutoparError):
    """A hardware profile that is unknown, incomplete or damaged."""


class PinError(AutoparError):
    """A pin that names no input, or a sharding that the input cannot have."""


class OptionError(AutoparError, TypeError):
    """An option that does not exist, or a value of the wrong kind."""


class BudgetError(AutoparError):
    """No plan fits the memory budget."""


class MicrobatchError(AutoparError):
    """A step whose batch cannot be split into the requested microbatches."""


class ScheduleError(AutoparError):
    """A pipeline schedule that is unknown, not defined for the requested numbers, or not legal."""


class TimeLimitError(AutoparError):
    """The solver found no plan within its time limit."""


class TraceError(AutoparError):
    """The function could not be traced by JAX."""


class PlanFileError(AutoparError):
    """A plan file that is damaged or of another version."""


class ExportError(AutoparError):
    """A plan that an exported file cannot express, or a step that it cannot be exported for."""


class PlanMismatchError(AutoparError):
    """A plan used with a program, shapes or devices that it was not made for."""


class CheckpointError(AutoparError):
    """A checkpoint that cannot be written, is missing or damaged, or holds another program's state."""


class EffectError(AutoparError):
    """A side effect that cannot run exactly once per step on several devices."""


class TargetError(AutoparError):
    """A command-line TARGET that cannot be found, loaded or called."""


class PlotError(AutoparError):
    """A plot that cannot be drawn: matplotlib is missing, or the file cannot be written."""


class StepSignatureError(AutoparError):
    """A step called, or its state built, with arguments it does not take."""


class RuleError(AutoparError):
    """A user's sharding rule that cannot be parsed or does not fit its operation."""


class AttentionError(AutoparError):
    """Attention that cannot run with its sequence sharded as requested."""


class CollectiveError(AutoparError):
    """A user's collective that cannot be registered, priced or run, or that a plan names but is not registered."""


class VerifyError(AutoparError):
    """A plan that cannot be compared with XLA's program: wheels are missing, or XLA rejects it."""


class ProfileFileError(AutoparError):
    """A JAX profile that cannot be read, holds no run of a program on a device, or is of another program."""


class ProcessError(AutoparError):
    """Processes that disagree on what they must share, or a process that died or hangs."""


class BatchError(AutoparError):
    """A process's part of a batch that does not match the plan's sharding."""


class StoreError(AutoparError):
    """A versioned store without the policy, key or worker, an update that does not fit, or a worker that ended."""


class SearchError(AutoparError):
    """Vectors, ids, queries, a number of neighbours or a filter that an index does not accept."""


class SearchWarning(UserWarning):
    """An index with fewer results or lower recall than requested."""


class IndexFileError(AutoparError):
    """A saved index that cannot be written, is missing or damaged, or is of another version."""


class InferenceError(AutoparError):
    """A request or engine options that an inference engine cannot serve, or a KV cache that does not fit."""


class PlacementError(AutoparError):
    """A trace, a model's latency bounds, or a placement of models on devices is invalid."""


class ModelError(AutoparError):
    """A model folder with an unsupported configuration, tensors that do not match it, or no tokenizer."""
