"""Agents that paceenv did not train: each acts as its own library has it, and no code runs that was not asked for."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sb3_contrib import TQC, CrossQ, RecurrentPPO
from stable_baselines3 import PPO, SAC, TD3
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import paceenv.policies
from paceenv.cli import application
from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.policies.base import Policy
from paceenv.policies.policy_file import load_policy
from paceenv.policies.select import select_policy
from paceenv.sim.cluster import load_cluster

MECHANISMS = ("slack", "phase_shift")
RELU, SILU, TANH = torch.nn.ReLU, torch.nn.SiLU, torch.nn.Tanh
SMALL: dict[str, Any] = {"device": "cpu", "seed": 0}
REPLAY: dict[str, Any] = {**SMALL, "buffer_size": 16}
AGENTS: dict[str, Callable[[gymnasium.Env[Any, Any]], Any]] = {
    "ppo": lambda env: PPO("MlpPolicy", env, n_steps=16, batch_size=16, **SMALL),
    "sac": lambda env: SAC("MlpPolicy", env, policy_kwargs={"net_arch": [9, 8]}, **REPLAY),
    "tqc": lambda env: TQC("MlpPolicy", env, policy_kwargs={"net_arch": [9, 8], "activation_fn": SILU}, **REPLAY),
    "crossq": lambda env: CrossQ("MlpPolicy", env, policy_kwargs={"net_arch": [9, 8], "activation_fn": TANH}, **REPLAY),
    "td3": lambda env: TD3("MlpPolicy", env, policy_kwargs={"net_arch": [9]}, **REPLAY),
}


class Ours(gymnasium.Env[Any, Any]):
    """The spaces of paceenv/Pacing-v0 with two mechanisms, and nothing else: no engine to compile."""

    observation_space = gymnasium.spaces.Box(signals.LOW, signals.HIGH, (signals.SIGNALS,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (2 * len(MECHANISMS),), np.float32)

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        return np.zeros(signals.SIGNALS, np.float32), {}


def agent(name: str) -> Any:
    """An agent with random weights in all layers, normalisation included."""
    made = AGENTS[name](Ours())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, value in made.policy.state_dict().items():
            if value.dtype.is_floating_point and "log_std" not in key:
                value.copy_(0.4 * torch.randn(value.shape, generator=generator))
            if key.endswith("ra_var"):
                value.abs_()
    return made


def views(rows: int = 40) -> Any:
    return np.random.default_rng(3).uniform(-1, 1, (rows, signals.SIGNALS)).astype(np.float32)


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs)


NETWORKS: dict[str, Callable[[], Any]] = {
    "linear": lambda: linear(10, 4),
    "no bias": lambda: torch.nn.Linear(10, 4, bias=False),
    "cleanrl": lambda: torch.nn.Sequential(linear(10, 8), TANH(), linear(8, 8), TANH(), linear(8, 4)),
    "squashed silu": lambda: torch.nn.Sequential(linear(10, 8), SILU(), torch.nn.Sequential(linear(8, 4), TANH())),
    "passed": lambda: torch.nn.Sequential(torch.nn.Flatten(), linear(10, 8), RELU(), torch.nn.Dropout(), linear(8, 4)),
}


@pytest.mark.parametrize("name", [*AGENTS, *NETWORKS])
def test_an_agent_or_network_and_its_policy_file_act_alike(name: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    made, path = agent(name) if name in AGENTS else NETWORKS[name](), tmp_path / "mine.safetensors"
    digest = paceenv.policies.save_network(path, made, mechanisms=MECHANISMS, provenance={"seed": 0})
    kept = load_policy(path)
    assert (len(digest), kept.provenance["seed"], kept.policy.mechanisms) == (64, 0, MECHANISMS)
    seen = kept.policy.action(views())
    if name in AGENTS:
        seen, expected = np.clip(seen, -1.0, 1.0), made.predict(views(), deterministic=True)[0]
    else:
        expected = made.eval()(torch.from_numpy(views())).detach().numpy()
    np.testing.assert_allclose(seen, expected, atol=1e-5)
    assert np.ptp(seen) > 0.1


def test_one_mechanism_may_be_a_string_as_in_the_environment(tmp_path: Path) -> None:
    paceenv.policies.save_network(tmp_path / "a.safetensors", linear(10, 2), mechanisms="phase_shift")
    assert load_policy(tmp_path / "a.safetensors").policy.mechanisms == ("phase_shift",)


class Scaled(torch.nn.Linear):
    """Looks like a layer and is more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(x)


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (
            lambda: torch.nn.Sequential(linear(10, 8), torch.nn.ELU(), linear(8, 4)),
            "module ELU at this place; allowed: ",
        ),
        (lambda: torch.nn.Sequential(linear(10, 8), linear(8, 4)), "module Linear at this place"),
        (
            lambda: torch.nn.Sequential(linear(10, 8), RELU(), linear(8, 8), TANH(), linear(8, 4)),
            "relu, tanh; allowed: one kind",
        ),
        (lambda: torch.nn.Sequential(), "no layers"),
        (lambda: "m.zip", "network = 'm.zip'; allowed: an agent of Stable-Baselines3, or linear layers of torch"),
        (
            lambda: RecurrentPPO("MlpLstmPolicy", Ours(), n_steps=16, batch_size=16, **SMALL),
            "inputs = 256; allowed: 10, the signals and their means",
        ),
        (lambda: linear(10, 6), "outputs = 6; allowed: 4, two a mechanism"),
        (lambda: Scaled(10, 4), "actions differ from the original's by"),
        (
            lambda: PPO("MlpPolicy", VecNormalize(DummyVecEnv([Ours])), **SMALL),
            "observations that VecNormalize scaled; allowed: norm_obs=False",
        ),
        (lambda: PPO("MlpPolicy", "Pendulum-v1", **SMALL), "allowed: a Box from -1 to 1, as of paceenv/Pacing-v0"),
    ],
)
def test_what_no_policy_file_can_represent_is_refused_and_nothing_written(
    network: Callable[[], Any], expected: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with pytest.raises(InputError, match=re.escape(expected)):
        paceenv.policies.save_network(tmp_path / "a.safetensors", network(), mechanisms=MECHANISMS)
    assert not list(tmp_path.iterdir())


# module:Class

OWN = """
import numpy as np
from paceenv.core import pacing
from paceenv.policies.base import Policy

class Mine(Policy):
    name = "mine"
    def act(self, signals_BO):
        settings = pacing.off(len(signals_BO))
        settings[:, pacing.PHASE_SHIFT] = 0.1, 0.2
        return settings

class Plain:
    def act(self, signals_BO):
        return pacing.off(len(signals_BO))

class Flat(Plain):
    def act(self, signals_BO):
        return np.zeros(len(signals_BO))

class Nothing: pass

class Picky:
    def __init__(self, cluster): pass
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_agent", raising=False)
    (tmp_path / "my_agent.py").write_text(OWN)
    return tmp_path


CONSTANT = "static:phase_shift=0.1/0.2"


def test_evaluate_compares_agents_of_ones_own(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = ["my_agent:Mine", "my_agent:Plain"]
    assert application.run(["evaluate", *mine, CONSTANT, "--seeds", "2", "-i", "60", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    gains = {(row["policy"], row["cluster"]): row["throughput_gain"] for row in rows}
    clusters = {cluster for _, cluster in gains}
    assert len(gains) == 4 * len(clusters)
    for cluster in clusters:
        assert gains["my_agent:Mine", cluster] == pytest.approx(gains[CONSTANT, cluster])
        assert gains["my_agent:Plain", cluster] == 0.0
    assert any(gains["my_agent:Mine", cluster] != 0.0 for cluster in clusters)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my_agent:Missing", "AttributeError: module 'my_agent' has no attribute 'Missing'; allowed: module:Class"),
        ("no_such_module:Mine", "No module named 'no_such_module'"),
        ("my_agent:Nothing", "allowed: a class with act(signals), such as one of paceenv.policies.base.Policy"),
        ("my_agent:Picky", "TypeError"),
    ],
)
def test_a_class_that_is_no_policy_is_one_line(name: str, expected: str, own: Path) -> None:
    with pytest.raises(InputError, match=re.escape(expected)):
        select_policy(name, load_cluster("equal-slack"))


def test_settings_that_are_none_do_not_reach_the_engine(own: Path) -> None:
    policy = select_policy("my_agent:Flat", load_cluster("equal-slack"))
    assert isinstance(policy, Policy)
    with pytest.raises(InputError, match=r"act returned float64 of shape \(3,\); allowed: numbers of shape"):
        policy.act(views(3))


@pytest.mark.parametrize(
    "text", ["my_agent", "my_agent.py", "learned:preference=0.5", "./my_agent:Mine", "my_agent:Mine=1"]
)
def test_no_other_name_imports_a_module(text: str, own: Path) -> None:
    with contextlib.suppress(InputError):
        select_policy(text, load_cluster("equal-slack"))
    assert "my_agent" not in sys.modules
