"""The policy file, contract 4: one ``.safetensors`` with weights, schemas, calibrated range and provenance.

Loading is data only: tensors and a JSON string, checked against the schemas of the code that is running. No pickle, no
code. The file holds no date, so that the same training gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from paceenv.core import pacing, signals
from paceenv.core.errors import InputError, out_of_range, short_repr
from paceenv.core.files import atomic_write
from paceenv.core.limits import Limits
from paceenv.core.renames import RENAMED_MECHANISMS
from paceenv.policies.base import INTERVAL_ITERATIONS
from paceenv.policies.distilled import Distilled
from paceenv.policies.learned import Learned
from paceenv.policies.networks.forward import ACTIVATIONS, GATES, Cell, Layer
from paceenv.policies.networks.observation_average import MAX_INTERVALS, time_scales

FORMAT = "paceenv.policy/1"
ACTION_SCHEMA = "paceenv.pacing/1"
KINDS = ("network", "distilled")
"""What the network's outputs mean: an action, or the gains of candidate settings."""
OUTPUTS = ("linear", "tanh")
CELL = ("cell.view", "cell.memory")
"""Names of a recurrent cell's weights; the layers are ``layer0``, ``layer1``, ..."""
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
        found: Any = self.provenance
        for key in ("config", "environment", "limits"):
            found = found.get(key) if isinstance(found, Mapping) else None
        try:
            return Limits(**found) if isinstance(found, Mapping) else None
        except (TypeError, InputError):
            return None


def save_policy(path: str | os.PathLike[str], content: PolicyFile) -> str:
    """Write a policy file whole or not at all; returns its SHA-256 digest.

    Args:
        path: of the file to write.
        content: weights, schemas and provenance.
    """
    tensors: dict[str, NDArray[np.float32]] = {}
    policy = content.policy
    names = [*(CELL if policy.cell else ()), *(f"layer{i}" for i in range(len(policy.layers)))]
    for name, (weight, bias) in zip(names, policy.weights, strict=True):
        tensors[f"{name}.weight"] = np.ascontiguousarray(weight, np.float32)
        tensors[f"{name}.bias"] = np.ascontiguousarray(bias, np.float32)
    header = {
        "format": FORMAT,
        "observation_schema": signals.SCHEMA,
        "observation_names": list(signals.NAMES),
        "action_schema": ACTION_SCHEMA,
        "mechanisms": list(policy.mechanisms),
        "activation": policy.activation,
        "preference": _preference_header(policy),
        "memory_intervals": list(policy.memory_intervals),
        "change_intervals": policy.change_intervals,
        "interval_iterations": policy.interval_iterations,
        **({} if policy.cell is None else {"cell": policy.cell.kind}),
        **_kind_header(policy),
        "calibrated_range": {k: list(v) for k, v in content.calibrated_range.items()},
        "provenance": dict(content.provenance),
    }
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
        raise InputError(f"{target}: not a readable .safetensors file: {error}") from None
    header = _header(target, metadata)
    default, preference_range = _preference(target, header.get("preference"))
    memory = time_scales(header.get("memory_intervals", 0), str(target))
    change = header.get("change_intervals", 0)
    if type(change) is not int or not 0 <= change <= MAX_INTERVALS:
        raise out_of_range("change_intervals", change, f"an integer from 0 to {MAX_INTERVALS}", str(target))
    views = signals.SIGNALS * (1 + len(memory) + (change > 0))
    candidates = _candidates(target, header)
    outputs, why = 2 * len(header["mechanisms"]), f"{len(header['mechanisms'])} mechanisms"
    if candidates is None:
        inputs = views + (default is not None)
    elif default is None:
        inputs, outputs, why = views, len(candidates), "as many candidates"
    else:
        inputs, outputs, why = views, 2 * len(candidates), f"{len(candidates)} candidates and a preference"
    cell = _cell(target, header, tensors, inputs)
    layers = _layers(target, tensors, inputs if cell is None else cell.units)
    if len(layers[-1][1]) != outputs:
        raise InputError(f"{target}: {len(layers[-1][1])} outputs; allowed: {outputs} for {why}")
    ranges = _ranges(target, header.get("calibrated_range", {}))
    provenance = header.get("provenance", {})
    if not isinstance(provenance, dict):
        raise InputError(f"{target}: provenance is a {type(provenance).__name__}; allowed: a mapping")
    interval = _interval(target, header, provenance)
    if candidates is None:
        policy = Learned(
            layers,
            header["mechanisms"],
            target.stem,
            default,
            preference_range=preference_range,
            calibrated_range=ranges,
            memory_intervals=memory,
            change_intervals=change,
            interval_iterations=interval,
            squashes=header.get("output", "linear") == "tanh",
            activation=header["activation"],
            cell=cell,
        )
    else:
        policy = Distilled(
            layers,
            candidates,
            margin=_percent(target, header, "margin"),
            hysteresis=_percent(target, header, "hysteresis"),
            name=target.stem,
            preference=default,
            preference_range=preference_range,
            calibrated_range=ranges,
            memory_intervals=memory,
            change_intervals=change,
            interval_iterations=interval,
            always=_setting(target, header, "always", header.get("always", {})),
            checks_itself=len(candidates) > 1,
        )
    return PolicyFile(policy, ranges, provenance)


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    try:
        header = json.loads(metadata["paceenv"])
    except KeyError:
        raise InputError(f"{path}: no paceenv header; allowed: files written by paceenv train") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the paceenv header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: the paceenv header is a {type(header).__name__}; allowed: a mapping")
    expected = {
        "format": FORMAT,
        "observation_schema": signals.SCHEMA,
        "observation_names": list(signals.NAMES),
        "action_schema": ACTION_SCHEMA,
    }
    for key, value in expected.items():
        if header.get(key) != value:
            raise out_of_range(key, header.get(key), f"{value!r}, which this version understands", str(path))
    distilled = header.get("kind") == "distilled"
    activations, cells = (("tanh",), (None,)) if distilled else (tuple(ACTIVATIONS), (*GATES, None))
    for key, allowed in (("activation", activations), ("cell", cells)):
        if header.get(key) not in allowed:
            words = ", ".join("none" if one is None else one for one in allowed)
            raise out_of_range(key, header.get(key), f"{words}, which this version understands", str(path))
    mechanisms = header.get("mechanisms")
    if isinstance(mechanisms, list):  # files of earlier versions stay valid without a warning
        header["mechanisms"] = mechanisms = [RENAMED_MECHANISMS.get(str(name), name) for name in mechanisms]
    if (
        not isinstance(mechanisms, list)
        or not mechanisms
        or any(m not in pacing.MECHANISMS for m in mechanisms)
        or len(set(mechanisms)) < len(mechanisms)
    ):
        raise InputError(
            f"{path}: mechanisms = {short_repr(mechanisms)}; allowed: different ones of {', '.join(pacing.MECHANISMS)}"
        )
    return header


def _interval(path: Path, header: Mapping[str, Any], provenance: Mapping[str, Any]) -> int:
    """Iterations of the control interval; files before it had an entry of its own have it in their training config."""
    value: Any = provenance
    for key in ("config", "environment", "interval_iterations"):
        value = value.get(key) if isinstance(value, dict) else None
    interval = header.get("interval_iterations", INTERVAL_ITERATIONS if value is None else value)
    if type(interval) is not int or not 1 <= interval <= _MAX_INTERVAL:
        raise out_of_range("interval_iterations", interval, f"an integer from 1 to {_MAX_INTERVAL}", str(path))
    return interval


def _kind_header(policy: Learned) -> dict[str, Any]:
    """What else a policy of its kind needs."""
    if not isinstance(policy, Distilled):
        return {"kind": "network", "output": "tanh" if policy.squashes else "linear"}
    always, *candidates = ({m: list(pair) for m, pair in one.items()} for one in (policy.always, *policy.candidates))
    return {
        "kind": "distilled",
        "candidates": candidates,
        **({"always": always} if always else {}),
        "margin": policy.margin,
        "hysteresis": policy.hysteresis,
    }


def _candidates(path: Path, header: Mapping[str, Any]) -> list[dict[str, tuple[float, float]]] | None:
    """The settings that a distilled policy chooses from; None for a file of another kind, as older ones are."""
    kind, output = header.get("kind", "network"), header.get("output", "linear")
    for key, value, allowed in (("kind", kind, KINDS), ("output", output, OUTPUTS)):
        if value not in allowed:
            raise out_of_range(key, value, f"one of {', '.join(allowed)}", str(path))
    if kind == "network":
        return None
    candidates = header.get("candidates")
    if not isinstance(candidates, list):
        raise out_of_range("candidates", candidates, '[{"slack": [threshold, window]}, ...]', str(path))
    return [_setting(path, header, "candidates", one) for one in candidates]


def _setting(path: Path, header: Mapping[str, Any], key: str, one: Any) -> dict[str, tuple[float, float]]:
    """One setting of entry ``key``."""
    try:
        return {str(mechanism): (float(threshold), float(window)) for mechanism, (threshold, window) in one.items()}
    except (TypeError, ValueError, AttributeError, OverflowError):
        raise out_of_range(key, header.get(key), '{"slack": [threshold, window]} a setting', str(path)) from None


def _percent(path: Path, header: Mapping[str, Any], key: str) -> float:
    value = header.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise out_of_range(key, value, "a number of at least 0 (% of the step)", str(path))
    return float(value)


def _preference_header(policy: Learned) -> dict[str, Any] | None:
    if policy.preference is None or policy.preference_range is None:
        return None
    return {"range": list(policy.preference_range), "default": policy.preference}


def _preference(path: Path, data: Any) -> tuple[float | None, tuple[float, float] | None]:
    """Default preference and range of a header's entry; both None where it is missing, as in older files."""
    if data is None:
        return None, None
    try:
        low, high = (float(end) for end in data["range"])
        default = float(data["default"])
    except (TypeError, ValueError, KeyError, OverflowError):
        allowed = '{"range": [low, high], "default": weight} or null'
        raise InputError(f"{path}: preference = {str(data)[:60]}; allowed: {allowed}") from None
    if not 0.0 <= low <= default <= high < math.inf:
        allowed = "numbers of at least 0 in the order low, default, high"
        raise InputError(f"{path}: preference of {default} within [{low}, {high}]; allowed: {allowed}")
    return default, (low, high)


def _cell(path: Path, header: Mapping[str, Any], tensors: dict[str, NDArray[Any]], inputs: int) -> Cell | None:
    """The recurrent cell, whose tensors it takes from ``tensors``; None where the header names none."""
    kind = header.get("cell")
    if kind is None:
        return None
    pairs = [[tensors.pop(f"{name}.{part}", None) for part in ("weight", "bias")] for name in CELL]
    if any(tensor is None for pair in pairs for tensor in pair):
        raise InputError(
            f"{path}: no tensors of a cell; allowed with cell = {kind}: {', '.join(CELL)}, weight and bias"
        )
    (view, view_bias), (memory, memory_bias) = pairs
    units = memory.shape[-1] if memory is not None and memory.ndim == 2 else 0
    gates = GATES[kind] * units
    return Cell(
        kind,
        _layer(path, CELL[0], view, view_bias, inputs, gates),
        _layer(path, CELL[1], memory, memory_bias, units, gates),
    )


def _layers(path: Path, tensors: Mapping[str, NDArray[Any]], inputs: int) -> Sequence[Layer]:
    count = len(tensors) // 2
    names = {f"layer{i}.{part}" for i in range(count) for part in ("weight", "bias")}
    if not 1 <= count <= _MAX_LAYERS or set(tensors) != names:
        raise InputError(
            f"{path}: tensors {sorted(tensors)[:6]}; allowed: layer0.weight, layer0.bias, layer1.weight, ..."
        )
    layers, width = list[Layer](), inputs
    for i in range(count):
        layers.append(_layer(path, f"layer{i}", tensors[f"layer{i}.weight"], tensors[f"layer{i}.bias"], width))
        width = len(layers[-1][1])
    return layers


def _layer(path: Path, name: str, weight: Any, bias: Any, inputs: int, outputs: int | None = None) -> Layer:
    """A checked pair of weight and bias."""
    if weight.dtype != np.float32 or bias.dtype != np.float32:
        raise InputError(f"{path}: {name} is {weight.dtype}/{bias.dtype}; allowed: float32")
    fits = weight.ndim == 2 and weight.shape[1] == inputs and bias.shape == weight.shape[:1]
    if not fits or outputs not in (None, len(bias)) or not len(bias):
        n = "n" if outputs is None else outputs
        raise InputError(f"{path}: {name} has shapes {weight.shape}, {bias.shape}; allowed: ({n}, {inputs}), ({n},)")
    if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
        raise InputError(f"{path}: {name} holds values that are not finite numbers")
    return weight, bias


def _ranges(path: Path, data: Any) -> dict[str, tuple[float, float]]:
    try:
        ranges = {str(k): (float(low), float(high)) for k, (low, high) in dict(data).items()}
    except (TypeError, ValueError):
        raise InputError(f"{path}: calibrated_range = {str(data)[:60]}; allowed: signal: [low, high]") from None
    for name, (low, high) in ranges.items():
        if name not in signals.NAMES:
            raise InputError(f"{path}: calibrated_range of {name[:60]}; allowed: of {', '.join(signals.NAMES)}")
        if not -math.inf < low <= high < math.inf:
            raise InputError(f"{path}: calibrated_range of {name} = [{low}, {high}]; allowed: finite, lower end first")
    return ranges
