import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.config import resolve, to_dict
from transformer_jax.errors import ConfigError
from transformer_jax.nn.axes import constrain, parameter_axes
from transformer_jax.training import loop, sharding
from transformer_jax.training.mesh import MESH_AXES, mesh_shape, parse_mesh
from transformer_jax.training.metrics import read_metrics
from transformer_jax.training.runs import abstract_state

ROOT = Path(__file__).parent.parent.parent
ARCHITECTURES = ("decoder", "encoder", "encoder_decoder", "rnn", "gru", "lstm")


def place_on(rules=(), **sizes):
    """A placement on devices that are only described."""
    shape = tuple(sizes.get(axis, 1) for axis in MESH_AXES)
    return sharding.Placement(AbstractMesh(shape, MESH_AXES), sharding.complete_rules(rules))


def config_of(model=None, **fields):
    model = ModelConfig(**{"d_ff": 256, "num_heads": 8, **(model or {})})
    source = 30 if model.architecture == "encoder_decoder" else None
    return resolve(Config(model=model, **fields), 65, source)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data:4", "'data:4' is not AXIS=SIZE; write it as in data=4"),
        ("data=4,", "'' is not AXIS=SIZE"),
        ("", "'' is not AXIS=SIZE"),
        ("data=two", "'data=two' is not AXIS=SIZE"),
        ("data=9999999999", "'data=9999999999' is not AXIS=SIZE"),
        ("data=2.0", "'data=2.0' is not"),
        ("dta=8", "unknown mesh axis 'dta'; did you mean 'data'"),
        ("pipeline=8", "unknown mesh axis 'pipeline'; it is one of data, fsdp, tensor"),
        ("data=4,data=2", "gives data twice, 4 and 2"),
        ("data=0", "data=0: a size is at least 1, or -1"),
        ("data=-2", "data=-2: a size is at least 1"),
        ("data=-1,fsdp=-1", "sizes of data and fsdp are -1, and only one"),
    ],
)
def test_text_that_is_no_mesh(text, said):
    with pytest.raises(ConfigError, match=said) as error:
        parse_mesh(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "devices", "shape"),
    [
        ("data=8", 8, (8, 1, 1)),
        ("tensor=2,data=4", 8, (4, 1, 2)),
        ("data=-1,fsdp=2", 8, (4, 2, 1)),
        ("fsdp=-1", 1, (1, 1, 1)),
        ("data=2, fsdp=2, tensor=-1", 4, (2, 2, 1)),
        ("data=4,fsdp=4", 8, "data=4,fsdp=4 has 16 devices, and there are 8; a mesh takes all of them"),
        ("data=4", 8, "data=4 has 4 devices, and there are 8"),
        ("data=3,fsdp=-1", 8, "3 does not divide the 8 devices"),
    ],
)
def test_mesh_and_devices(text, devices, shape):
    if isinstance(shape, str):
        with pytest.raises(ConfigError, match=shape):
            mesh_shape(parse_mesh(text), devices)
    else:
        assert mesh_shape(parse_mesh(text), devices) == shape


@pytest.mark.parametrize(
    ("fields", "sizes", "said"),
    [
        (
            {"num_heads": 4},
            {"tensor": 8},
            r"num_heads 4 does not divide into 8 parts \(tensor=8\); choose a multiple, f",
        ),
        ({"num_kv_heads": 2}, {"tensor": 4}, "num_kv_heads 2 does not divide into 4 parts"),
        ({"d_ff": None}, {"tensor": 2}, "d_ff 341 does not divide into 2 parts .*, for example 340, or another mesh"),
        ({"d_model": 40, "num_heads": 4}, {"fsdp": 16}, r"d_model 40 does not divide into 16 parts \(fsdp=16\)"),
        ({"architecture": "gru", "d_model": 12}, {"fsdp": 8}, "d_model 12 does not divide into 8"),
        ({"architecture": "gru", "num_heads": 3}, {"tensor": 8}, None),  # has no heads
        ({"attention": "none", "num_heads": 4}, {"tensor": 8}, None),
        ({"feed_forward": "none", "d_ff": 3}, {"tensor": 8}, None),
        ({}, {"data": 2, "fsdp": 2, "tensor": 8}, None),  # 65 symbols stay whole
    ],
)
def test_models_that_do_not_divide(fields, sizes, said):
    config, place = config_of(fields), place_on(**sizes)
    if said is None:
        sharding.check_model(config.model, place)
        place.shardings(abstract_state(config))
    else:
        with pytest.raises(ConfigError, match=f"model.{said}"):
            sharding.check_model(config.model, place)


@pytest.mark.parametrize(("batch", "accumulate", "rows"), [(12, 1, 12), (8, 2, 4)])
def test_rows_that_do_not_divide(monkeypatch, batch, accumulate, rows):
    """Each accumulated piece has to."""
    monkeypatch.setattr(sharding, "mesh_placement", lambda mesh, rules, devices: place_on(rules, **mesh))
    config = config_of(train=TrainConfig(batch_size=batch, accumulate=accumulate))
    said = rf"batch_size {batch} over train.accumulate {accumulate} is {rows} rows .* 8 parts \(data=4, fsdp=2\)"
    with pytest.raises(ConfigError, match=said):
        sharding.find_placement(config, {"data": 4, "fsdp": 2})
    whole = sharding.find_placement(config, {"data": 4, "fsdp": 2}, [("batch", "data")])
    assert whole.parts("batch") == 4


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ([("haeds", "tensor")], "unknown axis name 'haeds'; did you mean 'heads'"),
        ([("heads", "tensr")], "unknown mesh axis for 'heads': 'tensr'; did you mean 'tensor'"),
        ([("heads", "tensor"), ("heads", None)], "'heads' has two rules"),
        ([("heads", ("tensor", "tensor"))], "'tensor' would split an array .* twice, by the rules for heads"),
        ([("head_dim", "tensor")], "'tensor' would split an array .* twice, by the rules for heads, head_dim"),
        ([("embed", "fsdp")], "'fsdp' would split .* twice, by the rules for batch, embed"),
        ([("layers", "fsdp")], "'fsdp' would split .* twice, by the rules for layers, width"),
    ],
)
def test_rules_that_cannot_be(rules, said):
    with pytest.raises(ConfigError, match=said):
        sharding.complete_rules(rules)


def test_rules_of_ones_own():
    names = ("layers", "width", "d_ff")
    assert place_on(fsdp=2, tensor=2).sharding(names, (2, 8, 8)).shard_shape((2, 8, 8)) == (2, 4, 4)
    own = place_on([("width", ("data", "fsdp")), ("d_ff", None)], data=2, fsdp=2, tensor=2)
    assert own.sharding(names, (2, 8, 8)).shard_shape((2, 8, 8)) == (2, 2, 8)
    with pytest.raises(ConfigError, match="layers 3 does not divide into 2 parts"):
        place_on([("layers", "data")], data=2).sharding(names, (3, 8, 8))


EVERYTHING = {
    "positions": "learned",
    "norm": "layer",
    "use_bias": True,
    "head_bias": True,
    "norm_embeddings": True,
    "head_transform": True,
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_device_holds_its_part(architecture, optimizer):
    """Of parameters, moments and average, at fsdp=8: an eighth and at most 2 % of that more."""
    optim = OptimConfig(optimizer=optimizer)
    for model in ({"d_model": 128}, {"d_model": 768, **EVERYTHING}):
        config = config_of({"architecture": architecture, "d_ff": None, **model}, optim=optim)
        state, place = abstract_state(config), place_on(fsdp=8)
        shardings = place.shardings(state)
        held = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), state, shardings)
        share = sum(jax.tree.leaves(held)) / sum(x.size for x in jax.tree.leaves(state))
        assert 1 / 8 <= share < 1.02 / 8
        # What belongs to a parameter lies as it does.
        ours = {s.spec for s in jax.tree.leaves(shardings.params)}
        assert {s.spec for s in jax.tree.leaves((shardings.opt_state, shardings.average))} <= ours | {
            place.replicated.spec
        }


def test_tensor_splits_heads_and_hidden_layers():
    place = place_on(tensor=8)
    layer = abstract_state(config_of()).params["decoder"]["layers"]
    parts = jax.tree.map(lambda x, s: x.size // math.prod(s.shard_shape(x.shape)), layer, place.shardings(layer))
    for name in ("query", "key", "value", "output"):
        assert parts["self_attention"][name]["kernel"] == 8
    assert [parts["ffn"][name]["kernel"] for name in ("up", "gate", "down")] == [8, 8, 8]


def test_a_parameter_without_names_is_no_silent_copy():
    with pytest.raises(ConfigError, match=r"decoder/new/kernel of rank 2 has no axis names; add it to nn.axes"):
        parameter_axes("decoder/new/kernel", 2)
    with pytest.raises(ConfigError, match="of rank 5"):
        parameter_axes("decoder/layers/ffn/up/kernel", 5)


def test_activations_are_named_as_the_rules_know_them():
    x = jax.numpy.ones((1, 2, 3))
    assert constrain(x, "batch", "length", "embed") is x
    for names in (("batch", "lenght", "embed"), ("batch", "batch", "embed"), ("batch", "length", "heads", "head_dim")):
        with pytest.raises(ConfigError, match="for an array of rank 3; they are one of"):
            constrain(x, *names)


def child(code, *arguments):
    """Runs code with eight CPU devices. Its last line is JSON."""
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "8", "NPROC": "16"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads(done.stdout.splitlines()[-1])


MATRIX = """
import json
from benchmarks import meshes
from transformer_jax.training.sharding import find_placement
from transformer_jax.training.step import create_state

found = {}
for case, chosen in meshes.SAMPLE.items():
    for mesh, *figures in meshes.differences(case, chosen):
        found[f"{case} {mesh}"] = max(figures)
_, state = meshes.train(case, "fsdp=8")
print(json.dumps([found, meshes.largest_share(state)]))
"""


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    """Losses and parameters after three steps, with dropout and very unequal padding."""
    from benchmarks import meshes

    for field in dataclasses.fields(meshes.Case):
        values = {getattr(case, field.name) for case in meshes.EVERY}
        assert {getattr(case, field.name) for case in meshes.SAMPLE} == values
    assert {mesh for chosen in meshes.SAMPLE.values() for mesh in chosen} == set(meshes.MESHES)
    _, (found, share) = child(MATRIX)
    assert max(found.values()) < meshes.LIMIT, found
    assert share < 0.15  # a tiny model; the trained state lies as it was born


RUN = """
import json, sys
from pathlib import Path
from transformer_jax.config import from_dict
from transformer_jax.training import loop
from transformer_jax.training.evaluate import evaluate_run
from transformer_jax.training.runs import load_run

config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
for steps, mesh in ((10, {"data": 2, "fsdp": 2, "tensor": 2}), (15, {"fsdp": 4, "tensor": -1}), (16, None)):
    config["train"]["steps"] = steps
    loop.train(from_dict(config), out, resume=True, mesh=mesh)
print()
print(json.dumps(evaluate_run(load_run(out), "tune", 7, mesh={"fsdp": 2, "tensor": 2, "data": 2})["loss"]))
"""


@pytest.mark.slow
def test_a_run_goes_on_with_any_mesh(tiny_config, tmp_path):
    """One device, three meshes, one device: the records and the final figures are those of one device throughout."""
    model = dataclasses.replace(tiny_config.model, d_ff=64)
    config = dataclasses.replace(tiny_config, model=model)
    loop.train(config, tmp_path / "straight")
    loop.train(dataclasses.replace(config, train=dataclasses.replace(config.train, steps=5)), tmp_path / "run")
    said, loss = child(RUN, json.dumps(to_dict(config)), tmp_path / "run")
    assert "device     8 x cpu (cpu), data=2, fsdp=2, tensor=2\n" in said
    assert "device     8 x cpu (cpu), fsdp=4, tensor=2\n" in said
    assert "device     4 x cpu (cpu, 4 of 8 unused), data=4\n" in said
    loop.train(config, tmp_path / "run", resume=True)
    assert 0 < loss < 5
    here, there = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "straight"))
    assert [r["step"] for r in here] == list(range(1, 21))
    np.testing.assert_allclose([r["loss"] for r in here], [r["loss"] for r in there], rtol=1e-5)
    figures = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "straight")]
    assert figures[0]["val_loss"] == pytest.approx(figures[1]["val_loss"], rel=1e-5)
