"""Read a Llama-architecture GGUF file: its shape, its weights in float32, and its vocabulary.

What the file says is what is used: rotary base, norm epsilon, head counts, context length, tied
embeddings. A file that asks for something this runtime does not do is refused by name, because a
model that silently runs wrong still writes fluent text.

The format is https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from corekern_examples.errors import DemoError


@dataclass(frozen=True)
class LlamaConfig:
    """The numbers that define the network."""

    layers: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rope_dimensions: int
    """How many leading elements of a head are rotated; the rest pass as they are."""
    rope_base: float
    rope_scale: float
    """Positions are divided by this (linear position interpolation); 1 when the file asks for none."""
    rms_epsilon: float
    context_length: int
    """Tokens; the longest sequence the model was made for."""


@dataclass(frozen=True)
class LayerWeights:
    """One block; every matrix is (outputs, inputs) float32."""

    attention_norm: np.ndarray
    """(hidden_size,)"""
    qkv: np.ndarray
    """((q_heads + 2 * kv_heads) * head_dim, hidden_size); q and k rows in GGUF's rotary pair order."""
    attention_output: np.ndarray
    """(hidden_size, q_heads * head_dim)"""
    ffn_norm: np.ndarray
    """(hidden_size,)"""
    gate_up: np.ndarray
    """(2 * ffn_size, hidden_size), gate first"""
    ffn_down: np.ndarray
    """(hidden_size, ffn_size)"""


@dataclass(frozen=True)
class LlamaWeights:
    """The whole network in float32."""

    embedding: np.ndarray
    """(vocab_size, hidden_size)"""
    layers: tuple[LayerWeights, ...]
    output_norm: np.ndarray
    """(hidden_size,)"""
    output: np.ndarray
    """(vocab_size, hidden_size); the very same array as `embedding` when the file ties them."""
    rope_factors: np.ndarray | None
    """(rope_dimensions / 2,): each rotary frequency is divided by its factor; None for all ones."""


@dataclass(frozen=True)
class Vocabulary:
    """What the file says about its tokenizer, uninterpreted."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    model: str
    pre_tokenizer: str
    bos_id: int | None
    eos_ids: frozenset[int]
    """Every token that the metadata names as an end: of the sequence, of a turn, of a message."""
    add_bos: bool
    chat_template: str | None


@dataclass(frozen=True)
class Model:
    """A loaded model; `name` is its file's."""

    name: str
    config: LlamaConfig
    weights: LlamaWeights
    vocabulary: Vocabulary


def load_model(path: str | Path) -> Model:
    """Read a GGUF file whole.

    Args:
        path: a GGUF of architecture "llama", in any element type that the gguf package can dequantize.

    Returns:
        The `Model`; its weights are float32 copies, so the file may go away afterwards.

    Raises:
        DemoError: when the file is missing, is no GGUF, is cut short, has another architecture, or asks
            for something that this runtime does not do.
    """
    path = Path(path)
    reader = _open(path)
    metadata = _Metadata(path, reader)
    architecture = metadata.required("general.architecture")
    if architecture != "llama":
        raise DemoError(f"{path}: architecture is {architecture!r}; the demo runs 'llama' GGUF files")
    config = _config(metadata)
    vocabulary = _vocabulary(metadata)
    weights = _weights(path, reader, config)
    if len(vocabulary.tokens) != config.vocab_size:
        raise DemoError(
            f"{path}: {len(vocabulary.tokens)} tokens in the vocabulary but {config.vocab_size} embeddings"
        )
    return Model(path.name, config, weights, vocabulary)


def _open(path: Path) -> gguf.GGUFReader:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise DemoError(f"cannot read the model {path}: {error.strerror}", exit_code=2) from None
    if magic != b"GGUF":
        raise DemoError(f"{path} is not a GGUF file (it starts with {magic!r}, not b'GGUF')", exit_code=2)
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        # A truncated file shows as whichever array the reader could not take out of it.
        raise DemoError(f"{path} is a damaged or truncated GGUF file ({_first_line(error)})") from None


@dataclass(frozen=True)
class _Metadata:
    path: Path
    reader: gguf.GGUFReader

    def optional(self, key: str, default: Any = None) -> Any:
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def required(self, key: str) -> Any:
        value = self.optional(key)
        if value is None:
            raise DemoError(f"{self.path}: the metadata has no {key}")
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.required(key) if default is None else self.optional(key, default)
        # Some architectures give one head count a layer; a Llama has one for all.
        if not isinstance(value, int) or value < 1:
            raise DemoError(f"{self.path}: {key} is {value!r}; a positive integer is needed")
        return value


def _config(metadata: _Metadata) -> LlamaConfig:
    hidden_size = metadata.positive("llama.embedding_length")
    q_heads = metadata.positive("llama.attention.head_count")
    kv_heads = metadata.positive("llama.attention.head_count_kv", q_heads)
    head_dim = metadata.positive("llama.attention.key_length", hidden_size // q_heads)
    rope_dimensions = metadata.positive("llama.rope.dimension_count", head_dim)
    value_dim = metadata.positive("llama.attention.value_length", head_dim)
    scaling = metadata.optional("llama.rope.scaling.type", "none")
    rope_scale = 1.0
    if scaling == "linear":
        rope_scale = float(metadata.required("llama.rope.scaling.factor"))
    for problem, text in (
        (metadata.optional("llama.expert_count", 0) != 0, "it is a mixture of experts"),
        (scaling not in ("none", "linear"), f"its rotary scaling is {scaling!r}"),
        (q_heads % kv_heads != 0, f"{q_heads} query heads do not divide over {kv_heads} KV heads"),
        (value_dim != head_dim, f"keys have {head_dim} elements and values {value_dim}"),
        (rope_dimensions % 2 != 0 or rope_dimensions > head_dim, f"it rotates {rope_dimensions} elements"),
        (not rope_scale > 0, f"llama.rope.scaling.factor is {rope_scale}"),
    ):
        if problem:
            raise DemoError(f"{metadata.path}: this model is not supported: {text}")
    return LlamaConfig(
        layers=metadata.positive("llama.block_count"),
        hidden_size=hidden_size,
        ffn_size=metadata.positive("llama.feed_forward_length"),
        vocab_size=metadata.positive("llama.vocab_size", len(metadata.required("tokenizer.ggml.tokens"))),
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dimensions=rope_dimensions,
        rope_base=float(metadata.optional("llama.rope.freq_base", 10000.0)),
        rope_scale=rope_scale,
        rms_epsilon=float(metadata.required("llama.attention.layer_norm_rms_epsilon")),
        context_length=metadata.positive("llama.context_length"),
    )


def _vocabulary(metadata: _Metadata) -> Vocabulary:
    tokens = metadata.required("tokenizer.ggml.tokens")
    eos_keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    ends = (metadata.optional(f"tokenizer.ggml.{key}") for key in eos_keys)
    pre_tokenizer = metadata.optional("tokenizer.ggml.pre", "default")
    return Vocabulary(
        tokens=tokens,
        token_types=metadata.optional("tokenizer.ggml.token_type", [gguf.TokenType.NORMAL] * len(tokens)),
        merges=metadata.optional("tokenizer.ggml.merges", []),
        model=metadata.required("tokenizer.ggml.model"),
        pre_tokenizer=pre_tokenizer,
        bos_id=metadata.optional("tokenizer.ggml.bos_token_id"),
        eos_ids=frozenset(end for end in ends if end is not None),
        # Llama 3 files of before this key existed rely on their pre-tokenizer's default.
        add_bos=metadata.optional("tokenizer.ggml.add_bos_token", pre_tokenizer == "llama-bpe"),
        chat_template=metadata.optional("tokenizer.chat_template"),
    )


def _weights(path: Path, reader: gguf.GGUFReader, config: LlamaConfig) -> LlamaWeights:
    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def take(name: str, *shape: int) -> np.ndarray:
        tensor = tensors.pop(name, None)
        if tensor is None:
            raise DemoError(f"{path}: the tensor {name} is missing")
        # GGUF lists the fastest axis first.
        found = tuple(int(size) for size in tensor.shape[::-1])
        if found != shape:
            raise DemoError(f"{path}: the tensor {name} is {found}; the metadata says {shape}")
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            raise DemoError(f"{path}: {name} is {tensor.tensor_type.name}, not readable here") from None
        # A float32 tensor comes back as a view of the mapped file; any other is a new array already.
        mapped = tensor.tensor_type == gguf.GGMLQuantizationType.F32
        return np.array(values, np.float32, copy=mapped or None).reshape(shape)

    hidden, ffn = config.hidden_size, config.ffn_size
    q_size, kv_size = config.q_heads * config.head_dim, config.kv_heads * config.head_dim

    def layer(index: int) -> LayerWeights:
        block = f"blk.{index}"
        qkv = [take(f"{block}.attn_q.weight", q_size, hidden)]
        qkv += [take(f"{block}.attn_{name}.weight", kv_size, hidden) for name in "kv"]
        gate_up = [take(f"{block}.ffn_{name}.weight", ffn, hidden) for name in ("gate", "up")]
        return LayerWeights(
            attention_norm=take(f"{block}.attn_norm.weight", hidden),
            qkv=np.concatenate(qkv),
            attention_output=take(f"{block}.attn_output.weight", hidden, q_size),
            ffn_norm=take(f"{block}.ffn_norm.weight", hidden),
            gate_up=np.concatenate(gate_up),
            ffn_down=take(f"{block}.ffn_down.weight", hidden, ffn),
        )

    embedding = take("token_embd.weight", config.vocab_size, hidden)
    tied = "output.weight" not in tensors
    factors = "rope_freqs.weight" in tensors
    weights = LlamaWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.layers)),
        output_norm=take("output_norm.weight", hidden),
        output=embedding if tied else take("output.weight", config.vocab_size, hidden),
        rope_factors=take("rope_freqs.weight", config.rope_dimensions // 2) if factors else None,
    )
    if tensors:
        raise DemoError(f"{path}: this model is not supported: it has a tensor {min(tensors)}")
    return weights


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
