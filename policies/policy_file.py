"""The policy file, contract 4: one ``.safetensors`` with weights, schemas, calibrated range and provenance.

Loading is data only: tensors and a JSON string, checked against the schemas of the code that is running. No pickle, no
code. The file holds no date, so that the same training gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError, out_of_range
from paceenv.core.files import atomic_write
from paceenv.core.limits import Limits
from paceenv.policies.distilled import Distilled
from paceenv.policies.learned import Learned
from paceenv.policies.networks import ACTIVATIONS, MAX_INTERVALS, Layer, time_scales

FORMAT = "paceenv.policy/1"
ACTION_SCHEMA = "paceenv.pacing/1"
KINDS = ("network", "distilled")
"""What the network's outputs mean: an action, or the gains of candidate settings."""
OUTPUTS = ("linear", "tanh")
_SCHEMAS = {
    "format": FORMAT,
    "observation_schema": signals.SCHEMA,
    "observation_names": list(signals.NAMES),
    "action_schema": ACTION_SCHEMA,
}
_MAX_LAYERS, _MAX_BYTES, _MAX_INTERVAL = 16, 64 << 20, 10_000


@dataclass(frozen=True)
class PolicyFile:
    """The content of a policy file. A loaded policy knows its calibrated range.

    Attributes:
        policy: the network, its default preference, and the range of preferences it was trained for.
        calibrated_range: for each signal the interval ``[low, high]`` met in training.
        provenance: resolved config, git commit, seeds and scores.
    """

    policy: Learned
    calibrated_range: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def limits(self) -> Limits | None:
        """The limits of delays that it was trained with, from its training config; None where it has none."""
        record: Any = self.provenance
        for key in ("config", "environment", "limits"):
            record = record.get(key) if isinstance(record, Mapping) else None
        try:
            return Limits(**record) if isinstance(record, Mapping) else None
        except (TypeError, InputError):
            return None


def save_policy(path: str | os.PathLike[str], content: PolicyFile) -> str:
    """Write a policy file whole or not at all; returns its SHA-256 digest.

    Args:
        path: of the file to write.
        content: weights, schemas and provenance.
    """
    policy, tensors = content.policy, dict[str, NDArray[np.float32]]()
    for i, (weight, bias) in enumerate(policy.layers):
        tensors[f"layer{i}.weight"] = np.ascontiguousarray(weight, np.float32)
        tensors[f"layer{i}.bias"] = np.ascontiguousarray(bias, np.float32)
    preference = None
    if policy.preference is not None and policy.preference_range is not None:
        preference = {"range": list(policy.preference_range), "default": policy.preference}
    header: dict[str, Any] = {
        **_SCHEMAS,
        "mechanisms": list(policy.mechanisms),
        "activation": policy.activation,
        "preference": preference,
        "memory_intervals": list(policy.memory_intervals),
        "change_intervals": policy.change_intervals,
        "interval_iterations": policy.interval_iterations,
        "calibrated_range": {k: list(v) for k, v in content.calibrated_range.items()},
        "provenance": dict(content.provenance),
    }
    if isinstance(policy, Distilled):
        always, *candidates = (
            {m: list(pair) for m, pair in one.items()} for one in (policy.always, *policy.candidates)
        )
        header |= {"kind": "distilled", "candidates": candidates, **({"always": always} if always else {})}
        header |= {"margin": policy.margin, "hysteresis": policy.hysteresis}
    else:
        header |= {"kind": "network", "output": "tanh" if policy.squashes else "linear"}
    blob = save(tensors, {"paceenv": json.dumps(header, sort_keys=True)})
    atomic_write(path, blob)
    return hashlib.sha256(blob).hexdigest()


def load_policy(path: str | os.PathLike[str]) -> PolicyFile:
    """Read and check a policy file; anything wrong with it is an :class:`InputError` naming the file.

    Args:
        path: of the file to read.
    """
    target = Path(path)
    if not target.is_file():
        raise InputError(f"{target}: no such policy file")
    if target.stat().st_size > _MAX_BYTES:
        raise InputError(f"{target}: {target.stat().st_size} bytes; allowed: at most {_MAX_BYTES} for a policy file")
    try:
        with safe_open(target, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        hint = "; paceenv.policies.save_network makes one of an agent" if target.suffix == ".zip" else ""
        raise InputError(f"{target}: not a readable .safetensors file: {error}{hint}") from None
    header = _Header(target, metadata)
    preference, preference_range = header.preference()
    memory, change = time_scales(header.get("memory_intervals", 0), str(target)), header.get("change_intervals", 0)
    candidates, mechanisms = header.candidates(), header["mechanisms"]
    inputs, has_preference = signals.SIGNALS * (1 + len(memory) + (change > 0)), preference is not None
    if candidates is None:
        inputs, outputs, why = inputs + has_preference, 2 * len(mechanisms), f"{len(mechanisms)} mechanisms"
    else:
        outputs, why = (1 + has_preference) * len(candidates), f"{len(candidates)} candidates"
        why += " and a preference" if has_preference else ""
    layers = _layers(target, tensors, inputs)
    if len(layers[-1][1]) != outputs:
        raise InputError(f"{target}: {len(layers[-1][1])} outputs; allowed: {outputs} for {why}")
    ranges = header.ranges()
    common: dict[str, Any] = {
        "name": target.stem,
        "preference": preference,
        "preference_range": preference_range,
        "calibrated_range": ranges,
        "memory_intervals": memory,
        "change_intervals": change,
        "interval_iterations": header["interval_iterations"],
    }
    policy: Learned
    if candidates is None:
        squashes = header["output"] == "tanh"
        policy = Learned(layers, mechanisms, squashes=squashes, activation=header["activation"], **common)
    else:
        policy = Distilled(
            layers,
            candidates,
            margin=header.percent("margin"),
            hysteresis=header.percent("hysteresis"),
            always=header.setting("always", header.get("always", {})),
            **common,
        )
    return PolicyFile(policy, ranges, header["provenance"])


class _Header(dict[str, Any]):
    """The entries of a policy file's header, checked."""

    def __init__(self, path: Path, metadata: Mapping[str, str]) -> None:
        self.where = str(path)
        try:
            header = json.loads(metadata["paceenv"])
        except KeyError:
            raise InputError(f"{path}: no paceenv header; allowed: files written by paceenv train") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: the paceenv header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise InputError(f"{path}: the paceenv header is a {type(header).__name__}; allowed: a mapping")
        super().__init__(header)
        for key, value in _SCHEMAS.items():
            if self.get(key) != value:
                raise self.wrong(key, f"{value!r}, which this version understands")
        self.one_of("kind", KINDS)
        self.one_of("activation", ("tanh",) if self["kind"] == "distilled" else ACTIVATIONS)
        if self["kind"] == "network":
            self.one_of("output", OUTPUTS)
        mechanisms = self.get("mechanisms")
        known = isinstance(mechanisms, list) and all(m in pacing.MECHANISMS for m in mechanisms)
        if not known or not mechanisms or len(set(mechanisms)) < len(mechanisms):
            raise self.wrong("mechanisms", f"different ones of {', '.join(pacing.MECHANISMS)}")
        self.integer("change_intervals", 0, MAX_INTERVALS)
        self.integer("interval_iterations", 1, _MAX_INTERVAL)
        if not isinstance(self.get("provenance"), dict):
            raise self.wrong("provenance", "a mapping")

    def wrong(self, key: str, allowed: str) -> InputError:
        return out_of_range(key, self.get(key), allowed, self.where)

    def one_of(self, key: str, allowed: Collection[str]) -> None:
        value = self.get(key)
        if not isinstance(value, str) or value not in allowed:
            raise self.wrong(key, f"one of {', '.join(allowed)}")

    def integer(self, key: str, low: int, high: int) -> None:
        value = self.get(key)
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")

    def percent(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
            raise self.wrong(key, "a number of at least 0 (% of the step)")
        return float(value)

    def candidates(self) -> list[dict[str, tuple[float, float]]] | None:
        """The settings that a distilled policy chooses from; None for a network."""
        if self["kind"] == "network":
            return None
        if not isinstance(self.get("candidates"), list):
            raise self.wrong("candidates", '[{"slack": [threshold, window]}, ...]')
        return [self.setting("candidates", one) for one in self["candidates"]]

    def setting(self, key: str, one: Any) -> dict[str, tuple[float, float]]:
        """One setting of entry ``key``."""
        try:
            return {str(mechanism): (float(threshold), float(window)) for mechanism, (threshold, window) in one.items()}
        except (TypeError, ValueError, AttributeError, OverflowError):
            raise self.wrong(key, '{"slack": [threshold, window]} a setting') from None

    def preference(self) -> tuple[float | None, tuple[float, float] | None]:
        """Default preference and range; both None for a policy without."""
        given = self.get("preference")
        if given is None:
            return None, None
        try:
            low, high = (float(end) for end in given["range"])
            default = float(given["default"])
        except (TypeError, ValueError, KeyError, OverflowError):
            raise self.wrong("preference", '{"range": [low, high], "default": weight} or null') from None
        if not 0.0 <= low <= default <= high < math.inf:
            raise self.wrong("preference", "numbers of at least 0 in the order low, default, high")
        return default, (low, high)

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The calibrated range of each signal."""
        try:
            ranges = {str(k): (float(low), float(high)) for k, (low, high) in dict(self["calibrated_range"]).items()}
        except (KeyError, TypeError, ValueError):
            raise self.wrong("calibrated_range", "signal: [low, high]") from None
        for name, (low, high) in ranges.items():
            if name not in signals.NAMES or not -math.inf < low <= high < math.inf:
                raise self.wrong("calibrated_range", f"finite numbers, the lower first, of {', '.join(signals.NAMES)}")
        return ranges


def _layers(path: Path, tensors: Mapping[str, NDArray[Any]], inputs: int) -> Sequence[Layer]:
    count = len(tensors) // 2
    names = {f"layer{i}.{part}" for i in range(count) for part in ("weight", "bias")}
    if not 1 <= count <= _MAX_LAYERS or set(tensors) != names:
        raise InputError(
            f"{path}: tensors {sorted(tensors)[:6]}; allowed: layer0.weight, layer0.bias, layer1.weight, ..."
        )
    layers, width = list[Layer](), inputs
    for i in range(count):
        weight, bias = tensors[f"layer{i}.weight"], tensors[f"layer{i}.bias"]
        if weight.dtype != np.float32 or bias.dtype != np.float32:
            raise InputError(f"{path}: layer{i} is {weight.dtype}/{bias.dtype}; allowed: float32")
        if not (weight.ndim == 2 and weight.shape[1] == width and bias.shape == weight.shape[:1] and len(bias)):
            shapes = f"{weight.shape}, {bias.shape}"
            raise InputError(f"{path}: layer{i} has shapes {shapes}; allowed: (n, {width}), (n,)")
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise InputError(f"{path}: layer{i} holds values that are not finite numbers")
        layers.append((weight, bias))
        width = len(bias)
    return layers
