"""Descriptions of models' caches, for `corekern capacity`: what each layer keeps for a token and for a request."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from corekern.formats import get_format
from corekern.qsa.side_cache import ring_size

SHIPPED = ("smollm2-135m", "qwen3.8-27b-like", "qwen3.8-flash-next-like")
PAGE_MULTIPLE = 16


@dataclass(frozen=True)
class Attention:
    """Layers with a KV cache; with `index_dim`, sparse ones (QSA) and their side caches."""

    count: int
    kv_heads: int
    head_dim: int
    index_dim: int = 0
    """Elements of an index key, in bfloat16: one a group of tokens, and the raw ones of the open group. 0: none."""
    compress_ratio: int = 4
    """Tokens a group."""

    def kv_bytes(self, kv_dtype: str, ranks: int) -> int:
        """Of a token in one layer on one GPU: K and V. KV heads are repeated where there are fewer than GPUs."""
        return 2 * max(1, self.kv_heads // ranks) * self.head_dim * get_format(kv_dtype).itemsize

    def key_bytes(self) -> float:
        """Of a token in one layer: its share of a compressed index key. Every GPU has them all."""
        return 2 * self.index_dim / self.compress_ratio

    def ring_bytes(self, speculative: int) -> int:
        """Of a request in one layer: raw index keys of the open group and one step."""
        return 2 * self.index_dim * ring_size(self.compress_ratio, 1 + speculative)


@dataclass(frozen=True)
class Linear:
    """Layers of linear attention (gated delta networks): a state a request, whatever its length."""

    count: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 0
    """Tokens that the convolution before it spans; 0: there is none."""
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"

    def state_bytes(self, ranks: int, speculative: int) -> int:
        """Of one state of one layer on one GPU; the convolution keeps the tokens before, and drafted ones."""
        state = self.value_heads * self.key_dim * self.value_dim * get_format(self.state_dtype).itemsize
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        steps = self.conv_width - 1 + speculative if self.conv_width else 0
        return (state + channels * steps * get_format(self.conv_dtype).itemsize) // ranks


Layer = Attention | Linear
KINDS: dict[str, type[Attention] | type[Linear]] = {"attention": Attention, "linear": Linear}


@dataclass(frozen=True)
class Layout:
    """A model's caches."""

    name: str
    sources: tuple[str, ...]
    page_size: int | str
    """Tokens of a page of KV; "linear_state": the fewest, in whole 16, that take as much room as a linear state."""
    layers: tuple[Layer, ...]

    @property
    def attention(self) -> list[Attention]:
        return [layer for layer in self.layers if isinstance(layer, Attention)]

    @property
    def linear(self) -> list[Linear]:
        return [layer for layer in self.layers if isinstance(layer, Linear)]

    def page_tokens(self, kv_dtype: str, ranks: int, speculative: int) -> int:
        """Tokens of a page of KV."""
        if isinstance(self.page_size, int):
            return self.page_size
        state = max(layer.state_bytes(ranks, speculative) for layer in self.linear)
        token = min(layer.kv_bytes(kv_dtype, ranks) for layer in self.attention)
        return -(-state // (token * PAGE_MULTIPLE)) * PAGE_MULTIPLE


def load_layout(name_or_path: str | Path) -> Layout:
    """A shipped description by its name, or one's own from a .json or .toml file.

    The file holds `name`, `sources`, `page_size` and `layers`, each of the latter with its `kind` ("attention" or
    "linear") and that class's fields.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not as above.
        ModuleNotFoundError: TOML is asked of a Python older than 3.11.

    >>> load_layout("smollm2-135m").layers
    (Attention(count=30, kv_heads=3, head_dim=64, index_dim=0, compress_ratio=4),)
    """
    if str(name_or_path) in SHIPPED:
        where = resources.files("corekern.instruments").joinpath("layouts", f"{name_or_path}.json")
        return _layout(json.loads(where.read_text()), str(name_or_path))
    path = Path(name_or_path)
    if path.suffix not in (".json", ".toml"):
        raise ValueError(f"{path}: neither a .json or .toml file nor one of {', '.join(SHIPPED)}")
    text = path.read_text()
    try:
        if path.suffix == ".json":
            data = json.loads(text)
        else:
            try:
                import tomllib
            except ImportError:
                raise ModuleNotFoundError(f"{path}: TOML needs Python 3.11; write it as JSON") from None
            data = tomllib.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return _layout(data, str(path))


def _layout(data: Any, where: str) -> Layout:
    if not isinstance(data, dict) or not isinstance(data.get("layers"), list) or not data["layers"]:
        raise ValueError(f"{where}: layers: a list of at least one layer is needed")
    unknown = set(data) - {field.name for field in fields(Layout)}
    if unknown:
        raise ValueError(f"{where}: {min(unknown)!r} is not a field of a layout")
    layers = tuple(_layer(layer, f"{where}: layers[{i}]") for i, layer in enumerate(data["layers"]))
    layout = Layout(
        str(data.get("name", where)),
        tuple(data.get("sources", ())),
        data.get("page_size", PAGE_MULTIPLE),
        layers,
    )
    if not layout.attention:
        raise ValueError(f"{where}: layers: none is attention, so there is no KV cache")
    if layout.page_size == "linear_state":
        if not layout.linear:
            raise ValueError(f"{where}: page_size: 'linear_state' needs a linear layer")
    elif not _count(layout.page_size):
        raise ValueError(f"{where}: page_size: {layout.page_size!r} is neither tokens nor 'linear_state'")
    return layout


def _layer(data: Any, where: str) -> Layer:
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind not in KINDS:
        raise ValueError(f"{where}: kind: {kind!r} is not one of {', '.join(KINDS)}")
    given = {name: value for name, value in data.items() if name != "kind"}
    known = {field.name: field for field in fields(KINDS[kind])}
    for name, value in given.items():
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not a field of {kind}")
        if name.endswith("_dtype"):
            get_format(value, argument=f"{where}: {name}")
        elif not (_count(value) or (value == 0 and name in ("index_dim", "conv_width"))):
            raise ValueError(f"{where}: {name}: {value!r} is not a whole number above 0")
    missing = [name for name in ("count", *known) if name not in given and name in _needed(kind)]
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing")
    return KINDS[kind](**given)


def _needed(kind: str) -> tuple[str, ...]:
    return (
        ("count", "kv_heads", "head_dim")
        if kind == "attention"
        else ("count", "key_heads", "value_heads", "key_dim", "value_dim")
    )


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
