"""Meshes of any sizes: as text, over devices, and the rows that each process reads."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples, outcome

from transformer_jax.errors import ConfigError
from transformer_jax.training import sharding
from transformer_jax.training.mesh import MESH_AXES, mesh_shape, mesh_text, parse_mesh


@st.composite
def meshes(draw, largest):
    """Some axes in any order, of which one may take what is left."""
    names = draw(st.lists(st.sampled_from(MESH_AXES), min_size=1, unique=True))
    mesh = {name: draw(st.integers(1, largest)) for name in names}
    return mesh | {draw(st.sampled_from(names)): -1} if draw(st.booleans()) else mesh


@given(meshes(2**20), st.sampled_from(["", " ", "\t"]))
def test_round_trip_of_any_mesh(mesh, blank):
    text = mesh_text(mesh)
    assert list(parse_mesh(text).items()) == list(mesh.items())
    for sign in ",=":
        text = text.replace(sign, f"{blank}{sign}{blank}")
    assert parse_mesh(text) == mesh


PARTS = st.sampled_from([*MESH_AXES, "=", ",", "-1", "2", "0", "٣", "²", "--1", "\n", " ", "data=2"])


@given(st.lists(PARTS).map("".join) | st.text())
def test_any_text_is_a_mesh_or_an_error_of_one_line(text):
    mesh = outcome(parse_mesh, text)
    if not isinstance(mesh, str):
        assert parse_mesh(mesh_text(mesh)) == mesh
        assert set(mesh) <= set(MESH_AXES)
        assert all(size >= 1 or size == -1 for size in mesh.values())


@given(meshes(6), st.integers(1, 12))
def test_a_mesh_takes_all_devices_or_is_refused(mesh, devices):
    possible = [
        shape
        for shape in itertools.product(range(1, devices + 1), repeat=3)
        if math.prod(shape) == devices
        and all(mesh.get(name, 1) in (-1, size) for name, size in zip(MESH_AXES, shape, strict=True))
    ]
    if possible:
        assert [mesh_shape(mesh, devices)] == possible
    else:
        with pytest.raises(ConfigError):
            mesh_shape(mesh, devices)


class Client:
    """Of the devices of a process that is not there."""

    platform, runtime_type = "cpu", "none"

    def __init__(self, me):
        self._me = me

    def process_index(self):
        return self._me


class Device:
    """A device that is not there, as process `me` sees it."""

    platform = device_kind = "cpu"

    def __init__(self, number, process, me):
        self.id, self.process_index, self.client = number, process, Client(me)


RULES = [(), *((("batch", by),) for by in ("data", "fsdp", ("fsdp", "data"), None))]


@examples(60)
@given(
    st.tuples(*[st.integers(1, 3)] * 3),
    st.sampled_from(RULES),
    st.integers(1, 3),
    st.data(),
)
def test_processes_read_all_rows_of_their_devices(shape, rules, each, data):
    """Whichever devices a process has; where it has neighbours and no model is split between them, each row once."""
    count = math.prod(shape)
    processes = data.draw(st.sampled_from([n for n in range(1, count + 1) if count % n == 0]))
    owners = [number * processes // count for number in range(count)]
    neighbours = data.draw(st.booleans())
    if not neighbours:
        owners = data.draw(st.permutations(owners))
    by = dict(sharding.complete_rules(rules))["batch"] or ()
    sizes = dict(zip(MESH_AXES, shape, strict=True))
    parts = math.prod(sizes[axis] for axis in by)
    size = parts * each
    held = {process: set() for process in range(processes)}
    for owner, place in zip(owners, itertools.product(*map(range, shape)), strict=True):
        part, where = 0, dict(zip(MESH_AXES, place, strict=True))
        for axis in by:
            part = part * sizes[axis] + where[axis]
        held[owner] |= set(range(part * each, (part + 1) * each))
    spans = []
    for me in range(processes):
        devices = [Device(number, owner, me) for number, owner in enumerate(owners)]
        rows = sharding.held_rows(sharding.placement(devices, shape, rules).rows, size)
        assert rows == range(min(held[me]), max(held[me]) + 1)
        spans.append(rows)
    read = [row for span in spans for row in span]
    assert set(read) == set(range(size))
    if neighbours and by == ("data", "fsdp") and (count // processes) % shape[2] == 0:
        assert read == list(range(size))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 6), st.data())
def test_without_a_mesh_each_process_has_as_many_devices(rows, processes, each, data):
    """And they divide the rows."""
    owners = [process for process in range(processes) for _ in range(each)]
    devices = [Device(number, owner, 0) for number, owner in enumerate(data.draw(st.permutations(owners)))]
    try:
        place = sharding.default_placement(rows, (), devices)
    except ConfigError:
        assert math.gcd(rows, len(devices)) % processes
        return
    taken = [device.process_index for device in place.mesh.devices.flatten()]
    assert taken == sorted(taken)
    assert rows % len(taken) == 0
    assert {taken.count(process) for process in range(processes)} == {len(taken) // processes}
    assert len(taken) == math.gcd(rows, len(devices))
