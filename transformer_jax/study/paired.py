"""The arithmetic of paired samples: tests, their correction, intervals, effects, and how many pairs find one."""

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from transformer_jax.errors import ConfigError

try:
    from scipy import stats
except ImportError as error:
    raise ConfigError(
        "the statistics of a study need scipy, and it is not installed: pip install 'transformer-jax[report]'"
    ) from error

LEVEL = 0.05
"""Share of studies without any difference that may find one; 1 - LEVEL is the confidence of intervals."""
POWER = 0.8
"""Share of studies that find a true difference, where their seeds are called enough for it."""
EXACT_PAIRS = 12
"""Most pairs for the exact permutation test, which tries all 2^pairs signs."""
MOST_SEEDS = 1_000_000
"""Where the search for a number of seeds ends."""
ROUNDING = 64 * float(np.finfo(np.float64).eps)
"""What is smaller than this, relative to the values it comes from, is zero."""

Interval = tuple[float, float]


def interval(mean: float, deviation: float, n: int, level: float = LEVEL) -> Interval:
    """The interval of a mean with confidence 1 - level (Student's t), from their deviation (n - 1); n is at least 2."""
    half = float(stats.t.isf(level / 2, n - 1)) * deviation / math.sqrt(n)
    return mean - half, mean + half


def paired_p(first: np.ndarray, second: np.ndarray) -> float:
    """Two-sided p of the paired t-test, for two pairs or more whose differences differ."""
    return float(stats.ttest_rel(first, second).pvalue)


def permutation_p(differences: np.ndarray) -> float | None:
    """Two-sided p of all changes of signs, which no distribution is assumed for; None above EXACT_PAIRS differences."""
    if len(differences) > EXACT_PAIRS:
        return None
    how = {"permutation_type": "samples", "n_resamples": np.inf, "vectorized": True}
    return float(stats.permutation_test((differences,), np.mean, **how).pvalue)


def holm(p: Sequence[float] | np.ndarray) -> np.ndarray:
    """p-values corrected for their number (Holm 1979): the smallest of k that are left is multiplied by k.

    Returns:
      In the order given. However the tests depend on one another, at most a share x of all families has a true null
      hypothesis at x or below.
    """
    p = np.asarray(p, np.float64)
    order = np.argsort(p)
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return corrected


def effect_size(differences: Sequence[float] | np.ndarray) -> float | None:
    """The mean paired difference in standard deviations of the differences, without the bias of small samples.

    Cohen's d_z (Lakens 2013, "Calculating and reporting effect sizes to facilitate cumulative science") times the exact
    factor of Hedges 1981. At 1 the mean is as far from zero as a seed's difference typically is from the mean: it says
    how surely a seed shows the difference, and not how much that matters.

    Returns:
      None below three differences, whose factor is zero, and where all are equal and not zero; 0 where all are zero.
    """
    d, freedom = np.asarray(differences, np.float64), len(differences) - 1
    if freedom < 2:
        return None
    if not d.any():
        return 0.0
    deviation = d.std(ddof=1)
    if deviation <= ROUNDING * np.abs(d).max():
        return None
    factor = math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom - 1) / 2)) / math.sqrt(freedom / 2)
    return float(d.mean() / deviation * factor)


def power(pairs: int, effect: float, level: float = LEVEL) -> float:
    """The share of studies whose paired t-test finds a true difference, from the noncentral t distribution.

    Args:
      pairs: At least 2.
      effect: True difference divided by the true standard deviation of the differences (d_z).
      level: Of the two-sided test.
    """
    limit = stats.t.isf(level / 2, pairs - 1)
    shift = min(abs(effect) * math.sqrt(pairs), 1e6)  # past that scipy has no figure, and the power is 1
    # Both tails by sf: nct.cdf is NaN from a shift of about 5 on where it is near zero.
    return float(stats.nct.sf(limit, pairs - 1, shift) + stats.nct.sf(limit, pairs - 1, -shift))


def seeds_needed(effect: float, level: float = LEVEL) -> int:
    """The fewest pairs whose paired t-test finds a true difference with 80 % power, at most MOST_SEEDS.

    Example:
      >>> seeds_needed(0.5), seeds_needed(0.8)
      (34, 15)
    """
    return bisect_left(range(MOST_SEEDS), True, lo=2, key=lambda pairs: power(pairs, effect, level) >= POWER)
