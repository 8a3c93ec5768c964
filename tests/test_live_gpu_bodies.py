"""The jobs and the page of the tests on a GPU, where there is none: on gloo, and on a fake CUDA layer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_bodies
import pytest
from fake_cuda import FakeCuda
from gpu_page import gpu_page
from live_jobs import results, run_ranks


@pytest.mark.slow
def test_costs_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = results(run_ranks(gpu_bodies.added_us, 1, tmp_path, way="ddp", turns=2, warm=4, timed=8))
    assert found["without the agent"] > 0.0
    FakeCuda().install(monkeypatch)
    assert all(us > 0.0 for us in gpu_bodies.calls_us(index=1).values())


def _report(name: str, outcome: str, longrepr: Any = None, **properties: str) -> Any:
    return SimpleNamespace(
        nodeid=f"tests/test_live_gpu.py::{name}",
        outcome=outcome,
        longrepr=longrepr,
        user_properties=list(properties.items()),
        when="call",
    )


def test_the_page_lists_every_check_with_what_it_measured() -> None:
    page = gpu_page(
        [
            _report("test_results_do_not_depend[ddp]", "passed", measured="record 1.5 µs"),
            _report("test_a_second_device", "skipped", ("file.py", 3, "Skipped: needs two devices")),
            _report("test_delays", "failed", "assert 1 == 2\nE  assert"),
        ],
        {"device": "NVIDIA H200"},
    )
    assert "| device | NVIDIA H200 |" in page
    assert "| results do not depend: ddp | passed | record 1.5 µs |" in page
    assert "| a second device | skipped | needs two devices |" in page
    assert "| delays | **failed** |" in page
