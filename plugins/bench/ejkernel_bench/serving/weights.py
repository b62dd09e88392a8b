"""Weights from a folder of safetensors files, named as Hugging Face names those of Llama and Qwen3."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._safetensors import read_arrays, read_object
from .models import Decoder, Params, RopeScaling, layer_shapes, other_shapes

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
#: What ``models`` computes. Other models may have weights of the same names and shapes.
_ONLY = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
_ONLY |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}


def load(folder: str | Path, dtype: str = "bfloat16") -> tuple[Decoder, Params]:
    """The sizes and the weights of the model in a folder, as it is published: ``config.json`` and safetensors files."""
    folder = Path(folder)
    if dtype not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"dtype must be bfloat16, float16 or float32: {dtype!r}")
    config = read_object((folder / "config.json").read_bytes(), f"{folder}: config.json")
    sizes = _sizes(config, dtype)
    arrays, parts = read_arrays(folder), _parts(sizes)
    if config.get("tie_word_embeddings") and _EMBEDDING in arrays:
        arrays[_HEAD] = arrays[_EMBEDDING]  # also where a file has a head

    def weights(names: dict[str, Any], layer: int = 0) -> Params:
        return {name: _weight(sizes, name, layer, parts[name], arrays) for name in names}

    params = weights(other_shapes(sizes))
    params["layers"] = [weights(layer_shapes(sizes), layer) for layer in range(sizes.layers)]
    # Old files have rotary frequencies, which follow from config.json.
    if unused := [name for name in arrays if not name.endswith("rotary_emb.inv_freq")]:
        raise ValueError(f"{folder}: {len(unused)} tensors are not used: {', '.join(unused[:3])}")
    return sizes, params


def _sizes(config: dict[str, Any], dtype: str) -> Decoder:
    config = {name: value for name, value in config.items() if value is not None}
    if (kind := config.get("model_type")) not in ("llama", "qwen3", "qwen3_moe"):
        raise ValueError(f"config.json: model_type must be llama, qwen3 or qwen3_moe: {kind!r}")
    has_experts = kind == "qwen3_moe"
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {"rope_type": "default"}
    scaling = _rope_scaling(rope)
    # What transformers takes where there is nothing; its newer versions write "num_local_experts".
    config = {"num_key_value_heads": config.get("num_attention_heads"), "norm_topk_prob": not has_experts, **config}
    config = {"num_experts": config.get("num_local_experts"), "rope_theta": 10_000.0, **config}
    for name, only in _ONLY.items():
        if (value := config.get(name, only)) != only:
            raise ValueError(f"config.json: {name} must be {json.dumps(only)}: {json.dumps(value)}")
    width, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    if heads % (kv_heads := _positive(config, "num_key_value_heads")):
        raise ValueError(f"config.json: num_key_value_heads must divide num_attention_heads, {heads}: {kv_heads}")
    return Decoder(
        layers=_positive(config, "num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_positive({"head_dim": width // heads, **config}, "head_dim"),
        inner=_positive(config, "moe_intermediate_size" if has_experts else "intermediate_size"),
        vocabulary=_positive(config, "vocab_size"),
        experts=_positive(config, "num_experts") if has_experts else 0,
        experts_per_token=_positive(config, "num_experts_per_tok") if has_experts else 0,
        has_head_norms=kind != "llama",
        rope_theta=_positive(config | rope, "rope_theta", float),
        rope_scaling=scaling,
        epsilon=_positive(config, "rms_norm_eps", float),
        dtype=dtype,
    )


def _positive(config: dict[str, Any], name: str, kind: type = int) -> Any:
    value: Any = config.get(name)
    if type(value) not in (int, kind) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {name} must be a positive {'integer' if kind is int else 'number'}: {value!r}")
    return value


def _rope_scaling(given: Any) -> RopeScaling | None:
    kind = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling: only that of type llama3 is supported; config.json has {given}")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return RopeScaling(*(_positive(given, name, float) for name in names))


def _parts(sizes: Decoder) -> dict[str, dict[str, tuple[int, ...]]]:
    """Of each weight the arrays that it is made of, side by side, and their shapes."""
    width, inner, dim = sizes.width, sizes.inner, sizes.head_dim
    rows = {"q": sizes.heads * dim, "k": sizes.kv_heads * dim, "v": sizes.kv_heads * dim}
    layer = "model.layers.{layer}."
    mlp = layer + ("mlp.experts.{expert}." if sizes.experts else "mlp.")
    return {
        "embedding": {_EMBEDDING: (sizes.vocabulary, width)},
        "norm": {"model.norm.weight": (width,)},
        "head": {_HEAD: (sizes.vocabulary, width)},
        "attention_norm": {layer + "input_layernorm.weight": (width,)},
        "mlp_norm": {layer + "post_attention_layernorm.weight": (width,)},
        "qkv": {f"{layer}self_attn.{name}_proj.weight": (size, width) for name, size in rows.items()},
        "out": {layer + "self_attn.o_proj.weight": (width, rows["q"])},
        "q_norm": {layer + "self_attn.q_norm.weight": (dim,)},
        "k_norm": {layer + "self_attn.k_norm.weight": (dim,)},
        "router": {layer + "mlp.gate.weight": (sizes.experts, width)},
        "up": {f"{mlp}{name}_proj.weight": (inner, width) for name in ("gate", "up")},
        "down": {mlp + "down_proj.weight": (width, inner)},
    }


def _weight(
    sizes: Decoder, name: str, layer: int, parts: dict[str, tuple[int, ...]], arrays: dict[str, np.ndarray]
) -> jax.Array:
    """A weight, in which rows are what is multiplied: files have the transposed matrices. Its arrays are taken out."""

    def part(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if (array := arrays.pop(name, None)) is None:
            raise ValueError(f"the safetensors files have no tensor {name}")
        if array.shape != shape:
            raise ValueError(f"{name}: has shape {array.shape}, and config.json says {shape}")
        return array.astype(jnp.dtype(sizes.dtype), copy=False)  # numpy joins no arrays of several narrow dtypes

    def matrix(expert: int = 0) -> np.ndarray:
        found = [part(name.format(layer=layer, expert=expert), shape) for name, shape in parts.items()]
        return found[0] if found[0].ndim == 1 or name == "embedding" else np.concatenate(found).T

    has_experts = sizes.experts and name in ("up", "down")
    return jnp.asarray(np.stack([matrix(expert) for expert in range(sizes.experts)]) if has_experts else matrix())
