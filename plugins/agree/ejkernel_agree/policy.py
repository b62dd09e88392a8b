"""The policy ``agree``: the hook ``settle``, by the key-value store of ``jax.distributed``."""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Callable, Sequence

import attrs
import jax

from ejkernel_core import AutotunePolicy, Candidate, Choice, Invocation, Scope, Verdict, hookimpl, to_json

from ._agreement import Agreement, Participant
from ._answer import Answer, answer_of, note_of, obedient_choice, question_of
from ._client import JaxClient, connected_client

#: How many seconds to wait for another process.
VARIABLE = "EJKERNEL_AGREE_WAIT_S"
DEFAULT_WAIT_S = 60.0

_lock = threading.Lock()
#: JAX's client, and the agreement by it. Another client has another store.
_current: list[tuple[object, Agreement]] = []


def agreement() -> Agreement | None:
    """The agreement of this process with others; None where ``jax.distributed`` is not initialized."""
    client = connected_client()
    if client is None:
        return None
    with _lock:
        if not _current or _current[0][0] is not client:
            # All processes import cattrs here, at once. Otherwise each would when it reads the first answer, in turn.
            to_json(AutotunePolicy())
            _current[:] = [(client, Agreement(JaxClient(client), jax.process_index()))]
        return _current[0][1]


def renew() -> None:
    """Make later choices new ones: what was measured or stored meanwhile counts. All processes of the program have to
    call it at the same place. A compiled function keeps its choice. With one process, nothing happens.

    >>> renew()
    """
    current = agreement()
    if current is not None:
        current.renew()


@hookimpl
def settle(
    inv: Invocation,
    candidates: Sequence[Candidate],
    verdicts: Sequence[Verdict],
    backend: str | None,
    scope: Scope,
    choose: Callable[[], Choice],
) -> Choice | None:
    """The choice of the process that has answered first. Where that fails in one process, it fails in all."""
    current = agreement()
    if current is None or inv.processes is None or current.process not in inv.processes:
        return None
    try:
        key = inv.key
    except TypeError:  # an option without content
        return None
    question = question_of(inv, key, backend, scope, current.generation)
    own_choices: list[Choice] = []

    def own_answer() -> Answer:
        own_choices.append(choose())
        return answer_of(own_choices[-1], candidates, current.process)

    def obey(answer: Answer) -> Choice:
        if not candidates:
            choose()  # raises the reasons of all kernels
        return obedient_choice(answer, question, inv, current.process, candidates, verdicts)

    if not scope.may_measure:  # a plan or an explanation, which waits for nobody
        known_answer = current.known_answer(question)
        return None if known_answer is None else obey(known_answer)
    wait_s = _wait_s()
    budget_s = scope.policy.budget_s if scope.policy.mode == "on_miss" else 0.0
    answer = current.settle(question, Participant(own_answer, obey, not candidates, wait_s + budget_s, wait_s))
    if answer.by == current.process and own_choices:
        notes = filter(None, (own_choices[-1].note, note_of(answer, question)))
        return attrs.evolve(own_choices[-1], note="; ".join(notes))
    return obey(answer)


def _wait_s() -> float:
    text = os.environ.get(VARIABLE) or str(DEFAULT_WAIT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if 0 < seconds < math.inf:
        return seconds
    warnings.warn(f"{VARIABLE} takes seconds above 0; got {text!r}, taken for {DEFAULT_WAIT_S:g}", stacklevel=2)
    return DEFAULT_WAIT_S
