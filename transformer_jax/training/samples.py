"""Texts of trained models: what the `sample` command writes, and what a run shows at its end."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transformer_jax.config import Config
from transformer_jax.data.batches import SHOWN, TextCorpus, hide
from transformer_jax.data.pairs import PairCorpus
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.generation import fill_gaps, generate
from transformer_jax.nn import create_model
from transformer_jax.training.error_rates import answer
from transformer_jax.training.evaluate import in_float32
from transformer_jax.training.runs import Run


def write(
    run: Run,
    prompt: str,
    num_tokens: int | None = None,
    *,
    temperature: float | None = None,
    stop: Sequence[str] = (),
    stream: Callable[[str], None] | None = None,
    **settings: Any,
) -> list[tuple[str, float | None]]:
    """Texts of a trained model for one prompt.

    Args:
      run: From `load_run`.
      prompt: What a causal model goes on from, an encoder fills the gaps of, and an encoder-decoder answers.
      num_tokens: Most new symbols; None means 500, and for an encoder-decoder its context.
      temperature: As for `generate`; None means 0.8 for going on, and the most likely symbol for gaps and answers.
      stop: Strings; a text ends after the first of these that it makes.
      stream: Called with each new piece of a single text that goes on.
      **settings: Of `generate`; for gaps seed and num_samples alone.

    Returns:
      Each text, with its score where beams were asked for: as many as were found, best first. A text that goes on
      begins with its prompt.

    Raises:
      ConfigError, DataError: For what the model cannot read or do.
    """
    architecture = run.config.model.architecture
    if architecture == "encoder":
        return [(text, None) for text in _fill(run, prompt, temperature, num_tokens=num_tokens, stop=stop, **settings)]
    pairs = architecture == "encoder_decoder"
    ids = (run.source_vocab if pairs else run.vocab).encode(prompt)
    model = create_model(in_float32(run.config).model if pairs else run.config.model)
    beams, num_samples = settings.get("beams"), settings.get("num_samples", 1)
    if temperature is None:
        temperature = 0.0 if pairs or beams is not None else 0.8
    if pairs and beams is None:
        _check_samples(temperature, num_samples)
    stops = [_encode_stop(run.vocab, text, beams) for text in stop]
    if pairs:
        settings["start"] = run.vocab.special_id
        stops.append([run.vocab.special_id])
    if num_tokens is None:
        num_tokens = model.context if pairs else 500
    made = generate(
        model,
        run.params,
        [ids],
        num_tokens,
        temperature=temperature,
        stop=stops,
        stream=None if stream is None else lambda piece: stream(run.vocab.decode(piece[0])),
        return_scores=beams is not None,
        **settings,
    )
    rows, scores = (made, [None] * len(made)) if beams is None else made
    given = "" if pairs else prompt
    found = [(given + run.vocab.decode(row), score) for row, score in zip(rows, scores, strict=True)]
    return [(text, score) for text, score in found if score != -np.inf]


def _check_samples(temperature: float, num_samples: int) -> None:
    if temperature == 0 and num_samples > 1:
        raise ConfigError(
            f"num_samples {num_samples} would all be the most likely; give a temperature above 0, or beams for pairs"
        )


def _encode_stop(vocab: Vocab, text: str, beams: int | None) -> Sequence[int]:
    try:
        ids = vocab.encode(text)
    except DataError as error:
        raise ConfigError(f"stop {text!r}: {error}") from error
    if beams is not None and len(ids) > 1:
        raise ConfigError(f"with beams a stop is one symbol, got {text!r} of {len(ids)}; leave out one of them")
    return ids


def _fill(
    run: Run, prompt: str, temperature: float | None, *, seed: int = 0, num_samples: int = 1, **others: Any
) -> list[str]:
    """A prompt with its gaps filled, once for each sample."""
    plain = {
        "num_tokens": None,
        "stop": (),
        "top_k": None,
        "top_p": 1,
        "min_p": 0,
        "repetition_penalty": 1,
        "beams": None,
        "length_penalty": 1,
    }
    for name, value in others.items():
        if name not in plain or value != plain[name]:
            raise ConfigError(f"{name} {value!r} is for models that go on; one that fills gaps takes temperature alone")
    temperature = temperature or 0.0
    _check_samples(temperature, num_samples)
    vocab, context = run.vocab, run.config.model.context
    if vocab.gap not in prompt:
        raise ConfigError(f"the prompt {prompt[:60]!r} has no gap to fill; write {vocab.gap} for each hidden character")
    ids = vocab.encode(prompt)
    if len(ids) > context:
        raise ConfigError(f"the prompt has {len(ids)} characters, and the model reads at most {context}; shorten it")
    model = create_model(in_float32(run.config).model)
    settings = {"temperature": temperature, "seed": seed, "num_samples": num_samples}
    return [vocab.decode(row) for row in fill_gaps(model, run.params, [ids], vocab.special_id, **settings)]


def sample_text(config: Config, params: Any, corpus: TextCorpus | PairCorpus) -> str:
    """About `train.sample_chars` characters from a model, by train.seed; of gaps at most one window."""
    if isinstance(corpus, PairCorpus):
        return _answers(config, params, corpus)
    if corpus.mask_rate is not None:
        return _filled(config, params, corpus)
    prompt = corpus.vocab.start
    ids = generate(
        create_model(config.model),
        params,
        [corpus.vocab.encode(prompt)],
        config.train.sample_chars,
        temperature=0.8,
        seed=config.train.seed,
    )
    return prompt + corpus.vocab.decode(ids[0])


def _filled(config: Config, params: Any, corpus: TextCorpus) -> str:
    """The beginning of the validation part with hidden characters, and what the model makes of it."""
    vocab = corpus.vocab
    ids = corpus.split("tune")[: min(corpus.context, config.train.sample_chars)].astype(np.int32)
    hidden = hide(ids[None], np.ones((1, len(ids)), bool), vocab, corpus.mask_rate, [(SHOWN, config.train.seed)])
    gaps = np.where(hidden["weights"][0] > 0, vocab.special_id, ids)
    (filled,) = fill_gaps(create_model(in_float32(config).model), params, [gaps], vocab.special_id)
    shown = {"given": gaps, "filled": filled, "original": ids}
    return "\n\n".join(f"--- {name}\n{vocab.decode(row)}" for name, row in shown.items())


def _answers(config: Config, params: Any, corpus: PairCorpus) -> str:
    """The first sources of the validation part, each with the model's answer and, where that is wrong, a right one."""
    lines, left = [], config.train.sample_chars
    references = corpus.references("tune")[:64]
    model = create_model(in_float32(config).model)
    answers = answer(model, params, [source for source, _ in references], corpus.vocab.special_id)
    for (source, right), made in zip(references, answers, strict=True):
        line = f"{corpus.source_vocab.decode(source)} -> {corpus.vocab.decode(made)}"
        if not any(np.array_equal(made, one) for one in right):
            line += f" (right: {corpus.vocab.decode(right[0])})"
        if lines and left < len(line):
            break
        lines.append(line)
        left -= len(line)
    return "\n".join(lines)
