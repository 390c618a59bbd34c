"""What autopar raises at a user's mistake: one class per cause, each a `ValueError`.

A message names the offending value, the rule it breaks and the way out; where the mistake has a
place in the user's code, `at` says it. Below it a traceback, and the command line, say where the
documentation explains the class. Nothing here imports anything.
"""


class AutoparError(ValueError):
    """The root of every error that a user can cause and mend."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        public = next(one for one in type(self).__mro__ if one.__module__ == __name__)  # not a subclass of elsewhere
        self.add_note(f"More on this: docs/troubleshooting.md#{public.__name__.lower()}")


class MeshError(AutoparError):
    """A mesh that cannot be read, or does not match the devices there are."""


class ClusterError(AutoparError):
    """A cluster that cannot be, or whose devices are of a kind that is not known."""


class HardwareError(AutoparError):
    """A hardware profile that is unknown, incomplete or damaged."""


class PinError(AutoparError):
    """A pin that names no input, or a sharding that the input cannot have."""


class OptionError(AutoparError, TypeError):
    """An option that there is not, or a value that is not of its kind."""


class BudgetError(AutoparError):
    """No plan fits the memory budget."""


class MicrobatchError(AutoparError):
    """A step whose batch cannot be split over time as asked for."""


class ScheduleError(AutoparError):
    """A pipeline schedule that is unknown, not defined for the numbers asked for, or not legal."""


class TimeLimitError(AutoparError):
    """The solver found no plan within its time limit."""


class TraceError(AutoparError):
    """The function could not be traced by JAX."""


class PlanFileError(AutoparError):
    """A plan file that is damaged or of another version."""


class ExportError(AutoparError):
    """A plan that an exported file cannot say, or a step that it cannot be exported for."""


class PlanMismatchError(AutoparError):
    """A plan used with a program, shapes or devices that it was not made for."""


class CheckpointError(AutoparError):
    """A checkpoint that cannot be written, is not there, is damaged, or holds another program's state."""


class EffectError(AutoparError):
    """A side effect that cannot run exactly once per step on several devices."""


class TargetError(AutoparError):
    """A command-line TARGET that cannot be found, loaded or called."""


class PlotError(AutoparError):
    """A picture that cannot be drawn: matplotlib is missing, or its file cannot be written."""


class StepSignatureError(AutoparError):
    """A step called, or its state built, with arguments it does not take."""


class RuleError(AutoparError):
    """A sharding rule of a user's that cannot be read, or does not fit the operation it is for."""


class CollectiveError(AutoparError):
    """A collective of a user's that cannot be registered, priced or run, or that a plan names and nobody registered."""


class VerifyError(AutoparError):
    """A plan that cannot be held against XLA's program: wheels are missing, or XLA refuses it."""


class ProcessError(AutoparError):
    """Processes that differ in what they must share, or one of them that died or hangs."""


class BatchError(AutoparError):
    """A process's part of a batch that cannot be laid out by the plan."""


class SearchError(AutoparError):
    """Vectors, ids, queries, a number of neighbours or a filter that an index cannot take."""


class SearchWarning(UserWarning):
    """An index does not find as much as was asked for."""


class IndexFileError(AutoparError):
    """A saved index that cannot be written, is not there, is damaged, or is of another version."""


class InferenceError(AutoparError):
    """A request, a cache or an engine's options that cannot be served."""


class ModelError(AutoparError):
    """A model's folder whose configuration is not supported, whose tensors are not what it says, or with no tokenizer."""
