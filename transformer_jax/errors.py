"""Errors a user can act on: one line each, with the value, the limit and the way out."""


class TransformerJaxError(Exception):
    """Base of every error that this package raises on purpose.

    The command line prints its message in one line and exits with its status.
    """

    status = 2


class ConfigError(TransformerJaxError, ValueError):
    """A field, an argument or a combination of them that cannot work."""


class DataError(TransformerJaxError, ValueError):
    """A text, a corpus or a prompt that cannot be used."""


class CheckpointError(TransformerJaxError):
    """A run or a checkpoint that is missing, damaged or of another kind."""


class LostProcessError(TransformerJaxError):
    """Another of the processes that train together has ended, or cannot be reached; starting all again goes on."""

    status = 75  # EX_TEMPFAIL: what a loop of restarts can tell from an error
