"""What the core derives from the axes of an operation's arrays, for operations that do not resemble attention."""

from __future__ import annotations

import re
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_core import Axes, Cost, Operation, PluginError, Registry, hookimpl

SIZE = 3

NORM = Axes(
    {"x": "... dim", "weight": "dim"},
    {"out": "... dim", "rstd": "..."},
    independent="...",
    whole="dim",
    vmap="...",
    counts="...",
    positive="dim",
    statistics="rstd",
)
GROUPED = Axes(
    {"lhs": "rows k", "rhs": "groups k n", "sizes": "groups", "scale": "#n"},
    {"out": "rows n"},
    independent="n",
    whole="rows k groups",
    counts="rows groups",
    rounded="rows",
    when={("transposed", True): {"rhs": "groups n k"}, ("gated", True): {"out": "rows n/2"}},
)
#: Tokens of one sequence, or of several that end at ``ends``.
TOKENS = Axes(
    {"x": "batch tokens dim", "ends": "sequences"},
    {"out": "batch tokens"},
    whole="batch tokens dim sequences",
    present={"ends": {"x": "tokens dim", "out": "tokens"}, "axis": {"out": "dim"}},
    absent={"ends": {"x": "batch tokens dim"}},
)
#: Its first array has integers.
STEPS = Axes({"ids": "n", "x": "n dim"}, {"norm": "n"}, whole="n dim", statistics="norm")
#: A key and a value for each head, one after the other.
PAIRS = Axes({"key": "n heads", "pages": "n 2*heads"}, {"new_pages": "n 2*heads"}, independent="n heads")
#: An entry more than there are rows.
ENDS = Axes({"x": "rows n"}, {"sums": "rows+1 n"}, independent="rows n")
#: The batch axis is not the first axis, and has another position in each array.
SCORES = Axes(
    {
        "query": "q_len batch heads dim",
        "key": "batch kv_len kv_heads dim",
        "bias": "#batch #q_len #kv_len",
        "ends": "batch+1",
    },
    {"scores": "heads batch q_len kv_len"},
    independent="batch heads kv_heads",
    whole="q_len kv_len dim",
    vmap="batch",
    counts="batch q_len kv_len",
    rounded="q_len kv_len",
    multiples={"heads": "kv_heads"},
    positive="kv_heads",
)


def struct(*shape: int, dtype: Any = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def assert_close(actual: Any, expected: Any) -> None:
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-5), actual, expected)


# -- declaring -------------------------------------------------------------------------------------------------------

PRODUCT = {"arrays": {"x": "batch dim", "y": "dim"}, "summed": "dim", "whole": ""}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a word of an array": (
        {"arrays": {"x": "bacth dim", "y": "batch"}},
        "axes of x: 'bacth' is neither independent, summed, nor whole; did you mean 'batch'?",
    ),
    "a word of independent": (
        {"independent": "batch dmi", "whole": ""},
        "axes of x: 'dim' is neither independent, summed, nor whole, and 'dmi' in independent is an axis of no array; one of the "
        "two is mistyped",
    ),
    "a word of whole or of an array": (
        {"arrays": {"x": "batch dum"}},
        "axes of x: 'dum' is neither independent, summed, nor whole, and 'dim' in whole is an axis of no array; one of the two",
    ),
    "an independent axis twice": (
        {"arrays": {"x": "batch batch dim"}},
        "axes of x: batch is independent, and stands there twice",
    ),
    "a multiple beside its base": (
        {"arrays": {"x": "batch dim"}, "independent": "batch dim", "whole": "", "multiples": {"batch": "dim"}},
        "axes of x: batch is a multiple of dim, so an array has one of them alone",
    ),
    "no word": ({"arrays": {"x": "batch 2dim"}}, "axes of x: takes words like batch, #batch, 2*heads, dim/128"),
    "a division by nothing": ({"arrays": {"x": "batch dim/0"}}, "axes of x: takes words like"),
    "leading axes twice": ({"arrays": {"x": "... dim ..."}}, "axes of x: '...' may appear once; got '... dim ...'"),
    "a result of its own": (
        {"results": {"out": "batch other"}, "whole": "dim other"},
        "axes of out: 'other' is an axis of no array",
    ),
    "independent": (
        {"independent": "batch dims"},
        "axes, independent: 'dims' is an axis of no array; did you mean 'dim'?",
    ),
    "counts": ({"counts": "rows"}, "axes, counts: 'rows' is an axis of no array"),
    "multiples": ({"multiples": {"dim": "heads"}}, "axes, multiples: 'heads' is an axis of no array"),
    "vmap that is whole": ({"vmap": "dim"}, "axes, vmap: takes an independent axis; got 'dim'"),
    "both": ({"whole": "dim batch"}, "axes: batch cannot be independent and whole"),
    "statistics": ({"statistics": "lse"}, "axes, statistics: 'lse' is not a result"),
    "dtypes": ({"dtypes": {"ou": "int32"}}, "axes, dtypes: 'ou' is not a result; did you mean 'out'?"),
    "the name of a dtype": ({"dtypes": {"out": "flot32"}}, "axes, dtypes: out takes the name of a dtype; got 'flot32'"),
    "when": ({"when": {("flag", True): {"z": "dim"}}}, "axes, when: 'z' is not an array or result"),
    "when of an array": (
        {"when": {("x", 3): {"out": "dim"}}},
        "axes, when: takes options and their values; for 'x' use present= or absent=",
    ),
    "when of None": (
        {"when": {("flag", None): {"out": "dim"}}},
        "axes, when: takes options and their values; for 'flag' use present= or absent=",
    ),
    "present": ({"present": {"x": {"z": "dim"}}}, "axes, present: 'z' is not an array or result"),
    "a word in absent": (
        {"absent": {"x": {"out": "dum"}}},
        "axes of out: 'dum' is neither independent, summed, nor whole",
    ),
    "no result": ({"results": {}}, "axes: takes at least one result"),
    "one name for two": ({"results": {"x": "batch"}}, "axes: x cannot be an array and a result"),
    "a result that broadcasts": ({"results": {"out": "#batch"}}, "axes of out: a result is as long as its axes say"),
    "rounded": ({"counts": "batch", "rounded": "dim"}, "axes, rounded: takes axes that counts has; got 'dim'"),
    "an empty axis": ({"arrays": {"x": "batch dim 0"}}, "axes of x: takes words like"),
    "summed": ({"summed": "rows"}, "axes, summed: 'rows' is an axis of no array"),
    "summed in one array": (
        {"summed": "dim", "whole": ""},
        "axes, summed: 'dim' is in x alone; what is contracted is in two arrays",
    ),
    "summed in a result": (
        {"arrays": {"x": "batch dim", "y": "batch dim"}, "summed": "batch", "independent": ""},
        "axes, summed: 'batch' is an axis of out, so it is not summed",
    ),
    "summed in a result where an option has a value": (
        {**PRODUCT, "when": {("full", True): {"out": "batch dim"}}},
        "axes, summed: 'dim' is an axis of out, so it is not summed",
    ),
    "summed and independent": ({**PRODUCT, "independent": "batch dim"}, "axes: dim cannot be independent and summed"),
    "summed and whole": ({**PRODUCT, "whole": "dim"}, "axes: dim cannot be summed and whole"),
    "summed twice in an array": (
        {**PRODUCT, "arrays": {"x": "batch dim dim", "y": "dim"}},
        "axes of x: dim is summed, and stands there twice",
    ),
    "mistyped summed": (
        {**PRODUCT, "summed": "dmi"},
        "axes of x: 'dim' is neither independent, summed, nor whole, and 'dmi' in summed is an axis of no array; one of "
        "the two is mistyped",
    ),
    "added that is not an array": ({**PRODUCT, "added": "z"}, "axes, added: 'z' is not an array"),
    "added with the axis": (
        {**PRODUCT, "added": "y"},
        "axes, added: y has the axis 'dim', so it is not added to sums over it",
    ),
    "added to nothing": (
        {"added": "x"},
        "axes, added: is about sums over the axes in summed, and there are none",
    ),
    "nonlinear in an array": (
        {**PRODUCT, "nonlinear": "x"},
        "axes: nonlinear and dtype_option take options; 'x' is an array",
    ),
    "a dtype that nothing reads": (
        {**PRODUCT, "dtype_option": "dtype"},
        "axes, dtype_option: is an option that dtypes reads, and there are none",
    ),
    "a dtype that is nonlinear": (
        {**PRODUCT, "dtype_option": "dtype", "nonlinear": "dtype", "dtypes": {"out": "float32"}},
        "axes, dtype_option: 'dtype' cannot be nonlinear too",
    ),
    "a word in when": (
        {"when": {("flag", True): {"x": "dum batch"}}},
        "axes of x: 'dum' is neither independent, summed, nor whole",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_in_axes_are_refused_when_they_are_declared(case: str) -> None:
    fields, message = MISTAKES[case]
    valid = {"arrays": {"x": "batch dim"}, "results": {"out": "batch"}, "independent": "batch", "whole": "dim"}
    Axes(**valid)
    with pytest.raises(ValueError, match=re.escape(message)):
        Axes(**{**valid, **fields})


def test_contracted_axes_are_declared() -> None:
    assert Axes(**{"results": {"out": "batch"}, "independent": "batch", **PRODUCT}).summed == ("dim",)
    # The scales of blocks of an axis are contracted with it.
    scaled = {"x": "batch dim", "scale": "blocks"}
    fields = {"results": {"out": "batch"}, "independent": "batch", "multiples": {"dim": "blocks"}}
    assert Axes(scaled, summed="dim blocks", **fields).summed == ("dim", "blocks")
    signature = lambda x, y, *, dtype=None: None
    for field in ("dtype_option", "nonlinear"):
        dtypes = {"dtypes": {"out": "float32"}}
        axes = Axes(**{"results": {"out": "batch"}, "independent": "batch", **PRODUCT, **dtypes, field: "dtpye"})
        with pytest.raises(
            ValueError, match=re.escape("axes of product: 'dtpye' is not a parameter; did you mean 'dtype'?")
        ):
            Operation(name="product", signature=signature, axes=axes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"results": "out"}, "axes: take the words of each array by its name, as {'x': 'batch dim'}; got 'out'"),
        ({"arrays": ["x"]}, "axes: take the words of each array by its name"),
        ({"when": {"flag": {"out": "dim"}}}, "axes, when: takes pairs of an option and its value; got 'flag'"),
        ({"present": {"flag": "dim"}}, "axes: take the words of each array by its name"),
    ],
)
def test_other_forms_of_axes_are_refused(fields: dict[str, Any], message: str) -> None:
    valid = {"arrays": {"x": "batch dim"}, "results": {"out": "batch"}, "independent": "batch", "whole": "dim"}
    with pytest.raises(TypeError, match=re.escape(message)):
        Axes(**{**valid, **fields})


def test_axes_are_strings() -> None:
    with pytest.raises(
        TypeError, match=re.escape("axes of x: takes a string such as 'batch dim'; got tuple ('batch',)")
    ):
        Axes({"x": ("batch",)}, {"out": "batch"}, independent="batch")  # type: ignore[dict-item]


def test_an_operation_has_a_parameter_for_each_array() -> None:
    with pytest.raises(ValueError, match="axes of norm: 'weight' is not a parameter; did you mean 'weights'?"):
        Operation(name="norm", signature=lambda x, weights=None: None, axes=NORM)
    with pytest.raises(ValueError, match="axes of grouped: 'gated' is not a parameter"):
        Operation(name="grouped", signature=lambda lhs, rhs, sizes, scale, transposed: None, axes=GROUPED)
    with pytest.raises(ValueError, match="axes of tokens: 'ends' is not a parameter; did you mean 'end'?"):
        Operation(name="tokens", signature=lambda x, end, axis: None, axes=TOKENS)


# -- arrays ----------------------------------------------------------------------------------------------------------

QUERY, KEY = struct(5, 2, 4, 8), struct(2, 7, 2, 8)
MISFITS: dict[str, tuple[Axes, dict[str, Any], str]] = {
    "rank": (SCORES, {"query": struct(2, 4, 8)}, "query: takes (q_len, batch, heads, dim); got shape (2, 4, 8)"),
    "size": (SCORES, {"key": struct(3, 7, 2, 8)}, "key: batch must be 2, as in query; got 3"),
    "multiple": (
        SCORES,
        {"key": struct(2, 7, 3, 8)},
        "query: heads must be a multiple of kv_heads, which is 3 in key; got 4",
    ),
    "positive": (SCORES, {"key": struct(2, 7, 0, 8)}, "key: kv_heads must be at least 1; got 0"),
    "broadcast": (
        SCORES,
        {"bias": struct(2, 7)},
        "bias: must broadcast to (batch, q_len, kv_len) = (2, 5, 7); got (2, 7)",
    ),
    "broadcast of more axes": (
        SCORES,
        {"bias": struct(1, 2, 5, 7)},
        "bias: must broadcast to (batch, q_len, kv_len); got shape (1, 2, 5, 7)",
    ),
    "one more": (SCORES, {"ends": struct(2)}, "ends: takes batch+1 = 3, with the batch of query; got 2"),
    "none more": (SCORES, {"ends": struct(0)}, "ends: an axis must have batch+1 entries; got 0"),
    "leading": (
        attrs.evolve(NORM, arrays={"x": "... dim", "weight": "... dim"}),
        {"x": struct(4, 5, 8), "weight": struct(4, 6, 8)},
        "weight: leading axes must be (4, 5), as in x; got (4, 6)",
    ),
    "no rank": (NORM, {"x": struct()}, "x: takes (..., dim); got shape ()"),
    "a scalar": (
        Axes({"x": "dim", "seed": ""}, {"out": "dim"}, whole="dim"),
        {"x": struct(3), "seed": struct(1)},
        "seed: takes a single number; got shape (1,)",
    ),
    "a fixed length": (
        Axes({"x": "dim", "count": "1"}, {"out": "dim"}, whole="dim"),
        {"x": struct(3), "count": struct(2)},
        "count: takes (1,) = (1,); got (2,)",
    ),
    "pairs": (
        Axes({"x": "2*dim"}, {"out": "dim"}, whole="dim"),
        {"x": struct(3)},
        "x: an axis must have 2*dim entries; got 3",
    ),
    "blocks": (
        Axes({"x": "dim", "scales": "dim/128"}, {"out": "dim"}, whole="dim"),
        {"x": struct(300), "scales": struct(2)},
        "scales: takes (dim/128,) = (3,); got (2,)",
    ),
    "an option": (
        GROUPED,
        {"lhs": struct(9, 4), "rhs": struct(3, 4, 6), "transposed": True},
        "rhs: k must be 4, as in lhs; got 6",
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_an_array_of_the_wrong_shape_is_refused_by_name(case: str) -> None:
    axes, arrays, message = MISFITS[case]
    arguments = {"query": QUERY, "key": KEY, **arrays} if axes is SCORES else arrays
    with pytest.raises(ValueError, match=re.escape(message)):
        axes.canonical(arguments)


def test_canonical_arrays_have_the_leading_axes_that_broadcasting_adds() -> None:
    arguments = {"query": QUERY, "key": KEY, "bias": jnp.arange(7.0), "ends": None, "scale": 2.0}
    canonical = SCORES.canonical(arguments)
    assert canonical["bias"].shape == (1, 1, 7)
    assert {**canonical, "bias": None} == {**arguments, "bias": None}


# -- results ---------------------------------------------------------------------------------------------------------


def shapes(results: Any) -> list[tuple[tuple[int, ...], str]]:
    return [(result.shape, str(result.dtype)) for result in results]


@pytest.mark.parametrize(
    ("axes", "arguments", "results"),
    [
        (NORM, {"x": struct(2, 3, 8, dtype="bfloat16")}, [((2, 3, 8), "bfloat16"), ((2, 3), "float32")]),
        (NORM, {"x": struct(8, dtype="float64")}, [((8,), "float64"), ((), "float64")]),
        (GROUPED, {"lhs": struct(9, 4), "rhs": struct(3, 4, 6)}, [((9, 6), "float32")]),
        (GROUPED, {"lhs": struct(9, 4), "rhs": struct(3, 6, 4), "transposed": True}, [((9, 6), "float32")]),
        (GROUPED, {"lhs": struct(9, 4), "rhs": struct(3, 4, 6), "gated": True}, [((9, 3), "float32")]),
        (SCORES, {"query": QUERY, "key": KEY}, [((4, 2, 5, 7), "float32")]),
        (
            Axes(
                {"x": "dim"},
                {"a": "dim/128", "b": "2*dim", "c": "3"},
                whole="dim",
                dtypes={"a": "int32", "b": lambda a: a["dtype"]},
            ),
            {"x": struct(300), "dtype": "float16"},
            [((3,), "int32"), ((600,), "float16"), ((3,), "float32")],
        ),
        (STEPS, {"ids": struct(4, dtype="int32"), "x": struct(4, 3, dtype="float64")}, [((4,), "float64")]),
        (STEPS, {"ids": struct(4, dtype="int32"), "x": struct(4, 3, dtype="bfloat16")}, [((4,), "float32")]),
        (STEPS, {"ids": struct(4, dtype="int32"), "x": struct(4, 3, dtype="int8")}, [((4,), "float32")]),
        (STEPS, {"ids": struct(4, dtype="int32"), "x": struct(4, 3, dtype="float8_e4m3fn")}, [((4,), "float32")]),
        (
            Axes({"x": "n"}, {"a": "n", "b": "n"}, whole="n", dtypes={"a": jnp.int8, "b": itemgetter("dtype")}),
            {"x": struct(3), "dtype": "float16"},
            [((3,), "int8"), ((3,), "float16")],
        ),
    ],
)
def test_shapes_and_dtypes(axes: Axes, arguments: dict[str, Any], results: Any) -> None:
    assert shapes(axes.outputs(arguments)) == results


@pytest.mark.parametrize("ends", [np.array([0, 9]), struct(2, dtype="int32")])
@pytest.mark.parametrize("axis", ["data", 0, False])
def test_the_axes_of_a_call_depend_on_what_it_has(ends: Any, axis: Any) -> None:
    """By identity with None: an array is equal to nothing, and 0 and False are given."""
    assert shapes(TOKENS.outputs({"x": struct(9, 8), "ends": ends, "axis": None})) == [((9,), "float32")]
    assert shapes(TOKENS.outputs({"x": struct(3, 9, 8), "ends": None})) == [((3, 9), "float32")]
    assert shapes(TOKENS.outputs({"x": struct(9, 8), "ends": ends, "axis": axis})) == [((8,), "float32")]
    with pytest.raises(ValueError, match=re.escape("x: takes (tokens, dim); got shape (3, 9, 8)")):
        TOKENS.outputs({"x": struct(3, 9, 8), "ends": ends})
    (gradient,) = TOKENS.backward().outputs({"x": struct(9, 8), "ends": ends, "wrt": ("x",)})
    assert gradient.shape == (9, 8)
    assert TOKENS.backward().layouts({"ends": ends})["d_out"] == TOKENS.layouts({"ends": ends})["out"]


def test_a_condition_of_a_value_takes_arrays_of_other_options() -> None:
    arguments = {"lhs": struct(9, 4), "rhs": struct(3, 4, 6), "transposed": np.array([True, False])}
    assert shapes(GROUPED.outputs(arguments)) == [((9, 6), "float32")]
    by_dtype = Axes({"x": "n"}, {"out": "n"}, whole="n", when={("dtype", np.dtype("int8")): {"out": "2*n"}})
    for dtype, length in ((jnp.int8, 6), ("int8", 6), (np.zeros(2), 3), ("int4", 3), (None, 3)):
        assert by_dtype.outputs({"x": struct(3), "dtype": dtype})[0].shape == (length,)


def test_a_result_whose_size_no_array_has_is_refused() -> None:
    axes = Axes({"x": "n", "y": "m"}, {"out": "n m"}, whole="n m")
    with pytest.raises(ValueError, match="out: no array of the call has the size of m"):
        axes.outputs({"x": struct(3), "y": None})


def test_gradients_have_the_shapes_and_dtypes_of_their_arrays() -> None:
    backward = NORM.backward()
    arguments = {
        "x": struct(2, 8, dtype="bfloat16"),
        "weight": struct(8),
        "out": struct(2, 8),
        "rstd": struct(2),
        "d_rstd": None,
    }
    assert tuple(backward.arrays) == ("x", "weight", "out", "rstd", "d_out", "d_rstd")
    assert shapes(backward.outputs({**arguments, "wrt": ("weight", "x")})) == [((8,), "float32"), ((2, 8), "bfloat16")]
    with pytest.raises(ValueError, match="rstd: leading axes must be"):
        backward.canonical({**arguments, "rstd": struct(3), "wrt": ("x",)})


# -- tuning ----------------------------------------------------------------------------------------------------------


def test_a_bucket_rounds_the_axes_that_count() -> None:
    arguments = {
        "query": struct(5, 3, 4, 8),
        "key": struct(3, 9, 2, 8),
        "bias": struct(1, 5, 1),
        "ends": struct(4),
        "causal": True,
    }
    bucket = {
        "query": struct(8, 3, 4, 8),
        "key": struct(3, 16, 2, 8),
        "bias": struct(1, 8, 1),
        "ends": struct(4),
        "causal": True,
    }
    assert SCORES.bucket(arguments) == bucket
    assert NORM.bucket({"x": struct(0, 48), "weight": None}) == {"x": struct(1, 48), "weight": None}


def test_a_bucket_has_one_axis_for_all_leading_axes_that_count() -> None:
    for shape in ((5, 9), (45,), (3, 3, 5), (64,)):
        call = {"x": struct(*shape, 48), "weight": struct(48), "rstd": struct(*shape)}
        assert NORM.backward().bucket(call) == {"x": struct(64, 48), "weight": struct(48), "rstd": struct(64)}
    assert NORM.bucket({"x": struct(48), "weight": None})["x"] == struct(1, 48)
    exact = attrs.evolve(NORM, rounded="")
    assert exact.bucket({"x": struct(5, 9, 48)})["x"] == struct(45, 48)
    assert operation(axes=exact).tuning_key is not None
    batched = Axes({"x": "batch ... dim"}, {"out": "batch ... dim"}, whole="... batch dim", counts="batch ...")
    assert batched.bucket({"x": struct(3, 5, 9, 48)})["x"] == struct(4, 64, 48)
    separate = attrs.evolve(batched, counts="batch", rounded="batch")
    assert separate.bucket({"x": struct(3, 5, 9, 48)})["x"] == struct(4, 5, 9, 48)


def test_without_axes_that_count_there_is_no_tuning_key() -> None:
    uncounted = Axes({"x": "n"}, {"y": "n"}, whole="n")
    assert Operation(name="f", signature=lambda x: None, axes=uncounted).tuning_key is None
    assert operation().tuning_key is not None


def test_axes_that_count() -> None:
    arguments = {"query": QUERY, "key": KEY, "bias": struct(1, 5, 1), "ends": struct(3)}
    assert SCORES.counted(arguments) == {
        "query": ("q_len", "batch", None, None),
        "key": ("batch", "kv_len", None, None),
        "bias": (None, "q_len", None),  # the ones of a broadcast axis
        "ends": ("batch+1",),
    }
    assert NORM.counted({"x": struct(5, 9, 48), "weight": struct(48)}) == {
        "x": ("...0", "...1", None),
        "weight": (None,),
    }
    assert NORM.counted({"x": struct(64, 48), "weight": None}) == {"x": ("...", None)}  # as in a bucket
    assert NORM.counted({"x": struct(48), "weight": None}) == {"x": (None,)}
    assert attrs.evolve(NORM, counts="dim", rounded="").counted({"x": struct(5, 9, 48)}) == {"x": (None, None, "dim")}
    batched = Axes({"x": "batch ..."}, {"out": "batch ..."}, whole="batch ...", counts="...")
    assert batched.counted({"x": struct(3, 5, 9)}) == {"x": (None, "...0", "...1")}


def test_a_bucket_with_other_sizes() -> None:
    arguments = {"query": QUERY, "key": KEY, "bias": struct(1, 5, 1), "ends": struct(3)}
    shapes = {name: array.shape for name, array in SCORES.bucket(arguments).items()}
    resized = SCORES.with_sizes(arguments, {"batch": 7, "q_len": 11, "batch+1": 8, "other": 5})
    expected = {**shapes, "query": (11, 7, *shapes["query"][2:]), "key": (7, *shapes["key"][1:]), "ends": (8,)}
    assert {name: array.shape for name, array in resized.items()} == {**expected, "bias": (1, 11, 1)}
    assert NORM.with_sizes({"x": struct(5, 9, 48), "weight": None}, {"...": 6}) == {"x": struct(6, 48)}


def test_bytes_of_a_call() -> None:
    arguments = {"x": struct(4, 8, dtype="bfloat16"), "weight": struct(8), "epsilon": 1e-6}
    assert NORM.bytes(arguments) == 4 * 8 * 2 + 8 * 4 + 4 * 8 * 2 + 4 * 4
    assert operation().cost(arguments) == Cost(0.0, NORM.bytes(arguments))
    for dtype, size in (("int4", 16), ("uint2", 8), ("float4_e2m1fn", 16), ("int8", 32), ("bool", 32)):
        axes = Axes({"x": "n m"}, {"out": ""}, whole="n m", dtypes={"out": "float32"})
        assert axes.bytes({"x": struct(4, 8, dtype=dtype)}) == size + 4


def test_samples() -> None:
    arguments = {
        "x": struct(64, 64, dtype="bfloat16"),
        "y": struct(64, 64),
        "seen": struct(64, 64, dtype="bool"),
        "ids": struct(9, dtype="int32"),
        "key": jax.ShapeDtypeStruct((2,), jax.random.key(0).dtype),
        "epsilon": 1e-6,
        "given": np.ones(3),
    }
    samples = NORM.samples(arguments, jax.random.key(0))
    assert {name: (v.shape, v.dtype) for name, v in samples.items() if hasattr(v, "shape")} == {
        name: (v.shape, v.dtype) for name, v in arguments.items() if hasattr(v, "shape")
    }
    assert abs(float(samples["x"].astype("float32").std()) - 1) < 0.1
    assert not np.allclose(samples["x"].astype("float32"), samples["y"], atol=0.1)
    assert 0.85 < np.mean(samples["seen"]) < 0.95
    assert not samples["ids"].any()
    assert samples["epsilon"] == 1e-6
    assert samples["given"] is arguments["given"]


# -- partitioning ----------------------------------------------------------------------------------------------------


def test_a_call_is_partitioned_along_independent_axes() -> None:
    rule = SCORES.partitioning({"query": struct(5, 2, 4, 8), "key": KEY, "bias": struct(2, 1, 7), "ends": struct(3)})
    assert rule.arrays == {
        "query": (("q_len",), ("batch",), ("kv_heads", "heads/kv_heads"), ("dim",)),
        "key": (("batch",), ("kv_len",), ("kv_heads",), ("dim",)),
        "bias": (("batch",), ("bias.1",), ("kv_len",)),
        "ends": (("ends.0",),),
    }
    assert rule.results == {"scores": (("kv_heads", "heads/kv_heads"), ("batch",), ("q_len",), ("kv_len",))}
    assert rule.sizes["kv_heads"] == rule.sizes["heads/kv_heads"] == 2
    assert rule.whole == {"q_len", "kv_len", "dim", "bias.1", "ends.0"}
    assert rule.sums == {}


def test_partitioning_with_as_many_key_heads_as_heads_and_with_one() -> None:
    equal = SCORES.partitioning({"query": QUERY, "key": struct(2, 7, 4, 8)})
    assert equal.arrays["query"][2] == equal.arrays["key"][2] == ("kv_heads",)
    one = SCORES.partitioning({"query": QUERY, "key": struct(2, 7, 1, 8)})
    assert (one.arrays["query"][2], one.arrays["key"][2]) == (("heads",), ("kv_heads",))
    assert not one.whole & {"heads", "kv_heads"}


def test_the_gradient_of_a_broadcast_array_is_a_sum() -> None:
    arguments = {"query": QUERY, "key": KEY, "bias": struct(1, 5, 7), "scores": struct(4, 2, 5, 7)}
    rule = SCORES.backward().partitioning({**arguments, "wrt": ("query", "key", "bias")})
    assert {name: {*over} for name, over in rule.sums.items()} == {
        "key": {"heads/kv_heads"},
        "bias": {"batch", "kv_heads", "heads/kv_heads"},
    }


def test_an_axis_that_a_result_lacks_is_whole() -> None:
    mean = Axes({"x": "... dim"}, {"loss": ""}, independent="...", whole="dim", vmap="...")
    assert mean.partitioning({"x": struct(2, 3, 4)}).whole == {"...0", "...1", "dim"}
    assert mean.fold({"x": struct(9, 3, 4)}, frozenset({"x"}), 9) is None
    backward = {"x": struct(9, 3, 4), "loss": struct(), "d_loss": struct(), "wrt": ("x",)}
    assert mean.backward().fold(backward, frozenset({"x"}), 9) is None
    gated = GROUPED.partitioning({"lhs": struct(9, 4), "rhs": struct(3, 4, 6), "gated": True})
    assert "n" in gated.whole
    assert "n" not in GROUPED.partitioning({"lhs": struct(9, 4), "rhs": struct(3, 4, 6)}).whole


def test_an_axis_of_only_a_broadcast_array_is_whole() -> None:
    axes = Axes({"x": "n", "scale": "#heads", "heads": "heads"}, {"out": "n"}, independent="n heads")
    rule = axes.partitioning({"x": struct(4), "scale": struct(2), "heads": None})
    assert rule.arrays == {"x": (("n",),), "scale": (("scale.0",),)}
    assert rule.whole == {"scale.0"}


def test_interleaved_pairs_are_partitioned_together() -> None:
    axes = Axes({"pages": "pages 2*heads"}, {"out": "heads"}, independent="heads", whole="pages")
    rule = axes.partitioning({"pages": struct(5, 6)})
    assert rule.arrays["pages"] == (("pages",), ("heads", "2*heads"))
    assert (rule.sizes["heads"], rule.sizes["2*heads"]) == (3, 2)
    assert rule.whole == {"pages", "2*heads"}
    assert PAIRS.partitioning({"key": struct(9, 3), "pages": None}).results == {
        "new_pages": (("n",), ("heads", "2*heads"))
    }


@pytest.mark.parametrize(
    ("axes", "shapes", "options", "specs", "expected"),
    [
        (NORM, {"x": (2, 4, 8), "weight": (8,)}, {}, ["a.b", "."], ["a..", "a."]),
        (NORM, {"x": (2, 4, 8), "weight": (8,)}, {}, ["a..", "b"], ["a..", "a."]),
        (NORM, {"x": (2, 3, 8), "weight": (8,)}, {}, ["ab.", "."], ["a..", "a."]),
        (GROUPED, {"lhs": (8, 4), "rhs": (2, 4, 6)}, {}, ["a.", "..b"], [".b"]),
        (GROUPED, {"lhs": (8, 4), "rhs": (2, 4, 6)}, {"gated": True}, ["..", "..b"], [".."]),
        # The keys' length is whole: if the keys are sharded along it, they are gathered.
        (SCORES, {"query": (5, 2, 4, 8), "key": (2, 7, 2, 8)}, {}, [".a..", "ab.."], [".a.."]),
        # Pairs stay together; an axis with one entry more, or of blocks, cannot be divided as its name is.
        (PAIRS, {"key": (4, 2)}, {}, ["ab"], ["ab"]),
        (PAIRS, {"key": (4, 2), "pages": (4, 4)}, {}, ["..", "ab"], ["ab"]),
        (ENDS, {"x": (4, 4)}, {}, ["ab"], [".b"]),
        # The heads of the results are sharded as the key heads, and as the heads where these are more.
        (SCORES, {"query": (5, 2, 4, 8), "key": (2, 7, 2, 8)}, {}, ["....", "..a."], ["a..."]),
    ],
)
def test_results_are_sharded_along_the_axes_that_arrays_share(
    axes: Axes, shapes: Any, options: Any, specs: Any, expected: Any
) -> None:
    rule = axes.partitioning({**{name: struct(*shape) for name, shape in shapes.items()}, **options})
    shards = rule.shards({"a": 2, "b": 2}, [mesh_axes(spec) for spec in specs])
    assert shards.specs_of_results == tuple(map(mesh_axes, expected))


def mesh_axes(letters: str) -> tuple[tuple[str, ...], ...]:
    return tuple(() if letter == "." else (letter,) for letter in letters)


# -- calls -----------------------------------------------------------------------------------------------------------


def norm(x, weight=None, *, epsilon=1e-6): ...


def operation(**fields: Any) -> Operation:
    return Operation(**{"name": "norm", "signature": norm, "axes": NORM, **fields})


def normalise(x: Any, weight: Any, epsilon: float) -> tuple[Any, Any]:
    rstd = jax.lax.rsqrt(jnp.mean(x * x, axis=-1) + epsilon)
    out = x * rstd[..., None]
    return (out if weight is None else out * weight), rstd


def kernel_and_shapes(run: Any) -> tuple[Any, list[Any]]:
    """A kernel, and the shapes of the first argument of the calls that it chose a configuration for."""
    shapes: list[Any] = []

    @hookimpl
    def heuristic_cfg(inv):
        shapes.append(next(iter(inv.arguments.values())).shape)

    @hookimpl
    def run_backend(inv, cfg):
        return run(inv)

    return SimpleNamespace(heuristic_cfg=heuristic_cfg, run_backend=run_backend, PLATFORMS={"cpu": 1}), shapes


@pytest.fixture
def norms() -> tuple[Registry, list[Any]]:
    """An operation with only a name, a signature and axes, and one kernel."""
    registry = Registry(plugins="")
    reference, shapes = kernel_and_shapes(lambda inv: normalise(inv["x"], inv["weight"], inv["epsilon"]))
    registry.register(operation())
    registry.register(reference, "norm.reference")
    return registry, shapes


def test_an_operation_needs_only_a_name_a_signature_and_axes(norms: Any) -> None:
    registry, _ = norms
    x, weight = normal(0, 2, 5, 8), normal(1, 8)
    expected = normalise(x, weight, 1e-6)
    assert_close(registry.call("norm", x, weight), expected)
    assert_close(jax.jit(lambda *a: registry.call("norm", *a))(x, weight), expected)
    assert_close(registry.call("norm", x, epsilon=0.5), normalise(x, None, 0.5))
    gradient = jax.grad(lambda x, w: registry.call("norm", x, w)[0].sum(), (0, 1))(x, weight)
    assert_close(gradient, jax.grad(lambda x, w: normalise(x, w, 1e-6)[0].sum(), (0, 1))(x, weight))
    with pytest.raises(ValueError, match="weight: dim must be 8, as in x; got 7"):
        registry.call("norm", x, normal(1, 7))
    assert registry.plan("norm", x, weight).invocation.operation.results == ("out", "rstd")


def looped(function: Any, arrays: tuple[Any, ...], axes: tuple[Any, ...]) -> Any:
    parts = [
        function(*(a if axis is None else jnp.take(a, i, axis) for a, axis in zip(arrays, axes, strict=True)))
        for i in range(SIZE)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts)


@pytest.mark.parametrize(
    ("axes", "shape"),
    [((0, None), (SIZE, 2, 5, 8)), ((1, None), (SIZE, 2, 5, 8)), ((None, 0), (2, 5, 8)), ((0, 0), (2, 5, 8))],
)
def test_a_mapped_call_with_leading_axes(norms: Any, axes: Any, shape: Any) -> None:
    registry, shapes = norms
    arrays = tuple(
        a if axis is None else jnp.stack([a + i for i in range(SIZE)], axis)
        for a, axis in zip((normal(0, 2, 5, 8), normal(1, 8)), axes, strict=True)
    )
    actual = jax.vmap(lambda *a: registry.call("norm", *a), axes)(*arrays)
    assert_close(actual, looped(lambda *a: normalise(*a, 1e-6), arrays, axes))
    assert {*shapes} == {shape}


def test_a_mapped_call_without_leading_axes(norms: Any) -> None:
    registry, shapes = norms
    x = normal(0, SIZE, 8)
    assert_close(jax.vmap(lambda x: registry.call("norm", x, epsilon=0.1))(x), normalise(x, None, 0.1))
    assert {*shapes} == {(SIZE, 8)}


def grouped(lhs, rhs, sizes, scale=None, *, transposed=False, gated=False): ...


def products(inv: Any) -> tuple[Any]:
    rhs = inv["rhs"].swapaxes(1, 2) if inv["transposed"] else inv["rhs"]
    rows = jnp.repeat(jnp.arange(len(rhs)), inv["sizes"], total_repeat_length=len(inv["lhs"]))
    out = jnp.einsum("mk,mkn->mn", inv["lhs"], rhs[rows])
    return (out if inv["scale"] is None else out * inv["scale"],)


def test_a_grouped_product() -> None:
    registry = Registry(plugins="")
    registry.register(Operation(name="grouped", signature=grouped, axes=GROUPED))
    reference, shapes = kernel_and_shapes(products)
    registry.register(reference, "grouped.reference")
    lhs, rhs, sizes = normal(0, 9, 4), normal(1, 3, 4, 6), jnp.array([2, 0, 7])
    expected = jnp.concatenate([lhs[:2] @ rhs[0], lhs[2:] @ rhs[2]])
    assert_close(registry.call("grouped", lhs, rhs, sizes), expected)
    assert_close(
        registry.call("grouped", lhs, rhs.swapaxes(1, 2), sizes, jnp.ones(1) * 3, transposed=True), 3 * expected
    )
    gradient = jax.jit(jax.grad(lambda *a: registry.call("grouped", *a, sizes).sum(), (0, 1)))(lhs, rhs)
    assert_close(gradient[1], jnp.stack([jnp.outer(rows.sum(0), jnp.ones(6)) for rows in (lhs[:2], lhs[:0], lhs[2:])]))
    # Rows and groups are whole: a mapped axis can be folded into neither.
    shapes.clear()
    actual = jax.vmap(lambda *a: registry.call("grouped", *a, sizes))(jnp.stack([lhs, lhs + 1]), jnp.stack([rhs, rhs]))
    assert_close(actual[0], expected)
    assert_close(actual[1], registry.call("grouped", lhs + 1, rhs, sizes))
    assert {*shapes} == {(9, 4)}


def scores(query, key, bias=None, ends=None): ...


def reference_scores(query: Any, key: Any, bias: Any = None) -> Any:
    grouped_query = query.reshape(*query.shape[:2], key.shape[2], -1, query.shape[-1])
    result = jnp.einsum("tbkgd,bskd->kgbts", grouped_query, key)
    result = result.reshape(query.shape[2], *result.shape[2:])
    return result if bias is None else result + bias


def score_gradients(inv: Any) -> tuple[Any, ...]:
    arrays = {name: inv[name] for name in ("query", "key", "bias") if inv[name] is not None}
    _, vjp = jax.vjp(
        lambda inputs: reference_scores(**{**arrays, **inputs}), {name: arrays[name] for name in inv["wrt"]}
    )
    (gradients,) = vjp(inv["d_scores"])
    return tuple(gradients[name] for name in inv["wrt"])


@pytest.fixture
def score_registry() -> tuple[Registry, list[Any], list[Any]]:
    """An operation, and the backward operation that the core derives from it."""
    registry = Registry(plugins="")
    forward = Operation(name="scores", signature=scores, axes=SCORES, backward="scores_bwd")
    reference, shapes = kernel_and_shapes(lambda inv: (reference_scores(inv["query"], inv["key"], inv["bias"]),))
    reference_bwd, shapes_bwd = kernel_and_shapes(score_gradients)
    for plugin, name in ((reference, "scores.reference"), (reference_bwd, "scores_bwd.reference")):
        registry.register(plugin, name)
    registry.register(forward)
    registry.register(forward.gradients())
    return registry, shapes, shapes_bwd


TQ, TK, BATCH = 5, 7, 2
UNFOLDED, FOLDED = (TQ, BATCH, 4, 8), (TQ, SIZE * BATCH, 4, 8)
MAPPED_AXES = {
    "all": ((0, 0, 0), (BATCH, TQ, TK), FOLDED, UNFOLDED),
    "queries": ((0, None, None), (), FOLDED, UNFOLDED),
    "queries, last": ((4, None, None), (1, TK), FOLDED, UNFOLDED),
    "keys": ((None, 2, None), (1, TQ, 1), FOLDED, UNFOLDED),
    "bias of 1": ((None, None, 0), (1, TQ, TK), FOLDED, UNFOLDED),
    "bias of the batch": ((None, None, 0), (BATCH, 1, TK), FOLDED, UNFOLDED),
    "without bias": ((0, 0, None), None, FOLDED, FOLDED),
    "queries without bias": ((1, None, None), None, FOLDED, FOLDED),
}


@pytest.mark.parametrize("name", MAPPED_AXES)
def test_a_mapped_call_with_a_batch(score_registry: Any, name: str) -> None:
    registry, shapes, shapes_bwd = score_registry
    axes, bias, forward, backward = MAPPED_AXES[name]
    unmapped = (normal(0, TQ, BATCH, 4, 8), normal(1, BATCH, TK, 2, 8), *(() if bias is None else (normal(2, *bias),)))
    axes = axes[: len(unmapped)]
    arrays = tuple(
        a if axis is None else jnp.stack([a * (i + 1) for i in range(SIZE)], axis)
        for a, axis in zip(unmapped, axes, strict=True)
    )
    assert_close(
        jax.vmap(lambda *a: registry.call("scores", *a), axes)(*arrays), looped(reference_scores, arrays, axes)
    )
    assert {*shapes} == {forward}

    def gradients(function: Any) -> Any:
        return jax.grad(lambda *a: (function(*a) ** 2).sum(), range(len(unmapped)))

    actual = jax.vmap(gradients(lambda *a: registry.call("scores", *a)), axes)(*arrays)
    assert_close(actual, looped(gradients(reference_scores), arrays, axes))
    assert {*shapes_bwd} == {backward}


def test_a_batch_with_boundaries_is_not_folded() -> None:
    arguments = {"query": jnp.ones((SIZE, *UNFOLDED)), "key": jnp.ones((BATCH, TK, 2, 8))}
    mapped = frozenset({"query"})
    assert SCORES.fold({**arguments, "ends": None}, mapped, SIZE) is not None
    assert SCORES.fold({**arguments, "ends": jnp.arange(BATCH + 1)}, mapped, SIZE) is None


def test_an_empty_batch_is_folded() -> None:
    folded = SCORES.fold(
        {"query": jnp.ones((SIZE, TQ, 0, 4, 8)), "key": jnp.ones((0, TK, 2, 8)), "bias": jnp.ones((SIZE, 1, TQ, TK))},
        frozenset({"query", "bias"}),
        SIZE,
    )
    assert {name: array.shape for name, array in folded[0].items()} == {
        "query": (TQ, 0, 4, 8),
        "key": (0, TK, 2, 8),
        "bias": (0, TQ, TK),
    }
    (result,) = folded[1]((jnp.ones((4, 0, TQ, TK)),))
    assert result.shape == (SIZE, 4, 0, TQ, TK)


def test_the_derived_backward_checks_its_arguments(score_registry: Any) -> None:
    registry, *_ = score_registry
    query, key = normal(0, TQ, BATCH, 4, 8), normal(1, BATCH, TK, 2, 8)
    out = registry.call("scores", query, key)
    arguments = {"query": query, "key": key, "bias": normal(2, TK), "scores": out, "d_scores": out}
    query_gradient, bias_gradient = registry.call("scores_bwd", **arguments, wrt=("query", "bias"))
    assert (query_gradient.shape, bias_gradient.shape) == (query.shape, (TK,))
    assert_close(bias_gradient, out.sum((0, 1, 2)))
    for change, error, message in (
        ({"scores": out[0]}, ValueError, "scores: takes the forward's shape (4, 2, 5, 7); got (2, 5, 7)"),
        ({"d_scores": out.astype("int32")}, TypeError, "d_scores: takes the forward's dtype float32; got int32"),
        ({"wrt": ("query", "query")}, ValueError, "wrt: takes each name once; got query more often"),
        (
            {"wrt": ("qery",)},
            ValueError,
            "wrt: takes a tuple of names among ('query', 'key', 'bias', 'ends'); got ('qery',)",
        ),
        ({"bias": None, "wrt": ("bias",)}, ValueError, "wrt: names bias, which the call does not have"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            registry.call("scores_bwd", **{**arguments, "wrt": ("query",), **change})


ELEMENTWISE = Axes({"gate": "...", "up": "..."}, {"out": "..."}, independent="...", vmap="...", counts="...")


def swiglu(gate, up, *, limit=None): ...


def swiglu_operation() -> Operation:
    return Operation(name="swiglu", signature=swiglu, axes=ELEMENTWISE, backward="swiglu_bwd")


def product(inv: Any) -> Any:
    return jax.nn.silu(inv["gate"]) * inv["up"]


@pytest.mark.parametrize("returned", [lambda out: out, lambda out: (out,), lambda out: [out]])
def test_a_reference_with_one_result_returns_the_array_or_a_tuple(returned: Any) -> None:
    forward, registry = swiglu_operation(), Registry(plugins="")
    registry.register(forward)
    registry.register(forward.gradients())
    registry.register(kernel_and_shapes(lambda inv: returned(product(inv)))[0], "swiglu.reference")
    registry.register(
        kernel_and_shapes(lambda inv: forward.gradients_by_jax(lambda a: returned(product(a)), inv))[0],
        "swiglu_bwd.reference",
    )
    gate, up = normal(0, 2, 5), normal(1, 2, 5)
    assert_close(registry.call("swiglu", gate, up), jax.nn.silu(gate) * up)
    gradients = jax.grad(lambda *arrays: registry.call("swiglu", *arrays).sum(), (0, 1))(gate, up)
    assert_close(gradients, jax.grad(lambda gate, up: (jax.nn.silu(gate) * up).sum(), (0, 1))(gate, up))


def test_gradients_by_jax_name_a_wrong_number_of_results() -> None:
    arguments = {"gate": normal(0, 2, 5), "up": normal(1, 2, 5), "d_out": jnp.ones((2, 5)), "wrt": ("gate",)}
    message = "swiglu: gradients_by_jax takes a function that returns (out); it returned (float32[2,5], NoneType)"
    with pytest.raises(PluginError, match=re.escape(message)):
        swiglu_operation().gradients_by_jax(lambda a: (product(a), None), arguments)


def test_a_backward_operation_needs_a_name_and_axes() -> None:
    for incomplete in (operation(), Operation(name="norm", signature=norm, backward="norm_bwd")):
        with pytest.raises(
            ValueError, match="norm: gradients follow from 'axes', and 'backward' names their operation"
        ):
            incomplete.gradients()


def raised_by_prepare(fault: Exception) -> Exception:
    def prepare(arguments: Any) -> Any:
        raise fault

    registry = Registry(plugins="")
    registry.register(operation(prepare=prepare))
    with pytest.raises(type(fault)) as caught:
        registry.plan("norm", struct(2, 8))
    return caught.value


@pytest.mark.parametrize("fault", [TypeError("'>' not supported"), ValueError("limit: too large")])
def test_the_message_of_a_wrong_argument_begins_with_the_operation(fault: Exception) -> None:
    message = str(fault)
    assert raised_by_prepare(fault) is fault
    assert str(fault) == f"norm: {message}"
    assert str(raised_by_prepare(fault)) == f"norm: {message}"  # once


@pytest.mark.parametrize("fault", [KeyError("limit"), ValueError("limit", 3), UnicodeError("limit")])
def test_another_exception_of_prepare_has_a_note_with_the_operation(fault: Exception) -> None:
    arguments = fault.args
    assert raised_by_prepare(fault) is fault
    assert fault.args == arguments
    assert fault.__notes__[0] == "in prepare of norm"


def test_an_error_for_a_wrong_shape_begins_with_the_operation() -> None:
    registry = Registry(plugins="")
    registry.register(operation())
    with pytest.raises(ValueError, match="^norm: weight: dim must be 8, as in x; got 5"):
        registry.plan("norm", struct(2, 8), struct(5))


@pytest.mark.parametrize(("results", "count"), [({"out": "..."}, 1), ({"out": "...", "rest": "..."}, 2)])
def test_the_function_that_prepare_returns_gets_a_tuple(results: dict[str, str], count: int) -> None:
    def prepare(arguments: Any) -> Any:
        return arguments, lambda results: {"results": results}

    axes = Axes({"x": "..."}, results, independent="...")
    registry = Registry(plugins="")
    registry.register(Operation(name="copies", signature=lambda x: None, axes=axes, prepare=prepare))
    copies = kernel_and_shapes(lambda inv: inv["x"] if count == 1 else (inv["x"],) * count)[0]
    registry.register(copies, "copies.reference")
    returned = registry.call("copies", jnp.ones(3))
    assert isinstance(returned["results"], tuple)
    assert len(returned["results"]) == count


def test_fields_of_an_operation_override_what_its_axes_imply() -> None:
    norm = operation(tuning_key=lambda a: "mine", fold=None, cost=lambda a: Cost(1.0, 2.0), results=("y", "r"))
    assert norm.tuning_key({}) == "mine"
    assert norm.fold is None
    assert norm.cost({}) == Cost(1.0, 2.0)
    assert norm.results == ("y", "r")
    assert norm.arrays == ("x", "weight")
