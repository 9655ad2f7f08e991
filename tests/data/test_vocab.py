import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import DataError


@given(st.text(min_size=1))
def test_round_trip_of_any_text(text):
    vocab = Vocab.from_text(text)
    ids = vocab.encode(text)
    assert vocab.decode(ids) == text
    assert ids.max() < len(vocab) == len(set(text))
    assert Vocab.from_dict(vocab.to_dict()) == vocab


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
