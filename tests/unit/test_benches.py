"""The benches are no tests, but they must run."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

BENCHES = sorted(file.stem for file in (Path(__file__).parents[2] / "bench").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", BENCHES)
def test_a_bench_can_be_asked_what_it_does(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = importlib.import_module(f"bench.{name}")
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out
