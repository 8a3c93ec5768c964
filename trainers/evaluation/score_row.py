"""A row of the leaderboard as a JSON file: who was scored, on what, with which gains; made, read and made again.

Its gains are those of every cluster and seed, so that a leaderboard finds the bound of a cluster over all its rows, and
can compare what a row says with what its policies do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, FiniteFloat

import paceenv
from paceenv.core import metrics
from paceenv.core.errors import InputError
from paceenv.core.files import atomic_write
from paceenv.policies import names, saved
from paceenv.policies.hub import repository
from paceenv.policies.networks import foreign
from paceenv.policies.networks.own_class import names_class
from paceenv.policies.policy_file import load_policy
from paceenv.trainers.evaluation import gaps
from paceenv.trainers.evaluation.evaluate import AHEAD, NULL_LIMIT, evaluate
from paceenv.trainers.evaluation.protocol import Protocol, ScoredSplit
from paceenv.trainers.evaluation.suites import Case, Suite
from paceenv.ui import config_files
from paceenv.ui.config_files import Config
from paceenv.ui.run_directory import prepare_folder

FORMAT = "paceenv.score/1"
TOLERANCE = 1e-6
"""By how much a gain may differ when it is made again."""
POLICIES = "policies"
"""Folder of the policy files beside rows that were entered."""
_POLICY, _TRAINING = "policy.safetensors", "training.json"

Gains = Mapping[str, NDArray[np.float64]]
"""By cluster, ``(E,)``: relative gains of throughput over passive, one a seed."""


NAMES = r"^[\w .:/=,+-]{1,80}$"
"""What a row may be called."""


def title_of(policy: str) -> str:
    """The name of a row that nobody named: the policy's, in letters that a row may have.

    Args:
        policy: as a command line spells it.
    """
    path = Path(policy)
    return re.sub(r"[^\w .:/=,+-]", "-", policy if path.suffix == "" else path.stem)[-80:]


class Scored(Config):
    """One policy of a row; several are trainings of one algorithm with different seeds."""

    policy: str = Field(description="as a command line spells it; a file relative to the row's folder")
    sha256: str | None = Field(None, description="of its file; none: a rule of paceenv, or a class")
    algorithm: str = ""
    training_seed: int | None = None
    decisions: int | None = None
    cpu_minutes: float | None = Field(None, description="of its training, one core, evaluations included")
    gain: float = Field(description="mean over clusters")
    gap_closed: float | None = Field(description="mean share of the bound, over clusters on which there is any")
    gap_ci95: tuple[float, float] | None = None
    worst_null: tuple[str, float] | None = Field(None, description="the null with the least gain, and that")
    clusters: dict[str, dict[str, Any]] = Field(description="gain, its interval, share of the bound, by cluster")
    gains: dict[str, list[FiniteFloat]] = Field(description="by cluster, one a seed")

    def arrays(self) -> Gains:
        return {name: np.array(values) for name, values in self.gains.items()}


class Row(Config):
    """A file of the leaderboard."""

    format: Literal["paceenv.score/1"] = "paceenv.score/1"
    name: str = Field(pattern=NAMES)
    split: ScoredSplit
    protocol: int = Field(description="version")
    fingerprint: str = Field(description="of the clusters, seeds and lengths of the split")
    policies: list[Scored] = Field(min_length=1)
    scoring_cpu_s: float
    machine: dict[str, str]
    paceenv: str


def load_row(path: Path) -> Row:
    """Read a row; InputError for a file that is none."""
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict):
            raise ValueError(f"a {type(data).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: not a score: {error}; allowed: a file of paceenv score") from None
    return config_files.parse(Row, data, str(path))


def write_row(row: Row, path: Path) -> None:
    """Write a row whole or not at all.

    Args:
        row: scores of an agent.
        path: of the file.
    """
    config_files.write_json(path, json.loads(row.model_dump_json()))  # it makes null of what is not finite


def members(texts: Sequence[str]) -> list[str]:
    """The policies that some texts name: a folder of ``paceenv train`` stands for its policy, or for all its seeds."""
    found = list[str]()
    for text in texts:
        folder = Path(text)
        seeds = sorted(folder.glob(f"seed-*/{_POLICY}")) if folder.is_dir() else []
        one = [folder / _POLICY] if (folder / _POLICY).is_file() else []
        if folder.is_dir() and not (seeds or one):
            raise InputError(f"--policy {text}: no {_POLICY}; allowed: a policy, or a folder of paceenv train")
        found += [str(path) for path in seeds or one] or [text]
    return found


def score(
    texts: Sequence[str],
    split: ScoredSplit,
    protocol: Protocol,
    *,
    name: str,
    bound: Gains | None = None,
    cpu_minutes: float | None = None,
    on_done: Callable[[float], None] = lambda done: None,
) -> Row:
    """Score policies by the protocol.

    Args:
        texts: the policies of the row.
        split: on which clusters.
        protocol: the protocol.
        name: of the row.
        bound: gains of a policy that looks ahead, by the same protocol; None: it is run, which takes most of the time.
        cpu_minutes: of each training, where no file tells.
        on_done: called with the share that is done, 0 to 1.
    """
    suite, started = protocol.suite(split), time.process_time()
    runs = [*texts, *([AHEAD] if bound is None and AHEAD not in texts else [])]
    total = len(suite.cases) * (len(runs) + 1)
    result = evaluate(runs, suite, on_done=lambda done: on_done(done / total))
    by_policy = {run: {case.name: result.gain_E(run, case) for case in suite.cases} for run in runs}
    others = [bound] if bound is not None else [by_policy[AHEAD]]
    policies = []
    for text in texts:
        summary = summarise(by_policy[text], [*by_policy.values(), *others], suite)
        gains = {case: [round(float(g), 9) for g in gain_E] for case, gain_E in by_policy[text].items()}
        policies.append(Scored(policy=text, gains=gains, **_origin(text, cpu_minutes), **summary))
    return Row(
        name=name,
        split=split,
        protocol=protocol.version,
        fingerprint=protocol.fingerprint(split),
        policies=policies,
        scoring_cpu_s=round(time.process_time() - started, 1),
        machine=_machine(),
        paceenv=paceenv.__version__,
    )


def summarise(own: Gains, everybody: Sequence[Gains], suite: Suite) -> dict[str, Any]:
    """What a policy's gains come to, beside those of everybody, itself among them.

    Args:
        own: gains of the policy.
        everybody: gains of all policies.
        suite: the clusters.
    """
    clusters, shares, nulls = dict[str, dict[str, Any]](), [], []
    for case in suite.cases:
        gain, low, high = metrics.bootstrap_interval(own[case.name])
        clusters[case.name] = {"null": case.null_case, "gain": round(gain, 6), "ci95": [round(low, 6), round(high, 6)]}
        share = _share(own, everybody, case)
        if share is not None:
            shares.append(share)
            clusters[case.name]["gap_closed"] = round(share[0], 4)
        if case.null_case:
            nulls.append((case.name, round(gain, 6)))
    closed = gaps.mean_share(shares) if shares else None
    return {
        "gain": round(float(np.mean([own[case.name].mean() for case in suite.cases])), 6),
        "gap_closed": None if closed is None else round(closed.value, 4),
        "gap_ci95": None if closed is None else (round(closed.low, 4), round(closed.high, 4)),
        "worst_null": min(nulls, key=lambda one: one[1], default=None),
        "clusters": clusters,
    }


def _share(own: Gains, everybody: Sequence[Gains], case: Case) -> tuple[float, NDArray[np.float64]] | None:
    """As ``gaps.share_of_best``; None for a null, and where nobody gains anything."""
    gain_PE = np.stack([own[case.name], *(gains[case.name] for gains in everybody)])
    if case.null_case or gain_PE.mean(axis=1).max() <= NULL_LIMIT:
        return None
    return gaps.share_of_best(gain_PE, 0)


def _origin(text: str, cpu_minutes: float | None) -> dict[str, Any]:
    """Digest and training of a policy, as far as files tell."""
    found: dict[str, Any] = {"sha256": None, "cpu_minutes": cpu_minutes}
    path = policy_path(text)
    if path is None:
        return found | {"algorithm": "a class of its own" if names_class(text) else "by hand"}
    found["sha256"] = _digest(path)
    if path.suffix != ".safetensors":
        return found
    record: Any = load_policy(path).provenance  # free data of whoever trained it, as is training.json
    config, seeds, decisions = record.get("config"), record.get("seeds"), record.get("timesteps")
    first = seeds.get("first") if isinstance(seeds, dict) else None
    found["algorithm"] = str(config.get("algorithm", "")) if isinstance(config, dict) else ""
    found["training_seed"] = first if isinstance(first, int) else None
    found["decisions"] = decisions if isinstance(decisions, int) else None
    if cpu_minutes is None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found["cpu_minutes"] = round(json.loads(path.with_name(_TRAINING).read_text())["cpu_s"] / 60.0, 2)
    return found


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def policy_path(text: str) -> Path | None:
    """The file of a policy, None for a rule or a class."""
    if names.rule(text) is not None or text in names.NEED_SIMULATOR or names_class(text):
        return None
    if (path := foreign.file_of(text)) is not None:
        return path
    name, _ = saved.parts(text)
    if name.startswith(repository.PREFIX):
        return repository.fetch(name)
    return saved.released() if name == names.LEARNED else Path(name)


def _is_by_name(text: str) -> bool:
    """Whether everybody has the policy's file by its name: the released one, and one on the Hub."""
    name, _ = saved.parts(text)
    return name == names.LEARNED or name.startswith(repository.PREFIX)


def enter(row: Row, folder: Path) -> Path:
    """Put a row and copies of its policies into a folder of rows, where anybody can make it again; its path.

    Args:
        row: scores of an agent.
        folder: of the rows.
    """
    kept = []
    for one in row.policies:
        path = policy_path(one.policy)
        if path is None or one.sha256 is None or _is_by_name(one.policy):
            kept.append(one)
            continue
        copy = folder / POLICIES / f"{one.sha256[:16]}{path.suffix}"
        if path.resolve() != copy.resolve():
            atomic_write(copy, path.read_bytes())
        options = one.policy.rpartition(path.suffix)[2] if path.suffix else ""
        text = f"{POLICIES}/{copy.name}{options}"
        kept.append(one.model_copy(update={"policy": text}))
    target = _target(folder, row.name, row.split)
    write_row(row.model_copy(update={"policies": kept}), target)
    return target


def _target(folder: Path, name: str, split: ScoredSplit) -> Path:
    return folder / f"{re.sub(r'[^A-Za-z0-9_-]+', '-', name)}.{split}.json"


def check_entry(texts: Sequence[str], name: str, split: ScoredSplit, folder: Path, *, named: bool) -> None:
    """Raise InputError, before the long work, where a row could not be entered or would replace another agent's.

    Args:
        texts: the policies of the row.
        name: of the row.
        split: on which clusters.
        folder: of the rows; made where it is missing.
        named: whether the user gave the name; a row of that very name may then be replaced by other policies'.
    """
    for text in texts:
        if names_class(text):
            raise _no_class(text)
    prepare_folder(folder)
    target = _target(folder, name, split)
    if not target.exists():
        return
    there = load_row(target)
    theirs = [(one.sha256, _options(one.policy, policy_path(one.policy))) for one in there.policies]
    files = [(text, policy_path(text)) for text in texts]
    if any(path is not None and not path.is_file() for _, path in files):
        return  # which the evaluation says
    mine = [(None if path is None else _digest(path), _options(text, path)) for text, path in files]
    if there.name != name or not (named or mine == theirs):
        raise InputError(
            f"{target}: is the row of {there.name}; allowed: --name with another name, or with this one to replace it"
        )


def _options(text: str, path: Path | None) -> str:
    """What a policy's text says beside its file; all of it for a rule."""
    return text if path is None else text.rpartition(path.suffix)[2] if path.suffix else ""


def _no_class(policy: str) -> InputError:
    return InputError(f"policy {policy}: a class, which nobody else can run; allowed: a policy file")


def located(one: Scored, folder: Path) -> str:
    """A policy of a row as a command line spells it from here; InputError where it cannot be run, or has changed.

    Args:
        one: a policy with its scores.
        folder: of the rows.
    """
    path = policy_path(one.policy)
    if path is None:
        if names_class(one.policy):
            raise _no_class(one.policy)
        return one.policy
    here = path if _is_by_name(one.policy) or path.is_absolute() else folder / path
    if not here.is_file():
        raise InputError(f"policy {one.policy}: no such file in {folder}")
    if _digest(here) != one.sha256:
        raise InputError(f"policy {one.policy}: not the file that was scored: its digest differs")
    return one.policy.replace(str(path), str(here), 1) if here != path else one.policy


def check(row: Row, protocol: Protocol, folder: Path, clusters: int, seed: int) -> None:
    """Make some of a row's gains again; InputError where it is of another protocol or says something else.

    Args:
        row: the row.
        protocol: the present one.
        folder: of the row's file.
        clusters: how many, which ``seed`` draws; 0: only the digests of its policies.
        seed: of the draw.
    """
    if row.fingerprint != protocol.fingerprint(row.split):
        said = f"version {row.protocol} of the protocol, or other clusters"
        raise InputError(f"{said}; allowed: version {protocol.version}: paceenv score makes it again")
    texts, suite = [located(one, folder) for one in row.policies], protocol.suite(row.split)
    check_shape(row, protocol)
    chosen = np.random.default_rng(seed).permutation(len(suite.cases))[:clusters]
    if not len(chosen):
        return
    some = suite.model_copy(update={"cases": [suite.cases[k] for k in sorted(chosen.tolist())]})
    result = evaluate(texts, some)
    for text, one in zip(texts, row.policies, strict=True):
        for case in some.cases:
            found_E, said_E = result.gain_E(text, case), np.array(one.gains[case.name])
            if not np.abs(found_E - said_E).max() <= TOLERANCE:
                means = f"{found_E.mean():+.4%} when it is made again, {said_E.mean():+.4%} in the file"
                raise InputError(f"policy {one.policy} on {case.name}: {means}")


def check_shape(row: Row, protocol: Protocol) -> None:
    """Raise InputError where a row's gains are not those of all clusters and seeds of its split.

    Args:
        row: the row.
        protocol: by which it says it was scored.
    """
    clusters = {case.name for case in protocol.suite(row.split).cases}
    if any(set(one.gains) != clusters for one in row.policies):
        raise InputError("gains of other clusters than the protocol's; allowed: those of all its clusters")
    if any(len(values) != protocol.seeds for one in row.policies for values in one.gains.values()):
        raise InputError(f"gains of another number of seeds; allowed: {protocol.seeds}")


def _machine() -> dict[str, str]:
    try:
        model = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    cpu = model[1].strip() if model else platform.machine()
    return {"cpu": cpu, "system": platform.system(), "python": platform.python_version(), "numpy": np.__version__}
