"""Damage, drawn from seeds, to everything that the program reads; and the law that no damage may break.

For each kind of input `fuzz(kind, seed, folder)` damages one, gives it to the program in this process, and says what
was wrong with the answer: nothing, where it was right, or an error of one line.
"""

import codecs
import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import re
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformer_jax import cli
from transformer_jax.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, from_dict, to_dict
from transformer_jax.config_files import load_config
from transformer_jax.data.corpora import load_files
from transformer_jax.data.pairs import parse_tsv
from transformer_jax.data.vocab import Vocab
from transformer_jax.errors import DataError, TransformerJaxError

LIMIT = 60
"""Seconds for one command."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of one case.

    Attributes:
      kind, seed: Of the case; they make it again.
      damage: What was done to the input.
      answer: "right", "refused" or "older": right, from an older checkpoint, and said so.
      fault: How the law was broken; "" where it was not.
    """

    kind: str
    seed: int
    damage: str
    answer: str = ""
    fault: str = ""


class Broken(Exception):
    """The law was broken."""


class Late(BaseException):
    """A block took too long; no handler of errors may take it for one."""


def fuzz(kind: str, seed: int, folder: Path) -> Outcome:
    """One case of a kind of `KINDS`. A folder can serve all cases; what stays the same in them is made there once."""
    draw = random.Random(f"{kind} {seed}")
    folder.mkdir(parents=True, exist_ok=True)
    done: list[str] = []
    try:
        return Outcome(kind, seed, "", KINDS[kind](draw, folder, done), "")
    except Broken as broken:
        return Outcome(kind, seed, "; ".join(done), "", str(broken))
    except (Exception, Late):
        return Outcome(kind, seed, "; ".join(done), "", traceback.format_exc())


def command(*args: object) -> tuple[int, str, str]:
    """Status, output and errors of a command in this process, held to the law."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), limited(LIMIT):
        try:
            status = cli.main([str(arg) for arg in args])
        except SystemExit as usage:  # the parser's own
            if usage.code in (0, 2):
                return int(usage.code), out.getvalue(), "error: usage"
            raise Broken(f"the parser ended with {usage.code}") from usage
        except Late as late:
            raise Broken(f"{args} took longer than {LIMIT} s") from late
        except BaseException as error:
            raise Broken(f"{args} raised {''.join(traceback.format_exception(error))}") from error
    errors = [line for line in err.getvalue().split("\n") if line.startswith("error: ")]
    if status and (status != 2 or len(errors) != 1 or not err.getvalue().endswith(f"{errors[0]}\n")):
        raise Broken(f"{args} ended with {status} and said {err.getvalue()!r}")
    return status, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Ends a block that takes longer; one that waits in Python, not in a library."""

    def late(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def free_pipes(folder: Path) -> None:
    """Lets go of whatever waits for a pipe in a folder."""
    for path in folder.rglob("*"):
        if path.is_fifo():
            os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))


# Damage

HOSTILE = [
    None,
    True,
    0,
    -1,
    3,
    2**31,
    2**63,
    10**9,
    10**30,
    -(10**400),
    0.5,
    1e308,
    -0.0,
    1e-320,
    float("nan"),
    float("inf"),
    "",
    "a",
    "\ud800",
    "\0",
    "é",
    "e\u0301",
    "\x1b[2J",
    "../../etc/passwd",
    "/dev/zero",
    "x" * 100_000,
    [],
    {},
    ["a", "bc"],
    [[]],
    {"a": 1},
]


def damage_json(draw: random.Random, values: Any) -> str:
    """The text of a JSON tree with one to three changes; now and then one that no tree can have."""
    for _ in range(draw.randint(1, 3)):
        values = _damage_tree(draw, values)
    text = json.dumps(values, ensure_ascii=draw.random() < 0.5)
    how = draw.randrange(12)
    if how == 0:
        depth = draw.choice([50, 5_000, 200_000])
        text = text.replace(":", ":" + "[" * depth + "]" * depth + ',"a":', 1)
    elif how == 1 and '"' in text:
        text = re.sub(r'("[^"]*"): ', r"\1: 7, \1: ", text, count=1)
    elif how == 2:
        text = text.replace(":", ": " + "9" * 5_000 + ', "b":', 1)
    elif how == 3:
        text = "\ufeff" + text
    return text


def _damage_tree(draw: random.Random, values: Any) -> Any:
    """A copy of a JSON tree in which one place is another value, gone, renamed, wrapped, or twice there."""
    values = json.loads(json.dumps(values))
    holders: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict | list) and value:
            holders.append(value)
            for each in value.values() if isinstance(value, dict) else value:
                collect(each)

    collect(values)
    if not holders or draw.random() < 0.03:
        return draw.choice(HOSTILE)
    holder = draw.choice(holders)
    key = draw.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    how = draw.choice(["value", "value", "value", "near", "drop", "rename", "wrap"])
    if how == "drop":
        del holder[key]
    elif how == "rename" and isinstance(holder, dict):
        holder[draw.choice(["", "é", key + "s", key.upper()])] = holder.pop(key)
    elif how == "wrap":
        holder[key] = draw.choice([[holder[key]], {"a": holder[key]}, str(holder[key])])
    elif how == "near" and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = draw.choice([holder[key] + 1, holder[key] * 2, -holder[key], float(holder[key])])
    else:
        holder[key] = draw.choice(HOSTILE)
    return values


def damage_bytes(draw: random.Random, raw: bytes) -> bytes:
    """Bytes with one to four changes: flipped, cut, repeated, taken out, put in."""
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(raw) + 1)
        end = min(len(raw), place + draw.choice([1, 1, 2, 7, 100]))
        new = draw.choice(
            [b"\0", b"\t", b"\r", b"\r\n", b"\n", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\xc3", b"e"]
        )
        raw = draw.choice(
            [
                raw[:place],
                raw[:place] + raw[end:],
                raw[:place] + new + raw[place:],
                raw[:place] + new + raw[end:],
                raw[:end] + raw[place:],
                raw[:place] + bytes(byte ^ 1 << draw.randrange(8) for byte in raw[place:end]) + raw[end:],
            ]
        )
    return raw


# Kinds of input


def _config(draw: random.Random, folder: Path, done: list[str]) -> str:
    """A config as JSON: refused in one line, or exactly what the file says."""
    path = folder / "config.json"
    text = damage_json(draw, to_dict(Config(data=DataConfig(corpus="file", path=("a.txt",)))))
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    done.append(text[:5_000])
    with limited(LIMIT):
        try:
            config = load_config(path, resolved=True)
        except TransformerJaxError:
            config = None
    status, _, err = command("plan", "--config", path)  # refused, if only because it has no devices
    if status != 2 or ("plan needs the devices" in err) != (config is not None):
        raise Broken(f"load_config and plan do not agree: {config}, {err}")
    if config is None:
        return "refused"
    asked = json.loads(text)
    made = to_dict(config)
    for section, values in asked.items():
        for name, value in values.items():
            found = list(made[section][name]) if isinstance(made[section][name], tuple) else made[section][name]
            value = float(value) if isinstance(found, float) else value  # as to_dict says it
            if found != value or isinstance(found, bool) != isinstance(value, bool):
                raise Broken(f"{section}.{name} is {found!r} and the file says {value!r}")
    if from_dict(json.loads(json.dumps(made))) != config:
        raise Broken("the config does not survive its JSON form")
    return "right"


def _vocab(draw: random.Random, _: Path, done: list[str]) -> str:
    """A vocabulary as JSON: refused, or encode and decode are each other's inverse."""
    values = draw.choice([{"symbols": "abc \n", "special": "gap"}, {"symbols": ["AA", "B", "é"], "special": "end"}])
    text = damage_json(draw, values)
    done.append(text[:5_000])
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        return "refused"
    try:
        vocab = Vocab.from_dict(values)
    except DataError:
        return "refused"
    if vocab.to_dict() != {k: v for k, v in values.items() if v or k == "symbols"}:
        raise Broken(f"{vocab} is not what was asked for")
    ids = [draw.randrange(len(vocab.symbols)) for _ in range(30)]
    if vocab.encode(vocab.decode(ids)).tolist() != ids:
        raise Broken(f"{vocab} does not give back what it encodes")
    return "right"


def read_slowly(raw: bytes) -> str | int:
    """What a text file says, or the offset of the first byte that is not UTF-8; the other way to the same answer."""
    try:
        text = raw.removeprefix(codecs.BOM_UTF8).decode("utf-8")
    except UnicodeDecodeError as error:
        return error.start + (len(codecs.BOM_UTF8) if raw.startswith(codecs.BOM_UTF8) else 0)
    return re.sub("\r\n|\r", "\n", text)


def _text(draw: random.Random, folder: Path, done: list[str]) -> str:
    """A text file: what a slow reader reads, or an error that names file and offset."""
    path = folder / "text.txt"
    raw = damage_bytes(draw, "A king\r\nof é and ∞\n".encode() * draw.choice([1, 20, 60_000]))
    path.write_bytes(raw)
    done.append(repr(raw[:2_000]))
    return _same(path, read_slowly(raw), lambda: load_files((str(path),), "utf-8"))


def _pairs(draw: random.Random, folder: Path, done: list[str]) -> str:
    """A file of pairs: what a slow reader reads, or an error that names file and line."""
    path = folder / "pairs.tsv"
    raw = damage_bytes(draw, "one\tuno\nyes, two\tdos é\r\n\nthree\ttres\n".encode() * draw.choice([1, 20]))
    path.write_bytes(raw)
    done.append(repr(raw[:2_000]))
    expected = read_slowly(raw)
    if isinstance(expected, str):
        rows = [(number, *line.split("\t")) for number, line in enumerate(expected.split("\n"), 1) if line]
        bad = [row[0] for row in rows if len(row) != 3 or not row[1].strip() or not row[2].strip()]
        expected = f"line {bad[0]}:" if bad else rows

    def read() -> list[tuple[int, str, str]]:
        pairs = parse_tsv(str(path), load_files((str(path),), "utf-8"))
        return [(int(pair.where.rsplit(" ", 1)[1]), pair.source, pair.target) for pair in pairs]

    return _same(path, expected, read)


def _same(path: Path, expected: Any, read: Callable[[], Any]) -> str:
    """Holds a reader to what was expected: a value, or what its error has to say beside the file's name."""
    try:
        found = read()
    except DataError as error:
        wanted = f"offset {expected} " if isinstance(expected, int) else expected if expected else "is empty"
        if str(path) not in str(error) or not isinstance(wanted, str) or wanted not in str(error):
            raise Broken(f"{error!r} should say {str(wanted)[:200]!r}") from error
        return "refused"
    if found != expected:
        raise Broken(f"read {str(found)[:500]!r}, expected {str(expected)[:500]!r}")
    return "right"


def _args(draw: random.Random, folder: Path, done: list[str]) -> str:
    """Arguments: refused before anything is trained."""
    flags = ["--model.d-model", "--model.num-layers", "--optim.eps", "--train.steps", "--data.path", "--data.corpus"]
    values = ["", "-1", "nan", "1e400", "9" * 5_000, "10" * 15, "None", "\udcff", "[" * 1_000, "a b\nc", "--help", "é"]
    name = draw.choice(["train", "sample", "evaluate", "inspect", "plan", *values])
    args = [draw.choice(flags + values + ["--json", "--mesh", "--config"]) for _ in range(draw.randint(0, 5))]
    if name == "train":
        args += ["--resume", "--overwrite"]  # together they are refused
    done.append(repr([name, *args])[:2_000])
    before = set(folder.iterdir())
    status, _, _ = command(name, *args)
    if name == "train" and status == 0 and "--help" not in args:
        raise Broken("training began")
    if set(folder.iterdir()) != before:
        raise Broken("a file appeared")
    return "refused" if status else "right"


# Runs


@functools.cache
def run_of(folder: Path) -> tuple[Path, dict[int, list[str]]]:
    """A finished run with checkpoints 2 and 4, and what `sample` and `evaluate` print of each."""
    from transformer_jax.training.loop import train

    folder.mkdir(parents=True, exist_ok=True)
    text, run = folder / "run.txt", folder / "run"
    text.write_text("the king and the queen of hearts\n" * 40, encoding="utf-8")
    config = Config(
        model=ModelConfig(context=8, d_model=8, num_heads=2, num_layers=1),
        data=DataConfig(corpus="file", path=(str(text),)),
        optim=OptimConfig(warmup_steps=1, learning_rate=0.1, muon_learning_rate=0.1),
        train=TrainConfig(steps=4, batch_size=4, eval_every=2, eval_chars=64, save_every=2, sample_chars=0),
    )
    with contextlib.redirect_stdout(io.StringIO()):
        train(config, run, overwrite=True)
    said = {step: [command(*args, "--step", step)[1] for args in uses(run)] for step in (2, 4)}
    assert all(said[step] == [command(*args, "--step", step)[1] for args in uses(run)] for step in said)
    return run, said


def uses(run: Path) -> list[list[object]]:
    """Commands that load a run."""
    return [
        ["sample", run, "--prompt", "the", "--temperature", "0", "--tokens", "20"],
        ["evaluate", run, "--batch-size", "8"],
    ]


def _run(draw: random.Random, folder: Path, done: list[str]) -> str:
    """A run's folder, damaged by accident: the answers of the whole run, or an older checkpoint's and a note."""
    return _damaged_run(draw, folder, done, ["delete", "empty", "cut", "flip", "flip", "folder", "swap"])


def _arrays(draw: random.Random, folder: Path, done: list[str]) -> str:
    """The same of the files that Orbax writes for the arrays alone."""
    return _damaged_run(draw, folder, done, ["delete", "empty", "cut", "flip", "flip", "folder", "swap"], "state")


def _hostile_run(draw: random.Random, folder: Path, done: list[str]) -> str:
    """A run's folder, damaged by intent; changes of single values that still make sense are the digests' affair."""
    return _damaged_run(draw, folder, done, ["json", "json", "pipe", "link", "outside", "huge"])


def _damaged_run(draw: random.Random, folder: Path, done: list[str], ways: list[str], inside: str = "") -> str:
    original, said = run_of(folder)
    run = folder / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(original, run)
    files = sorted(path for path in run.rglob("*") if path.is_file())
    files = [path for path in files if not inside or inside in path.parts]
    newest = [path for path in files if "4" in path.parts]
    metadata = [path for path in newest if path.parts[-2:] == ("metadata", "metadata")] or newest
    for _ in range(draw.choice([1, 1, 2])):
        path = draw.choice(draw.choice([files, newest, metadata]))
        if path.is_file() and not path.is_symlink():
            how = draw.choice(ways)
            done.append(f"{how} {path.relative_to(run)}")
            damage_file(draw, path, how)
    step = draw.choice(["best", "last"])
    number = draw.randrange(2)
    try:
        status, out, err = command(*uses(run)[number], "--step", step)
    finally:
        free_pipes(run)
    if status:
        return "refused"
    if out == said[4][number]:
        return "right"
    if out == said[2][number] and "checkpoint 4" in err:
        return "older"
    raise Broken(f"wrong answer: {out!r}, {err!r}")


def damage_file(draw: random.Random, path: Path, how: str) -> None:
    """Damages one file of a run in a way that has a name."""
    raw = path.read_bytes()
    if how == "json":
        with contextlib.suppress(ValueError):
            path.write_bytes(damage_json(draw, json.loads(raw)).encode("utf-8", "surrogatepass"))
        return
    path.unlink()
    if how == "empty":
        path.touch()
    elif how == "cut":
        path.write_bytes(raw[: draw.randrange(len(raw) + 1)])
    elif how == "flip":
        path.write_bytes(damage_bytes(draw, raw))
    elif how == "folder":
        path.mkdir()
    elif how == "swap":
        others = [other for other in path.parent.iterdir() if other.is_file()]
        path.write_bytes(draw.choice(others).read_bytes() if others else b"")
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "link":
        path.symlink_to(draw.choice(["/etc/passwd", "/dev/zero", "/", "nowhere", path.name]))
    elif how == "outside":
        path.write_bytes(raw.replace(b"ocdbt.process_0", b"../../../../etc").replace(b"d/", b"/"))
    elif how == "huge":
        path.write_bytes(re.sub(rb'"(d_model|context|vocab_size)":\s*\d+', rb'"\1": 1048576', raw) or b"\0")


KINDS: dict[str, Callable[[random.Random, Path, list[str]], str]] = {
    "config": _config,
    "vocab": _vocab,
    "text": _text,
    "pairs": _pairs,
    "args": _args,
    "arrays": _arrays,
    "run": _run,
    "hostile_run": _hostile_run,
}
"""What can be damaged; each returns the answer it got, or raises."""
