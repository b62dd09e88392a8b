"""Delta, the lse of weights and the gradient of sinks, against their definitions in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_ops.flash_attention import statistics


def results(dtype: Any = jnp.float32, **changes: Any) -> dict[str, Any]:
    """The forward's results and their cotangents, of three heads and five queries, the last of which sees nothing."""
    keys = jax.random.split(jax.random.key(0), 4)
    out, d_out = (jax.random.normal(key, (2, 5, 3, 8)).astype(dtype) for key in keys[:2])
    lse, d_lse = (jax.random.normal(key, (2, 3, 5)) for key in keys[2:])
    return {"query": out, "out": out, "d_out": d_out, "lse": lse.at[..., -1].set(-jnp.inf), "d_lse": d_lse, **changes}


@pytest.mark.parametrize("absent", [(), ("d_out",), ("d_lse",), ("d_out", "d_lse")])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_delta(dtype: Any, absent: tuple[str, ...]) -> None:
    call = results(dtype, **dict.fromkeys(absent))
    expected = np.zeros((2, 3, 5))
    if "d_out" not in absent:
        out, d_out = (np.asarray(call[name], np.float64) for name in ("out", "d_out"))
        expected += np.einsum("bqhd,bqhd->bhq", out, d_out)
    if "d_lse" not in absent:
        expected[..., :-1] -= np.asarray(call["d_lse"], np.float64)[..., :-1]
    delta = statistics.delta(call)
    assert delta.dtype == jnp.float32
    np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-5)


def test_the_cotangent_of_a_row_that_sees_no_key_is_ignored() -> None:
    call = results()
    with_nan = {**call, "d_lse": call["d_lse"].at[..., -1].set(jnp.nan)}
    np.testing.assert_array_equal(statistics.delta(with_nan), statistics.delta(call))


def test_rows_of_a_backward_pass() -> None:
    call = results(jnp.bfloat16)
    rows = statistics.BackwardRows.of({**call, "d_out": call["d_out"].astype(jnp.float32)})
    assert rows.d_out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(rows.d_out, call["d_out"])
    np.testing.assert_array_equal(rows.delta, statistics.delta(call))
    assert (rows.lse[..., -1] == jnp.inf).all()
    np.testing.assert_allclose(jnp.exp2(rows.lse[..., :-1]), jnp.exp(call["lse"][..., :-1]), rtol=1e-6)
    assert not statistics.BackwardRows.of({**call, "d_out": None}).d_out.any()


def test_the_lowest_lse() -> None:
    lowest = float(jnp.finfo(jnp.float32).min)
    lse = jnp.array([lowest, -jnp.inf])
    assert statistics.weights_lse_base2(lse).tolist() == [-jnp.inf, jnp.inf]
    assert statistics.weights_lse_base2(lse, lowest / 2).tolist() == [lowest / 2, jnp.inf]


@pytest.mark.parametrize("base2", [False, True])
def test_the_gradient_of_sinks(base2: bool) -> None:
    call = results()
    lse, delta = call["lse"], statistics.delta(call)
    sinks = jnp.array([[0.5, -1.0], [-jnp.inf, 0.0], [-2.0, -2.0]])
    # No sink is above the lse, of which it is a part.
    lse = jnp.maximum(lse, jnp.log(jnp.exp(sinks).sum(1))[None, :, None] + 0.1).at[..., -1].set(-jnp.inf)
    logits, sums = np.asarray(sinks, np.float64), np.asarray(lse, np.float64)[:, :, :-1, None]  # the last sees nothing
    weights = np.exp(logits[None, :, None] - sums)
    expected = -(weights * np.asarray(delta, np.float64)[:, :, :-1, None]).sum((0, 2))
    rows_lse = statistics.weights_lse_base2(lse) if base2 else statistics.weights_lse(lse)
    np.testing.assert_allclose(statistics.sinks_gradient(sinks, rows_lse, delta, base2), expected, rtol=2e-6, atol=1e-6)


def test_sinks_far_from_zero_keep_their_ratio() -> None:
    """A row sees two sinks only, whose products with log2(e) are rounded to multiples of 2 ** -6."""
    sinks = jnp.array([[100000.0, 99999.0]])
    lse = jnp.array([[[100000.0]]])
    gradient = statistics.sinks_gradient(sinks, statistics.weights_lse_base2(lse), jnp.ones((1, 1, 1)), base2=True)
    np.testing.assert_allclose(gradient[0, 1] / gradient[0, 0], np.exp(-1.0), rtol=1e-6)


@pytest.mark.parametrize("lowest", [-jnp.inf, float(jnp.finfo(jnp.float32).min)])
def test_sinks_with_the_lowest_value(lowest: float) -> None:
    """Alone in a row, a finite sink has weight 1, and an infinite sink weight 0."""
    sinks = jnp.full((1, 1), lowest)
    gradient = statistics.sinks_gradient(sinks, statistics.weights_lse(sinks[None]), jnp.ones((1, 1, 1)))
    assert gradient.tolist() == [[0.0 if lowest == -jnp.inf else -1.0]]


def test_the_weight_of_sinks_alone_in_a_row_is_at_most_1() -> None:
    """Far from 0, the lse and the sink differ by a rounding."""
    lse = jnp.full((1, 1, 3), -1e30 * statistics.LOG2E) * jnp.asarray([1.0, 1 + 1e-6, 1 - 1e-6])
    sinks = jnp.full((1, 1), -1e30)
    assert statistics.sinks_gradient(sinks, lse, -jnp.ones_like(lse), base2=True).tolist() == [[2.0]]
