"""Commands that take a config, and flags for each of its fields beside options of their own."""

import dataclasses
from typing import Annotated, Any, TypeVar

import tyro

from transformer_jax.config import Config, from_dict

Kind = TypeVar("Kind")


def parse_options(kind: type[Kind], args: list[str], prog: str) -> Kind:
    """A command's own options, before it is known which config the other flags change."""
    known = [arg for arg in args if arg not in ("-h", "--help")]
    return tyro.cli(kind, args=known, return_unknown_args=True, prog=prog)[0]


def parse_config(kind: type, args: list[str], default: Config, prog: str) -> Config:
    """Applies flags such as --model.d-model 256 to a config.

    The parser fills dataclasses without checks, and the config is made of them afterwards: inside the parser each of
    our one-line errors would become a box about something else.
    """

    def mirror(value: Any) -> Any:
        """A value's own dataclass, without its checks."""
        if not dataclasses.is_dataclass(value):
            return value
        values = {f.name: mirror(getattr(value, f.name)) for f in dataclasses.fields(value)}
        fields = [
            (f.name, type(values[f.name]) if dataclasses.is_dataclass(f.type) else f.type)
            for f in dataclasses.fields(value)
        ]
        kind = dataclasses.make_dataclass(type(value).__name__, fields, namespace={"__doc__": type(value).__doc__})
        return kind(**values)

    plain = mirror(default)
    settings = Annotated[type(plain), tyro.conf.arg(name="")]
    options = dataclasses.make_dataclass(kind.__name__, [("settings", settings)], bases=(kind,), kw_only=True)
    options.__doc__ = kind.__doc__
    parsed = tyro.cli(options, args=args, default=options(settings=plain), prog=prog).settings
    return from_dict(dataclasses.asdict(parsed))
