"""The sizes of a mesh, as text and as numbers; loads nothing, so that a mistyped mesh is found at once."""

import math
from collections.abc import Mapping

from transformer_jax.checks import unknown
from transformer_jax.errors import ConfigError

MESH_AXES = ("data", "fsdp", "tensor")
"""Copies of the model; parts of each parameter, with rows of their own; parts of heads and hidden layers."""


def parse_mesh(text: str) -> dict[str, int]:
    """Reads "data=4,fsdp=2".

    Raises:
      ConfigError: For text of another form, and as `check_mesh`.

    Example:
      >>> parse_mesh("fsdp=2, data=-1")
      {'fsdp': 2, 'data': -1}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (piece.strip() for piece in part.partition("="))
        if not equals or not size.removeprefix("-").isdecimal() or len(size) > 9:
            raise ConfigError(
                f"mesh {text!r}: {part.strip()!r} is not AXIS=SIZE; write it as in data=4,fsdp=2,tensor=1"
            )
        if name in sizes:
            raise ConfigError(f"mesh {text!r} gives {name} twice, {sizes[name]} and {size}; keep one")
        sizes[name] = int(size)
    check_mesh(sizes)
    return sizes


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def check_mesh(sizes: Mapping[str, int]) -> None:
    """Holds a mesh to known axes, positive sizes, and at most one -1.

    Raises:
      ConfigError: Naming what is wrong.
    """
    for name, size in sizes.items():
        if name not in MESH_AXES:
            raise ConfigError(unknown("mesh axis", name, MESH_AXES))
        if size < 1 and size != -1:
            raise ConfigError(f"mesh {name}={size}: a size is at least 1, or -1 for the devices that are left")
    open_ = [name for name, size in sizes.items() if size == -1]
    if len(open_) > 1:
        raise ConfigError(
            f"mesh sizes of {' and '.join(open_)} are -1, and only one can take the devices that are left"
        )


def mesh_shape(sizes: Mapping[str, int], devices: int) -> tuple[int, int, int]:
    """The sizes of data, fsdp and tensor over all devices; an axis that is not given is 1, and -1 takes the rest.

    Raises:
      ConfigError: As `check_mesh`, and where the mesh has another number of devices than there are.

    Example:
      >>> mesh_shape({"data": -1, "tensor": 2}, 8)
      (4, 1, 2)
    """
    check_mesh(sizes)
    known = math.prod(size for size in sizes.values() if size != -1)
    said = mesh_text(sizes)
    if -1 in sizes.values() and devices % known:
        raise ConfigError(f"mesh {said}: {known} does not divide the {devices} devices; choose a divisor of {devices}")
    if -1 not in sizes.values() and known != devices:
        raise ConfigError(
            f"mesh {said} has {known} devices, and there are {devices}; a mesh takes all of them: "
            "give one size as -1, or hide devices from JAX"
        )
    shape = [sizes.get(name, 1) for name in MESH_AXES]
    return tuple(devices // known if size == -1 else size for size in shape)
