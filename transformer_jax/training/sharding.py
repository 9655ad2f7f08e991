"""The mesh, and where arrays lie on it. One device is the mesh 1 x 1 x 1: there is one code path."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor")

ACTIVATION_RULES = (
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("embed", None),
    ("heads", "tensor"),
    ("kv_heads", "tensor"),
    ("head_dim", None),
    ("d_ff", "tensor"),
    ("vocab", "tensor"),
)
"""Which mesh axes split each named axis of an activation; see `nn.axes`."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and the shardings that follow from it.

    Attributes:
      mesh: Axes data, fsdp, tensor.
    """

    mesh: Mesh

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Batches: rows split over data and fsdp."""
        return NamedSharding(self.mesh, PartitionSpec(("data", "fsdp")))

    def place(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Puts a global batch onto the mesh; each host reads only the rows that its devices hold."""
        return {
            name: jax.make_array_from_callback(array.shape, self.rows, array.__getitem__)
            for name, array in batch.items()
        }

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Makes the mesh and the activation rules current."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(ACTIVATION_RULES):
            yield


def default_placement(rows: int) -> Placement:
    """Data parallel over as many of the devices as divide the rows of one step.

    Args:
      rows: Windows computed at once: the batch over its accumulation steps.
    """
    devices = find_devices()
    count = math.gcd(rows, len(devices))
    return placement(devices[:count], (count, 1, 1))


def placement(devices: list[Any], shape: tuple[int, int, int]) -> Placement:
    """A mesh of that shape over the devices."""
    return Placement(jax.make_mesh(shape, MESH_AXES, axis_types=(AxisType.Auto,) * 3, devices=devices))


def find_devices() -> list[Any]:
    """The devices JAX sees.

    Raises:
      ConfigError: If the platform asked for in JAX_PLATFORMS is not there.
    """
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX fails an assertion where a platform has no plugin
        reason = str(error).splitlines()[0] if str(error) else "this jax has no support for it"
        raise ConfigError(
            f"no device for JAX_PLATFORMS={jax.config.jax_platforms}: {reason}; unset it to use what is there"
        ) from error


def describe(placement: Placement) -> str:
    """The devices in words, such as "1 x cpu (cpu)"."""
    devices = placement.mesh.devices.flatten()
    found = len(jax.devices())
    unused = f", {found - devices.size} of {found} unused" if found > devices.size else ""
    return f"{devices.size} x {devices[0].device_kind} ({devices[0].platform}{unused})"
