"""Errors of calls through this package name the line of the user's program: this file is the user's."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import ejkernel_classes
import ejkernel_core
from ejkernel_classes import Executor, Kernel, vmap_with_config
from ejkernel_classes.modules import flash_attention
from ejkernel_core import NoConfig, NoKernel, Unsupported, policy_override

X = jnp.ones((1, 4, 2, 8))
FOLDERS = tuple(str(Path(package.__file__ or "").parent) for package in (ejkernel_classes, ejkernel_core))


class PlusOne(Kernel[int, jax.Array]):
    def run(self, x: Any, *, cfg: int) -> Any:
        return x + 1

    def config_space(self, inv: Any) -> list[int]:
        return [1, 2]


class Refusing(Kernel[int, jax.Array]):
    def run(self, x: Any, *, cfg: int) -> Any:
        return x

    def heuristic_cfg(self, inv: Any) -> int:
        raise Unsupported("never")


def refused(x: Any) -> Any:
    return Refusing()(x)


def by_object(x: Any) -> Any:
    return PlusOne()(x)


def by_executor(x: Any) -> Any:
    return Executor()(PlusOne(), x)


def by_name(x: Any) -> Any:
    return Executor()("flash_attention", x, x, x, backend="cudnn")


def by_module(x: Any) -> Any:
    return flash_attention(x, x, x, backend="cudnn")


def mapped(x: Any) -> Any:
    return vmap_with_config(PlusOne())(x)


@pytest.mark.parametrize("transform", [lambda layer: layer, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("layer", [by_object, by_executor, by_name, by_module, mapped, refused])
def test_the_error_names_the_line_of_the_call(layer: Callable[[Any], Any], transform: Any) -> None:
    line = inspect.getsourcelines(layer)[1] + 1
    with policy_override(mode="error_on_miss"), pytest.raises((NoConfig, NoKernel)) as error:
        transform(layer)(X)
    assert f"called at {__file__}:{line}, in {layer.__name__}" in str(error.value)
    frames = traceback.extract_tb(error.value.__traceback__)
    assert not [frame for frame in frames if frame.filename.startswith(FOLDERS)]
