"""The one file through which every rank learns the verdict on itself."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from toy_jobs import SHAPES, constant, run

from paceenv.core.errors import InputError
from paceenv.live.record.findings import find
from paceenv.live.record.findings_file import FINDINGS, findings_period_s, read_verdict, with_age, write_findings


def test_every_rank_reads_its_own_verdict(tmp_path: Path) -> None:
    findings = find(run(SHAPES["ddp"](4), 4, late=constant(4, 2, 0.02)))
    write_findings(tmp_path / "attempt", findings)
    found = [read_verdict(tmp_path / "attempt", rank) for rank in range(5)]
    assert [verdict and verdict["verdict"] for verdict in found] == ["early", "early", "late", "early", None]
    assert found[2] == findings["verdicts"]["2"] | {"unix_time_s": 1.8e9}
    assert with_age({"unix_time_s": time.time() - 90.0})["age_s"] == pytest.approx(90.0, abs=30.0)
    assert with_age({})["age_s"] is None
    assert [path.name for path in (tmp_path / "attempt").iterdir()] == [FINDINGS]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 100_000,
        json.dumps({"schema": "paceenv.findings/1", "verdicts": []}),
        json.dumps({"schema": "paceenv.findings/1", "verdicts": {"0": {"verdict": "guilty"}}}),
        json.dumps({"schema": "other", "verdicts": {"0": {"verdict": "late"}}}),
    ],
)
def test_a_foreign_file_is_no_verdict(content: str, tmp_path: Path) -> None:
    (tmp_path / FINDINGS).write_text(content)
    assert read_verdict(tmp_path, 0) is None


def test_a_pipe_in_its_place_does_not_hang(tmp_path: Path) -> None:
    assert read_verdict(tmp_path, 0) is None
    os.mkfifo(tmp_path / FINDINGS)
    assert read_verdict(tmp_path, 0) is None


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write_findings(tmp_path / "file", find(run(SHAPES["ddp"](2), 2)))


def test_larger_jobs_exchange_them_less_often() -> None:
    assert [findings_period_s(ranks) for ranks in (1, 8, 1000)] == [60.0, 60.0, 600.0]
