"""Products of the experts of well-known models, which are measured and recorded."""

from __future__ import annotations

from collections.abc import Iterator

import attrs


@attrs.frozen
class Layer:
    """One product of the experts: rows (tokens times chosen experts), sizes of a matrix, and the number of experts."""

    name: str
    rows: int
    k: int
    n: int
    groups: int
    uses: tuple[str, ...] = ("benchmark",)


@attrs.frozen
class Model:
    """The experts of a model: the size of a token, the inner size, the experts, and how many a token has."""

    name: str
    dim: int
    inner: int
    experts: int
    chosen: int


MODELS = (
    Model("Mixtral 8x7B", 4096, 14336, 8, 2),
    Model("Qwen3-30B-A3B", 2048, 768, 128, 8),
    Model("Qwen3-235B-A22B", 4096, 1536, 128, 8),
    Model("DeepSeek-V3", 7168, 2048, 256, 8),
    Model("gpt-oss-20b", 2880, 2880, 32, 4),
    Model("gpt-oss-120b", 2880, 2880, 128, 4),
    Model("OLMoE", 2048, 1024, 64, 8),
)
#: Tokens in a step of training, in a chunk of a prefill, and in a step of decoding.
TOKENS = (16384, 2048, 64)


def _layers() -> Iterator[Layer]:
    for model in MODELS:
        for tokens in TOKENS:
            rows = tokens * model.chosen
            yield Layer(f"{model.name}, {tokens} tokens, up", rows, model.dim, 2 * model.inner, model.experts)
            yield Layer(f"{model.name}, {tokens} tokens, down", rows, model.inner, model.dim, model.experts)


def _peers() -> Iterator[Layer]:
    """The shapes of published comparisons, with what compilers without a device check."""
    for rows, k, n, groups, *uses in (
        (32768, 2048, 1408, 64, "resources", "vmem", "estimate"),
        (65536, 4096, 1536, 128, "vmem", "estimate"),
        (16384, 4096, 14336, 8, "vmem", "estimate"),
        (131072, 2048, 768, 128),
        (8192, 7168, 2048, 32),
        (65536, 7168, 2048, 256),
        (4096, 2048, 768, 128),
        (16384, 2880, 5760, 32, "vmem"),
        (512, 4096, 1536, 128, "resources", "vmem"),
    ):
        yield Layer(f"{rows} x {k} x {n}, {groups} groups", rows, k, n, groups, ("benchmark", *map(str, uses)))


PEERS = tuple(_peers())
LAYERS = (*PEERS, *_layers())
