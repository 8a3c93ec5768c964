"""The identity of a start of the job: one id that all ranks share, and whether every rank has an agent like this one.

It goes as a few words through the job's own store (``init_process_group``), on a thread of its own: no collective, and
the training thread waits for nothing. Rank 0 makes the id. A store may outlive a start of the job: torchrun keeps one
for all its restarts, and a file may lie there from yesterday. So nothing under a fixed name is believed: each rank
leaves a random word in the store, and rank 0 answers under that very word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import paceenv
from paceenv.live.decide.blocks import shared_seed
from paceenv.live.log_once import described
from paceenv.live.options import Options
from paceenv.live.record.housekeeping import background, native

DEADLINE_S = 30.0
"""Rank 0 waits this long for the other ranks' agents; the others wait a little longer for its verdict."""
GRACE_S = 10.0
GOODBYE_S = 0.5
"""A job that ends before it is known waits this long for it."""
POLL_S, LONGEST_POLL_S = 0.005, 1.0
"""Shortest and longest pause between two looks at the store."""
OWN_TO_A_RANK = {"out", "job", "metrics_port", "metrics_host", "kill_file"}
"""Options in which ranks may differ: they change nothing that is decided."""
_generation = itertools.count()


class Identity(NamedTuple):
    """What is known about this start of the job.

    Attributes:
        attempt: the id that its ranks share, ``<UTC time>-<6 hex digits>``; "" while it is not known.
        agents: number of ranks with an agent; None while it is not known.
        why: why nothing may be paced, in a few words; "" while it is not known.
    """

    attempt: str = ""
    agents: int | None = None
    why: str = ""

    @property
    def complete(self) -> bool:
        """Whether every rank has an agent with the same settings. Only then may anything be paced."""
        return self.agents is not None and not self.why


class Rendezvous:
    """Finds the identity of this start of the job in the background.

    ``on_identity`` is called when the id is known, and again when it is known who has an agent. Nobody is late before
    the job has ``begun``.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        settings: str,
        on_identity: Callable[[Identity], None],
        deadline_s: float = DEADLINE_S,
        begun: Callable[[], bool] = lambda: True,
    ) -> None:
        self._rank, self._world_size, self._settings, self._found = rank, world_size, settings, on_identity
        self._begun, self._deadline_s = begun, deadline_s
        self._ending, self._lock, self._settled = threading.Event(), threading.Lock(), False
        self._thread: threading.Thread | None = None
        self.identity = Identity()
        """What is known so far; replaced as a whole, so any thread may read it."""

    def begin(self, store: Any, place: str = "") -> None:
        """Start to look, under a place in the store that is the same on every rank. Never raises.

        By default the first agent of a process meets the first agents of the other ranks, the second the second ones.
        """
        if self._world_size == 1:
            self._know(Identity(new_attempt(), 1))
        elif store is None:
            self._know(_guess("the job has no store that the agents could use"))
        else:
            place = place or f"paceenv.live/{next(_generation)}"
            self._thread = background("paceenv-identity", lambda: self._run(store, place))
            if self._thread is None:
                self._know(_guess("the system starts no thread"))

    def settle(self, patience_s: float = 2.0 * GOODBYE_S) -> Identity:
        """The job ends: give what is under way a last moment, and make up what is missing. Idempotent."""
        self._ending.set()
        thread = self._thread
        if thread is not None:
            thread.join(patience_s)  # the store may hang
        with self._lock:
            self._settled = True
            if not self.identity.attempt:
                self.identity = _guess("the job ended before its ranks had heard of each other")
        return self.identity

    def _run(self, store: Any, place: str) -> None:
        try:
            words = Words(store, place)
            identity = self._lead(words) if self._rank == 0 else self._follow(words)
        except Exception as error:  # the store may be anybody's
            guess = _guess(f"the job's store cannot be used: {described(error)[:200]}")
            identity = guess._replace(attempt=self.identity.attempt or guess.attempt)  # others know the rank by it
        self._know(identity)

    def _lead(self, words: Words) -> Identity:
        """Rank 0: answer every word that is left, until every rank has said that it heard, or time is up."""
        attempt, answered, size = new_attempt(), set[int](), self._world_size
        self._know(Identity(attempt))
        for last in self._looks(self._deadline_s):
            for ticket in set(range(1, words.count("tickets") + 1)) - answered:
                word = words.read(f"ticket/{ticket}")
                if word:
                    words.write(f"answer/{word}", attempt)
                    answered.add(ticket)
            agents, alike = (1 + words.count(f"{attempt}/{what}") for what in ("agents", self._settings))
            if agents == size or last:
                words.write(f"{attempt}/verdict", f"{agents} {alike}")
                return _verdict(attempt, agents, alike, size)
        raise AssertionError("the last look returns")

    def _follow(self, words: Words) -> Identity:
        """Another rank: leave a word, read the answer, say so, and read how many did."""
        word = secrets.token_hex(8)
        words.write(f"ticket/{words.count('tickets', 1)}", word)
        attempt = ""
        for last in self._looks(self._deadline_s + GRACE_S):
            if not attempt and (attempt := words.read(f"answer/{word}")):
                for what in (self._settings, "agents"):  # rank 0 looks at the settings once all agents have come
                    words.count(f"{attempt}/{what}", 1)
                self._know(Identity(attempt))
            verdict = words.read(f"{attempt}/verdict") if attempt else ""
            if verdict:
                agents, alike = map(int, verdict.split())
                return _verdict(attempt, agents, alike, self._world_size)
            if attempt and (last or self._ending.is_set()):
                return Identity(attempt, None, "rank 0 did not say how many ranks have an agent")
        return _guess("rank 0 has no agent that answers")

    def _looks(self, deadline_s: float) -> Iterator[bool]:
        """Times to look at the store, with growing pauses, shortest at the end of the job; True is the last one."""
        until_s, pause_s, ending = time.monotonic() + deadline_s, POLL_S, False
        while time.monotonic() < until_s:
            yield False
            if ending:
                time.sleep(POLL_S)
            elif self._ending.wait(pause_s):
                ending, until_s = True, min(until_s, time.monotonic() + GOODBYE_S)
            elif not self._begun():
                until_s = time.monotonic() + deadline_s
            pause_s = min(1.5 * pause_s, LONGEST_POLL_S)
        yield True

    def _know(self, identity: Identity) -> None:
        with self._lock:
            if self._settled:
                return
            self.identity = identity
        self._found(identity)


class Words:
    """Short words in the job's store, under a prefix of ours. No call waits for a word that is not there.

    Each call is a round trip to the store's server, and runs without the interpreter (see ``native``).
    """

    def __init__(self, store: Any, place: str) -> None:
        from torch.distributed.distributed_c10d import PrefixStore  # imported long ago: the store has been made

        with native:
            with contextlib.suppress(Exception):  # a store of the user's own may have no clone
                store = store.clone()  # a connection of its own: the job may wait in the other for minutes
            self._store = PrefixStore(place, store)

    def read(self, name: str) -> str:
        with native:
            if not self._store.check([name]):
                return ""
            return bytes(self._store.get(name)).decode("ascii", "replace")

    def write(self, name: str, word: str) -> None:
        with native:
            self._store.set(name, word)

    def count(self, name: str, more: int = 0) -> int:
        with native:
            return int(self._store.add(name, more))


def new_attempt() -> str:
    """An id that nobody else has; ids sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"


def _guess(why: str) -> Identity:
    """An id from what the launcher tells every rank, for ranks that cannot talk. It may be that of an earlier start.

    The ranks share no time, so it has only the day.
    """
    day = time.strftime("%Y%m%dT000000", time.gmtime())
    return Identity(f"{day}-{shared_seed(os.environ) % (1 << 24):06x}", None, why)


def settings_digest(options: Options, policy: tuple[str, str | None], seed: int) -> str:
    """A digest of everything that every rank must have alike, the version of paceenv among it.

    Args:
        policy: name and SHA-256 digest; None where it has no file.
        seed: in force: the option, or else from the rank's own environment, which may spell an address differently.
    """
    values = {name: value for name, value in dataclasses.asdict(options).items() if name not in OWN_TO_A_RANK}
    values["seed"] = seed
    told = repr((paceenv.__version__, sorted(values.items()), policy)).encode()
    return hashlib.blake2b(told, digest_size=8).hexdigest()


def _verdict(attempt: str, agents: int, alike: int, size: int) -> Identity:
    why = ""
    if agents < size:
        why = f"{agents} of {size} ranks have an agent"
    elif alike < size:
        which = "options, policy, version of paceenv or, without --seed, MASTER_ADDR"
        why = f"{size - alike} of {size} ranks have other settings than rank 0: {which}"
    return Identity(attempt, agents, why)
