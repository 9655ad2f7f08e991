"""Each family from its data to its samples, through the commands: what differs between them, and what is refused."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from transformer_jax import cli, create_model, load_run
from transformer_jax.data.tasks import load_corpus
from transformer_jax.errors import ConfigError
from transformer_jax.training import loop
from transformer_jax.training.error_rates import ErrorCounts
from transformer_jax.training.evaluate import error_figures, evaluate_run
from transformer_jax.training.samples import write


@pytest.fixture(scope="module")
def encoder(families, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "encoder"
    loop.train(families["encoder"], out)
    return out


@pytest.fixture(scope="module")
def pairs(families, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "pairs"
    loop.train(families["encoder_decoder"], out)
    return out


def run(capsys, *args):
    status = cli.main([str(arg) for arg in args])
    out, err = capsys.readouterr()
    return status, out, err


def summary(out):
    return json.loads((out / "summary.json").read_text())


def test_a_masked_run(capsys, encoder):
    figures = summary(encoder)
    assert 0 <= figures["masked_accuracy"] <= 1
    assert "symbol_error_rate" not in figures
    said = json.loads(run(capsys, "evaluate", encoder, "--json", "--step", "last")[1])
    # Of hidden characters only: counted here from the logits.
    loaded = load_run(encoder, "last")
    corpus, model = load_corpus(loaded.config), create_model(loaded.config.model)
    right = hidden = 0
    for batch in corpus.evaluation("validation", 8):
        logits = model.apply({"params": loaded.params}, batch["inputs"], valid=batch["valid"])
        chosen = batch["weights"] > 0
        right += int((np.asarray(logits).argmax(axis=-1) == batch["targets"])[chosen].sum())
        hidden += int(chosen.sum())
    assert said["masked_accuracy"] == right / hidden
    assert said["targets"] == hidden < len(corpus.split("validation")) / 5
    assert said["masked_accuracy"] == figures["masked_accuracy"]
    assert said["loss"] == figures["val_loss"]
    assert "masked accuracy" in run(capsys, "evaluate", encoder)[1]
    shown = (encoder / "samples.txt").read_text(encoding="utf-8")
    given, filled, original = (part.split("\n", 1)[1].strip("\n") for part in shown.split("\n\n--- "))
    assert "_" in given
    assert "_" not in filled
    assert all(a in ("_", b) for a, b in zip(given, original, strict=True))
    assert all(a in ("_", b) for a, b in zip(given, filled, strict=True))


def test_gaps_are_filled(capsys, encoder):
    status, out, _ = run(capsys, "sample", encoder, "--prompt", "th_ k_ng")
    assert status == 0
    assert re.fullmatch("th[^_] k[^_]ng\n", out)
    assert run(capsys, "sample", encoder, "--prompt", "th_ k_ng", "--seed", 5)[1] == out  # the most likely ones
    drawn = run(capsys, "sample", encoder, "--prompt", "t__ ____", "--temperature", 3, "--num-samples", 4)[1]
    texts = drawn.splitlines()
    assert [text[:10] for text in texts] == [f"sample {i}  " for i in range(1, 5)]
    assert len({text[10:] for text in texts}) > 1
    one = run(capsys, "sample", encoder, "--prompt", "t__ ____", "--temperature", 3)[1]
    assert one.strip() == texts[0][10:].strip()


def test_a_run_of_pairs(capsys, pairs):
    figures = summary(pairs)
    error_names = ("symbol_error_rate", "sequence_error_rate")
    assert figures["symbol_error_rate"] > 0
    assert 0 <= figures["sequence_error_rate"] <= 1
    assert figures["sources"] > 20
    said = json.loads(run(capsys, "evaluate", pairs, "--json", "--step", "last", "--beams", 3)[1])
    assert said["symbol_error_rate"] == figures["symbol_error_rate"]
    assert said["loss"] == pytest.approx(figures["val_loss"], rel=1e-6)
    assert said["beam"]["beams"] == 3
    assert "loss_by_position" not in said
    one = evaluate_run(load_run(pairs, "last"), "validation", beams=1)
    assert {name: one[name] for name in error_names} == {name: one["beam"][name] for name in error_names}
    table = run(capsys, "evaluate", pairs, "--beams", 3)[1]
    assert "symbol error rate, greedy" in table
    assert "sequence error rate, 3 beams" in table
    assert " -> " in (pairs / "samples.txt").read_text(encoding="utf-8")
    assert {"vocab.json", "source_vocab.json"} <= {path.name for path in pairs.iterdir()}


def test_answers(capsys, pairs, tmp_path):
    status, greedy, _ = run(capsys, "sample", pairs, "--prompt", "abcab")
    assert status == 0
    assert greedy.count("\n") == 1
    assert run(capsys, "sample", pairs, "--prompt", "abcab", "--beams", 1)[1] == greedy
    command = ("sample", pairs, "--prompt", "abcab", "--beams", 4, "--num-samples", 3, "--out", tmp_path / "out.txt")
    best = [line.split("  ", 1) for line in run(capsys, *command)[1].splitlines()]
    scores = [float(score) for score, _ in best]
    assert len(best) == 3
    assert scores == sorted(scores, reverse=True)
    assert len({text for _, text in best}) == 3
    assert (tmp_path / "out.txt").read_text() == "\n\n".join(text for _, text in best) + "\n"


def test_a_checkpoint_alone_is_enough(capsys, encoder, pairs, tmp_path):
    """Also without the data."""
    for folder, prompt in ((encoder, "th_"), (pairs, "abc")):
        shutil.copytree(folder / "checkpoints", tmp_path / folder.name / "checkpoints")
        alone = run(capsys, "sample", tmp_path / folder.name, "--prompt", prompt)
        assert alone == run(capsys, "sample", folder, "--prompt", prompt)


def test_evaluation_does_not_depend_on_the_batch(encoder, pairs):
    for folder in (encoder, pairs):
        one, seven = (evaluate_run(load_run(folder), "tune", batch_size=size) for size in (1, 7))
        for name, value in one.items():
            assert seven[name] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value)


def test_the_loss_of_pairs_is_that_of_each_alone(pairs):
    """No padding, no batch: the same nats, symbol by symbol."""
    loaded = load_run(pairs)
    corpus, model = load_corpus(loaded.config), create_model(loaded.config.model)
    total = count = 0.0
    for index in corpus.split("tune")[:5]:
        source, target, end = corpus.sources[index], corpus.targets[index], corpus.vocab.special_id
        inputs, targets = np.array([[end, *target]], np.int32), [*target, end]
        logits = np.asarray(model.apply({"params": loaded.params}, source[None].astype(np.int32), inputs), np.float64)
        log_z = np.log(np.exp(logits[0]).sum(axis=-1))
        total += (log_z - logits[0, np.arange(len(targets)), targets]).sum()
        count += len(targets)
    batch = corpus.batch(corpus.split("tune")[:5])
    evaluator = loop.Evaluator(loaded.config, loop.sharding.default_placement(5), 5)
    assert evaluator.loss(loaded.params, [batch]) == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("architecture", ["rnn", "lstm"])
def test_recurrent_models_are_measured_as_others_are(capsys, families, tmp_path, architecture):
    loop.train(families[architecture], tmp_path / "a")
    assert "nats by the characters seen" in run(capsys, "evaluate", tmp_path / "a")[1]
    status, text, _ = run(capsys, "sample", tmp_path / "a", "--prompt", "the ", "--tokens", 40)
    assert (status, len(text)) == (0, 45)
    best = run(capsys, "sample", tmp_path / "a", "--prompt", "the ", "--tokens", 5, "--beams", 2)[1]
    assert best.startswith("the ")
    assert len(best) == 10


def refused(capsys, *args):
    status, out, err = run(capsys, *args)
    assert (status, out) == (2, "") or args[0] == "train"  # training says what it found on the way
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("family", "args", "said"),
    [
        ("encoder", (), "this run is an encoder and needs --prompt: a text with _ for each hidden character"),
        ("encoder", ("--prompt", "the"), "the prompt 'the' has no gap to fill; write _"),
        ("encoder", ("--prompt", "_" * 17), "the prompt has 17 characters, and the model reads at most 16"),
        ("encoder", ("--prompt", "_Z"), "character 'Z' (position 1) is not among"),
        ("encoder", ("--prompt", "a_", "--beams", "2"), "beams 2 is for models that go on"),
        ("encoder", ("--prompt", "a_", "--tokens", "5"), "num_tokens 5 is for models that go on"),
        ("encoder", ("--prompt", "a_", "--num-samples", "2"), "num_samples 2 would all be the most likely"),
        ("pairs", ("--prompt", "a", "--num-samples", "2"), "num_samples 2 would all be the most likely"),
        ("pairs", ("--prompt", "a", "--beams", "2", "--stop", "ab"), "with beams a stop is one symbol, got 'ab' of 2"),
        ("pairs", (), "this run is an encoder_decoder and needs --prompt: the source"),
        ("pairs", ("--prompt", "abX"), "character 'X' (position 2) is not among"),
        ("pairs", ("--prompt", ""), "source 0 is empty"),
        ("pairs", ("--prompt", "a" * 17), "source 0 has 17 ids and the context is 16"),
        ("pairs", ("--prompt", "a", "--tokens", "17"), "num_tokens is 17, and a target has at most the context, 16"),
        ("pairs", ("--prompt", "a", "--beams", "0"), "beams must be at least 1, got 0"),
        ("pairs", ("--prompt", "a", "--beams", "2", "--num-samples", "3"), "2 beams find at most 2"),
        ("pairs", ("--prompt", "a", "--beams", "2", "--temperature", "0.5"), "beams are not drawn, and temperature"),
        ("pairs", ("--prompt", "a", "--beams", "2", "--length-penalty", "-1"), "length_penalty must be at least 0"),
        ("pairs", ("--prompt", "a", "--top-k", "-3"), "top_k must be at least 1, got -3"),
        ("pairs", ("--prompt", "a", "--top-p", "0"), "top_p must be above 0 and at most 1, got 0"),
        ("pairs", ("--prompt", "a", "--top-p", "1.5"), "got 1.5"),
        ("pairs", ("--prompt", "a", "--temperature", "nan"), "temperature must be at least 0"),
        ("pairs", ("--prompt", "a", "--temperature", "-1"), "temperature must be at least 0"),
    ],
)
def test_sample_refuses(capsys, encoder, pairs, family, args, said):
    assert said in refused(capsys, "sample", {"encoder": encoder, "pairs": pairs}[family], *args)


def test_evaluate_refuses(capsys, encoder, pairs):
    assert "beams must be at least 1, got 0" in refused(capsys, "evaluate", pairs, "--beams", "0")
    assert "beams 2 are for an encoder_decoder" in refused(capsys, "evaluate", encoder, "--beams", "2")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ab\tba\nabc\n", "line 2: 0 tabs in 'abc'"),
        ("ab\t\n", "line 1: the target is empty"),
        ("a\tb\n", "pairs has 1 different sources, too few"),
        ("".join(f"{i}\t{'x' * i}\n" for i in range(1, 60)), "and model.context is 16; give --model.context"),
    ],
)
def test_pairs_that_cannot_be_used(capsys, tmp_path, text, said):
    (tmp_path / "p.tsv").write_text(text)
    args = ("--model.architecture", "encoder_decoder", "--model.context", 16, "--data.corpus", "pairs")
    assert said in refused(capsys, "train", *args, "--data.path", tmp_path / "p.tsv", "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_words_as_targets(families, pairs_file, tmp_path):
    """A user's own phonemes: the file's targets with blanks between them."""
    path = tmp_path / "words.tsv"
    lines = [line.split("\t") for line in pairs_file.read_text().splitlines()]
    path.write_text("\n".join(f"{source}\t{' '.join(c.upper() * 2 for c in target)}" for source, target in lines))
    config = families["encoder_decoder"]
    data = {"path": (str(path),), "target_symbols": "words"}
    config = replace(config, data=replace(config.data, **data), train=replace(config.train, steps=2))
    loop.train(config, tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert loaded.vocab.symbols == ("AA", "BB", "CC", "DD", "EE")
    ((text, score),) = write(loaded, "abc")
    assert score is None
    assert set(text.split()) <= set(loaded.vocab.symbols)


def test_names_of_the_error_rates(pairs):
    """Those of the field where the task has them."""
    loaded = load_run(pairs)
    corpus = load_corpus(loaded.config)
    errors = ErrorCounts(edits=1, symbols=4, wrong=1, sources=2)
    assert error_figures(corpus, errors) == {"symbol_error_rate": 0.25, "sequence_error_rate": 0.5, "sources": 2}
    named = error_figures(replace(corpus, name="cmudict"), errors)
    assert named == {"phoneme_error_rate": 0.25, "word_error_rate": 0.5, "sources": 2}


@pytest.mark.slow
def test_sampling_asks_for_no_kernel(families, tmp_path):
    """A run on an accelerator is sampled anywhere."""
    for name, prompt in (("encoder", "th_"), ("encoder_decoder", "abc")):
        config = replace(families[name], train=replace(families[name].train, steps=1))
        loop.train(config, tmp_path / name)
        loaded = load_run(tmp_path / name)
        there = replace(loaded.config, model=replace(loaded.config.model, attention_impl="cudnn"))
        assert write(replace(loaded, config=there), prompt) == write(loaded, prompt)


def test_settings_without_effect_are_refused(encoder):
    loaded = load_run(encoder)
    for settings in ({"length_penalty": 0.6}, {"temprature": 2}, {"num_samples": 0}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            write(loaded, "a_", **settings)


def test_the_task_is_no_part_of_what_may_change(families, encoder):
    config = replace(families["encoder"], model=replace(families["encoder"].model, architecture="decoder"))
    with pytest.raises(ConfigError, match="must keep model.architecture 'encoder' -> 'decoder'"):
        loop.train(config, encoder, resume=True)
