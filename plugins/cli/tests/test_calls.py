"""A call described by words, for operations of the project and for some made here."""

from __future__ import annotations

import click
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_core
from ejkernel_cli import Failure, parse_call
from ejkernel_cli._calls import literal
from ejkernel_core import Axes, Example, Operation, Registry
from ejkernel_ops.ragged_paged_attention.tiles import metadata_length
from ejkernel_tuning._samples import sample_inputs


def shapes(operation: str, line: str) -> dict[str, tuple[int, ...]]:
    return {name: array.shape for name, array in parse_call(operation, line.split()).arrays.items()}


def dtypes(operation: str, line: str) -> dict[str, str]:
    return {name: str(array.dtype) for name, array in parse_call(operation, line.split()).arrays.items()}


def options(operation: str, line: str) -> dict[str, object]:
    return parse_call(operation, line.split()).options


def complaint(operation: str, line: str) -> str:
    with pytest.raises(click.UsageError) as error:
        parse_call(operation, line.split())
    assert "\n" not in error.value.message
    return error.value.message


@pytest.fixture
def registry(use_registry, monkeypatch):
    registry = Registry()
    use_registry(registry)
    return registry


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_the_other_arrays_of_attention_follow_from_the_first():
    expected = dict.fromkeys(("query", "key", "value"), (4, 256, 16, 128))
    assert shapes("flash_attention", "--shape 4x256x16x128") == expected
    assert shapes("flash_attention", "--query 4,256,16,128") == expected
    assert shapes("flash_attention", "--shape=4x256x16x128") == expected


def test_an_axis_has_the_size_that_a_given_array_has():
    line = "--shape 2x1x8x64 --key 2x4096x2x64"
    assert shapes("flash_attention", line)["value"] == (2, 4096, 2, 64)
    line = "--shape 2x7x8x64 --value 2x9x4x32"
    assert shapes("flash_attention", line) == {"query": (2, 7, 8, 64), "key": (2, 9, 4, 64), "value": (2, 9, 4, 32)}


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("half", "float16"), ("fp32", "float32")]
)
def test_a_short_name_of_a_dtype_is_understood(name: str, dtype: str):
    assert dtypes("rms_norm", f"--shape 3x4 --dtype {name}") == {"x": dtype}
    assert dtypes("rms_norm", f"--shape 3x4:{name} --dtype float64") == {"x": dtype}


def test_an_array_larger_than_any_is_refused():
    assert shapes("rms_norm", f"--shape 1x{2**61 - 1}")["x"] == (1, 2**61 - 1)
    for shape in (f"1x{2**61}", f"{2**40}x{2**40}", f"1x{10**30}"):
        assert complaint("rms_norm", f"--shape {shape}") == f"x: an array has less than 2**63 bytes; {shape} has more"


def test_a_packed_call_has_packed_arrays():
    line = "--shape 1024x8x64 --cum-seqlens-q 5 --cum_seqlens_k 5"
    expected = {**dict.fromkeys(("query", "key", "value"), (1024, 8, 64)), "cum_seqlens_q": (5,), "cum_seqlens_k": (5,)}
    assert shapes("flash_attention", line) == expected


def test_optional_arrays_are_present_only_if_named():
    assert [*shapes("rms_norm", "--shape 3x4x256")] == ["x"]
    assert shapes("rms_norm", "--shape 3x4x256 --weight 256") == {"x": (3, 4, 256), "weight": (256,)}


def test_a_backward_operation_gets_results_and_a_cotangent():
    expected = {
        **dict.fromkeys(("query", "out", "d_out"), (2, 60, 8, 64)),
        **dict.fromkeys(("key", "value"), (2, 60, 4, 64)),
        "lse": (2, 8, 60),
    }
    line = "--shape 2x60x8x64 --key 2x60x4x64 --wrt query,key --dtype bfloat16"
    assert shapes("flash_attention_bwd", line) == expected
    assert options("flash_attention_bwd", line) == {"wrt": ("query", "key")}
    assert dtypes("flash_attention_bwd", line)["lse"] == "float32"
    assert dtypes("flash_attention_bwd", line)["d_out"] == "bfloat16"
    assert shapes("rms_norm_bwd", "--shape 3x7x256 --wrt x")["rstd"] == (3, 7)


def test_the_parsed_call_can_be_explained():
    call = parse_call(
        "flash_attention", ["--shape", "2x60x8x64", "--key", "2x70x4x64", "--causal", "--sliding-window", "8,0"]
    )
    inv = ejkernel_core.plan(call.operation, **call.arguments).invocation
    assert (inv["causal"], inv["sliding_window"], inv["key"].shape) == (True, (8, 0), (2, 70, 4, 64))


CACHE = "--shape 6x8x64 --sequences 3 --cached 100"


def test_sizes_of_a_cache_stand_for_its_arrays():
    arrays = {"query": (6, 8, 64), "kv_lens": (3,), "block_tables": (3, 2), "query_start_loc": (4,)}
    assert shapes("ragged_paged_attention", CACHE) == {**arrays, "kv_pages": (6, 64, 16, 64)}
    line = f"{CACHE} --page-size 16 --kv-heads 2 --pair --pages 50 --planned --cache-dtype int8 --max-query-len 4"
    pair = dict.fromkeys(("key_pages", "value_pages"), (50, 16, 2, 64))
    expected = {**arrays, **pair, "block_tables": (3, 7), "metadata": (metadata_length(6, 3),)}
    assert shapes("ragged_paged_attention", line) == expected
    assert options("ragged_paged_attention", line) == {"max_query_len": 4}
    narrow = {name for name, dtype in dtypes("ragged_paged_attention", line).items() if dtype == "int8"}
    assert narrow == {*pair}
    assert dtypes("ragged_paged_attention", line)["block_tables"] == "int32"
    assert dtypes("ragged_paged_attention", f"{CACHE} --dtype float16")["kv_pages"] == "float16"
    assert shapes("update_kv_pages", "--shape 6x8x64 --pages 5")["kv_pages"] == (5, 64, 16, 64)
    line = "--shape 6x8x64 --pages 5 --page-size 4"
    assert shapes("update_kv_page_pair", line)["value_pages"] == (5, 4, 8, 64)


def test_an_array_that_is_given_is_that_of_the_call():
    assert shapes("ragged_paged_attention", f"{CACHE} --block-tables 3x9")["block_tables"] == (3, 9)


@pytest.mark.parametrize("line", [CACHE, f"{CACHE} --page-size 16 --kv-heads 2 --pair --planned"])
def test_calls_by_sizes_are_taken_and_have_valid_samples(line):
    call = parse_call("ragged_paged_attention", [*line.split(), "--dtype", "float32"])
    inv = ejkernel_core.invocation(call.operation, **call.arguments)
    assert ejkernel_core.plan(call.operation, **call.arguments).invocation["query"].shape == (6, 8, 64)
    ejkernel_core.call(call.operation, **sample_inputs(inv), validate=True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--shape 6x8x64 --sequences 3", "--sequences also needs --cached"),
        ("--shape 6x8x64 --page-size 3", "--page-size also needs --sequences and --cached"),
        ("--sequences 3 --cached 9", "the shape of query is missing"),
        ("--shape 6x8x64 --sequences 3 --cashed 9", "did you mean --cached?"),
        ("--shape 6x8x64 --sequences --cached 9", "--sequences takes a value"),
    ],
)
def test_sizes_that_are_missing_are_named(line, message):
    assert message in complaint("ragged_paged_attention", line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--shape 6x8x64 --sequences 3 --cached 0", "cached: takes a number from 1"),
        ("--shape 6x8x64 --sequences 3 --cached 9 --pages 1.5", "pages: takes an int"),
        ("--shape 6x8 --sequences 3 --cached 9", "query: takes (tokens, heads, head_dim); got shape (6, 8)"),
    ],
)
def test_wrong_sizes_are_refused_in_the_words_of_the_operation(line, message):
    with pytest.raises(Failure) as failure:
        parse_call("ragged_paged_attention", line.split())
    assert message in failure.value.message


@pytest.fixture
def mixture(registry):
    """An operation with axes of every kind: none but the rank of an array says what follows."""
    axes = Axes(
        {"x": "rows dim", "pairs": "2*dim", "labels": "rows", "table": "groups dim width", "bounds": "groups+1"},
        {"out": "rows"},
        independent="rows",
        whole="dim groups width",
        counts="rows",
    )

    def examples():
        def arguments(draw):
            ones = np.ones((2, 3))
            return {"x": ones, "pairs": np.ones(6), "labels": np.zeros(2, np.int32), "table": np.ones((1, 3, 1))}

        yield Example("small", "mixture", arguments)

    operation = Operation(
        name="mixture",
        signature=lambda x, pairs, labels, table=None, bounds=None, *, mode="sum", scale=1.0: None,
        axes=axes,
        examples=examples,
    )
    return registry.register(operation)


def test_factors_and_named_axes_are_followed(mixture):
    assert shapes("mixture", "--shape 5x8") == {"x": (5, 8), "pairs": (16,), "labels": (5,)}
    assert shapes("mixture", "--shape 5x8 --table 3x8x2 --bounds 4")["bounds"] == (4,)


def test_there_are_as_many_of_a_base_as_of_its_multiple(registry):
    axes = Axes(
        {"x": "heads dim", "y": "dim kv_heads"},
        {"out": "heads dim"},
        independent="heads kv_heads",
        whole="dim",
        multiples={"heads": "kv_heads"},
    )
    registry.register(Operation(name="turned", signature=lambda x, y: None, axes=axes))
    assert shapes("turned", "--shape 6x8")["y"] == (8, 6)


def test_the_examples_say_which_arrays_hold_integers(mixture):
    line = "--shape 5x8 --dtype float16"
    assert dtypes("mixture", line) == {"x": "float16", "pairs": "float16", "labels": "int32"}
    assert dtypes("mixture", f"{line} --labels 5:int16")["labels"] == "int16"
    line = "--shape 1x64x8x64 --attention-mask 1x1x64x64 --q-segment-ids 1x64 --kv-segment-ids 1x64 --dropout-seed 7"
    assert dtypes("flash_attention", line) == {
        **dict.fromkeys(("query", "key", "value"), "float32"),
        "attention_mask": "bool",
        "q_segment_ids": "int32",
        "kv_segment_ids": "int32",
        "dropout_seed": "int32",
    }
    assert shapes("flash_attention", line)["dropout_seed"] == ()


def test_an_array_that_does_not_follow_is_asked_for(registry):
    axes = Axes({"x": "rows k", "table": "groups k n"}, {"out": "rows n"}, independent="n", whole="rows k groups")
    registry.register(Operation(name="grouped", signature=lambda x, table: None, axes=axes))
    assert complaint("grouped", "--shape 5x8") == (
        "grouped: the shape of table does not follow from the others; pass --table with the lengths of (groups, k, n)"
    )
    assert shapes("grouped", "--shape 5x8 --table 2x8x3")["table"] == (2, 8, 3)
    assert complaint("moe_permute_matmul", "--shape 10x8 --rhs 4x8x6 --k 2") == (
        "moe_permute_matmul: the shapes of token_order, group_sizes do not follow from the others; pass --token-order "
        "with the lengths of (rows,), --group-sizes with the lengths of (all_groups,)"
    )


def test_a_number_is_the_value_of_an_array_of_one_number():
    line = "--shape 10x8 --rhs 4x8x6 --group-sizes 7 --group-offset 3"
    assert shapes("grouped_matmul", line)["group_offset"] == (1,)


def test_the_arrays_of_an_operation_without_axes_have_one_shape(registry):
    registry.register(Operation(name="both", signature=lambda x, y, *, shape=None: None))
    assert shapes("both", "--x 5x8 --shape 3") == {"x": (5, 8), "y": (5, 8)}
    assert options("both", "--x 5x8 --shape 3") == {"shape": 3}


# -- options -----------------------------------------------------------------------------------------------------------


def test_options_are_flags_or_literals():
    line = "--shape 1x4x2x8 --no-causal --sliding-window 128,0 --softmax-scale 0.5 --return_lse"
    expected = {"causal": False, "sliding_window": (128, 0), "softmax_scale": 0.5, "return_lse": True}
    assert options("flash_attention", line) == expected
    assert options("flash_attention", "--causal --shape 1x4x2x8") == {"causal": True}
    assert options("flash_attention", "--causal false --shape 1x4x2x8") == {"causal": False}
    assert options("rms_norm_quantized", "--shape 3x256 --quantize fp8_row") == {"quantize": "fp8_row"}
    assert options("rms_norm", "--shape 3x256 --weight-offset -1.0") == {"weight_offset": -1.0}


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("None", None), ("128, 0", (128, 0)), ("x,weight", ("x", "weight")), ("'1'", "1"), ("a-b", "a-b")],
)
def test_a_literal_is_one_of_python_or_a_text(text, value):
    assert literal(text) == value
    assert type(literal(text)) is type(value)


def test_the_dtype_is_that_of_floating_arrays_and_has_a_default():
    assert {*dtypes("flash_attention", "--shape 1x4x2x8").values()} == {"float32"}  # on a CPU, where tests run
    assert {*dtypes("flash_attention", "--shape 1x4x2x8 --dtype float16").values()} == {"float16"}
    line = "--shape 1x4x2x8 --bias 1x2x4x4:float32 --dtype bfloat16"
    assert dtypes("flash_attention", line)["bias"] == "float32"
    assert parse_call("rms_norm", ["--shape", "3x4", "--dtype", "bfloat16"]).arrays["x"].dtype == jnp.bfloat16


# -- wrong words -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "line", "message"),
    [
        ("flash_atention", "--shape 3", "no operation 'flash_atention' is installed; did you mean 'flash_attention'?"),
        ("--causal", "flash_attention", "the operation comes before its options; got '--causal' first"),
        ("flash_attention", "", "the shape of query is missing, as --shape 4x4096x16x128"),
        ("flash_attention", "--key 1x2x3x4", "the shape of query is missing"),
        ("flash_attention", "4x4", "'4x4' follows no option; a shape is given by --shape"),
        ("flash_attention", "--shape 4y4", "query takes a shape, as 4x4096x16x128"),
        ("flash_attention", "--shape -4x4", "query takes a shape, as 4x4096x16x128"),
        ("flash_attention", "--shape", "--shape takes a value"),
        (
            "flash_attention",
            "--shape 1x2x3x4 --dropout-prob 0.1 --dropout-seed x",
            "dropout_seed takes a number, as --dropout-seed 1, or with a dtype 1:int32; got 'x'",
        ),
        ("flash_attention", "--shape 1x2x3x4 --query 1x2x3x4", "--query: query is given twice"),
        ("flash_attention", "--shape 1x2x3x4 --scale 2", "no option --scale; did you mean --softmax-scale?"),
        ("flash_attention", "--shape 1x2x3x4 --casual", "no option --casual; did you mean --causal?"),
        ("rms_norm", "--shape 3x4 --zzz 1", "no option --zzz; it has --shape, --dtype, --x, --weight"),
        ("flash_attention", "--shape 1x2x3x4 --softmax-scale", "--softmax-scale takes a value"),
        ("context_attention", "--shape 1x2x3x4", "context_attention needs --axis with a value"),
        ("rms_norm_bwd", "--shape 3x4", "rms_norm_bwd needs --wrt with a value"),
        ("flash_attention", "--shape 1x2x3x4 --no-causal 1", "--no-causal takes no value; got '1'"),
        ("flash_attention", "--shape 1x2x3x4 --dtype bfloat", "'bfloat' is not a dtype; did you mean bfloat16?"),
        (
            "flash_attention",
            "--shape 1x2x3x4 --dtype fp8",
            "'fp8' stands for several dtypes: float8_e4m3fn and float8_e5m2",
        ),
        ("flash_attention", "--shape 1x2x3x4:zzz", "'zzz' is not a dtype, as bfloat16, float16, float32"),
    ],
)
def test_wrong_words_are_refused_by_what_to_write(operation, line, message):
    assert message in complaint(operation, line)
