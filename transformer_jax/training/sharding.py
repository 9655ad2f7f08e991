"""The mesh, and where arrays lie on it. One device is the mesh 1 x 1 x 1: there is one code path."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from transformer_jax.checks import unknown
from transformer_jax.config import Config, ModelConfig
from transformer_jax.data.batches import Batch
from transformer_jax.errors import ConfigError
from transformer_jax.nn import axes, kernels
from transformer_jax.nn.layers import feed_forward_width
from transformer_jax.training.mesh import MESH_AXES, mesh_shape
from transformer_jax.training.optim import leaf_name

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]

RULES: Rules = (
    ("batch", ("data", "fsdp")),
    ("length", None),
    ("sequence", None),
    ("embed", None),
    ("heads", ("tensor",)),
    ("kv_heads", ("tensor",)),
    ("head_dim", None),
    ("d_ff", ("tensor",)),
    ("vocab", ("tensor",)),
    ("width", ("fsdp",)),
    ("layers", None),
    ("positions", None),
    ("gates", None),
)
"""Which mesh axes split each named axis, of activations and parameters alike; the names are those of `nn.axes`.

Of a matrix that reads or writes the residual stream, fsdp splits its D and tensor its heads or hidden width: queries,
keys, values, gate and up by what comes out, output and down by what goes in. Recurrent matrices are split by fsdp
alone, and norms not at all. ("sequence", "tensor") also splits the residual stream between layers by its positions:
less memory for more that is sent.
"""

MAY_STAY_WHOLE = ("vocab",)
"""Axes that are left whole where they do not divide: the symbols of a text are an odd number as often as not."""


@dataclasses.dataclass(frozen=True)
class Placement:
    """A mesh, and the shardings that follow from it.

    Attributes:
      mesh: Axes data, fsdp, tensor.
      rules: From `complete_rules`.
    """

    mesh: Mesh
    rules: Rules = RULES

    @property
    def replicated(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows(self) -> NamedSharding:
        """Batches: rows split, by default over data and fsdp."""
        return NamedSharding(self.mesh, PartitionSpec(dict(self.rules)["batch"]))

    def parts(self, name: str) -> int:
        """Into how many parts a named axis is split."""
        return math.prod(self.mesh.shape[axis] for axis in dict(self.rules)[name] or ())

    def sharding(self, names: Sequence[str], shape: Sequence[int]) -> NamedSharding:
        """Of one array, by the names of its axes.

        Raises:
          ConfigError: If an axis does not divide and is not one of `MAY_STAY_WHOLE`.
        """
        spec = []
        for name, size in zip(names, shape, strict=True):
            divides = size % self.parts(name) == 0
            if not divides and name not in MAY_STAY_WHOLE:
                raise ConfigError(f"{name} {size} does not divide into {self.split(name)}; choose another mesh or rule")
            spec.append(dict(self.rules)[name] if divides else None)
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def shardings(self, tree: Any) -> Any:
        """Of each leaf of a state or of parameters, by its path: averages and moments lie as their parameters do."""

        def one(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            name = leaf_name(path)
            if leaf.ndim == 0 or name.endswith("ns_coeffs"):  # counts, rates and Muon's constants
                return self.replicated
            return self.sharding(axes.parameter_axes(name, leaf.ndim), leaf.shape)

        return jax.tree.map_with_path(one, tree)

    def split(self, name: str) -> str:
        """What splits a named axis, such as "8 parts (data=4, fsdp=2)"."""
        by = ", ".join(f"{axis}={self.mesh.shape[axis]}" for axis in dict(self.rules)[name] or ())
        return f"{self.parts(name)} parts ({by})"

    def place(self, batch: Batch) -> dict[str, jax.Array]:
        """Puts a global batch onto the mesh."""
        return self._put(batch, 0, len(batch["inputs"]))

    def read(self, examples: Any, first: int, size: int) -> dict[str, jax.Array]:
        """A global batch of training examples on the mesh.

        Args:
          examples: From `training` of a corpus; each host makes only those that its devices hold.
          first: The first of them.
          size: How many all hosts read together.
        """
        rows = held_rows(self.rows, size)
        every = rows == range(size)
        return self._put(examples.batch(first, size) if every else examples.batch(first, size, rows), rows.start, size)

    def _put(self, part: Batch, first: int, size: int) -> dict[str, jax.Array]:
        """Puts rows of a global batch of `size` rows onto the mesh, of which those from `first` on are given."""

        def put(array: np.ndarray) -> jax.Array:
            def cut(index: tuple[slice, ...]) -> np.ndarray:
                start, stop, _ = index[0].indices(size)
                return array[(slice(start - first, stop - first), *index[1:])]

            return jax.make_array_from_callback((size, *array.shape[1:]), self.rows, cut)

        return {name: put(array) for name, array in part.items()}

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Makes the mesh and the rules current."""
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(self.rules):
            yield


def find_placement(
    config: Config, mesh: Mapping[str, int] | None = None, rules: Rules = (), devices: Sequence[Any] | None = None
) -> Placement:
    """Where a training run lies.

    Args:
      config: Of the run.
      mesh: Sizes of the axes, as for `mesh_shape`; None is data parallel over as many devices as divide the rows.
      rules: Pairs of a named axis and the mesh axes that split it, in place of those in `RULES`.
      devices: Real or described ones; None is what JAX sees.

    Raises:
      ConfigError: If the mesh is not one of these devices, or batch or model do not divide.
    """
    train = config.train
    rows = train.batch_size // train.accumulate
    place = default_placement(rows, rules, devices) if mesh is None else mesh_placement(mesh, rules, devices)
    if rows % place.parts("batch"):
        raise ConfigError(
            f"train.batch_size {train.batch_size} over train.accumulate {train.accumulate} is {rows} rows at a time, "
            f"which do not divide into {place.split('batch')}; choose a multiple, or another mesh"
        )
    check_model(config.model, place)
    return place


def default_placement(rows: int, rules: Rules = (), devices: Sequence[Any] | None = None) -> Placement:
    """Data parallel over as many of the devices as divide the rows of one step, the same number of each process.

    Args:
      rows: Windows computed at once: the batch over its accumulation steps.
      rules: As for `find_placement`.
      devices: Likewise.

    Raises:
      ConfigError: If a process would have none.
    """
    devices = find_devices() if devices is None else devices
    processes = sorted({device.process_index for device in devices})
    count = math.gcd(rows, len(devices))
    if count % len(processes):
        raise ConfigError(
            f"{rows} rows at a time do not divide among {len(processes)} processes; choose a --train.batch-size over "
            f"train.accumulate that is a multiple of {len(processes)}, or a --mesh"
        )
    each = count // len(processes)
    taken = [[device for device in devices if device.process_index == process][:each] for process in processes]
    return placement([device for some in taken for device in some], (count, 1, 1), rules)


def held_rows(sharding: NamedSharding, size: int) -> range:
    """The rows of a batch that the devices of this process hold, or between which they lie."""
    spans = [index[0].indices(size) for index in sharding.addressable_devices_indices_map((size,)).values()]
    return range(min(start for start, _, _ in spans), max(stop for _, stop, _ in spans))


def mesh_placement(mesh: Mapping[str, int], rules: Rules = (), devices: Sequence[Any] | None = None) -> Placement:
    """A mesh of these sizes over all devices, as `mesh_shape` has it."""
    devices = find_devices() if devices is None else devices
    return placement(devices, mesh_shape(mesh, len(devices)), rules)


def placement(devices: Sequence[Any], shape: tuple[int, int, int], rules: Rules = ()) -> Placement:
    """A mesh of that shape over the devices."""
    # Neighbours on a TPU's torus become neighbours on the mesh. Not every shape follows the sides of the torus: 8 x 8
    # on 4 x 4 x 4 has to split one, and `jax.make_mesh` would refuse it.
    grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    return Placement(Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * 3), complete_rules(rules))


def complete_rules(rules: Rules) -> Rules:
    """The given rules, and those of `RULES` for all other names.

    Raises:
      ConfigError: For an unknown name or mesh axis, two rules for one name, or one mesh axis that would split an array
        twice. Flax ignores each of these, in silence.
    """
    given: dict[str, tuple[str, ...] | None] = {}
    for name, by in rules:
        if name not in axes.NAMES:
            raise ConfigError(unknown("axis name", name, axes.NAMES))
        if name in given:
            raise ConfigError(f"axis {name!r} has two rules, {given[name]!r} and {by!r}; keep one")
        given[name] = ((by,) if isinstance(by, str) else tuple(by or ())) or None
        for axis in given[name] or ():
            if axis not in MESH_AXES:
                raise ConfigError(unknown(f"mesh axis for {name!r}:", axis, MESH_AXES))
    complete = dict(RULES) | given
    for array in (*axes.ACTIVATIONS, *(("layers", *names) for names in axes.PARAMETERS.values())):
        used = [axis for name in array for axis in complete[name] or ()]
        for axis in MESH_AXES:
            if used.count(axis) > 1:
                twice = ", ".join(name for name in array if axis in (complete[name] or ()))
                raise ConfigError(f"mesh axis {axis!r} would split an array {array} twice, by the rules for {twice}")
    return tuple(complete.items())


def check_model(model: ModelConfig, place: Placement) -> None:
    """Looks whether the sizes of a model divide as the rules split them, before anything is made of it.

    Raises:
      ConfigError: Naming the field and both numbers.
    """
    sizes = {"width": ("d_model", model.d_model), "embed": ("d_model", model.d_model)}
    if kernels.attends(model):
        sizes["heads"] = "num_heads", model.num_heads
        sizes["kv_heads"] = "num_kv_heads", model.num_kv_heads or model.num_heads
    if not model.recurrent and model.feed_forward != "none":
        sizes["d_ff"] = "d_ff", feed_forward_width(model.feed_forward, model.d_model, model.d_ff)
    for name, (field, size) in sizes.items():
        parts = place.parts(name)
        if size % parts:
            raise ConfigError(
                f"model.{field} {size} does not divide into {place.split(name)}; "
                f"choose a multiple, for example {max(1, round(size / parts)) * parts}, or another mesh"
            )


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
    """The devices in words, such as "1 x cpu (cpu)" and "8 x cpu (cpu), data=4, fsdp=2"."""
    devices = placement.mesh.devices.flatten()
    found = len(jax.devices())
    unused = f", {found - devices.size} of {found} unused" if found > devices.size else ""
    sizes = "".join(f", {name}={size}" for name, size in placement.mesh.shape.items() if size > 1)
    shared = f", {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return f"{devices.size} x {devices[0].device_kind} ({devices[0].platform}{unused}){sizes}{shared}"
