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
from statistics import fmean
from typing import Final

from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.core.wording import count, duration, name_ranks, percent
from paceenv.live.options import DECIDING
from paceenv.live.record.course import Course
from paceenv.live.record.findings import Findings, find
from paceenv.live.record.findings_text import STOPS, stopped
from paceenv.live.record.history import KEPT_ITERATIONS
from paceenv.live.record.run_folder import SUMMARY, RunFolder, is_silent
from paceenv.live.record.side_by_side import Job
from paceenv.live.record.snapshot import Snapshot, entry, number, text, total

NAMES: Final = {
    "compute": "compute and everything else",
    "collective": "in collectives",
    "barrier": "in the barrier",
    "pacing": "delays of pacing",
}
ALIKE: Final = 0.02
"""Ranks with a smaller relative difference are not listed separately."""
FEW: Final = 0.1
"""A smaller share of steps unlike the usual is not mentioned: the first ones of a job always are."""
MAX_EVENTS: Final = 12
WIDTH: Final = 100
_WRAPPER: Final = textwrap.TextWrapper(WIDTH, subsequent_indent="      ", break_on_hyphens=False)


def write_summary(folder: str | Path, own: Snapshot, patience_s: float = 0.0) -> tuple[str, Findings]:
    """Write the page to the run's folder, and to its attempt's, from all ranks' last status; it and the findings."""
    place, until_s = Path(folder), time.monotonic() + patience_s
    while True:
        others = list[Snapshot]()
        with contextlib.suppress(InputError, OSError):  # no rank has written anything yet
            others = [one for one in RunFolder(place).statuses(own["attempt"]) if one["rank"] != own["rank"]]
        complete = len(others) + 1 >= own["world_size"] and all(entry(s, "final") for s in others)
        if complete or time.monotonic() >= until_s:
            break
        time.sleep(0.25)
    findings = find([own, *others])
    page = summarise([own, *others], findings)
    for target in (place / str(own["attempt"]) / SUMMARY, place / SUMMARY):
        atomic_write(target, page)
    return page, findings


def summarise(snapshots: Sequence[Snapshot], findings: Findings | None = None) -> str:
    """The page, by the findings of these snapshots. Facts that all ranks share are taken from the first one."""
    own = snapshots[0]
    ranks = sorted(snapshots, key=lambda s: int(s["rank"]))
    lines, course = (findings or find(ranks))["text"], Course(Job(ranks))
    first = [*course.silent, *course.ended]
    heading, waiting = _heading(own, ranks), [f"  {line}" for line in lines if line not in first]
    heading[1:1], waiting[:0] = first, ["Which rank waits for which"] * bool(waiting)
    sections = (heading, _step(own, ranks), waiting, _pacing(own, ranks), _said(own, ranks), _not_ended(own, ranks))
    return "\n\n".join("\n".join(map(_WRAPPER.fill, section)) for section in sections if section) + "\n"


def _heading(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    size = number(own, "world_size")
    hosts = len({text(s, "host") for s in ranks})
    mode, state, reason = text(own, "mode"), text(own, "state"), text(own, "reason")
    agents = number(own, "agents", "count")
    lines = [
        f"paceenv live: job {text(own, 'job') or '(no name)'}, attempt {entry(own, 'attempt')}, "
        f"{count(size)} rank{'' if size == 1.0 else 's'}; this page is from {len(ranks)} of them "
        f"on {hosts} host{'s' if hosts > 1 else ''}{_at(number(own, 'unix_time_s'), ', at %H:%M:%S')}"
    ]
    if agents is not None and size is not None and agents < size:
        why = text(own, "agents", "reason")
        lines.append(f"{count(agents)} of {count(size)} ranks have an agent" + (f": {why}" if why else ""))
    lines.append(f"mode {mode}" + (f", in force: {state} ({reason or 'no reason given'})" if state != mode else ""))
    policy, digest = text(own, "policy", "source"), text(own, "policy", "sha256")
    if policy and mode in DECIDING:  # else it decides nothing, or no more
        lines[-1] += f"; policy {policy}" + (f" ({digest[:12]})" if digest else "")
    return lines


def _not_ended(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    """Ranks that ended after this page was written, of a job that nothing ended early."""
    running = [s["rank"] for s in ranks if not (entry(s, "final") or entry(s, "gone") or is_silent(s, time.time()))]
    is_told = running and entry(own, "final") and not any(text(s, "ended") for s in ranks)
    return [f"not ended when this was written: {name_ranks(running)}"] if is_told else []


def _step(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    step = {name: number(own, "step", name) for name in ("mean_s", "cv", "p50_s", "p99_s", "baseline_s")}
    seen, irregular = number(own, "iterations"), number(own, "irregular")
    lines = ["Where the step went"]
    if step["mean_s"] is None:
        why = text(own, "unmeasured")
        return [*lines, f"  {count(seen)} iterations, none measured{f': {why}' if why else ''}"]
    lines.append(
        f"  mean {duration(step['mean_s'])}, median {duration(step['p50_s'])}, 99th percentile "
        f"{duration(step['p99_s'])}, at best {duration(step['baseline_s'])}; CV {percent(step['cv'])}"
    )
    together = number(own, "step_iterations") or 1.0
    few, off = FEW * (seen or 0.0), number(own, "off") or 0.0
    unseen = (seen or 0.0) - off - together * (number(own, "regular") or 0.0)
    odd = min(irregular or 0.0, unseen)  # the first ones, from before the usual was known, are measured later
    lines.append(f"  {count(seen)} iterations")
    lines[-1] += f", times of the newest {count(KEPT_ITERATIONS)}" if (seen or 0.0) > KEPT_ITERATIONS * together else ""
    lines[-1] += f", {count(odd)} left out, whose operations are unlike the usual" if odd > few else ""
    lines[-1] += f", {count(off)} while the agent was off" if off > few else ""
    lines[-1] += f", {count(unseen - odd)} not watched, to keep the agent cheap" if unseen - odd > few else ""
    if together > 1.0:
        lines.append(f"  a step is {count(together)} iterations: the ranks meet in every {count(together)}th")
    lines += _stopped(ranks)
    for part, name in NAMES.items():
        of_rank = {s["rank"]: value for s in ranks if (value := number(s, "parts", f"{part}_s")) is not None}
        if not of_rank or not any(of_rank.values()):
            continue
        mean_s = fmean(of_rank.values())
        # who writes checkpoints leaves these steps out, and has another mean than who waits for it
        share = fmean(of_rank[s["rank"]] / (number(s, "step", "mean_s") or 1.0) for s in ranks if s["rank"] in of_rank)
        line = f"  {name:<28} {duration(mean_s):>8} {percent(share):>8}"
        least, most = min(of_rank, key=of_rank.__getitem__), max(of_rank, key=of_rank.__getitem__)
        if of_rank[most] - of_rank[least] > ALIKE * mean_s:
            line += f"   from {duration(of_rank[least])} (rank {least}) to {duration(of_rank[most])} (rank {most})"
        lines.append(line)
    return lines


def _stopped(ranks: Sequence[Snapshot]) -> list[str]:
    """The steps that are in none of the times, of the rank with the longest of them."""
    of = max(ranks, key=lambda s: number(s, "stopped", "longest_s") or 0.0)
    longest_s, ended = number(of, "stopped", "longest_s"), _at(number(of, "stopped", "unix_time_s"), "%H:%M:%S")
    which = f"{count(number(of, 'stopped', 'count'))}; the longest took {duration(longest_s)} and ended at {ended}"
    line = f"  left out of these times: {STOPS} ({which})"
    line += f"; with them the mean is {duration(stopped(of)[1])}" if number(of, "stopped", "total_s") else ""
    return [line] if longest_s else []


def _pacing(own: Snapshot, ranks: Sequence[Snapshot]) -> list[str]:
    lines, bound_s = ["What pacing did"], number(own, "probe", "bound_s")
    if bound_s is not None:
        lines.append(f"  probes: random delays of at most {duration(bound_s)}")
    asked, taken = total(ranks, "pacing", "asked"), total(ranks, "pacing", "taken")
    foregone = shadowed(ranks)
    delayed = [spent(ranks)] if taken or (asked and not foregone) else []
    told = [*foregone, *delayed, *held(ranks)] or ["nothing: no delay was asked for"]
    lines += [f"  {line}" for line in told]
    if asked or taken or total(ranks, "pacing", "holds"):
        cut = [f"{name} {count(n)}" for name, n in cut_by_limits(ranks).most_common()]
        if cut:
            lines.append(f"  shortened or forbidden by limits: {', '.join(cut)}")
    verdict = text(own, "canary", "verdict")
    if verdict:
        said = text(own, "canary", "text") or verdict
        lines.append(f"  blocks with and without, on rank {own['rank']}: {said}")
        candidates = entry(own, "canary", "candidates")
        for one in candidates if isinstance(candidates, list) and len(candidates) > 1 else ():
            why = f"; stopped: {text(one, 'stopped')}" if text(one, "stopped") else ""
            lines.append(f"  {text(one, 'name')}: {text(one, 'text')}{why}")
    overhead_s, step_s = number(own, "overhead", "mean_s"), number(own, "step", "mean_s")
    if overhead_s is not None:
        share = f", {100.0 * overhead_s / step_s:.2g} % of the step" if step_s else ""
        lines.append(f"  the agent itself took {duration(overhead_s)} of host time per iteration{share}")
    return lines


def spent(ranks: Sequence[Snapshot]) -> str:
    """The delays of all modes so far; mode shadow asks for more than it takes."""
    of = "before" if shadowed(ranks) else f"of {count(total(ranks, 'pacing', 'asked'))} asked for"
    taken, in_all = count(total(ranks, "pacing", "taken")), duration(total(ranks, "pacing", "total_s"))
    longest = duration(max(number(s, "pacing", "max_s") or 0.0 for s in ranks))
    told = f"{taken} delays taken {of}, {in_all} in all iterations of all ranks"
    return f"{told}, longest {longest} (measured: delays end late)"


def held(ranks: Sequence[Snapshot]) -> list[str]:
    """What rule ``defer`` held back; nothing where it held none."""
    transfers, iterations = total(ranks, "pacing", "held"), total(ranks, "pacing", "holds")
    if not transfers:
        would = any(text(s, "state") == "shadow" for s in ranks) and iterations
        return [f"it would have held transfers back in {count(iterations)} iterations"] if would else []
    longest_s = max(number(s, "pacing", "held_max_s") or 0.0 for s in ranks)
    mean, longest = duration(total(ranks, "pacing", "held_s") / transfers), duration(longest_s)
    return [
        f"rule defer held back {count(transfers)} transfers in {count(iterations)} iterations of all ranks, "
        f"{mean} on average, {longest} at most"
    ]


def shadowed(ranks: Sequence[Snapshot]) -> list[str]:
    """In mode shadow: the delays that it would have taken, and what they would take of the step."""
    own = [s for s in ranks if number(s, "shadow", "steps")]
    if not own:
        return []
    steps, delays = total(own, "shadow", "steps") / len(own), total(own, "shadow", "count")
    if not delays:
        return [f"mode shadow: it would have taken no delay in {count(steps)} steps"]
    share = total(own, "shadow", "share") / len(own)
    return [
        f"mode shadow, nothing was delayed: it would have taken {count(delays)} delays in {count(steps)} steps of "
        f"{len(own)} ranks, {percent(share)} of the step on average"
    ]


def cut_by_limits(ranks: Sequence[Snapshot]) -> Counter[str]:
    """How often each limit of the guard cut a delay, over all ranks."""
    sums: Counter[str] = Counter()
    for snapshot in ranks:
        limits = entry(snapshot, "pacing", "cut")
        for name in limits if isinstance(limits, dict) else ():
            sums[name] += int(number(snapshot, "pacing", "cut", name) or 0.0)
    return sums


def _at(unix_time_s: float | None, form: str) -> str:
    return time.strftime(form, time.localtime(min(abs(unix_time_s), 1e11))) if unix_time_s else ""


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
        lines.append(f"  {_at(when, '%H:%M:%S') or '--:--:--'}  {name_ranks(sorted(set(who)))}: {words}")
    if len(said) > MAX_EVENTS:
        lines.insert(0, f"  ({len(said) - MAX_EVENTS} earlier ones left out)")
    return ["Messages of the agent", *lines] if lines else []
