"""The one page about a run: where the step went, which rank waits for which, what pacing did, the agent's messages.

Made from the ranks' snapshots that can be found; it gives their number. Plain text of at most 100 columns.
"""

from __future__ import annotations

import contextlib
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Final

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.live.observe.locality import format_list
from paceenv.live.record.history import compare_ranks
from paceenv.live.record.run_folder import SUMMARY, RunFolder
from paceenv.live.record.snapshot import EARLY, LATE, ON_TIME, PARTS, Snapshot, entry, number, text

NAMES: Final = {
    "compute": "compute and everything else",
    "collective": "in collectives",
    "barrier": "in the barrier",
    "pacing": "delays of pacing",
}
NAMES_OF_LIMITS: Final = {
    "quiet": "quiet times",
    "cap": "longest delay",
    "share": "share of the step",
    "slack": "own slack",
    "budget": "budget per minute",
}
LISTED: Final = 4
"""Ranks listed for each kind; further ones are counted."""
ALIKE: Final = 0.02
"""Ranks with a smaller relative difference are not listed separately."""
MAX_EVENTS: Final = 12
WIDTH: Final = 100


def write_summary(folder: str | Path, own: Snapshot, patience_s: float = 0.0) -> str:
    """Write the page to the run's folder and return it; it uses the last status of the other ranks there.

    Args:
        folder: the run's folder.
        own: the snapshot of this rank.
        patience_s: longest wait for the final status of the other ranks, seconds.

    Raises:
        InputError: the page cannot be written.
    """
    place, until_s = Path(folder), time.monotonic() + patience_s
    while True:
        others: list[Snapshot] = []
        with contextlib.suppress(InputError):  # no status there yet
            others = [s for s in RunFolder(place).statuses(int(own["attempt"])) if s["rank"] != own["rank"]]
        complete = len(others) + 1 >= own["world_size"] and all(entry(s, "final") for s in others)
        if complete or time.monotonic() >= until_s:
            break
        time.sleep(0.25)
    page = summarise(compare_ranks([own, *others]))
    atomic_write(place / SUMMARY, page.encode())
    return page


def summarise(snapshots: Sequence[Snapshot]) -> str:
    """The page. Facts that all ranks share are taken from the first snapshot."""
    own = snapshots[0]
    ranks = sorted(snapshots, key=lambda s: int(s["rank"]))
    sections = (
        _heading(own, ranks),
        _step(own, ranks),
        _waiting(ranks),
        _pacing(own, ranks),
        _said(own, ranks),
    )
    return "\n\n".join("\n".join(map(_wrapped, section)) for section in sections if section) + "\n"


def duration(seconds: float | None) -> str:
    """Seconds with three digits and a unit that suits them; ``-`` for unknown."""
    if seconds is None:
        return "-"
    size = abs(seconds)
    for limit, factor, unit in ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (600.0, 1.0, "s"), (36000.0, 1 / 60, "min")):
        if size < limit:
            return f"{seconds * factor:.3g} {unit}" if size * factor < 99.95 else f"{seconds * factor:.0f} {unit}"
    return f"{seconds / 3600:.1f} h"


def percent(share: float | None) -> str:
    """A share as a percentage with one digit; ``-`` for unknown."""
    return "-" if share is None else f"{100.0 * share:.1f} %"


def count(value: float | None) -> str:
    """A whole number with thousands set apart; ``-`` for unknown."""
    return "-" if value is None else f"{int(value):,}"


def _wrapped(line: str) -> str:
    return "\n".join(textwrap.wrap(line, WIDTH, subsequent_indent="      ", break_on_hyphens=False))


def _heading(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    size = number(own, "world_size")
    hosts = len({text(s, "host") for s in ranks})
    mode, state, reason = text(own, "mode"), text(own, "state"), text(own, "reason")
    lines = [
        f"paceenv live: job {text(own, 'job') or '(no name)'}, attempt {entry(own, 'attempt')}, "
        f"{count(size)} rank{'' if size == 1.0 else 's'}; this page is from {len(ranks)} of them "
        f"on {hosts} host{'s' if hosts > 1 else ''}"
    ]
    lines.append(f"mode {mode}" + (f", in force: {state} ({reason or 'no reason given'})" if state != mode else ""))
    policy, digest = text(own, "policy", "name"), text(own, "policy", "sha256")
    if policy and mode != "probe":  # probes need no policy
        lines[-1] += f"; policy {policy}" + (f" ({digest[:12]})" if digest else "")
    silent = [s["rank"] for s in ranks if not entry(s, "final")]
    if silent and entry(own, "final"):
        lines.append(f"not ended when this was written: {_ranks(silent)}")
    return lines


def _step(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    step = {name: number(own, "step", name) for name in ("mean_s", "cv", "p50_s", "p99_s", "baseline_s")}
    seen, irregular = number(own, "iterations"), number(own, "irregular")
    lines = ["Where the step went"]
    if step["mean_s"] is None:
        return [*lines, f"  no measurement after {count(seen)} iterations"]
    lines.append(
        f"  mean {duration(step['mean_s'])}, median {duration(step['p50_s'])}, 99th percentile "
        f"{duration(step['p99_s'])}, at best {duration(step['baseline_s'])}; CV {percent(step['cv'])}"
    )
    lines.append(f"  {count(seen)} iterations, {count(irregular)} of them unlike the usual and left out")
    for part in PARTS:
        of_rank = {s["rank"]: value for s in ranks if (value := number(s, "parts", f"{part}_s")) is not None}
        if not of_rank or not any(of_rank.values()):
            continue
        mean_s = fmean(of_rank.values())
        line = f"  {NAMES[part]:<28} {duration(mean_s):>8} {percent(mean_s / (step['mean_s'] or 1.0)):>8}"
        least, most = min(of_rank, key=of_rank.__getitem__), max(of_rank, key=of_rank.__getitem__)
        if of_rank[most] - of_rank[least] > ALIKE * mean_s:
            line += f"   from {duration(of_rank[least])} (rank {least}) to {duration(of_rank[most])} (rank {most})"
        lines.append(line)
    return lines


def _waiting(ranks: Sequence[Snapshot]) -> list[str]:
    lines = ["Which rank waits for which"]
    verdict = {s["rank"]: text(s, "arrival", "verdict") for s in ranks}
    by_rank = {s["rank"]: s for s in ranks}
    for word, key, phrase in ((LATE, "late_s", "the others wait for it"), (EARLY, "early_s", "it waits")):
        named = [rank for rank in by_rank if verdict[rank] == word]
        named.sort(key=lambda rank: -(number(by_rank[rank], "arrival", key) or 0.0))
        for rank in named[:LISTED]:
            amount, share = number(by_rank[rank], "arrival", key), number(by_rank[rank], "arrival", "share")
            often = f" in {percent(share)} of iterations" if share is not None else ""
            host = text(by_rank[rank], "host")
            lines.append(f"  rank {rank}{f' ({host})' if host else ''} is {word}: {phrase}, {duration(amount)}{often}")
        if len(named) > LISTED:
            lines.append(f"  and {len(named) - LISTED} more ranks are {word}")
    on_time = [rank for rank in by_rank if verdict[rank] == ON_TIME]
    if len(on_time) == len(ranks):
        lines.append("  all ranks arrive on time")
    elif on_time:
        lines.append(f"  on time: {_ranks(on_time)}")
    unclear = [rank for rank in by_rank if verdict[rank] not in (LATE, EARLY, ON_TIME)]
    if unclear:
        evidence = text(by_rank[unclear[0]], "arrival", "evidence")
        lines.append(f"  insufficient evidence: {_ranks(unclear)}" + (f"; {evidence}" if evidence else ""))
    return lines + _last_by_waits(ranks)


def _last_by_waits(ranks: Sequence[Snapshot]) -> list[str]:
    """The ranks' mean waits side by side: the last rank has the shortest wait, whatever its own verdict is."""
    waits = {s["rank"]: value for s in ranks if (value := number(s, "wait", "mean_s")) is not None}
    if len(waits) < 2:
        return []
    last, most = min(waits, key=waits.__getitem__), max(waits, key=waits.__getitem__)
    typical_s = median(value for rank, value in waits.items() if rank != last)
    return [
        f"  mean waits: least {duration(waits[last])} (rank {last}), median of the others {duration(typical_s)}, "
        f"most {duration(waits[most])} (rank {most})"
    ]


def _pacing(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    def total(name: str) -> float:
        return sum(number(s, "pacing", name) or 0.0 for s in ranks)

    lines = ["What pacing did", *_probes(own)]
    asked, taken = total("asked"), total("taken")
    if not asked and not taken:
        lines.append("  nothing: no delay was asked for")
    else:
        longest = max(number(s, "pacing", "max_s") or 0.0 for s in ranks)
        lines.append(
            f"  {count(taken)} delays taken of {count(asked)} asked for, {duration(total('total_s'))} in all, "
            f"longest {duration(longest)}"
        )
        paced = sorted(
            ((number(s, "pacing", "total_s") or 0.0, int(s["rank"])) for s in ranks if number(s, "pacing", "taken")),
            reverse=True,
        )
        if paced:
            listed = ", ".join(f"rank {rank} {duration(total_s)}" for total_s, rank in paced[:LISTED])
            lines.append(f"  most by {listed}")
        cut = [f"{NAMES_OF_LIMITS.get(name, name)} {count(n)}" for name, n in _cut(ranks)]
        if cut:
            lines.append(f"  shortened or forbidden by limits: {', '.join(cut)}")
        if total("ineffective"):
            lines.append(f"  {count(total('ineffective'))} of them moved nothing, as the device was still busy")
    verdict = text(own, "canary", "verdict")
    if verdict:
        pairs = number(own, "canary", "pairs")
        lines.append(f"  blocks with and without, {count(pairs)} pairs: {text(own, 'canary', 'text') or verdict}")
    overhead_s, step_s = number(own, "overhead", "mean_s"), number(own, "step", "mean_s")
    if overhead_s is not None:
        share = f", {100.0 * overhead_s / step_s:.2g} % of the step" if step_s else ""
        lines.append(f"  the agent itself took {duration(overhead_s)} of host time per iteration{share}")
    return lines


def _probes(own: Snapshot) -> list[str]:
    """The probes, in mode probe."""
    bound_s, cost = number(own, "probe", "bound_s"), number(own, "probe", "cost_share")
    if bound_s is None:
        return []
    cost_text = "" if cost is None else f"; they changed the mean step by {100.0 * cost:+.1f} %"
    return [f"  probes: random delays of at most {duration(bound_s)}{cost_text}"]


def _cut(ranks: Sequence[Snapshot]) -> list[tuple[str, float]]:
    """How often each limit of the guard cut a delay, over all ranks, the most frequent first."""
    sums: Counter[str] = Counter()
    for snapshot in ranks:
        limits = entry(snapshot, "pacing", "cut")
        for name in limits if isinstance(limits, dict) else ():
            sums[name] += int(number(snapshot, "pacing", "cut", name) or 0.0)
    return [(name, float(n)) for name, n in sums.most_common()]


def _said(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    """The messages of all ranks in order of time; the same message of several ranks is listed once."""
    said: dict[str, tuple[float, list[int]]] = {}
    for snapshot in ranks:
        events = entry(snapshot, "events")
        for event in events if isinstance(events, list) else ():
            words, when = text(event, "text"), number(event, "unix_time_s") or 0.0
            if words:
                first, who = said.setdefault(words, (when, []))
                said[words] = (min(first, when), [*who, int(snapshot["rank"])])
    lines = []
    for words, (when, who) in sorted(said.items(), key=lambda item: item[1][0])[-MAX_EVENTS:]:
        clock = time.strftime("%H:%M:%S", time.localtime(when)) if when else "--:--:--"
        lines.append(f"  {clock}  {_ranks(sorted(set(who)))}: {words}")
    if len(said) > MAX_EVENTS:
        lines.insert(0, f"  ({len(said) - MAX_EVENTS} earlier ones left out)")
    return ["Messages of the agent", *lines] if lines else []


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, runs joined: ``ranks 0-3, 7``."""
    shown = format_list(sorted(ranks)).split(",")
    more = f" and {len(shown) - 8} more runs" if len(shown) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown[:8])}{more}"
