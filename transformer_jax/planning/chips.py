"""The accelerators that programs can be compiled for without having them."""

import dataclasses
import math
import os
from typing import Any

from transformer_jax.checks import unknown
from transformer_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one device of a topology can do; a v4 here is one of the two cores of a chip.

    Attributes:
      flops: Peak products in bfloat16, operations per second.
      clock: Cycles per second: the peak over what the matrix units do in a cycle.
      link: Bytes per second over one link in one direction.
      ring: Shortest side of a slice whose ends are linked to each other; a shorter one is a line.
      memory: Bytes that programs can have, as the compiler says it when they ask for more.
      devices: That JAX sees of one chip.
    """

    flops: float
    clock: float
    link: float
    ring: int
    memory: float
    devices: int = 1


# Peaks and links: Google Cloud's pages on each TPU version. v5e: 400 GB/s in both directions over 4 links.
CHIPS = {
    "v4": Chip(flops=137.5e12, clock=1.05e9, link=50e9, ring=4, memory=15.25 * 2**30, devices=2),
    "v5e": Chip(flops=197e12, clock=1.5e9, link=50e9, ring=16, memory=15.75 * 2**30),
    "v5p": Chip(flops=459e12, clock=1.75e9, link=100e9, ring=4, memory=95.74 * 2**30),
    "v6e": Chip(flops=918e12, clock=1.75e9, link=100e9, ring=16, memory=31.25 * 2**30),
}

ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # plans beside plans
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
}
"""What lets the TPU compiler run where there is no TPU, for any topology."""


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as "v5e:2x4".

    Raises:
      ConfigError: For another form, or a kind that is not in `CHIPS`.
    """
    kind, colon, sizes = topology.partition(":")
    if not colon or not all(size.isdecimal() and int(size) for size in sizes.split("x")):
        raise ConfigError(f"topology {topology!r} is not KIND:SIZES; write it as in v5e:2x4 or v5p:4x4x4")
    if kind not in CHIPS:
        raise ConfigError(unknown("kind of TPU", kind, CHIPS))
    return CHIPS[kind]


def count_devices(topology: str) -> int:
    """Devices of a topology."""
    return chip_of(topology).devices * math.prod(map(int, topology.partition(":")[2].split("x")))


def links(topology: str, group: int) -> int:
    """Links over which each device of a group receives at once: two in a ring, one in a line.

    A group longer than each side of the slice lies on several, as a ring. So the TPU compiler gathers arrays.

    Example:
      >>> links("v5p:4x4x4", 16), links("v5p:4x4x4", 4), links("v5e:2x4", 4), links("v5e:2x4", 8)
      (2, 2, 1, 2)
    """
    chip, longest = chip_of(topology), max(map(int, topology.partition(":")[2].split("x")))
    return 2 if group > longest or group == longest >= chip.ring else 1


def topology_devices(topology: str) -> list[Any]:
    """The described devices of a topology, for a mesh that programs can be compiled for.

    Raises:
      ConfigError: Without the TPU compiler, or for a shape that it does not know.
    """
    chip_of(topology)
    os.environ.update(ENVIRONMENT)
    from jax.experimental import topologies

    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)
    except Exception as error:  # whatever the plugin raises
        reason = " ".join(str(error).split())
        if "not installed" in reason:
            raise ConfigError(
                "compiling for a TPU needs its compiler, and it is not installed: pip install 'transformer-jax[tpu]'"
            ) from error
        raise ConfigError(f"topology {topology!r}: the TPU compiler does not have it: {reason[:200]}") from error
