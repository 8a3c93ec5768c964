"""``DIR/control.json``: what ``paceenv live set`` asks of the agents of a running job, and how an agent takes it in.

Written as a whole, read by every rank's watch thread. All ranks change over before the same iteration, or none does.
"""

from __future__ import annotations

import math
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from paceenv.core.errors import InputError, out_of_range
from paceenv.core.files import atomic_write
from paceenv.live.decide.live_policy import NamedPolicy, find_policy
from paceenv.live.loop import Loop
from paceenv.live.options import DECIDING, PACED, absolute_policy
from paceenv.live.record.run_folder import json_bytes, read_json
from paceenv.live.record.snapshot import Snapshot, number, text
from paceenv.live.store_messages import Peers, lead_s

SCHEMA = "paceenv.live.control/1"
NAME = "control.json"
MODES = ("off", "observe", "shadow", "canary", "active")
"""Modes that a running agent can change to; probes need their plan in the trace from the start."""
_MAX_BYTES = 1 << 16


class Wish(NamedTuple):
    """What is asked for, of one start of the job (``attempt``).

    Attributes:
        policy: as for ``live.attach``; None in modes that do not decide.
        sha256: of the policy's file, or of the numbers of its cluster config; every rank must find the same.
        from_iteration: the first iteration of the new mode; 0 is at once.
    """

    id: str
    attempt: str
    mode: str
    policy: str | None
    sha256: str | None
    from_iteration: int


def make_wish(statuses: Sequence[Snapshot], mode: str, policy: str | None) -> Wish:
    """A request to the ranks that wrote ``statuses``, for an iteration that they all reach after they have read it.

    Raises InputError: a mode that is not allowed, a policy that is missing or invalid, or a job that has no step time.
    """
    if mode not in MODES:
        raise out_of_range("mode", mode, f"one of {', '.join(MODES)}", "live set")
    wish = Wish(secrets.token_hex(6), str(statuses[0]["attempt"]), mode, None, None, 0)
    if mode not in DECIDING:
        return wish
    policy = absolute_policy(policy)
    named = find_policy(policy)
    if named.fault:
        raise InputError(f"live set: mode {mode}: {named.fault}")
    now_s, size = time.time(), max(int(number(s, "world_size") or 1) for s in statuses)
    tick_s = min(filter(None, map(_tick_s, statuses)), default=0.0)
    if not tick_s:
        raise InputError("live set: no rank has measured a step yet; allowed: once live status shows a step time")
    reached = [
        (number(s, "iterations") or 0.0) + max(now_s - (number(s, "unix_time_s") or now_s), 0.0) / tick_s
        for s in statuses
    ]
    first = math.ceil(max(reached, default=0.0) + lead_s(size) / tick_s)
    return wish._replace(policy=policy, sha256=named.sha256, from_iteration=first)


def _tick_s(status: Snapshot) -> float:
    """Seconds from tick to tick, at the rank's usual pace or at its present one if that is faster; 0: not known."""
    steps_s = [s for name in ("mean_s", "newest_s") if (s := number(status, "step", name))]
    return min(steps_s, default=0.0) / max(number(status, "step_iterations") or 1.0, 1.0)


def write_wish(folder: Path, wish: Wish) -> None:
    """Write the request for all ranks, completely or not at all. Raises InputError if that fails."""
    atomic_write(folder / NAME, json_bytes({"schema": SCHEMA} | wish._asdict()))


def read_wish(path: Path) -> Wish:
    """Read a request. Raises InputError if it is none, or cannot be read."""
    data = read_json(path, _MAX_BYTES)
    if isinstance(data, dict) and data.pop("schema", None) == SCHEMA and data.keys() == set(Wish._fields):
        wish = Wish(**data)
        texts, maybe = (wish.id, wish.attempt, wish.mode), (wish.policy, wish.sha256)
        typed = all(isinstance(x, str) for x in texts) and all(x is None or isinstance(x, str) for x in maybe)
        if typed and wish.mode in MODES and type(wish.from_iteration) is int and 0 <= wish.from_iteration < 1 << 53:
            return wish
    raise InputError(f"{path}: no request as paceenv live set writes it ({SCHEMA})")


def off_for_good(status: Snapshot) -> str:
    """Why an agent takes no request in any more; "" if it does."""
    reason = text(status, "reason")
    return f"the agent is off for good: {reason}" if reason and status.get("state") == "off" else ""


class ControlReader:
    """Looks at the file for one loop, on the watch thread, and hands over what it asks for.

    A mode that decides begins only once every rank has said that it follows; a rank that hears of it too late observes,
    and so do then all.
    """

    def __init__(self, folder: Path, loop: Loop, peers: Peers) -> None:
        self._path, self._loop, self._peers = folder / NAME, loop, peers
        self._seen: tuple[int, ...] | None = None
        self._taken = "", ""
        """The last request's id, and why it is not followed, or ""; replaced as a whole."""
        self._begins_at = 0  # of the mode that is asked for, if that decides
        self._waiting: tuple[Wish, NamedPolicy] | None = None
        """What begins once all ranks follow."""
        self._said = ""  # the last request that this rank has said to follow
        self._lock = threading.Lock()  # held for a moment only: a request that came later must not be undone

    def state(self) -> dict[str, Any] | None:
        """For the status: the last request's ``id``, why it was ``refused`` or "", whether it is still ``waiting``."""
        (id_, refused), waits = self._taken, self._waiting is not None
        if not refused and waits and self._loop.iterations >= self._begins_at:
            refused = f"not every rank followed by iteration {self._begins_at}"
        if not id_ and not refused:
            return None
        return {"id": id_, "refused": refused, "waiting": not refused and (waits or self._loop.changing)}

    def agree(self, final: bool) -> None:
        """Say that this rank follows, and change over once all do; beside :meth:`look`, as the store may hang, too.

        Raises whatever the store raises.
        """
        waiting = self._waiting
        words = self._peers.words() if waiting is not None and not final else None
        if words is None or waiting is None:
            return
        wish, policy = waiting
        if self._said != wish.id:
            words.count(f"{wish.id}/follow", 1)
            self._said = wish.id
        if words.count(f"{wish.id}/follow") >= self._loop.world_size:
            with self._lock:
                if self._waiting is waiting:
                    self._loop.change(wish.mode, policy, wish.from_iteration)
                    self._waiting = None

    def look(self, final: bool) -> None:
        """Read the file if it has changed. An invalid request, or one for another start of the job, changes nothing.

        Raises OSError: it cannot be read.
        """
        if final or not self._loop.identity.attempt:
            return
        try:
            now = os.stat(self._path)
        except FileNotFoundError:
            return
        seen = now.st_mtime_ns, now.st_ino, now.st_size
        if seen == self._seen:
            return
        try:
            wish = read_wish(self._path)
        except InputError as error:
            self._refuse("", str(error))
        else:
            if wish.attempt == self._loop.identity.attempt:
                self._take(wish)
        self._seen = seen

    def _take(self, wish: Wish) -> None:
        decides = wish.mode in DECIDING
        policy = find_policy(wish.policy) if decides else self._loop.policy
        if why := self._why_not(wish, policy):
            self._refuse(wish.id, why)
            return
        self._begins_at = wish.from_iteration
        together = decides and self._loop.identity.complete and self._loop.world_size > 1
        with self._lock:
            self._waiting = (wish, policy) if together else None  # what was asked for before is void
            if not together:  # for nobody else, or nothing is paced before or after
                self._loop.change(wish.mode, policy, wish.from_iteration)
        self._taken = wish.id, ""

    def _why_not(self, wish: Wish, policy: NamedPolicy) -> str:
        """Why this rank cannot follow a wish; "" if it can."""
        now = self._loop.iterations
        if gone := off_for_good({"state": self._loop.state, "reason": self._loop.reason}):
            return gone
        if wish.mode not in DECIDING:
            return ""
        if wish.mode in PACED and not self._loop.identity.complete:
            return "not every rank is known to have an agent with the same settings"
        if now < self._begins_at:
            return f"an earlier request waits for iteration {self._begins_at}; ask again after it"
        if now >= wish.from_iteration > 0:
            return f"iteration {wish.from_iteration} was over already"
        if policy.fault:
            return policy.fault[:300]
        same = policy.sha256 == wish.sha256
        return "" if same else f"policy {wish.policy} is another one here than where it was set"[:300]

    def _refuse(self, id_: str, why: str) -> None:
        self._taken = id_, why
        self._loop.messages.log_once(f"paceenv live set: not followed: {why}")
