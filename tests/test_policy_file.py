"""The policy file (contract 4): round trips, and refusal of everything that is not one."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.policies import policy_file as policy_file
from paceenv.policies.distilled import Candidate, Distilled
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ObservationEMA
from paceenv.policies.policy_file import ACTION_SCHEMA, FORMAT, PolicyFile, load_policy, save_policy

Tensors = dict[str, np.ndarray[Any, Any]]
INPUTS = signals.SIGNALS


def learned(
    hidden: tuple[int, ...] = (8, 6),
    mechanisms: tuple[str, ...] = ("slack", "phase_shift"),
    inputs: int = 0,
    **more: Any,
) -> Learned:
    rng = np.random.default_rng(0)
    widths = (inputs or signals.SIGNALS, *hidden, 2 * len(mechanisms))
    layers = [
        (rng.normal(size=(b, a)).astype(np.float32), rng.normal(size=b).astype(np.float32))
        for a, b in itertools.pairwise(widths)
    ]
    return Learned(layers, mechanisms, **more)


CANDIDATES: list[Candidate] = [{"slack": (0.02, 0.4)}, {"slack": (0.02, 0.2), "phase_shift": (0.1, 0.1)}]


def random_policy() -> Distilled:
    rng, inputs = np.random.default_rng(0), signals.SIGNALS + ObservationEMA([2, 12], 5).entries
    layers = [(rng.normal(size=(b, a)).astype(np.float32), np.zeros(b, np.float32)) for a, b in ((inputs, 9), (9, 2))]
    return Distilled(layers, CANDIDATES, margin=0.1, hysteresis=0.2, memory_intervals=[2, 12], change_intervals=5)


def content() -> PolicyFile:
    ranges = {name: (-0.5, 0.25) for name in signals.NAMES}
    return PolicyFile(learned(), ranges, {"git": "abc", "seeds": [1, 2], "config": {"cluster": "two-jobs"}})


def parts() -> tuple[Tensors, dict[str, Any]]:
    """Tensors and header of a good file, to spoil."""
    tensors: Tensors = {}
    for i, (weight, bias) in enumerate(learned().layers):
        tensors |= {f"layer{i}.weight": weight, f"layer{i}.bias": bias}
    header = {"format": FORMAT, "observation_schema": signals.SCHEMA, "observation_names": list(signals.NAMES)}
    header |= {"action_schema": ACTION_SCHEMA, "mechanisms": ["slack", "phase_shift"], "kind": "network"}
    header |= {"output": "linear", "activation": "tanh", "change_intervals": 0, "interval_iterations": 20}
    header |= {"calibrated_range": {}, "provenance": {}}
    return tensors, header


def refused(path: Path, blob: bytes | None = None) -> str:
    """The one line with which a file is refused; it names the file."""
    if blob is not None:
        path.write_bytes(blob)
    with pytest.raises(InputError) as caught:
        load_policy(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# Round trip


REMEMBERING: dict[str, Any] = {"memory_intervals": (2, 9), "change_intervals": 4, "interval_iterations": 35}
REMEMBERING |= {"activation": "silu", "squashes": True}
DISTILLED = ("candidates", "margin", "hysteresis", "always", "preference")


@pytest.mark.parametrize(
    "policy",
    [learned(), learned((), ("paper",)), learned(inputs=4 * signals.SIGNALS, **REMEMBERING), random_policy()],
    ids=["plain", "without hidden layers", "with memory", "distilled"],
)
def test_round_trip_keeps_every_bit(tmp_path: Path, policy: Learned) -> None:
    before = dataclasses.replace(content(), policy=policy)
    save_policy(tmp_path / "mine.safetensors", before)
    after = load_policy(tmp_path / "mine.safetensors")
    assert after.policy.name == "mine"
    for key in ("mechanisms", *REMEMBERING, *DISTILLED):
        assert getattr(after.policy, key, None) == getattr(policy, key, None), key
    assert after.policy.calibrated_range == before.calibrated_range
    assert after.calibrated_range == before.calibrated_range
    assert after.provenance == before.provenance
    for layer, kept in zip(policy.layers, after.policy.layers, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(layer, kept, strict=True))
    ours, theirs = after.policy, before.policy
    for view in np.random.default_rng(1).uniform(-1, 1, (9, 5, signals.SIGNALS)).astype(np.float32):
        np.testing.assert_array_equal(ours.decide(ours.inputs(view)), theirs.decide(theirs.inputs(view)))


def test_digest_is_the_file_s_and_the_same_every_time(tmp_path: Path) -> None:
    first = save_policy(tmp_path / "a.safetensors", content())
    again = save_policy(tmp_path / "deeper" / "b.safetensors", content())
    assert first == again == hashlib.sha256((tmp_path / "a.safetensors").read_bytes()).hexdigest()
    other = dataclasses.replace(content(), provenance={"git": "abd"})
    assert save_policy(tmp_path / "c.safetensors", other) != first


# Refusal


@pytest.mark.parametrize("blob", [b"", b"\x00" * 100, b"{}", b"garbage" * 100, (10**15).to_bytes(8, "little") + b"{}"])
def test_garbage_and_what_is_not_there(tmp_path: Path, blob: bytes) -> None:
    assert "not a readable .safetensors file" in refused(tmp_path / "a.safetensors", blob)
    for missing in (tmp_path, tmp_path / "none.safetensors"):
        assert "no such policy file" in refused(missing)


@given(at=st.integers(0, 10**6), to=st.binary(min_size=1, max_size=8))
def test_any_damage_is_refused_or_harmless(tmp_path_factory: pytest.TempPathFactory, at: int, to: bytes) -> None:
    path = tmp_path_factory.mktemp("damage") / "a.safetensors"
    save_policy(path, content())
    blob = bytearray(path.read_bytes())
    at %= len(blob)
    blob[at : at + len(to)] = to
    path.write_bytes(blob)
    try:
        policy = load_policy(path).policy
    except InputError:
        return
    settings_BM2 = policy.act(np.zeros((1, signals.SIGNALS), np.float32))
    assert ((settings_BM2 >= 0.0) & (settings_BM2 <= 1.0)).all()


def test_a_huge_file_is_refused_by_its_size_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.safetensors"
    with path.open("wb") as sparse:
        sparse.truncate(1 << 40)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("opened")

    monkeypatch.setattr(policy_file, "safe_open", never)
    assert "1099511627776 bytes; allowed: at most" in refused(path)


def test_a_pickle_under_another_name_is_not_executed(tmp_path: Path) -> None:
    flag = tmp_path / "executed"

    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (flag,))

    blob = pickle.dumps(Payload())
    assert "not a readable .safetensors file" in refused(tmp_path / "a.safetensors", blob)
    assert refused(tmp_path / "a.zip", blob).endswith("; paceenv.policies.save_network makes one of an agent")
    assert not flag.exists()
    pickle.loads(blob)
    assert flag.exists(), "the payload is a real one"


NO_RANGES = [math.nan, 1], [1, 0], [-math.inf, math.inf]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, "no paceenv header"),
        ("[" * 100_000, "the paceenv header is not JSON"),
        ("9" * 10_000, "the paceenv header is not JSON"),
        ("[]", "the paceenv header is a list; allowed: a mapping"),
        ({"observation_schema": "paceenv.signals/0"}, "observation_schema = 'paceenv.signals/0'; allowed: "),
        ({"observation_names": list(signals.NAMES)[::-1]}, "observation_names = "),
        ({"activation": "gelu"}, "activation = 'gelu'; allowed: one of tanh, relu, silu"),
        ({"interval_iterations": 0}, "interval_iterations = 0; allowed: an integer from 1 to 10000"),
        ({"output": ["tanh"]}, "output = ['tanh']; allowed: one of linear, tanh"),
        ({"mechanisms": ["magic", "phase_shift"]}, "mechanisms = ['magic', 'phase_shift']; allowed"),
        ({"mechanisms": ["slack"]}, "outputs = 4; allowed: 2, two a mechanism"),
        ({"calibrated_range": {"step_cv": [1]}}, "header: ValueError: not enough values to unpack"),
        ({"calibrated_range": {"cv": [0, 1]}}, "calibrated_range = 'cv'; allowed: one of step_inflation"),
        *(({"calibrated_range": {"step_cv": ends}}, "calibrated_range of step_cv = ") for ends in NO_RANGES),
        ({"provenance": [1]}, "header: TypeError: "),
    ],
    ids=itertools.count(),
)
def test_headers_that_are_hostile_or_of_another_version_or_kind(tmp_path: Path, header: Any, expected: str) -> None:
    tensors, good = parts()
    text = json.dumps(good | header) if isinstance(header, dict) else header
    blob = save(tensors, None if text is None else {"paceenv": text})
    assert expected in refused(tmp_path / "a.safetensors", blob)


def spoil(**changed: Any) -> Callable[[Tensors], Tensors]:
    """Replace tensors by name (``__`` for the dot); None removes."""

    def apply(tensors: Tensors) -> Tensors:
        spoiled = tensors | {name.replace("__", "."): value for name, value in changed.items()}
        return {name: value for name, value in spoiled.items() if value is not None}

    return apply


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tensors: {}, "tensors []; allowed: layer0.weight"),
        (spoil(layer0__bias=None), "; allowed: layer0.weight, layer0.bias"),
        (spoil(layer0__weight=np.zeros((8, 9), np.float32)), f"inputs = 9; allowed: {INPUTS}, the signals"),
        (spoil(layer0__weight=np.zeros((), np.float32)), "layer0 has shapes (), (8,); allowed: (n, 0), (n,)"),
        (spoil(layer1__weight=np.zeros((6, 9), np.float32)), "layer1 has shapes (6, 9), (6,); allowed: (n, 8), (n,)"),
        (spoil(layer0__bias=np.zeros((7,), np.float32)), f"layer0 has shapes (8, {INPUTS}), (7,)"),
        (spoil(layer0__weight=np.zeros((8, INPUTS))), "layer0 is float64/float32; allowed: float32"),
        (spoil(layer1__bias=np.array([0, 0, np.nan, 0, 0, 0], np.float32)), "layer1 holds values that are not finite"),
        (
            spoil(layer2__weight=np.zeros((3, 6), np.float32), layer2__bias=np.zeros(3, np.float32)),
            "outputs = 3; allowed: 4",
        ),
    ],
)
def test_wrong_tensors(tmp_path: Path, change: Callable[[Tensors], Tensors], expected: str) -> None:
    tensors, header = parts()
    blob = save(change(tensors), {"paceenv": json.dumps(header)})
    assert expected in refused(tmp_path / "a.safetensors", blob)
