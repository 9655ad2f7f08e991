"""The Transformer as pure functions in JAX/Flax, and a trainer for character-level language models around it.

Names are imported when they are first used, so that `import transformer_jax.nn` loads jax and flax alone.
"""

import importlib

__version__ = "0.1.0"

_EXPORTS = {
    "Config": "config",
    "DataConfig": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "TrainConfig": "config",
    "create_model": "nn",
    "fill_gaps": "generation",
    "generate": "generation",
    "load_run": "training.runs",
    "preset": "presets",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str) -> object:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
