"""A fixed sample of damaged inputs, each kind of mistake that was found, and what loading a run must never do."""

import ast
import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from shutil import copyfile, copytree, rmtree

import faults
import jax
import pytest

from transformer_jax import Config, ModelConfig, OptimConfig, TrainConfig, cli
from transformer_jax.checks import LARGEST, nearest_divisor
from transformer_jax.config import from_dict, resolve, to_dict
from transformer_jax.config_files import load_config
from transformer_jax.data.corpora import load_files
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import ConfigError, DataError, TransformerJaxError
from transformer_jax.reading import check_file, check_folder, read_json
from transformer_jax.training.memory import check_memory
from transformer_jax.training.runs import abstract_state, load_run
from transformer_jax.training.sharding import default_placement

PACKAGE = Path(__file__).parent.parent / "transformer_jax"
SAMPLE = {"config": 200, "vocab": 200, "text": 60, "pairs": 100, "args": 60}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("kind", SAMPLE)
def test_a_sample_of_damage_is_read_right_or_refused_in_one_line(kind, folder):
    outcomes = [faults.fuzz(kind, seed, folder / kind) for seed in range(SAMPLE[kind])]
    assert [outcome for outcome in outcomes if outcome.fault] == []
    assert {outcome.answer for outcome in outcomes} == {"right", "refused"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("damages")
@pytest.mark.parametrize(("kind", "count"), [("arrays", 5), ("run", 5), ("hostile_run", 8)])
def test_a_damaged_run_gives_its_own_answer_or_none(kind, count, folder):
    outcomes = [faults.fuzz(kind, seed, folder / "run") for seed in range(count)]
    assert [outcome for outcome in outcomes if outcome.fault] == []


def test_a_case_that_breaks_the_law_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(faults, "load_files", lambda *_: "something else")
    assert "read 'something else'" in next(
        filter(None, (faults.fuzz("text", seed, tmp_path).fault for seed in range(20)))
    )
    monkeypatch.setattr(cli, "main", lambda _: 1 / 0)
    with pytest.raises(faults.Broken, match="ZeroDivisionError"):
        faults.command("sample")


# Mistakes that were found, by kind


@pytest.mark.parametrize("name", LARGEST)
def test_a_size_that_would_end_jax_is_refused(name):
    values = to_dict(Config(model=ModelConfig(architecture="encoder_decoder")))
    (section,) = (section for section in values if name in values[section])
    values[section][name] = LARGEST[name] + 1
    with pytest.raises(ConfigError, match=f"{section}.{name} must be at most {LARGEST[name]}, got "):
        from_dict(values)


@pytest.mark.parametrize("value", [10**9, 10**30])
def test_an_enormous_size_is_one_line_and_fast(value, tmp_path, capsys):
    path = tmp_path / "big.json"
    path.write_text(json.dumps({"model": {"d_model": value}}))
    for args in (["inspect"], ["plan", "--mesh", "data=1", "--config"], ["train", "--config"]):
        assert cli.main([*args, str(path)]) == 2
        assert capsys.readouterr().err == (f"error: {path}: model.d_model must be at most 1048576, got {value}\n")


@pytest.mark.parametrize(("total", "wanted", "nearest"), [(128, 3, 2), (12, 5, 4), (97, 50, 97), (49, 8, 7), (1, 9, 1)])
def test_the_nearest_divisor(total, wanted, nearest):
    assert nearest_divisor(total, wanted) == nearest


def test_a_divisor_of_an_enormous_number_is_found_at_once():
    with pytest.raises(ConfigError, match="choose a divisor, for example 2"):
        TrainConfig(batch_size=1 << 24, accumulate=3)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: OptimConfig(eps=1e-60), "eps must be a number that float32 holds, at least 1e-37, got 1e-60"),
        (lambda: ModelConfig(norm_eps=1e308), "norm_eps must be a number that float32 holds"),
        (
            lambda: OptimConfig(learning_rate=10**400),
            "learning_rate must be a number that float32 holds, at most 3.4e[+]38, got 10{199}...$",
        ),
        (lambda: ModelConfig(d_model=-(10**5000)), "d_model must be a positive number, got a int too large"),
        (lambda: from_dict({"x" * 10**6: {}}), "^unknown config section 'x{199}...; it is one of"),
        (lambda: ModelConfig(norm="x" * 10**6), "^unknown value for model.norm: 'x{199}...; it is one of"),
        (lambda: ModelConfig(context="x" * 10**6), "^model.context must be a whole number, got 'x{199}...$"),
    ],
)
def test_numbers_that_mean_nothing_and_values_too_long_to_show(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model": {"context": 8}, "model": {}}', "'model' is named twice"),
        ('{"model": {"context": 8, "context": 9}}', "'context' is named twice"),
        ("[" * 200_000, "nested too deeply"),
        ('{"model": ' + "9" * 5_000 + "}", "Exceeds the limit"),
        (" " * 2**20 + "{}", "has 1048578 bytes, and at most 1048576 are read"),
    ],
)
def test_json_that_could_be_taken_for_another(text, said, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_config(path)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), "/dev/zero"):
        with faults.limited(5):
            with pytest.raises(DataError, match=f"{path} is no regular file"):
                load_files((path,), "utf-8")
            with pytest.raises(OSError, match="is no regular file"):
                read_json(Path(path))
    for path in ("\ud800", "a\0b"):
        with pytest.raises(DataError, match="cannot be read"):
            load_files((path,), "utf-8")
    with pytest.raises(IsADirectoryError):
        check_file(tmp_path)


@pytest.mark.parametrize("encoding", ["\ud800", "é", "\0", "", "hex", "x" * 10_000, "..", "os"])
def test_an_encoding_that_python_lacks(encoding, text_file):
    with pytest.raises(DataError, match="is not a text encoding"):
        load_files((str(text_file),), encoding)


@pytest.mark.parametrize("word", ["", "a b", " a", "a\n", "\u2003"])
def test_a_word_is_what_stands_between_blanks(word):
    with pytest.raises(DataError, match="words stand between blanks"):
        Vocab(("a", word), "end")


# Security


def test_a_folder_with_a_way_out_is_refused(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "file").touch()
    check_folder(tmp_path)
    link = tmp_path / "deep" / "er" / "link"
    link.symlink_to("../file")
    with pytest.raises(OSError, match=f"{link} is a symbolic link"):
        check_folder(tmp_path)
    link.unlink()
    os.mkfifo(link)
    with pytest.raises(OSError, match=f"{link} is neither a file nor a folder"):
        check_folder(tmp_path)


_WATCHERS: list[list[str]] = []
_STARTS_OR_CALLS = ("subprocess.", "os.exec", "os.system", "os.posix_spawn", "socket.connect")
_EVENTS = ("open", "import", "os.", "subprocess.", "socket.", "shutil.", "urllib.")


def _watch(event, args):
    if event.startswith(_EVENTS):
        for events in _WATCHERS:
            events.append(f"{event} {args}"[:500])


sys.addaudithook(_watch)  # for good: Python has no way to take one off


def test_loading_runs_no_code_and_looks_nowhere_else(folder, tmp_path):
    """Names of classes, paths and addresses, wherever a run's JSON has text: none is imported, opened or asked."""
    run = copytree(faults.run_of(folder / "run")[0], tmp_path / "run")
    evil = tmp_path / "evil_module.py"
    evil.write_text("raise SystemExit('executed')")
    secret = tmp_path / "secret"
    secret.mkdir()
    for text in ("evil_module.Handler", str(secret), "../../../secret", f"file://{secret}/", "http://127.0.0.1:9/x"):
        for path in (p for p in run.rglob("*") if p.name in ("_CHECKPOINT_METADATA", "_METADATA", "_sharding")):
            original = path.read_text()
            values = json.loads(original)
            path.write_text(json.dumps(_replaced(values, text)))
            events: list[str] = []
            _WATCHERS.append(events)
            try:
                load_run(run, "last", report=str)
            except TransformerJaxError:
                pass
            finally:
                _WATCHERS.remove(events)
                path.write_text(original)
            assert [event for event in events if any(name in event for name in ("evil", "secret", "127.0.0.1"))] == []
            assert [event for event in events if event.startswith(_STARTS_OR_CALLS)] == []
    assert "evil_module" not in sys.modules
    assert list(secret.iterdir()) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("damages")
@pytest.mark.parametrize("way", ["../../../../outside/", "{}/outside/", "file://{}/outside/", "http://127.0.0.1:9/"])
def test_arrays_that_are_said_to_lie_elsewhere_are_not_read(way, folder):
    """A manifest with a right checksum that names another file, which is there and holds what was saved."""
    home = Path(tempfile.mkdtemp(prefix="o", dir="/tmp"))  # short: the new name takes no more room than the old
    try:
        run = copytree(faults.run_of(folder / "run")[0], home / "run")
        state = run / "checkpoints" / "4" / "state"
        manifest = state / "manifest.ocdbt"
        raw = manifest.read_bytes()
        old = raw[raw.index(b"d/") :][:34]
        assert raw[-4:] == _crc32c(raw[:-4])
        start = way.format(home).encode()
        name = b"x" * (len(old) - len(start))
        (home / "outside").mkdir()
        copyfile(state / old.decode(), home / "outside" / name.decode())
        body = raw[:-4].replace(old, start + name)
        manifest.write_bytes(body + _crc32c(body))
        said: list[str] = []
        assert load_run(run, "last", said.append).step == 2
        assert len(said) == 1
        assert "checkpoint 4" in said[0]
        manifest.write_bytes(raw)
        assert load_run(run, "last", said.append).step == 4
    finally:
        rmtree(home)


def _crc32c(raw):
    """The checksum of a manifest (Castagnoli), as it stands at its end."""
    rest = 2**32 - 1
    for byte in raw:
        rest ^= byte
        for _ in range(8):
            rest = rest >> 1 ^ (0x82F63B78 if rest & 1 else 0)
    return (rest ^ 2**32 - 1).to_bytes(4, "little")


def _replaced(values, text):
    """A JSON tree in which each string that is a value is another."""
    if isinstance(values, dict):
        return {key: _replaced(value, text) for key, value in values.items()}
    if isinstance(values, list):
        return [_replaced(value, text) for value in values]
    return text if isinstance(values, str) else values


MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy", "code", "yaml", "torch"}
CALLS = {"eval", "exec", "compile", "__import__", "np.load", "numpy.load", "jnp.load", "os.system", "os.popen"}
METHODS = {"import_module", "run_path", "run_module", "exec_module", "unpack_archive"}
ALLOWED = {
    "__init__.py: importlib.import_module": "the package's own modules, by names in its source",
    "config_files.py: runpy": "a config in Python is the user's own program; none is taken from a run",
    "config_files.py: runpy.run_path": "the same",
    "planning/child.py: pickle": "between two processes of this program, through a folder of its own",
}


def test_nothing_in_the_package_can_execute_what_it_reads():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [name.name for name in node.names if name.name.split(".")[0] in MODULES]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module] if node.module.split(".")[0] in MODULES else []
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                names = [called] if called in CALLS or called.split(".")[-1] in METHODS else []
                names += [f"{called}({word.arg})" for word in node.keywords if word.arg in ("shell", "allow_pickle")]
            found |= {f"{path.relative_to(PACKAGE)}: {name}" for name in names}
    assert found == set(ALLOWED)


def test_a_state_that_no_memory_holds_is_refused_before_it_is_made(tiny_config):
    placement = default_placement(8)
    state = abstract_state(resolve(tiny_config, 20))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    check_memory(state, placement)
    check_memory(state, placement, size)
    with pytest.raises(ConfigError, match="parameters and optimiser take 0.0 GiB on each device, and it has 0.0;"):
        check_memory(state, placement, size - 1)
    huge = dataclasses.replace(tiny_config, model=ModelConfig(d_model=1 << 20))
    with pytest.raises(ConfigError, match="take [0-9,.]+ GiB on each device"):
        check_memory(abstract_state(resolve(huge, 20)), placement)
