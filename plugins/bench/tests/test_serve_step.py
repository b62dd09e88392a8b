"""A step of decoding at tiny sizes: its limit by hand, its arrays, and what the suite finds. No time is judged."""

from __future__ import annotations

from typing import Any

import attrs
import click
import jax
import numpy as np
import pytest

from ejkernel_bench import serve_step
from ejkernel_bench.serve_step import MODELS, SMALL, Point, arrays_of, named_points
from ejkernel_ops import ragged_paged_attention

DENSE, EXPERTS = (Point(name, sizes, 3, 21, 4) for name, sizes in SMALL.items())


def test_the_limit_is_the_sum_of_products_and_the_cache() -> None:
    """Width 32, 4 heads and 2 key heads of 16, inner 48, 97 words, float32; by two rates that both matter."""
    copy, product = 1e3, 4e4

    def least(dim: int, columns: int, matrices: float = 1, rows: int = 3) -> float:
        moved = 4 * (matrices * dim * columns + rows * (dim + columns))
        return max(moved / copy, 2 * rows * dim * columns / product)

    attention = least(32, 4 * 16 + 2 * 2 * 16) + least(64, 32) + 4 * 3 * 21 * 2 * 2 * 16 / copy
    layer = attention + least(32, 96) + least(48, 32)
    assert DENSE.limit(copy, product) == pytest.approx(2 * layer + least(32, 97))
    touched = 8 * (1 - (6 / 8) ** 3)
    mlp = least(32, 8) + least(32, 48, touched, 6) + least(24, 32, touched, 6)
    assert EXPERTS.limit(copy, product) == pytest.approx(2 * (attention + mlp) + least(32, 97))
    assert DENSE.limit(1e12, 10.0) == pytest.approx(
        2 * sum(2 * 3 * dim * columns / 10 for dim, columns in ((32, 128), (64, 32), (32, 96), (48, 32)))
        + 2 * 3 * 32 * 97 / 10
    )


def test_layers_that_fit() -> None:
    """Llama's 8 billion weights take 16 GB; 262,144 tokens of its cache 34, and 786,432 of them 103."""
    point = Point("llama-8b", MODELS["llama-8b"], 64, 4096)
    assert point.bytes(point.sizes) == pytest.approx(16.06e9 + 34.36e9, rel=0.01)
    assert point.that_fits(0.9 * 80e9).sizes.layers == 32
    large = attrs.evolve(point, batch=192)
    assert large.that_fits(0.9 * 141e9).sizes.layers == 32
    assert large.that_fits(0.5 * 141e9).sizes.layers == 18
    assert large.that_fits(1e9).sizes.layers == 1
    assert large.that_fits(None) == large


def test_points_by_name() -> None:
    names = [point.name for point in named_points(False, 80e9, None)]
    assert len(names) == 2 * 9
    assert "llama-8b-64x4096" in names
    assert "llama-8b-64x16384" not in names
    assert "llama-8b-64x16384" not in [point.name for point in named_points(False, 141e9, None)]
    assert len(named_points(False, 141e9, "llama-8b")) == 9
    assert [point.name for point in named_points(False, 80e9, "qwen3-30b-1x1024")] == ["qwen3-30b-1x1024"]
    with pytest.raises(click.UsageError, match="no model or point of serve-step is named llama; there are llama-8b"):
        named_points(False, None, "llama")


def test_a_step_writes_the_last_token_of_each_sequence() -> None:
    _, positions, batch, _, numbers = arrays_of(DENSE)
    assert positions.tolist() == [20] * 3
    assert batch.kv_lens.tolist() == [21] * 3
    assert len({*np.ravel(batch.block_tables).tolist()}) == DENSE.pages == 18
    assert batch.slot_mapping.tolist() == (batch.block_tables[:, 5] * 4).tolist()
    assert batch.last.tolist() == [0, 1, 2]
    assert numbers.tolist() == [[0] * 3, [0] * 3, [1] * 3, [0] * 3]
    step = serve_step.Step(DENSE, ragged_paged_attention)
    first, again = step.run(), step.run()
    np.testing.assert_array_equal(first, again)
    assert len({*first.tolist()}) > 1


def test_a_small_run_has_a_row_for_each_model() -> None:
    report = serve_step.run(rounds=1, small=True)
    assert not report.faults
    assert [row[0] for row in report.tables[0].rows] == ["dense-3x21", "experts-3x21"]
    assert all(row[4] > 0 for row in report.tables[0].rows)


@pytest.mark.parametrize("point", [DENSE, EXPERTS], ids=lambda point: point.model)
def test_logits_by_a_wrong_attention_are_a_fault(point: Point) -> None:
    def wrong(query: Any, cache: Any, lengths: Any, *arrays: Any, **options: Any) -> Any:
        return ragged_paged_attention(query, cache, lengths - 1, *arrays, **options)

    assert serve_step.compared(point, ragged_paged_attention) == []
    (fault,) = serve_step.compared(point, wrong)
    assert fault.startswith(f"{point.model}: its logits are ")


def test_a_cpu_measures_nothing_unless_it_is_asked_to() -> None:
    assert "there is no accelerator here" in serve_step.run().text
    assert jax.default_backend() == "cpu"
