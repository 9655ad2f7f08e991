"""Plans on simulated devices, and what is computed by hand."""

import dataclasses
import json
import math
import sys
from collections import Counter

import jax
import pytest
from jax.sharding import AbstractMesh

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig, cli, preset
from transformer_jax.config import resolve
from transformer_jax.errors import ConfigError
from transformer_jax.planning import child, plan, search
from transformer_jax.planning.child import plan_elsewhere
from transformer_jax.planning.chips import CHIPS, chip_of, count_devices
from transformer_jax.planning.hlo import Collective, Kernel
from transformer_jax.training import sharding
from transformer_jax.training.mesh import MESH_AXES
from transformer_jax.training.step import compile_train_step

ROWS, LENGTH, WIDTH, LAYERS, VOCAB = 16, 32, 64, 3, 48


def config_of(**model):
    fields = {
        "context": LENGTH,
        "d_model": WIDTH,
        "num_heads": 4,
        "num_layers": LAYERS,
        "d_ff": 128,
        "unroll": 1,
    }
    return resolve(
        Config(
            model=ModelConfig(**(fields | model)),
            optim=OptimConfig(optimizer="adamw"),
            train=TrainConfig(batch_size=ROWS, average_decay=None),
        ),
        VOCAB,
        VOCAB if model.get("architecture") == "encoder_decoder" else None,
    )


def with_rows(config, rows):
    return dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=rows))


def shapes(config, **sizes):
    """A plan without a compiled step, on devices that are only described."""
    placement = sharding.Placement(AbstractMesh(tuple(sizes.get(axis, 1) for axis in MESH_AXES), MESH_AXES))
    return plan.make_plan(config, placement, compiles=False)


def as_users_compile(monkeypatch):
    """Not with the settings that make tests fast: they change what is sent."""
    monkeypatch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS")


# What each kind sends in one step: executions, and bytes that a device sends over a ring. CPUs have no reduce-scatter.
# Of fsdp: 7 matrices in each of 3 layers, forward and backward, then embedding and head.
SENT = {
    "data=8": {"all-reduce": (4, 906_990)},
    "fsdp=8": {"all-reduce": (6, 907_116), "all-gather": (2 * 7 * LAYERS + 2, 881_664)},
    "data=2,fsdp=2,tensor=2": {"all-reduce": (31, 1_146_076), "all-gather": (2 * 7 * LAYERS + 2, 251_904)},
    "tensor=4": {"all-reduce": (17, 4_531_884)},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SENT)
def test_what_is_sent(monkeypatch, mesh):
    """More communication than this is a fault of the rules, or of a model that says too little."""
    as_users_compile(monkeypatch)
    sizes = {name: int(size) for name, size in (part.split("=") for part in mesh.split(","))}
    found = plan_elsewhere(config_of(), sizes)
    sent, times = Counter(), Counter()
    for one in found.compiled.collectives:
        sent[one.kind] += one.sent
        times[one.kind] += one.times
    assert {kind: (times[kind], round(sent[kind])) for kind in sent} == SENT[mesh]
    assert found.compiled.unknown_loops == 0
    assert found.compiled.arguments == pytest.approx(found.state, rel=0.05), "state, and a batch of this small model"
    batch = 3 * 4 * ROWS * LENGTH // (sizes.get("data", 1) * sizes.get("fsdp", 1))
    assert found.compiled.arguments == pytest.approx(found.state + batch, rel=0.001)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "lstm"])
def test_every_family_can_be_planned(architecture):
    found = plan_elsewhere(config_of(architecture=architecture), {"data": 2, "fsdp": 2})
    assert found.devices == 4
    assert found.compiled.arguments == pytest.approx(found.state, rel=0.1)
    assert found.compiled.collectives
    assert found.seconds is None
    assert found.activations > 0


def test_shapes_without_compiling():
    whole = shapes(config_of(), data=1)
    assert whole.compiled is None
    assert whole.parameters == whole.gradients == sum(leaf.bytes for leaf in whole.leaves)
    assert whole.parameters == 4 * sum(math.prod(leaf.shape) for leaf in whole.leaves)
    assert whole.optimizer == pytest.approx(2 * whole.parameters, rel=1e-3)
    assert whole.logits == ROWS * LENGTH * VOCAB * 4
    split = shapes(config_of(), data=2, fsdp=4)
    assert split.activations * 8 == whole.activations
    assert split.logits * 8 == whole.logits
    up = next(leaf for leaf in split.leaves if leaf.path.endswith("up/kernel"))
    assert (up.shape, up.split, up.parts) == ((LAYERS, WIDTH, 128), "-, fsdp, -", 4)
    assert up.bytes == LAYERS * WIDTH * 128
    tensor = shapes(config_of(), tensor=4)
    assert whole.activations / 4 < tensor.activations < whole.activations
    assert tensor.logits * 4 == whole.logits
    remat = shapes(config_of(remat=True), data=1)
    inputs = LAYERS * ROWS * LENGTH * WIDTH * 4  # one for each layer, and a few at the end of the stack
    assert inputs < remat.activations < inputs * 3 < whole.activations


def test_large_copies_are_warned_of():
    found = shapes(config_of(positions="learned"), fsdp=2, tensor=2)
    (line,) = [line for line in found.warnings if "position_embedding" in line]
    half = LENGTH * WIDTH * 4 // 2
    assert (
        line == f"position_embedding/embedding [32, 64] is not split by tensor: 2 devices hold the same {half:,} bytes"
    )
    assert not shapes(config_of(positions="learned"), fsdp=4).warnings


def test_products_of_seven_billion_parameters():
    """6 operations for each parameter that multiplies and each token, and 12 D for each score that is needed."""
    config = with_rows(preset("llama_7b"), 1)
    model = config.model
    multiplied = 6_738_415_616 - model.vocab_size * model.d_model - (2 * model.num_layers + 1) * model.d_model
    each = 12 * model.num_layers * model.d_model
    scores = sum(position + 1 for position in range(model.context))
    assert plan.needed_flops(config) == 6 * multiplied * model.context + each * scores
    narrow = dataclasses.replace(config, model=dataclasses.replace(model, window=100))
    scores = sum(min(position + 1, 100) for position in range(model.context))
    assert plan.needed_flops(narrow) == 6 * multiplied * model.context + each * scores
    remat = dataclasses.replace(config, model=dataclasses.replace(model, remat=True))
    assert plan.needed_flops(remat) == plan.needed_flops(config)


@pytest.mark.parametrize(
    ("causal", "window", "share"),
    [(True, None, 10 / 16), (False, None, 1.0), (True, 513, 7 / 16), (True, 514, 9 / 16), (False, 512, 10 / 16)],
)
def test_squares_of_scores_that_the_kernel_computes(causal, window, share):
    """Against all pairs of positions, by squares of 512."""
    length, side = 2_048, 512

    def seen(query, key):
        back = query - key
        return (not causal or back >= 0) and (window is None or abs(back) < window)

    corners = (0, side - 1)
    squares = 0
    for row in range(0, length, side):
        for column in range(0, length, side):
            squares += row == column or any(seen(row + a, column + b) for a in corners for b in corners)
    assert plan._computed_share(length, length, causal, window) == squares / 16 == share


def test_products_of_kernels():
    config = preset("llama_7b")
    wide = (2, 32, 2_048, 128)
    forward = Kernel("splash_mha_fwd_segmented_residuals.3", ((1, 4, 4), wide, wide, wide), 32)
    assert plan.kernel_flops(config, forward) == 32 * 2 * 2 * 2 * 32 * 2_048**2 * 128 * 10 / 16
    assert plan.kernel_flops(config, Kernel("something.1", (wide, wide), 1)) is None


def test_seconds():
    compiled = plan.Compiled(
        arguments=0,
        temporaries=0,
        total=0,
        collectives=[Collective("all-reduce", 10**9, 4, 2, False), Collective("collective-permute", 10**9, 4, 1, True)],
        unknown_loops=0,
        compute_seconds=0.25,
        kernel_seconds=0.5,
        unknown_kernels=[],
    )
    # 2 x 2 x 3/4 GB over two links of 100 GB/s; what goes beside the computation takes less than that.
    assert plan.estimate_seconds(compiled, chip_of("v5p:4x4x4"), "v5p:4x4x4") == pytest.approx(0.75 + 3 / 200)


@pytest.mark.parametrize(
    ("mesh", "topology", "fields", "said"),
    [
        ({"data": -1}, None, {}, "a plan has to know the devices: give all sizes"),
        (None, None, {}, "a plan has to know the devices"),
        ({"pipeline": 2}, None, {}, "unknown mesh axis 'pipeline'"),
        (
            {"data": 3},
            None,
            {},
            "train.batch_size 16 over train.accumulate 1 is 16 rows at a time, which do not divide",
        ),
        ({"tensor": 8}, None, {}, "model.num_heads 4 does not divide into 8 parts"),
        ({"fsdp": 5}, None, {}, "which do not divide into 5 parts"),
        ({"data": 8}, "v5e", {}, "'v5e' is not KIND:SIZES; write it as in v5e:2x4"),
        ({"data": 8}, "v5f:2x4", {}, "unknown kind of TPU 'v5f'; did you mean"),
        ({"data": 8}, "v5e:2x0", {}, "is not KIND:SIZES"),
    ],
)
def test_what_cannot_be_planned(mesh, topology, fields, said):
    with pytest.raises(ConfigError, match=said) as error:
        plan_elsewhere(config_of(**fields), mesh, topology)
    assert "\n" not in str(error.value)


def test_a_compiler_that_dies(monkeypatch, tmp_path):
    dies = tmp_path / "dies"
    dies.write_text("#!/bin/sh\necho 'F0000 check failed: a matter of the compiler' >&2\nkill -9 $$\n")
    dies.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(dies))
    with pytest.raises(ConfigError, match="the compiler ended with status -9: F0000 check failed: a matter"):
        plan_elsewhere(config_of(), {"data": 2})


def test_without_the_compiler_of_tpus(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    try:
        import libtpu  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match=r"it is not installed: pip install 'transformer-jax\[tpu\]'"):
            plan_elsewhere(config_of(), {"data": 8}, "v5e:2x4")
    else:
        pytest.skip("it is here")


def test_devices_of_slices():
    assert count_devices("v5p:4x4x4") == 64
    assert count_devices("v5e:16x16") == 256
    assert count_devices("v4:2x2x2") == 16, "a v4 chip has two devices"
    for chip in CHIPS.values():
        units = chip.flops / chip.clock / 2
        assert units == pytest.approx(round(units / 16_384) * 16_384, rel=0.01), "whole matrix units of 128 x 128"


class Pretended:
    """Plans as a compiler might make them: memory grows with the rows, and more rows are better."""

    def __init__(self, memory, each):
        self.memory, self.each, self.asked = memory, each, []

    def __call__(self, config, mesh, topology, *, compiles=True):
        groups = mesh["data"] * mesh["fsdp"]
        rows = config.train.batch_size / groups
        if mesh["tensor"] > 4:
            raise ConfigError("model.num_heads 4 does not divide into 8 parts (tensor=8)")
        state = 64.0 / (mesh["fsdp"] * mesh["tensor"])
        each = self.each / 8 if config.model.remat else self.each
        made = plan.Plan(
            mesh=dict(mesh), topology=topology, rows=config.train.batch_size, leaves=[], parameters=state, average=0,
            optimizer=0, gradients=0, activations=each, logits=0, flops=1.0, warnings=[], compiled=None,
            memory=self.memory, needed=None, remat=config.model.remat, tokens=1,
        )  # fmt: skip
        if not compiles:
            return made
        self.asked.append((tuple(mesh.values()), config.model.remat, rows))
        total = state + 1.5 * each * rows  # the compiler needs more than the shapes say
        if total > self.memory:
            return dataclasses.replace(made, needed=total)
        compiled = plan.Compiled(1, 1, total, [], 0, 1.0, 1.0, [])
        return dataclasses.replace(made, compiled=compiled, seconds=1.0, utilisation=1 - 1 / (1 + rows))


def test_search_finds_the_largest_batch_that_fits(monkeypatch):
    pretended = Pretended(memory=40.0, each=2.0)
    monkeypatch.setattr(search, "plan_elsewhere", pretended)
    told = []
    found = search.search(config_of(), "v5e:2x4", told.append)
    assert sorted(map(id, filter(lambda one: not isinstance(one, str), told))) == sorted(map(id, found))
    assert any("does not divide into 8 parts" in one for one in told if isinstance(one, str))
    fitting = [one for one in found if one.fits]
    assert found[: len(fitting)] == fitting, "what does not fit is at the end"
    assert [one.utilisation for one in fitting] == sorted((one.utilisation for one in fitting), reverse=True)
    assert found[0].remat
    for one in fitting[:1]:
        groups = one.mesh["data"] * one.mesh["fsdp"]
        larger = next(rows for rows in search._ROWS if rows > one.rows / groups)
        assert 64 / (one.mesh["fsdp"] * one.mesh["tensor"]) + 1.5 * 0.25 * larger > 40
    assert not any(one.fits for one in found if one.mesh["fsdp"] * one.mesh["tensor"] == 1), "64 bytes of 40"
    assert len(pretended.asked) == len(set(pretended.asked)), "nothing is compiled twice"


def test_search_where_nothing_divides(monkeypatch):
    def refuses(*args, **kwargs):
        raise ConfigError("model.d_model 7 does not divide")

    monkeypatch.setattr(search, "plan_elsewhere", refuses)
    with pytest.raises(
        ConfigError, match="no mesh of v5e:2x4 works; the last was data=1,fsdp=1,tensor=8: model.d_model 7"
    ):
        search.search(config_of(), "v5e:2x4", print)


def test_the_command(capsys):
    small = ["--train.batch-size", "8", "--model.num-layers", "2"]
    assert cli.main(["plan", "--mesh", "data=2,fsdp=2", *small]) == 0
    shown = capsys.readouterr()
    assert "taking 65 symbols, as in tiny Shakespeare; --model.vocab-size N for others" in shown.err
    for said in ("4 simulated devices: data=2,fsdp=2,tensor=1; 8 rows", "[-, fsdp, -]", "all-gather", "of the state"):
        assert said in shown.out
    assert "estimate" not in shown.out
    assert cli.main(["plan", "--mesh", "data=1", *small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["state"] == found["parameters"] + found["average"] + found["optimizer"]
    assert found["compiled"]["collectives"] == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "plan needs the devices: --mesh data=4,fsdp=2, or --topology v5e:2x4"),
        (["--search"], "--search needs the slice"),
        (["--search", "--topology", "v5e:2x4", "--mesh", "data=8"], "--search tries all meshes, and --mesh data=8"),
        (["--mesh", "data=2", "--model.d-model", "7"], "does not divide model.d_model 7"),
        (["--mesh", "data=2", "--config", "gpt3"], "no config file at gpt3"),
    ],
)
def test_commands_that_cannot_be(capsys, args, said):
    assert cli.main(["plan", *args]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.strip().splitlines()) == 1


def test_the_parent_of_plans_loads_no_jax():
    """It starts another process, which has to be the first to touch devices."""
    import subprocess

    code = "import sys, transformer_jax.planning.child; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("architecture", ["decoder", "encoder_decoder"])
def test_the_step_can_be_lowered_for_gpus(architecture):
    """With the plain attention: the fused one asks for a GPU that is there."""
    pairs = architecture == "encoder_decoder"
    model = ModelConfig(architecture=architecture, attention_impl="xla", compute_dtype="bfloat16", num_layers=2)
    config = resolve(Config(model=model), 65, 40 if pairs else None)
    placement = sharding.placement(jax.devices()[:1], (1, 1, 1))
    with placement.use():
        state, batch = plan.abstract_inputs(config, placement)
        traced = compile_train_step(config, state, placement).trace(state, batch)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "bf16" in text
    assert "custom_call @tpu" not in text
