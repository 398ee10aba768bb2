"""A test that this machine cannot run is skipped, and says why."""

from __future__ import annotations

import pytest

from .need import missing


def skip_where_missing(*tables: dict[str, str]) -> None:
    if reason := missing(*tables):
        pytest.skip(reason)
