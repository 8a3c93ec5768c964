"""Operations of a rank and the shape of its steps, from kind, group, bytes, start and end."""

from __future__ import annotations

from collections.abc import Mapping

from paceenv.live.observe.batch import Kind
from paceenv.live.observe.log import Group
from paceenv.live.observe.step import Operation, Shape


class Shaped:
    """A shape with its table of kinds; ``members`` is this rank's place in every group and the group's size."""

    def __init__(self, members: Mapping[int, tuple[int, int]]) -> None:
        self.kinds: list[Kind] = []
        self.groups = {number: Group(number, str(number), *place, None, object) for number, place in members.items()}
        self.shape = Shape(self.groups, self.kinds)

    def operations(self, *parts: tuple[str, int, int, float, float]) -> list[Operation]:
        found = []
        for op, group, size, start_s, end_s in parts:
            kind = Kind(op, group, size)
            if kind not in self.kinds:
                self.kinds.append(kind)
            found.append((self.kinds.index(kind), start_s, end_s))
        return found
