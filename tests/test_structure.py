"""Imports point one way, and the library loads little."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.config import Config
from transformer_jax.config_files import load_config

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "transformer_jax"

# From the bottom up: a module may import from its own room and from those before it.
ROOMS = [
    ["errors"],
    ["checks"],
    ["reading"],
    ["output"],
    ["fetch"],
    ["config"],
    ["presets"],
    ["nn"],
    ["flops"],
    ["inspection"],
    ["data"],
    ["generation"],
    ["compile_cache"],
    ["training.native"],
    ["training.cluster"],
    ["training.hosts"],
    ["training.mesh", "training.losses", "training.optim", "training.sharding", "training.metrics"],
    ["training.memory"],
    ["training.step"],
    ["training.digests", "training.quiet"],
    ["training.checkpoint"],
    ["training.saving", "training.diagnosis", "training.reporter"],
    ["training.runs"],
    ["training.error_rates"],
    ["training.evaluate", "training.samples"],
    ["training.resuming", "training.stopping"],
    ["training.loop"],
    ["planning"],
    ["study"],
    ["config_files"],
    ["commands"],
    ["cli"],
]
INSIDE = {
    "study": ["paired", "statistics"],
    "planning": ["chips", "hlo", "plan", "child", "search", "show"],
    "commands": ["terminal", "overrides", "train", "sample", "evaluate", "inspect", "checkpoints", "plan"],
    "inspection": ["diagram", "figures", "terminal", "svg", "command"],
    "nn": [
        "inputs",
        "positions",
        "masks",
        "axes",
        "cache",
        "kernels",
        "attention",
        "layers",
        "rnn",
        "blocks",
        "stacks",
        "transformer",
    ],
    "generation": ["settings", "draw", "decode", "sample", "beam", "gaps", "text"],
    "data": ["tiny_shakespeare", "corpora", "cmudict", "vocab", "batches", "pairs", "tasks"],
}


def room(module):
    return next(
        (i for i, names in enumerate(ROOMS) for name in names if module == name or module.startswith(f"{name}.")), None
    )


def _modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        if name not in ("", "training"):
            yield name, path


MODULES = list(_modules())


def imports(path):
    """Modules of the package that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("transformer_jax"):
            base = node.module.removeprefix("transformer_jax").lstrip(".")
            for alias in node.names:
                longer = f"{base}.{alias.name}".lstrip(".")
                known = any(name == longer for name, _ in MODULES)
                yield longer if known else base
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("transformer_jax"):
                    yield alias.name.removeprefix("transformer_jax").lstrip(".")


@pytest.mark.parametrize(("name", "path"), MODULES, ids=lambda x: x if isinstance(x, str) else "")
def test_imports_point_downwards(name, path):
    assert room(name) is not None, f"{name} stands in no room"
    for imported in imports(path):
        if imported == "":
            continue  # the version
        assert room(imported) is not None, f"{name} imports {imported}, which stands in no room"
        assert room(imported) <= room(name), f"{name} imports {imported}, which is above it"
        top = name.split(".")[0]
        if top in INSIDE and "." in name and imported.startswith(f"{top}."):
            order = INSIDE[top]
            assert order.index(imported.split(".")[1]) <= order.index(name.split(".")[1])


def test_no_file_is_two_ideas():
    for _, path in MODULES:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 420, path


def loaded_by(statement):
    code = f"import sys; {statement}; print(*sorted({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.split())


def test_the_library_loads_jax_and_flax_only():
    loaded = loaded_by("import transformer_jax.nn")
    by_flax = loaded_by("import flax.linen, flax.struct")
    assert {m for m in loaded - by_flax if not m.startswith("_")} == {"transformer_jax"}
    assert not loaded & {"orbax", "grain", "tensorflow_datasets", "tyro", "optax"} - by_flax


def test_the_package_loads_nothing_until_asked():
    assert not loaded_by("import transformer_jax") & {"jax", "flax"}
    assert "jax" not in loaded_by("import transformer_jax; transformer_jax.Config()")
    assert not loaded_by("import transformer_jax.study.statistics") & {"jax", "flax"}


def test_exports():
    import transformer_jax

    for name in transformer_jax.__all__:
        assert getattr(transformer_jax, name) is not None
    assert set(transformer_jax.__all__) <= set(dir(transformer_jax))
    with pytest.raises(AttributeError, match="no attribute 'modle'"):
        _ = transformer_jax.modle
    assert callable(transformer_jax.generate)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_configs_load(path):
    assert isinstance(load_config(path), Config)
    text = path.read_text(encoding="utf-8")
    assert f"python train.py --config configs/{path.name}" in text.split('"""')[1]


def test_defaults_are_the_cpu_recipe():
    assert load_config(ROOT / "configs" / "shakespeare_cpu.py") == Config()


def test_train_script_is_small():
    assert len((ROOT / "train.py").read_text(encoding="utf-8").splitlines()) < 60
