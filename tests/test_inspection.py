import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from transformer_jax import Config, ModelConfig, preset
from transformer_jax.errors import ConfigError
from transformer_jax.inspection import svg, terminal
from transformer_jax.inspection.command import inspect
from transformer_jax.inspection.diagram import Layers, Plus, Residual, diagram
from transformer_jax.inspection.figures import changed, different_parameters, figures, idle_fields

GPT2 = preset("gpt2").model
SMALL = ModelConfig(vocab_size=65)
FULL = replace(
    SMALL,
    architecture="encoder_decoder",
    source_vocab_size=128_000,
    d_model=2**14,
    d_ff=2**16,
    num_heads=128,
    num_kv_heads=16,
    num_layers=126,
    context=2**17,
    window=4_096,
    rotary_base=5e5,
    norm_affine=False,
    norm_embeddings=True,
    head_transform=True,
    head_bias=True,
    use_bias=True,
    tie_embeddings=True,
    scale_embeddings=True,
    dropout=0.125,
    attention_dropout=0.125,
    feed_forward_dropout=0.125,
)
MODELS = {
    "decoder": SMALL,
    "gpt2": GPT2,
    "bert": replace(GPT2, architecture="encoder", norm_position="post", norm_embeddings=True, head_transform=True),
    "vaswani": replace(
        SMALL, architecture="encoder_decoder", norm_position="post", positions="sinusoidal", num_encoder_layers=2
    ),
    "full": FULL,
    "full and learned": replace(FULL, positions="learned", num_kv_heads=None),
    "bare": replace(SMALL, attention="none", norm="none", residual="none", positions="none"),
    "cross-attention alone": replace(
        SMALL, architecture="encoder_decoder", attention="none", norm="none", num_encoder_layers=1, residual="none"
    ),
    "rnn": replace(SMALL, architecture="rnn"),
    "gru": replace(SMALL, architecture="gru", use_bias=True, tie_embeddings=True),
    "lstm": replace(SMALL, architecture="lstm", dropout=0.2, scale_embeddings=True),
}
every_model = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def titles(model):
    return [[block.title for block in column.blocks()] for column in diagram(model)]


def said(model):
    """The words of a drawing, in order and without its lines."""
    text = terminal.render(diagram(model), 62)
    return " ".join(re.sub(r"[^\w\s.,()+×→]", " ", text).split())


def in_order(text, *parts):
    at = -1
    for part in parts:
        at = text.find(part, at + 1)
        assert at >= 0, f"{part!r} is missing, or comes earlier"


def test_parameters_of_gpt2():
    found = figures(GPT2)
    assert found.count == 124_439_808
    assert found.embeddings == (50_257 + 1_024) * 768
    assert found.bytes == 4 * found.count
    shapes = {p.path: p.shape for p in found.parameters}
    assert shapes["decoder/layers/ffn/up/kernel"] == (12, 768, 3_072)
    assert shapes["token_embedding/embedding"] == (50_257, 768)


def test_attention_is_said_where_there_is_some():
    assert figures(SMALL).attention.startswith("xla (")
    assert "cudnn runs on gpu" in figures(replace(SMALL, attention_impl="cudnn")).attention
    assert figures(MODELS["bare"]).attention is None
    assert figures(MODELS["gru"]).attention is None
    assert figures(MODELS["cross-attention alone"]).attention is not None


@pytest.mark.parametrize(
    ("model", "other_values"),
    [
        (MODELS["gru"], {"num_heads": 3, "window": 2, "norm": "layer", "remat": True, "positions": "learned"}),
        (MODELS["bare"], {"num_heads": 2, "qk_norm": False, "norm_affine": False, "norm_position": "post"}),
        (replace(SMALL, feed_forward="none", norm_position="post"), {"d_ff": 3, "final_norm": False}),
    ],
    ids=["gru", "bare", "no feed-forward"],
)
def test_idle_fields_change_nothing(model, other_values):
    assert set(other_values) <= idle_fields(model)
    other = replace(model, **other_values)
    assert figures(other) == figures(model)
    assert diagram(other) == diagram(model)
    assert changed(other) == changed(model)


def test_changed_fields():
    assert changed(ModelConfig()) == {}
    assert changed(replace(ModelConfig(), window=9, rotary_base=5e5, positions="alibi")) == {
        "positions": ("alibi", "rotary"),
        "window": (9, None),
    }
    assert "norm_eps" not in idle_fields(replace(SMALL, norm="none"))  # query-key norm reads it


def test_different_parameters():
    different = different_parameters(figures(SMALL), figures(replace(SMALL, d_ff=9, qk_norm=False, head_bias=True)))
    assert different["decoder/layers/ffn/up/kernel"] == ((4, 128, 341), (4, 128, 9))
    assert different["decoder/layers/key_norm/scale"] == ((4, 32), None)
    assert different["head/bias"] == (None, (65,))
    assert "decoder/layers/self_attention/key/kernel" not in different


def layer(model):
    """The parts of one layer of the last column, each as titles; a residual sub-layer as a tuple of them."""
    (layers,) = [part for part in diagram(model)[-1].parts if isinstance(part, Layers)]
    return [
        tuple(block.title for block in part.blocks) if isinstance(part, Residual) else part.title
        for part in layers.parts
    ]


def test_order_within_a_layer():
    model = replace(SMALL, dropout=0.5, feed_forward="relu")
    assert layer(model) == [
        ("RMS norm", "self-attention", "dropout 0.5"),
        ("RMS norm", "feed-forward", "dropout 0.5"),
    ]
    post = replace(model, norm_position="post", dropout=0.0, norm="layer")
    assert layer(post) == [("self-attention",), "layer norm", ("feed-forward",), "layer norm"]
    assert layer(replace(post, norm="none")) == [("self-attention",), ("feed-forward",)]
    assert layer(replace(post, residual="none", attention="none")) == ["feed-forward", "layer norm"]
    assert layer(replace(post, architecture="encoder_decoder"))[2] == ("cross-attention",)


def test_what_stands_around_the_layers():
    assert titles(SMALL)[0][-3:] == ["RMS norm", "output head", "logits"]
    assert titles(replace(SMALL, final_norm=False))[0][-3:] == ["feed-forward", "output head", "logits"]
    assert titles(replace(SMALL, norm_position="post"))[0][-3:] == ["RMS norm", "output head", "logits"]
    (bert,) = titles(MODELS["bert"])
    assert bert[:5] == ["token ids", "token embedding", "learned positions", "layer norm", "dropout 0.1"]
    assert bert[-4:] == ["head transform", "layer norm", "output head", "logits"]
    encoder, decoder = titles(MODELS["full"])
    assert encoder[0] == "source ids"
    assert encoder[-1] == "RMS norm"
    assert decoder[0] == "target ids"
    assert "cross-attention" in decoder
    assert not [part for part in diagram(SMALL)[0].parts if isinstance(part, Plus)]


@every_model
def test_sizes_in_the_diagram_are_those_of_the_parameters(model):
    found = {p.path: p.shape for p in figures(model).parameters}
    text = said(model)
    for path, shape in found.items():
        if path.endswith("ffn/up/kernel"):
            assert f" {shape[1]:,} → {shape[2]:,} → {shape[1]:,}" in text
        if path.endswith("token_embedding/embedding"):
            assert f"{shape[0]:,} × {shape[1]:,}" in text
        if path.endswith("self_attention/query/kernel"):
            assert re.search(rf"× {shape[0]} .*{shape[2]} heads × {shape[3]:,}", text)
    assert ("tied to the embedding" in text) == ("head/kernel" not in found)
    assert ("no gain" in text) == (not model.norm_affine)
    assert ("dropout" in text) == any(
        [model.dropout, not model.recurrent and model.attention_dropout, model.feed_forward_dropout]
    )


def test_terminal_shows_all_parts_in_order():
    in_order(
        said(SMALL),
        "token ids",
        "token embedding",
        "65 × 128",
        "× 4",
        "RMS norm",
        "self attention",
        "4 heads × 32, causal, rotary, query key norm",
        "+",
        "RMS norm",
        "feed forward",
        "swiglu 128 → 341 → 128",
        "+",
        "final",
        "output head",
        "128 → 65",
        "logits",
    )
    in_order(
        said(MODELS["bert"]), "+ learned positions", "layer norm", "self attention", "sees both sides", "+", "tied"
    )
    in_order(said(MODELS["lstm"]), "dropout 0.2", "LSTM cell", "4 gates", "hands h and c", "dropout 0.2", "output head")
    in_order(said(MODELS["gru"]), "token embedding", "GRU cell", "hands h to the next token", "output head")
    in_order(said(MODELS["rnn"]), "token embedding", "tanh cell", "output head")
    window = said(replace(SMALL, window=9, num_kv_heads=1, rotary_base=5e5, attention_dropout=0.1))
    for part in ("window 9", "1 key value head", "rotary with base 500,000", "dropout 0.1 on weights"):
        assert part in window


@every_model
@pytest.mark.parametrize("width", [76, 80, 100, 200])
def test_no_line_is_wider_than_asked(model, width):
    lines = terminal.render(diagram(model), width).splitlines()
    assert max(map(len, lines)) <= width
    assert not any(line != line.rstrip() for line in lines)


@every_model
def test_lines_are_closed(model):
    """Every corner goes on in the characters beside it, and above or below it."""
    lines = terminal.render(diagram(model), 80).splitlines()
    width = max(map(len, lines)) + 1
    grid = [line.ljust(width) for line in lines]
    for y, line in enumerate(grid):
        for x, corner in enumerate(line):
            if corner in "┌└╭╰":
                assert line[x + 1] in "─"
            if corner in "┐┘╮╯":
                assert line[x - 1] in "─←"
            if corner in "┌┐╭╮":
                assert grid[y + 1][x] in "│└┘├┤╰╯→"
            if corner in "└┘╯":
                assert grid[y - 1][x] in "│┌┐├┤╭╮"


def test_the_way_from_encoder_to_cross_attention():
    for name in ("vaswani", "full", "cross-attention alone"):
        lines = terminal.render(diagram(MODELS[name]), 80).splitlines()
        (entry,) = [line for line in lines if "→ cross-attention" in line]
        assert re.search(r"[╭╰]──┼─→ cross-attention", entry)


def test_ascii():
    text = terminal.to_ascii(terminal.render(diagram(MODELS["full"]), 80))
    assert text.isascii()


NAMESPACE = "{http://www.w3.org/2000/svg}"


def drawn(model, name="a model"):
    return ET.fromstring(svg.render(diagram(model), name))


def boxes(root):
    """The rectangle and the texts of each box."""
    for group in root.iter(f"{NAMESPACE}g"):
        if {child.tag for child in group} == {f"{NAMESPACE}rect", f"{NAMESPACE}text"}:
            yield group.find(f"{NAMESPACE}rect"), group.findall(f"{NAMESPACE}text")


@every_model
def test_svg_texts_stay_in_their_boxes(model):
    found = list(boxes(drawn(model)))
    assert len(found) == sum(block.kind != "text" for column in diagram(model) for block in column.blocks())
    for rect, texts in found:
        left, top, width, height = (float(rect.get(k)) for k in ("x", "y", "width", "height"))
        for text in texts:
            assert float(text.get("x")) == pytest.approx(left + width / 2)
            assert svg.text_width(text.text, float(text.get("font-size"))) <= width - 12
            assert top + float(text.get("font-size")) * 0.7 <= float(text.get("y")) <= top + height - 4


def test_text_width_is_a_bound():
    font_manager = pytest.importorskip("matplotlib.font_manager")
    from matplotlib.ft2font import FT2Font

    font = FT2Font(font_manager.findfont("DejaVu Sans"))
    font.set_size(100, 72)
    words = {text.text for model in MODELS.values() for text in drawn(model).iter(f"{NAMESPACE}text")}
    for word in words:
        font.set_text(word)
        actual = font.get_width_height()[0] / 64
        assert actual <= svg.text_width(word, 100) <= 1.3 * actual + 20


@every_model
def test_svg_is_whole_and_needs_nothing(model):
    root = drawn(model)
    left, top, width, height = map(float, root.get("viewBox").split())
    background = root.find(f"{NAMESPACE}rect")
    assert [float(background.get(k)) for k in ("x", "y", "width", "height")] == [left, top, width, height]
    assert background.get("fill") == "#ffffff"
    for rect in root.iter(f"{NAMESPACE}rect"):
        assert left <= float(rect.get("x"))
        assert float(rect.get("x")) + float(rect.get("width")) <= left + width
        assert top <= float(rect.get("y"))
        assert float(rect.get("y")) + float(rect.get("height")) <= top + height
    text = svg.render(diagram(model), "x")
    assert text.count("http") == 1
    assert "href" not in text
    words = [text.text for text in root.iter(f"{NAMESPACE}text")]
    for column in diagram(model):
        for part in column.parts:
            if isinstance(part, Layers):
                assert f"× {part.times}" in words


def test_svg_boxes_do_not_touch():
    for model in MODELS.values():
        places = [[float(rect.get(k)) for k in ("x", "y", "width", "height")] for rect, _ in boxes(drawn(model))]
        for i, (x, y, w, h) in enumerate(places):
            for a, b, c, d in places[:i]:
                assert x + w < a or a + c < x or y + h + 8 <= b or b + d + 8 <= y


def test_svg_escapes():
    name = '<a & "b">'
    assert drawn(SMALL, name).find(f"{NAMESPACE}title").text == name


CONFIGS = {
    "small": Config(model=SMALL),
    "open": Config(model=ModelConfig(architecture="gru")),
    "gpt": Config(model=GPT2),
    "gpt2": Config(model=GPT2),
    "gru": Config(model=MODELS["gru"]),
}


def shown(capsys, *args, **options):
    inspect(*args, CONFIGS.__getitem__, **options)
    return capsys.readouterr()


def test_one_model(capsys):
    out, err = shown(capsys, "gpt", None)
    assert not err
    in_order(
        out, "gpt: decoder", "self-attention · 12 heads × 64", "decoder/layers/self_attention_norm/scale", "in all"
    )
    assert re.search(r"decoder/layers/ffn/up/kernel +float32\[12,768,3072\] +28,311,552\n", out)
    assert re.search(r"parameters +124,439,808\n", out)
    assert re.search(r"FLOPs per token, training +854,438,400\n", out)
    assert "attention: xla (" in out
    assert re.search(r"positions +learned +rotary", out)
    assert "\x1b" not in out


def test_open_vocabulary(capsys):
    assert shown(capsys, "open", None) != shown(capsys, "open", None, vocab_size=66)
    _, note = shown(capsys, "open", None)
    assert note == ("vocab_size is not set in open: assuming 65, tiny Shakespeare's; --vocab-size N for another\n")
    assert not shown(capsys, "open", None, vocab_size=9).err
    assert "128 → 9" in shown(capsys, "gru", None, vocab_size=9).out
    assert "in open: assuming 50257, the other's" in shown(capsys, "open", "gpt").err
    with pytest.raises(ConfigError, match="vocab_size must be a positive number, got 0"):
        shown(capsys, "open", None, vocab_size=0)


def test_json(capsys):
    one = json.loads(shown(capsys, "gpt", None, as_json=True).out)
    assert one["name"] == "gpt"
    assert ModelConfig(**one["model"]) == GPT2
    assert one["totals"] == {"parameters": 124_439_808, "embeddings": 39_383_808, "bytes": 497_759_232}
    assert sum(p["count"] for p in one["parameters"]) == 124_439_808
    assert one["parameters"][0] == {
        "path": "decoder/layers/ffn/down/bias",
        "shape": [12, 768],
        "dtype": "float32",
        "count": 9_216,
    }
    assert one["flops"]["forward"] == one["flops"]["forward_per_token"] * 1_024 == 284_812_800 * 1_024
    two = json.loads(shown(capsys, "small", "gpt", as_json=True).out)
    assert two["models"][1] == one
    assert two["differences"]["model.d_model"] == [128, 768]
    assert two["parameter_differences"]["position_embedding/embedding"] == [None, [1_024, 768]]
    assert two["ratios"]["parameters"] == pytest.approx(124_439_808 / two["models"][0]["totals"]["parameters"])


def test_two_models(capsys):
    out, _ = shown(capsys, "small", "gpt")
    assert re.search(r"model.positions +rotary +learned", out)
    small = figures(SMALL).count
    assert re.search(rf"parameters +{small:,} +124,439,808 +{124_439_808 / small:#.4g}", out)
    assert re.search(r"position_embedding/embedding +- +\[1024,768\]", out)
    out, _ = shown(capsys, "gpt", "gpt")
    assert "the configs do not differ" in out
    assert "the parameters have the same names and shapes" in out
    out, _ = shown(capsys, "gru", "gpt")
    assert re.search(r"model.positions +- +learned", out)
    assert "attention of gru: none" in out


def test_picture(capsys, tmp_path):
    path = tmp_path / "model.svg"
    _, err = shown(capsys, "gpt", None, picture=path)
    assert err == f"wrote {path}\n"
    assert ET.parse(path).getroot().find(f"{NAMESPACE}title").text == "gpt: decoder"
    with pytest.raises(ConfigError, match="draws one model"):
        shown(capsys, "gpt", "small", picture=path)


def test_an_output_without_line_characters(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", out)
    inspect("small", None, CONFIGS.__getitem__)
    out.flush()
    text = out.buffer.getvalue().decode()
    assert "| self-attention : 4 heads x 32, causal, rotary, " in text
    assert "\\" not in text


def test_presets_say_what_they_are(capsys):
    assert shown(capsys, "gpt2", None).out.startswith("gpt2: Radford et al. 2019")
