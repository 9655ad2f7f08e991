"""Settings of the whole test run, and a small trained run that several tests read."""

import dataclasses
import gc
import os
import random
from importlib import metadata
from pathlib import Path
from typing import get_args

# A test must neither read nor fill the user's cache. Set before anything touches a device.
os.environ["TRANSFORMER_JAX_COMPILE_CACHE"] = "off"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of a test's time is compiling. Set in the environment, so that child processes make the same programs.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# A third faster again. XLA ends the process over a flag it does not know, and newer versions do not know this one.
if metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
# How long an example takes depends on who else uses the machine. The examples are the same each time, but for those of
# `--hypothesis-profile=campaign`; see properties.py.
_PATIENT = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("patient", _PATIENT, derandomize=True, max_examples=100)
hypothesis.settings.register_profile("campaign", _PATIENT, derandomize=False, max_examples=10_000, print_blob=True)
hypothesis.settings.load_profile("patient")

from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig  # noqa: E402 (settings first)
from transformer_jax.config import Architecture  # noqa: E402

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Compiled programs of one file are of no use to the next, and a process can map only so many."""
    yield
    jax.clear_caches()


@pytest.fixture
def damages():
    """For tests that damage checkpoints: Orbax leaves coroutines behind that complain when they are collected.

    Such a test also ignores PytestUnraisableExceptionWarning.
    """
    yield
    gc.collect()


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text of 6,000 characters with some structure: words from a small list, in lines."""
    draw = random.Random(0)
    words = [
        "the",
        "king",
        "and",
        "queen",
        "of",
        "hearts",
        "went",
        "out",
        "to",
        "sea",
        "in",
        "a",
        "beautiful",
        "pea",
        "green",
        "boat",
    ]
    lines = [" ".join(draw.choice(words) for _ in range(6)) for _ in range(300)]
    path = tmp_path_factory.mktemp("text") / "rhyme.txt"
    path.write_text("\n".join(lines)[:6_000], encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tiny_config(text_file):
    """2 layers, width 32, context 16, with dropout and accumulation; 20 steps of a 40-step schedule."""
    return Config(
        model=ModelConfig(context=16, d_model=32, num_heads=2, num_layers=2, dropout=0.1),
        data=DataConfig(corpus="file", path=(str(text_file),)),
        optim=OptimConfig(warmup_steps=15, decay_steps=40),
        train=TrainConfig(
            steps=20,
            batch_size=8,
            accumulate=2,
            log_every=1,
            eval_every=10,
            eval_chars=256,
            save_every=10,
            sample_chars=40,
        ),
    )


@pytest.fixture(scope="session")
def pairs_file(tmp_path_factory):
    """400 words of 1 to 9 letters, each with itself backwards; every tenth also with itself."""
    draw = random.Random(1)
    words = ["".join(draw.choice("abcde") for _ in range(draw.randint(1, 9))) for _ in range(400)]
    lines = [f"{word}\t{word[::-1]}" for word in words] + [f"{word}\t{word}" for word in words[::10]]
    path = tmp_path_factory.mktemp("pairs") / "backwards.tsv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def families(tiny_config, pairs_file):
    """`tiny_config` for each architecture, by its name; with pairs where it learns from them."""
    pairs = DataConfig(corpus="pairs", path=(str(pairs_file),))
    return {
        name: dataclasses.replace(
            tiny_config,
            model=dataclasses.replace(tiny_config.model, architecture=name),
            data=pairs if name == "encoder_decoder" else tiny_config.data,
        )
        for name in get_args(Architecture)
    }


@pytest.fixture(scope="session")
def trained(tiny_config, tmp_path_factory):
    """The folder of a finished run of `tiny_config`; read it, do not change it."""
    from transformer_jax.training.loop import train

    out = tmp_path_factory.mktemp("runs") / "trained"
    train(tiny_config, out)
    return out
