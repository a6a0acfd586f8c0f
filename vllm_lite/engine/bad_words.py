"""Finds which tokens would complete a bad word, however many and long the words are. Knows no text and no request."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Ids = tuple[int, ...]


class BadWords:
    """Words of two tokens or more, each as the ids before its last one, read backwards.

    Of a text read backwards as well, those that it begins with lead from one to the next: the last one that is not
    greater than the text begins with all of them. So a step costs about as much as one comparison with the text.
    """

    def __init__(self, words: Iterable[Ids]) -> None:
        last_ids: dict[Ids, list[int]] = {}
        for word in words:
            last_ids.setdefault(word[-2::-1], []).append(word[-1])
        self._keys = sorted(last_ids)
        self._last_ids = [last_ids[key] for key in self._keys]
        self._parents = _longest_beginnings(self._keys)
        self._first_ids = {key[0] for key in self._keys}
        self._max_len = max(map(len, self._keys), default=0)

    def completed_by(self, token_ids: Sequence[int], num_output_tokens: int) -> list[int]:
        """The ids that complete a word after `token_ids`, of which no more than the last `num_output_tokens` count."""
        if not num_output_tokens or token_ids[-1] not in self._first_ids:
            return []
        text = tuple(token_ids[: -min(self._max_len, num_output_tokens) - 1 : -1])
        found: list[int] = []
        place = bisect_right(self._keys, text) - 1
        num_common = _num_common(self._keys[place], text) if place >= 0 else 0
        while place >= 0:
            if len(self._keys[place]) <= num_common:
                found += self._last_ids[place]
            place = self._parents[place]
        return found


def _longest_beginnings(keys: Sequence[Ids]) -> list[int]:
    """For each of the sorted keys, the place of the longest other one that it begins with; -1 where there is none."""
    parents: list[int] = []
    for place, key in enumerate(keys):
        parent = place - 1
        while parent >= 0 and key[: len(keys[parent])] != keys[parent]:
            parent = parents[parent]
        parents.append(parent)
    return parents


def _num_common(first: Ids, second: Ids) -> int:
    """How many ids both begin with."""
    pairs = enumerate(zip(first, second))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))
