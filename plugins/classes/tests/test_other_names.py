"""Arguments that ejKernel has and this package does not: the errors say what to write in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from ejkernel_classes import Autotuner, ConfigCache, ConfigChooser, ConfigSelectorChain, Executor, Kernel
from ejkernel_classes.modules import flash_attention
from ejkernel_core import AutotunePolicy, NoConfig, Registry

X = jnp.ones((1, 4, 2, 8))
PACKED, BOUNDS = jnp.ones((4, 2, 8)), jnp.array([0, 4])


class PlusOne(Kernel[int, jax.Array]):
    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)

    def run(self, x: Any, *, cfg: int) -> Any:
        return x + 1


class Blocked(PlusOne):
    def heuristic_cfg(self, inv: Any) -> int:
        return 1

    def config_space(self, inv: Any) -> list[int]:
        return [1, 2]


class Chooser:
    def choose(self, inv: Any, kernel: Any) -> Any:
        return 1


class OwnChooser(ConfigChooser):
    def choose(self, inv: Any, kernel: Any) -> Any:
        return 1


def attend(**options: Any) -> Any:
    return flash_attention(X, X, X, **options)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "op_id": (lambda: PlusOne(op_id="mine"), "Kernel: has no 'op_id'; name= takes the name"),
    "chooser": (
        lambda: Executor(chooser=ConfigSelectorChain()),  # type: ignore[call-arg]
        "Executor: has no 'chooser'; selector= takes a ConfigSelectorChain",
    ),
    "_cfg": (lambda: Executor()(PlusOne(), X, _cfg=1), "Executor: has no '_cfg'; cfg= takes the configuration"),
    "tuner": (
        lambda: ConfigSelectorChain(tuner=1),  # type: ignore[call-arg]
        "ConfigSelectorChain: has no 'tuner'; autotune=True measures",
    ),
    "a chooser": (lambda: Executor(Chooser()), r"selector: takes a ConfigSelectorChain; .* got Chooser"),  # type: ignore[arg-type]
    "a subclass": (lambda: Executor(OwnChooser()), "hook select_config: .*policies={'mine': policy}.*; got OwnChooser"),
    "a cache": (lambda: Executor(ConfigCache()), "selector: takes a ConfigSelectorChain; .*; got ConfigCache"),  # type: ignore[arg-type]
    "warmup": (
        lambda: Autotuner(warmup=3),  # type: ignore[call-arg]
        r"Autotuner: has no 'warmup'; autotune\(kernel, ..., num_warmup=1\) takes",
    ),
    "allow_autotune": (
        lambda: AutotunePolicy(allow_autotune=True),  # type: ignore[call-arg]
        "AutotunePolicy: has no 'allow_autotune'; mode='on_miss' measures, mode='off' does not. It has mode, budget_s",
    ),
    "mask_info": (lambda: attend(mask_info=1), "'mask_info'; 'attention_mask' takes its mask, or 'q_segment_ids' and"),
    "mesh": (lambda: attend(mesh=None), "'mesh'; call it inside jax.shard_map"),
    "in_specs": (lambda: attend(in_specs=None), "'in_specs'; call it inside jax.shard_map, which takes in_specs"),
    "out_specs": (lambda: attend(out_specs=None), "'out_specs'; call it inside jax.shard_map, which takes out_specs"),
    "by name": (lambda: Executor()("flash_attention", X, X, X, mesh=1), "'mesh'; call it inside jax.shard_map"),
    "boundaries": (
        lambda: flash_attention(PACKED, PACKED, PACKED, None, BOUNDS, BOUNDS),
        "takes query, key, value, bias by position; got 6 arguments; write the others by name: .* cum_seqlens_q, cum_",
    ),
    "boundaries by name": (
        lambda: Executor()("flash_attention", PACKED, PACKED, PACKED, None, BOUNDS, BOUNDS),
        "takes query, key, value, bias by position; got 6 arguments; write the others by name: .* cum_seqlens_q, cum_",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_error_says_what_to_write(case: str) -> None:
    call, message = REFUSED[case]
    with pytest.raises(TypeError, match=message):
        call()


def test_an_argument_of_a_kernel_may_have_such_a_name() -> None:
    class Named(PlusOne):
        def __init__(self, op_id: str) -> None:
            super().__init__(name=op_id)

    assert Named(op_id="mine").name == "mine"
    assert Named("mine")(X).tolist() == (X + 1).tolist()


def test_a_chain_can_be_passed_as_documented() -> None:
    chain = ConfigChooser(cache=ConfigCache())
    assert isinstance(chain, ConfigSelectorChain)
    assert Executor(chain).selector is Executor(selector=chain).selector is chain


def test_an_autotuner_measures_where_it_is_registered(use_registry: Any) -> None:
    registry, kernel = Registry(plugins=""), Blocked()
    use_registry(registry)
    chain = ConfigSelectorChain(autotune=True)
    with pytest.raises(NoConfig, match="nothing that is installed does"):
        Executor(chain)(kernel, X)
    registry.register(Autotuner(), "tuner")
    assert Executor(chain)(kernel, X).tolist() == (X + 1).tolist()
    (record,) = chain.cache.records(kernel.invocation(X).key)
    assert record.cfg in (1, 2)
    assert record.provenance is not None  # it was measured
