import json

from hypothesis import given
from hypothesis import strategies as st
from properties import CHANGES, changed, configs, examples, outcome

from transformer_jax.commands.overrides import parse_config
from transformer_jax.commands.train import Options
from transformer_jax.config import resolve, to_dict, unresolve
from transformer_jax.config_files import load_config


def flag(field, value):
    """How a field is given on the command line."""
    name = "{}.{}".format(*field).replace("_", "-")
    if isinstance(value, bool):
        section, name = name.split(".")
        return [f"--{section}.{name}" if value else f"--{section}.no-{name}"]
    if isinstance(value, tuple):
        return [f"--{name}", *value]
    return [f"--{name}={value}"]


def can_be_flags(changes):
    """The parser takes what begins with a dash for a flag, where a flag takes several values."""
    return not any(text.startswith("-") for value in changes.values() if isinstance(value, tuple) for text in value)


OVERRIDES = st.lists(CHANGES, max_size=6).map(dict).filter(can_be_flags)


@examples(60)
@given(configs(), OVERRIDES, st.randoms(use_true_random=False))
def test_flags_change_their_fields_and_nothing_else(config, changes, random):
    """Or nothing at all, with the error that the same values give without a command line; in any order."""
    before = to_dict(config)
    flags = [flag(*change) for change in changes.items()]
    random.shuffle(flags)
    args = [arg for each in flags for arg in each]
    assert outcome(parse_config, Options, args, config, "train") == outcome(changed, config, changes)
    assert to_dict(config) == before


@examples(30)
@given(configs(), configs().map(to_dict), st.sampled_from(["py", "json"]))
def test_a_file_and_flags(tmp_path_factory, config, wanted, suffix):
    """Flags that name every field make any config of any other, in a Python file or in that of a run."""
    path = tmp_path_factory.getbasetemp() / f"c.{suffix}"
    if suffix == "py":
        path.write_text(f"from transformer_jax import *\nCONFIG = {config!r}\n", encoding="utf-8")
        expected = config
    else:
        run = resolve(unresolve(config), 65, 40 if config.model.architecture == "encoder_decoder" else None)
        path.write_text(json.dumps(to_dict(run)), encoding="utf-8")
        expected = unresolve(run)
    default = load_config(path)
    assert default == expected
    changes = {(section, name): value for section, fields in wanted.items() for name, value in fields.items()}
    if can_be_flags(changes):
        args = [arg for change in changes.items() for arg in flag(*change)]
        assert to_dict(parse_config(Options, args, default, "train")) == wanted
    assert default == load_config(path)
