"""``docs/from-ejkernel.md``: every name of ejKernel's documents has a row, whose target can be imported and takes what
the documents pass to it; what they show is what is given here, or what the row says instead.
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

PAGE = Path(__file__).parents[3] / "docs/from-ejkernel.md"

#: What the four documents name as part of the interface. They are not in the repository.
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

#: The parameters of the documents' functions, as they name and order them, after what is passed without a name.
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
#: What the documents pass by name to what takes more than that.
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
    """(names, target, what differs) of every row of the tables."""
    cells = [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]
        for line in PAGE.read_text().splitlines()
        if line[:1] == "|"
    ]
    found = [row for row in cells if row != ["there", "here", "what differs, and why"] and set(row) != {"---"}]
    assert all(len(row) == 3 for row in found), "a row has three cells"
    return [(re.findall(r"`([^`]+)`", there), here, why) for there, here, why in found]


def target(here: str) -> Any:
    """What a cell such as `module:attribute` names."""
    assert re.fullmatch(r"`[\w.]+(:[\w.]+)?`", here), f"{here} is no `module:attribute`"
    module, _, path = here.strip("`").partition(":")
    return functools.reduce(getattr, path.split(".") if path else [], importlib.import_module(module))


TARGETS = {name: here for names, here, _ in rows() for name in names}


def test_every_name_of_the_documents_has_its_row():
    named = [name for names, _, _ in rows() for name in names]
    assert sorted(NAMES - {*named}) == []
    assert sorted({*named} - NAMES) == [], "no document names these"
    assert sorted({name for name in named if named.count(name) > 1}) == [], "these have two rows"


def fields_of(kind: Any) -> set[str]:
    return {field.name for field in attrs.fields(kind)} if attrs.has(kind) else set()


@pytest.mark.parametrize(
    ("names", "here", "why"), rows(), ids=lambda value: value[0] if isinstance(value, list) else ""
)
def test_every_target_is_there(names: list[str], here: str, why: str) -> None:
    assert names
    found = target(here)
    if len(names) > 1:
        kinds, own = {name.partition(".")[0] for name in names}, {name.partition(".")[2] for name in names}
        assert kinds == {found.__name__}
        assert own == fields_of(found)


def test_a_target_that_is_not_there_is_noticed():
    for wrong in ("`ejkernel_core:no_such_name`", "`no_such_module:x`", "ejkernel_core", "`ejkernel_core:Kernel.walk`"):
        with pytest.raises((AttributeError, ImportError, AssertionError)):
            target(wrong)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_documented_parameters_are_taken(name: str) -> None:
    """By position and by name, with the documented defaults."""
    takes = inspect.signature(target(TARGETS[name])).parameters
    wanted = PARAMETERS[name].split()
    assert list(takes)[: len(wanted)] == wanted
    assert all(takes[own].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for own in wanted)
    defaults = DEFAULTS.get(name, ())
    given = [takes[own].default for own in wanted[len(wanted) - len(defaults) :]]
    assert given == list(defaults)


@pytest.mark.parametrize("name", BY_NAME)
def test_what_is_documented_by_name_is_taken_by_name(name: str) -> None:
    takes = inspect.signature(target(TARGETS[name])).parameters
    named = {own for own, parameter in takes.items() if parameter.kind is not inspect.Parameter.POSITIONAL_ONLY}
    more = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    assert more if name == "policy_override" else {*BY_NAME[name].split()} <= named


def test_every_function_of_the_documents_is_compared() -> None:
    """But for those whose examples show a name and one argument without one."""
    functions = {name for name, here in TARGETS.items() if inspect.isroutine(target(here)) or name in PARAMETERS}
    shown_alone = """
        Executor.cfg Kernel.run Kernel.run_triton Kernel.run_pallas Kernel.run_xla FwdParams.__hash__ BwdParams.__hash__
        ConfigCache.put ConfigCache.get PersistentCache.put PersistentCache.get overlay_cache autotune_recorded
        sharding_fingerprint to_json from_json label find_labels_in_lowered extract_labels_from_hlo_text
        labels_to_configs ejkernel.modules.flash_attention PersistentCache.path
    """
    assert functions - {*PARAMETERS} - {*BY_NAME} == {*shown_alone.split(), "key in ConfigCache"} - {*BY_NAME}


@pytest.mark.parametrize("name", ["device_fingerprint", "get_device_platform", "device_kind"])
def test_a_device_is_passed_by_name(name: str) -> None:
    function = getattr(ejkernel_classes, name)
    assert function(dev=jax.devices()[0]) == function(jax.devices()[0]) == function()
    with pytest.raises(TypeError, match="dev: takes one of jax.devices.*; got str 'cpu'"):
        function(dev="cpu")


def test_content_is_passed_by_name() -> None:
    assert ejkernel_classes.stable_json(obj={"b": 1, "a": (2,)}) == '{"a":{"!tuple":[2]},"b":1}'
    assert ejkernel_classes.short_hash(obj=[1]) == ejkernel_classes.short_hash([1])
    assert ejkernel_classes.abstractify(pytree=[np.zeros(3)]) == [jax.ShapeDtypeStruct((3,), np.float64)]
    assert ejkernel_classes.hash_fn(self=FwdParams(q_blocksize=4)) == ejkernel_classes.hash_fn(FwdParams(q_blocksize=4))


def test_the_documented_fields_and_their_defaults():
    for kind in (FwdParams, BwdParams):
        assert {getattr(kind(), name) for name in fields_of(kind)} == {None}


# -- what the documents show ---------------------------------------------------------------------------------------

BOUNDS = jnp.array([0, 3, 5, 9])
MASK = jnp.array([[1, 1, 1, 0], [1, 1, 0, 0]])
CHUNKS = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 0]]
ROWS = jnp.array([[[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]])

#: Each example with the value that stands beside it. All are int32.
SHOWN = {
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


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_shown_is_what_comes(name: str) -> None:
    compute, shown = SHOWN[name]
    result = compute()
    assert result.dtype == jnp.int32
    assert result.tolist() == shown


def test_the_masks_that_are_shown():
    mask = ejkernel_packed.segment_ids_to_mask(jnp.array([[1, 1, 2, 0], [1, 2, 0, 0]]))
    assert mask.dtype == bool
    assert mask[0, 0, 1]
    assert not mask[0, 0, 2]
    pair = ejkernel_packed.segment_ids_to_mask((jnp.array([[1, 1, 2, 0]]), jnp.array([[1, 2, 2, 0]])))
    assert pair[0].tolist() == [[1, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_the_rest_that_is_shown():
    assert abs(float(log_sum_exp(jnp.array([1000.0, 1001.0, 1002.0]))) - 1002.407) < 1e-3
    assert estimate_shared_memory_bytes(128, 256, 64) > 49152
    struct = ejkernel_classes.abstractify(jnp.ones((2, 3)))
    assert (type(struct), struct.shape, struct.dtype) == (jax.ShapeDtypeStruct, (2, 3), np.float32)
    assert re.fullmatch("[0-9a-f]{16}", ejkernel_classes.short_hash({"block_size": 128, "num_warps": 4}))
    key = ejkernel_packed.identity_dtype_convert(jnp.float32)(jnp.ones(2).astype(jnp.float16))
    assert key.dtype == jnp.float16
