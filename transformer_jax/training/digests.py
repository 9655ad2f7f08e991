"""What tells an array from any other, so that damage on its way to the disk and back is found.

A digest is two 32-bit sums over the array's elements. Each element adds a mixture of its bits and its place, in which
every bit counts (the mixture is one to one in the bits, and ends as Appleby's MurmurHash3 does): one changed element
always changes both sums, and changes of many cancel out in one of 2^64 cases. Sums do not depend on their order, so
the parts of an array can be summed wherever they lie. Against damage, not against people.
"""

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.fetch import fetch
from transformer_jax.training.optim import leaf_name

_SUMS = ((0x9E3779B1, 0x85EBCA77, 0), (0xC2B2AE3D, 0x27D4EB2F, 0x165667B1))
"""Factors of the bits and of the place, both odd, and what is added."""

_CHUNK = 1 << 18
"""Elements that NumPy takes at a time, so that they stay in a cache."""


def digests(tree: Any) -> dict[str, str]:
    """The digest of each array of a tree, by its path: the same on any mesh, and computed where the arrays lie."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    arrays = [x for _, x in leaves]
    if all(map(_in_host_memory, arrays)):
        found = [numpy_digest(np.asarray(x)) for x in arrays]  # as fast as compiled code, without compiling
    else:
        found = [_text(sums) for sums in jax.device_get(device_sums(arrays))]
    return {leaf_name(path): text for (path, _), text in zip(leaves, found, strict=True)}


def numpy_digest(x: np.ndarray) -> str:
    """What `digests` says of an array, computed by NumPy."""
    bits = x.reshape(-1).view(f"u{x.dtype.itemsize}")
    total = np.zeros(len(_SUMS), np.uint32)
    for start in range(0, bits.size, _CHUNK):
        part = bits[start : start + _CHUNK].astype(np.uint32)
        place = np.arange(start, start + part.size).astype(np.uint32)
        total += np.array([np.sum(_mixed(part, place, *numbers), dtype=np.uint32) for numbers in _SUMS])
    return _text(total)


def sha256_digests(tree: Any) -> dict[str, str]:
    """`sha256_digest` of each array of a tree; one is gathered at a time."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {leaf_name(path): sha256_digest(fetch(x)) for path, x in leaves}


def sha256_digest(x: np.ndarray) -> str:
    """What checkpoints of format 1 say of an array."""
    return hashlib.sha256(x.tobytes()).hexdigest()


def _in_host_memory(x: jax.Array) -> bool:
    return x.is_fully_addressable and all(device.platform == "cpu" for device in x.devices())


@jax.jit
def device_sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """The two sums of each array, uint32 [2]."""
    return [_sums(x) for x in arrays]


def _sums(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)
    place = jnp.zeros((), jnp.uint32)
    for axis in range(x.ndim):
        stride = np.uint32(math.prod(x.shape[axis + 1 :]) % 2**32)
        place = place + stride * jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.stack([jnp.sum(_mixed(bits, place, *numbers), dtype=jnp.uint32) for numbers in _SUMS])


def _mixed(bits: Any, place: Any, of_bits: int, of_place: int, more: int) -> Any:
    """uint32 of the same shape, by JAX or NumPy."""
    h = bits * np.uint32(of_bits) ^ (place * np.uint32(of_place) + np.uint32(more))
    h = (h ^ (h >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return h ^ (h >> np.uint32(16))


def _text(sums: Any) -> str:
    return "".join(f"{int(total):08x}" for total in sums)
