"""Questions that processes agree on, and answers: a choice, or a failure of all."""

from __future__ import annotations

import builtins
import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import attrs

import ejkernel_core
from ejkernel_core import (
    Candidate,
    Choice,
    EjkernelError,
    Invocation,
    Key,
    RecordError,
    Scope,
    Unsupported,
    Verdict,
    from_json,
    to_json,
)
from ejkernel_core.extend import message, processes_in_words, short_hash

#: The format of answers. Others are not read.
FORMAT = 1


class Disagreement(EjkernelError):
    """The processes of a program cannot make the same choice. The message names them, and what differs."""


@attrs.frozen
class Question:
    """A choice that several processes have to make alike."""

    #: The call in words, for messages.
    title: str
    processes: tuple[int, ...]
    #: A hash of what is called, by which processes.
    call: str
    #: What else the choice depends on, by what a program changes it with.
    circumstances: Mapping[str, Any]

    @property
    def name(self) -> str:
        """A hash of all of it: the key of the answer."""
        return short_hash([self.call, dict(self.circumstances)], 32)

    def differences(self, circumstances: Mapping[str, Any]) -> str:
        """What differs in other circumstances of the same call, in words; "" for nothing."""
        names = [name for name in self.circumstances if self.circumstances[name] != circumstances.get(name)]
        return ", ".join(f"{name} ({circumstances.get(name)} there, {self.circumstances[name]} here)" for name in names)


def question_of(inv: Invocation, key: Key, backend: str | None, scope: Scope, generation: int) -> Question:
    """The question of an invocation with this key.

    It has neither versions nor the name of the device, because processes that differ in these have to find each other.
    """
    assert inv.processes is not None
    problem = {**json.loads(key.problem), "device": inv.platform}
    chain = None if scope.policies is None else [name for name, _ in scope.policies]
    # As in JSON, so that they are equal to those that other processes have written.
    circumstances: dict[str, Any] = json.loads(
        json.dumps(
            {
                "backend=": backend,
                "overlay_cache": [overlay.digest for overlay in scope.overlays],
                **{f"{name} of policy_override": value for name, value in attrs.asdict(scope.policy).items()},
                "policies": chain,
                "renew()": generation,
            }
        )
    )
    return Question(str(inv), inv.processes, short_hash([problem, inv.processes], 32), circumstances)


# -- failures ----------------------------------------------------------------------------------------------------------

#: The types of failures that are the same in all processes. Any other one is a ``Disagreement`` there.
_TYPES: dict[str, type[Exception]] = {
    **{name: getattr(ejkernel_core, name) for name in ejkernel_core.__all__ if name.endswith(("Error", "Unsupported"))},
    **{name: getattr(ejkernel_core, name) for name in ("NoConfig", "NoKernel", "UnknownBackend", "UnknownOperation")},
    **{name: getattr(builtins, name) for name in ("MemoryError", "RuntimeError", "TypeError", "ValueError")},
}


@attrs.frozen
class Failure:
    """An exception of one process, as text."""

    by: int
    type: str
    message: str

    @classmethod
    def of(cls, fault: BaseException, process: int) -> Failure:
        """The failure of a process."""
        return cls(process, type(fault).__name__, message(fault))

    @property
    def exception(self) -> Exception:
        """The exception for every process."""
        if self.type == Disagreement.__name__:
            return Disagreement(self.message)
        kind = _TYPES.get(self.type)
        if kind is None:
            return Disagreement(f"process {self.by} failed with {self.type}: {self.message}")
        return kind(f"process {self.by}: {self.message}")


# -- answers -----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Answer:
    """A choice as text, with the process that made it."""

    by: int
    backend: str
    #: The configuration as JSON; None for one that has no JSON.
    cfg: str | None
    #: A hash of the configuration.
    digest: str
    origin: str
    #: The versions of the kernel, of JAX and of the compilers in that process.
    software: Mapping[str, str]


def answer_of(choice: Choice, candidates: Sequence[Candidate], process: int) -> Answer:
    """The answer for a choice of this process."""
    software = next(c.kernel.software for c in candidates if c.backend == choice.backend)
    try:
        cfg = to_json(choice.cfg)
    except RecordError:  # such as a number: it is found by its hash
        cfg = None
    return Answer(process, choice.backend, cfg, short_hash(choice.cfg), choice.origin, dict(software))


def text_of(content: Answer | Failure) -> str:
    """An answer or a failure as JSON."""
    kind = "answer" if isinstance(content, Answer) else "failure"
    return json.dumps({"format": FORMAT, "version": _version(), "by": content.by, kind: attrs.asdict(content)})


def read(text: str, process: int) -> Answer | Failure:
    """The answer or the failure in a text that another process has written for this one."""
    document = json.loads(text)
    if document["format"] != FORMAT:
        by, theirs = document["by"], document["version"]
        reason = f"process {by} has ejkernel-agree {theirs}, process {process} has {_version()}: install the same one"
        return Failure(process, Disagreement.__name__, reason)
    return Answer(**document["answer"]) if "answer" in document else Failure(**document["failure"])


def _version() -> str:
    return version("ejkernel-agree")


def obedient_choice(
    answer: Answer,
    question: Question,
    inv: Invocation,
    process: int,
    candidates: Sequence[Candidate],
    verdicts: Sequence[Verdict],
) -> Choice:
    """The choice of this process according to the answer. ``Disagreement`` where it cannot make that choice."""
    title = f"{inv.op}: process {answer.by} has chosen {inv.op}.{answer.backend}, by {answer.origin}"
    candidate = next((c for c in candidates if c.backend == answer.backend), None)
    if candidate is None:
        verdict = next((str(v) for v in verdicts if v.name == f"{inv.op}.{answer.backend}"), "it is not installed")
        raise Disagreement(f"{title}, which process {process} cannot run: {verdict}")
    theirs, ours = answer.software, candidate.kernel.software
    names = [name for name in sorted({*theirs, *ours}) if theirs.get(name) != ours.get(name)]
    if names:
        there, here = (", ".join(f"{n} {versions.get(n, 'not used')}" for n in names) for versions in (theirs, ours))
        raise Disagreement(
            f"{title}, with {there}. Process {process} has {here}: install the same versions for all processes. If "
            "they have changed while the program runs, call ejkernel_agree.renew() in all of them"
        )
    try:
        cfg = _configuration(answer, inv, candidate)
        if cfg != candidate.cfg:  # that of the heuristic needs no check
            candidate.kernel.check_cfg(inv, cfg)
    except (RecordError, Unsupported) as reason:
        raise Disagreement(f"{title}, which process {process} cannot run: {reason}") from reason
    return Choice(answer.backend, cfg, answer.origin, note=note_of(answer, question))


def note_of(answer: Answer, question: Question) -> str:
    """The remark in explanations of a choice."""
    return f"process {answer.by} has chosen for {processes_in_words(question.processes)}"


def _configuration(answer: Answer, inv: Invocation, candidate: Candidate) -> Any:
    if answer.cfg is not None:
        return from_json(answer.cfg, candidate.config_type or type(None))
    for cfg in (candidate.cfg, *candidate.kernel.configurations(inv, lambda fault: None)):
        if short_hash(cfg) == answer.digest:
            return cfg
    raise RecordError(f"its configuration cannot be written as JSON, and is none that {candidate.kernel.name} offers")
