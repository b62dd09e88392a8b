"""Sentences that say what could be installed, and how, for errors about a plugin that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

import attrs
import jax

from . import _discovery
from ._discovery import KERNELS, OPERATIONS, PluginEntry


@attrs.frozen(eq=False)
class Hints:
    """The sentences for one state of a registry."""

    #: By group and name: the entries of the registry.
    entries: Mapping[tuple[str, str], tuple[PluginEntry, ...]]
    #: The distributions that it selects; None for all.
    selection: str | None
    #: Whether EJKERNEL_PLUGINS selects them.
    is_selected_by_environment: bool

    def install(self) -> str:
        """The sentence that says how to install the project's plugins; "" where all of them are installed."""
        names = [extra for extra, absent in self._absent().items() if absent]
        others = f" (or {', '.join(names[1:])})" if names[1:] else ""
        return f"'pip install \"{_discovery.CORE}[{names[0]}]\"'{others} brings the standard ones" if names else ""

    def listing(self) -> str:
        """The sentence that says how to list the installed plugins."""
        cause = "EJKERNEL_PLUGINS is " if self.is_selected_by_environment else "this registry has plugins="
        filtered = f" ({cause}{self.selection!r})" if self.selection is not None else ""
        if _discovery.version_of(_discovery.COMMAND) == "not installed":
            return f"'pip install {_discovery.COMMAND}' brings 'ejkernel list', which lists what is installed{filtered}"
        return f"'ejkernel list' lists what is installed{filtered}"

    def both(self) -> str:
        """Both sentences."""
        return "; ".join(filter(None, (self.install(), self.listing())))

    def no_other_kernel(self, op: str) -> str:
        """The sentences that say that an operation has no kernel but its reference, and where others could come from.

        The standard plugins have kernels of their own operations only.
        """
        entry = self.entries[OPERATIONS, op][0]
        if entry.is_standard:
            return f"no other kernel of it is installed. {self.both()}"
        owner = "" if entry.is_local else f", and its distribution, {entry.provider}, provides none"
        return f"no other kernel of it is installed{owner}. {self.listing()}"

    def no_kernel(self, op: str, is_restricted: bool) -> str:
        """The sentences for a call that no kernel can run: other packages bring kernels of standard operations, but no
        other backend or Config that the caller names.
        """
        entries = self.entries.get((OPERATIONS, op), ())
        is_standard = any(entry.is_standard for entry in entries[:1])
        return self.both() if is_standard and not is_restricted else self.listing()

    def no_operation(self, name: str) -> str:
        """The message about an operation that is not installed."""
        names = sorted(name for group, name in self.entries if group == OPERATIONS)
        nearest = _nearest(name, names)
        # It is unknown which distribution would provide the operation.
        instruction = self.listing() if names else self.both()
        hint = f"; did you mean {nearest!r}?" if nearest else "."
        return f"no operation {name!r} is installed{hint} Known: {', '.join(names) or 'none'}. {instruction}"

    def no_backend(self, op: str, backend: str) -> str:
        """The message about a backend that is not installed."""
        kernels = (name.rpartition(".") for group, name in self.entries if group == KERNELS)
        names = sorted(name for op_of_kernel, _, name in kernels if op_of_kernel == op and name)
        end = f"Known: {', '.join(names) or 'none'}. {self.listing()}"
        if not backend:
            return f"{op}: backend='' is not a name. {end}"
        return f"no backend {backend!r} of {op!r} is installed{self._backend(backend, names)} {end}"

    def _backend(self, backend: str, names: Iterable[str]) -> str:
        """The end of a sentence about an unknown backend: the most similar name, and how to install it."""
        installable = {_discovery.backend_of(name): name for absent in self._absent().values() for name in absent}
        # Not every distribution that could be installed has a backend, so its name has to be very similar.
        nearest = (
            backend if backend in installable else _nearest(backend, names) or _nearest(backend, installable, 0.75)
        )
        install = _how_to_install(installable[nearest]) if nearest in installable else ""
        if nearest is None or nearest == backend:
            return f"; {install}" if install else "."
        return f"; did you mean {nearest!r}? {install}".rstrip()

    def _absent(self) -> dict[str, list[str]]:
        """By the core's extras: the distributions that each would add."""
        installed = {
            _discovery.normalized(entry.distribution) for entries in self.entries.values() for entry in entries
        }

        def is_absent(name: str) -> bool:
            is_hidden = self.selection is not None  # installed, and not selected
            return name not in installed and (is_hidden or _discovery.version_of(name) == "not installed")

        return {extra: [*filter(is_absent, names)] for extra, names in _discovery.extras().items()}


def _how_to_install(distribution: str) -> str:
    """The sentence about a distribution that is not installed. One for other devices is of no use here."""
    extras, platform = _discovery.extras(), jax.default_backend()
    here = extras.get(_discovery.EXTRAS.get(platform, ""), (distribution,))
    elsewhere = [extra for extra in _discovery.EXTRAS.values() if distribution in extras.get(extra, ())]
    if distribution in here or not elsewhere:
        return f"'pip install {distribution}' brings that backend."
    return f"{distribution} has that backend for {' and '.join(elsewhere)}; this is {platform}."


def _nearest(name: str, names: Iterable[str], similarity: float = 0.6) -> str | None:
    by_lower = {candidate.lower(): candidate for candidate in names}
    return next((by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, 1, similarity)), None)
