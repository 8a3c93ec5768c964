"""The callbacks in the real trainers of Hugging Face and Lightning, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_jobs import results, run_ranks
from live_trainers import EVALUATE_EVERY, SAVE_EVERY, STEPS, hugging_face, lightning

from paceenv.live.record.run_folder import RunFolder
from paceenv.live.record.segments import read_segment


def marked(run: RunFolder, rank: int, mark: str) -> set[int]:
    """Iterations that the trace of a rank marks as a checkpoint or an evaluation."""
    [path] = run.segments(run.latest())[rank]
    _, segment, note = read_segment(path)
    assert note == ""
    return {int(t["iteration"]) for t in segment.iterations_T if segment.marks[t["mark"]] == mark}


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
    assert statuses[1]["pacing"]["taken"] > 0  # the policy delays the second rank, and the guard not after marks
    assert statuses[1]["pacing"]["cut"]["quiet"] > 0
    for status in statuses:
        # the first step is where the agent begins; what follows step 40 is in the iteration of step 41, which is 39
        assert status["iterations"] == STEPS - 1
        assert status["regular"] > 8
        assert status["reason"] == ""
        assert marked(run, status["rank"], "checkpoint") == {SAVE_EVERY - 1}
        assert marked(run, status["rank"], "evaluation") == {EVALUATE_EVERY - 1, 2 * EVALUATE_EVERY - 1}


def test_an_agent_that_was_there_before_stays() -> None:
    from paceenv.live.agent import attach, attached
    from paceenv.live.callbacks.attachment import Attachment

    before, attachment = attach(mode="shadow"), Attachment()
    try:
        attachment.begin(optimizer=object())  # of a kind that PyTorch does not know
        attachment.end()
        assert attached() is before
    finally:
        before.detach()
    attachment.begin(optimizer=None)
    assert attached() is not None
    attachment.end()
    assert attached() is None
