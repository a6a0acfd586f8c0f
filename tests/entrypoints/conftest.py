"""What tests of the servers share."""

from __future__ import annotations

import pytest

from tests.helpers.doors import NATIVE, OPENAI, Door


@pytest.fixture(scope="module", params=[NATIVE, OPENAI], ids=lambda door: door.name)
def door(request: pytest.FixtureRequest) -> Door:
    """What holds for both protocols is tested with both."""
    door: Door = request.param
    return door
