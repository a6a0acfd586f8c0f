"""Which tokens complete a bad word: compared with looking at every word, and at a bounded cost."""

from __future__ import annotations

import random
import time

from vllm_lite.engine.bad_words import BadWords


def naive(words: list[tuple[int, ...]], token_ids: list[int], num_output_tokens: int) -> list[int]:
    output = tuple(token_ids[len(token_ids) - num_output_tokens :])
    return sorted(
        word[-1]
        for word in words
        if len(word) - 1 <= len(output) and output[len(output) - len(word) + 1 :] == word[:-1]
    )


def test_the_ids_are_those_that_looking_at_every_word_finds() -> None:
    draw = random.Random(0)
    num_found = 0
    for _ in range(300):
        num_ids = draw.choice((1, 2, 3))  # few, so that words are the ends of others
        words = {tuple(draw.randrange(num_ids) for _ in range(draw.randint(2, 6))) for _ in range(draw.randint(1, 30))}
        bad_words = BadWords(sorted(words))
        for _ in range(20):
            token_ids = [draw.randrange(num_ids) for _ in range(draw.randint(1, 12))]
            num_output_tokens = draw.randint(0, len(token_ids))
            expected = naive(sorted(words), token_ids, num_output_tokens)
            assert sorted(bad_words.completed_by(token_ids, num_output_tokens)) == expected
            num_found += len(expected)
    assert num_found > 1000


def test_no_words_complete_nothing() -> None:
    assert BadWords([]).completed_by([1, 2], 2) == []


def test_a_step_costs_little_whatever_the_words_are() -> None:
    """As many and long words as a request may have, all of which the text nearly matches."""
    length = 1000
    ends_alike = [(number, *[7] * length, 8) for number in range(10, 1034)]
    beginnings_of_each_other = [(*[7] * count, 8) for count in range(1, length)]
    for words in (ends_alike, beginnings_of_each_other):
        bad_words, token_ids = BadWords(words), [7] * (2 * length)
        start_s = time.process_time()
        for _ in range(20):
            bad_words.completed_by(token_ids, len(token_ids))
        assert (time.process_time() - start_s) / 20 < 0.002  # looking at every word takes 10 ms and more
