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
@pytest.mark.parametrize("way", ["functional"])
def test_the_jobs_train_alike_with_and_without_the_agent(way: str, tmp_path: Path) -> None:
    job = {"way": way, "modes": ("", "observe", "shadow"), "iterations": 16, "out": str(tmp_path / "run")}
    for alone, *others in results(run_ranks(gpu_bodies.train, 2, tmp_path, **job)):
        assert len(set(alone["losses"])) > 8, "it trains"
        for run in others:
            assert (run["losses"], run["digest"]) == (alone["losses"], alone["digest"])
            assert run["summary"]["state"] == run["mode"], run["summary"]["reason"]


@pytest.mark.slow
@pytest.mark.parametrize("late", [1, -1])
def test_a_planted_delay_is_found(late: int, tmp_path: Path) -> None:
    job = {"way": "ddp", "late": late, "place": "loader", "late_s": 0.03, "iterations": 150}
    said = [r["arrival"] for r in results(run_ranks(gpu_bodies.planted, 2, tmp_path, out=str(tmp_path / "run"), **job))]
    assert [one["verdict"] == "late" for one in said] == [False, late == 1], said


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
