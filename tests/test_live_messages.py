"""The agent's messages leave the script its own: what its signal handlers raise while one is written reaches it."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator

import pytest

from paceenv.live.log_once import LOGGER, Messages


class Alarm(Exception):
    """What the script's handler raises."""


@pytest.fixture
def alarm() -> Iterator[None]:
    def handler(number: int, frame: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGUSR2, handler)
    yield
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.usefixtures("alarm")
def test_a_signal_while_a_message_is_written_belongs_to_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    written: list[str] = []

    class Slow(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            try:
                os.kill(os.getpid(), signal.SIGUSR2)
                time.sleep(0.05)
                written.append(record.getMessage())
            except Exception:
                self.handleError(record)

    slow = Slow()
    LOGGER.addHandler(slow)
    try:
        messages = Messages()
        with pytest.raises(Alarm):
            messages.log_once("a message", logging.ERROR)
        messages.log_once("a message", logging.ERROR)  # it is being written: once is enough
        deadline_s = time.monotonic() + 5
        while not written and time.monotonic() < deadline_s:
            time.sleep(0.01)
    finally:
        LOGGER.removeHandler(slow)
    assert written == ["paceenv live: a message"]
    assert "Logging error" not in capsys.readouterr().err
