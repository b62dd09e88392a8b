"""Meaningful inputs for abstract ones, to measure a call of which only the shapes are known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .axes import AXES

Arguments = dict[str, Any]


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The derived samples, with labels anywhere in the vocabulary, weights of a few units, and logits as a trained
    model has them: those of normal numbers would grow with the size of the hidden states.
    """
    labels_key, key = jax.random.split(key)
    concrete = AXES.samples(arguments, key)
    labels, weight = arguments["labels"], arguments["weight"]
    size = weight.shape[0 if arguments["transpose_weight"] else 1]
    if isinstance(labels, jax.ShapeDtypeStruct):
        concrete["labels"] = jax.random.randint(labels_key, labels.shape, 0, size, labels.dtype)
    if isinstance(weight, jax.ShapeDtypeStruct):
        inner = arguments["hidden"].shape[-1]
        concrete["weight"] = (concrete["weight"] / jnp.sqrt(inner).astype(weight.dtype)).astype(weight.dtype)
    return concrete
