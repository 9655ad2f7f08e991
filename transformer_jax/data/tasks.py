"""What each architecture learns from: the next characters of a text, its hidden ones, or pairs."""

from transformer_jax.config import Config, DataConfig
from transformer_jax.data import cmudict
from transformer_jax.data.batches import TextCorpus
from transformer_jax.data.corpora import load_files, load_text
from transformer_jax.data.pairs import Pair, PairCorpus, make_corpus, parse_tsv
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import ConfigError, DataError

PAIRS = ("cmudict", "pairs")
"""Values of `DataConfig.corpus` that are pairs; the others are texts."""


def load_corpus(config: Config) -> TextCorpus | PairCorpus:
    """Reads the data that a config names, as ids.

    Raises:
      ConfigError: Where the architecture and the data do not go together.
      DataError: For data that cannot be read, or are too short or too long for the context.
    """
    data, model = config.data, config.model
    if (data.corpus in PAIRS) != (model.architecture == "encoder_decoder"):
        learns, others = ("pairs", PAIRS) if model.architecture == "encoder_decoder" else ("a text", ("plays", "file"))
        raise ConfigError(
            f"model.architecture {model.architecture!r} learns from {learns}, and data.corpus is {data.corpus!r}; "
            f"choose --data.corpus {' or '.join(others)}, or another architecture"
        )
    if data.mask_rate != DataConfig.mask_rate and model.architecture != "encoder":
        raise ConfigError(
            f"data.mask_rate {data.mask_rate} is for model.architecture 'encoder', and it is {model.architecture!r}; "
            "leave it out"
        )
    if data.corpus == "cmudict":
        pairs = [Pair(word, phonemes, f"cmudict, word {word!r}") for word, phonemes in cmudict.load()]
        return make_corpus("cmudict", pairs, model.context, words=True)
    if data.corpus == "pairs":
        pairs = [pair for path in data.path for pair in parse_tsv(path, load_files((path,), data.encoding))]
        return make_corpus("pairs", pairs, model.context, words=data.target_symbols == "words")
    return _load_text(config)


def _load_text(config: Config) -> TextCorpus:
    text, context = load_text(config.data), config.model.context
    masked = config.model.architecture == "encoder"
    vocab = Vocab.from_text(text.text, "gap" if masked else "")
    rate = config.data.mask_rate if masked else None
    corpus = TextCorpus(text.name, vocab.encode(text.text), vocab, text.sha256, context, rate)
    # Each half of the validation part needs a target too.
    for split, least in (("train", context + 1), ("validation", max(context + 1, 4))):
        size = len(corpus.split(split))
        if size < least:
            raise DataError(
                f"the {split} part of {text.name} has {size:,} of its {len(corpus.ids):,} characters, and one window "
                f"needs context + 1 = {least}; lower --model.context or give a longer text"
            )
    return corpus
