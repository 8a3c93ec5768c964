"""A user's own ``--pattern``: a regular expression with named groups, whose names are their units."""

from __future__ import annotations

import re
from typing import Final

from paceenv.core.errors import InputError, short_repr
from paceenv.importers.log_text.conversion import GROUPS as VALUES

GROUPS: Final = ("step", *VALUES, "time", "rank")
"""Without a value the time stamps of the lines give a step time."""
MAX_LINE: Final = 2000
"""Characters of a line that a user's pattern sees."""
MAX_PATTERN: Final = 2000
_ALLOWED = (
    "(?P<s>..), (?P<ms>..) or (?P<us>..) for a step time; (?P<steps_per_s>..) or (?P<rate>..) for a speed; "
    "(?P<elapsed_s>..), (?P<elapsed_ms>..) or (?P<elapsed>h:mm:ss) for the time since the start; (?P<mean_s>..) or "
    "(?P<mean_ms>..) for a mean since the start; or (?P<step>..) alone in lines that begin with a time stamp. "
    "(?P<step>..), (?P<time>..) and (?P<rank>..) may stand beside each"
)


class UserPattern:
    """A compiled ``--pattern``.

    Raises InputError: it is no regular expression, or lacks a group that it needs.
    """

    name = "--pattern"

    def __init__(self, text: str) -> None:
        if len(text) > MAX_PATTERN:
            raise InputError(f"--pattern: {len(text)} characters; allowed: at most {MAX_PATTERN}")
        try:
            self._pattern = re.compile(text)
        except (re.error, RecursionError, OverflowError, MemoryError) as error:
            raise InputError(
                f"--pattern {short_repr(text)}: no regular expression ({error}); "
                "allowed: for example 'step (?P<step>\\d+).*time: (?P<ms>[\\d.]+)'"
            ) from None
        names = set(self._pattern.groupindex)
        if names - set(GROUPS):
            raise InputError(f"--pattern: group {sorted(names - set(GROUPS))[0]!r} is unknown; allowed: {_ALLOWED}")
        values = names & set(VALUES)
        if len(values) > 1:
            raise InputError(f"--pattern: groups {', '.join(sorted(values))}; allowed: one of them, {_ALLOWED}")
        if not values and "step" not in names:
            raise InputError(f"--pattern {short_repr(text)}: no named group with a time; allowed: {_ALLOWED}")
        if values & {"elapsed_s", "elapsed_ms", "elapsed", "mean_s", "mean_ms"} and "step" not in names:
            raise InputError(f"--pattern: {values.pop()} without (?P<step>..); allowed: both, as it is differenced")

    def match(self, text: str) -> dict[str, str] | None:
        """The groups found in a line, or None."""
        found = self._pattern.search(text[:MAX_LINE])
        if found is None:
            return None
        return {name: value for name, value in found.groupdict().items() if value is not None}
