"""The compute capability of a card: of the device, or by the name of a card that is absent."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

import attrs
import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import ejkernel_core
from ejkernel_core import Invocation, Unsupported
from ejkernel_triton import flash_attention, update_kv_pages
from ejkernel_triton.flash_attention import _tuning
from ejkernel_triton.flash_attention import backward as flash_attention_bwd
from ejkernel_triton.flash_attention_sm90 import _refusals as gluon
from ejkernel_triton.launch import _jax_triton
from ejkernel_triton.launch._cards import capability, multiprocessors
from ejkernel_triton.launch._requirements import require_float8

KERNELS = {"flash_attention": flash_attention, "flash_attention_bwd": flash_attention_bwd}
NAMED = {
    "NVIDIA H200": (9, 0),
    "NVIDIA H100 80GB HBM3": (9, 0),
    "NVIDIA A100-SXM4-40GB": (8, 0),
    "NVIDIA L4": (8, 9),
    "NVIDIA GB200": (10, 0),
    "NVIDIA GeForce RTX 5090": (12, 0),
    "a card to come": None,
}


def message(card: str | None, own: tuple[int, int] | None = None, platform: str = "gpu") -> Invocation:
    array = jax.ShapeDtypeStruct((1, 4096, 4, 128), "bfloat16")
    inv = ejkernel_core.invocation("flash_attention", array, array, array, causal=True)
    return attrs.evolve(inv, platform=platform, device_kind=card, compute_capability=own)


def compiling_for(card: str, platform: str = "gpu") -> Any:
    return use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(card, None, platform)))


@pytest.mark.parametrize("card", NAMED)
def test_the_capability_of_an_absent_card_follows_from_its_name(card: str) -> None:
    assert capability(message(card)) == NAMED[card]


def test_multiprocessors_follow_from_the_name_of_the_card() -> None:
    numbers = {
        "NVIDIA H200": 132,
        "NVIDIA H100 PCIe": 114,
        "NVIDIA H100 80GB HBM3": 132,
        "NVIDIA A100-SXM4-40GB": 108,
        "NVIDIA L40S": 142,
        "NVIDIA GeForce RTX 5090": 170,
        "a card to come": 108,
    }
    assert {card: multiprocessors(message(card)) for card in numbers} == numbers
    assert multiprocessors(message("a card to come", (10, 0))) == 148


def test_the_capability_of_the_device_comes_before_that_of_its_name() -> None:
    assert capability(message("NVIDIA H200", (8, 6))) == (8, 6)
    assert capability(message("a card to come", (9, 0))) == (9, 0)


def test_other_platforms_and_absent_devices_have_no_capability() -> None:
    assert capability(message("NVIDIA H200", platform="tpu")) is None
    assert capability(message(None)) is None


@pytest.mark.parametrize("module", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("card", [card for card, known in NAMED.items() if known])
def test_configurations_are_chosen_for_an_absent_card(card: str, module: ModuleType) -> None:
    there, here = message(card), message(card, NAMED[card])
    assert module.heuristic_cfg(there) == module.heuristic_cfg(here)
    assert list(module.config_space(there)) == list(module.config_space(here))
    assert _tuning.reads_shared_memory(there) == (NAMED[card] in ((9, 0), (10, 0)))


def test_cards_that_are_refused_by_their_names() -> None:
    with pytest.raises(Unsupported, match=re.escape("(Ampere) or later; this GPU has 7.5")):
        flash_attention.heuristic_cfg(message("Tesla T4"))
    with pytest.raises(Unsupported, match="a card to come is not known as one"):
        flash_attention.heuristic_cfg(message("a card to come"))
    with pytest.raises(Unsupported, match=re.escape("for compute capability 9.0 (Hopper); this GPU has 8.0")):
        gluon.check(message("NVIDIA A100-SXM4-40GB"))


def test_float8_is_refused_by_the_name_of_a_card() -> None:
    require_float8(message("NVIDIA L4"))
    with pytest.raises(Unsupported, match=re.escape("from compute capability 8.9 (Ada) on; this GPU has 8.0")):
        require_float8(message("NVIDIA A100-SXM4-40GB"))
    key, pages = jax.ShapeDtypeStruct((9, 2, 64), "bfloat16"), jax.ShapeDtypeStruct((4, 4, 4, 64), "float8_e4m3fn")
    inv = ejkernel_core.invocation("update_kv_pages", key, key, pages, jax.ShapeDtypeStruct((9,), "int32"))
    inv = attrs.evolve(inv, platform="gpu", device_kind="NVIDIA A100-SXM4-40GB", compute_capability=None)
    with pytest.raises(Unsupported, match=re.escape("8.9 (Ada)")):
        update_kv_pages.heuristic_cfg(inv)


@pytest.mark.parametrize(
    ("card", "platform", "arch"),
    [
        ("NVIDIA L40S", "gpu", 89),
        ("NVIDIA L40S", "cuda", 89),
        ("NVIDIA L40S", "tpu", 70),
        ("a card to come", "gpu", 70),
    ],
)
def test_other_kernels_are_compiled_for_the_card_of_the_mesh(card: str, platform: str, arch: int) -> None:
    with compiling_for(card, platform):
        assert _jax_triton._target_capability(lambda device: 70, 0) == arch
    assert _jax_triton._target_capability(lambda device: 70, 0) == 70
