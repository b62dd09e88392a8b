"""The tables "All names" of ``docs/from-ejkernel.md``: every name of ejKernel's documents has a row. The row's target can be imported and takes
the documented arguments. Documented values are those of this package, or the row says what differs.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_classes
import ejkernel_packed
from ejkernel_classes import BwdParams, FwdParams
from ejkernel_ops.calibration import estimate_shared_memory_bytes
from ejkernel_ops.numerics import log_sum_exp

PAGE = (Path(__file__).parents[3] / "docs/from-ejkernel.md").read_text()
SECTION = PAGE.partition("\n## All names\n")[2].partition("\n## Tried as written\n")[0]

#: The names that the four documents present as the interface. The documents are not in the repository.
FRAMEWORK = """
    ejkernel.ops ejkernel.ops.core.kernel ejkernel.ops.core.types ejkernel.ops.config.cache
    ejkernel.ops.config.persistent ejkernel.ops.config.selection ejkernel.ops.execution.executor
    ejkernel.ops.execution.batch ejkernel.ops.execution.tuning ejkernel.ops.registry ejkernel.ops.utils
    ejkernel.modules ejkernel.modules.flash_attention
    Kernel Kernel.name Kernel.run Kernel.run_triton Kernel.run_pallas Kernel.run_xla Kernel.custom_vjp
    Kernel.heuristic_cfg Kernel.config_space
    Invocation Invocation.kernel Invocation.args Invocation.kwargs Invocation.metadata Invocation.abstract_args
    Invocation.device_fingerprint
    Executor Executor.cfg ConfigSelectorChain ConfigSelectorChain.cache ConfigSelectorChain.persistent
    ConfigSelectorChain.autotune ConfigCache ConfigCache.put ConfigCache.get
    PersistentCache PersistentCache.path PersistentCache.put PersistentCache.get
    overlay_cache policy_override autotune benchmark autotune_recorded record_invocation get_invocations
    vmap_with_config pmap_with_config FwdParams BwdParams device_kind get_device_platform device_fingerprint
    sharding_fingerprint default_key_builder_with_sharding to_json from_json stable_json find_labels_in_lowered
    extract_labels_from_hlo_text labels_to_configs label Cfg Out AutotunePolicy ConfigChooser Autotuner
"""
UTILITIES = """
    ejkernel.xla_utils.utils ejkernel.ops.utils.fingerprint ejkernel.ops.utils.datacarrier ejkernel.callib
    prepare_lens prepare_lens_from_mask prepare_cu_seqlens_from_mask segment_ids_to_mask mask_to_segment_ids
    identity_dtype_convert device_fingerprint get_device_platform abstractify short_hash stable_json
    FwdParams.__hash__ FwdParams.to_dict FwdParams.merge BwdParams.__hash__ BwdParams.from_fwd_params
    estimate_shared_memory_bytes get_shared_memory_limit EJKERNEL_TRITON_SMEM_LIMIT select_num_warps select_num_stages
    chunk_array unchunk_array log_sum_exp safe_divide assert_allclose generate_attention_inputs timer get_memory_usage
"""
PACKED = """
    cdiv identity_dtype_convert prepare_chunk_indices prepare_chunk_offsets prepare_cu_seqlens_from_mask prepare_lens
    prepare_lens_from_mask prepare_position_ids prepare_sequence_ids prepare_token_indices
"""
CARRIERS = """
    BwdParams.blocksize_m BwdParams.blocksize_k BwdParams.blocksize_n BwdParams.q_blocksize BwdParams.kv_blocksize
    BwdParams.num_warps BwdParams.num_stages
    FwdParams.blocksize_m FwdParams.blocksize_k FwdParams.blocksize_n FwdParams.q_blocksize FwdParams.kv_blocksize
    FwdParams.blocksize_heads FwdParams.blocksize_keys FwdParams.num_key_splits FwdParams.num_warps
    FwdParams.num_stages get_safe_hash_int hash_fn
"""
NAMES = {*FRAMEWORK.split(), *UTILITIES.split(), *PACKED.split(), *CARRIERS.split(), "key in ConfigCache"}

#: The parameters of the documents' functions in their order, after those that are passed by position.
PARAMETERS = {
    "prepare_lens": "cu_seqlens", "prepare_lens_from_mask": "mask", "prepare_cu_seqlens_from_mask": "mask out_dtype",
    "prepare_position_ids": "cu_seqlens", "prepare_sequence_ids": "cu_seqlens", "prepare_token_indices": "cu_seqlens",
    "prepare_chunk_indices": "cu_seqlens chunk_size", "prepare_chunk_offsets": "cu_seqlens chunk_size", "cdiv": "a b",
    "segment_ids_to_mask": "segment_ids dtype return_separate_masks", "mask_to_segment_ids": "mask per_head",
    "identity_dtype_convert": "dtype", "get_safe_hash_int": "text algorithm", "BwdParams.from_fwd_params": "fwd scale",
    "FwdParams.merge": "base override",
    "estimate_shared_memory_bytes": "q_block kv_block head_dim dtype include_softmax",
    "select_num_warps": "q_block kv_block head_dim dtype", "select_num_stages": "smem_bytes",
    "chunk_array": "arr chunk_size axis pad_value", "unchunk_array": "arr original_length axis",
    "log_sum_exp": "x axis keepdims", "safe_divide": "numerator denominator min_denominator",
    "assert_allclose": "actual expected rtol atol equal_nan",
    "generate_attention_inputs": "batch_size seq_len num_heads head_dim dtype key", "timer": "name",
    "device_fingerprint": "dev", "get_device_platform": "dev", "abstractify": "pytree", "short_hash": "obj",
    "stable_json": "obj", "hash_fn": "self", "get_shared_memory_limit": "", "get_memory_usage": "", "device_kind": "",
    "FwdParams.to_dict": "self", "Kernel.name": "self name", "Kernel.custom_vjp": "self primals cfg kwargs cotangents",
    "Kernel.heuristic_cfg": "self inv", "Kernel.config_space": "self inv", "Invocation": "kernel args kwargs metadata",
    "ConfigSelectorChain": "cache persistent autotune", "PersistentCache": "path", "ConfigCache": "",
    "vmap_with_config": "kernel in_axes", "pmap_with_config": "kernel axis_name",
    "default_key_builder_with_sharding": "kernel args kwargs", "record_invocation": "kernel inv", "get_invocations": "",
    "FwdParams": "blocksize_m blocksize_k blocksize_n q_blocksize kv_blocksize blocksize_heads blocksize_keys "
    "num_key_splits num_warps num_stages",
    "BwdParams": "blocksize_m blocksize_k blocksize_n q_blocksize kv_blocksize num_warps num_stages",
}  # fmt: skip
#: Parameters that the documents pass by name to functions with further parameters.
BY_NAME = {
    "autotune": "configs num_warmup num_iters", "benchmark": "num_iters", "Executor.cfg": "cfg",
    "policy_override": "autotune",
}  # fmt: skip
DEFAULTS = {
    "estimate_shared_memory_bytes": (jnp.float16, True), "select_num_warps": (jnp.float16,), "chunk_array": (0, 0),
    "unchunk_array": (0,), "log_sum_exp": (None, False), "safe_divide": (1e-10,), "assert_allclose": (1e-5, 1e-8, True),
    "generate_attention_inputs": (2, 128, 8, 64, jnp.float32, None), "timer": ("Operation",),
    "segment_ids_to_mask": (jnp.bool_, False), "mask_to_segment_ids": (False,), "get_safe_hash_int": ("md5",),
    "BwdParams.from_fwd_params": (0.5,), "prepare_cu_seqlens_from_mask": (jnp.int32,),
    "device_fingerprint": (None,), "get_device_platform": (None,), "FwdParams": (None,) * 10, "BwdParams": (None,) * 7,
}  # fmt: skip


def rows() -> list[tuple[list[str], str, str]]:
    """(names, target, difference) of every row of the tables."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for line in SECTION.splitlines()
        if line[:1] == "|"
    ]
    table_rows = [row for row in cells if row != ["there", "here", "what differs, and why"] and set(row) != {"---"}]
    assert all(len(row) == 3 for row in table_rows), "a row has three cells"
    return [
        (re.findall(r"`([^`]+)`", names_cell), target_cell, difference)
        for names_cell, target_cell, difference in table_rows
    ]


def target(target_cell: str) -> Any:
    """The object that a cell such as `module:attribute` names."""
    assert re.fullmatch(r"`[\w.]+(:[\w.]+)?`", target_cell), f"{target_cell} is no `module:attribute`"
    module, _, path = target_cell.strip("`").partition(":")
    return functools.reduce(getattr, path.split(".") if path else [], importlib.import_module(module))


TARGETS = {name: target_cell for names, target_cell, _ in rows() for name in names}


def test_every_name_of_the_documents_has_a_row():
    names = [name for names, _, _ in rows() for name in names]
    assert sorted(NAMES - {*names}) == []
    assert sorted({*names} - NAMES) == [], "no document names these"
    assert sorted({name for name in names if names.count(name) > 1}) == [], "these have two rows"


def fields_of(params_class: Any) -> set[str]:
    return {field.name for field in attrs.fields(params_class)} if attrs.has(params_class) else set()


@pytest.mark.parametrize(
    ("names", "target_cell", "difference"), rows(), ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_every_target_exists(names: list[str], target_cell: str, difference: str) -> None:
    assert names
    object_at_target = target(target_cell)
    if len(names) > 1:
        class_names, field_names = (
            {name.partition(".")[0] for name in names},
            {name.partition(".")[2] for name in names},
        )
        assert class_names == {object_at_target.__name__}
        assert field_names == fields_of(object_at_target)


def test_a_missing_target_is_found():
    for cell in ("`ejkernel_core:no_such_name`", "`no_such_module:x`", "ejkernel_core", "`ejkernel_core:Kernel.walk`"):
        with pytest.raises((AttributeError, ImportError, AssertionError)):
            target(cell)


@pytest.mark.parametrize("name", PARAMETERS)
def test_functions_have_the_documented_parameters(name: str) -> None:
    """By position and by name, with the documented defaults."""
    parameters = inspect.signature(target(TARGETS[name])).parameters
    expected = PARAMETERS[name].split()
    assert list(parameters)[: len(expected)] == expected
    assert all(parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in expected)
    defaults = DEFAULTS.get(name, ())
    defaults_of_function = [parameters[name].default for name in expected[len(expected) - len(defaults) :]]
    assert defaults_of_function == list(defaults)


@pytest.mark.parametrize("name", BY_NAME)
def test_functions_have_the_documented_keywords(name: str) -> None:
    parameters = inspect.signature(target(TARGETS[name])).parameters
    keyword_names = {
        parameter_name
        for parameter_name, parameter in parameters.items()
        if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
    }
    has_keywords = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    assert has_keywords if name == "policy_override" else {*BY_NAME[name].split()} <= keyword_names


def test_all_functions_of_the_documents_are_compared() -> None:
    """Except for functions whose examples pass only one argument, by position."""
    functions = {
        name for name, target_cell in TARGETS.items() if inspect.isroutine(target(target_cell)) or name in PARAMETERS
    }
    names_with_one_argument = """
        Executor.cfg Kernel.run Kernel.run_triton Kernel.run_pallas Kernel.run_xla FwdParams.__hash__ BwdParams.__hash__
        ConfigCache.put ConfigCache.get PersistentCache.put PersistentCache.get overlay_cache autotune_recorded
        sharding_fingerprint to_json from_json label find_labels_in_lowered extract_labels_from_hlo_text
        labels_to_configs ejkernel.modules.flash_attention PersistentCache.path
    """
    assert functions - {*PARAMETERS} - {*BY_NAME} == {*names_with_one_argument.split(), "key in ConfigCache"} - {
        *BY_NAME
    }


@pytest.mark.parametrize("name", ["device_fingerprint", "get_device_platform", "device_kind"])
def test_a_device_can_be_passed_by_name(name: str) -> None:
    function = getattr(ejkernel_classes, name)
    assert function(dev=jax.devices()[0]) == function(jax.devices()[0]) == function()
    with pytest.raises(TypeError, match="dev: takes one of jax.devices.*; got str 'cpu'"):
        function(dev="cpu")


def test_content_can_be_passed_by_name() -> None:
    assert ejkernel_classes.stable_json(obj={"b": 1, "a": (2,)}) == '{"a":{"!tuple":[2]},"b":1}'
    assert ejkernel_classes.short_hash(obj=[1]) == ejkernel_classes.short_hash([1])
    assert ejkernel_classes.abstractify(pytree=[np.zeros(3)]) == [jax.ShapeDtypeStruct((3,), np.float64)]
    assert ejkernel_classes.hash_fn(self=FwdParams(q_blocksize=4)) == ejkernel_classes.hash_fn(FwdParams(q_blocksize=4))


def test_params_have_the_documented_fields_and_defaults():
    for params_class in (FwdParams, BwdParams):
        assert {getattr(params_class(), name) for name in fields_of(params_class)} == {None}


# -- examples of the documents -------------------------------------------------------------------------------------

BOUNDS = jnp.array([0, 3, 5, 9])
MASK = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]])
CHUNKS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
ROWS = jnp.array([[[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]])

#: Each example with its documented value. All are int32.
DOCUMENTED_EXAMPLES = {
    "prepare_lens": (lambda: ejkernel_packed.prepare_lens(jnp.array([0, 5, 12, 18])), [5, 7, 6]),
    "prepare_lens, packed": (lambda: ejkernel_packed.prepare_lens(BOUNDS), [3, 2, 4]),
    "prepare_lens_from_mask": (lambda: ejkernel_packed.prepare_lens_from_mask(MASK), [3, 2]),
    "prepare_cu_seqlens_from_mask": (lambda: ejkernel_packed.prepare_cu_seqlens_from_mask(MASK), [0, 3, 5]),
    "prepare_position_ids": (lambda: ejkernel_packed.prepare_position_ids(BOUNDS), [0, 1, 2, 0, 1, 0, 1, 2, 3]),
    "prepare_sequence_ids": (lambda: ejkernel_packed.prepare_sequence_ids(BOUNDS), [0, 0, 0, 1, 1, 2, 2, 2, 2]),
    "mask_to_segment_ids, queries": (lambda: ejkernel_packed.mask_to_segment_ids(ROWS)[0], [[1, 2, 3, 4]]),
    "mask_to_segment_ids, keys": (lambda: ejkernel_packed.mask_to_segment_ids(ROWS)[1], [[1, 2, 3, 4]]),
    "chunk_array": (lambda: ejkernel_packed.chunk_array(jnp.arange(10), 4), CHUNKS),
    "unchunk_array": (lambda: ejkernel_packed.unchunk_array(jnp.array(CHUNKS), 10), list(range(10))),
}


@pytest.mark.parametrize("name", DOCUMENTED_EXAMPLES)
def test_examples_have_the_documented_values(name: str) -> None:
    compute, documented = DOCUMENTED_EXAMPLES[name]
    result = compute()
    assert result.dtype == jnp.int32
    assert result.tolist() == documented


def test_masks_have_the_documented_values():
    mask = ejkernel_packed.segment_ids_to_mask(jnp.array([[1, 1, 2, 0], [1, 2, 0, 0]]))
    assert mask.dtype == bool
    assert mask[0, 0, 1]
    assert not mask[0, 0, 2]
    pair = ejkernel_packed.segment_ids_to_mask((jnp.array([[1, 1, 2, 0]]), jnp.array([[1, 2, 2, 0]])))
    assert pair[0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_other_documented_values():
    assert abs(float(log_sum_exp(jnp.array([1000.0, 1001.0, 1002.0]))) - 1002.407) < 1e-3
    assert estimate_shared_memory_bytes(128, 256, 64) > 49152
    struct = ejkernel_classes.abstractify(jnp.ones((2, 3)))
    assert (type(struct), struct.shape, struct.dtype) == (jax.ShapeDtypeStruct, (2, 3), np.float32)
    assert re.fullmatch("[0-9a-f]{16}", ejkernel_classes.short_hash({"block_size": 128, "num_warps": 4}))
    key = ejkernel_packed.identity_dtype_convert(jnp.float32)(jnp.ones(2).astype(jnp.float16))
    assert key.dtype == jnp.float16
