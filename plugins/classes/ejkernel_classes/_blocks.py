"""``FwdParams`` and ``BwdParams`` as configurations of the installed kernels, whose own have other names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

import ejkernel_core
from ejkernel_core import Candidate, Invocation, Key, Record, Unsupported
from ejkernel_core._choice import candidates_for
from ejkernel_core._scopes import Scope, ScopeChange

from ._content import short_hash
from ._params import BwdParams, FwdParams

#: What the kernels call it.
NAMES = {
    "q_blocksize": ("q_block",),
    "kv_blocksize": ("k_block", "kv_block"),
    "num_warps": ("num_warps",),
    "num_stages": ("num_stages", "stages"),
}
#: The passes of a backward that blocks are for. That of a bias has blocks of its own, which are small anyway.
PASSES = ("keys", "queries", "fused")


@contextlib.contextmanager
def translated(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], cfg: Any, backend: str | None
) -> Iterator[Any]:
    """The configuration to call ``op`` with, inside of this block. What are no parameters stays as it is.

    What the parameters leave open is as the kernel's heuristic has it. Of the kernels that can do the call, it is for
    the best whose configuration has all that is given. ``BwdParams`` for an operation that has a backward are for that.
    """
    if not isinstance(cfg, (FwdParams, BwdParams)) or _is_their_own(op, cfg):
        yield cfg
        return
    inv = ejkernel_core.invocation(op, *args, **kwargs)
    is_backward = inv.operation is not None and "wrt" in inv.operation.signature.parameters
    if isinstance(cfg, FwdParams) and is_backward:
        raise TypeError(f"cfg: {op} is a backward pass, which takes BwdParams; got FwdParams")
    if isinstance(cfg, BwdParams) and not is_backward:
        with _for_the_backward(op, args, kwargs, cfg, backend):
            yield None
    else:
        yield _first_that_fits(inv, cfg, backend)


def _is_their_own(op: str, cfg: Any) -> bool:
    """Whether a kernel has these for its configurations."""
    return any(kernel.config_type is type(cfg) for kernel in ejkernel_core.registry.kernels(op)[0])


def _first_that_fits(inv: Invocation, params: Any, backend: str | None) -> Any:
    """``TypeError`` with the reason of every kernel; None where no kernel can do the call, which the call tells."""
    known = backend if backend in ejkernel_core.registry.backends(inv.op) else None
    candidates, _ = candidates_for(inv, ejkernel_core.registry.kernels(inv.op)[0], known, None)
    reasons = []
    for candidate in candidates:
        try:
            return _fitted(inv, params, candidate)
        except Unsupported as reason:
            reasons.append(f"{candidate.kernel.name} {reason}")
    if reasons:
        raise TypeError(f"cfg: {type(params).__name__} fits no kernel that can do this call: {'; '.join(reasons)}")
    return None


def _fitted(inv: Invocation, params: Any, candidate: Candidate) -> Any:
    cfg = configuration(params, candidate.cfg)
    candidate.kernel.check_cfg(inv, cfg)
    return cfg


def configuration(params: FwdParams | BwdParams, known: Any) -> Any:
    """A kernel's configuration with what is given, and the rest as in the known one; ``Unsupported`` says what fits.

    >>> from ejkernel_xla.flash_attention import Config
    >>> configuration(FwdParams(q_blocksize=64), Config(kv_block=128))
    Config(q_block=64, kv_block=128)
    """
    passes = {name: getattr(known, name, None) for name in PASSES}
    changed = {name: _changed(one, params) for name, one in passes.items() if attrs.has(type(one))}
    return attrs.evolve(known, **changed) if changed else _changed(known, params)


def _changed(known: Any, params: FwdParams | BwdParams) -> Any:
    own = [field.name for field in attrs.fields(type(known))] if attrs.has(type(known)) else []
    fitting = {field: name for field, names in NAMES.items() for name in names if name in own}
    given = params.to_dict()
    if not given:
        return known
    others = [field for field in given if field not in fitting]
    if others:
        takes = (
            f"takes {', '.join(fitting)}, and not {', '.join(others)}" if fitting else "takes none of these parameters"
        )
        raise Unsupported(takes)
    changes: dict[str, Any] = {fitting[field]: value for field, value in given.items()}
    try:
        return attrs.evolve(known, **changes)
    except (ValueError, TypeError) as fault:
        raise Unsupported(f"refuses it: {fault.args[0]}") from fault


# -- the backward pass of a call -------------------------------------------------------------------------------------


@attrs.frozen
class _Overlay:
    """Lies over everything that is remembered for one backward operation: whatever the shapes are that JAX meets."""

    op: str
    params: BwdParams
    digest: str = attrs.field(init=False)

    @digest.default
    def _content(self) -> str:
        return short_hash([self.op, self.params])

    def find(self, key: Key, candidate: Candidate) -> Record | None:
        if key.op != self.op:
            return None
        try:
            return Record(configuration(self.params, candidate.cfg), candidate.backend)
        except Unsupported:
            return None


def _for_the_backward(
    op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], params: BwdParams, backend: str | None
) -> contextlib.AbstractContextManager[None]:
    explanation = ejkernel_core.explain(op, *args, backend=backend, **kwargs)
    plan = None if explanation.backward is None else explanation.backward.plan
    if plan is None:
        raise TypeError(f"cfg: BwdParams are for a backward pass, and {op} has none here: {explanation}")
    backwards = ejkernel_core.registry.backends(plan.invocation.op)
    _first_that_fits(plan.invocation, params, backend if backend in backwards else None)
    overlay: Any = _Overlay(plan.invocation.op, params)

    def change(scope: Scope) -> Scope:
        return attrs.evolve(scope, overlays=(overlay, *scope.overlays))

    return ScopeChange(change)
