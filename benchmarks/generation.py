"""What the cache saves: symbols per second of the 10.7-million-parameter model with it and without.

    python benchmarks/generation.py

Without a cache each symbol takes a forward pass over the whole window of 256, in one compiled program, as nanoGPT does
it without compiling; with one, `generate` makes the whole window. Both are arg max in float32, with random weights:
the time does not depend on them. Also whether other numbers of symbols compile anything.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax import create_model
from transformer_jax.config_files import load_config
from transformer_jax.generation import generate
from transformer_jax.generation.sample import _advance

CONFIG = replace(
    load_config(Path(__file__).parent.parent / "configs" / "shakespeare_gpu.py").model,
    vocab_size=65,
    compute_dtype="float32",
)


def seconds(function: Callable[[], Any]) -> float:
    """The best of three times of a function to its result: others may use the machine."""
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(function())
        times.append(time.perf_counter() - start)
    return min(times)


def without_cache(model: Any, params: Any, batch: int, tokens: int) -> np.ndarray:
    """The same symbols as `generate` with temperature 0: int32 [B, tokens]."""
    ids = jnp.zeros((batch, model.context), jnp.int32)
    for length in range(1, tokens + 1):
        ids = _without_cache(model, params, ids, jnp.int32(length))
    return np.asarray(ids[:, 1 : tokens + 1])


@jax.jit(static_argnums=0, donate_argnames="ids")
def _without_cache(model: Any, params: Any, ids: jax.Array, length: jax.Array) -> jax.Array:
    valid = jnp.broadcast_to(jnp.arange(ids.shape[1])[None, :] < length, ids.shape)
    logits = model.apply({"params": params}, ids, valid=valid)
    return ids.at[:, length].set(jnp.argmax(logits[:, length - 1], axis=-1).astype(jnp.int32))


def main(batches: list[int], tokens: int) -> None:
    """Measures and prints a table."""
    model = create_model(CONFIG)
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))["params"]
    count = sum(p.size for p in jax.tree.leaves(params))
    print(f"{count / 1e6:.1f} million parameters, float32, a window of {model.context}; symbols per second\n")
    print("| batch | with the cache | without | ratio | compilations for more symbols |\n|---|---|---|---|---|")
    for batch in batches:

        def cached(tokens: int, batch: int = batch) -> np.ndarray:
            return generate(model, params, [[0]] * batch, tokens, temperature=0)

        same = np.array_equal(cached(tokens), without_cache(model, params, batch, tokens))
        compiled, whole = _advance._cache_size(), model.context - 1
        fast = batch * whole / seconds(lambda cached=cached, whole=whole: cached(whole))
        again = _advance._cache_size() - compiled
        slow = batch * tokens / seconds(lambda batch=batch: without_cache(model, params, batch, tokens))
        note = "" if same else " (other symbols!)"
        print(f"| {batch} | {fast:,.0f} | {slow:,.1f} | {fast / slow:.1f}{note} | {again} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--tokens", type=int, default=4, help="made without a cache, to measure")
    options = parser.parse_args()
    main(options.batches, options.tokens)
