"""The persistent compile cache: a second start compiles nothing."""

import hashlib
import os
import platform
from collections import Counter
from pathlib import Path

import jax

VARIABLE = "TRANSFORMER_JAX_COMPILE_CACHE"
"""Environment variable: a folder for the cache, or "off"."""

_EVENTS = {"/jax/compilation_cache/cache_hits": ["hits"], "/jax/compilation_cache/cache_misses": ["misses"]}


def enable() -> Counter | None:
    """Turns the cache on, in the user's cache folder unless `VARIABLE` says otherwise.

    Programs are kept by processor type: one compiled for another processor may not run here.

    Returns:
      Counts of hits and misses, which go on counting; None where the cache is off.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen == "off":
        return None
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    folder = base / "transformer_jax" / "xla" / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None  # a home that cannot be written costs time, not the run
    if not jax.config.jax_compilation_cache_dir:  # JAX's own variable comes first
        jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    counts: Counter = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: counts.update(_EVENTS.get(event, ())))
    return counts


def _processor() -> str:
    """A name for this kind of processor, from its model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        text = "".join(
            sorted({line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))})
        )
    except OSError:
        text = platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
