"""The script's own function for the numbers: what it gets, and that its errors are not the job's."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from paceenv.live.agent import attach
from paceenv.live.callbacks.attachment import Attachment


def train(until: threading.Event) -> torch.Tensor:
    """Steps until the event, or a minute is over."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    end_s = time.monotonic() + 60.0
    while not until.is_set() and time.monotonic() < end_s:
        weight.sum().backward()
        optimizer.step()
        time.sleep(0.001)
    return weight


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceenv.live.reporting.METRICS_S", 0.02)


def test_it_gets_this_ranks_numbers_on_another_thread_and_at_the_end() -> None:
    got: list[dict[str, float]] = []
    threads: set[threading.Thread] = set()
    enough = threading.Event()

    def keep(metrics: dict[str, float]) -> None:
        got.append(metrics)
        threads.add(threading.current_thread())
        if "step_mean_seconds" in metrics:
            enough.set()

    agent = attach()
    attach(on_metrics=keep)  # as under the launcher, whose agent was there before
    train(enough)
    assert enough.is_set()
    before = len(got)
    agent.detach()
    assert len(got) > before
    assert threading.main_thread() not in threads
    assert got[-1]["rank"] == 0
    assert got[-1]["iterations"] >= got[0]["iterations"]
    assert got[-1]["step_mean_seconds"] > 0.0
    assert all(type(value) is float for metrics in got for value in metrics.values())


@pytest.mark.parametrize("error", [RuntimeError("tracker away"), SystemExit(3)])
def test_one_that_raises_is_said_once_and_not_called_again(error: BaseException) -> None:
    calls, called = 0, threading.Event()

    def fail(metrics: dict[str, float]) -> None:
        nonlocal calls
        calls += 1
        called.set()
        raise error

    attachment = Attachment(on_metrics=fail)
    attachment.begin(None)
    agent = attach()
    train(called)
    time.sleep(0.1)
    events = [event["text"] for event in agent.summary()["events"]]
    attachment.end()
    assert calls == 1
    [said] = [text for text in events if "on_metrics" in text]
    assert said.startswith(f"on_metrics failed and is not called again: {type(error).__name__}: {error} (")
    assert agent.state == "observe"
