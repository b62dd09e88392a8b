"""How many tokens are copied at a time, and the calls that the kernel refuses."""

from __future__ import annotations

import math

import attrs
from attrs.validators import in_, instance_of

from ejkernel_core import Invocation, Unsupported
from ejkernel_ops.pages import EIGHT_BITS, pages_of
from ejkernel_ops.symbolic import refuse_symbolic
from ejkernel_pallas_tpu.launch._devices import check_device
from ejkernel_pallas_tpu.launch._generations import MIB, generation

DTYPES = ("bfloat16", "float32")
IN_FLIGHT = (16, 64, 256)
#: The bytes that are on their way where main memory is busy all the time: its rate times the time of a copy.
ON_THE_WAY = MIB
#: The most tokens of a call. Each has a word in scalar memory, of which there is 1 MiB.
MAX_TOKENS = 2**17


@attrs.frozen
class Config:
    """How many tokens are copied at a time."""

    #: The tokens whose copies have been started and not been waited for.
    in_flight: int = attrs.field(default=256, validator=in_(IN_FLIGHT))
    #: Run in the interpreter of Pallas, on any device, for debugging.
    interpret: bool = attrs.field(default=False, validator=instance_of(bool))


def configs(inv: Invocation) -> list[Config]:
    """The fewest tokens that keep main memory busy, and the other numbers."""
    token = sum(math.prod(pages.shape[2:]) * pages.dtype.itemsize for pages in pages_of(inv))
    first = next((tokens for tokens in IN_FLIGHT if tokens * token >= ON_THE_WAY), IN_FLIGHT[-1])
    return [Config(tokens) for tokens in sorted(IN_FLIGHT, key=lambda tokens: (tokens != first, tokens))]


def cores(inv: Invocation) -> int:
    """How many cores share the tokens."""
    chip = generation(inv.device_kind or "")
    return chip.cores if chip else 1


# -- refusals --------------------------------------------------------------------------------------------------------


def check(inv: Invocation) -> None:
    """Raise `Unsupported` for a device or arguments that the kernel does not support."""
    check_device(inv)
    check_arguments(inv)


def check_config(inv: Invocation, cfg: Config) -> None:
    """The same for a configuration, which may run in the interpreter."""
    if cfg.interpret:
        check_arguments(inv)
    else:
        check(inv)


def check_arguments(inv: Invocation) -> None:
    """Raise for arguments that the kernel does not support, interpreted or not."""
    refuse_symbolic(inv)
    if str(inv["key"].dtype) not in DTYPES:
        raise Unsupported(f"the Pallas TPU kernels take {' and '.join(DTYPES)}; key is {inv['key'].dtype}")
    takes = (*DTYPES, *map(str, EIGHT_BITS))
    for pages in pages_of(inv):
        if str(pages.dtype) not in takes:
            raise Unsupported(f"the Pallas TPU kernels take pages of {', '.join(takes)}; these are {pages.dtype}")
    tokens = inv["key"].shape[0]
    if tokens > MAX_TOKENS:
        raise Unsupported(f"the slots of {tokens} tokens do not fit into scalar memory: update {MAX_TOKENS} at a time")
