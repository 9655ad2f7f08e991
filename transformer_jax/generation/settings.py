"""What can be asked of a generation, and what it refuses in one line."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from transformer_jax.errors import ConfigError, DataError, TransformerJaxError


def check_settings(
    *,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    min_p: float,
    repetition_penalty: float,
    stop: Sequence[Sequence[int] | str],
    num_samples: int,
    seed: int,
    beams: int | None = None,
    length_penalty: float = 1.0,
    return_scores: bool = False,
    stream: Any = None,
) -> None:
    """Refuses what `generate` cannot do, before anything is loaded.

    Raises:
      ConfigError: Naming the setting, its value and the limit.
    """
    check_count("num_tokens", num_tokens)
    check_count("num_samples", num_samples)
    check_temperature(temperature)
    check_seed(seed)
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}; leave it out to draw from all symbols")
    if not 0 < top_p <= 1:
        raise ConfigError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= min_p <= 1:
        raise ConfigError(f"min_p must be between 0 and 1, got {min_p}")
    if not 0 < repetition_penalty < float("inf"):
        raise ConfigError(f"repetition_penalty must be above 0 (1 is none), got {repetition_penalty}")
    if any(len(piece) == 0 for piece in stop):
        raise ConfigError("a stop is empty, and every text would end before it begins; leave it out")
    if not 0 <= length_penalty < float("inf"):
        raise ConfigError(f"length_penalty must be at least 0 (0 is none), got {length_penalty}")
    if beams is None:
        if length_penalty != 1 or return_scores:
            given = "return_scores" if return_scores else f"length_penalty {length_penalty}"
            raise ConfigError(f"{given} is for beam search: give beams, such as beams=4, or leave it out")
        return
    check_count("beams", beams)
    if num_samples > beams:
        raise ConfigError(f"{beams} beams find at most {beams} texts for a prompt, got num_samples {num_samples}")
    drawing = {
        "temperature": (temperature, temperature in (0, 1)),
        "top_k": (top_k, top_k is None),
        "top_p": (top_p, top_p == 1),
        "min_p": (min_p, min_p == 0),
        "repetition_penalty": (repetition_penalty, repetition_penalty == 1),
    }
    for name, (value, plain) in drawing.items():
        if not plain:
            raise ConfigError(f"beams are not drawn, and {name} {value} has no meaning for them; leave one of them out")
    if stream is not None:
        raise ConfigError("a beam search knows its texts at the end only: leave out stream or beams")
    if long := [piece for piece in stop if len(piece) > 1]:
        raise ConfigError(f"with beams a stop is one symbol, got {long[0]!r} of {len(long[0])}; leave out one of them")


def check_count(name: str, value: int) -> None:
    """Holds a number to whole ones from 1.

    Raises:
      ConfigError: Naming the value and the limit.
    """
    if not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")


def check_temperature(temperature: float) -> None:
    """Holds a temperature to what logits can be divided by, or 0.

    Raises:
      ConfigError: Naming the value and the limit.
    """
    if not 0 <= temperature < float("inf"):
        raise ConfigError(f"temperature must be at least 0 (0 is arg max), got {temperature}")


def check_seed(seed: int) -> None:
    """Holds a seed to 32 bits.

    Raises:
      ConfigError: Naming the value and the limit.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(f"seed must be between 0 and {2**32 - 1}, got {seed}")


def check_symbol(name: str, value: int | None, vocab_size: int) -> None:
    """Holds an id that a caller names to the vocabulary.

    Raises:
      ConfigError: Naming the value and the limit.
    """
    if not isinstance(value, int | np.integer):
        raise ConfigError(f"{name} must be the id of a symbol, got {value!r}")
    if not 0 <= value < vocab_size:
        raise ConfigError(f"{name} must be in [0, {vocab_size}), got {value}")


def check_rows(rows: Sequence[Sequence[int]], vocab_size: int, *, name: str, longest: int | None = None) -> None:
    """Holds rows of ids to what a model can read.

    Args:
      rows: As the caller gave them.
      vocab_size: Of what reads them.
      name: What a row is called in errors.
      longest: Most ids in a row; None means any number.

    Raises:
      DataError: For no row at all, and naming a row that is empty, too long, or holds what are no ids.
    """
    if len(rows) == 0:
        raise DataError(f"there is no {name}")
    if np.ndim(rows[0]) != 1:
        raise DataError(f"{name}s must be rows of ids: put one {name} into a list")
    for number, row in enumerate(rows):
        if len(row) == 0:
            raise DataError(f"{name} {number} is empty: give at least one symbol")
        if not np.issubdtype(np.asarray(row).dtype, np.integer):
            raise DataError(f"{name} {number} must hold whole numbers, got {np.asarray(row).dtype}")
        if min(row) < 0 or max(row) >= vocab_size:
            raise DataError(f"{name} {number} has ids from {min(row)} to {max(row)}, not all in [0, {vocab_size})")
        if longest is not None and len(row) > longest:
            raise DataError(f"{name} {number} has {len(row)} ids and the context is {longest}: shorten it or split it")


def check_finite(finite: bool) -> None:
    """Refuses to go on with logits that mean nothing.

    Raises:
      TransformerJaxError: If they were not all finite.
    """
    if not finite:
        raise TransformerJaxError(
            "the model's logits are not finite: the parameters are damaged or the training diverged; "
            "choose an earlier checkpoint with --step"
        )


def padded(rows: Sequence[Sequence[int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """The last `length` ids of each row on the left of int32 [B, length], and bool [B, length] where they are.

    One length for all rows makes one program for all of them.
    """
    ids, valid = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for number, row in enumerate(rows):
        kept = np.asarray(row)[-length:]
        ids[number, : len(kept)], valid[number, : len(kept)] = kept, True
    return ids, valid
