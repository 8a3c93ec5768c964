"""Input that is repeated in messages and read from YAML: hostile values cost neither time nor memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from paceenv.core.errors import MAX_MESSAGE, MAX_VALUE, InputError, out_of_range, short_repr
from paceenv.core.files import MAX_REPEATED, parse_yaml, read_yaml

QUICK_S = 5.0
"""Far more than a quick answer takes, and far less than a bomb would."""


def nested(depth: int) -> str:
    """A YAML text of ``depth`` lists, each of nine aliases of the one before."""
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, depth)]
    return "\n".join(rows)


def merged(depth: int) -> str:
    """As :func:`nested`, by merge keys, which PyYAML unfolds while it reads."""
    rows = ["a0: &a0 {k: 1}"]
    rows += [f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}" for i in range(1, depth)]
    return "\n".join(rows)


def bomb(kind: type, depth: int = 40) -> Any:
    """A value of a few hundred objects whose repr would have nine to the power of ``depth`` parts."""
    value: Any = {"k": 1} if kind is dict else kind(["x"] * 9)
    for _ in range(depth):
        value = {str(i): value for i in range(9)} if kind is dict else kind([value] * 9)
    return value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (nested(9), "stand for more than"),
        (nested(400), "stand for more than"),
        (merged(9), "stand for more than"),
        (f"a: &a {'x' * 10**6}\nb: [{', '.join(['*a'] * 1000)}]", "stand for more than"),
        ("a: &a [*a]", "refers to what it is in"),
        ("a: &a {b: {c: *a}}", "refers to what it is in"),
        ("[" * 5_000, ""),
    ],
    ids=["lists", "deep", "merge keys", "a long text", "itself", "itself below", "nested"],
)
def test_a_bomb_in_a_yaml_is_refused_quickly(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(text)
    begun_s = time.process_time()
    with pytest.raises(InputError, match=rf"bomb\.yaml: not valid YAML: .*{why}") as caught:
        read_yaml(path)
    assert time.process_time() - begun_s < QUICK_S
    assert len(str(caught.value)) < 2 * MAX_MESSAGE


def test_aliases_that_people_write_are_read() -> None:
    text = "base: &base {a: 1, b: [1, 2]}\none: *base\ntwo: {<<: *base, c: 3}\nempty: &e []\nthree: [*e, *e]"
    assert parse_yaml(text)["two"] == {"a": 1, "b": [1, 2], "c": 3}
    many = f"a: &a [1, 2]\nb: [{', '.join(['*a'] * (MAX_REPEATED // 4))}]"
    assert len(parse_yaml(many)["b"]) == MAX_REPEATED // 4


@pytest.mark.parametrize("kind", [list, tuple, dict])
def test_a_bomb_in_a_message_is_short_and_quick(kind: type) -> None:
    begun_s = time.process_time()
    text = str(out_of_range("key", bomb(kind), "a number", "here"))
    assert time.process_time() - begun_s < QUICK_S
    assert len(text) < 2 * MAX_VALUE
    assert text.startswith("here: key = ")
    assert text.endswith("; allowed: a number")


class _Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


ODD = {"number": 1 << 100_000, "list": [-(1 << 100_000)], "text": "x" * 10**6, "bytes": b"x" * 10**6, "own": _Odd()}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD.keys())
def test_any_value_has_a_short_text(value: object) -> None:
    assert 0 < len(short_repr(value)) <= 2 * MAX_VALUE


def test_a_message_has_an_end() -> None:
    assert len(str(InputError("x y " * 10**6))) < 2 * MAX_MESSAGE
