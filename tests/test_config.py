import dataclasses
import json
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.config import differences, from_dict, resolve, to_dict, unresolve
from transformer_jax.errors import ConfigError, TransformerJaxError

SECTIONS = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ModelConfig(num_heads=3), "num_heads 3 does not divide model.d_model 128"),
        (lambda: ModelConfig(num_kv_heads=3), "num_kv_heads 3 does not divide model.num_heads 4"),
        (lambda: ModelConfig(d_model=20, num_heads=4), "even head_dim"),
        (lambda: ModelConfig(d_model=0), "d_model must be a positive number, got 0"),
        (lambda: ModelConfig(context=-1), "context must be a positive number, got -1"),
        (lambda: ModelConfig(num_layers=2.0), "num_layers must be a whole number, got 2.0"),
        (lambda: ModelConfig(num_layers="2"), "num_layers must be a whole number, got '2'"),
        (lambda: ModelConfig(dropout=1.5), "dropout must be at least 0 and below 1, got 1.5"),
        (lambda: ModelConfig(dropout=float("nan")), "dropout .* got nan"),
        (lambda: ModelConfig(use_bias=1), "use_bias must be True or False, got 1"),
        (lambda: ModelConfig(norm="lyer"), "'lyer'; did you mean 'layer'"),
        (lambda: ModelConfig(norm="zzz"), "it is one of layer, rms, none"),
        (lambda: ModelConfig(attention="none", feed_forward="none"), "layers would be empty"),
        (lambda: ModelConfig(window=0), "window must be a positive number"),
        (lambda: DataConfig(corpus="file"), "needs at least one file"),
        (lambda: DataConfig(path=("a",)), "add --data.corpus file"),
        (lambda: DataConfig(corpus="file", path="a.txt"), "must be a tuple of strings"),
        (lambda: OptimConfig(learning_rate="1e-4"), "learning_rate must be a number, got '1e-4'"),
        (lambda: OptimConfig(learning_rate=float("inf")), "learning_rate must be a positive number"),
        (lambda: OptimConfig(b2=1.0), "b2 must be at least 0 and below 1"),
        (lambda: OptimConfig(schedule="noam", warmup_steps=0), "noam.* at least 1, got 0"),
        (lambda: OptimConfig(final_fraction=2.0), "final_fraction must be between 0 and 1"),
        (lambda: TrainConfig(steps=0), "steps must be a positive number, got 0"),
        (lambda: TrainConfig(steps=True), "steps must be a whole number, got True"),
        (lambda: TrainConfig(batch_size=12, accumulate=5), "accumulate 5 does not divide train.batch_size 12"),
        (lambda: TrainConfig(seed=-1), "seed must be between 0"),
        (lambda: Config(model=OptimConfig()), "model must be a ModelConfig"),
    ],
)
def test_what_cannot_work(make, said):
    with pytest.raises(ConfigError, match=said) as caught:
        make()
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_whole_numbers_are_fine_where_numbers_are_asked_for():
    assert ModelConfig(dropout=0).dropout == 0.0
    assert type(OptimConfig(clip_norm=1).clip_norm) is float


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "must be a JSON object, got list"),
        ({"modle": {}}, "'modle'; did you mean 'model'"),
        ({"model": {"n_layers": 2}}, "'n_layers'; did you mean 'num_layers'"),
        ({"model": 3}, "section 'model' must be a JSON object, got int"),
        ({"model": {"d_model": "128"}}, "d_model must be a whole number"),
        ({"model": {"d_model": [128]}}, "d_model must be a whole number"),
        ({"data": {"path": [1]}}, "path must be a tuple of strings"),
        ({"optim": {"learning_rate": None}}, "learning_rate must be a number, got None"),
    ],
)
def test_json_is_strict(values, said):
    with pytest.raises(ConfigError, match=said):
        from_dict(values)


MADE = st.builds(
    Config,
    model=st.builds(
        ModelConfig,
        vocab_size=st.none() | st.integers(1, 10**6),
        d_model=st.sampled_from([16, 64]),
        num_heads=st.sampled_from([1, 2, 4]),
        positions=st.sampled_from(["rotary", "learned", "none"]),
        dropout=st.floats(0, 0.99),
    ),
    data=st.builds(DataConfig, corpus=st.just("file"), path=st.lists(st.text(), min_size=1).map(tuple)),
    train=st.builds(TrainConfig, steps=st.integers(200, 10**6), seed=st.integers(0, 2**32 - 1)),
)


@given(MADE)
def test_json_round_trip(config):
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda c: st.lists(c) | st.dictionaries(st.text(), c),
)
names = st.sampled_from([f.name for kind in SECTIONS.values() for f in dataclasses.fields(kind)])


@given(st.dictionaries(st.sampled_from(list(SECTIONS)), st.dictionaries(names, json_values)) | json_values)
def test_hostile_json_gives_a_config_or_an_error(values):
    try:
        config = from_dict(values)
    except TransformerJaxError:
        return
    assert isinstance(config, Config)


def test_the_config_of_a_run_can_begin_another():
    config = Config(train=TrainConfig(steps=500))
    assert unresolve(resolve(config, 65)) == config
    fixed = dataclasses.replace(config, optim=OptimConfig(decay_steps=900))
    assert unresolve(resolve(fixed, 65)) == fixed


def test_differences():
    changed = dataclasses.replace(Config(), model=ModelConfig(d_model=64), train=TrainConfig(seed=3))
    assert differences(Config(), changed) == {"model.d_model": (128, 64), "train.seed": (0, 3)}


def test_every_field_is_documented():
    for kind in (Config, *SECTIONS.values()):
        lines = [line.strip() for line in kind.__doc__.splitlines()]
        documented = {name.strip() for line in lines if ":" in line for name in line.split(":")[0].split(",")}
        assert {f.name for f in dataclasses.fields(kind)} <= documented
        assert set(typing.get_type_hints(kind)) == {f.name for f in dataclasses.fields(kind)}
