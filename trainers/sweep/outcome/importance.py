"""How much each parameter of a sweep matters to an objective, by Optuna's evaluator."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import optuna
from numpy.typing import NDArray

from paceenv.trainers.sweep.outcome.sweep_results import Candidate, Results


def parameter_names(candidates: Sequence[Candidate]) -> list[str]:
    """Of all candidates, in the order in which they first appear."""
    return list(dict.fromkeys(name for candidate in candidates for name in candidate.parameters))


def parameter_table(candidates: Sequence[Candidate], names: Sequence[str]) -> NDArray[np.float64]:
    """Values ``(candidates, names)``; 0 where a candidate lacks one, as a mechanism that is off has window 0.

    Args:
        candidates: one row each.
        names: of the parameters, a column each.
    """
    return np.array([[candidate.parameters.get(name, 0.0) for name in names] for candidate in candidates])


def importance(results: Results, objective: int = 0) -> dict[str, float]:
    """Importance of each parameter for an objective: shares that add up to 1, the largest first.

    PED-ANOVA (Watanabe et al. 2023): how much the best candidates differ from all candidates in each parameter.
    Empty where there are too few candidates.

    Args:
        results: of the sweep.
        objective: its number.
    """
    names = parameter_names(results.candidates)
    table = parameter_table(results.candidates, names)
    varied = [i for i in range(len(names)) if np.ptp(table[:, i]) > 0.0] if len(table) else []
    if len(table) < 10 or not varied:
        return {}
    if len(varied) == 1:
        return {names[varied[0]]: 1.0}
    spaces: dict[str, optuna.distributions.BaseDistribution] = {
        names[i]: optuna.distributions.FloatDistribution(table[:, i].min(), table[:, i].max()) for i in varied
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    study.add_trials(
        [
            optuna.trial.create_trial(
                params={names[i]: float(row[i]) for i in varied},
                distributions=spaces,
                value=-results.goodness(candidate)[objective],
            )
            for row, candidate in zip(table, results.candidates, strict=True)
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental, and that low values are good, as they are here
        found = optuna.importance.get_param_importances(
            study, evaluator=optuna.importance.PedAnovaImportanceEvaluator(), normalize=True
        )
    return {name: float(share) for name, share in sorted(found.items(), key=lambda item: -item[1])}
