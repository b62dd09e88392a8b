"""A kernel, as the choice sees it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs
import pluggy

from ._configuration import changeable
from ._errors import PASSING, described
from ._invocation import Invocation

#: The rank of a kernel that does not say: it was installed to be used, so it goes before the general ones.
DEFAULT_RANK = 50

#: More configurations than anybody measures: a space that goes on from here may have no end.
MANY = 10_000


@attrs.frozen(eq=False)
class LoadedKernel:
    """One (operation, backend) pair. It has a plugin manager of its own, so no other plugin can answer for it."""

    op: str
    backend: str
    provider: str
    #: Platform to rank: where it runs, and how strongly it is preferred there. None: everywhere, DEFAULT_RANK.
    platforms: Mapping[str, int] | None
    config_type: type | None
    #: The versions of the kernel, by its name, of JAX and of the compilers it names.
    software: Mapping[str, str] = attrs.field(repr=False)
    _hooks: pluggy.HookRelay = attrs.field(repr=False)

    @property
    def name(self) -> str:
        return f"{self.op}.{self.backend}"

    def __repr__(self) -> str:
        return f"LoadedKernel({self.name}, {self.provider})"

    def rank(self, platform: str) -> int | None:
        """How strongly it is preferred on this platform; None where it does not run."""
        return DEFAULT_RANK if self.platforms is None else self.platforms.get(platform)

    @contextlib.contextmanager
    def _noted(self, hook: str) -> Iterator[None]:
        """What is raised here is the asker's to see, as it is; a note has room for whose it is."""
        try:
            yield
        except BaseException as fault:
            fault.add_note(f"in {hook} of {self.name} ({self.provider})")
            raise

    def unfit(self, cfg: Any) -> str | None:
        """Why this value is no configuration of its own, in words that follow "gives"; None where it is one."""
        if self.config_type is not None and not isinstance(cfg, self.config_type):
            return f"a {type(cfg).__qualname__}, not its Config"
        reason = changeable(cfg)
        return None if reason is None else f"what can be changed: {reason}"

    def heuristic_cfg(self, inv: Invocation) -> Any:
        with self._noted("heuristic_cfg"):
            return self._hooks.heuristic_cfg(inv=inv)

    @property
    def _has_space(self) -> bool:
        return bool(self._hooks.config_space.get_hookimpls())

    def config_space(self, inv: Invocation) -> Iterable[Any]:
        return self._hooks.config_space(inv=inv) if self._has_space else [self.heuristic_cfg(inv)]

    def configurations(self, inv: Invocation, report: Callable[[str], object], at_most: int = MANY) -> Iterator[Any]:
        """The configurations among what its space gives, which may be anything: ``report`` hears what is wrong."""
        try:
            for cfg in itertools.islice(self.config_space(inv), at_most):
                unfit = self.unfit(cfg)
                if unfit is None:
                    yield cfg
                else:
                    report(f"config_space gives {unfit}")
        except PASSING:
            raise
        except BaseException as fault:
            report(f"config_space raised {described(fault)}")

    def offers(self, inv: Invocation, cfg: Any) -> bool:
        """Whether its ``config_space`` has it here and now; without one there is no telling, and it may."""
        return not self._has_space or cfg in self.configurations(inv, _unheard)

    @property
    def checks_cfg(self) -> bool:
        """Whether it says itself which configurations of a caller's it takes."""
        return bool(self._hooks.check_cfg.get_hookimpls())

    def check_cfg(self, inv: Invocation, cfg: Any) -> None:
        with self._noted("check_cfg"):
            self._hooks.check_cfg(inv=inv, cfg=cfg)

    def run_backend(self, inv: Invocation, cfg: Any) -> tuple[Any, ...]:
        with self._noted("run_backend"):
            results = self._hooks.run_backend(inv=inv, cfg=cfg)
        return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def _unheard(fault: str) -> None:
    """Explanations tell it."""
