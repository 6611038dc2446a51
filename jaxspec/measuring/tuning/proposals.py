"""Proposes the next mask of a search, at random or by Bayesian optimisation.

A proposal depends only on the seed and the earlier trials, so a stopped search resumes exactly. It is always an
untried mask: rounding points of the box to masks returns to the same few (Luong et al. 2019), and the search of
Draft & Verify was observed to get stuck on them.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from jaxspec.measuring.tuning.masks import MaskSpace
from jaxspec.model.plan import LayerPlan

# (mask, score) in the order of the trials; a higher score is better.
Tried = Sequence[tuple[LayerPlan, float]]
Proposer = Callable[[MaskSpace, Tried, int], LayerPlan]

# Number of random masks before the Gaussian process is used.
FIRST = 12
# Share of the scores' variance that is treated as measurement noise.
_NOISE = 0.01
# Spaces up to this size are enumerated to find the untried masks.
_LISTED = 1 << 14
# Candidates for the acquisition: random points of the box, and walks of these lengths from the best masks so far.
_POINTS, _BEST, _WALKS, _MOVES = 200, 10, 8, (1, 1, 2, 2, 3, 3)


def propose_random(space: MaskSpace, tried: Tried, seed: int) -> LayerPlan:
    """An untried mask, from a uniform point of the box.

    Args:
      space: the search space; at least one mask is untried.
      tried: the earlier trials.
      seed: seed of the search.
    """
    rng = np.random.default_rng((seed, len(tried)))
    return untried(space, space.nearest(rng.random(len(space.free))), {plan for plan, _ in tried}, rng)


def propose_bayesian(space: MaskSpace, tried: Tried, seed: int) -> LayerPlan:
    """The untried mask with the highest expected improvement over the best score, under a Gaussian process.

    This is the search of Draft & Verify with two changes: the process is fitted at the masks instead of the points
    that were rounded to them, and the candidates are untried masks, some random and some near the best ones.

    Args:
      space: the search space; at least one mask is untried.
      tried: the earlier trials.
      seed: seed of the search.
    """
    if len(tried) < FIRST:
        return propose_random(space, tried, seed)
    # bayesian-optimization is maintained, small (optuna requires a database), and used by Draft & Verify.
    from bayes_opt import BayesianOptimization
    from bayes_opt.acquisition import ExpectedImprovement

    rng = np.random.default_rng((seed, len(tried)))
    seen = {plan for plan, _ in tried}
    ranked = [plan for plan, _ in sorted(tried, key=lambda trial: -trial[1])[:_BEST]]
    names = [str(number) for number in space.free]
    acquisition = ExpectedImprovement(xi=0.0)
    optimizer = BayesianOptimization(
        None,
        dict.fromkeys(names, (0.0, 1.0)),
        acquisition_function=acquisition,
        random_state=len(tried),
        verbose=0,
    )
    optimizer.set_gp_params(normalize_y=True, n_restarts_optimizer=0, alpha=_NOISE)
    for plan, score in tried:
        optimizer.space.register(space.corner(plan), score)
    acquisition.y_max = max(score for _, score in tried)  # type: ignore[assignment]

    def improvement(plans: Sequence[LayerPlan], fit: bool) -> np.ndarray:
        points = [dict(zip(names, space.corner(plan), strict=True)) for plan in plans]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the length scale is at its bound, e.g. if all scores are equal
            predicted: Any = optimizer.predict(points, return_std=True, fit_gp=fit)
        return acquisition.base_acq(*predicted)

    def near(plans: Sequence[LayerPlan], moves: Sequence[int]) -> list[LayerPlan]:
        walks = itertools.product(plans, moves, range(_WALKS))
        found = dict.fromkeys(space.neighbour(plan, many, rng) for plan, many, _ in walks)
        return [plan for plan in found if plan not in seen]

    points = dict.fromkeys(space.nearest(point) for point in rng.random((_POINTS, len(names))))
    candidates = [plan for plan in points if plan not in seen] + near(ranked, _MOVES)
    if not candidates:
        return untried(space, ranked[0], seen, rng)
    values = improvement(candidates, fit=True)
    best = [candidates[at] for at in np.argsort(-values, kind="stable")[:5]]
    nearer = near(best, (1, 2)) or best
    nearest = improvement(nearer, fit=False)
    return nearer[int(np.argmax(nearest))] if nearest.max() > values.max() else best[0]


def untried(
    space: MaskSpace, plan: LayerPlan, seen: Collection[LayerPlan], rng: np.random.Generator
) -> LayerPlan:
    """The plan itself if it is untried, otherwise an untried mask, preferably near it.

    Raises:
      ValueError: all masks were tried.
    """
    if plan not in seen:
        return plan
    if len(seen) >= space.size:
        raise ValueError(f"all {space.size} masks were tried")
    for moves in (1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3):
        near = space.neighbour(plan, moves, rng)
        if near not in seen:
            return near
    if space.size <= _LISTED:
        left = [plan for plan in space if plan not in seen]
        return left[rng.integers(len(left))]
    while plan in seen:
        plan = space.nearest(rng.random(len(space.free)))
    return plan
