"""Weights from a folder of safetensors files, named as Hugging Face names those of Llama and Qwen3."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from .models import Decoder, Params, RopeScaling, layer_shapes, other_shapes

_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
_LAYER = "model.layers.{layer}."
#: Of each weight the arrays that it is made of, side by side.
_NAMES = {
    "embedding": ["model.embed_tokens"],
    "norm": ["model.norm"],
    "head": ["lm_head"],
    "attention_norm": [_LAYER + "input_layernorm"],
    "mlp_norm": [_LAYER + "post_attention_layernorm"],
    "qkv": [_LAYER + f"self_attn.{name}_proj" for name in "qkv"],
    "out": [_LAYER + "self_attn.o_proj"],
    "q_norm": [_LAYER + "self_attn.q_norm"],
    "k_norm": [_LAYER + "self_attn.k_norm"],
    "router": [_LAYER + "mlp.gate"],
}
_MLP = {"up": ("gate_proj", "up_proj"), "down": ("down_proj",)}


def load(folder: str | Path, dtype: str = "bfloat16") -> tuple[Decoder, Params]:
    """The sizes and the weights of the model in a folder, as it is published: ``config.json`` and safetensors files."""
    folder = Path(folder)
    sizes = _sizes(json.loads((folder / "config.json").read_text()), dtype)
    arrays = {name: array for file in sorted(folder.glob("*.safetensors")) for name, array in _read(file).items()}
    if "lm_head.weight" not in arrays:  # the head is the embedding
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]

    def weights(shapes: dict[str, tuple[int, ...]], layer: int = 0) -> Params:
        return {name: _weight(sizes, name, layer, shape, arrays) for name, shape in shapes.items()}

    layers = [weights(layer_shapes(sizes), layer) for layer in range(sizes.layers)]
    return sizes, {**weights(other_shapes(sizes)), "layers": layers}


def _sizes(config: dict[str, Any], dtype: str) -> Decoder:
    heads, experts = config["num_attention_heads"], config.get("num_experts", 0)
    return Decoder(
        layers=config["num_hidden_layers"],
        width=config["hidden_size"],
        heads=heads,
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        inner=config["moe_intermediate_size" if experts else "intermediate_size"],
        vocabulary=config["vocab_size"],
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok", 0),
        has_head_norms=config["model_type"].startswith("qwen3"),
        rope_theta=config.get("rope_theta", 10_000.0),
        rope_scaling=_rope_scaling(config.get("rope_scaling")),
        epsilon=config["rms_norm_eps"],
        dtype=dtype,
    )


def _rope_scaling(given: dict[str, Any] | None) -> RopeScaling | None:
    if given is None:
        return None
    if given.get("rope_type") != "llama3":
        raise ValueError(f"rope_scaling: only that of type llama3 is supported; config.json has {given}")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeScaling(*(given[name] for name in names))


def _read(file: Path) -> dict[str, np.ndarray]:
    """The arrays of a file, which are read when they are used: a length, a header in JSON, and the numbers."""
    numbers = np.memmap(file, np.uint8, "r")
    begin = 8 + int(numbers[:8].view("<u8")[0])
    header = json.loads(bytes(numbers[8:begin]))
    header.pop("__metadata__", None)
    arrays = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        data = numbers[begin + first : begin + last]
        arrays[name] = data.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def _weight(sizes: Decoder, name: str, layer: int, shape: tuple[int, ...], arrays: dict[str, np.ndarray]) -> jax.Array:
    """A weight, in which rows are what is multiplied: files have the transposed matrices."""

    def matrix(parts: list[str], **places: int) -> np.ndarray:
        found = [arrays[part.format(layer=layer, **places) + ".weight"] for part in parts]
        return found[0] if found[0].ndim == 1 or name == "embedding" else np.concatenate(found).T

    if name not in _MLP:
        array = matrix(_NAMES[name])
    elif not sizes.experts:
        array = matrix([f"{_LAYER}mlp.{part}" for part in _MLP[name]])
    else:
        parts = [f"{_LAYER}mlp.experts.{{expert}}.{part}" for part in _MLP[name]]
        array = np.stack([matrix(parts, expert=expert) for expert in range(sizes.experts)])
    if array.shape != shape:
        raise ValueError(f"{name}: has shape {array.shape}, and config.json says {shape}")
    return jnp.asarray(array, sizes.dtype)
