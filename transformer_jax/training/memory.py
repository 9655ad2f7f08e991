"""Whether a state can lie in memory at all, found out before anything is allocated: an OOM killer says nothing."""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from transformer_jax.errors import ConfigError
from transformer_jax.training.sharding import Placement


def check_memory(state: Any, placement: Placement, memory: float | None = None) -> None:
    """Holds a state to the memory of its devices. Activations come on top: what passes may still not fit.

    Args:
      state: Its shapes and types, from `abstract_state`.
      placement: Where it is to lie.
      memory: Bytes of a device; None asks the device.

    Raises:
      ConfigError: With what is needed and what is there.
    """
    leaves, shardings = jax.tree.leaves(state), jax.tree.leaves(placement.shardings(state))
    needed = sum(math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize for x, s in zip(leaves, shardings, strict=True))
    memory = _memory(placement) if memory is None else memory
    if memory is not None and needed > memory:
        raise ConfigError(
            f"parameters and optimiser take {needed / 2**30:,.1f} GiB on each device, and it has "
            f"{memory / 2**30:,.1f}; make the model smaller, or give more devices and --mesh fsdp=N"
        )


def _memory(placement: Placement) -> float | None:
    """Bytes that one device has; None where nobody says. CPU devices of one process share the machine's."""
    device = placement.mesh.local_devices[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / len(placement.mesh.local_devices)
    stats: Mapping[str, int] = device.memory_stats() or {}
    return stats.get("bytes_limit")
