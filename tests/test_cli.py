import dataclasses
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax import cli
from transformer_jax.config import to_dict

ROOT = Path(__file__).parent.parent


def run(capsys, *args):
    """Exit status, output and errors of a command in this process."""
    try:
        status = cli.main([str(a) for a in args])
    except SystemExit as exit_:  # the parser's own
        status = exit_.code
    out, err = capsys.readouterr()
    return status, out, err


def refused(capsys, *args):
    """A command that must fail with one line."""
    status, _, err = run(capsys, *args)
    assert status == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def config_file(tmp_path, tiny_config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_dict(tiny_config)))
    return path


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model.num-heads", "3"], "num_heads 3 does not divide"),
        (["--train.steps", "-1"], "steps must be a positive number, got -1"),
        (["--model.dropout", "1.5"], "dropout must be at least 0 and below 1, got 1.5"),
        (["--resume"], "--resume needs --out"),
        (["--resume", "--out", "no/such"], "no checkpoint in no/such"),
        (["--resume", "--overwrite", "--out", "x"], "give one of them"),
        (["--optim.warmup-steps", "99999"], "warmup_steps 99999 is longer than the schedule's 2000 steps"),
        (["--train.accumulate", "5"], "accumulate 5 does not divide train.batch_size 12"),
        (["--config", "none.py"], "no config file at none.py"),
        (["--data.corpus", "file"], "needs at least one file"),
        (["--data.corpus", "file", "--data.path", "none.txt"], "none.txt does not exist"),
        (["--mesh", "dta=1"], "unknown mesh axis 'dta'; did you mean 'data'"),
        (["--mesh", "data=2,fsdp=2"], "mesh data=2,fsdp=2 has 4 devices, and there are 1"),
    ],
)
def test_train_refuses(capsys, args, said):
    assert said in refused(capsys, "train", *args)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--model.d-modle", "3"], "--model.d-model"),
        (["--learnig-rate", "1e-3"], "learning-rate"),
        (["--train.batch-size", "3.5"], "3.5"),
        (["--train.steps", "1e3"], "1e3"),
        (["--model.norm", "foo"], "layer"),
    ],
)
def test_the_parser_refuses_and_suggests(capsys, args, said):
    status, out, err = run(capsys, "train", *args)
    assert status == 2
    assert said in out + err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "from transformer_jax import *\nCONFIG = Config(model=ModelConfig(n_layers=2))",
            "'n_layers'; did you mean 'num_layers'",
        ),
        ("from transformer_jax import *\nCONFIG = Config(modle=1)", "'modle'; did you mean 'model'"),
        ("from transformer_jax import *\nCONFIG = Config(train=TrainConfig(steps=1e3))", "whole number, got 1000.0"),
        ("CONFIG = 3", "must set CONFIG = Config(...), and sets int"),
        ("x = 1", "must set CONFIG"),
        ("import nowhere", "cannot be read: ModuleNotFoundError"),
        ("CONFIG = ", "SyntaxError"),
    ],
)
def test_config_files_that_cannot_work(capsys, tmp_path, text, said):
    path = tmp_path / "c.py"
    path.write_text(text)
    err = refused(capsys, "train", "--config", path)
    assert said in err
    assert "c.py" in err


def test_broken_json_config(capsys, tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"model": {"d_model": "128"}}')
    assert "d_model must be a whole number" in refused(capsys, "train", "--config", path)
    path.write_text("{")
    assert "cannot be read" in refused(capsys, "train", "--config", path)


def test_train_sample_evaluate(capsys, config_file, tmp_path):
    out = tmp_path / "a run"
    status, said, _ = run(capsys, "train", "--config", config_file, "--out", out, "--train.steps", 12)
    assert status == 0
    assert "1 x cpu" in said
    assert "nats per character" in said
    assert "exists already" in refused(capsys, "train", "--config", config_file, "--out", out)
    assert run(capsys, "train", "--out", out, "--resume", "--train.steps", 14)[0] == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 14
    assert "model.d_model 32 -> 64" in refused(capsys, "train", "--out", out, "--resume", "--model.d-model", 64)
    assert run(capsys, "train", "--config", config_file, "--out", out, "--overwrite", "--train.steps", 1)[0] == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 1


def test_sample(capsys, trained, tmp_path):
    status, text, _ = run(capsys, "sample", trained, "--prompt", "the ", "--tokens", 30, "--seed", 3)
    assert status == 0
    assert text.startswith("the ")
    assert len(text) == 4 + 30 + 1
    assert run(capsys, "sample", trained, "--prompt", "the ", "--tokens", 30, "--seed", 3)[1] == text
    _, several, _ = run(capsys, "sample", trained, "--prompt", "the ", "--tokens", 30, "--seed", 3, "--num-samples", 2)
    assert text.strip() in several
    assert several.count("--- sample") == 2
    greedy = [run(capsys, "sample", trained, "--tokens", 9, "--temperature", 0, "--seed", s)[1] for s in (1, 2)]
    assert greedy[0] == greedy[1]
    run(capsys, "sample", trained, "--prompt", "the ", "--tokens", 5, "--out", tmp_path / "s.txt")
    assert len((tmp_path / "s.txt").read_text(encoding="utf-8")) == 4 + 5 + 1


def test_sample_stops_and_filters(capsys, trained):
    whole = run(capsys, "sample", trained, "--prompt", "the ", "--tokens", 60)[1]
    stop = whole[20:23]
    assert run(capsys, "sample", trained, "--prompt", "the ", "--tokens", 60, "--stop", stop)[1] == (
        whole[: whole.index(stop, 4) + 3] + "\n"
    )
    status, text, _ = run(
        capsys, "sample", trained, "--prompt", "the ", "--tokens", 9, "--min-p", 0.1, "--repetition-penalty", 1.2
    )
    assert status == 0
    assert len(text) == 4 + 9 + 1
    status, out, said = run(capsys, "sample", trained, "--prompt", "a", "--stop", "\N{SNOWMAN}")
    assert (status, out) == (2, "")  # not half a text
    assert "stop '\N{SNOWMAN}': character" in said
    assert "a stop is empty" in refused(capsys, "sample", trained, "--stop", "")


def test_sample_line_ends_and_long_prompts(capsys, trained):
    status, text, _ = run(capsys, "sample", trained, "--prompt", "the\r\nsea", "--tokens", 1)
    assert status == 0
    assert text.startswith("the\nsea")
    status, text, note = run(capsys, "sample", trained, "--prompt", "the queen " * 4, "--tokens", 10)
    assert status == 0
    assert text.startswith("the queen " * 4)
    assert "40 characters" in note
    assert "last 16" in note


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--prompt", "ZZ"], "'Z' (position 0)"),
        (["--prompt", ""], "is empty"),
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-k", "0"], "top_k must be at least 1, got 0"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--tokens", "0"], "num_tokens must be at least 1"),
        (["--step", "7"], "no checkpoint 7"),
    ],
)
def test_sample_refuses(capsys, trained, args, said):
    assert said in refused(capsys, "sample", trained, *args)


def test_writing_to_nowhere(capsys, trained, tmp_path):
    assert "does not exist; make it first" in refused(capsys, "sample", trained, "--out", tmp_path / "no" / "s.txt")
    err = refused(capsys, "sample", trained, "--tokens", 1, "--prompt", "the", "--out", tmp_path)
    assert str(tmp_path) in err
    assert "seed must be between" in refused(capsys, "sample", trained, "--seed", 10**20)


def test_a_run_named_checkpoints(capsys, config_file, tmp_path):
    out = tmp_path / "checkpoints"
    for _ in range(2):
        assert run(capsys, "train", "--config", config_file, "--out", out, "--train.steps", 1, "--overwrite")[0] == 0
    assert (out / "checkpoints" / "1").is_dir()
    assert run(capsys, "sample", out, "--tokens", 3)[0] == 0


def test_the_config_of_a_run_begins_another(capsys, trained, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("quite another text\n" * 50)
    out = tmp_path / "run"
    assert run(capsys, "train", "--config", trained / "config.json", "--data.path", other, "--out", out)[0] == 0
    assert json.loads((out / "config.json").read_text())["model"]["vocab_size"] == len(set(other.read_text()))


def test_runs_that_are_none(capsys, tmp_path):
    for command in ("sample", "evaluate"):
        assert "does not exist" in refused(capsys, command, tmp_path / "no")
        assert "no checkpoint in" in refused(capsys, command, tmp_path)


def test_text_without_line_ends_or_blanks(capsys, tmp_path, config_file, tiny_config):
    path = tmp_path / "abc.txt"
    path.write_text("abc" * 200)
    out = tmp_path / "run"
    run(capsys, "train", "--config", config_file, "--data.path", path, "--out", out, "--train.steps", 1)
    status, text, note = run(capsys, "sample", out, "--tokens", 5)
    assert status == 0
    assert set(text.strip()) <= set("abc")
    assert "going on from 'a'" in note


def test_evaluate_does_not_depend_on_the_batch(capsys, trained):
    losses = []
    for size in (1, 7, 64):
        status, out, _ = run(capsys, "evaluate", trained, "--json", "--batch-size", size)
        assert status == 0
        figures = json.loads(out)
        losses.append(figures["loss"])
        assert figures["bits"] == pytest.approx(figures["loss"] / math.log(2))
        assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
        assert figures["targets"] == 599
        assert len(figures["loss_by_position"]) == 16
    assert max(losses) - min(losses) < 1e-5
    summary = json.loads((trained / "summary.json").read_text())
    assert losses[0] == pytest.approx(summary["best_val_loss"], abs=1e-5)
    _, out, _ = run(capsys, "evaluate", trained, "--split", "test")
    assert "test (299 characters)" in out
    assert re.search(r"\n  1 {17} +\d\.\d{4}\n  2 .*\n  3 to 4 .*\n  5 to 8 .*\n  9 to 16 .*\n$", out)
    assert "batch-size must be at least 1" in refused(capsys, "evaluate", trained, "--batch-size", 0)
    assert "unknown split 'valid'" in refused(capsys, "evaluate", trained, "--split", "valid")


def test_sampling_needs_no_text_and_evaluation_says_what_is_missing(capsys, config_file, tmp_path, tiny_config):
    path = tmp_path / "words.txt"
    path.write_text(Path(tiny_config.data.path[0]).read_text())
    out = tmp_path / "run"
    run(capsys, "train", "--config", config_file, "--data.path", path, "--out", out, "--train.steps", 1)
    before = run(capsys, "sample", out, "--tokens", 20)[1]
    path.write_text("something else entirely " * 50)
    assert run(capsys, "sample", out, "--tokens", 20)[1] == before
    assert "have changed since the run was trained" in refused(capsys, "evaluate", out)
    path.unlink()
    assert run(capsys, "sample", out, "--tokens", 20)[1] == before
    assert "does not exist" in refused(capsys, "evaluate", out)


def test_inspect(capsys, trained, tmp_path):
    picture = tmp_path / "gpt2.svg"
    status, out, _ = run(capsys, "inspect", "gpt2", "--svg", picture)
    assert status == 0
    assert "124,439,808" in out
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    _, out, err = run(capsys, "inspect", trained, "--json")
    assert err == ""  # a run knows its vocabulary
    found = json.loads(out)
    parameters = json.loads((trained / "summary.json").read_text(encoding="utf-8"))["parameters"]
    assert found["totals"]["parameters"] == parameters == sum(p["count"] for p in found["parameters"])
    shutil.copytree(trained / "checkpoints", tmp_path / "alone" / "checkpoints")
    assert json.loads(run(capsys, "inspect", tmp_path / "alone", "--json")[1])["totals"] == found["totals"]
    _, out, _ = run(capsys, "inspect", "gpt2", "modern")
    assert "positions" in out
    assert "rotary" in out
    (tmp_path / "empty").mkdir()
    assert "it holds no run, or the run wrote nothing" in refused(capsys, "inspect", tmp_path / "empty")
    assert "is no config" in refused(capsys, "inspect", "README.md")
    assert "make it first" in refused(capsys, "inspect", "gpt2", "--svg", tmp_path / "none" / "a.svg")
    assert "did you mean 'gpt2'?" in refused(capsys, "inspect", "gtp2")
    assert "draws one model, and there are two" in refused(capsys, "inspect", "gpt2", "bert", "--svg", picture)


def test_a_preset_is_a_config(capsys):
    assert "needs at least" in refused(capsys, "train", "--config", "week_16", "--data.corpus", "file")
    said = refused(capsys, "train", "--config", "attention_is_all_you_need")
    assert "'encoder_decoder' learns from pairs, and data.corpus is 'plays'; choose --data.corpus cmudict" in said
    assert "one of module_6" in refused(capsys, "train", "--config", "week_17")


def test_help_version_and_unknown_commands(capsys):
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(word in out for word in ("train", "sample", "evaluate"))
    assert run(capsys)[0] == 2
    assert run(capsys, "--version")[1].strip() == "0.1.0"
    assert "did you mean 'train'" in refused(capsys, "trian")
    status, out, _ = run(capsys, "train", "--help")
    assert status == 0
    assert "--model.d-model" in out


def test_checkpoints(capsys, trained, tmp_path):
    status, out, _ = run(capsys, "checkpoints", trained, "--verify")
    assert status == 0
    assert [line.split()[0] for line in out.splitlines() if line] == ["step", "10", "20"]
    assert out.count("verified") == 2
    assert "newest" in out.splitlines()[2]
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    (copy / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir()
    data = max((copy / "checkpoints" / "20" / "state").rglob("d/*"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:1_000])
    assert run(capsys, "checkpoints", copy)[0] == 0
    status, out, said = run(capsys, "checkpoints", copy, "--verify", "--json")
    found = json.loads(out)
    assert status == 2
    assert said.splitlines()[-1].startswith(
        "error: 1 of 2 checkpoints cannot be used: 20; --resume goes on from the new"
    )
    assert [(one["step"], one["good"]) for one in found["checkpoints"]] == [(10, True), (20, False)]
    assert found["checkpoints"][0]["metrics"].keys() == {"loss", "learning_rate", "grad_norm", "val_loss"}
    assert found["others"] == {"30.orbax-checkpoint-tmp": "a save that was cut off"}
    assert "no checkpoint in" in refused(capsys, "checkpoints", tmp_path)
    assert "does not exist" in refused(capsys, "checkpoints", tmp_path / "none")


def test_debug_shows_where_an_error_comes_from(tmp_path):
    from transformer_jax.errors import CheckpointError

    with pytest.raises(CheckpointError):
        cli.main(["sample", str(tmp_path), "--debug"])


def shell(args, **environment):
    command = [sys.executable, "-m", "transformer_jax.cli", *map(str, args)]
    return subprocess.run(
        command, capture_output=True, timeout=200, env={**os.environ, **environment}, check=False, cwd=ROOT
    )


@pytest.mark.slow
def test_text_that_the_console_cannot_show(tmp_path, tiny_config):
    path = tmp_path / "accents.txt"
    path.write_text("é😀ü ñ\n" * 200, encoding="utf-8")
    config = dataclasses.replace(tiny_config, data=dataclasses.replace(tiny_config.data, path=(str(path),)))
    (tmp_path / "c.json").write_text(json.dumps(to_dict(config)))
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    out = tmp_path / "run"
    done = shell(["train", "--config", tmp_path / "c.json", "--out", out, "--train.steps", 2], **ascii_only)
    assert done.returncode == 0, done.stderr.decode()
    done = shell(["sample", out, "--tokens", 30, "--out", tmp_path / "s.txt"], **ascii_only)
    assert done.returncode == 0, done.stderr.decode()
    assert b"\\" in done.stdout
    assert len((tmp_path / "s.txt").read_text(encoding="utf-8")) == 32


@pytest.mark.parametrize("command", ["train", "sample"])
def test_a_platform_that_is_not_there(command, config_file, trained, tmp_path):
    args = ["--config", config_file, "--out", tmp_path / "run"] if command == "train" else [trained]
    done = shell([command, *args], JAX_PLATFORMS="cuda")
    assert done.returncode == 2
    assert done.stderr.decode().splitlines()[-1].startswith("error: no device for JAX_PLATFORMS=cuda")


@pytest.mark.slow
def test_a_reader_that_has_enough(trained):
    command = f"{sys.executable} -m transformer_jax.cli sample {trained} --tokens 20000 | head -c 20"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=200, check=True, cwd=ROOT)
    assert len(done.stdout) == 20
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_compile_cache(config_file, tmp_path):
    """A second start finds every program; "off" writes none."""

    def counts(out, cache):
        done = shell(
            ["train", "--config", config_file, "--out", out, "--train.steps", 1], TRANSFORMER_JAX_COMPILE_CACHE=cache
        )
        return done.stdout.decode().rsplit("compile cache: ", 1)[1].strip()

    folder = str(tmp_path / "cache")
    assert counts(tmp_path / "a", folder).startswith("0 hits")
    assert counts(tmp_path / "b", folder).endswith("0 misses")
    assert counts(tmp_path / "c", "off") == "off"
