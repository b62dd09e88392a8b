from __future__ import annotations

import jax
import numpy as np

from ejkernel_core import Example


def test_abstract_arrays_have_the_dtype_of_the_example() -> None:
    arguments = {"x": np.ones((2, 3)), "ids": np.zeros(4, np.int32), "scale": 0.5, "mask": None, "window": (1, 2)}
    example = Example("mixed", "op", lambda draw: arguments, dtype="bfloat16")
    assert example.abstract() == {
        "x": jax.ShapeDtypeStruct((2, 3), "bfloat16"),
        "ids": jax.ShapeDtypeStruct((4,), "int32"),
        "scale": 0.5,
        "mask": None,
        "window": (1, 2),
    }


def test_arrays_that_jax_draws_are_not_computed() -> None:
    """Computing the values would take 4 TB."""

    def arguments(draw: int) -> dict[str, object]:
        return {"x": jax.random.normal(jax.random.key(draw), (2**20, 2**20), "float32"), "flag": True}

    shapes = Example("large", "op", arguments).abstract()
    assert shapes == {"x": jax.ShapeDtypeStruct((2**20, 2**20), "float32"), "flag": True}


def test_only_float64_is_rounded_to_the_dtype() -> None:
    example = Example("rounded", "op", lambda draw: {}, dtype="float16")
    thirds = np.full(3, 1 / 3)
    assert example.rounded(thirds).dtype == np.float16
    assert example.rounded(thirds.astype(np.float32)).dtype == np.float32
    assert example.rounded(7) == 7
