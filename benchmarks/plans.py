"""What the TPU compiler says of models on slices that one does not have: does it fit, what is sent, how long it takes.

    python benchmarks/plans.py [FOLDER]

Writes docs/plans.md. It takes about an hour on two cores and needs the `tpu` extra. With a folder each answer is kept
there, and a script that was interrupted goes on.
"""

import dataclasses
import datetime
import pickle
import platform
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from transformer_jax import Config, preset
from transformer_jax.config import resolve
from transformer_jax.config_files import load_config
from transformer_jax.errors import ConfigError
from transformer_jax.planning.child import plan_elsewhere
from transformer_jax.planning.plan import Plan
from transformer_jax.planning.search import search
from transformer_jax.planning.show import HEADERS, row
from transformer_jax.presets import TINY_SHAKESPEARE
from transformer_jax.training.mesh import mesh_text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "plans.md"
SEARCHED = "v5p:4x4x4"


@dataclasses.dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
      model: A preset, or a file in configs/.
      topology: Of the slice.
      mesh: Sizes of the axes.
      rows: Of a step.
      remat: As in the model's config.
    """

    model: str
    topology: str
    mesh: dict[str, int]
    rows: int
    remat: bool


CASES = [
    *(
        Case("gpt2", "v5e:2x4", mesh, 128, True)
        for mesh in ({"data": 8}, {"fsdp": 8}, {"data": 2, "fsdp": 4}, {"fsdp": 4, "tensor": 2})
    ),
    Case("shakespeare_gpu", "v5e:2x4", {"data": 8}, 64, False),
    Case("shakespeare_gpu", "v5e:2x4", {"fsdp": 8}, 64, False),
    Case("shakespeare_gpu", "v5e:2x4", {"data": 4, "tensor": 2}, 64, False),
    Case("shakespeare_gpu", "v5e:2x4", {"tensor": 8}, 64, False),
    *(
        Case("llama_7b", "v5e:16x16", mesh, rows, True)
        for mesh, rows in (
            ({"data": 256}, 256),
            ({"fsdp": 256}, 512),
            ({"data": 16, "fsdp": 16}, 512),
            ({"fsdp": 64, "tensor": 4}, 256),
            ({"fsdp": 4, "tensor": 64}, 256),
        )
    ),
]


def config_of(case: Case) -> Config:
    """The case's config, with tiny Shakespeare's symbols where it leaves them open."""
    file = ROOT / "configs" / f"{case.model}.py"
    config = load_config(file) if file.exists() else preset(case.model)
    model = dataclasses.replace(config.model, remat=case.remat, attention_dropout=0.0, compute_dtype="bfloat16")
    train = dataclasses.replace(config.train, batch_size=case.rows, accumulate=1)
    return resolve(dataclasses.replace(config, model=model, train=train), config.model.vocab_size or TINY_SHAKESPEARE)


def answer(case: Case) -> Plan | str:
    """A plan, or what stands against it."""
    try:
        return plan_elsewhere(config_of(case), case.mesh, case.topology)
    except ConfigError as error:
        return str(error)


def kept(folder: Path | None, name: str, make: Callable[[], Any]) -> Any:
    """What was made before under a name, or is made now."""
    if folder is None:
        return make()
    file = folder / f"{name}.pickle"
    if not file.exists():
        file.write_bytes(pickle.dumps(make()))
    return pickle.loads(file.read_bytes())


def line(case: Case, found: Plan | str) -> str:
    """A line of a table."""
    if isinstance(found, str):
        cells: tuple[str, ...] = (
            mesh_text(case.mesh),
            f"{case.rows:,}",
            "yes" if case.remat else "no",
            found,
            "-",
            "-",
            "-",
        )
    else:
        cells = row(found)
    return f"| {case.model} | {case.topology} | {' | '.join(cells)} |"


def sent(plan: Plan) -> str:
    """Bytes that each device sends in a step, by kind."""
    kinds: dict[str, float] = {}
    for one in plan.compiled.collectives:
        kinds[one.kind] = kinds.get(one.kind, 0.0) + one.sent
    return ", ".join(f"{kind} {size / 1e9:.2f} GB" for kind, size in sorted(kinds.items(), key=lambda item: -item[1]))


def spread(ratios: list[float]) -> str:
    """The least and the most of some ratios."""
    return f"{min(ratios):.0%} to {max(ratios):.0%}"


def main(folder: Path | None) -> None:
    """Asks everything and writes the page."""
    answers = []
    for number, case in enumerate(CASES):
        parts = case.model, case.topology.replace(":", "-"), *case.mesh, *case.mesh.values(), case.rows
        answers.append(kept(folder, "-".join(map(str, parts)), partial(answer, case)))
        print(f"{number + 1}/{len(CASES)} {line(case, answers[-1])}", flush=True)
    seven = preset("llama_7b")
    seven = resolve(seven, seven.model.vocab_size)
    tried = kept(folder, "search", lambda: search(seven, SEARCHED, lambda found: print(found, flush=True)))
    fitting = [found for found in (*answers, *tried) if isinstance(found, Plan) and found.fits]
    best, asked = tried[0], list(zip(CASES, answers, strict=True))
    text = TEXT.format(
        date=datetime.date.today(),
        machine=platform.machine(),
        python=platform.python_version(),
        jax=metadata.version("jax"),
        libtpu=metadata.version("libtpu"),
        cases="\n".join(line(case, found) for case, found in asked),
        sent="\n".join(f"- {mesh_text(case.mesh)}: {sent(found)}" for case, found in asked if case.model == "gpt2"),
        states=spread([found.compiled.arguments / found.state for found in fitting]),
        temporaries=spread([found.compiled.temporaries / found.temporaries for found in fitting]),
        best=f"--mesh {mesh_text(best.mesh)}",
        rows=f"{best.rows:,}",
        remat="with" if best.remat else "without",
        utilisation=f"{best.utilisation:.1%}",
        tried="\n".join(f"| {' | '.join(row(found))} |" for found in tried),
        headers=" | ".join(HEADERS),
        rule="---|" * len(HEADERS),
    )
    PAGE.write_text(text, encoding="utf-8")


TEXT = """# Training on TPU slices, before paying for one

Each line is the real training step, compiled by the real TPU compiler for a slice that was not there. Memory is what
the compiler gave out. Time is an estimate: the cycles that the compiler itself counts for each piece of the program,
attention kernels at half of the chip's peak (an assumption), and what is sent between chips where nothing runs beside
it, at the published speed of the links. Utilisation is the products that the model needs, with half of the scores of
causal attention and nothing for remat, over what the chips could do in that time. Nothing here was measured on a TPU.

Written by `python benchmarks/plans.py` on {date}, {machine} CPU, Python {python}, jax {jax}, libtpu {libtpu}.

## Meshes

| model | slice | {headers} |
|---|---|{rule}
{cases}

What each chip sends in a step of GPT-2-small:

{sent}

Over all plans on this page that fit, state and batch take {states} of what the shapes of the state say, since parts of
arrays are filled up to whole tiles, and temporaries {temporaries} of gradients, activations and twice the logits.

## 6.7 billion parameters on v5p:4x4x4

`transformer-jax plan --config llama_7b --topology v5p:4x4x4 --search` tries all meshes of powers of two with tensor at
most 8, each with and without remat, at the largest batch that fits. The best:
`{best}` with {rows} rows in a step, {remat} remat: {utilisation}.

| {headers} |
|{rule}
{tried}
"""


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
