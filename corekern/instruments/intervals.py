"""The statistics of the instruments: confidence intervals in closed form, and one bootstrap."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Interval:
    """Bounds that hold the true value at the stated confidence."""

    low: float
    high: float

    def excludes(self, value: float) -> bool:
        """Whether a value lies outside."""
        return not self.low <= value <= self.high


@dataclass(frozen=True)
class Line:
    """A least-squares line, and how sure its slope is."""

    slope: float
    intercept: float
    interval: Interval
    """Of the slope."""


def t_quantile(probability: float, degrees: int) -> float:
    """A quantile of Student's t, from the normal's by the Cornish-Fisher expansion to the fourth order.

    The error is under 1e-4 of the value from 8 degrees of freedom at probabilities to 0.975, which is all that is
    asked here. Source: Abramowitz and Stegun, 26.7.5.

    >>> round(t_quantile(0.975, 20), 3)
    2.086
    """
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**order for order, term in enumerate(terms, 1))


def fit_line(x: np.ndarray, y: np.ndarray, level: float = LEVEL) -> Line:
    """A least-squares line whose slope's interval does not take every y to be equally noisy.

    Args:
        x, y: (n,) numbers, n at least 10, x not all equal.
        level: of confidence.

    Drift makes late differences both larger and more scattered, so the usual standard error would be too small:
    this is White's (1980), scaled by n / (n - 2). Points are taken to be independent.

    >>> line = fit_line(np.arange(10.0), 2 * np.arange(10.0) + 1)
    >>> line.slope, line.intercept, line.interval.excludes(0)
    (2.0, 1.0, True)
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ (y - y.mean())) / spread
    intercept = float(y.mean() - slope * x.mean())
    residuals = y - y.mean() - slope * centred
    degrees = len(x) - 2
    error = math.sqrt(float(centred**2 @ residuals**2) * len(x) / degrees) / spread
    reach = t_quantile((1 + level) / 2, degrees) * error
    return Line(slope, intercept, Interval(slope - reach, slope + reach))


def wilson(successes: float, trials: float, level: float = LEVEL) -> Interval:
    """The score interval of a fraction of independent trials (Wilson, 1927): sound at 0, at 1 and for few trials.

    >>> interval = wilson(8, 10)
    >>> round(interval.low, 4), round(interval.high, 4)
    (0.4902, 0.9433)
    """
    z = NormalDist().inv_cdf((1 + level) / 2)
    fraction = successes / trials
    centre = fraction + z * z / (2 * trials)
    reach = z * math.sqrt(fraction * (1 - fraction) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    # At 0 and 1 the two terms cancel to the bound itself, but for rounding.
    return Interval(max(0.0, (centre - reach) / scale), min(1.0, (centre + reach) / scale))


def normal(mean: float, variance: float, count: float, level: float = LEVEL) -> Interval:
    """The interval of a mean of `count` independent values of a known variance."""
    reach = NormalDist().inv_cdf((1 + level) / 2) * math.sqrt(variance / count)
    return Interval(mean - reach, mean + reach)


def bootstrap_ratio(
    numerators: np.ndarray, denominators: np.ndarray, level: float = LEVEL, seed: int = 0
) -> Interval:
    """The percentile interval of sum(numerators) / sum(denominators) when whole requests are drawn again.

    Args:
        numerators, denominators: (requests,) counts; some denominator is above 0.
        level: of confidence.
        seed: of the draws: the same counts give the same interval.
    """
    requests = len(numerators)
    rng = np.random.default_rng(seed)
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    ratios = []
    step = max(1, (1 << 20) // requests)  # draws at a time, of 8 MiB
    for begin in range(0, RESAMPLES, step):
        drawn = rng.integers(0, requests, (min(step, RESAMPLES - begin), requests))
        totals = below[drawn].sum(1)
        ratios.append(above[drawn].sum(1)[totals > 0] / totals[totals > 0])
    low, high = np.quantile(np.concatenate(ratios), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(low), float(high))


def difference(value: float, interval: Interval, other: float, other_interval: Interval) -> Interval:
    """The interval of value - other, two independent estimates that each have one.

    Each side's own reach in the direction that matters, added as squares: Newcombe's hybrid (1998), for fractions
    with Wilson intervals as for anything else.
    """
    centre = value - other
    return Interval(
        centre - math.hypot(value - interval.low, other_interval.high - other),
        centre + math.hypot(interval.high - value, other - other_interval.low),
    )
