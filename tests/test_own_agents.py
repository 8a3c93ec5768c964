"""Agents that paceenv did not train: each acts as its own library has it, and no code runs that was not asked for."""

from __future__ import annotations

import io
import json
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from sb3_contrib import TQC, CrossQ, RecurrentPPO
from stable_baselines3 import PPO, SAC, TD3

import paceenv.policies
from paceenv.cli import application
from paceenv.core import signals
from paceenv.core.errors import InputError
from paceenv.policies import foreign
from paceenv.policies.foreign import foreign_policy
from paceenv.policies.learned import Learned
from paceenv.policies.policy_file import load_policy

MECHANISMS = ("slack", "phase_shift")
OPTION = ":mechanisms=slack/phase_shift"
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


def assert_acts_alike(policy: Any, made: Any) -> None:
    x = views()
    seen = np.clip(policy.action(x), -1.0, 1.0)
    np.testing.assert_allclose(seen, made.predict(x, deterministic=True)[0], atol=1e-5)
    assert np.ptp(seen) > 0.1


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_s_archive_and_its_policy_file_act_alike_and_its_pickles_stay_closed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = agent(name)
    made.save(tmp_path / "agent.zip")

    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    import cloudpickle

    for module in (pickle, cloudpickle):
        monkeypatch.setattr(module, "loads", forbidden)
        monkeypatch.setattr(module, "load", forbidden)
    policy = foreign_policy(f"{tmp_path / 'agent.zip'}{OPTION},interval_iterations=10")
    monkeypatch.undo()
    assert isinstance(policy, Learned)
    assert (policy.mechanisms, policy.interval_iterations) == (MECHANISMS, 10)
    assert_acts_alike(policy, made)
    digest = paceenv.policies.save_network(
        tmp_path / "mine.safetensors", made, mechanisms=MECHANISMS, provenance={"seed": 0}
    )
    kept = load_policy(tmp_path / "mine.safetensors")
    assert len(digest) == 64
    assert kept.provenance["seed"] == 0
    assert_acts_alike(kept.policy, made)


def linear(inputs: int, outputs: int) -> torch.nn.Linear:
    return torch.nn.Linear(inputs, outputs)


NETWORKS: dict[str, Callable[[], Any]] = {
    "linear": lambda: linear(10, 4),
    "no bias": lambda: torch.nn.Linear(10, 4, bias=False),
    "cleanrl": lambda: torch.nn.Sequential(linear(10, 8), TANH(), linear(8, 8), TANH(), linear(8, 4)),
    "squashed silu": lambda: torch.nn.Sequential(linear(10, 8), SILU(), torch.nn.Sequential(linear(8, 4), TANH())),
    "passed": lambda: torch.nn.Sequential(torch.nn.Flatten(), linear(10, 8), RELU(), torch.nn.Dropout(), linear(8, 4)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_a_saved_network_acts_as_torch_s(name: str, tmp_path: Path) -> None:
    torch.manual_seed(2)
    network = NETWORKS[name]()
    paceenv.policies.save_network(tmp_path / "a.safetensors", network, mechanisms=MECHANISMS)
    policy = load_policy(tmp_path / "a.safetensors").policy
    with torch.no_grad():
        expected = network.eval()(torch.from_numpy(views())).numpy()
    np.testing.assert_allclose(policy.action(views()), expected, atol=1e-5)


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
        (
            lambda: RecurrentPPO("MlpLstmPolicy", Ours(), n_steps=16, batch_size=16, **SMALL),
            "a recurrent cell with weights (lstm_actor.weight_ih_l0); allowed: none",
        ),
        (lambda: linear(10, 6), "6 actions; allowed: 4 for 2 mechanisms"),
        (
            lambda: linear(40, 4),
            "preference = None; allowed: a number with 11 inputs, None with 10; the network has 40",
        ),
        (lambda: Scaled(10, 4), "actions differ from the original's by"),
        (lambda: PPO("MlpPolicy", "Pendulum-v1", **SMALL), "allowed: a Box from -1 to 1, as of paceenv/Pacing-v0"),
    ],
)
def test_what_no_policy_file_can_represent_is_refused_and_nothing_written(
    network: Callable[[], Any], expected: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    with pytest.raises(InputError) as caught:
        paceenv.policies.save_network(tmp_path / "a.safetensors", network(), mechanisms=MECHANISMS)
    assert expected in str(caught.value)
    assert not list(tmp_path.iterdir())


def refused(text: str) -> str:
    with pytest.raises(InputError) as caught:
        foreign_policy(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


class Evil:
    """Runs code where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def archive(path: Path, **parts: bytes) -> str:
    names = {"weights": "policy.pth"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(names.get(name, name), content)
    return f"{path}{OPTION}"


def saved(**tensors: Any) -> bytes:
    blob = io.BytesIO()
    torch.save(tensors, blob)
    return blob.getvalue()


def test_hostile_archives_run_nothing_and_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, trap = tmp_path / "a.zip", tmp_path / "trap"
    evil = io.BytesIO()
    torch.save({"action_net.weight": Evil(trap)}, evil)
    assert "not weights alone" in refused(archive(path, data=b"{}", weights=evil.getvalue()))
    assert "not weights alone" in refused(archive(path, data=b"{}", weights=pickle.dumps(Evil(trap))))
    kwargs = {":type:": "<class 'dict'>", ":serialized:": "gASV", "activation_fn": "<class 'evil.ELU'>"}
    text = archive(path, data=json.dumps({"policy_kwargs": kwargs}).encode(), weights=saved(a=torch.zeros(1)))
    assert "activation_fn = <class 'evil.ELU'>; allowed: tanh, relu, silu, or load it in a script" in refused(text)
    short = saved(**{"action_net.weight": torch.zeros(()), "value_net.weight": torch.zeros(1)})
    assert "weights that fit no network (" in refused(archive(path, data=b"{}", weights=short))
    assert "weights a; allowed: an actor of PPO" in refused(archive(path, data=b"{}", weights=saved(a=torch.zeros(1))))
    extractor = saved(**{"features_extractor.cnn.0.weight": torch.zeros(1)})
    assert "a features extractor with weights" in refused(archive(path, data=b"{}", weights=extractor))
    assert "not an agent of Stable-Baselines3" in refused(archive(path, data=b"{}"))
    assert "not an agent of Stable-Baselines3" in refused(archive(path, data=b"[" * 10**5, weights=b""))
    monkeypatch.setattr(foreign, "_MAX_BYTES", 10**6)
    assert "data of 3000000 bytes; allowed: at most" in refused(archive(path, data=bytes(3 * 10**6), weights=b""))
    path.write_bytes(b"PK nothing")
    assert "not an agent of Stable-Baselines3" in refused(f"{path}{OPTION}")
    assert not trap.exists()


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("", "mechanisms = ''; allowed: agent.zip:mechanisms=slack/phase_shift, in the order of its actions"),
        (":mechanisms=slack", "4 actions; allowed: 2 for 1 mechanisms"),
        (f"{OPTION},gamma=1", "option gamma=1; allowed: mechanisms=, interval_iterations=, preference="),
        (f"{OPTION},interval_iterations=0", "interval_iterations = 0; allowed: at least 1"),
        (f"{OPTION},preference=0.5", "preference = 0.5; allowed: a number with 11 inputs, None with 10"),
    ],
)
def test_wrong_options_of_an_archive(option: str, expected: str, tmp_path: Path) -> None:
    agent("ppo").save(tmp_path / "agent.zip")
    assert expected in refused(f"{tmp_path / 'agent.zip'}{option}")


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

class Wide(Plain):
    def act(self, signals_BO):
        return super().act(signals_BO) + 3

class Nan(Plain):
    def act(self, signals_BO):
        return super().act(signals_BO) * np.nan

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
    agent("sac").save(own / "agent.zip")
    mine = [
        "my_agent:Mine",
        "my_agent:Plain",
        f"agent.zip{OPTION}",
        "static:phase_shift=0.1/0.2",
    ]
    assert application.run(["evaluate", *mine, CONSTANT, "--seeds", "2", "-i", "60", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)
    gains = {(row["policy"], row["cluster"]): row["throughput_gain"] for row in rows}
    clusters = {cluster for _, cluster in gains}
    assert len(gains) == 5 * len(clusters)
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
    assert expected in refused(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Wide", "act returned a threshold of 3; allowed: 0 to 2"),
        ("Nan", "act returned a threshold of nan"),
        ("Flat", "act returned float64 of shape (3,); allowed: numbers of shape (3, 6, 2)"),
    ],
)
def test_settings_that_are_none_do_not_reach_the_engine(name: str, expected: str, own: Path) -> None:
    policy = foreign_policy(f"my_agent:{name}")
    assert policy is not None
    with pytest.raises(InputError) as caught:
        policy.act(views(3))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "text", ["my_agent", "my_agent.py", "learned:preference=0.5", "./my_agent:Mine", "my_agent:Mine=1"]
)
def test_no_other_name_imports_a_module(text: str, own: Path) -> None:
    assert foreign_policy(text) is None
    assert "my_agent" not in sys.modules
