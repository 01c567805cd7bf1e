"""Less waiting for whatever comes round: tests/state/test_work.py sees to it that it comes when it should."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finalization in the controllers of this process. Those in processes of their own are as users have them."""
    monkeypatch.setattr("app.work.FINALIZE_EVERY_MS", 500)
