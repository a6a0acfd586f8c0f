"""What the soak holds a server to: answers, counters, memory. Pure functions of what was seen; knows no socket.

Each returns what is wrong in words, or nothing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.soak_requests import PoolRequest

Counts = Mapping[str, float]
"""Samples of `/metrics` by their names without the prefix."""
DELIMITER = b"\0"
MAX_GROWTH = 0.02
"""Of resident memory, of what it was when the server had warmed up."""
EXCERPT = 300
ENDS = ("stop", "length")
OUTCOMES = ("failed", "abort", "length", "stop")
"""Of accepted requests, as the counters call them; of several the first counts."""
REFUSED = "num_requests_refused_total"
CLIENT_LEFT = 499
LINE = re.compile(
    r"^\S+ \S+ INFO \S+: request (?:(?P<client>\S+) \()?(?P<id>\w+)\)?: (?P<prompt>\d+) prompt tokens, "
    r"(?P<output>\d+) output tokens, (?P<queued>not queued|queued to its end|queued [\d.]+ s), "
    r"first token (?:never|[\d.]+ s), total [\d.]+ s, (?P<words>.*)$"
)


_STATUS_OF_WORDS = [
    (re.compile("client left$"), CLIENT_LEFT),
    (re.compile("timed out$"), 504),
    (re.compile("refused: '[0-9]+ requests are waiting already|refused: 'the server is stopping;|unfinished$"), 503),
    (re.compile("refused: 'Request Entity Too Large'"), 413),
    (re.compile("refused: 'Request Timeout'"), 408),
    (re.compile("refused: "), 400),
    (re.compile("failed: "), 500),
]
"""What a request that was not queued was answered, by the beginning of the words at the end of its line."""


@dataclass(frozen=True)
class Line:
    """What the server's log says of one request."""

    client_id: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    is_queued: bool
    is_admitted: bool
    words: str
    """How it ended."""

    @property
    def outcome(self) -> str | None:
        """What the counters call its end; None for one that was not queued, and for an end that there must not be."""
        if not self.is_queued:
            return None
        if self.words.startswith("client left"):
            reasons = {self.words.partition(": ")[2] or "abort"}
        elif self.words.startswith("failed: "):
            reasons = {"failed"}
        else:
            reasons = {word.split(" x ")[0] for word in self.words.split(", ")}
        return next((outcome for outcome in OUTCOMES if outcome in reasons), None)

    @property
    def refusal_status(self) -> int | None:
        """What one that was not queued is counted as; None for one that was, and for words that there must not be."""
        if self.is_queued:
            return None
        return next((status for words, status in _STATUS_OF_WORDS if words.match(self.words)), None)

    @property
    def is_odd(self) -> bool:
        """Whether it ended in a way that there must not be, such as a refusal after it was queued."""
        return self.outcome is None and self.refusal_status is None


def parse_line(text: str) -> Line | None:
    """None for a line that is about something else."""
    if (found := LINE.match(text)) is None:
        return None
    prompt, output, queued = int(found["prompt"]), int(found["output"]), found["queued"]
    is_queued = queued != "not queued"
    return Line(found["client"], prompt, output, is_queued, is_queued and queued[-1] == "s", found["words"])


@dataclass(frozen=True)
class Solo:
    """What an idle server made of a request."""

    body: bytes
    num_prompt_tokens: int
    num_generated_tokens: int
    outcome: str
    """By the server's counters, like the tokens."""


def expected_counts(lines: Iterable[Line]) -> dict[str, int]:
    """What the counters must show after these requests, each sample that depends on requests alone."""
    names = {"stop": 'request_success_total{finished_reason="stop"}', "abort": "num_requests_aborted_total"}
    names |= {"length": 'request_success_total{finished_reason="length"}', "failed": "num_requests_failed_total"}
    others = ("num_requests_accepted_total", "prompt_tokens_total", "generation_tokens_total")
    histograms = ("request_queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds")
    counts: Counter[str] = Counter(dict.fromkeys([*names.values(), *others], 0))
    counts.update({f"{name}_count": 0 for name in histograms})
    for line in lines:
        if (status := line.refusal_status) is not None:
            counts[f'{REFUSED}{{status="{status}"}}'] += 1
        if not line.is_queued:
            continue
        counts["num_requests_accepted_total"] += 1
        if (outcome := line.outcome) is not None:
            counts[names[outcome]] += 1
        counts["prompt_tokens_total"] += line.num_prompt_tokens
        counts["generation_tokens_total"] += line.num_output_tokens
        counts["request_queue_time_seconds_count"] += line.is_admitted
        counts["time_to_first_token_seconds_count"] += line.num_output_tokens > 0
        counts["e2e_request_latency_seconds_count"] += outcome in ENDS
    return dict(counts)


def wrong_counts(seen: Counts, lines: Iterable[Line]) -> list[str]:
    """At a quiet moment: counters that differ from what the requests have made of them, gauges that are not 0."""
    expected = {**{name: 0 for name in seen if name.startswith(REFUSED)}, **expected_counts(lines)}
    wrong = [
        f"{name} is {seen.get(name, 0):g}, the requests make {count}"
        for name, count in expected.items()
        if seen.get(name, 0) != count
    ]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        if seen[name] != 0:
            wrong.append(f"{name} is {seen[name]:g} though nobody asks")
    if seen["num_free_kv_blocks"] != seen["num_total_kv_blocks"]:
        wrong.append(f"{seen['num_free_kv_blocks']:g} of {seen['num_total_kv_blocks']:g} blocks are free")
    return wrong


def wrong_counts_under_load(before: Counts | None, seen: Counts, num_answered: int, num_sent: int) -> list[str]:
    """Between quiet moments: what holds at any time.

    `num_answered` requests had been served when the scrape began; `num_sent` had been sent when it came.
    """
    finished = sum(value for name, value in seen.items() if name.startswith("request_success_total"))
    accepted = seen["num_requests_accepted_total"]
    ended = finished + seen["num_requests_aborted_total"] + seen["num_requests_failed_total"]
    open_now = seen["num_requests_running"] + seen["num_requests_waiting"]
    wrong = []
    if not num_answered <= finished <= accepted <= num_sent:
        wrong.append(
            f"not {num_answered} answered <= {finished:g} finished <= {accepted:g} accepted <= {num_sent} sent"
        )
    if open_now < accepted - ended:  # one that was aborted in mid-step is counted as running until the step ends
        wrong.append(f"{open_now:g} run or wait, but {accepted:g} accepted less {ended:g} ended are more")
    if not 0 <= seen["num_free_kv_blocks"] <= seen["num_total_kv_blocks"]:
        wrong.append(f"{seen['num_free_kv_blocks']:g} of {seen['num_total_kv_blocks']:g} blocks are free")
    if before is not None:
        wrong += [
            f"{name} went from {before[name]:g} to {value:g}"
            for name, value in seen.items()
            if name.partition("{")[0].endswith(("_total", "_count", "_bucket")) and value < before.get(name, 0)
        ]
    return wrong


def wrong_line(asked: PoolRequest, solo: Solo | None, line: Line) -> str | None:
    """Of a request that was answered to its end: the log must say what the idle server did."""
    if line.outcome not in ENDS:
        return f"was answered to its end, but its line in the log says {line.words!r}"
    if solo is None:
        return None
    seen = (line.num_prompt_tokens, line.num_output_tokens, line.outcome)
    alone = (solo.num_prompt_tokens, solo.num_generated_tokens, solo.outcome)
    if seen != alone:
        return f"computed {seen} (prompt tokens, generated tokens, end), alone {alone}"
    return None


def wrong_line_of_unfinished(asked: PoolRequest, solo: Solo | None, line: Line, body: bytes) -> str | None:
    """Of a request that its client left, or that the server ended: no more than alone, no less than what came."""
    if line.outcome in ENDS:  # the client left before it noticed
        return wrong_line(asked, solo, line)
    num_messages = body.count(DELIMITER) if asked.is_stream and asked.shape == "single" else 0
    if num_messages and "abort" in line.words:  # the end by the server is a message without a token
        num_messages -= 1
    if line.outcome is None and num_messages:
        return f"had {num_messages} messages, but its line in the log says that it was not queued"
    most = line.num_output_tokens if solo is None else solo.num_generated_tokens
    if not num_messages <= line.num_output_tokens <= most:
        return f"had {num_messages} messages and {most} tokens alone, but {line.num_output_tokens} in the log"
    if solo is not None and line.num_prompt_tokens not in (0, solo.num_prompt_tokens):
        return f"had {line.num_prompt_tokens} prompt tokens in the log, {solo.num_prompt_tokens} alone"
    return None


def wrong_answer(asked: PoolRequest, solo: Solo | None, body: bytes) -> str | None:
    """Of an answer that came to its end; without `solo` its form alone is looked at."""
    if solo is None:
        return _wrong_form(asked, body)
    if body == solo.body:
        return None
    if asked.is_stream and asked.shape == "candidates":  # whose tokens may come in other steps than alone
        messages, alone = _messages(body), _messages(solo.body)
        if asked.is_deltas:
            seen, wanted = _added_up(messages), _added_up(alone)
        else:
            seen, wanted = messages[-1], alone[-1]
            wrong = _wrong_texts(asked, messages, wanted)
            if wrong is not None:
                return wrong
        if _without_prompt_details(seen) == _without_prompt_details(wanted):
            return None
    return _difference(body, solo.body)


def wrong_beginning(asked: PoolRequest, solo: Solo | None, body: bytes, *, is_ended_early: bool = False) -> str | None:
    """Of what came of a whole answer or stream that its client left, or that the server ended before it was done.

    The server ends a stream early with the text that was held back, which alone would have come with later tokens.
    """
    if solo is None or not asked.is_stream:
        return None if solo is None or solo.body.startswith(body) else _difference(body, solo.body)
    whole, separator, _ = body.rpartition(DELIMITER)
    whole += separator
    if asked.shape != "candidates":
        if is_ended_early and not solo.body.startswith(whole):
            whole = whole[:-1].rpartition(DELIMITER)[0] + DELIMITER if DELIMITER in whole[:-1] else b""
        rest = b"" if is_ended_early else body[len(whole) :]
        return None if solo.body.startswith(whole + rest) else _difference(body, solo.body)
    messages, alone = _messages(whole), _messages(solo.body)
    if asked.is_deltas:
        texts, wanted = _added_up(messages)["text"], _added_up(alone)["text"]
        if is_ended_early:
            texts = [text.rstrip("\ufffd") for text in texts]
        fits = all(final.startswith(text) for text, final in zip(texts, wanted))
        return None if fits else _difference(body, solo.body)
    return _wrong_texts(asked, messages[:-1] if is_ended_early else messages, alone[-1])


def wrong_refusal(status: int, headers: Mapping[str, str], body: bytes) -> str | None:
    """Of an answer that is no 200: it must say why."""
    try:
        detail = json.loads(body)["detail"]
    except (ValueError, LookupError, TypeError):
        return f"answered {status} without a detail: {body[:EXCERPT]!r}"
    if not isinstance(detail, str) or not detail:
        return f"answered {status} with the detail {detail!r}"
    if status == 503 and "waiting" in detail and not headers.get("retry-after", "").isdigit():
        return "answered 503 without Retry-After"
    return None


def wrong_memory(early: int, late: int) -> str | None:
    """Resident KiB once the server had warmed up, and at the end."""
    if abs(late - early) <= MAX_GROWTH * early:
        return None
    return f"resident memory went from {early} to {late} KiB, more than {MAX_GROWTH:.0%}"


def wrong_levels(name: str, levels: Sequence[int]) -> str | None:
    """Of a number that must be the same at all quiet moments."""
    return None if len(set(levels)) <= 1 else f"{name} at quiet moments: {', '.join(map(str, levels))}"


def _messages(stream: bytes) -> list[dict[str, Any]]:
    return [json.loads(message) for message in stream.split(DELIMITER)[:-1]]


def _wrong_texts(asked: PoolRequest, messages: Sequence[dict[str, Any]], last: dict[str, Any]) -> str | None:
    """Every text of a cumulative message must be the beginning of one of the last message's."""
    if not asked.shows_all_candidates:
        return None
    for message in messages:
        for text in message["text"]:
            if not any(final.startswith(text) for final in last["text"]):
                return f"{text[-EXCERPT:]!r} is the beginning of none of {last['text']!r}"
    return None


def _added_up(messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A stream of deltas as one message."""
    if not messages:
        return {"text": []}
    total = {**messages[-1], "text": [""] * len(messages[-1]["text"])}
    for name in ("token_ids", "logprobs"):
        if total.get(name) is not None and None not in total[name]:
            total[name] = [
                [entry for message in messages for entry in message[name][k]] for k in range(len(total["text"]))
            ]
    total["text"] = ["".join(message["text"][k] for message in messages) for k in range(len(total["text"]))]
    return total


def _without_prompt_details(message: dict[str, Any]) -> dict[str, Any]:
    """They come in the first message, which may be the last or not."""
    return {name: value for name, value in message.items() if "prompt" not in name}


def _wrong_form(asked: PoolRequest, body: bytes) -> str | None:
    try:
        messages = _messages(body) if asked.is_stream else [json.loads(body)]
        texts = messages[-1]["text"]
    except (ValueError, LookupError, TypeError) as error:
        return f"is no answer ({error!r}): {body[:EXCERPT]!r}"
    prompt = "" if asked.is_deltas else asked.fields["prompt"]
    if len(texts) != asked.num_outputs or not all(text.startswith(prompt) for text in texts):
        return f"has not {asked.num_outputs} texts that begin with the prompt: {texts!r}"
    return None


def _difference(seen: bytes, wanted: bytes) -> str:
    at = next((k for k, (a, b) in enumerate(zip(seen, wanted)) if a != b), min(len(seen), len(wanted)))
    start = max(0, at - 60)
    return (
        f"differs from the answer of the idle server at byte {at} of {len(seen)} (alone {len(wanted)}): "
        f"{seen[start : start + EXCERPT]!r} instead of {wanted[start : start + EXCERPT]!r}"
    )
