"""End generated text at stop strings.

In: pieces of text as they are generated. Out: `TextUntilStop`. A stop string may span several pieces, so a suffix of the
text that could begin one is withheld. No part of a stop string is ever returned.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.errors import InferenceError


class TextUntilStop:
    """The text of one request, up to a stop string.

    Args:
        stop_strings: strings that end the text.

    Attributes:
        stop_strings: as given.
        stopped_at: the stop string that ended the text; None before.

    Raises:
        InferenceError: a stop string is empty. It would end every text at once.
    """

    def __init__(self, stop_strings: Iterable[str] = ()) -> None:
        self.stop_strings = tuple(stop_strings)
        if "" in self.stop_strings:
            raise InferenceError("a stop string is empty: leave it out, or give a text to stop at")
        self._withheld = ""
        self.stopped_at: str | None = None

    @property
    def is_stopped(self) -> bool:
        return self.stopped_at is not None

    def add(self, text: str) -> str:
        """Add a piece of text, and return the text that is safe to show: none after a stop."""
        if self.is_stopped:
            return ""
        self._withheld += text
        found = [(at, stop) for stop in self.stop_strings if (at := self._withheld.find(stop)) >= 0]
        if found:
            at, self.stopped_at = min(found)
            shown, self._withheld = self._withheld[:at], ""
            return shown
        cut = len(self._withheld) - self._num_to_withhold()
        shown, self._withheld = self._withheld[:cut], self._withheld[cut:]
        return shown

    def end(self) -> str:
        """Return the withheld text when the text ends without a stop string."""
        shown, self._withheld = self._withheld, ""
        return shown

    def _num_to_withhold(self) -> int:
        """The length of the longest suffix that a stop string begins with."""
        longest = max((len(stop) - 1 for stop in self.stop_strings), default=0)
        for num in range(min(longest, len(self._withheld)), 0, -1):
            if any(stop.startswith(self._withheld[-num:]) for stop in self.stop_strings):
                return num
        return 0
