"""Log-probabilities in Triton: random calls in chunks of a few rows, every kind of configuration, what is compiled.

``EJKERNEL_RANDOM_CALLS=60 pytest plugins/triton/tests/test_linear_log_probs.py`` runs 60 random calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_ops.linear_log_probs import random_calls
from ejkernel_triton import linear_log_probs
from ejkernel_triton.interpreter import Compiled, compiled_for, interpreted, interpreted_registry
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.linear_log_probs import Config, backward

if _jax_triton.unavailable_reason():
    pytest.skip(_jax_triton.unavailable_reason(), allow_module_level=True)

COUNT = int(os.environ.get("EJKERNEL_RANDOM_CALLS", "20"))
DTYPES = ("float32", "bfloat16", "float16")
OP = "linear_log_probs"
H200 = "NVIDIA H200"
#: A random call of 37 rows of 1,500 words, with a bias, a soft cap and a temperature.
SEVERAL_STEPS = 24
#: Chunks of one row and of several; steps of a column a thread and of several; fewer programs than rows.
CONFIGS = (Config(1, 256, 1, 0), Config(4, 512, 1, 0), Config(5, 512, 2, 2), Config(64, 128, 4, 5))


@pytest.fixture(scope="module", name="registry")
def _registry() -> Iterator[Any]:
    with interpreted():
        yield interpreted_registry({f"{OP}.triton": linear_log_probs, f"{OP}_bwd.triton": backward})


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_calls(registry: Any, seed: int) -> None:
    """The configuration is for both directions."""
    cfg = (None, *CONFIGS)[seed % 5]
    random_calls.check(seed, DTYPES[seed % 3], registry=registry, backend="triton", cfg=cfg)


@pytest.mark.parametrize("cfg", CONFIGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kind_of_configuration(registry: Any, dtype: str, cfg: Config) -> None:
    """Of a call with several steps and an odd number of rows."""
    random_calls.check(SEVERAL_STEPS, dtype, registry=registry, backend="triton", cfg=cfg)


@pytest.mark.parametrize("dtype", DTYPES)
def test_words_that_cannot_be_add_nothing_to_an_entropy(registry: Any, dtype: str) -> None:
    """Some threads meet nothing but -inf, others at first; in one row there is one word, whose entropy is 0."""
    hidden, weight = np.zeros((3, 8)), np.zeros((8, 600))
    hidden[:, 0], weight[0] = [1, 2, 1000], np.arange(600) % 7
    bias = np.where(np.isin(np.arange(600), [5, 300, 301, 599]), 0, -np.inf)
    arrays = [jnp.asarray(array, dtype) for array in (hidden, weight)]
    options = {"bias": jnp.asarray(bias, dtype), "return_entropy": True, "backend": "triton"}
    log_probs, entropy = registry.call(OP, *arrays, np.array([5, 300, 5]), **options, cfg=Config(2, 256, 1))
    logits = hidden @ weight + bias
    log_p = logits - logits.max(1, keepdims=True)
    log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
    products = np.exp(log_p) * np.where(np.isinf(log_p), 0, log_p)
    np.testing.assert_allclose(log_probs, log_p[[0, 1, 2], [5, 300, 5]], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, -products.sum(1), rtol=1e-5, atol=1e-5)


def compiled(dtype: str, has_entropy: bool, **options: Any) -> list[Compiled]:
    """The kernels of log-probabilities and their gradients on a card."""
    shapes = {"hidden": (8192, 64), "weight": (64, 128_256), "labels": (8192,), "bias": (128_256,)}
    arrays = {name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for name, shape in shapes.items()}
    arrays["labels"] = jax.ShapeDtypeStruct((8192,), jnp.int32)

    def gradients(arrays: Any) -> Any:
        labels = arrays.pop("labels")

        def total(arrays: Any) -> Any:
            results = ejkernel_core.call(
                OP, **arrays, labels=labels, return_entropy=has_entropy, backend="triton", **options
            )
            return sum(result.sum() for result in jax.tree.leaves(results))

        return jax.jit(jax.value_and_grad(total))(arrays)

    return compiled_for(H200, gradients, arrays)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_entropy", [False, True])
def test_the_heuristics_configurations_spill_nothing(dtype: str, has_entropy: bool) -> None:
    forward, differentiated = compiled(dtype, has_entropy, logits_soft_cap=5.0, temperature=0.7)
    assert (forward.grid, differentiated.grid) == ((1024, 1, 1), (256, 1, 1))
    for kernel in (forward, differentiated):
        assert kernel.spilled == 0
        assert ".local" not in kernel.ptx
        assert kernel.registers <= 64


def test_the_forward_has_one_launch_of_the_loss_and_its_configurations() -> None:
    inv = ejkernel_core.invocation(
        OP,
        jax.ShapeDtypeStruct((8192, 64), "bfloat16"),
        jax.ShapeDtypeStruct((64, 128_256), "bfloat16"),
        jax.ShapeDtypeStruct((8192,), "int32"),
    )
    inv = attrs.evolve(inv, platform="gpu", device_kind=H200, compute_capability=(9, 0))
    # A thread has fewer columns than in the loss, because an entropy may be needed. Rows are read once: no programs.
    assert linear_log_probs.heuristic_cfg(inv=inv) == Config(1024, 4096, 16, 0)
    offered = [attrs.astuple(cfg) for cfg in linear_log_probs.config_space(inv=inv)]
    assert offered == [
        *((count, 4096, 16, 0) for count in (1024, 512, 2048, 4096)),
        *((1024, 2048, 8, 0), (1024, 8192, 32, 0)),
    ]
