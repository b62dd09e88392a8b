"""``stable_json`` and hashes: equal in all processes for equal content, different otherwise, without addresses."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from ejkernel_core._content import stable_json
from ejkernel_core.extend import abstractify, device_fingerprint, device_name, short_hash


@attrs.frozen
class Config:
    block: int = 64
    dtype: Any = jnp.float32


@attrs.frozen
class Other:
    block: int = 64
    dtype: Any = jnp.float32


@attrs.frozen
class WithDtype:
    dtype: Any
    block: int


@dataclasses.dataclass(frozen=True)
class Plain:
    block: int = 64


class Colour(enum.Enum):
    RED = 1
    GREEN = 2


class Pair(NamedTuple):
    a: int
    b: int


def scale(x: int, by: int = 2) -> int:
    return x * by


def adder(n: Any) -> Any:
    return lambda x: x + n


@jax.jit
def jitted(x: Any) -> Any:
    return x


#: Values that all differ in content.
DISTINCT = {
    "none": None,
    "true": True,
    "one": 1,
    "one float": 1.0,
    "one text": "1",
    "one complex": 1 + 0j,
    "one numpy": np.int32(1),
    "one numpy float": np.float32(1),
    "one wide": np.int64(1),
    "minus zero": -0.0,
    "zero": 0.0,
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "bytes": b"1",
    "empty": "",
    "list": [1, 2],
    "tuple": (1, 2),
    "nested": ((1,), 2),
    "named tuple": Pair(1, 2),
    "set": {1, 2},
    "mapping": {"1": 2},
    "mapping of int": {1: 2},
    "mapping of a tag": {"!tuple": [1, 2]},
    "spec": P("a", None),
    "with a dtype": WithDtype(np.dtype("float32"), 64),
    "with a dtype and another block": WithDtype(np.dtype("float32"), 128),
    "lambda with a set": lambda x: x in {"a", "b", "c", "d"},
    "lambda with another set": lambda x: x in {"a", "b", "c"},
    "lambda with an ellipsis": lambda x: x[...],
    "structure": jax.tree.structure((1,)),
    "structure of a list": jax.tree.structure([1]),
    "structure with a hole": jax.tree.structure((1, None)),
    "structure of a mapping": jax.tree.structure({"a": 1}),
    "structure of another mapping": jax.tree.structure({"a": 1, "b": None}),
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    "float16": np.dtype("float16"),
    "its name": "float32",
    "enum": Colour.RED,
    "other enum": Colour.GREEN,
    "config": Config(),
    "config of another block": Config(128),
    "config of another dtype": Config(dtype=jnp.bfloat16),
    "config of another type": Other(),
    "dataclass": Plain(),
    "type": Plain,
    "function": scale,
    "builtin": len,
    "jitted": jitted,
    "numpy's": np.add,
    "partial": functools.partial(scale, by=3),
    "partial of another value": functools.partial(scale, by=4),
    "partial by place": functools.partial(scale, 3),
    "closure": adder(1),
    "closure over another value": adder(2),
    "closure over a dtype": adder(jnp.float32),
    "lambda": lambda x: x,
    "other lambda": lambda x: -x,
    "lambda with a default": lambda x, y=1: x,
    "lambda with another default": lambda x, y=2: x,
    "method": Colour.RED.__format__,
    "abstract": jax.ShapeDtypeStruct((2, 3), "float32"),
    "abstract of another shape": jax.ShapeDtypeStruct((3, 2), "float32"),
    "abstract of another dtype": jax.ShapeDtypeStruct((2, 3), "bfloat16"),
}


def test_values_with_different_content_have_different_texts() -> None:
    texts = {name: stable_json(value) for name, value in DISTINCT.items()}
    for text in texts.values():
        json.loads(text)
        assert "0x" not in text
    assert len(set(texts.values())) == len(texts)
    assert len({short_hash(value) for value in DISTINCT.values()}) == len(DISTINCT)


EQUAL = [
    (jnp.float32, np.float32),
    (jnp.float32, np.dtype("float32")),
    ({"b": 1, "a": 2}, {"a": 2, "b": 1}),
    ({3, 1, 2}, frozenset([2, 3, 1])),
    (adder(1), adder(1)),
    (functools.partial(scale, by=3), functools.partial(scale, by=3)),
    (Config(), Config(64, np.float32)),
    (abstractify(jnp.ones((2, 3))), jax.ShapeDtypeStruct((2, 3), jnp.float32)),
]


@pytest.mark.parametrize(("first", "second"), EQUAL)
def test_values_with_equal_content_have_equal_texts(first: Any, second: Any) -> None:
    assert stable_json(first) == stable_json(second)


_CYCLE: list[Any] = []
_CYCLE.append(_CYCLE)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "a builtins.object has no content"),
        ([1, {"a": object()}], "a builtins.object has no content"),
        (jnp.ones(2), r"an array's numbers are not content; pass abstractify\(array\)"),
        (np.ones(2), "an array's numbers are not content"),
        (adder(object()), "a builtins.object has no content"),
        (adder(jnp.ones(2)), "an array's numbers are not content"),
        (iter([]), "a builtins.list_iterator has no content"),
        (_CYCLE, "a builtins.list contains itself"),
        (type("Local", (), {}), "cannot be found again by its name"),
    ],
)
def test_a_value_without_content_is_refused(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        stable_json(value)


#: Of so few leaves that two values are often the same, or differ in a type alone.
leaves = st.sampled_from([None, 0, 0.0, -0.0, False, 1, True, 2**70, float("nan"), 1e300, "", "0", "None"])
similar = st.recursive(
    leaves,
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.sampled_from("01"), children, max_size=3)
        | st.tuples(children, children)
    ),
    max_leaves=8,
)


def exact_content(value: Any) -> Any:
    """A form of a value for which ``==`` means equal content."""
    if isinstance(value, dict):
        return ("dict", frozenset((key, exact_content(v)) for key, v in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(exact_content(v) for v in value))
    return (type(value).__name__, repr(value))


@given(similar, similar)
def test_texts_are_equal_if_and_only_if_the_contents_are(first: Any, second: Any) -> None:
    assert (stable_json(first) == stable_json(second)) == (exact_content(first) == exact_content(second))


@pytest.mark.long
def test_texts_are_the_same_in_every_process() -> None:
    code = (
        "from tests.test_keys import DISTINCT; from ejkernel_core import stable_json\n"
        "from ejkernel_core._devices import device_fingerprint\n"
        "print([stable_json(v) for v in DISTINCT.values()] + [device_fingerprint()])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_abstractify_replaces_only_arrays() -> None:
    tree = {"x": jnp.ones((2, 3), jnp.bfloat16), "y": [np.zeros(4, np.int8), 3, "word"], "none": None}
    abstract_tree = abstractify(tree)
    assert abstract_tree["x"] == jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)
    assert abstract_tree["y"] == [jax.ShapeDtypeStruct((4,), np.int8), 3, "word"]
    trees: list[Any] = []
    jax.jit(lambda t: trees.append(abstractify(t)))({"x": tree["x"]})
    assert trees == [{"x": abstract_tree["x"]}]


def test_the_fingerprint_of_a_device_is_one_line() -> None:
    text = device_fingerprint()
    assert text == device_fingerprint(jax.devices()[0])
    assert text.startswith(device_name(jax.devices()[0]))
    assert "\n" not in text
