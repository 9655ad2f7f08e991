"""The diagram in plain text: from what goes in, at the top, to what comes out."""

import textwrap

from transformer_jax.inspection.diagram import TIMES, Block, Column, Layers, Part, Plus, Residual

_WIDEST = 62
"""Of a column: longer lines are hard to read."""
_NARROWEST = 36
"""Of a column: below this the words do not fit."""
_GUTTER = 4
"""Between two columns: the way from the encoder to the cross-attention."""
_INSET = 2
"""From the edge of a column, and of the frame round a layer, to the boxes."""
_ENTRY = "→"
"""Where a box reads the other column."""
_HARD_SPACE = "\xa0"

_ASCII = str.maketrans(
    {**dict.fromkeys("╭╮╰╯┌┐└┘├┤┼", "+"), "│": "|", "─": "-", "↓": "v", "→": ">", "←": "<", TIMES: "x", "·": ":"}
)


def render(columns: tuple[Column, ...], width: int) -> str:
    """Draws a model in lines of at most `width` characters, but no column narrower than 36.

    Example:
      >>> print(render((Column((Block("text", "ids"), Block("norm", "RMS norm"))),), 36))
                      ids
                       ↓
        ╭────────────────────────────╮
        │ RMS norm                   │
        ╰────────────────────────────╯
    """
    room = (width - _GUTTER * (len(columns) - 1)) // len(columns)
    boxes = max(_NARROWEST, min(_WIDEST, room)) - 3 * _INSET
    first, *others = [_column(column, boxes) for column in columns]
    lines = _side_by_side(first, *others) if others else first
    return "\n".join(line.rstrip() for line in lines)


def to_ascii(text: str) -> str:
    """The same drawing for an output that has no line characters."""
    return text.translate(_ASCII)


def _column(column: Column, width: int) -> list[str]:
    """The lines of a column, all of one length, with boxes of a width."""
    middle = " " * (_INSET + width // 2)
    lines: list[str] = []
    for part in _stacked(column.parts):
        if lines:
            lines.append(f"{middle}↓")
        if isinstance(part, Layers):
            lines += _frame(part, width)
        elif isinstance(part, list):
            lines += [f"{' ' * _INSET}{line}" for line in _box(part, width)]
        else:
            text = " · ".join([part.title, *part.details])
            lines.append(f"{middle[len(text) // 2 :]}{text}")
    return [line.ljust(width + 3 * _INSET) for line in lines]


def _stacked(parts: tuple[Part, ...]) -> list[list[Block | Plus] | Part]:
    """Boxes that follow each other stand in one list: they are drawn on top of each other, without arrows."""
    stacked: list = []
    for part in parts:
        alone = isinstance(part, (Layers, Residual)) or (isinstance(part, Block) and part.kind == "text")
        if alone:
            stacked.append(part)
        elif stacked and isinstance(stacked[-1], list):
            stacked[-1].append(part)
        else:
            stacked.append([part])
    return stacked


def _frame(layers: Layers, width: int) -> list[str]:
    """A layer in a frame that says how often it is there."""
    half, rest = width // 2, width - width // 2
    lines: list[str] = []
    for part in _stacked(layers.parts):
        if isinstance(part, Residual):
            inside = _box(list(part.blocks), width)
            lines.append(f"{' ' * half}├{'─' * rest}╮")
            lines += [f"{line[:-1]}│" for line in inside]
            lines.append(f"{' ' * half}+←{'─' * (rest - 1)}╯")
        else:
            if lines:
                lines.append(f"{' ' * half}↓".ljust(width + _INSET))
            lines += _box(part, width)
    title = f"─ {TIMES} {layers.times} "
    edge = width + 2 * _INSET
    return [f"┌{title:─<{edge}}┐", *(f"│ {line} │" for line in lines), f"└{'─' * edge}┘"]


def _box(parts: list[Block | Plus], width: int) -> list[str]:
    """Blocks in one box, and at its right the two characters for lines that go round it."""
    lines = [f"╭{'─' * (width - 2)}╮  "]
    for part in parts:
        if len(lines) > 1:
            lines.append(f"├{'─' * (width - 2)}┤  ")
        block = part.block if isinstance(part, Plus) else part
        texts = _text(block, "+ " if isinstance(part, Plus) else "", width - 4)
        around = ["  "] * len(texts)
        if block.carries:
            around = ["←╮", *[" │"] * (len(texts) - 2), "─╯"]
        entry = _ENTRY if block.kind == "cross_attention" else "│"
        lefts = [entry, *["│"] * (len(texts) - 1)]
        lines += [f"{a} {text:<{width - 4}} │{b}" for a, text, b in zip(lefts, texts, around, strict=True)]
    return [*lines, f"╰{'─' * (width - 2)}╯  "]


def _text(block: Block, sign: str, width: int) -> list[str]:
    """What a box says; a phrase is broken only where it does not fit a line."""

    def whole(phrase: str) -> str:
        return phrase if len(phrase) > width - 2 else phrase.replace(" ", _HARD_SPACE)

    phrases = [whole(f"{phrase},") for phrase in block.details]
    title = whole(f"{sign}{block.title} ·" if phrases else f"{sign}{block.title}")
    text = " ".join([title, *phrases]).removesuffix(",")
    lines = textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    if block.carries:  # on lines of its own, so that there is room for the line that goes back
        carried = f"hands {block.carries} to the next token"
        lines += textwrap.wrap(carried, width, initial_indent="  ", subsequent_indent="  ")
    return [line.replace(_HARD_SPACE, " ").removesuffix(" ·") for line in lines]


def _side_by_side(encoder: list[str], decoder: list[str]) -> list[str]:
    """Two columns, and a line from below the first to where the second reads it."""
    width, start, end = len(encoder[0]), len(encoder), next(i for i, s in enumerate(decoder) if s[_INSET] == _ENTRY)
    height = max(start + 1, len(decoder))
    left = [*encoder, *[" " * width] * (height - start)]
    right = [*decoder, *[" " * width] * (height - len(decoder))]
    grid = [list(f"{a}{' ' * _GUTTER}{b}") for a, b in zip(left, right, strict=True)]
    middle, turn, door = _INSET + (width - 3 * _INSET) // 2, width + 1, width + _GUTTER
    grid[start][middle : turn + 1] = f"╰{'─' * (turn - middle - 1)}{'╯' if end < start else '╮'}"
    for row in range(min(start, end) + 1, max(start, end)):
        grid[row][turn] = "│"
    grid[end][turn : door + _INSET] = f"{'╭' if end < start else '╰'}{'─' * (door - turn - 1)}┼─"
    if start == end:
        grid[end][turn] = "─"
    return ["".join(row) for row in grid]
