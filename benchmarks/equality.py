"""Decoding with a cache against one pass without: every kind of model, every way of cutting the tokens.

    python benchmarks/equality.py

Runs the whole product of cases and writes docs/equality.md; the tests run a sample of the same cases.
"""

import datetime
import itertools
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from transformer_jax import ModelConfig, config, create_model

VOCAB, LENGTH, SOURCE = 11, 12, 9
HALF = LENGTH // 2
PAGE = Path(__file__).parent.parent / "docs" / "equality.md"
FIELDS = {
    "architecture": ("decoder", "encoder_decoder"),
    "positions": get_args(config.Positions),
    "norm_position": get_args(config.NormPosition),
    "num_kv_heads": (None, 2, 1),
    "window": (None, 5),
}


def cases() -> list[ModelConfig]:
    """Small models: the product of `FIELDS`."""
    common = {"vocab_size": VOCAB, "context": LENGTH, "d_model": 16, "num_heads": 4, "num_layers": 2, "d_ff": 24}
    return [
        ModelConfig(**common, **dict(zip(FIELDS, values, strict=True)), init="fan_in", unroll=1)
        for values in itertools.product(*FIELDS.values())
    ]


def differences(model_config: ModelConfig) -> Iterator[tuple[str, float]]:
    """The largest difference of logits for each way of cutting 12 tokens, between a cache and a pass without one."""
    model = create_model(model_config)
    keys = jax.random.split(jax.random.key(0), 3)
    ids = jax.random.randint(keys[0], (2, LENGTH), 0, VOCAB)
    if model_config.architecture == "decoder":
        params = jax.jit(model.init)(keys[1], ids)["params"]
        empty, step_params = model.init_cache(2, LENGTH), params
        full = jax.jit(lambda ids: model.apply({"params": params}, ids))
    else:
        source = jax.random.randint(keys[2], (2, SOURCE), 0, VOCAB)
        source_valid = jnp.arange(SOURCE)[None] < jnp.array([[SOURCE], [4]])

        @jax.jit
        def start() -> tuple[Any, Any]:
            params = model.init(keys[1], source, ids)["params"]
            memory = model.apply({"params": params}, source, source_valid=source_valid, method="encode")
            return params, model.init_cache(2, LENGTH, params=params, memory=memory, source_valid=source_valid)

        params, empty = start()
        # The source is encoded once: no step reads the encoder.
        step_params = {**params, "encoder": jax.tree.map(lambda p: p * jnp.nan, params["encoder"])}
        full = jax.jit(lambda ids: model.apply({"params": params}, source, ids, source_valid=source_valid))
    whole = full(ids)

    @jax.jit
    def step(ids: jax.Array, cache: Any, valid: jax.Array | None) -> tuple[jax.Array, Any]:
        return model.apply({"params": step_params}, ids, cache=cache, valid=valid)

    def run(ids: jax.Array, cache: Any) -> tuple[jax.Array, Any]:
        """One step; longer pieces with a mask of real tokens, which the ragged case then shares a program with."""
        return step(ids, cache, None if ids.shape[1] == 1 else jnp.ones(ids.shape, bool))

    def pieces(*sizes: int) -> tuple[jax.Array, Any]:
        cache, out, start = empty, [], 0
        for size in sizes:
            logits, cache = run(ids[:, start : start + size], cache)
            out.append(logits)
            start += size
        return jnp.concatenate(out, axis=1), cache

    def largest(a: jax.Array, b: jax.Array) -> float:
        return float(jnp.abs(a - b).max())

    yield "prefill, then single steps", largest(pieces(HALF, *[1] * HALF)[0], whole)
    yield "single steps", largest(pieces(*[1] * LENGTH)[0], whole)
    halves, cache = pieces(HALF, HALF)
    yield "two chunks", largest(halves, whole)

    # Rows of 3 and 6 tokens in one batch, each going on from its own end.
    lengths = [3, HALF]
    valid = jnp.arange(HALF)[None] < jnp.array(lengths)[:, None]
    first, ragged = step(ids[:, :HALF], empty, valid)
    after, _ = run(ids[:, -1:], ragged)
    alone = full(jnp.stack([ids[row].at[length].set(ids[row, -1]) for row, length in enumerate(lengths)]))
    yield (
        "ragged prompts",
        max(
            max(largest(first[row, :length], alone[row, :length]), largest(after[row, 0], alone[row, length]))
            for row, length in enumerate(lengths)
        ),
    )

    # The sliding rule: a full row goes on from its last half.
    slid, cache = run(ids[:, HALF:], cache.cleared())
    onward, _ = run(ids[:, :1], cache)
    window = full(jnp.concatenate([ids[:, HALF:], ids[:, :HALF]], axis=1))
    yield "past the context", largest(jnp.concatenate([slid, onward], axis=1), window[:, : HALF + 1])


def main(say: Callable[[str], None] = print) -> None:
    """Runs all cases and writes the page."""
    every = cases()
    worst: dict[tuple[str, str], dict[str, float]] = {}
    for number, case in enumerate(every):
        row = worst.setdefault((case.architecture, case.positions), {})
        for name, value in differences(case):
            row[name] = max(row.get(name, 0.0), value)
        jax.clear_caches()
        say(f"{number + 1}/{len(every)} {case.architecture} {case.positions}: {max(row.values()):.1e}")
    names = list(next(iter(worst.values())))
    lines = [
        "# Decoding with a cache equals one pass without",
        "",
        f"The largest absolute difference of logits over {len(every)} models of two layers with random weights, in",
        "float32: each kind of positions, pre- and post-norm, 4, 2 and 1 key heads for 4 query heads, with and without",
        "a window of 5. Sources are ragged, and a decoder's steps never read the encoder.",
        "",
        f"Written by `python benchmarks/equality.py` on {datetime.date.today()}, {platform.machine()} CPU, "
        f"Python {platform.python_version()}, jax {jax.__version__}. The limit is 1e-4.",
        "",
        f"| model | positions | {' | '.join(names)} |",
        f"|---|---|{'---|' * len(names)}",
        *(
            f"| {architecture} | {positions} | {' | '.join(f'{row[name]:.1e}' for name in names)} |"
            for (architecture, positions), row in worst.items()
        ),
    ]
    PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if max(value for row in worst.values() for value in row.values()) >= 1e-4:
        raise SystemExit("a difference is not below 1e-4")


if __name__ == "__main__":
    main()
