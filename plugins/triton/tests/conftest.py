"""Launches of kernels for Hopper, for all tests of what they take."""

from __future__ import annotations

import pytest

from plugins.triton.tests.hopper_launches import Launch, record_launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """The launches of a test, which are not run."""
    return record_launches(monkeypatch)
