import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from transformer_jax import Config, DataConfig, ModelConfig
from transformer_jax.data.batches import MaskedWindows, TextCorpus, Windows, hide, split_bounds
from transformer_jax.data.tasks import load_corpus
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import ConfigError, DataError

VOCAB = Vocab("abcdefghij", "gap")


def test_exactly_one_window():
    batch = Windows(np.arange(17), 16, seed=0).batch(0, 50)
    np.testing.assert_array_equal(batch["inputs"], np.tile(np.arange(16), (50, 1)))
    np.testing.assert_array_equal(batch["targets"], np.tile(np.arange(1, 17), (50, 1)))


def test_all_starts_are_reached():
    windows = Windows(np.arange(20), 16, seed=0)
    assert windows.per_epoch == 4
    batch = windows.batch(0, 4)
    assert set(batch["inputs"][:, 0]) == {0, 1, 2, 3}
    assert 19 in batch["targets"]
    assert batch["inputs"].shape == batch["targets"].shape == batch["weights"].shape == (4, 16)


SEEDS = st.integers(0, 2**32 - 1)


@examples(50)
@given(st.integers(1, 60), st.integers(1, 16), st.integers(1, 90), SEEDS, st.integers(0, 3))
def test_each_window_once_per_epoch(epoch, context, size, seed, skipped):
    """Also where an epoch ends within a batch, or a batch has several."""
    windows = Windows(np.arange(epoch + context), context, seed)
    assert windows.per_epoch == epoch
    first = skipped * epoch
    batches = [windows.batch(i, size) for i in range(first, first + 2 * epoch, size)]
    inputs, targets = (np.concatenate([batch[name] for batch in batches]) for name in ("inputs", "targets"))
    for start in (0, epoch):
        assert sorted(inputs[start : start + epoch, 0]) == list(range(epoch))
    np.testing.assert_array_equal(inputs, inputs[:, :1] + np.arange(context))
    np.testing.assert_array_equal(targets, inputs + 1)
    assert all((batch["weights"] == 1).all() for batch in batches)


@examples(50)
@given(
    st.booleans(),
    st.integers(1, 60),
    st.integers(1, 16),
    SEEDS,
    st.integers(0, 100) | st.integers(0, 2**40),
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
)
def test_examples_do_not_depend_on_how_they_are_cut(masks, epoch, context, seed, first, cuts):
    """Into batches, or into the rows that processes read of one batch."""
    text = np.arange(epoch + context) % 10
    training = Windows(text, context, seed)
    if masks:
        training = MaskedWindows(training, VOCAB, 0.3, seed)
    bounds = np.cumsum([0, *cuts])
    size = int(bounds[-1])
    whole = training.batch(first, size)
    spans = [range(int(a), int(b)) for a, b in itertools.pairwise(bounds)]
    for parts in (
        [training.batch(first + span.start, len(span)) for span in spans],
        [training.batch(first, size, span) for span in spans],
    ):
        for name, array in whole.items():
            np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), array)
            assert array.shape == (size, context)


def test_order_is_a_function_of_the_seed():
    def starts(seed, first, size):
        return Windows(np.arange(1000), 8, seed).batch(first, size)["inputs"][:, 0].tolist()

    assert starts(0, 0, 12) != starts(1, 0, 12)
    assert starts(0, 0, 992) != starts(0, 992, 992)
    # The second epoch of one seed must not be the first of the next.
    assert starts(0, 992, 12) != starts(1, 0, 12)


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 9), st.none() | st.integers(1, 310), st.booleans())
def test_evaluation_counts_every_target_once(length, context, rows, limit, masks):
    """Masked, each character is read once, and the same ones are hidden whatever the batch."""
    ids = np.arange(length) % 10 if masks else np.arange(length)
    corpus = TextCorpus("a", ids, VOCAB, "", context, 0.3 if masks else None)
    split = corpus.split("validation")
    batches = list(corpus.evaluation("validation", rows, limit))
    assert {batch["inputs"].shape for batch in batches} <= {(rows, context)}
    assert all(batch["weights"].any() for batch in batches)
    found = {name: np.concatenate([b[name].ravel() for b in batches]) for name in (batches or [{}])[0]}
    if masks:
        read = split[:limit]
        single = {
            name: np.concatenate([b[name].ravel() for b in corpus.evaluation("validation", 1, limit)]) for name in found
        }
        for name, array in single.items():
            np.testing.assert_array_equal(found[name][: len(array)], array)
            assert not found[name][len(array) :].any()
        targets = found["targets"][found["valid"]] if found else []
        np.testing.assert_array_equal(targets, read)
        assert not found or not found["weights"][~found["valid"]].any()
        lengths = [min(context, len(read) - start) for start in range(0, len(read), context)]
        assert sum(b["weights"].sum() for b in batches) == sum(max(1, round(0.3 * n)) for n in lengths)
        return
    read = split[: None if limit is None else limit + 1]
    counted = found["weights"] == 1 if found else np.zeros(0, bool)
    for name, expected in (("inputs", read[:-1]), ("targets", read[1:])):
        np.testing.assert_array_equal(found[name][counted] if found else [], expected)
        assert not found or not found[name][~counted].any()


@given(st.integers(0, 10**9))
def test_parts_of_any_size(size):
    """Train, tune and test make up the whole, one after the other; validation is the last two."""
    bounds = [split_bounds(size, name) for name in ("train", "tune", "test")]
    assert [0, *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), size]
    assert split_bounds(size, "validation") == (bounds[1][0], size)
    assert abs(10 * bounds[0][1] - 9 * size) <= 10
    lengths = [stop - start for start, stop in bounds[1:]]
    assert 0 <= lengths[1] - lengths[0] <= 1


def corpus_of(tmp_path, text, context=4, architecture="decoder"):
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    model = ModelConfig(context=context, architecture=architecture)
    return load_corpus(Config(model=model, data=DataConfig(corpus="file", path=(str(path),))))


def test_splits(tmp_path):
    corpus = corpus_of(tmp_path, "abcdefghij" * 10)
    parts = {name: corpus.split(name) for name in ("train", "validation", "tune", "test")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 90, "validation": 10, "tune": 5, "test": 5}
    np.testing.assert_array_equal(np.concatenate([parts["tune"], parts["test"]]), parts["validation"])
    assert np.shares_memory(parts["train"], corpus.ids)
    with pytest.raises(DataError, match="unknown split 'valid'"):
        corpus.split("valid")


def test_text_too_short(tmp_path):
    with pytest.raises(DataError, match=r"train part .* has 4 of its 5 characters, .* context \+ 1 = 5"):
        corpus_of(tmp_path, "abcab")
    with pytest.raises(DataError, match="validation part .* has 4 of its 40"):
        corpus_of(tmp_path, "ab" * 20)
    assert len(corpus_of(tmp_path, "ab" * 25).split("validation")) == 5


def test_halves_without_a_target(tmp_path):
    """A context of 1 needs 2 characters of validation text, and each half of it a target."""
    with pytest.raises(DataError, match="validation part"):
        corpus_of(tmp_path, "ab" * 10, context=1)
    assert len(corpus_of(tmp_path, "ab" * 20, context=1).split("tune")) == 2


def test_one_symbol(tmp_path):
    assert len(corpus_of(tmp_path, "a" * 500).vocab) == 1


@pytest.mark.parametrize(("architecture", "corpus"), [("encoder_decoder", "plays"), ("decoder", "cmudict")])
def test_architecture_and_data_go_together(architecture, corpus):
    config = Config(model=ModelConfig(architecture=architecture), data=DataConfig(corpus=corpus))
    with pytest.raises(ConfigError, match=f"'{architecture}' learns from .*, and data.corpus is '{corpus}'; choose"):
        load_corpus(config)


def masked(size, context=40, seed=0, first=0, rate=0.15):
    ids = np.arange(5_000) % 10
    return MaskedWindows(Windows(ids, context, seed), VOCAB, rate, seed).batch(first, size)


def test_a_sixth_is_hidden_by_the_rule():
    """Of 40 characters 6, of these 80 % a gap, 10 % any symbol (a tenth of them the old one), 10 % as they were."""
    batch = masked(2_000)
    chosen = batch["weights"] > 0
    assert (chosen.sum(axis=1) == 6).all()
    np.testing.assert_array_equal(batch["inputs"][~chosen], batch["targets"][~chosen])
    gaps = batch["inputs"][chosen] == VOCAB.special_id
    same = batch["inputs"][chosen] == batch["targets"][chosen]
    assert gaps.mean() == pytest.approx(0.8, abs=0.015)
    assert same.mean() == pytest.approx(0.11, abs=0.015)
    others = batch["inputs"][chosen][~gaps & ~same]
    assert set(others) == set(range(10))
    assert batch["targets"].max() == 9
    # All places are chosen equally often.
    assert chosen.mean(axis=0) == pytest.approx(0.15, abs=0.04)


def test_other_seeds_and_epochs_hide_others():
    first = masked(12)["weights"]
    assert (masked(12, seed=1)["weights"] != first).any()
    assert (masked(12, first=4_960)["weights"] != first).any()


@pytest.mark.parametrize(("length", "count"), [(1, 1), (2, 1), (10, 2), (40, 6)])
def test_short_rows_have_something_to_find(length, count):
    valid = np.arange(40)[None] < length
    batch = hide(np.zeros((1, 40), np.int32), valid, VOCAB, 0.15, [(0, 0)])
    assert batch["weights"].sum() == batch["weights"][0, :length].sum() == count


def test_masked_evaluation(tmp_path):
    """Every character is read once, the same ones are hidden each time, whatever the batch."""
    corpus = corpus_of(tmp_path, "abcdefghij" * 50, context=8, architecture="encoder")
    assert len(corpus.vocab) == 11

    def rows(batch_size):
        batches = list(corpus.evaluation("validation", batch_size))
        return {name: np.concatenate([b[name] for b in batches]) for name in batches[0]}

    three, eight = rows(3), rows(8)
    read = three["valid"].sum()
    assert read == len(corpus.split("validation")) == 50
    np.testing.assert_array_equal(three["targets"][three["valid"]], corpus.split("validation"))
    assert (three["weights"][~three["valid"]] == 0).all()
    for name in three:
        np.testing.assert_array_equal(three[name][:7], eight[name][:7])
    assert three["weights"].sum() == eight["weights"].sum() == 6 * 1 + 1


def test_a_text_with_underscores_has_another_gap(tmp_path):
    corpus = corpus_of(tmp_path, "a_b " * 50, architecture="encoder")
    gap = corpus.vocab.gap
    assert gap not in "a_b "
    assert corpus.vocab.decode(corpus.vocab.encode(f"a_{gap}")) == f"a_{gap}"
