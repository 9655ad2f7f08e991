"""The diagram as an SVG picture in the manner of the papers: from what goes in, at the bottom, to what comes out.

Coordinates are those of SVG, in pixels and with y growing downwards: a column starts at y = 0 and goes to negative y.
"""

import xml.etree.ElementTree as ET
from collections.abc import Callable

from transformer_jax.inspection.diagram import TIMES, Block, Column, Kind, Layers, Part, Plus, Residual

_INK, _PALE_INK, _PAPER, _FRAME = "#222222", "#555555", "#ffffff", "#f4f4f4"
_FILLS: dict[Kind, str] = {
    "embedding": "#fbdfe0",
    "positions": "#fdf3f3",
    "norm": "#f3f5c4",
    "dropout": "#e6e6e6",
    "attention": "#ffe0b5",
    "cross_attention": "#ffe0b5",
    "feed_forward": "#c6e6f6",
    "cell": "#ffe0b5",
    "head": "#dcdff2",
}
_HALF = 140
"""Half the width of a box."""
_ROUND = 24
"""From the boxes to the lines that go round them."""
_EDGE = 44
"""From the boxes to the frame of a layer."""
_GUTTER = 56
"""Between the frames of two columns."""
_GAP, _FORK = 24, 12
"""Between two boxes, and what is more below a sub-layer, for the line that branches off."""
_NODE = 9
"""Radius of a plus."""
_TITLE, _DETAIL, _TIMES = 14, 11, 20
"""Sizes of letters."""
_PAD, _LEADING = 9, 4
"""Inside a box: round the text, and between its lines."""
_CORNER, _MARGIN = 10, 24

Point = tuple[float, float]

_NARROW, _WIDE = frozenset("fijlrt.,;:()'|·- "), frozenset(f"mwMW{TIMES}→+%@")


def render(columns: tuple[Column, ...], name: str) -> str:
    """Draws a model as an SVG document with a background of its own; it refers to nothing outside itself.

    Args:
      columns: From `diagram`.
      name: What the picture shows, for those who cannot see it.
    """
    drawing = _Drawing()
    source = (0.0, 0.0)
    for i, column in enumerate(columns):
        # Lines round the sub-layers keep to the outside, so that the way between two columns is free.
        side = -1 if i < len(columns) - 1 else 1
        pen = _Pen(drawing, i * (2 * (_HALF + _EDGE) + _GUTTER), side, 1 if i else -1, source)
        for part in column.parts:
            pen.draw(part)
        source = (pen.x, pen.y)
    return drawing.document(name)


def text_width(text: str, size: float) -> float:
    """A width that no usual sans-serif font exceeds; the widest is DejaVu Sans."""
    ems = (0.42 if c in _NARROW else 1.0 if c in _WIDE else 0.79 if c.isupper() else 0.64 for c in text)
    return sum(ems) * size


class _Pen:
    """Draws one column, part after part, upwards.

    Args:
      drawing: Gets the shapes.
      x: Middle of the column.
      side: -1 or 1: where residual lines go round the sub-layers, left or right.
      label_side: Likewise, where the frame of a layer says how often it is there.
      source: Where the column ends that cross-attention reads.
    """

    def __init__(self, drawing: "_Drawing", x: float, side: int, label_side: int, source: Point) -> None:
        self.drawing, self.side, self.label_side, self.source = drawing, side, label_side, source
        self.x, self.y = x, 0.0

    def draw(self, part: Part) -> None:
        """Adds a part on top."""
        match part:
            case Block(kind="text"):
                self._text(part)
            case Block():
                self._box(part)
            case Plus():
                self._plus(part.block)
            case Residual():
                self._residual(part)
            case Layers():
                self._layers(part)

    def _up(self, height: float, *, arrow: bool = True) -> None:
        self.drawing.line([(self.x, self.y), (self.x, self.y - height)], arrow=arrow)
        self.y -= height

    def _text(self, block: Block) -> None:
        lines = [*((detail, _DETAIL) for detail in reversed(block.details)), (block.title, _TITLE)]
        if self.y:
            self._up(_GAP)
        for line, size in lines:
            self.y -= _LEADING
            self.drawing.text(self.x, self.y, line, size)
            self.y -= size
        self.y -= _LEADING

    def _box(self, block: Block) -> None:
        self._up(_GAP)
        height = self.drawing.box(block, self.x, self.y, 2 * _HALF)
        edge, middle = self.x + self.side * _HALF, self.y - height / 2
        if block.carries:
            out = edge + self.side * _ROUND
            reach = height / 4
            corners = [(out, middle - reach), (out, middle + reach)]
            self.drawing.line([(edge, middle - reach), *corners, (edge, middle + reach)], arrow=True)
        if block.kind == "cross_attention":
            start, above = self.source, self.source[1] - _GAP
            turn = self.x - _HALF - _EDGE - _GUTTER / 2
            corners = [(start[0], above), (turn, above), (turn, middle)]
            self.drawing.line([start, *corners, (self.x - _HALF, middle)], arrow=True)
        self.y -= height

    def _plus(self, block: Block) -> None:
        start, width = self.x + self.side * (_NODE + _GAP), _HALF + _EDGE - _NODE - _GAP
        height = self.drawing.box(block, start + self.side * width / 2, self.y - _GAP, width)
        rest = height / 2 - _NODE
        self._up(_GAP + rest)
        self._node([(start, self.y - _NODE)])
        self._up(rest, arrow=False)

    def _residual(self, residual: Residual) -> None:
        self._up(_FORK, arrow=False)
        fork, out = self.y, self.x + self.side * (_HALF + _ROUND)
        for block in residual.blocks:
            self._box(block)
        self._up(_GAP)
        self._node([(self.x, fork), (out, fork), (out, self.y - _NODE)])

    def _node(self, line: list[Point]) -> None:
        """A plus on the stream, and the line that comes to it from the side."""
        middle = self.y - _NODE
        self.drawing.line([*line, (self.x + self.side * _NODE, middle)], arrow=True)
        self.drawing.plus(self.x, middle)
        self.y -= 2 * _NODE

    def _layers(self, layers: Layers) -> None:
        self._up(_GAP / 2, arrow=False)
        bottom, frame = self.y, self.drawing.frame()
        for part in layers.parts:
            self.draw(part)
        self._up(_GAP / 2, arrow=False)
        frame(self.x - _HALF - _EDGE, self.y, 2 * (_HALF + _EDGE), bottom - self.y)
        edge = self.x + self.label_side * (_HALF + _EDGE + 10)
        anchor = "start" if self.label_side > 0 else "end"
        self.drawing.text(edge, (self.y + bottom + _TIMES) / 2, f"{TIMES} {layers.times}", _TIMES, anchor)


class _Drawing:
    """Shapes, and how far they reach."""

    def __init__(self) -> None:
        self._shapes = ET.Element("g")
        self._left = self._right = self._top = self._bottom = 0.0

    def line(self, points: list[Point], *, arrow: bool = False) -> None:
        """A line of level and upright pieces with round corners, and where it ends an arrow."""
        path = [f"M{points[0][0]:g} {points[0][1]:g}"]
        for before, corner, after in zip(points, points[1:], points[2:], strict=False):
            near, far = _towards(corner, before), _towards(corner, after)
            path.append(f"L{near} Q{corner[0]:g} {corner[1]:g} {far}")
        path.append(f"L{points[-1][0]:g} {points[-1][1]:g}")
        self._add("path", {"d": " ".join(path), "fill": "none", "stroke": _INK, "stroke-width": 1.2})
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = _sign(x - x0), _sign(y - y0)
            back, wing = (x - 8 * dx, y - 8 * dy), (4 * dy, 4 * dx)
            corners = [(x, y), (back[0] + wing[0], back[1] + wing[1]), (back[0] - wing[0], back[1] - wing[1])]
            self._add("polygon", {"points": " ".join(f"{a:g},{b:g}" for a, b in corners), "fill": _INK})
        for point in points:
            self._reach(*point)

    def box(self, block: Block, x: float, bottom: float, width: float) -> float:
        """A block with its text, round the middle x and above the bottom; returns its height."""
        room = width - 2 * _PAD
        details = [*block.details, *([f"hands {block.carries} to the next token"] if block.carries else [])]
        title = _DETAIL if block.kind == "dropout" else _TITLE
        lines = [(line, title) for line in _wrap([block.title], " ", title, room)]
        lines += [(line, _DETAIL) for line in _wrap(details, " · ", _DETAIL, room)]
        height = sum(size + _LEADING for _, size in lines) + 2 * _PAD - _LEADING
        group = self._add("g", {})
        shape = {"x": x - width / 2, "y": bottom - height, "width": width, "height": height, "rx": 6}
        self._add("rect", {**shape, "fill": _FILLS[block.kind], "stroke": _INK}, group)
        top = bottom - height + _PAD
        for line, size in lines:
            self.text(x, top + size, line, size, parent=group)
            top += size + _LEADING
        self._reach(x - width / 2, bottom - height)
        self._reach(x + width / 2, bottom)
        return height

    def text(
        self, x: float, bottom: float, text: str, size: int, anchor: str = "middle", parent: ET.Element | None = None
    ) -> None:
        """A line of text whose letters stand in the space of their size above the bottom."""
        ink = _PALE_INK if size == _DETAIL else _INK
        place = {"x": x, "y": bottom - size / 6, "font-size": size, "text-anchor": anchor, "fill": ink}
        self._add("text", place, parent).text = text
        width = text_width(text, size)
        left = x - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        self._reach(left, bottom - size)
        self._reach(left + width, bottom)

    def plus(self, x: float, y: float) -> None:
        """The sign for a sum."""
        look = {"fill": _PAPER, "stroke": _INK, "stroke-width": 1.2}
        self._add("circle", {"cx": x, "cy": y, "r": _NODE, **look})
        arm = _NODE - 4
        self._add("path", {"d": f"M{x - arm:g} {y:g}h{2 * arm} M{x:g} {y - arm:g}v{2 * arm}", **look})

    def frame(self) -> Callable[[float, float, float, float], None]:
        """Puts a frame behind what is drawn from now on; to be called with its place: left, top, width, height."""
        shape = self._add("rect", {"rx": 14, "fill": _FRAME, "stroke": "#999999"})

        def place(left: float, top: float, width: float, height: float) -> None:
            for name, value in {"x": left, "y": top, "width": width, "height": height}.items():
                shape.set(name, f"{value:g}")
            self._reach(left, top)
            self._reach(left + width, top + height)

        return place

    def document(self, name: str) -> str:
        """The whole picture."""
        left, top = self._left - _MARGIN, self._top - _MARGIN
        width, height = self._right + _MARGIN - left, self._bottom + _MARGIN - top
        look = {"role": "img", "font-family": "sans-serif", "width": f"{width:g}", "height": f"{height:g}"}
        view = f"{left:g} {top:g} {width:g} {height:g}"
        root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "viewBox": view, **look})
        ET.SubElement(root, "title").text = name
        place = {"x": left, "y": top, "width": width, "height": height}
        ET.SubElement(root, "rect", {**{k: f"{v:g}" for k, v in place.items()}, "fill": _PAPER})
        root.append(self._shapes)
        ET.indent(root)
        return ET.tostring(root, encoding="unicode") + "\n"

    def _add(self, kind: str, values: dict[str, str | float], parent: ET.Element | None = None) -> ET.Element:
        texts = {name: value if isinstance(value, str) else f"{value:g}" for name, value in values.items()}
        return ET.SubElement(self._shapes if parent is None else parent, kind, texts)

    def _reach(self, x: float, y: float) -> None:
        self._left, self._right = min(self._left, x), max(self._right, x)
        self._top, self._bottom = min(self._top, y), max(self._bottom, y)


def _towards(corner: Point, end: Point) -> str:
    """Where a round corner begins: on the way from it to the next one, at most half of it."""
    dx, dy = end[0] - corner[0], end[1] - corner[1]
    reach = min(_CORNER, (abs(dx) + abs(dy)) / 2)
    return f"{corner[0] + reach * _sign(dx):g} {corner[1] + reach * _sign(dy):g}"


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _wrap(phrases: list[str], separator: str, size: int, width: float) -> list[str]:
    """Phrases in lines; one that is longer than a line is broken between words."""
    lines: list[str] = []
    for phrase in phrases:
        longer = f"{lines[-1]}{separator}{phrase}" if lines else phrase
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        elif " " in phrase and text_width(phrase, size) > width:
            lines += _wrap(phrase.split(" "), " ", size, width)
        else:
            lines.append(phrase)
    return lines
