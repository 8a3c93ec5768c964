"""The networks of policies in numpy: torch's numbers, rows that never mix, state on purpose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save

from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.live.decide.canary import block_plan
from paceenv.live.decide.pacer import RankPacer
from paceenv.policies.learned import Learned
from paceenv.policies.networks.forward import ACTIVATIONS, GATES, MAX_MEMORY, Cell, perceptron
from paceenv.policies.policy_file import PolicyFile, load_policy, save_policy

TORCH = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}
MODULES = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "silu": torch.nn.SiLU}
INPUTS, UNITS = signals.SIGNALS, 6


def recurrent(kind: str, seed: int = 0, size: float = 0.4) -> Learned:
    rng = np.random.default_rng(seed)

    def pair(out: int, inputs: int) -> tuple[Any, Any]:
        return tuple(rng.normal(0.0, size, shape).astype(np.float32) for shape in ((out, inputs), (out,)))  # type: ignore[return-value]

    gates = GATES[kind] * UNITS
    cell = Cell(kind, pair(gates, INPUTS), pair(gates, UNITS))
    return Learned([pair(5, UNITS), pair(4, 5)], ["slack", "phase_shift"], cell=cell)


def in_torch(policy: Learned) -> tuple[Any, Any]:
    """The cell and the layers of a policy as torch's modules."""
    assert policy.cell is not None
    cell = TORCH[policy.cell.kind](INPUTS, UNITS)
    pairs = [(cell.weight_ih_l0, cell.bias_ih_l0), (cell.weight_hh_l0, cell.bias_hh_l0)]
    linear = [torch.nn.Linear(weight.shape[1], weight.shape[0]) for weight, _ in policy.layers]
    pairs += [(one.weight, one.bias) for one in linear]
    with torch.no_grad():
        for theirs, ours in zip(pairs, policy.weights, strict=True):
            for to, value in zip(theirs, ours, strict=True):
                to.copy_(torch.from_numpy(value))
    return cell, torch.nn.Sequential(linear[0], torch.nn.Tanh(), linear[1])


@pytest.mark.parametrize("kind", GATES)
def test_a_cell_is_torch_s_over_a_long_run(kind: str) -> None:
    policy = recurrent(kind)
    cell, layers = in_torch(policy)
    x_TBO = np.random.default_rng(1).uniform(-1, 1, (200, 5, INPUTS)).astype(np.float32)
    with torch.no_grad():
        expected = layers(cell(torch.from_numpy(x_TBO))[0]).numpy()
    found = np.stack([policy.action(x) for x in x_TBO])
    assert np.ptp(found) > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_torch_s(activation: str) -> None:
    rng = np.random.default_rng(0)
    layers = [(rng.normal(size=(7, 4)).astype(np.float32), rng.normal(size=7).astype(np.float32)) for _ in range(1)]
    layers.append((rng.normal(size=(3, 7)).astype(np.float32), np.zeros(3, np.float32)))
    x = np.concatenate([rng.normal(size=(50, 4)), [[1e4, -1e4, 0, 300]]]).astype(np.float32)
    hidden = MODULES[activation]()(torch.from_numpy(x @ layers[0][0].T + layers[0][1]))
    expected = hidden.numpy() @ layers[1][0].T
    np.testing.assert_allclose(perceptron(x, layers, activation), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", GATES)
def test_rows_of_a_cell_do_not_see_each_other_to_the_bit(kind: str) -> None:
    together, x_TBO = recurrent(kind), np.random.default_rng(2).uniform(-1, 1, (30, 6, INPUTS)).astype(np.float32)
    together.reset(6)
    alone = [recurrent(kind) for _ in range(6)]
    for one in alone:
        one.reset(1)
    for t, x_BO in enumerate(x_TBO):
        if t == 20:
            together.restart(np.arange(6) == 3)
            alone[3].reset(1)
        found = together.act(x_BO)
        np.testing.assert_array_equal(found, np.concatenate([a.act(x[None]) for a, x in zip(alone, x_BO, strict=True)]))


@pytest.mark.parametrize("kind", GATES)
def test_a_recurrent_policy_s_file_keeps_every_bit(kind: str, tmp_path: Path) -> None:
    before = recurrent(kind)
    save_policy(tmp_path / "a.safetensors", PolicyFile(before))
    after = load_policy(tmp_path / "a.safetensors").policy
    for x in np.random.default_rng(3).uniform(-1, 1, (9, 4, INPUTS)).astype(np.float32):
        np.testing.assert_array_equal(after.act(x), before.act(x))
    after.reset(4)
    first = recurrent(kind)
    np.testing.assert_array_equal(after.act(x), first.act(x), "forgotten at a reset")


def spoiled(path: Path, tensors: dict[str, Any], **header: Any) -> str:
    """The refusal of a recurrent policy's file with some tensors and entries of its header replaced."""
    save_policy(path, PolicyFile(recurrent("gru")))
    with safe_open(path, framework="numpy") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        known = json.loads(file.metadata()["paceenv"])
    parts = {name: value for name, value in (parts | tensors).items() if value is not None}
    path.write_bytes(save(parts, {"paceenv": json.dumps(known | header)}))
    with pytest.raises(InputError) as caught:
        load_policy(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def zeros(*shape: int) -> Any:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("tensors", "header", "expected"),
    [
        ({}, {"cell": "rnn"}, "cell = 'rnn'; allowed: lstm, gru, none"),
        ({}, {"cell": ["gru"]}, "cell = ['gru']; allowed: lstm, gru, none"),
        ({}, {"cell": "lstm"}, "cell.view has shapes (18, 10), (18,); allowed: (24, 10), (24,)"),
        ({}, {"cell": None}, "tensors ['cell.memory.bias'"),
        ({}, {"activation": "gelu"}, "activation = 'gelu'; allowed: tanh, relu, silu"),
        ({"cell.view.bias": None}, {}, "no tensors of a cell; allowed with cell = gru: cell.view, cell.memory"),
        ({"cell.memory.weight": zeros(18)}, {}, "cell.view has shapes (18, 10), (18,); allowed: (0, 10), (0,)"),
        ({"cell.memory.weight": zeros(0, 0), "cell.memory.bias": zeros(0)}, {}, "cell.view has shapes"),
        ({"cell.memory.weight": zeros(18, 6) * np.nan}, {}, "cell.memory holds values that are not finite numbers"),
        ({"layer0.weight": zeros(5, 7)}, {}, "layer0 has shapes (5, 7), (5,); allowed: (n, 6), (n,)"),
        (
            {},
            {"kind": "distilled", "candidates": [{"slack": [0.1, 0.1]}], "margin": 0, "hysteresis": 0},
            "cell = 'gru'; allowed: none, which",
        ),
    ],
)
def test_a_wrong_cell_is_one_line(
    tensors: dict[str, Any], header: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    assert expected in spoiled(tmp_path / "a.safetensors", tensors, **header)


def test_how_long_a_cell_remembers_follows_from_its_weights() -> None:
    """A GRU whose update gate keeps 90 % a step forgets 1/e in ten; one that keeps all has nothing to forget."""

    def keeping(share: float) -> Learned:
        view, memory = zeros(3 * UNITS, INPUTS), zeros(3 * UNITS, UNITS)
        bias = zeros(3 * UNITS)
        bias[UNITS : 2 * UNITS] = np.log(share / (1 - share)) if share < 1.0 else 40.0
        view[2 * UNITS :] = np.random.default_rng(0).normal(size=(UNITS, INPUTS))
        cell = Cell("gru", (view, bias), (memory, zeros(3 * UNITS)))
        return Learned([(zeros(2, UNITS), zeros(2))], ["slack"], cell=cell)

    assert keeping(0.9).memory_iterations() == 10 * keeping(0.9).interval_iterations
    assert keeping(1.0).memory_iterations() == 0
    assert keeping(0.999).memory_iterations() == MAX_MEMORY * keeping(0.999).interval_iterations
    fresh, old = keeping(0.5), keeping(0.99)
    assert block_plan([old]).warm_iterations > block_plan([fresh]).warm_iterations


def test_a_live_rank_carries_its_state_over_blocks_without_pacing() -> None:
    """The cell moves on once for each interval in which the policy acts, and stands still in the others."""
    policy, seen = recurrent("lstm"), list[Any]()
    act = policy.act

    def listening(view: Any) -> Any:
        seen.append(view.copy())
        return act(view)

    policy.act = listening  # type: ignore[method-assign]
    pacer, rng = RankPacer(policy, cap_s=0.1, has_barrier=False), np.random.default_rng(0)
    for t in range(240):
        pacer.iteration(0.03 + 0.01 * rng.random(), 0.0, 0.1 + 0.02 * rng.random(), acting=0 if t // 60 % 2 else None)
    assert len(seen) == 6
    again = recurrent("lstm")
    again.reset(1)
    settings = [again.act(view) for view in seen]
    np.testing.assert_array_equal(pacer._courses[0].settings_M2, settings[-1][0])
    again.reset(1)
    assert not np.array_equal(again.act(seen[-1]), settings[-1]), "the state matters"
