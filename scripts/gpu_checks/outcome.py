"""What a check on a GPU comes to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "failed", "unavailable"]


@dataclass(frozen=True)
class Outcome:
    """`summary` is for a line of a table, `figures` for JSON; unavailable is what the machine cannot do."""

    status: Status
    summary: str
    figures: dict[str, Any] = field(default_factory=dict)


def passed_if(is_passed: bool, summary: str, **figures: Any) -> Outcome:
    """Ok or failed."""
    return Outcome("ok" if is_passed else "failed", summary, figures)
