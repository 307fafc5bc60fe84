"""A small random Llama, written as a GGUF, and what it should compute, in dense float64."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

HIDDEN, FFN, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 96, 64, 2, 4, 2, 64
EPSILON = 1e-5
ROPE_BASE = 50000.0
CONTEXT = 1024
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "a n", "an d", "Ġ and"]
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}{{ '<|im_start|>' + message['role'] }}{% endfor %}"
)


def byte_alphabet() -> list[str]:
    """GPT-2's character for each byte: printable ones as they are, the rest from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


VOCABULARY = [*CONTROL, *sorted(byte_alphabet()), *(merge.replace(" ", "") for merge in MERGES)]


@dataclass(frozen=True)
class TinyLlama:
    path: Path
    tensors: dict[str, np.ndarray]
    """What the file holds, by GGUF name, in float64."""
    rope_scale: float


def write_tiny(
    path: Path,
    *,
    seed: int = 0,
    tied: bool = True,
    rope_scale: float = 1.0,
    rope_factors: bool = False,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    tokenizer_model: str = "gpt2",
    scaling: str | None = None,
    context: int = CONTEXT,
    drop: str | None = None,
    extra: str | None = None,
) -> TinyLlama:
    """Write the model; the last five arguments make files that the demo must refuse."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(Q_HEADS)
    writer.add_head_count_kv(KV_HEADS)
    # Unlike most Llamas, a head is not hidden / heads wide: the file has to be believed.
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(EPSILON)
    if scaling is not None:
        writer.add_string(f"{architecture}.rope.scaling.type", scaling)
    elif rope_scale != 1.0:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_scale)
    writer.add_tokenizer_model(tokenizer_model)
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([3] * len(CONTROL) + [1] * (len(VOCABULARY) - len(CONTROL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)

    tensors = {}

    def add(name: str, values: np.ndarray, kind: gguf.GGMLQuantizationType) -> None:
        stored = gguf.quantize(values.astype(np.float32), kind)
        tensors[name] = gguf.dequantize(stored, kind).astype(np.float64).reshape(values.shape)
        if name != drop:
            writer.add_tensor(name, stored, raw_dtype=kind)

    f32, f16, q8 = (getattr(gguf.GGMLQuantizationType, name) for name in ("F32", "F16", "Q8_0"))

    def matrix(name: str, outputs: int, inputs: int, kind: gguf.GGMLQuantizationType) -> None:
        add(name, rng.standard_normal((outputs, inputs)) * 1.5 / np.sqrt(inputs), kind)

    matrix("token_embd.weight", len(VOCABULARY), HIDDEN, q8)
    add("output_norm.weight", rng.uniform(0.5, 1.5, HIDDEN), f32)
    if not tied:
        matrix("output.weight", len(VOCABULARY), HIDDEN, f32)
    if rope_factors:
        add("rope_freqs.weight", rng.uniform(1, 8, HEAD_DIM // 2), f32)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        add(f"{block}.attn_norm.weight", rng.uniform(0.5, 1.5, HIDDEN), f32)
        add(f"{block}.ffn_norm.weight", rng.uniform(0.5, 1.5, HIDDEN), f32)
        matrix(f"{block}.attn_q.weight", Q_HEADS * HEAD_DIM, HIDDEN, f16)
        matrix(f"{block}.attn_k.weight", KV_HEADS * HEAD_DIM, HIDDEN, q8)
        matrix(f"{block}.attn_v.weight", KV_HEADS * HEAD_DIM, HIDDEN, f32)
        matrix(f"{block}.attn_output.weight", HIDDEN, Q_HEADS * HEAD_DIM, f32)
        matrix(f"{block}.ffn_gate.weight", FFN, HIDDEN, q8)
        matrix(f"{block}.ffn_up.weight", FFN, HIDDEN, f32)
        matrix(f"{block}.ffn_down.weight", HIDDEN, FFN, f16)
    if extra is not None:
        add(extra, np.ones(HIDDEN), f32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyLlama(path, tensors, rope_scale)


def dense_logits(tiny: TinyLlama, tokens: list[int]) -> np.ndarray:
    """(tokens, vocabulary) float64: the whole sequence at once, no cache, no blocks, nothing shared."""
    tensors, count = tiny.tensors, len(tokens)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * tensors[name]

    frequencies = np.array([ROPE_BASE ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)])
    frequencies /= tiny.rope_scale * tensors.get("rope_freqs.weight", 1.0)
    turns = np.exp(1j * np.outer(np.arange(count), frequencies))

    def rotate(heads: np.ndarray) -> np.ndarray:
        # A GGUF's rotary pair is a complex number laid out as (real, imaginary).
        return (np.ascontiguousarray(heads).view(np.complex128) * turns[:, None]).view(np.float64)

    x = tensors["token_embd.weight"][tokens]
    future = np.triu(np.full((count, count), -np.inf), 1)
    for layer in range(LAYERS):
        block = {
            name.split(".")[2]: tensor for name, tensor in tensors.items() if name.startswith(f"blk.{layer}.")
        }
        normed = norm(x, f"blk.{layer}.attn_norm.weight")
        q = rotate((normed @ block["attn_q"].T).reshape(count, Q_HEADS, HEAD_DIM))
        k = rotate((normed @ block["attn_k"].T).reshape(count, KV_HEADS, HEAD_DIM))
        v = (normed @ block["attn_v"].T).reshape(count, KV_HEADS, HEAD_DIM)
        heads = []
        for head in range(Q_HEADS):
            kv_head = head * KV_HEADS // Q_HEADS
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(HEAD_DIM) + future
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(weights / weights.sum(-1, keepdims=True) @ v[:, kv_head])
        x = x + np.concatenate(heads, axis=-1) @ block["attn_output"].T
        normed = norm(x, f"blk.{layer}.ffn_norm.weight")
        gate = normed @ block["ffn_gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (normed @ block["ffn_up"].T)) @ block["ffn_down"].T
    output = tensors.get("output.weight", tensors["token_embd.weight"])
    return norm(x, "output_norm.weight") @ output.T
