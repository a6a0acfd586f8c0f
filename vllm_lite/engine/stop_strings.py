"""Finds stop strings in text that comes in pieces. Knows no tokens: how the text was cut into pieces never matters."""

from __future__ import annotations

from collections.abc import Sequence


class StopStringFilter:
    """Lets text through, but for what could still become a stop string.

    The stop string that is complete first wins; of several that end at the same character, the longest. A character
    costs time only where it begins or ends a stop string, however many of them there are.
    """

    def __init__(self, stop_strings: Sequence[str], include_in_output: bool) -> None:
        """`stop_strings` are not empty; `include_in_output` keeps the stop string at the end of the text."""
        self._include_in_output = include_in_output
        self._max_held = max(map(len, stop_strings), default=1) - 1
        self._held = ""
        self._by_first_char: dict[str, list[str]] = {}
        self._by_last_char: dict[str, list[str]] = {}
        for stop in sorted(stop_strings, key=len, reverse=True):
            self._by_first_char.setdefault(stop[0], []).append(stop)
            self._by_last_char.setdefault(stop[-1], []).append(stop)

    def push(self, text: str) -> tuple[str, str | None]:
        """Takes new text; returns the text that may be shown now and the stop string that was found, if any."""
        num_searched = len(self._held)
        held = self._held + text
        for end in range(num_searched + 1, len(held) + 1):
            for stop in self._by_last_char.get(held[end - 1], ()):
                begin = end - len(stop)
                # Every possible beginning is held, so a match never begins before the held text.
                if begin >= 0 and held.startswith(stop, begin):
                    self._held = ""
                    return held[: end if self._include_in_output else begin], stop
        num_free = self._first_possible_beginning(held)
        self._held = held[num_free:]
        return held[:num_free], None

    def flush(self) -> str:
        """Gives up waiting: returns the text held back."""
        held, self._held = self._held, ""
        return held

    def _first_possible_beginning(self, text: str) -> int:
        for begin in range(max(len(text) - self._max_held, 0), len(text)):
            if any(stop.startswith(text[begin:]) for stop in self._by_first_char.get(text[begin], ())):
                return begin
        return len(text)
