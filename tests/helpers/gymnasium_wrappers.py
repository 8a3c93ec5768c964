"""Every wrapper of Gymnasium, vector and scalar, as it is put around our environment, and the table of them for docs.

``python tests/helpers/gymnasium_wrappers.py`` prints the table; ``tests/test_env_wrappers.py`` runs every row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
from gymnasium import wrappers as scalar
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import vector


class Recipe(NamedTuple):
    """How a wrapper is put around the environment."""

    wrap: Callable[[Any, Path], Any]
    """Called with the environment and a folder for files."""
    note: str = ""
    """What else it needs, for the table."""
    render_mode: str | None = None


def _doubled(x: Any) -> Any:
    return 2.0 * x


def _image(observation: Any) -> Any:
    """An observation of ten numbers as a tiny picture of bytes."""
    grey = np.round(255.0 * (0.5 + 0.5 * np.clip(observation, -1.0, 1.0))).astype(np.uint8)
    return np.repeat(grey.reshape(*grey.shape[:-1], 2, 5, 1), 3, axis=-1)


_IMAGE = Box(0, 255, (2, 5, 3), np.uint8)
_AS_DICT = Dict({"signals": Box(-1.0, 1.0, (10,), np.float32), "mean": Box(-1.0, 1.0, (1,), np.float32)})
_DOUBLE = Box(-2.0, 2.0, (10,), np.float32)


def _dict(observation: Any) -> Any:
    return {"signals": observation, "mean": observation.mean(axis=-1, keepdims=True)}


def _vector_images(env: Any) -> Any:
    return vector.VectorizeTransformObservation(env, scalar.TransformObservation, func=_image, observation_space=_IMAGE)


def _batched(space: Any, env: Any) -> Any:
    return gymnasium.vector.utils.batch_space(space, env.num_envs)


VECTOR: dict[str, Recipe] = {
    "VectorizeTransformObservation": Recipe(
        lambda e, _: vector.VectorizeTransformObservation(
            e, scalar.TransformObservation, func=_doubled, observation_space=_DOUBLE
        )
    ),
    "VectorizeTransformAction": Recipe(
        lambda e, _: vector.VectorizeTransformAction(
            e, scalar.TransformAction, func=lambda a: -a, action_space=e.single_action_space
        )
    ),
    "VectorizeTransformReward": Recipe(
        lambda e, _: vector.VectorizeTransformReward(e, scalar.TransformReward, func=_doubled)
    ),
    "DictInfoToList": Recipe(lambda e, _: vector.DictInfoToList(e)),
    "TransformObservation": Recipe(
        lambda e, _: vector.TransformObservation(e, _doubled, _batched(_DOUBLE, e), _DOUBLE)
    ),
    "FilterObservation": Recipe(
        lambda e, _: vector.FilterObservation(
            vector.VectorizeTransformObservation(
                e, scalar.TransformObservation, func=_dict, observation_space=_AS_DICT
            ),
            ["signals"],
        ),
        "filters Dict and Tuple observations; ours made into a Dict first",
    ),
    "FlattenObservation": Recipe(lambda e, _: vector.FlattenObservation(e)),
    "GrayscaleObservation": Recipe(
        lambda e, _: vector.GrayscaleObservation(_vector_images(e)), "for pictures; ours made into one first"
    ),
    "ResizeObservation": Recipe(
        lambda e, _: vector.ResizeObservation(_vector_images(e), (4, 4)), "for pictures; ours made into one first"
    ),
    "ReshapeObservation": Recipe(lambda e, _: vector.ReshapeObservation(e, (2, 5))),
    "RescaleObservation": Recipe(lambda e, _: vector.RescaleObservation(e, np.float32(0.0), np.float32(1.0))),
    "DtypeObservation": Recipe(lambda e, _: vector.DtypeObservation(e, np.float64)),
    "NormalizeObservation": Recipe(lambda e, _: vector.NormalizeObservation(e)),
    "TransformAction": Recipe(lambda e, _: vector.TransformAction(e, lambda a: -a)),
    "ClipAction": Recipe(lambda e, _: vector.ClipAction(e)),
    "RescaleAction": Recipe(lambda e, _: vector.RescaleAction(e, np.float32(0.0), np.float32(1.0))),
    "TransformReward": Recipe(lambda e, _: vector.TransformReward(e, _doubled)),
    "ClipReward": Recipe(lambda e, _: vector.ClipReward(e, -0.01, 0.01)),
    "NormalizeReward": Recipe(lambda e, _: vector.NormalizeReward(e)),
    "RecordEpisodeStatistics": Recipe(lambda e, _: vector.RecordEpisodeStatistics(e)),
    "RecordVideo": Recipe(
        lambda e, folder: vector.RecordVideo(e, str(folder / "video"), disable_logger=True),
        'render_mode="rgb_array"',
        render_mode="rgb_array",
    ),
    "HumanRendering": Recipe(
        lambda e, _: vector.HumanRendering(e), 'render_mode="rgb_array"; a window', render_mode="rgb_array"
    ),
    "ArrayConversion": Recipe(lambda e, _: _to_torch(vector.ArrayConversion, e)),
    "NumpyToTorch": Recipe(lambda e, _: vector.NumpyToTorch(e)),
}
"""By the names in ``gymnasium.wrappers.vector.__all__``."""


def _to_torch(wrapper: Any, env: Any) -> Any:
    import torch

    return wrapper(env, env_xp=np, target_xp=torch)


def modes(name: str) -> list[AutoresetMode]:
    """In which autoreset modes a vector wrapper works with any environment; in the others Gymnasium's own fails."""
    if name == "NormalizeObservation":
        return [AutoresetMode.NEXT_STEP]
    # wrappers of observations refuse SAME_STEP, and conversions cannot take its `final_obs`, an array of arrays
    if name.endswith("Observation") or name in {"ArrayConversion", "NumpyToTorch"}:
        return [AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED]
    return list(AutoresetMode)


SCALAR: dict[str, Recipe] = {
    "DelayObservation": Recipe(lambda e, _: scalar.DelayObservation(e, 2)),
    "DtypeObservation": Recipe(lambda e, _: scalar.DtypeObservation(e, np.float64)),
    "DiscretizeObservation": Recipe(lambda e, _: scalar.DiscretizeObservation(e, 3)),
    "FilterObservation": Recipe(
        lambda e, _: scalar.FilterObservation(scalar.TransformObservation(e, _dict, _AS_DICT), ["signals"]),
        "filters Dict and Tuple observations; ours made into a Dict first",
    ),
    "FlattenObservation": Recipe(lambda e, _: scalar.FlattenObservation(e)),
    "FrameStackObservation": Recipe(lambda e, _: scalar.FrameStackObservation(e, 3)),
    "GrayscaleObservation": Recipe(
        lambda e, _: scalar.GrayscaleObservation(scalar.AddRenderObservation(e)),
        "of the rendered picture",
        render_mode="rgb_array",
    ),
    "TransformObservation": Recipe(lambda e, _: scalar.TransformObservation(e, _doubled, _DOUBLE)),
    "MaxAndSkipObservation": Recipe(lambda e, _: scalar.MaxAndSkipObservation(e, 2)),
    "NormalizeObservation": Recipe(lambda e, _: scalar.NormalizeObservation(e)),
    "AddRenderObservation": Recipe(lambda e, _: scalar.AddRenderObservation(e), render_mode="rgb_array"),
    "ResizeObservation": Recipe(
        lambda e, _: scalar.ResizeObservation(scalar.AddRenderObservation(e), (48, 80)),
        "of the rendered picture",
        render_mode="rgb_array",
    ),
    "ReshapeObservation": Recipe(lambda e, _: scalar.ReshapeObservation(e, (2, 5))),
    "RescaleObservation": Recipe(lambda e, _: scalar.RescaleObservation(e, np.float32(0.0), np.float32(1.0))),
    "TimeAwareObservation": Recipe(lambda e, _: scalar.TimeAwareObservation(scalar.TimeLimit(e, 4)), "with TimeLimit"),
    "ClipAction": Recipe(lambda e, _: scalar.ClipAction(e)),
    "DiscretizeAction": Recipe(lambda e, _: scalar.DiscretizeAction(e, 5)),
    "TransformAction": Recipe(lambda e, _: scalar.TransformAction(e, lambda a: -a, e.action_space)),
    "RescaleAction": Recipe(lambda e, _: scalar.RescaleAction(e, np.float32(0.0), np.float32(1.0))),
    "StickyAction": Recipe(lambda e, _: scalar.StickyAction(e, 0.25)),
    "RepeatAction": Recipe(lambda e, _: scalar.RepeatAction(e, 2)),
    "ClipReward": Recipe(lambda e, _: scalar.ClipReward(e, -0.01, 0.01)),
    "TransformReward": Recipe(lambda e, _: scalar.TransformReward(e, _doubled)),
    "NormalizeReward": Recipe(lambda e, _: scalar.NormalizeReward(e)),
    "TimeLimit": Recipe(lambda e, _: scalar.TimeLimit(e, 3)),
    "Autoreset": Recipe(lambda e, _: scalar.Autoreset(e)),
    "PassiveEnvChecker": Recipe(lambda e, _: scalar.PassiveEnvChecker(e)),
    "OrderEnforcing": Recipe(lambda e, _: scalar.OrderEnforcing(e)),
    "RecordEpisodeStatistics": Recipe(lambda e, _: scalar.RecordEpisodeStatistics(e)),
    "AddWhiteNoise": Recipe(
        lambda e, _: scalar.AddWhiteNoise(e, probability_of_noise_per_pixel=0.1),
        "of the rendered picture",
        render_mode="rgb_array",
    ),
    "ObstructView": Recipe(
        lambda e, _: scalar.ObstructView(e, obstructed_pixels_ratio=0.1, obstruction_width=20),
        "of the rendered picture",
        render_mode="rgb_array",
    ),
    "RenderCollection": Recipe(
        lambda e, _: scalar.RenderCollection(e), 'render_mode="ansi" or "rgb_array"', render_mode="ansi"
    ),
    "RecordVideo": Recipe(
        lambda e, folder: scalar.RecordVideo(e, str(folder / "video"), disable_logger=True),
        'render_mode="rgb_array"',
        render_mode="rgb_array",
    ),
    "HumanRendering": Recipe(
        lambda e, _: scalar.HumanRendering(e), 'render_mode="rgb_array"; a window', render_mode="rgb_array"
    ),
    "ArrayConversion": Recipe(lambda e, _: _to_torch(scalar.ArrayConversion, e)),
    "NumpyToTorch": Recipe(lambda e, _: scalar.NumpyToTorch(e)),
}
"""By the names in ``gymnasium.wrappers.__all__``."""

NOT_APPLICABLE = {
    "vector": "the module of the vector wrappers",
    "AtariPreprocessing": "for Atari games",
    "JaxToNumpy": "for environments written in JAX",
    "JaxToTorch": "for environments written in JAX",
}
"""The others, with the reason."""

CHECKERS = (
    ("`gymnasium.utils.env_checker.check_env`", "scalar environment", "`test_env.py`"),
    ("`paceenv.envs.env_checker.check_vector_env`", "vector against scalar, NEXT_STEP and SAME_STEP", "`test_env.py`"),
    ("`SyncVectorEnv`, step by step", "NEXT_STEP, SAME_STEP, DISABLED, masks, options", "`test_vector_env.py`"),
    ("`AsyncVectorEnv`", "scalar environments in processes", "`test_vector_env.py`"),
    ("`stable_baselines3.common.env_checker.check_env`", "scalar environment", "`test_env_wrappers.py`"),
    ("SB3 `make_vec_env`, `VecNormalize`, PPO", "scalar environments", "`test_env_wrappers.py`"),
    ("`NativeVecEnv`, our `VecEnv` for SB3", "native batch", "`test_training.py`"),
    ("RLlib's new API stack, PPO", "native batch as vector entry point, no step lost", "`test_env_rllib.py` (slow)"),
)  # fmt: skip
"""Checkers and libraries that the tests run, on what, and where."""


def table() -> str:
    """All of them as Markdown."""
    lines = ["| Checker or library | On | Test |", "| --- | --- | --- |"]
    lines += [f"| {name} | {on} | {where} |" for name, on, where in CHECKERS]
    lines += ["", "| Wrapper of Gymnasium | Vector | Scalar | Note |", "| --- | --- | --- | --- |"]
    for name in sorted({*VECTOR, *SCALAR} | set(NOT_APPLICABLE) - {"vector"}):
        found = [kind.get(name) for kind in (VECTOR, SCALAR)]
        known = [set(module.__all__) for module in (vector, scalar)]
        marks = ["works" if r else "does not apply" if name in k else "" for r, k in zip(found, known, strict=True)]
        if name in VECTOR and len(modes(name)) < len(AutoresetMode):
            marks[0] += ": " + ", ".join(mode.name for mode in modes(name))
        notes = dict.fromkeys(r.note for r in found if r and r.note)
        lines.append(f"| `{name}` | {' | '.join(marks)} | {NOT_APPLICABLE.get(name) or '; '.join(notes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
