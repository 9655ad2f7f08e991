import dataclasses
import json
import typing

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from properties import EVERY_CHANGE, FIELDS, FIRST, SECTIONS, changed, configs, examples, outcome, values

from transformer_jax import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig
from transformer_jax.config import differences, from_dict, resolve, to_dict, unresolve
from transformer_jax.config_files import load_config
from transformer_jax.errors import ConfigError, TransformerJaxError
from transformer_jax.training.runs import write_json


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
        (lambda: OptimConfig(weight_decay=float("nan")), "weight_decay must be at least 0, got nan"),
        (lambda: OptimConfig(weight_decay=float("inf")), "weight_decay must be at least 0, got inf"),
        (
            lambda: OptimConfig(learning_rate=10**400),
            "learning_rate must be a number that float32 holds, at most 3.4e[+]38, got 10",
        ),
        (lambda: OptimConfig(eps=1e39), r"eps must be a number that float32 holds, at most 3.4e\+38, got 1e\+39"),
        (lambda: OptimConfig(warmup_steps=2**31), "optim.warmup_steps must be at most 2147483647, got 2147483648"),
        (lambda: OptimConfig(decay_steps=2**40), "optim.decay_steps must be at most 2147483647"),
        (lambda: TrainConfig(steps=10**10), "train.steps must be at most 2147483647, got 10000000000"),
        (lambda: DataConfig(corpus="file", path=("\udcff.txt",)), r"data.path is no Unicode text, got '\\udcff.txt'"),
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


@given(configs())
def test_json_round_trip_through_a_file(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "config.json"
    write_json(path, to_dict(config))
    assert load_config(path, resolved=True) == config
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize("field", FIELDS, ids=".".join)
def test_every_field_can_be_changed_alone(field):
    """So `configs` reaches it, also where it is a new one."""

    def changes(drawn):
        config, value = drawn
        other = outcome(changed, config, {field: value})
        return not isinstance(other, str) and other != config

    once = settings(max_examples=2_000, derandomize=True, database=None, phases=[Phase.generate])
    assert find(st.tuples(st.sampled_from(FIRST), values(FIELDS[field])), changes, settings=once)


@examples(30)
@given(configs(), EVERY_CHANGE)
def test_any_value_of_any_field_is_kept_or_refused(config, values):
    """In one line. What is kept survives JSON in UTF-8, and is the only difference."""
    assert differences(config, config) == {}
    for (section, name), value in values.items():
        other = outcome(changed, config, {(section, name): value})
        if isinstance(other, str):
            continue
        old, new = (getattr(getattr(c, section), name) for c in (config, other))
        assert new == value
        assert differences(config, other) == ({} if old == new else {f"{section}.{name}": (old, new)})
        assert (config == other) == (not differences(config, other))
        assert from_dict(json.loads(json.dumps(to_dict(other), ensure_ascii=False, allow_nan=False).encode())) == other


@given(configs(), st.integers(1, 1_000), st.integers(1, 1_000))
def test_resolving_and_taking_back(config, size, source_size):
    both = config.model.architecture == "encoder_decoder"
    plain = unresolve(config)
    assert unresolve(plain) == plain
    resolved = resolve(plain, size, source_size if both else None)
    filled = {"model.vocab_size", "optim.decay_steps", *(["model.source_vocab_size"] if both else [])}
    assert set(differences(plain, resolved)) <= filled
    assert (resolved.model.vocab_size, resolved.model.source_vocab_size) == (size, source_size if both else None)
    assert resolved.optim.decay_steps == (plain.optim.decay_steps or plain.train.steps)
    assert unresolve(resolved) == plain
    assert resolve(resolved, size, source_size if both else None) == resolved


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


def test_every_field_is_documented():
    for kind in (Config, *SECTIONS.values()):
        lines = [line.strip() for line in kind.__doc__.splitlines()]
        documented = {name.strip() for line in lines if ":" in line for name in line.split(":")[0].split(",")}
        assert {f.name for f in dataclasses.fields(kind)} <= documented
        assert set(typing.get_type_hints(kind)) == {f.name for f in dataclasses.fields(kind)}
