"""The agent in the real trainers of Hugging Face and Lightning, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_jobs import results, run_ranks
from live_trainers import STEPS, hugging_face, lightning

from paceenv.live.record.run_folder import RunFolder


@pytest.mark.slow
@pytest.mark.parametrize("body", [hugging_face, lightning])
def test_a_trainer_trains_as_without_the_agent(body: Callable[..., Any], tmp_path: Path) -> None:
    environ = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ended = run_ranks(body, 2, tmp_path, environ=environ, out=str(tmp_path))
    for digests in results(ended):
        assert digests["paced"] == digests["plain"]
    run = RunFolder(tmp_path / "run")
    statuses = run.statuses(run.latest())
    assert [(s["rank"], s["world_size"], s["mode"], s["final"]) for s in statuses] == [
        (rank, 2, "active", True) for rank in range(2)
    ]
    assert statuses[1]["pacing"]["taken"] > 0  # the policy delays the second rank
    for status in statuses:
        assert status["iterations"] == STEPS - 1  # the first step is where the agent begins
        assert status["regular"] > 8
        assert status["reason"] == ""
