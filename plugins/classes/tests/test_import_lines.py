"""Every import line of ejKernel's documents works with only the package's name changed.

The documents are not in the repository, so this file has their lines.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import ejkernel_cache
import ejkernel_classes
import ejkernel_core
import ejkernel_ops
import ejkernel_packed

#: The import lines of the examples.
LINES = """
from ejkernel.ops import Kernel
from ejkernel.ops import Invocation
from ejkernel.ops import Executor, ConfigSelectorChain, ConfigCache
from ejkernel.ops import ConfigCache
from ejkernel.ops import PersistentCache
from ejkernel.ops import ConfigSelectorChain, ConfigCache, PersistentCache
from ejkernel.ops import overlay_cache, policy_override
from ejkernel.ops import autotune, benchmark
from ejkernel.ops import autotune_recorded, record_invocation, get_invocations
from ejkernel.ops import vmap_with_config
from ejkernel.ops import pmap_with_config
from ejkernel.ops import FwdParams, BwdParams
from ejkernel.ops import device_kind, get_device_platform, device_fingerprint
from ejkernel.ops import sharding_fingerprint, default_key_builder_with_sharding
from ejkernel.ops import to_json, from_json, stable_json
from ejkernel.ops import find_labels_in_lowered, extract_labels_from_hlo_text, labels_to_configs
from ejkernel.ops import label
from ejkernel.modules import flash_attention
""".strip().splitlines()

#: The names that the documents show in each module.
NAMES_BY_MODULE = {
    "ejkernel.ops.core.kernel": "Kernel Invocation",
    "ejkernel.ops.core.types": "Cfg Out",
    "ejkernel.ops.config.cache": "ConfigCache overlay_cache",
    "ejkernel.ops.config.persistent": "PersistentCache",
    "ejkernel.ops.config.selection": "ConfigSelectorChain AutotunePolicy",
    "ejkernel.ops.execution.executor": "Executor ConfigChooser",
    "ejkernel.ops.execution.batch": "vmap_with_config pmap_with_config",
    "ejkernel.ops.execution.tuning": "Autotuner autotune autotune_recorded benchmark",
    "ejkernel.ops.registry": "record_invocation get_invocations",
    "ejkernel.ops.utils": "device_fingerprint abstractify short_hash stable_json FwdParams BwdParams",
    "ejkernel.ops.utils.fingerprint": "device_fingerprint get_device_platform abstractify short_hash stable_json",
    "ejkernel.ops.utils.datacarrier": "FwdParams BwdParams get_safe_hash_int hash_fn",
    "ejkernel.modules": "flash_attention",
    "ejkernel.xla_utils.utils": """
        cdiv identity_dtype_convert prepare_chunk_indices prepare_chunk_offsets prepare_cu_seqlens_from_mask
        prepare_lens prepare_lens_from_mask prepare_position_ids prepare_sequence_ids prepare_token_indices
        segment_ids_to_mask mask_to_segment_ids""",
    "ejkernel.callib": "estimate_shared_memory_bytes get_shared_memory_limit select_num_warps select_num_stages",
}
#: The names that the documents show without a module.
NAMES_WITHOUT_MODULE = (
    "assert_allclose chunk_array generate_attention_inputs get_memory_usage log_sum_exp safe_divide timer unchunk_array"
)


def names_of_line(line: str) -> dict[str, Any]:
    """The names that the line binds, with their values."""
    names: dict[str, Any] = {}
    exec(line.replace("from ejkernel.", "from ejkernel_classes."), names)
    return {name: value for name, value in names.items() if name != "__builtins__"}


@pytest.mark.parametrize("line", LINES)
def test_the_import_line_works(line: str) -> None:
    names = names_of_line(line)
    assert [*names] == line.partition(" import ")[2].split(", ")
    assert {name: value is getattr(ejkernel_classes, name) for name, value in names.items()} == dict.fromkeys(
        names, True
    )


@pytest.mark.parametrize("module_name", NAMES_BY_MODULE)
def test_the_modules_have_the_documented_names(module_name: str) -> None:
    module = importlib.import_module(module_name.replace("ejkernel", "ejkernel_classes", 1))
    names = NAMES_BY_MODULE[module_name].split()
    assert set(names) <= set(module.__all__)
    everywhere = names if module_name == "ejkernel.modules" else module.__all__
    assert [name for name in everywhere if getattr(module, name) is not getattr(ejkernel_classes, name)] == []


def test_modules_has_all_operations_that_have_a_function() -> None:
    """Those of the distribution ``ejkernel-ops``. Backward passes, for one, are called by name alone."""
    entries = importlib.metadata.entry_points(group="ejkernel.operations")
    operations = {e.name for e in entries if e.value.startswith("ejkernel_ops.") and hasattr(ejkernel_ops, e.name)}
    assert {"flash_attention", "moe_combine", "rms_norm"} <= operations
    assert {*ejkernel_classes.modules.__all__} == operations
    for name in operations:
        function = getattr(ejkernel_classes.modules, name)
        assert function is not getattr(ejkernel_ops, name)  # it is recorded, and takes FwdParams
        assert inspect.signature(function) == inspect.signature(getattr(ejkernel_ops, name))


def test_an_operation_of_modules_computes() -> None:
    x = jnp.array([[3.0, 4.0]])
    np.testing.assert_allclose(ejkernel_classes.modules.rms_norm(x, epsilon=0.0), x / jnp.sqrt(12.5), rtol=1e-6)


def test_the_package_has_all_documented_names() -> None:
    names = [name for line in LINES for name in line.partition(" import ")[2].split(", ")]
    expected = {
        *names,
        *NAMES_WITHOUT_MODULE.split(),
        *(name for names in NAMES_BY_MODULE.values() for name in names.split()),
    }
    assert set(ejkernel_classes.__all__) == expected | {"preferred_backend", "stop_recording"}
    assert [name for name in ejkernel_classes.__all__ if not hasattr(ejkernel_classes, name)] == []
    assert ejkernel_classes.__all__ == sorted(ejkernel_classes.__all__)


def test_names_of_other_packages_are_theirs() -> None:
    assert ejkernel_classes.ConfigCache is ejkernel_core.ConfigCache
    assert issubclass(ejkernel_classes.PersistentCache, ejkernel_cache.PersistentCache)
    assert inspect.signature(ejkernel_classes.flash_attention) == inspect.signature(ejkernel_ops.flash_attention)
    assert ejkernel_classes.cdiv is ejkernel_packed.cdiv
    assert ejkernel_classes.Invocation is not ejkernel_core.Invocation


@pytest.mark.parametrize("module", [ejkernel_classes, importlib.import_module("ejkernel_classes.ops")])
def test_an_unknown_name_is_an_attribute_error(module: Any) -> None:
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute 'Tuner'"):
        module.Tuner  # noqa: B018


@pytest.mark.parametrize("module_name", NAMES_BY_MODULE)
def test_modules_are_attributes_of_their_packages(module_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the package was imported: then the first access imports them."""
    *packages, last = module_name.split(".")[1:]
    parent = functools.reduce(getattr, packages, ejkernel_classes)
    if hasattr(parent, "__getattr__"):  # else it imports its modules itself
        monkeypatch.delattr(parent, last, raising=False)
    assert getattr(parent, last).__name__ == module_name.replace("ejkernel", "ejkernel_classes", 1)


PROGRAM = """
import json, sys
{line}
mine = ("ejkernel_cache", "ejkernel_tuning", "ejkernel_ops", "ejkernel_packed", "ejkernel_testing", "pytest")
print(json.dumps([name for name in mine if name in sys.modules]))
"""


@pytest.mark.parametrize(
    ("line", "packages"),
    [
        ("from ejkernel_classes import Kernel, Executor", []),
        ("from ejkernel_classes.ops import Kernel, Executor", []),
        ("from ejkernel_classes.ops import PersistentCache", ["ejkernel_cache"]),
        ("from ejkernel_classes.ops import get_invocations", []),
        ("from ejkernel_classes.xla_utils.utils import cdiv", ["ejkernel_packed"]),
        ("from ejkernel_classes import assert_allclose", ["ejkernel_testing"]),
    ],
)
def test_packages_are_imported_only_when_they_are_used(line: str, packages: list[str]) -> None:
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(line=line)], capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout) == packages
