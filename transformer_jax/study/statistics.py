"""What an ablation over seeds shows: summaries, comparisons with a base, and a sentence for each.

Runs of one seed see the same data in the same order. So variants are compared with the base seed by seed, and what a
seed does to both is gone from their difference.

The rule of all verdicts is a two-sided paired t-test of each variant at 5 %, corrected by Holm for the number of
variants: at most 5 % of the studies in which nothing matters find anything. The corrected interval is made at the level
at which Holm's procedure decided on the variant, and leaves out zero exactly where a difference was found.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Literal

import numpy as np

from transformer_jax.checks import unknown
from transformer_jax.errors import ConfigError
from transformer_jax.study.paired import (
    LEVEL,
    POWER,
    ROUNDING,
    Interval,
    effect_size,
    holm,
    interval,
    paired_p,
    permutation_p,
    power,
    seeds_needed,
)

Losses = Mapping[int, float | None]
"""Final loss by seed; None, NaN or infinite for a run that diverged."""
Verdict = Literal["better", "worse", "no difference shown", "too few seeds", "no verdict"]

_DIVERGED = float(np.finfo(np.float32).max)  # training cannot tell more from infinity


@dataclasses.dataclass(frozen=True)
class Summary:
    """The runs of one variant. Losses are in nats per character, or in the unit of the metric.

    Attributes:
      name: Of the variant.
      n: Runs with a loss.
      diverged: Runs without one; they are part of no other figure.
      mean: Of the losses; None without any.
      deviation: Standard deviation (n - 1) of the losses; None below two.
      interval: 95 % interval of the mean (Student's t); None below two losses.
    """

    name: str
    n: int
    diverged: int
    mean: float | None
    deviation: float | None
    interval: Interval | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A variant beside the base, over the seeds at which neither diverged. Differences are variant - base.

    Attributes:
      base: All runs of the base, paired or not.
      variant: All runs of the variant, paired or not.
      verdict: See `compare`.
      reason: Why there is no verdict, or why the seeds are too few; else empty.
      pairs: Seeds with a loss on both sides.
      both_diverged: Seeds at which both diverged.
      unpaired: Seeds that only one side was run with.
      difference: Mean of the paired differences, in `unit`; None without a pair.
      deviation: Their standard deviation (n - 1), in `unit`; None below two pairs.
      interval: 95 % interval of the difference, in `unit`, as if this were the only variant; None below two pairs.
      p: Of the paired t-test, two-sided, uncorrected. 1 where all differences are zero; None where there is no test,
        which is below two pairs and where all differences are equal and not zero.
      permutation_p: Exact, two-sided, uncorrected, from all changes of signs: a second opinion that assumes no normal
        distribution. Never below 2^(1 - pairs), which is 0.0625 for five. None as `p`, and above 12 pairs.
      effect: Hedges' correction of d_z, see `effect_size`. None as `p`, and below three pairs.
      compared: Variants that are corrected for: all of the study but the base, whatever became of them.
      smallest: The smallest difference of interest, in `unit`.
      unit: Of the losses.
      corrected_p: p after Holm's correction; None where it gives no verdict.
      corrected_interval: Interval of the difference, in `unit`, with confidence 1 - 0.05 / k, where k variants were
        left at the step of Holm's procedure that decided on this one; None as `corrected_p`. That it leaves out zero
        is said for all variants together; where it does, its width holds for this variant alone.
      seeds_needed: Where a verdict of "too few seeds" has a deviation to estimate it from: how many would do.
    """

    base: Summary
    variant: Summary
    verdict: Verdict
    reason: str
    pairs: int
    both_diverged: int
    unpaired: int
    difference: float | None
    deviation: float | None
    interval: Interval | None
    p: float | None
    permutation_p: float | None
    effect: float | None
    compared: int
    smallest: float
    unit: str
    corrected_p: float | None = None
    corrected_interval: Interval | None = None
    seeds_needed: int | None = None


def summarise(name: str, losses: Losses) -> Summary:
    """The runs of one variant in figures.

    Raises:
      ConfigError: For a seed that is no whole number, or a loss that is no number.
    """
    runs = _floats(name, losses)
    x = np.array([runs[seed] for seed in sorted(runs) if runs[seed] is not None])
    n = len(x)
    mean, deviation = float(x.mean()) if n else None, float(x.std(ddof=1)) if n > 1 else None
    return Summary(name, n, len(runs) - n, mean, deviation, interval(mean, deviation, n) if n > 1 else None)


def compare(
    variants: Iterable[tuple[str, Losses]],
    base: str,
    *,
    smallest: float = 0.01,
    higher_is_better: bool = False,
    quick: bool = False,
    unit: str = "nats",
) -> list[Comparison]:
    """Compares each variant with the base, in the order given.

    The verdict is the first of these that holds:
      "no verdict": The study was a quick one; of the seeds that both were run with, the variant diverged at others than
        the base, which leaves no fair sample; or all differences are equal and not zero, as they never are where the
        seeds reach the training.
      "too few seeds": Fewer than two pairs.
      "better", "worse": p is at most 0.05 after Holm's correction, however small the difference.
      "too few seeds": If the true deviation is the one observed, a true difference of `smallest` is found, at the level
        of the corrected interval, with less than 80 % power.
      "no difference shown": It is found with 80 %, and was not.

    A variant that no test gives a verdict is corrected for all the same, as if its p were 1.

    Args:
      variants: Name and losses of each variant and of the base.
      base: Name of the one that the others are compared with.
      smallest: The smallest difference of interest, in `unit`.
      higher_is_better: For metrics such as accuracy.
      quick: The runs are only to show that the study works.
      unit: Of the losses.

    Raises:
      ConfigError: For a name given twice, a base that is not there, a `smallest` that is not positive, and what
        `summarise` refuses.
    """
    runs: dict[str, dict[int, float | None]] = {}
    for name, losses in variants:
        if name in runs:
            raise ConfigError(f"two variants are called {name!r}: give each a name of its own")
        runs[name] = _floats(name, losses)
    if base not in runs:
        raise ConfigError(unknown("base", base, runs) if runs else f"there are no variants: give the base {base!r} too")
    if not 0 < smallest < math.inf:
        raise ConfigError(f"smallest must be a positive number of {unit}, got {smallest}")

    drafts = [_draft(base, runs, name, smallest, unit) for name in runs if name != base]
    if quick:
        reason = "a quick study shows that it runs, and nothing about its variants"
        drafts = [dataclasses.replace(draft, verdict="no verdict", reason=reason) for draft in drafts]
    tested = [draft.verdict == "no difference shown" for draft in drafts]
    p = np.array([draft.p if test else 1.0 for draft, test in zip(drafts, tested, strict=True)])
    corrected = holm(p)
    found = corrected <= LEVEL
    left = np.where(found, np.sum(p >= p[:, None], axis=1), np.sum(~found))
    return [
        _judge(draft, float(corrected[i]), LEVEL / int(left[i]), higher_is_better) if tested[i] else draft
        for i, draft in enumerate(drafts)
    ]


def sentence(comparison: Comparison) -> str:
    """A comparison in words.

    Example:
      "rotary -> none: worse by 0.0421 nats (95 % interval 0.0312 to 0.0530, 0.0251 to 0.0591 and p = 0.0016 after
      correction for 7 variants, 5 seeds)"
    """
    c = comparison
    decided = c.verdict in ("better", "worse")
    flip = decided and c.difference < 0
    if decided:
        claim = f"{c.verdict} by {abs(c.difference):.4f} {c.unit}"
        claim += f", less than the {c.smallest:g} of interest" if abs(c.difference) < c.smallest else ""
    else:
        claim = f"{c.verdict}: {c.reason}" if c.reason else c.verdict
        claim += f", {c.difference:+z.4f} {c.unit}" if c.difference is not None else ""

    evidence = [f"95 % interval {_words(c.interval, flip)}"] if c.interval else []
    if c.corrected_p is not None:
        p = f"p = {c.corrected_p:.4f}" if c.corrected_p >= 0.0001 else "p < 0.0001"
        if c.compared > 1:
            p = f"{_words(c.corrected_interval, flip)} and {p} after correction for {c.compared} variants"
        evidence.append(p)
    evidence.append(_seeds(c.pairs))
    evidence += [f"both diverged at {c.both_diverged} more"] if c.both_diverged else []
    evidence += [f"{_seeds(c.unpaired)} of one side alone left out"] if c.unpaired else []
    return f"{c.base.name} -> {c.variant.name}: {claim} ({', '.join(evidence)})"


def _draft(base: str, runs: dict[str, dict[int, float | None]], name: str, smallest: float, unit: str) -> Comparison:
    """All that can be said of a variant alone; "no difference shown" stands for the verdict that a test is to give."""
    before, after = runs[base], runs[name]
    shared = sorted(before.keys() & after.keys())
    lost = [[seed for seed in shared if losses[seed] is None] for losses in (after, before)]
    pairs = np.array([(after[s], before[s]) for s in shared if s not in lost[0] + lost[1]]).reshape(-1, 2)
    d, n = pairs[:, 0] - pairs[:, 1], len(pairs)
    rounding = ROUNDING * np.abs(pairs).max(initial=0)
    d[np.abs(d) <= rounding] = 0
    difference = float(d.mean()) if n else None
    deviation = float(d.std(ddof=1)) if n > 1 else None

    p, verdict, reason = None, "no difference shown", ""
    if n < 2:
        verdict, reason = "too few seeds", "a comparison needs two with a loss on both sides"
    elif deviation > rounding:
        p = paired_p(*pairs.T)
    elif not d.any():
        p = 1.0
    else:
        verdict, reason = "no verdict", "the difference is the same at every seed; see that seeds reach the training"
    if lost[0] != lost[1]:
        at = [
            f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}" if seeds else "none"
            for seeds in lost
        ]
        verdict, reason = "no verdict", f"{name} diverged at {at[0]} and {base} at {at[1]}"
    return Comparison(
        base=summarise(base, before),
        variant=summarise(name, after),
        verdict=verdict,
        reason=reason,
        pairs=n,
        both_diverged=len(set(lost[0]) & set(lost[1])),
        unpaired=len(before.keys() ^ after.keys()),
        difference=difference,
        deviation=deviation,
        interval=interval(difference, deviation, n) if n > 1 else None,
        p=p,
        permutation_p=None if p is None else permutation_p(d),
        effect=None if p is None else effect_size(d),
        compared=len(runs) - 1,
        smallest=smallest,
        unit=unit,
    )


def _judge(draft: Comparison, p: float, level: float, higher_is_better: bool) -> Comparison:
    """The verdict of a test, from its corrected p and the level at which it was decided."""
    verdict, reason, needed = "no difference shown", "", None
    if p <= LEVEL:
        verdict = "better" if (draft.difference > 0) == higher_is_better else "worse"
    elif draft.deviation > 0 and power(draft.pairs, effect := draft.smallest / draft.deviation, level) < POWER:
        verdict, needed = "too few seeds", seeds_needed(effect, level)
        reason = f"about {needed} would find {draft.smallest:g} {draft.unit}"
    return dataclasses.replace(
        draft,
        verdict=verdict,
        reason=reason,
        corrected_p=p,
        corrected_interval=interval(draft.difference, draft.deviation, draft.pairs, level),
        seeds_needed=needed,
    )


def _floats(name: str, losses: Losses) -> dict[int, float | None]:
    """The losses as plain floats, None for all that are none."""
    for seed, loss in losses.items():
        if not isinstance(seed, Integral):
            raise ConfigError(f"a seed of {name!r} must be a whole number, got {seed!r}")
        if not isinstance(loss, Real | None):
            raise ConfigError(f"{name!r} at seed {seed} must have a number, or None if it diverged, got {loss!r}")
    finite = {seed: loss is not None and abs(loss) < _DIVERGED for seed, loss in losses.items()}
    return {int(seed): float(loss) if finite[seed] else None for seed, loss in losses.items()}


def _seeds(n: int) -> str:
    return "1 seed" if n == 1 else f"{n} seeds"


def _words(bounds: Interval, flip: bool) -> str:
    low, high = sorted(-x for x in bounds) if flip else bounds
    return f"{low:z.4f} to {high:z.4f}"
