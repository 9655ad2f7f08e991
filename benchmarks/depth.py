"""What scanning, unrolling and recomputing layers cost: GPT-2 small, forward and backward.

python benchmarks/depth.py

Prints two tables: times of initialising, tracing, compiling and running with the layers scanned and unrolled, and the
peak of temporary memory at a long context with and without `remat`. Where the `tpu` extra is installed, the same
programs are also compiled by the real TPU compiler for one chip of a v5e slice; no TPU is needed.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What libtpu otherwise asks a Cloud TPU's metadata server for.
os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_WORKER_HOSTNAMES="localhost", TPU_ACCELERATOR_TYPE="v5litepod-8")

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax import ModelConfig, create_model, preset

GPT2 = replace(preset("gpt2").model, dropout=0.0, attention_dropout=0.0)


def seconds(function: Callable[[], Any]) -> tuple[float, Any]:
    """Runs a function and waits for its result."""
    start = time.perf_counter()
    result = jax.block_until_ready(function())
    return time.perf_counter() - start, result


def gradient(config: ModelConfig) -> Callable[..., Any]:
    """The gradient of the mean negative log likelihood of a batch [B, T + 1]."""
    model = create_model(config)

    def loss(params: Any, ids: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(model.apply({"params": params}, ids[:, :-1]))
        return -jnp.mean(jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1))

    return jax.jit(jax.value_and_grad(loss))


def shapes(config: ModelConfig, batch: int, length: int) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Parameters and ids as shapes alone."""
    ids = jax.ShapeDtypeStruct((batch, length + 1), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    one = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(create_model(config).init, key, one)["params"], ids


def one_chip() -> Mesh | None:
    """One chip of a TPU slice that is only described, or None without libtpu."""
    try:
        from jax.experimental import topologies

        chips = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    except Exception as error:
        print(f"(no TPU compiler: {type(error).__name__}; pip install 'transformer-jax[tpu]')\n")
        return None
    return Mesh(np.array(chips[:1]), ("data",), axis_types=(AxisType.Auto,))


def compile_for(mesh: Mesh, config: ModelConfig, batch: int, length: int) -> tuple[float, Any]:
    """Compiles the gradient for a mesh: seconds of the compiler, and the program."""
    whole = NamedSharding(mesh, PartitionSpec())
    params, ids = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), shapes(config, batch, length)
    )
    with jax.set_mesh(mesh):
        lowered = gradient(config).lower(params, ids)
        return seconds(lowered.compile)


def depth(chip: Mesh | None, batch: int, length: int, repeats: int) -> None:
    """Scanned against unrolled."""
    print(f"GPT-2 small, batch {batch}, context {length}, float32, one gradient; seconds\n")
    print("| unroll | init, with compiling | trace | compile | step | compile for TPU v5e |\n|---|---|---|---|---|---|")
    ids = jax.random.randint(jax.random.key(1), (batch, length + 1), 0, GPT2.vocab_size)
    for unroll in (1, 2, 4, 12):
        config = replace(GPT2, unroll=unroll, context=length)
        start, params = seconds(
            lambda config=config: jax.jit(create_model(config).init)(jax.random.key(0), ids[:, :-1])["params"]
        )
        trace, traced = seconds(lambda config=config, params=params: gradient(config).trace(params, ids))
        lowered = traced.lower()
        compiling, program = seconds(lowered.compile)
        program(params, ids)
        step = min(seconds(lambda program=program, params=params: program(params, ids))[0] for _ in range(repeats))
        half = replace(config, compute_dtype="bfloat16")
        tpu = "" if chip is None else f"{compile_for(chip, half, batch, length)[0]:.1f}"
        print(f"| {unroll} | {start:.1f} | {trace:.2f} | {compiling:.2f} | {step:.2f} | {tpu} |", flush=True)


def temporary(compiling: Callable[[], Any]) -> str:
    """MB of temporary memory of a program, or what the compiler says of one that does not fit."""
    try:
        return f"{compiling().memory_analysis().temp_size_in_bytes / 1e6:,.0f}"
    except jax.errors.JaxRuntimeError as error:
        needed = re.search(r"\(([\d.]+[GM])\) exceeds available HBM \(([\d.]+[GM])\)", str(error))
        if needed is None:
            raise
        return f"{needed[1]}, of {needed[2]} there are: does not fit"


def memory(chip: Mesh | None, length: int) -> None:
    """Temporary memory of one gradient at a long context."""
    print(f"\nGPT-2 small, batch 1, context {length}, bfloat16, one gradient; MB of temporary memory\n")
    print("| | CPU | TPU v5e, xla | TPU v5e, tpu |\n|---|---|---|---|")
    for remat in (False, True):
        config = replace(GPT2, context=length, compute_dtype="bfloat16", remat=remat, attention_impl="xla")
        figures = [temporary(lambda config=config: gradient(config).lower(*shapes(config, 1, length)).compile())]
        for name in ("xla", "tpu") if chip is not None else ():
            fused = replace(config, attention_impl=name)
            figures.append(temporary(lambda fused=fused: compile_for(chip, fused, 1, length)[1]))
        print(f"| {'remat' if remat else 'plain'} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--long", type=int, default=4_096)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    chip = one_chip()
    depth(chip, options.batch, options.length, options.repeats)
    memory(chip, options.long)
