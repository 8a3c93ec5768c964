"""The policy file, contract 4: one ``.safetensors`` with weights, schemas, calibrated range and provenance.

Loading is data only: tensors and a JSON string, checked against the schemas of the code that is running. No pickle, no
code. The file holds no date, so that the same training gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from paceenv.core import signals
from paceenv.core.errors import InputError, out_of_range
from paceenv.core.files import atomic_write
from paceenv.core.limits import Limits
from paceenv.policies.distilled import Distilled
from paceenv.policies.learned import Learned
from paceenv.policies.networks import Layer

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
_MAX_LAYERS, _MAX_BYTES = 16, 64 << 20


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
        preference = {"range": policy.preference_range, "default": policy.preference}
    header: dict[str, Any] = {
        **_SCHEMAS,
        "mechanisms": policy.mechanisms,
        "activation": policy.activation,
        "preference": preference,
        "memory_intervals": policy.memory_intervals,
        "change_intervals": policy.change_intervals,
        "interval_iterations": policy.interval_iterations,
        "calibrated_range": {k: list(v) for k, v in content.calibrated_range.items()},
        "provenance": dict(content.provenance),
    }
    if isinstance(policy, Distilled):
        header |= {"kind": "distilled", "candidates": policy.candidates, "margin": policy.margin}
        header |= {"hysteresis": policy.hysteresis, **({"always": policy.always} if policy.always else {})}
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
        if target.suffix == ".zip":
            raise InputError(f"{target}: no policy file; paceenv.policies.save_network makes one of an agent") from None
        raise InputError(f"{target}: not a readable .safetensors file: {error}") from None
    header = _header(target, metadata)
    try:
        policy = _policy(target.stem, _layers(tensors), header)
        return PolicyFile(policy, policy.calibrated_range, dict(header["provenance"]))
    except InputError as error:
        raise InputError(f"{target}: {error}") from None
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        wrong = f"{type(error).__name__}: {error}"
        raise InputError(f"{target}: header: {wrong}; allowed: as paceenv train writes it") from error


def _policy(name: str, layers: Sequence[Layer], header: Mapping[str, Any]) -> Learned:
    """The policy that layers and header describe; its own checks find values that are none."""
    ranges = {signal: (float(low), float(high)) for signal, (low, high) in header["calibrated_range"].items()}
    common: dict[str, Any] = {
        "name": name,
        "calibrated_range": ranges,
        "activation": header["activation"],
        "memory_intervals": header.get("memory_intervals", 0),
        "change_intervals": header.get("change_intervals", 0),
        "interval_iterations": header["interval_iterations"],
    }
    if _one_of(header, "kind", KINDS) == "network":
        squashes = _one_of(header, "output", OUTPUTS) == "tanh"
        return Learned(layers, header["mechanisms"], squashes=squashes, **common)
    if given := header.get("preference"):
        low, high = map(float, given["range"])
        common |= {"preference": float(given["default"]), "preference_range": (low, high)}
    return Distilled(
        layers,
        header["candidates"],
        margin=header["margin"],
        hysteresis=header["hysteresis"],
        always=header.get("always", {}),
        **common,
    )


def _header(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The header of a file of this version."""
    try:
        header = json.loads(metadata["paceenv"])
    except KeyError:
        raise InputError(f"{path}: no paceenv header; allowed: files written by paceenv train") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the paceenv header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise InputError(f"{path}: the paceenv header is a {type(header).__name__}; allowed: a mapping")
    for key, value in _SCHEMAS.items():
        if header.get(key) != value:
            raise out_of_range(key, header.get(key), f"{value!r}, which this version understands", str(path))
    return header


def _one_of(header: Mapping[str, Any], key: str, allowed: Sequence[str]) -> str:
    value = header.get(key)
    if value not in allowed:
        raise out_of_range(key, value, f"one of {', '.join(allowed)}", "header")
    return str(value)


def _layers(tensors: Mapping[str, NDArray[Any]]) -> Sequence[Layer]:
    count = len(tensors) // 2
    names = {f"layer{i}.{part}" for i in range(count) for part in ("weight", "bias")}
    if not 1 <= count <= _MAX_LAYERS or set(tensors) != names:
        raise InputError(f"tensors {sorted(tensors)[:6]}; allowed: layer0.weight, layer0.bias, layer1.weight, ...")
    layers, width = list[Layer](), (0, *tensors["layer0.weight"].shape)[-1]
    for i in range(count):
        weight, bias = tensors[f"layer{i}.weight"], tensors[f"layer{i}.bias"]
        if weight.dtype != np.float32 or bias.dtype != np.float32:
            raise InputError(f"layer{i} is {weight.dtype}/{bias.dtype}; allowed: float32")
        if not (weight.ndim == 2 and weight.shape[1] == width and bias.shape == weight.shape[:1] and len(bias)):
            raise InputError(f"layer{i} has shapes {weight.shape}, {bias.shape}; allowed: (n, {width}), (n,)")
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise InputError(f"layer{i} holds values that are not finite numbers")
        layers.append((weight, bias))
        width = len(bias)
    return layers
