import json
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from transformer_jax.training.digests import device_sums, digests, numpy_digest

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8]


def text(sums):
    return "".join(f"{total:08x}" for total in np.asarray(sums).tolist())


def slow(x):
    """The definition, in Python's own numbers."""
    bits = np.ascontiguousarray(x).reshape(-1).view(f"u{x.dtype.itemsize}").tolist()
    sums = []
    for of_bits, of_place, more in ((0x9E3779B1, 0x85EBCA77, 0), (0xC2B2AE3D, 0x27D4EB2F, 0x165667B1)):
        total = 0
        for place, b in enumerate(bits):
            h = b * of_bits % 2**32 ^ (place * of_place + more) % 2**32
            h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
            h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
            total += h ^ h >> 16
        sums.append(total % 2**32)
    return text(sums)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 4, 5), (0, 3)])
def test_devices_numpy_and_the_definition_agree(dtype, shape):
    x = np.asarray(np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    assert numpy_digest(x) == slow(x)
    assert text(device_sums([jnp.asarray(x)])[0]) == slow(x)
    assert digests({"a": {"b": jnp.asarray(x)}}) == {"a/b": slow(x)}


def test_large_arrays_are_read_in_pieces():
    x = np.random.default_rng(0).normal(size=(3, 200_000)).astype(np.float32)
    assert numpy_digest(x) == text(device_sums([jnp.asarray(x)])[0])


def test_every_bit_and_every_place_counts():
    x = np.random.default_rng(0).normal(size=(50,)).astype(np.float32)
    seen = {numpy_digest(x)}
    for place in range(50):
        for bit in range(32):
            y = x.copy()
            y.view(np.uint32)[place] ^= np.uint32(1) << np.uint32(bit)
            seen.add(numpy_digest(y))
    assert len(seen) == 1 + 50 * 32
    draw = random.Random(0)
    for _ in range(100):  # the same numbers in another order, one sign turned twice, the same sum
        y = x.copy()
        i, j = draw.sample(range(50), 2)
        y[i], y[j] = y[j], y[i]
        seen.add(numpy_digest(y))
    assert len(seen) > 1 + 50 * 32 + 90
    assert numpy_digest(np.zeros(4, np.float32)) != numpy_digest(np.zeros(5, np.float32))
    assert numpy_digest(np.zeros(1, np.float32)) != numpy_digest(-np.zeros(1, np.float32))


EIGHT = """
import json, jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from transformer_jax.training.digests import device_sums
x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
specs = [P(), P("a"), P(None, "b"), P("a", "b"), P(("a", "b")), P("b", "a")]
print(json.dumps([np.asarray(device_sums([jax.device_put(x, NamedSharding(mesh, s))])[0]).tolist() for s in specs]))
"""


def test_a_mesh_changes_no_digest():
    import os

    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8"}
    done = subprocess.run([sys.executable, "-c", EIGHT], env=environment, capture_output=True, text=True, check=True)
    x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 6
    assert {text(sums) for sums in found} == {numpy_digest(x)}


def test_arrays_without_copies_are_left_as_they_were():
    x = jnp.arange(6.0)
    before = digests({"x": x})
    assert digests({"x": x}) == before
    assert jax.jit(lambda x: x + 1, donate_argnums=0)(x)[0] == 1
