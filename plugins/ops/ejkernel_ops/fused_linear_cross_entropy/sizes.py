"""The heads of well-known models, whose loss is measured and recorded."""

from __future__ import annotations

import attrs


@attrs.frozen
class Head:
    """The tokens of a step, the size of a hidden state, and the words of the vocabulary."""

    model: str
    tokens: int
    hidden_dim: int
    vocab: int
    uses: tuple[str, ...] = ("benchmark",)

    @property
    def name(self) -> str:
        return f"{self.model}, {self.tokens} x {self.hidden_dim} x {self.vocab}"


HEADS = (
    Head("Llama-3.1-8B", 8192, 4096, 128256, ("benchmark", "resources", "vmem", "estimate")),
    Head("Llama-3.1-8B", 16384, 4096, 128256),
    Head("Llama-3.1-8B", 32768, 4096, 128256),
    Head("Qwen3-30B-A3B", 8192, 2048, 151936),
    Head("Qwen3-30B-A3B", 16384, 2048, 151936),
    Head("Qwen3-30B-A3B", 32768, 2048, 151936, ("benchmark", "vmem", "estimate")),
    Head("DeepSeek-V3", 8192, 7168, 129280),
    Head("DeepSeek-V3", 16384, 7168, 129280),
    Head("DeepSeek-V3", 32768, 7168, 129280),
)
