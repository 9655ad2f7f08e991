"""Equality with PyTorch in float32: outputs, and gradients with respect to all inputs and all parameters.

The parameters are carried over inside the function that is differentiated, so its gradients have PyTorch's names and
shapes. One that was forgotten, or put in the wrong place, has the wrong gradient.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.nn import (
    Decoder,
    DecoderLayer,
    Encoder,
    EncoderLayer,
    IndexMask,
    LayerNorm,
    MultiHeadAttention,
    RecurrentLayer,
    RecurrentLM,
    RMSNorm,
    combine_masks,
    dot_product_attention,
    padding_mask,
)
from transformer_jax.nn.rnn import CELLS, RecurrentState

torch = pytest.importorskip("torch")

B, T, S = 3, 7, 5
WIDTH, HEADS, HIDDEN = 32, 4, 64
VALID = np.array([[1, 1, 1, 1, 1, 1, 1], [1, 0, 1, 1, 0, 0, 0], [1, 1, 1, 0, 0, 0, 1]], bool)
RIGHT_PADDED = np.arange(T)[None] < np.array([7, 4, 1])[:, None]
SOURCE_VALID = np.arange(S)[None] < np.array([2, 5, 3])[:, None]
CAUSAL = np.tril(np.ones((T, T), bool))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def perturbed(module):
    """Makes biases and gains count, and the layers of a stack differ."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def normal(*shape):
    return torch.randn(shape).numpy()


def hidden_from(mask):
    """PyTorch's masks: True = may not attend."""
    return None if mask is None else torch.from_numpy(~mask)


def assert_same(module, theirs, ours, *inputs, keep=None):
    """theirs(*tensors) and ours(parameters, *arrays), both tuples, agree, and so do gradients of all their values.

    With keep, bool [B, T], the first value counts at these places only.
    """
    parameters = {} if module is None else dict(module.named_parameters())
    tensors = [torch.tensor(x, requires_grad=True) for x in inputs]
    expected = theirs(*tensors)
    weights = [normal(*value.shape) for value in expected]
    if keep is not None:
        weights[0] = weights[0] * keep[..., None]
    total = sum((value * torch.from_numpy(weight)).sum() for value, weight in zip(expected, weights, strict=True))
    gradients = torch.autograd.grad(total, [*parameters.values(), *tensors])

    def loss(parameters, inputs):
        values = ours(parameters, *inputs)
        return sum(jnp.sum(value * weight) for value, weight in zip(values, weights, strict=True)), values

    arrays = {name: jnp.asarray(parameter.detach().numpy()) for name, parameter in parameters.items()}
    run = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, values), (by_parameter, by_input) = run(arrays, [jnp.asarray(x) for x in inputs])
    for i, (value, weight) in enumerate(zip(values, weights, strict=True)):
        counts = weight != 0
        assert_close(f"value {i}", np.asarray(value)[counts], expected[i].detach().numpy()[counts], 1e-5)
    names = [*parameters, *(f"input {i}" for i in range(len(inputs)))]
    ours_by_name = [*(by_parameter[name] for name in parameters), *by_input]
    for name, gradient, theirs_gradient in zip(names, ours_by_name, gradients, strict=True):
        scale = float(theirs_gradient.abs().max())
        assert_close(f"gradient of {name}", gradient, theirs_gradient.numpy(), 3e-5 * scale)


def assert_close(name, value, expected, tolerance):
    np.testing.assert_allclose(value, expected, rtol=0, atol=tolerance, equal_nan=False, err_msg=name)


def part(state, prefix):
    return {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}


def linear(state):
    return {"kernel" if name == "weight" else name: value.T for name, value in state.items()}


def norm(state):
    return {"scale" if name == "weight" else name: value for name, value in state.items()}


def attention(state):
    packed = "in_proj_weight" in state
    weights = jnp.split(state["in_proj_weight"], 3) if packed else [state[f"{name}_proj_weight"] for name in "qkv"]
    output = linear(part(state, "out_proj."))
    output["kernel"] = output["kernel"].reshape(HEADS, -1, WIDTH)
    params = {"output": output}
    for i, name in enumerate(("query", "key", "value")):
        params[name] = {"kernel": weights[i].T.reshape(-1, HEADS, WIDTH // HEADS)}
        if "in_proj_bias" in state:
            params[name]["bias"] = jnp.split(state["in_proj_bias"], 3)[i].reshape(HEADS, -1)
    return params


def stacked(trees):
    return jax.tree.map(lambda *each: jnp.stack(each), *trees)


def layer(state):
    attentions = {"self_attention": part(state, "self_attn."), "cross_attention": part(state, "multihead_attn.")}
    params = {name: attention(found) for name, found in attentions.items() if found}
    norms = [f"{name}_norm" for name in (*params, "ffn")]
    params |= {name: norm(part(state, f"norm{i}.")) for i, name in enumerate(norms, start=1)}
    params["ffn"] = {"up": linear(part(state, "linear1.")), "down": linear(part(state, "linear2."))}
    return params


def stack(state):
    depth = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    params = {"layers": jax.vmap(layer)(stacked([part(state, f"layers.{i}.") for i in range(depth)]))}
    if "norm.weight" in state:
        params["output_norm"] = norm(part(state, "norm."))
    return params


def recurrent(kind, state, index):
    """Two biases that PyTorch adds are one here, but for the one inside a GRU's reset gate."""
    gates = CELLS[kind]
    kernels = {name: state[f"weight_{name}_l{index}"].T.reshape(WIDTH, gates, WIDTH) for name in ("ih", "hh")}
    params = {"input": {"kernel": kernels["ih"]}, "recurrent_kernel": kernels["hh"]}
    if f"bias_ih_l{index}" in state:
        read, again = (state[f"bias_{name}_l{index}"].reshape(gates, WIDTH) for name in ("ih", "hh"))
        if kind == "gru":
            params["recurrent_bias"] = again[2]
            again = again.at[2].set(0)
        params["input"]["bias"] = read + again
    return params


@pytest.mark.parametrize("eps", [1e-5, 1e-6])
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_layer_norm(affine, bias, eps):
    theirs = perturbed(torch.nn.LayerNorm(WIDTH, eps, elementwise_affine=affine, bias=bias))
    ours = LayerNorm(eps, use_scale=affine, use_bias=bias)
    x = 0.01 * (1 + normal(B, T, WIDTH))  # small enough for eps to count
    assert_same(theirs, lambda x: (theirs(x),), lambda p, x: (ours.apply({"params": norm(p)}, x),), x)


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm(affine):
    theirs = perturbed(torch.nn.RMSNorm(WIDTH, 1e-6, elementwise_affine=affine))
    ours = RMSNorm(1e-6, use_scale=affine)
    x = 0.01 * (1 + normal(B, T, WIDTH))  # small enough for eps to count
    assert_same(theirs, lambda x: (theirs(x),), lambda p, x: (ours.apply({"params": norm(p)}, x),), x)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("extra", ["nothing", "mask", "bias"])
def test_dot_product_attention(extra, kv_heads):
    query, (key, value) = normal(B, T, HEADS, 8), normal(2, B, S, kv_heads, 8)
    bias = normal(B, HEADS, T, S)
    mask = bias < 1
    mask[..., 0] = True

    def theirs(query, key, value, bias=None):
        given = torch.from_numpy(mask) if extra == "mask" else bias
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, given, enable_gqa=True)
        return (out.transpose(1, 2),)

    def ours(_, query, key, value, bias=None):
        return (dot_product_attention(query, key, value, mask if extra == "mask" else None, bias),)

    assert_same(None, theirs, ours, query, key, value, *([bias] if extra == "bias" else []))


@pytest.mark.parametrize("masks", ["", "padding", "bool", "padding, bool for each head"])
@pytest.mark.parametrize("source", ["self", "memory", "wider memory without bias"])
def test_attention_and_weights(source, masks):
    wider = WIDTH + 8 if "wider" in source else None
    theirs = torch.nn.MultiheadAttention(
        WIDTH, HEADS, bias="without bias" not in source, kdim=wider, vdim=wider, batch_first=True
    )
    ours = MultiHeadAttention(HEADS, use_bias="without bias" not in source)
    inputs = [normal(B, T, WIDTH)] if source == "self" else [normal(B, T, WIDTH), normal(B, S, wider or WIDTH)]
    valid = VALID if source == "self" else SOURCE_VALID
    allowed = normal(B, HEADS, T, valid.shape[1]) < 0.5
    allowed[..., 0] = True
    allowed = allowed if "each head" in masks else allowed[:1, :1]
    their_mask = allowed.reshape(-1, *allowed.shape[2:]) if "each head" in masks else allowed[0, 0]
    mask = combine_masks(padding_mask(valid) if "padding" in masks else None, allowed if "bool" in masks else None)

    def their_call(x, memory=None):
        memory = x if memory is None else memory
        return theirs(
            x,
            memory,
            memory,
            key_padding_mask=hidden_from(valid) if "padding" in masks else None,
            attn_mask=hidden_from(their_mask) if "bool" in masks else None,
            average_attn_weights=False,
        )

    def our_call(state, *inputs):
        return ours.apply({"params": attention(state)}, *inputs, mask=mask, return_weights=True)

    assert_same(perturbed(theirs), their_call, our_call, *inputs)


def test_average_of_attention_weights():
    theirs = perturbed(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    ours = MultiHeadAttention(HEADS)

    def their_call(x):
        return theirs(x, x, x, key_padding_mask=hidden_from(VALID))

    def our_call(state, x):
        out, weights = ours.apply({"params": attention(state)}, x, mask=IndexMask(VALID), return_weights=True)
        return out, weights.mean(axis=1)

    assert_same(theirs, their_call, our_call, normal(B, T, WIDTH))


def test_attention_without_weights():
    theirs = perturbed(torch.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True))
    ours = MultiHeadAttention(HEADS)

    def their_call(x):
        return theirs(x, x, x, key_padding_mask=hidden_from(VALID), need_weights=False)[:1]

    def our_call(state, x):
        return (ours.apply({"params": attention(state)}, x, mask=IndexMask(VALID)),)

    assert_same(theirs, their_call, our_call, normal(B, T, WIDTH))


def their_settings(norm_position, activation, bias=True):
    return {
        "d_model": WIDTH,
        "nhead": HEADS,
        "dim_feedforward": HIDDEN,
        "dropout": 0.0,
        "activation": activation,
        "batch_first": True,
        "norm_first": norm_position == "pre",
        "bias": bias,
    }


def our_settings(norm_position, activation, bias=True):
    return {
        "d_model": WIDTH,
        "num_heads": HEADS,
        "d_ff": HIDDEN,
        "feed_forward": activation,
        "norm_position": norm_position,
        "use_bias": bias,
    }


orders = pytest.mark.parametrize("norm_position", ["pre", "post"])
activations = pytest.mark.parametrize("activation", ["relu", "gelu"])
paddings = pytest.mark.parametrize(
    ("valid", "source_valid"), [(None, None), (VALID, SOURCE_VALID)], ids=["whole", "padded"]
)


@orders
@activations
@pytest.mark.parametrize("kind", [EncoderLayer, DecoderLayer])
def test_layer_without_source(kind, activation, norm_position):
    """A decoder layer without a source is PyTorch's encoder layer under a causal mask."""
    causal = kind is DecoderLayer
    theirs = perturbed(torch.nn.TransformerEncoderLayer(**their_settings(norm_position, activation)))
    ours = kind(**our_settings(norm_position, activation))

    def their_call(x):
        return (theirs(x, src_mask=hidden_from(CAUSAL if causal else None), src_key_padding_mask=hidden_from(VALID)),)

    def our_call(state, x):
        return (ours.apply({"params": layer(state)}, x, mask=IndexMask(VALID, causal)),)

    assert_same(theirs, their_call, our_call, normal(B, T, WIDTH), keep=VALID)


@orders
def test_layer_without_biases(norm_position):
    theirs = perturbed(torch.nn.TransformerEncoderLayer(**their_settings(norm_position, "relu", bias=False)))
    ours = EncoderLayer(**our_settings(norm_position, "relu", bias=False))
    x = normal(B, T, WIDTH)
    assert_same(theirs, lambda x: (theirs(x),), lambda p, x: (ours.apply({"params": layer(p)}, x),), x)


def masks_of_target(valid, source_valid):
    return {
        "tgt_mask": hidden_from(CAUSAL),
        "tgt_key_padding_mask": hidden_from(valid),
        "memory_key_padding_mask": hidden_from(source_valid),
    }


@orders
@activations
def test_layer_with_source(activation, norm_position):
    theirs = perturbed(torch.nn.TransformerDecoderLayer(**their_settings(norm_position, activation)))
    ours = DecoderLayer(cross_attention=True, **our_settings(norm_position, activation))

    def their_call(x, memory):
        return (theirs(x, memory, **masks_of_target(VALID, SOURCE_VALID)),)

    def our_call(state, x, memory):
        mask, memory_mask = IndexMask(VALID, causal=True), IndexMask(SOURCE_VALID)
        return (ours.apply({"params": layer(state)}, x, memory, mask=mask, memory_mask=memory_mask),)

    assert_same(theirs, their_call, our_call, normal(B, T, WIDTH), normal(B, S, WIDTH), keep=VALID)


def final_norm(norm_position):
    return torch.nn.LayerNorm(WIDTH) if norm_position == "pre" else None


@orders
@pytest.mark.parametrize(("kind", "valid"), [(Encoder, None), (Encoder, VALID), (Decoder, VALID)])
def test_stack_without_source(kind, valid, norm_position):
    """A decoder without a source is PyTorch's encoder under a causal mask."""
    one = torch.nn.TransformerEncoderLayer(**their_settings(norm_position, "gelu"))
    theirs = perturbed(torch.nn.TransformerEncoder(one, 3, final_norm(norm_position), enable_nested_tensor=False))
    ours = kind(num_layers=3, **our_settings(norm_position, "gelu"))
    mask = hidden_from(CAUSAL) if kind is Decoder else None

    def their_call(x):
        return (theirs(x, mask=mask, src_key_padding_mask=hidden_from(valid)),)

    def our_call(state, x):
        return (ours.apply({"params": stack(state)}, x, valid=valid),)

    assert_same(theirs, their_call, our_call, normal(B, T, WIDTH), keep=valid)


@orders
@paddings
def test_stack_with_source(valid, source_valid, norm_position):
    one = torch.nn.TransformerDecoderLayer(**their_settings(norm_position, "gelu"))
    theirs = perturbed(torch.nn.TransformerDecoder(one, 3, final_norm(norm_position)))
    ours = Decoder(num_layers=3, cross_attention=True, **our_settings(norm_position, "gelu"))

    def their_call(x, memory):
        return (theirs(x, memory, **masks_of_target(valid, source_valid)),)

    def our_call(state, x, memory):
        return (ours.apply({"params": stack(state)}, x, memory, valid=valid, memory_valid=source_valid),)

    assert_same(theirs, their_call, our_call, normal(B, T, WIDTH), normal(B, S, WIDTH), keep=valid)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@orders
@paddings
def test_whole_transformer(valid, source_valid, norm_position):
    theirs = perturbed(
        torch.nn.Transformer(num_encoder_layers=6, num_decoder_layers=6, **their_settings(norm_position, "relu"))
    )
    encoder = Encoder(num_layers=6, **our_settings(norm_position, "relu"))
    decoder = Decoder(num_layers=6, cross_attention=True, **our_settings(norm_position, "relu"))

    def their_call(source, target):
        masks = masks_of_target(valid, source_valid)
        return (theirs(source, target, src_key_padding_mask=hidden_from(source_valid), **masks),)

    def finish(params, x):
        """PyTorch norms the outputs of post-norm stacks, which are normed, once more; our stacks do not."""
        return LayerNorm().apply({"params": params["output_norm"]}, x) if norm_position == "post" else x

    def our_call(state, source, target):
        encoding, decoding = stack(part(state, "encoder.")), stack(part(state, "decoder."))
        memory = finish(encoding, encoder.apply({"params": encoding}, source, valid=source_valid))
        out = decoder.apply({"params": decoding}, target, memory, valid=valid, memory_valid=source_valid)
        return (finish(decoding, out),)

    assert_same(theirs, their_call, our_call, normal(B, S, WIDTH), normal(B, T, WIDTH), keep=valid)


RECURRENT = {"rnn": torch.nn.RNN, "gru": torch.nn.GRU, "lstm": torch.nn.LSTM}
cells = pytest.mark.parametrize("kind", list(RECURRENT))


def run_recurrent(module, x, states, valid=None):
    """A recurrent module's outputs and final states, the latter those of each row's last real token."""
    state = states if len(states) == 2 else states[0]
    if valid is None:
        out, state = module(x, state)
    else:
        lengths = torch.from_numpy(valid.sum(axis=1))
        packed = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = module(packed, state)
        out, _ = torch.nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
    return out, *(state if len(states) == 2 else (state,))


@cells
@pytest.mark.parametrize(("bias", "valid"), [(True, None), (True, RIGHT_PADDED), (False, None)])
def test_recurrent_layers(kind, bias, valid):
    theirs = perturbed(RECURRENT[kind](WIDTH, WIDTH, num_layers=2, bias=bias, batch_first=True))
    ours = RecurrentLayer(kind, use_bias=bias)
    count = 2 if kind == "lstm" else 1

    def their_call(x, *states):
        return run_recurrent(theirs, x, states, valid)

    def our_call(state, x, hidden, cell=None):
        cell = jnp.zeros_like(hidden) if cell is None else cell
        finals = []
        for i in range(2):
            params = {"params": recurrent(kind, state, i)}
            x, *final = ours.apply(params, x, hidden[i], cell[i], valid=valid)
            finals.append(final[:count])
        return x, *stacked(finals)

    initial = [normal(2, B, WIDTH) for _ in range(count)]
    assert_same(theirs, their_call, our_call, normal(B, T, WIDTH), *initial, keep=valid)


@cells
def test_recurrent_language_model(kind):
    """Embedding, three layers and head, from an initial state that is not zero."""
    parts = {
        "embedding": torch.nn.Embedding(11, WIDTH),
        "layers": RECURRENT[kind](WIDTH, WIDTH, num_layers=3, batch_first=True),
        "head": torch.nn.Linear(WIDTH, 11),
    }
    theirs = perturbed(torch.nn.ModuleDict(parts))
    ours = RecurrentLM(architecture=kind, vocab_size=11, d_model=WIDTH, num_layers=3, head_bias=True)
    ids = torch.randint(11, (B, T))
    count = 2 if kind == "lstm" else 1

    def their_call(*states):
        out, *final = run_recurrent(theirs["layers"], theirs["embedding"](ids), states)
        return theirs["head"](out), *final

    def our_call(state, hidden, cell=None):
        layers = [recurrent(kind, part(state, "layers."), i) for i in range(3)]
        params = {
            "token_embedding": {"embedding": state["embedding.weight"]},
            "layers": stacked(layers),
            "head": linear(part(state, "head.")),
        }
        cell = jnp.zeros_like(hidden) if cell is None else cell
        cache = RecurrentState(hidden, cell, jnp.zeros(B, jnp.int32))
        logits, cache = ours.apply({"params": params}, jnp.asarray(ids.numpy(), jnp.int32), cache=cache)
        return logits, *(cache.hidden, cache.cell)[:count]

    assert_same(theirs, their_call, our_call, *(normal(3, B, WIDTH) for _ in range(count)))
