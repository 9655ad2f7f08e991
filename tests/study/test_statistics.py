"""Verdicts against published figures, against scipy's own functions, and over a thousand simulated studies."""

import dataclasses
import importlib.util
import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import integrate, optimize, stats

from transformer_jax.errors import ConfigError
from transformer_jax.study import paired
from transformer_jax.study.paired import MOST_SEEDS, effect_size, holm, power, seeds_needed
from transformer_jax.study.statistics import compare, sentence, summarise

# Student, "The probable error of a mean", Biometrika 6 (1908), p. 20: hours of sleep gained by ten patients.
DEXTRO = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
LAEVO = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]

BASE = [1.50, 1.52, 1.47, 1.53, 1.49]


def by_seed(losses):
    return dict(enumerate(losses))


def one(variant, base=BASE, **settings):
    """The comparison of a study with one variant."""
    variants = [("base", by_seed(base)), ("variant", variant if isinstance(variant, dict) else by_seed(variant))]
    (comparison,) = compare(variants, "base", **settings)
    return comparison


def shifted(shift, wobble=(0.002, -0.001, 0.0, 0.001, -0.002), base=BASE):
    return [loss + shift + more for loss, more in zip(base, wobble, strict=True)]


# Published figures.


def test_student_1908():
    """t = 4.0621, p = 0.002833 and the interval 0.7001142 to 2.4598858 are R's, `t.test` of its data set `sleep`."""
    c = one(LAEVO, DEXTRO, higher_is_better=True, unit="hours")
    assert c.verdict == "better"
    assert c.pairs == 10
    assert c.difference == pytest.approx(1.58, abs=1e-12)
    assert c.difference / (c.deviation / math.sqrt(10)) == pytest.approx(4.062128, abs=1e-6)
    assert c.p == c.corrected_p == pytest.approx(0.002833, abs=1e-6)
    assert c.interval == c.corrected_interval == pytest.approx((0.7001142, 2.4598858), abs=1e-7)
    assert (
        sentence(c) == "base -> variant: better by 1.5800 hours (95 % interval 0.7001 to 2.4599, p = 0.0028, 10 seeds)"
    )


def test_holm_by_hand():
    """5 x 0.0003, 4 x 0.003, 3 x 0.054, 2 x 0.32, and no less than that: the example in pingouin's documentation."""
    assert holm([0.50, 0.003, 0.32, 0.054, 0.0003]) == pytest.approx([0.64, 0.012, 0.64, 0.162, 0.0015], abs=1e-15)
    assert holm([0.9, 0.8]).tolist() == [1, 1]
    assert holm([0.02, 0.02]).tolist() == [0.04, 0.04]
    assert holm([]).tolist() == []


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_seeds_needed_are_those_of_published_tables(effect, pairs):
    """Matched pairs in G*Power 3.1, for Cohen's small, medium and large effect: two-sided, 5 %, power 80 %."""
    assert seeds_needed(effect) == seeds_needed(-effect) == pairs
    assert power(pairs - 1, effect) < 0.8 <= power(pairs, effect)


def test_the_factor_for_small_samples():
    """0.9299598 for twelve: the example of `J` in the documentation of R's CohensdpLibrary."""
    d = np.random.default_rng(0).normal(1, 1, 12)
    assert effect_size(d) == pytest.approx(0.9299598 * d.mean() / d.std(ddof=1), rel=1e-7)
    assert effect_size(d) == -effect_size(-d)


# scipy's own functions.


@pytest.mark.parametrize("n", [2, 3, 5, 12, 40])
def test_figures_are_those_of_scipy(n):
    random = np.random.default_rng(n)
    before, after = random.normal(1.5, 0.02, (2, n))
    c = one(after, before)
    test = stats.ttest_1samp(after - before, 0)
    assert c.p == pytest.approx(test.pvalue, rel=1e-12)
    assert c.interval == pytest.approx(tuple(test.confidence_interval(0.95)), rel=1e-12)
    assert c.deviation == pytest.approx(stats.tstd(after - before), rel=1e-12)
    s = summarise("after", by_seed(after))
    assert (s.n, s.diverged) == (n, 0)
    assert (s.mean, s.deviation) == pytest.approx((after.mean(), stats.tstd(after)), rel=1e-12)
    assert s.interval == pytest.approx(stats.t.interval(0.95, n - 1, after.mean(), stats.sem(after)), rel=1e-12)
    assert c.variant == dataclasses.replace(s, name="variant")


@pytest.mark.parametrize("n", [2, 5, 8, 12, 13])
def test_the_permutation_test_tries_all_signs(n):
    d = np.random.default_rng(n).normal(0.5, 1, n)
    p = one(2 + d, np.full(n, 2.0)).permutation_p
    if n > paired.EXACT_PAIRS:
        assert p is None
        return
    means = np.array(list(itertools.product([1, -1], repeat=n))) @ d / n
    assert p == np.mean(np.abs(means) >= abs(d.mean()) - 1e-12)


@pytest.mark.parametrize("level", [0.05, 0.05 / 7])
@pytest.mark.parametrize(("pairs", "effect"), [(2, 3.0), (3, 0.2), (5, 1.4), (10, 1.4), (100, 0.3)])
def test_power_is_an_integral(pairs, effect, level):
    """Over the observed deviation, given which t is normal."""
    limit, shift = stats.t.isf(level / 2, pairs - 1), effect * math.sqrt(pairs)

    def found(ratio):
        return stats.norm.sf(limit * ratio - shift) + stats.norm.cdf(-limit * ratio - shift)

    chi = stats.chi(pairs - 1, scale=1 / math.sqrt(pairs - 1))
    total, _ = integrate.quad(lambda ratio: chi.pdf(ratio) * found(ratio), 0, 10, points=[0.01, 1], limit=200)
    assert power(pairs, effect, level) == pytest.approx(total, abs=1e-7)


def test_power_rises_without_gaps():
    pairs = [2, 3, 5, 8, 13, 21, 55, 89, 255, 1000, 10_000, 500_000, MOST_SEEDS]
    for level in (0.05, 0.05 / 7, 0.001):
        table = np.array([[power(n, effect, level) for n in pairs] for effect in np.geomspace(1e-4, 1e4, 25)])
        assert ((table > 0) & (table < 1 + 1e-12)).all()
        assert (np.diff(table, axis=0) > -1e-9).all()
        assert (np.diff(table, axis=1) > -1e-9).all()
        assert np.allclose(table[0, 0], level, rtol=1e-3)
    assert power(2, 1e30) == 1
    assert seeds_needed(1e4) == 2
    assert seeds_needed(1e-9) == MOST_SEEDS


# Verdicts.


@pytest.mark.parametrize(
    ("shift", "settings", "verdict"),
    [
        (0.04, {}, "worse"),
        (-0.04, {}, "better"),
        (0.04, {"higher_is_better": True}, "better"),
        (-0.04, {"higher_is_better": True}, "worse"),
        (0.0, {}, "no difference shown"),
        (0.0, {"smallest": 0.001}, "too few seeds"),
        (0.04, {"smallest": 0.001}, "worse"),
        (0.04, {"smallest": 1.0}, "worse"),
        (0.04, {"quick": True}, "no verdict"),
    ],
)
def test_verdicts(shift, settings, verdict):
    c = one(shifted(shift), **settings)
    assert c.verdict == verdict
    assert c.difference == pytest.approx(shift, abs=1e-12)
    assert (c.corrected_p is None) == (c.corrected_interval is None) == (verdict == "no verdict")
    assert (c.seeds_needed is None) == (verdict != "too few seeds")
    assert bool(c.reason) == (verdict in ("too few seeds", "no verdict"))


def test_seeds_are_enough_from_80_percent_on():
    deviation = one(shifted(0)).deviation
    effect = optimize.brentq(lambda effect: power(5, effect) - 0.8, 0.1, 10)
    assert one(shifted(0), smallest=deviation * effect * 1.001).verdict == "no difference shown"
    few = one(shifted(0), smallest=deviation * effect * 0.999)
    assert (few.verdict, few.seeds_needed) == ("too few seeds", 6)


def test_the_correction_is_for_all_variants():
    """p of 0.02 shows a difference alone and not beside another, even one that diverged."""
    runs = [("base", by_seed(BASE)), ("variant", by_seed(shifted(0.0021)))]
    (alone,) = compare(runs, "base")
    assert 0.0125 < alone.p < 0.05
    assert alone.verdict == "worse"
    for other in (shifted(0), [None] * 5, [None, *shifted(0.5)[1:]]):
        first, second = compare([*runs, ("other", by_seed(other))], "base")
        assert (first.p, first.interval, first.compared) == (alone.p, alone.interval, 2)
        assert first.corrected_p == 2 * alone.p
        assert first.verdict != "worse"
        assert first.corrected_interval[0] < 0 < first.interval[0]
        assert second.compared == 2
    # A difference that is shown takes no further part: the next one is corrected for one variant less.
    first, second = compare([*runs, ("other", by_seed(shifted(0.5)))], "base")
    assert (first.corrected_p, first.verdict) == (alone.p, "worse")
    assert first.corrected_interval == first.interval
    assert second.corrected_interval == paired.interval(second.difference, second.deviation, 5, 0.025)


def test_what_is_found_alone_and_not_together_has_intervals_with_zero():
    runs = [("base", BASE), ("a", shifted(0.0021)), ("b", shifted(0.0020))]
    a, b = compare([(name, by_seed(losses)) for name, losses in runs], "base", smallest=1.0)
    assert 0.025 < a.p < b.p < 0.05 < a.corrected_p == b.corrected_p
    assert a.verdict == b.verdict == "no difference shown"
    assert a.corrected_interval == paired.interval(a.difference, a.deviation, 5, 0.025)
    assert b.corrected_interval[0] < 0 < b.interval[0]


def test_a_power_at_the_corrected_level():
    deviation = one(shifted(0)).deviation
    effect = optimize.brentq(lambda effect: power(5, effect) - 0.85, 0.1, 10)
    runs = [("base", BASE), ("a", shifted(0)), ("b", shifted(0)), ("c", shifted(0))]
    for c in compare([(name, by_seed(losses)) for name, losses in runs], "base", smallest=deviation * effect):
        assert c.verdict == "too few seeds"
        assert c.seeds_needed == seeds_needed(effect, 0.05 / 3) > seeds_needed(effect) == 5


# Degenerate input.


@pytest.mark.parametrize("lost", [None, math.nan, math.inf, -math.inf, np.float32("nan"), 1e300])
def test_diverged_runs_are_counted(lost):
    runs = by_seed(shifted(0.04)) | {3: lost}
    c = one(runs)
    assert (c.variant.n, c.variant.diverged, c.pairs, c.both_diverged) == (4, 1, 4, 0)
    assert (c.verdict, c.reason) == ("no verdict", "variant diverged at seed 3 and base at none")
    assert c.corrected_p is None
    assert c.difference == pytest.approx(0.04, abs=0.001)
    swapped = one(BASE, list(runs.values()))
    assert (swapped.verdict, swapped.reason) == ("no verdict", "variant diverged at none and base at seed 3")
    elsewhere = one(runs, [BASE[0], None, *BASE[2:]])
    assert (elsewhere.verdict, elsewhere.pairs) == ("no verdict", 3)
    (c,) = compare([("base", dict.fromkeys([17, 9, 1], 1.5)), ("variant", dict.fromkeys([17, 9, 1], lost))], "base")
    assert c.reason == "variant diverged at seeds 1, 9, 17 and base at none"


def test_what_diverges_on_both_sides_leaves_pairs():
    c = one([None, *shifted(0.04)[1:]], [None, *BASE[1:]])
    assert (c.verdict, c.pairs, c.both_diverged, c.variant.diverged) == ("worse", 4, 1, 1)
    assert sentence(c).endswith("4 seeds, both diverged at 1 more)")


def test_seeds_of_one_side_are_left_out():
    c = one(by_seed(shifted(0.04)) | {7: 9.0}, [*BASE, 1.4, None])
    assert (c.verdict, c.pairs, c.unpaired) == ("worse", 5, 3)
    assert c.difference == pytest.approx(0.04, abs=1e-12)
    assert (c.variant.n, c.base.n, c.base.diverged) == (6, 6, 1)
    assert sentence(c).endswith("5 seeds, 3 seeds of one side alone left out)")


@pytest.mark.parametrize(("variant", "pairs"), [({}, 0), ({9: 1.5}, 0), ({0: 1.5}, 1), ({0: None}, 0)])
def test_too_few_pairs(variant, pairs):
    c = one(variant, [None if variant == {0: None} else 1.4])
    assert (c.verdict, c.pairs, c.seeds_needed) == ("too few seeds", pairs, None)
    assert c.deviation is c.interval is c.p is c.permutation_p is c.effect is None
    assert c.difference == (pytest.approx(0.1) if pairs else None)
    assert c.variant.interval is c.variant.deviation is None


def test_two_pairs_have_no_effect_size():
    c = one([1.5, 1.6], [1.4, 1.3])
    assert c.effect is None
    assert c.p is not None


@pytest.mark.parametrize("rounding", [0.0, 2.3e-16])
def test_equal_runs_show_no_difference(rounding):
    c = one([loss + rounding for loss in BASE])
    assert (c.verdict, c.p, c.corrected_p, c.permutation_p, c.effect) == ("no difference shown", 1, 1, 1, 0)
    assert c.interval == c.corrected_interval == (0, 0)


@pytest.mark.parametrize("base", [BASE, [1.5] * 5, [1e6, 1e-6, 3e3, 7, 0.1]])
def test_the_same_difference_at_every_seed_is_no_verdict(base):
    """A t-test has p = 0 for it, or a number that is all rounding."""
    c = one([loss + 0.1 for loss in base], base)
    assert (c.verdict, c.p, c.corrected_p, c.effect) == ("no verdict", None, None, None)
    assert c.reason == "the difference is the same at every seed; see that seeds reach the training"
    assert c.difference == pytest.approx(0.1)


def test_a_base_alone_has_nothing_beside_it():
    assert compare([("base", by_seed(BASE))], "base") == []


@pytest.mark.parametrize(
    ("variants", "settings", "message"),
    [
        ([("base", {}), ("base", {})], {}, "two variants are called 'base': give each a name of its own"),
        ([("baze", {}), ("a", {})], {}, "unknown base 'base'; did you mean 'baze'?"),
        ([], {}, "there are no variants: give the base 'base' too"),
        ([("base", {"0": 1.5})], {}, "a seed of 'base' must be a whole number, got '0'"),
        ([("base", {0: "1.5"})], {}, "'base' at seed 0 must have a number, or None if it diverged, got '1.5'"),
        ([("base", {})], {"smallest": 0.0}, "smallest must be a positive number of nats, got 0.0"),
        ([("base", {})], {"smallest": math.nan}, "smallest must be a positive number of nats, got nan"),
    ],
)
def test_errors(variants, settings, message):
    with pytest.raises(ConfigError) as error:
        compare(variants, "base", **settings)
    assert str(error.value) == message


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    spec = importlib.util.spec_from_file_location("again", paired.__file__)
    with pytest.raises(ConfigError, match=r"need scipy, .* pip install 'transformer-jax\[report\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


# Sentences.

SENTENCES = [
    "none: worse by 0.0421 nats (95 % interval 0.0401 to 0.0441, 0.0387 to 0.0455 and p < 0.0001 after correction "
    "for 7 variants, 5 seeds)",
    "alibi: better by 0.0421 nats (95 % interval 0.0418 to 0.0424, 0.0415 to 0.0427 and p < 0.0001 after correction "
    "for 7 variants, 5 seeds)",
    "learned: no difference shown, +0.0000 nats (95 % interval -0.0020 to 0.0020, -0.0031 to 0.0031 and p = 1.0000 "
    "after correction for 7 variants, 5 seeds)",
    "relu: too few seeds: about 32 would find 0.01 nats, +0.0100 nats (95 % interval -0.0096 to 0.0296, -0.0205 "
    "to 0.0405 and p = 0.9208 after correction for 7 variants, 5 seeds)",
    "lost: no verdict: lost diverged at seeds 1, 2 and rotary at none, -0.0067 nats (95 % interval -0.0584 to 0.0450, "
    "3 seeds)",
    "one: too few seeds: a comparison needs two with a loss on both sides, +0.0000 nats (1 seed, 4 seeds of one side "
    "alone left out)",
    "little: worse by 0.0010 nats, less than the 0.01 of interest (95 % interval 0.0009 to 0.0012, 0.0008 to 0.0013 "
    "and p = 0.0002 after correction for 7 variants, 5 seeds)",
]


def test_sentences():
    def noisy(shift):
        return shifted(shift, (0.02, -0.01, 0.0, 0.01, -0.02))

    runs = [
        ("rotary", BASE),
        ("none", shifted(0.0421)),
        ("alibi", [loss - more for loss, more in zip(BASE, [0.0421, 0.0425, 0.0419, 0.0422, 0.0418], strict=True)]),
        ("learned", shifted(0.0)),
        ("relu", noisy(0.01)),
        ("lost", [1.5, None, None, 1.5, 1.5]),
        ("one", [1.5]),
        ("little", [loss + more for loss, more in zip(BASE, [0.001, 0.0012, 0.0009, 0.0011, 0.001], strict=True)]),
    ]
    said = [sentence(c) for c in compare([(name, by_seed(losses)) for name, losses in runs], "rotary")]
    assert all(line.startswith("rotary -> ") for line in said)
    assert [line.removeprefix("rotary -> ") for line in said] == SENTENCES
    assert sentence(one(shifted(0.0421), quick=True)) == (
        "base -> variant: no verdict: a quick study shows that it runs, and nothing about its variants, +0.0421 nats "
        "(95 % interval 0.0401 to 0.0441, 5 seeds)"
    )
    nothing = one(shifted(-1e-7, (2e-6, -1e-6, 0, 1e-6, -2e-6)))
    assert nothing.difference < 0
    assert sentence(nothing).endswith("shown, +0.0000 nats (95 % interval 0.0000 to 0.0000, p = 0.8944, 5 seeds)")


# Simulated studies.


def studies(count, n, effects, rng, *, shared=0.02, own=0.005):
    """Losses of a base and its variants: what a seed does to all, and what a run has of its own.

    Effects are true differences in standard deviations of the paired difference, which is sqrt(2) x own.
    """
    shifts = np.array([0.0, *effects]) * own * math.sqrt(2)
    for _ in range(count):
        seed = rng.normal(0, shared, n)
        runs = 1.5 + shifts[:, None] + seed + rng.normal(0, own, (len(shifts), n))
        yield [(f"variant {i}" if i else "base", by_seed(row)) for i, row in enumerate(runs)]


def test_of_studies_without_a_difference_few_find_one():
    rng = np.random.default_rng(1908)
    found = [[c.verdict for c in compare(study, "base", smallest=1.0)] for study in studies(1000, 5, [0] * 3, rng)]
    wrong = np.mean([bool({"better", "worse"} & set(verdicts)) for verdicts in found])
    assert 0.02 < wrong <= 0.06


def test_a_true_difference_beside_others_makes_no_more_find_wrong_ones():
    rng = np.random.default_rng(1979)
    found = [
        [c.verdict in ("better", "worse") for c in compare(study, "base", smallest=1.0)]
        for study in studies(600, 5, [0, 30, 0], rng)
    ]
    found = np.array(found)
    assert found[:, 1].mean() > 0.99
    assert 0.02 < (found[:, 0] | found[:, 2]).mean() <= 0.06


def test_what_80_percent_power_says_is_found_with_80_percent():
    effect = optimize.brentq(lambda effect: power(8, effect) - 0.8, 0.1, 10)
    rng = np.random.default_rng(1988)
    verdicts = [compare(study, "base", smallest=1.0)[0].verdict for study in studies(1000, 8, [effect], rng)]
    assert verdicts.count("worse") / 1000 == pytest.approx(0.8, abs=0.04)
    assert verdicts.count("better") == 0


# Properties.

GRID = st.integers(-200, 200).map(lambda k: 2 + k / 1024)  # sums and differences of these are exact
LOSS = GRID | st.sampled_from([None, math.nan, math.inf])
SEEDS = st.sampled_from([0, 1, 8, 9, 16, 17, 64])  # a set of these has no order of its own
RUNS = st.dictionaries(SEEDS, LOSS, max_size=7)
WHOLE = st.lists(GRID, min_size=5, max_size=5).map(by_seed)
STUDY = st.lists(RUNS | WHOLE, min_size=1, max_size=5).map(
    lambda all_runs: [(f"v{i}", runs) for i, runs in enumerate(all_runs)]
)


def plain(value):
    """All numbers, texts and Nones in a result."""
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple):
        return [value]
    return [leaf for part in value for leaf in plain(part)]


@given(STUDY)
def test_no_figure_is_nan_and_each_has_its_sentence(study):
    comparisons = compare(study, "v0")
    assert [c.variant.name for c in comparisons] == [name for name, _ in study[1:]]
    for c in comparisons:
        for leaf in plain(dataclasses.asdict(c)):
            assert leaf is None or isinstance(leaf, str) or (type(leaf) in (int, float) and math.isfinite(leaf))
        assert all(p is None or 0 <= p <= 1 for p in (c.p, c.permutation_p, c.corrected_p))
        text = sentence(c)
        assert text.startswith(f"v0 -> {c.variant.name}: {c.verdict}")
        assert "nan" not in text
        assert "None" not in text


@given(STUDY)
def test_the_corrected_interval_agrees_with_the_verdict(study):
    for c in compare(study, "v0"):
        if c.corrected_interval is None:
            assert c.verdict in ("no verdict", "too few seeds")
            continue
        low, high = c.corrected_interval
        assert (c.verdict == "worse") == (low > 0)
        assert (c.verdict == "better") == (high < 0)
        assert low <= c.interval[0] <= c.difference <= c.interval[1] <= high
        assert c.p <= c.corrected_p <= min(1, c.p * c.compared) + 1e-12
        assert (c.seeds_needed is not None) == (c.verdict == "too few seeds")
        assert c.seeds_needed is None or c.seeds_needed > c.pairs


@given(STUDY, st.randoms(use_true_random=False))
def test_the_order_of_seeds_and_variants_changes_nothing(study, random):
    def mixed(items):
        items = list(items)
        random.shuffle(items)
        return items

    other = mixed((name, dict(mixed(runs.items()))) for name, runs in study)
    assert {c.variant.name: c for c in compare(other, "v0")} == {c.variant.name: c for c in compare(study, "v0")}


@given(RUNS | WHOLE, RUNS | WHOLE)
def test_swapping_the_sides_turns_the_sign(first, second):
    turned = {"better": "worse", "worse": "better"}
    (there,), (back,) = (compare([("a", first), ("b", second)], base) for base in "ab")
    assert back.verdict == turned.get(there.verdict, there.verdict)
    assert (back.base, back.variant) == (there.variant, there.base)
    if there.difference is not None:
        assert back.difference == -there.difference
    if there.interval is not None:
        assert back.interval == (-there.interval[1], -there.interval[0])
    assert (back.p, back.corrected_p, back.seeds_needed) == (there.p, there.corrected_p, there.seeds_needed)
    (higher,) = compare([("a", first), ("b", second)], "a", higher_is_better=True)
    assert dataclasses.replace(higher, verdict=there.verdict) == there
    assert higher.verdict == back.verdict


@given(STUDY, st.integers(-64, 64))
def test_a_constant_added_to_all_changes_no_difference(study, constant):
    def more(loss):
        return None if loss is None else loss + constant

    higher = [(name, {seed: more(loss) for seed, loss in runs.items()}) for name, runs in study]
    for c, other in zip(compare(study, "v0"), compare(higher, "v0"), strict=True):
        assert dataclasses.replace(other, base=c.base, variant=c.variant) == c


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_none_and_bonferroni(p):
    corrected = holm(p)
    assert (corrected >= p).all()
    assert (corrected <= np.minimum(np.array(p) * len(p), 1)).all()
    assert (np.diff(corrected[np.argsort(p)]) >= 0).all()
    assert corrected[np.argmin(p)] == min(1, min(p) * len(p))


@given(st.integers(2, 60), st.floats(0.3, 5))
def test_seeds_needed_is_the_fewest(variants, effect):
    level = 0.05 / variants
    needed = seeds_needed(effect, level)
    assert power(needed, effect, level) >= 0.8
    assume(needed > 2)
    assert power(needed - 1, effect, level) < 0.8
