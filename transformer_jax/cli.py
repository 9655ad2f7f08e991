"""The command line: `transformer-jax COMMAND [options]`."""

import os
import sys

from transformer_jax.checks import unknown
from transformer_jax.commands import checkpoints, evaluate, inspect, plan, sample, train
from transformer_jax.errors import ConfigError, TransformerJaxError

COMMANDS = {
    "train": train,
    "sample": sample,
    "evaluate": evaluate,
    "inspect": inspect,
    "checkpoints": checkpoints,
    "plan": plan,
}
"""Modules with `Options`, whose first line says what the command does, and `run(args) -> status`."""

_USAGE_STATUS = 2


def main(args: list[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, that of an error, 128 + the signal for an interrupted run."""
    args = list(sys.argv[1:] if args is None else args)
    debug = "--debug" in args
    args = [arg for arg in args if arg != "--debug"]
    try:
        if not args or args[0] in ("-h", "--help"):
            print(_help())
            return 0 if args else _USAGE_STATUS
        if args[0] == "--version":
            from transformer_jax import __version__

            print(__version__)
            return 0
        if args[0] not in COMMANDS:
            raise ConfigError(unknown("command", args[0], COMMANDS))
        return COMMANDS[args[0]].run(args[1:])
    except TransformerJaxError as error:
        if debug:
            raise
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return error.status
    except BrokenPipeError:  # whoever read the output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if debug:
            raise
        print(f"error: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return _USAGE_STATUS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _help() -> str:
    return "\n".join(
        [
            "usage: transformer-jax COMMAND [options]",
            "",
            *(f"  {name:<13}{command.Options.__doc__.splitlines()[0]}" for name, command in COMMANDS.items()),
            "",
            "COMMAND --help lists the options of each; --debug shows where an error comes from.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
