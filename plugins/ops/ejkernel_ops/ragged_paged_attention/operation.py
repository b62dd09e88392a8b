"""The operation ``ragged_paged_attention``, which has no gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel_core import Axes, Cost, Example, Operation
from ejkernel_ops.pages import pages_of

from .arguments import prepare
from .definition import most_keys, output_dtype
from .other_names import A_PAIR, OTHER_NAMES
from .sizes import shapes_of_sizes
from .values import validate

Arguments = dict[str, Any]


def _signature() -> inspect.Signature:
    """What a step always has by position, and the rest by name."""
    positional = ("query", "kv_pages", "kv_lens", "block_tables", "query_start_loc", "num_seqs")
    arrays = ("key_pages", "value_pages", "metadata", "softmax_aux", "q_scale", "k_scale", "v_scale", "first_page")
    options = {
        "softmax_scale": None,
        "causal": True,
        "sliding_window": None,
        "logits_soft_cap": None,
        "max_query_len": None,
        "split_size": None,
        "return_lse": False,
    }
    parameter = inspect.Parameter
    return inspect.Signature(
        [
            parameter("query", parameter.POSITIONAL_OR_KEYWORD),
            *(parameter(name, parameter.POSITIONAL_OR_KEYWORD, default=None) for name in positional[1:]),
            *(parameter(name, parameter.KEYWORD_ONLY, default=None) for name in arrays),
            *(parameter(name, parameter.KEYWORD_ONLY, default=value) for name, value in options.items()),
        ]
    )


AXES = Axes(
    {
        "query": "tokens heads head_dim",
        "kv_pages": "pages page_size 2*kv_heads head_dim",
        "kv_lens": "sequences",
        "block_tables": "sequences table",
        "query_start_loc": "sequences+1",
        "num_seqs": "1",
        "key_pages": "pages page_size kv_heads head_dim",
        "value_pages": "pages page_size kv_heads v_head_dim",
        "metadata": "items",
        "softmax_aux": "heads sinks",
        "q_scale": "#heads",
        "k_scale": "#kv_heads",
        "v_scale": "#kv_heads",
        "first_page": "1",
    },
    {"out": "tokens heads v_head_dim", "lse": "heads tokens"},
    present={"kv_pages": {"out": "tokens heads head_dim"}},
    independent="heads kv_heads",
    whole="tokens pages page_size head_dim v_head_dim sequences table items sinks",
    multiples={"heads": "kv_heads"},
    counts="tokens pages sequences table items",
    rounded="tokens pages sequences table items",
    positive="pages page_size heads kv_heads head_dim v_head_dim sequences table",
    statistics="lse",
    dtypes={"out": lambda arguments: output_dtype(arguments)},
)


def samples(arguments: Mapping[str, Any], key: Any) -> Arguments:
    """The derived samples, of sequences that have half of the keys that their tables have pages for up to all, whose
    queries are as many for each, or one for each where there are as many tokens as sequences.
    """
    drawn = AXES.samples(arguments, key)
    keys = jax.random.split(key, 2)
    tokens, (sequences, table) = arguments["query"].shape[0], arguments["block_tables"].shape
    most, pages = most_keys(arguments), pages_of(arguments)[0].shape[0]
    given: dict[str, Callable[[], jax.Array]] = {
        "query_start_loc": lambda: jnp.arange(sequences + 1) * tokens // max(sequences, 1),
        "kv_lens": lambda: jax.random.randint(keys[0], (sequences,), max(most // 2, min(most, 1)), most + 1),
        "block_tables": lambda: _tables(keys[1], sequences, table, pages),
        "num_seqs": lambda: jnp.full(1, sequences),
        "first_page": lambda: jnp.zeros(1),
        "metadata": lambda: _metadata(drawn, tokens, sequences),
    }
    for name, draw in given.items():
        if isinstance(arguments[name], jax.ShapeDtypeStruct):
            drawn[name] = draw().astype(arguments[name].dtype)
    return drawn


def _tables(key: Any, sequences: int, table: int, pages: int) -> jax.Array:
    """Pages in any order, which sequences share only where there are too few."""
    order = jax.random.permutation(key, pages)
    return order[jnp.arange(sequences * table) % pages].reshape(sequences, table)


def _metadata(arguments: Mapping[str, Any], tokens: int, sequences: int) -> jax.Array:
    from .tiles import paged_attention_metadata

    return paged_attention_metadata(
        arguments["kv_lens"], arguments["query_start_loc"], arguments["num_seqs"], num_tokens=tokens
    )


def cost(arguments: Mapping[str, Any]) -> Cost:
    """Of sequences that have three quarters of the keys that their tables have pages for, as samples do on average."""
    query, pages = arguments["query"], pages_of(arguments)
    sequences = arguments["block_tables"].shape[0]
    keys = 0.75 * most_keys(arguments)
    heads = pages[-1].shape[2] // (1 if len(pages) == 2 else 2)
    dims = query.shape[2] + pages[-1].shape[3]
    products = 2.0 * query.shape[0] * query.shape[1] * keys * dims
    read = sequences * keys * heads * dims * pages[0].dtype.itemsize
    moved = query.size * query.dtype.itemsize + query.shape[0] * query.shape[1] * pages[-1].shape[3] * 2
    return Cost(products, float(read + moved))


def _examples() -> Iterable[Example]:
    from .examples import examples

    return examples()


forward = Operation(
    name="ragged_paged_attention",
    signature=_signature(),
    axes=AXES,
    differentiable=(),
    prepare=prepare,
    validate=validate,
    samples=samples,
    cost=cost,
    examples=_examples,
    pytrees={"kv_pages": A_PAIR},
    other_names=OTHER_NAMES,
    sizes=shapes_of_sizes,
)
