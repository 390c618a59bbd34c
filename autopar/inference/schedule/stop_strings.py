"""Stop strings: where text ends, and what of it may be shown before that is known.

In: text as it is generated. Out: `TextUntilStop`. A stop string may come in pieces, so an end of the text that one could
begin with is held back; and nothing of a stop string is ever shown.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import InferenceError


class TextUntilStop:
    """The text of one request.

    Args:
        stop_strings: any of which ends it.

    Attributes:
        stopped_at: the one that did.

    Raises:
        InferenceError: one of them is empty, which would end every text at once.
    """

    def __init__(self, stop_strings: Iterable[str] = ()) -> None:
        self._stops = tuple(stop_strings)
        if "" in self._stops:
            raise InferenceError("a stop string is empty: leave it out, or say what to stop at")
        self._held = ""
        self.stopped_at: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stopped_at is not None

    def add(self, text: str) -> str:
        """What may be shown now; after the stop, nothing."""
        if self.is_stopped:
            return ""
        self._held += text
        found = [(at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stopped_at = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        cut = len(self._held) - self._num_open()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def end(self) -> str:
        """What was held back, where the text ends for another reason."""
        shown, self._held = self._held, ""
        return shown

    def _num_open(self) -> int:
        """Characters at the end that a stop string could begin with."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for num in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-num:]) for stop in self._stops):
                return num
        return 0
