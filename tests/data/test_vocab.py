import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import TEXT

from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import DataError
from transformer_jax.training.runs import write_json

ANY = TEXT.filter(bool)
WORDS = st.lists(ANY.filter(lambda word: len(word.split()) == 1 and word == word.strip()), min_size=1)


def vocab_of(symbols, special):
    """A vocabulary, or None where a text has every gap sign."""
    if special == "gap" and set("_□▁") <= set(symbols):
        with pytest.raises(DataError, match="sign of its own"):
            Vocab.from_text(symbols, special)
        return None
    return Vocab.from_text(symbols, special)


@given(ANY, st.sampled_from(["", "gap", "end"]), st.integers(1, 50))
def test_round_trip_of_any_text(text, special, chunk):
    vocab = vocab_of(text, special)
    if vocab is None:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_jax.data.vocab._CHUNK", chunk)
        ids = vocab.encode(text)
        if special == "gap":
            np.testing.assert_array_equal(vocab.encode(text + vocab.gap), [*ids, vocab.special_id])
            assert vocab.decode([vocab.special_id, *ids]) == vocab.gap + text
    assert ids.dtype == vocab.dtype
    assert [vocab.symbols[i] for i in ids] == list(text)
    assert list(vocab.symbols) == sorted(set(text))
    assert len(vocab) == len(set(text)) + (special != "")
    assert vocab.decode(ids) == text
    if special == "end":
        assert vocab.decode([vocab.special_id, *ids, vocab.special_id, -1]) == text


@given(WORDS, st.sampled_from(["", "gap", "end"]))
def test_round_trip_of_any_words(words, special):
    vocab = vocab_of(words, special)
    if vocab is None:
        return
    ids = vocab.encode(" ".join(words))
    assert [vocab.symbols[i] for i in ids] == words
    assert vocab.decode(ids) == " ".join(words)
    assert vocab.symbols == tuple(sorted(set(words)))
    if special:
        shown = [vocab.gap] if special == "gap" else []
        assert vocab.decode([*ids, vocab.special_id]) == " ".join([*words, *shown])
        if special == "gap":
            np.testing.assert_array_equal(vocab.encode(" ".join([*words, *shown])), [*ids, vocab.special_id])


WHOLE = ANY.filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text))
"""What can come from a file."""


@given(
    WHOLE | st.lists(WHOLE.filter(lambda word: word.split() == [word]), min_size=1), st.sampled_from(["", "gap", "end"])
)
def test_round_trip_through_a_file(tmp_path_factory, symbols, special):
    vocab = vocab_of(symbols, special)
    if vocab is not None:
        path = tmp_path_factory.getbasetemp() / "vocab.json"
        write_json(path, vocab.to_dict())
        assert Vocab.from_dict(json.loads(path.read_text(encoding="utf-8"))) == vocab


@given(ANY, ANY, st.integers(1, 5))
def test_the_first_unknown_character_is_named(known, text, chunk):
    vocab = Vocab.from_text(known)
    unknown = [place for place, symbol in enumerate(text) if symbol not in known]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_jax.data.vocab._CHUNK", chunk)
        if not unknown:
            assert vocab.decode(vocab.encode(text)) == text
            return
        with pytest.raises(DataError) as caught:
            vocab.encode(text)
    assert f"character {text[unknown[0]]!r} (position {unknown[0]}) " in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_ids_are_in_code_point_order():
    vocab = Vocab.from_text("cab\n")
    assert vocab.symbols == "\nabc"
    np.testing.assert_array_equal(vocab.encode("abc\n"), [1, 2, 3, 0])


def test_ids_are_small():
    assert Vocab.from_text("ab").encode("ab").dtype == np.uint8
    assert Vocab("".join(map(chr, range(300)))).encode("a").dtype == np.uint16


def test_long_texts_are_encoded_in_pieces():
    text = "ab" * (1 << 20) + "c"
    np.testing.assert_array_equal(Vocab.from_text(text).encode(text)[-3:], [0, 1, 2])


def test_start():
    assert Vocab("\nab").start == "\n"
    assert Vocab("ab").start == "a"


@pytest.mark.parametrize(("text", "said"), [("abé", r"'é' \(position 2\)"), ("Z", r"'Z' \(position 0\)")])
def test_unknown_characters(text, said):
    with pytest.raises(DataError, match=said):
        Vocab("ab").encode(text)


def test_unknown_character_far_into_the_text():
    with pytest.raises(DataError, match="position 1048580"):
        Vocab("ab").encode("a" * ((1 << 20) + 4) + "c")


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {"symbols": 3},
        {"symbols": ""},
        {"symbols": "aa"},
        {"symbols": "a", "x": 1},
        {"symbols": ["a", 1]},
        {"symbols": ["a", "a"]},
        {"symbols": "a", "special": "x"},
        {"symbols": "a", "special": None},
    ],
)
def test_what_is_no_vocabulary(values):
    with pytest.raises(DataError):
        Vocab.from_dict(values)


def test_words():
    vocab = Vocab.from_text(["HH", "AH", "L", "OW"], "end")
    assert vocab.symbols == ("AH", "HH", "L", "OW")
    assert (len(vocab), vocab.special_id) == (5, 4)
    np.testing.assert_array_equal(vocab.encode("L  OW AH"), [2, 3, 0])
    assert vocab.decode([2, 3, 4]) == "L OW"
    assert Vocab.from_dict(vocab.to_dict()) == vocab
    with pytest.raises(DataError, match=r"symbol 'X' \(position 1\) is not among the 4 symbols .* 'AH HH L OW'"):
        vocab.encode("L X")


def test_specials():
    gap, end = Vocab("ab", "gap"), Vocab("ab", "end")
    np.testing.assert_array_equal(gap.encode("a_b"), [0, 2, 1])
    assert gap.decode([0, 2, 1]) == "a_b"
    assert end.decode([0, 1, 2]) == "ab"
    with pytest.raises(DataError, match="'_'"):
        end.encode("a_")
    assert [Vocab.from_dict(v.to_dict()) for v in (gap, end)] == [gap, end]
    assert Vocab("ab").to_dict() == {"symbols": "ab"}  # as the first runs have it
    with pytest.raises(DataError, match="sign of its own"):
        Vocab("_□▁", "gap")
    assert Vocab("x" + "".join(map(chr, range(300, 555)))).dtype == np.uint8
    assert Vocab("x" + "".join(map(chr, range(300, 555))), "gap").dtype == np.uint16


def test_ids_that_are_none():
    vocab = Vocab("ab", "end")
    assert vocab.decode([0, 1, 2, -1, -1]) == "ab"  # as `generate` pads rows
    with pytest.raises(DataError, match=r"id 3 is not in \[0, 3\)"):
        vocab.decode([0, 3])
