"""How processes agree: whoever writes an answer first has decided, and all others obey or all fail.

The first of a question's processes makes the choice, and the others wait for it, so that one process measures. One that
has waited in vain makes its own choice and tries to write it. What stands in the store counts for all, also for a
process that is late. Each of the others then reports whether it can obey. The one that has decided collects the
reports, and writes the outcome: so a process that cannot obey is a failure of all, before any of them goes on.

Every wait has an end. A process that did not come in time is absent: nobody waits for it again until it has come.
"""

from __future__ import annotations

import json
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

import attrs

from ejkernel_core import Choice
from ejkernel_core.extend import quantity

from ._answer import Answer, Disagreement, Failure, Question, read, text_of
from ._client import Client

#: How much longer the others wait for the outcome than the process that collects the reports.
GRACE_S = 5.0
#: The shortest and the longest time between two looks at the reports.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.001, 0.05


@attrs.frozen(eq=False)
class Participant:
    """What one process does with a question. ``choose`` and ``obey`` raise what is a failure of all."""

    #: Its own choice, as an answer.
    choose: Callable[[], Answer]
    #: The choice according to an answer.
    obey: Callable[[Answer], Choice]
    #: Whether no kernel can run the call here, so that there is nothing to wait for.
    is_unable: bool
    #: How long to wait for the answer of another process, which may have to measure.
    answer_wait_s: float
    #: How long to wait for the report of another process.
    report_wait_s: float


class Agreement:
    """The agreement of this process with the others. It may be used by several threads."""

    def __init__(self, client: Client, process: int) -> None:
        self.process = process
        self._client = client
        self._lock = threading.Lock()
        #: By the name of a question: what was agreed on, for the life of the program.
        self._answers: dict[str, Future[Answer | Failure]] = {}
        self._absent: set[int] = set()
        #: The number of calls of ``renew``.
        self.generation = 0

    def renew(self) -> None:
        """Make later choices new ones."""
        with self._lock:
            self.generation += 1
            self._answers = {}
            self._absent = set()

    def known_answer(self, question: Question) -> Answer | None:
        """The answer that this process has agreed on before; None where there is none. Raises if it is a failure."""
        with self._lock:
            future = self._answers.get(question.name)
        if future is None or not future.done() or future.cancelled():
            return None
        return _answer_in(future.result())

    def settle(self, question: Question, participant: Participant) -> Answer:
        """The answer of all processes. Raises the failure of all."""
        future: Future[Answer | Failure] = Future()
        with self._lock:
            current = self._answers.setdefault(question.name, future)
        if current is not future:
            return self._answer_of_thread(current, question, participant)
        try:
            content, fault = self._agree(question, participant)
        except BaseException:  # an interrupt, or a store that has failed: nothing is agreed on
            with self._lock:
                self._answers.pop(question.name, None)
            future.cancel()
            raise
        future.set_result(content)
        if fault is not None:  # the original, with its traceback
            raise fault
        return _answer_in(content)

    def _answer_of_thread(
        self, future: Future[Answer | Failure], question: Question, participant: Participant
    ) -> Answer:
        """The answer that another thread asks for. It waits, measures and collects reports, and each has an end."""
        seconds = 2 * participant.answer_wait_s + participant.report_wait_s + GRACE_S
        try:
            return _answer_in(future.result(seconds))
        except CancelledError:
            return self.settle(question, participant)
        except TimeoutError:
            reason = f"{question.title}: another thread of process {self.process} does not agree within {seconds:g} s"
            raise Disagreement(reason) from None

    # -- one question ------------------------------------------------------------------------------------------------

    def _agree(self, question: Question, participant: Participant) -> tuple[Answer | Failure, Exception | None]:
        """The answer or the failure of all, with the exception where the failure is that of this process."""
        place = f"calls/{question.call}/{self.process}"
        self._client.replace(place, json.dumps(dict(question.circumstances)))
        content, fault = self._agreed_content(question, participant)
        if isinstance(content, Answer):  # others may still compare their circumstances with those of a failure
            self._client.replace(place, "")
        return content, fault

    def _agreed_content(
        self, question: Question, participant: Participant
    ) -> tuple[Answer | Failure, Exception | None]:
        text = self._awaited_text(question, participant)
        own_text, own_fault = None, None
        if text is None:
            content, own_fault = self._own_content(question, participant)
            own_text = text_of(content)
            self._client.set_once(f"{question.name}/answer", own_text)
            text = self._client.get(f"{question.name}/answer")
            assert text is not None
        content = read(text, self.process)
        self._absent.discard(json.loads(text)["by"])
        if isinstance(content, Failure):
            is_own = text == own_text
            if content.by == self.process and not is_own:  # it cannot read what another process has written
                self._report(question, content)
            return content, own_fault if is_own else None
        fault = own_fault or self._fault_of_obeying(content, participant)
        if content.by == self.process:
            return self._collected(question, participant, content), None
        failure = None if fault is None else Failure.of(fault, self.process)
        self._report(question, failure)
        if failure is not None:
            return failure, fault
        return self._outcome(question, participant, content), None

    def _awaited_text(self, question: Question, participant: Participant) -> str | None:
        """The text that another process has written, or writes while this one waits; None where it has to choose."""
        key = f"{question.name}/answer"
        first = min((p for p in question.processes if p not in self._absent), default=self.process)
        if first == self.process or participant.is_unable:
            return self._client.get(key)
        text = self._client.wait(key, participant.answer_wait_s)
        if text is None:
            self._mark_absent(question, {first}, participant.answer_wait_s)
        return text

    def _own_content(self, question: Question, participant: Participant) -> tuple[Answer | Failure, Exception | None]:
        """What this process answers, with its exception where that is a failure."""
        try:
            for process in sorted(self._absent.intersection(question.processes)):
                self._expect_same_circumstances(question, process)
            return participant.choose(), None
        except Exception as fault:  # any failure of one process is one of all
            return Failure.of(fault, self.process), fault

    def _fault_of_obeying(self, answer: Answer, participant: Participant) -> Exception | None:
        try:
            participant.obey(answer)
        except Exception as fault:  # any failure of one process is one of all
            return fault
        return None

    def _report(self, question: Question, failure: Failure | None) -> None:
        text = "" if failure is None else text_of(failure)
        self._client.replace(f"{question.name}/reports/{self.process}", text)

    def _outcome(self, question: Question, participant: Participant, answer: Answer) -> Answer | Failure:
        """What the process that has decided makes of the reports."""
        wait_s = participant.report_wait_s + GRACE_S
        text = self._client.wait(f"{question.name}/outcome", wait_s)
        if text is None:
            reason = f"{question.title}: process {answer.by} has chosen, and does not go on after {wait_s:g} s"
            return Failure(self.process, Disagreement.__name__, reason)
        return self._content_of_outcome(question, answer, text)

    def _collected(self, question: Question, participant: Participant, answer: Answer) -> Answer | Failure:
        """Collect the reports, and write the outcome for the others."""
        failure = self._collected_failure(question, participant)
        absent = sorted(self._absent.intersection(question.processes))
        outcome = {"failure": None if failure is None else text_of(failure), "absent": absent}
        self._client.set_once(f"{question.name}/outcome", json.dumps(outcome))
        text = self._client.get(f"{question.name}/outcome")  # that of an interrupted try counts
        assert text is not None
        return self._content_of_outcome(question, answer, text)

    def _content_of_outcome(self, question: Question, answer: Answer, text: str) -> Answer | Failure:
        """The answer, or the failure in the outcome. All processes take over which of them are absent: otherwise each
        would wait once by itself, one after the other.
        """
        outcome = json.loads(text)
        self._absent = self._absent.difference(question.processes).union(outcome["absent"]) - {self.process}
        return answer if outcome["failure"] is None else read(outcome["failure"], self.process)

    def _collected_failure(self, question: Question, participant: Participant) -> Failure | None:
        """The failure of a process that cannot obey; None where all can that have come."""
        end, pause = time.monotonic() + participant.report_wait_s, FIRST_PAUSE_S
        others = {*question.processes} - {self.process}
        self._absent -= {p for p in others & self._absent if self._client.get(f"calls/{question.call}/{p}")}
        while True:
            reports = {int(name): text for name, text in self._client.folder(f"{question.name}/reports").items()}
            self._absent -= reports.keys()
            for text in filter(None, reports.values()):
                failure = read(text, self.process)
                assert isinstance(failure, Failure)
                return failure
            missing = others - reports.keys() - self._absent
            if not missing:
                return None
            if time.monotonic() >= end:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)
        self._mark_absent(question, missing, participant.report_wait_s)
        try:
            for process in sorted(missing):
                self._expect_same_circumstances(question, process)
        except Disagreement as fault:
            return Failure.of(fault, self.process)
        return None

    # -- processes that do not come ----------------------------------------------------------------------------------

    def _mark_absent(self, question: Question, processes: set[int], seconds: float) -> None:
        self._absent |= processes
        names = " and ".join(f"process {process}" for process in sorted(processes))
        warnings.warn(
            f"{question.title}: {names} did not come within {seconds:g} s to choose alike. Process {self.process} goes "
            "on, and waits for no choice of theirs until they have come",
            RuntimeWarning,
            stacklevel=2,
        )

    def _expect_same_circumstances(self, question: Question, process: int) -> None:
        """Raise where a process that has not come makes the same call in other circumstances."""
        text = self._client.get(f"calls/{question.call}/{process}")
        differences = question.differences(json.loads(text)) if text else ""
        if differences:
            raise Disagreement(
                f"{question.title}: process {process} makes this call in other circumstances than process "
                f"{self.process}: {differences}. All processes have to enter the same scopes, and call renew() at the "
                "same places"
            )

    def __repr__(self) -> str:
        return f"Agreement(process {self.process}, {quantity(len(self._answers), 'answer')})"


def _answer_in(content: Answer | Failure) -> Answer:
    if isinstance(content, Failure):
        raise content.exception
    return content
