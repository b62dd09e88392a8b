"""The cache on disk takes the same keys and configurations as the one in memory: any."""

from __future__ import annotations

import enum
import json
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel_classes import ConfigCache, ConfigSelectorChain, Executor, FwdParams, Kernel, PersistentCache
from ejkernel_core import Key, Provenance, Record, RecordError


class Mode(enum.Enum):
    FAST = 1
    EXACT = 2


class Level(enum.IntEnum):
    LOW = 1


class Pair(NamedTuple):
    block: int
    name: str = "x"


@dataclass(frozen=True)
class Config:
    block: int = 128


#: Values that are used as keys and as configurations.
HASHABLE = [
    128, "text", "!tuple", "", "ä", 1.5, math.inf, True, None, (), (1, "a", (2.0, None)), b"\x00\xff", frozenset({1, 2}),
    Mode.FAST, Level.LOW, Pair(3, "y"), Config(64), FwdParams(q_blocksize=16), (Config(2), Mode.EXACT), jnp.float32,
    np.float32, np.dtype("float16"), jnp.bfloat16, np.int8(3), np.dtype(jnp.bfloat16).type(1.5), 3 - 4j, 10**30,
    frozenset({(1, "a"), None}),
]  # fmt: skip
UNHASHABLE = [[1, (2, [3])], {"a": 1, 2: (3,)}, {"!tuple": [1]}, {1, 2}, {}, [], {"way": Mode.FAST, "pair": [Pair(1)]}]
#: The classes of these values, which another process has to name.
TYPES = (Mode, Level, Pair, Config, FwdParams)
KEY = Key("op", "device", "{}")


@pytest.mark.parametrize("value", [*HASHABLE, *UNHASHABLE], ids=lambda value: type(value).__name__)
def test_any_configuration_is_read_back(value: Any, tmp_path: Path) -> None:
    for key in (KEY, "a key"):
        memory, disk = ConfigCache(), PersistentCache(tmp_path)
        for cache in (memory, disk):
            cache.put(key, value)
        for cache in (memory, disk, PersistentCache(tmp_path, TYPES)):
            cfg = cache.get(key)
            assert (cfg, type(cfg)) == (value, type(value))
            assert key in cache


@pytest.mark.parametrize("key", HASHABLE, ids=lambda value: type(value).__name__)
def test_any_hashable_key(key: Any, tmp_path: Path) -> None:
    memory, disk = ConfigCache(), PersistentCache(tmp_path)
    for cache in (memory, disk):
        assert (cache.get(key), cache.get(key, 5), key in cache) == (None, 5, False)
        cache.put(key, 7)
        cache.put("another", 8)
    for cache in (memory, disk, PersistentCache(tmp_path, TYPES)):
        assert (cache.get(key), key in cache, "third" in cache, len(cache)) == (7, True, False, 2)
        assert {*cache} == {key, "another"}
        assert {type(key_of_cache) for key_of_cache in cache} == {type(key), str}
        assert dict(cache.items())[key][0].cfg == 7
        assert cache.records(key)[0].cfg == 7
    disk.clear()
    assert (len(disk), [*disk]) == (0, [])


def test_keys_are_distinguished_by_content(tmp_path: Path) -> None:
    keys = [1, 1.0, True, "1", (1,), frozenset({1}), Level.LOW, np.int8(1), None, ((1,),), b"1", Config(1), Pair(1)]
    cache = PersistentCache(tmp_path)
    for number, key in enumerate(keys):
        cache.put(key, number)
    reopened_cache = PersistentCache(tmp_path)
    assert [reopened_cache.get(key) for key in keys] == [*range(len(keys))]
    cache.put(frozenset({3, 1, 2}), "set")
    assert cache.get(frozenset({2, 3, 1})) == "set"


def test_records_of_backends_and_provenance(tmp_path: Path) -> None:
    cache = PersistentCache(tmp_path)
    provenance = Provenance(when="2026-11-23T12:00:00+00:00", device="cpu", milliseconds=0.5, backends=("xla", "run"))
    cache.put("key", Record((1, 2), "xla", provenance))
    cache.put("key", Record(("other",), "run"))
    reopened_cache = PersistentCache(tmp_path)
    assert reopened_cache.records("key") == (Record(("other",), "run"), Record((1, 2), "xla", provenance))
    assert reopened_cache.read("key", "xla") == Record((1, 2), "xla", provenance)
    assert reopened_cache.read("key", "xla", tuple) == Record((1, 2), "xla", provenance)
    assert reopened_cache.file("key", "xla").exists()
    with pytest.raises(RecordError, match="holds a tuple, no list"):
        reopened_cache.read("key", "xla", list)


@pytest.mark.parametrize("config_type", [int, None])
def test_a_chain_finds_plain_configurations(config_type: Any, tmp_path: Path) -> None:
    class Times(Kernel[config_type, jax.Array] if config_type else Kernel):  # type: ignore[misc]
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x * cfg

        def heuristic_cfg(self, inv: Any) -> Any:
            return 2

    kernel, x = Times(name="times"), jnp.ones(3)
    assert Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path)))(kernel, x).tolist() == [2, 2, 2]
    PersistentCache(tmp_path).put(kernel.invocation(x).key, 7)
    assert Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path)))(kernel, x).tolist() == [7, 7, 7]


@pytest.mark.parametrize(
    "value", [lambda: 0, object(), np.zeros(2), Config, range(3)], ids=lambda value: type(value).__name__
)
def test_a_value_that_cannot_be_written_is_refused(value: Any, tmp_path: Path) -> None:
    cache = PersistentCache(tmp_path)
    with pytest.raises(RecordError, match=f"a {type(value).__name__}, "):
        cache.put("key", value)
    with pytest.raises(RecordError, match=f"a {type(value).__name__}, "):
        cache.put("key", (1, [value]))
    assert len(cache) == 0


def test_an_unhashable_key_is_a_type_error(tmp_path: Path) -> None:
    for cache in (ConfigCache(), PersistentCache(tmp_path)):
        with pytest.raises(TypeError, match="unhashable"):
            cache.put([1], 1)


def test_a_damaged_record_is_a_miss(tmp_path: Path) -> None:
    cache = PersistentCache(tmp_path)
    cache.put("key", (1, 2))
    (file,) = tmp_path.rglob("*.json")
    document = json.loads(file.read_text())
    for text in (
        "",
        "{}",
        "[[",
        '{"!tuple": 3}',
        '{"!no": []}',
        '{"!enum": ["json.Nothing", "A"]}',
        '{"a": 1, "b": 2}',
    ):
        document["config"]["text"] = text
        file.write_text(json.dumps(document))
        with pytest.warns(RuntimeWarning, match="is nothing that was written here"):
            assert PersistentCache(tmp_path).get("key") is None


def test_a_class_is_not_imported_to_read_a_record(tmp_path: Path) -> None:
    cache = PersistentCache(tmp_path)
    cache.put(("a key", Mode.FAST), (Mode.FAST, Pair(1)))
    program = f"""
import warnings
from ejkernel_classes import PersistentCache
cache = PersistentCache({str(tmp_path)!r})
warnings.simplefilter("ignore")
print([type(key).__name__ for key in cache], cache.items())
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith("['Key'] []")


CONSTRUCTED: list[Any] = []


@dataclass(frozen=True)
class Trap:
    """A class of the process that a file may name. Its objects would be noticed."""

    block: int = 0

    def __post_init__(self) -> None:
        CONSTRUCTED.append(self)


class NamedTrap(Pair):
    def __new__(cls, *values: Any) -> NamedTrap:
        CONSTRUCTED.append(values)
        return super().__new__(cls, *values)


def user_kernel(config: Any) -> Kernel[Any, Any]:
    """A kernel of classes, whose configurations are of the type of this one, with or without saying so."""

    class Times(Kernel):  # type: ignore[type-arg]
        def run(self, x: Any, *, cfg: Any) -> Any:
            return x * (cfg.block if hasattr(cfg, "block") else cfg[0].block)

        def heuristic_cfg(self, inv: Any) -> Any:
            return config

    return Times(name="times")


@pytest.mark.parametrize("config", [Config(2), Pair(2), (Config(2), Mode.FAST)], ids=["dataclass", "tuple", "nested"])
def test_a_kernel_reads_its_own_class_in_another_process_and_no_other(config: Any, tmp_path: Path) -> None:
    kernel, x = user_kernel(config), jnp.ones(3)
    better = {Config: Config(7), Pair: Pair(7, "y"), tuple: (Config(7), Mode.EXACT)}[type(config)]
    PersistentCache(tmp_path).put(kernel.invocation(x).key, better)
    assert Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path)))(kernel, x).tolist() == [7, 7, 7]
    for file in tmp_path.rglob("*.json"):
        file.write_text(file.read_text().replace(f"{__name__}.Config", f"{__name__}.Trap"))
        file.write_text(file.read_text().replace(f"{__name__}.Pair", f"{__name__}.NamedTrap"))
    CONSTRUCTED.clear()
    assert Executor(ConfigSelectorChain(persistent=PersistentCache(tmp_path)))(kernel, x).tolist() == [2, 2, 2]
    assert CONSTRUCTED == []


@pytest.mark.parametrize("value", [Trap(1), (Trap(1), 2), NamedTrap(1)], ids=["object", "tuple", "named tuple"])
def test_a_class_that_the_program_has_not_named_is_not_constructed(value: Any, tmp_path: Path) -> None:
    cache = PersistentCache(tmp_path)
    cache.put("a key", value)
    cache.put((value, 1), 3)
    CONSTRUCTED.clear()
    other = PersistentCache(tmp_path, TYPES)
    with pytest.warns(RuntimeWarning, match=r"Trap, which the program has not named: pass the class in types="):
        assert other.get("a key") is None
    assert sorted(type(key).__name__ for key in other) == ["Key", "str"]
    with pytest.warns(RuntimeWarning, match="Trap"):
        assert [records[0].cfg for _, records in other.items()] == [3]
    assert CONSTRUCTED == []
