"""How processes agree, with a store in memory and a thread in the place of each process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import jax
import jax.numpy as jnp
import pytest

import ejkernel_agree
from ejkernel_agree import Disagreement, _agreement, _answer, policy
from ejkernel_agree._agreement import Agreement, Participant
from ejkernel_agree._answer import Answer, Failure, Question, answer_of, obedient_choice, question_of, read, text_of
from ejkernel_agree._client import JaxClient
from ejkernel_core import (
    Candidate,
    Choice,
    NoConfig,
    NoKernel,
    Operation,
    PluginError,
    Registry,
    Unsupported,
    hookimpl,
    overlay_cache,
    policy_override,
)
from ejkernel_core._choice import candidates_for
from ejkernel_core.extend import current_scope

X = jnp.ones(8)


class Store:
    """The store that the processes of a test share; ``texts`` is its content."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self._changed = threading.Condition()

    def set_once(self, key: str, text: str) -> None:
        with self._changed:
            self.texts.setdefault(key, text)
            self._changed.notify_all()

    def replace(self, key: str, text: str) -> None:
        with self._changed:
            self.texts[key] = text
            self._changed.notify_all()

    def get(self, key: str) -> str | None:
        return self.texts.get(key)

    def wait(self, key: str, seconds: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self.texts, seconds)
            return self.texts.get(key)

    def folder(self, key: str) -> dict[str, str]:
        with self._changed:
            below = {name: text for name, text in self.texts.items() if name.startswith(f"{key}/")}
        return {name.removeprefix(f"{key}/"): text for name, text in below.items()}


QUESTION = Question("scale(8)", (0, 1, 2), "call", {"backend=": None})


def answer(process: int) -> Answer:
    return Answer(process, f"kernel {process}", "{}", "", "a policy", {})


def participant(process: int, seconds: float = 30.0, **changes: Any) -> Participant:
    """One that would answer with its own number, and obeys everything."""
    obey = lambda answer: Choice(answer.backend, None, "")
    return attrs.evolve(Participant(lambda: answer(process), obey, False, seconds, seconds), **changes)


def raising(fault: Exception) -> Callable[..., Any]:
    def function(*arguments: Any) -> Any:
        raise fault

    return function


def settled(
    participants: Mapping[int, Participant], store: Store | None = None, question: Question = QUESTION
) -> dict[int, Any]:
    """What each process gets: the backend of the answer, or its exception."""
    results: dict[int, Any] = {}
    agreements = {process: Agreement(store, process) for process in participants} if store else {}
    shared = store or Store()

    def run(process: int) -> None:
        agreement = agreements.get(process) or Agreement(shared, process)
        try:
            results[process] = agreement.settle(question, participants[process]).backend
        except Exception as fault:
            results[process] = fault

    threads = [threading.Thread(target=run, args=(process,), daemon=True) for process in participants]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def texts(results: Mapping[int, Any]) -> set[str]:
    return {f"{type(fault).__name__}: {fault}" for fault in results.values()}


# -- the protocol -----------------------------------------------------------------------------------------------------


def test_all_get_the_answer_of_the_first_and_it_alone_chooses() -> None:
    choices: list[int] = []

    def choose(process: int) -> Answer:
        choices.append(process)
        return answer(process)

    participants = {p: participant(p, choose=lambda p=p: choose(p)) for p in (2, 1, 0)}
    assert settled(participants) == {0: "kernel 0", 1: "kernel 0", 2: "kernel 0"}
    assert choices == [0]


def test_the_others_wait_while_the_first_measures() -> None:
    def choose() -> Answer:
        time.sleep(0.5)
        return answer(0)

    results = settled({0: participant(0, choose=choose), 1: participant(1), 2: participant(2)})
    assert set(results.values()) == {"kernel 0"}


@pytest.mark.filterwarnings("ignore:scale:RuntimeWarning")
def test_the_others_agree_when_the_first_does_not_come_and_it_obeys_when_it_comes() -> None:
    store = Store()
    results = settled({1: participant(1, 0.2), 2: participant(2, 0.2)}, store)
    assert results in ({1: "kernel 1", 2: "kernel 1"}, {1: "kernel 2", 2: "kernel 2"})
    assert settled({0: participant(0)}, store)[0] == results[1]


def test_an_absent_process_costs_one_wait_and_a_warning() -> None:
    store = Store()
    agreements = [Agreement(store, process) for process in (0, 1)]

    def both(number: int) -> list[Any]:
        question, backends = attrs.evolve(QUESTION, call=f"call {number}"), []
        run = lambda p: backends.append(agreements[p].settle(question, participant(p, 0.5)).backend)
        other = threading.Thread(target=run, args=(1,))
        other.start()
        run(0)
        other.join()
        return backends

    with pytest.warns(RuntimeWarning, match="process 2 did not come within 0.5 s to choose alike. Process 0 goes on"):
        assert both(0) == ["kernel 0"] * 2
    begin = time.monotonic()
    assert [both(number) for number in range(1, 6)] == [["kernel 0"] * 2] * 5
    assert time.monotonic() - begin < 2.0  # five waits would be 2.5 s


def test_a_process_that_comes_again_is_waited_for_again() -> None:
    agreement, reports = Agreement(Store(), 0), f"{QUESTION.name}/reports"
    agreement._absent = {1, 2}
    agreement._client.replace(f"{reports}/1", "")
    assert agreement.settle(QUESTION, participant(0)).backend == "kernel 0"
    assert agreement._absent == {2}


def test_all_take_over_who_is_absent() -> None:
    """Otherwise process 1 would wait for process 0 in the next question, and process 2 for process 1."""
    store = Store()
    agreements = {process: Agreement(store, process) for process in (1, 2)}
    agreements[2]._absent = {0}
    store.set_once(f"{QUESTION.name}/answer", text_of(answer(2)))
    waiting = threading.Thread(target=lambda: agreements[2].settle(QUESTION, participant(2)))
    waiting.start()
    assert agreements[1].settle(QUESTION, participant(1)).backend == "kernel 2"
    waiting.join()
    assert [agreement._absent for agreement in agreements.values()] == [{0}, {0}]


def test_an_absent_process_that_makes_the_call_now_is_waited_for() -> None:
    store, agreement = Store(), Agreement(Store(), 0)
    agreement._client, agreement._absent = store, {1, 2}
    store.replace(f"calls/{QUESTION.call}/1", "{}")
    fault = Disagreement("process 1 has another version")

    def report() -> None:
        time.sleep(0.2)
        agreement_1 = Agreement(store, 1)
        with pytest.raises(Disagreement):
            agreement_1.settle(QUESTION, participant(1, obey=raising(fault)))

    late = threading.Thread(target=report)
    late.start()
    with pytest.raises(Disagreement, match="process 1 has another version"):
        agreement.settle(QUESTION, participant(0))
    late.join()


def test_the_first_of_those_that_come_chooses_next_time() -> None:
    store, choices = Store(), []
    agreement = Agreement(store, 1)
    agreement._absent = {0, 2}

    def choose() -> Answer:
        choices.append(1)
        return answer(1)

    assert agreement.settle(QUESTION, participant(1, choose=choose)).backend == "kernel 1"
    assert choices == [1]


def test_a_failure_of_the_first_is_one_of_all_at_once() -> None:
    fault = NoConfig("no record")
    results = settled({0: participant(0, choose=raising(fault)), 1: participant(1), 2: participant(2)})
    assert results[0] is fault
    assert texts(results) == {"NoConfig: no record", "NoConfig: process 0: no record"}
    assert [type(results[p]) for p in (1, 2)] == [NoConfig, NoConfig]


def test_a_process_that_cannot_obey_is_a_failure_of_all_at_once() -> None:
    fault = Disagreement("process 2 has another version")
    begin = time.monotonic()
    results = settled({0: participant(0), 1: participant(1), 2: participant(2, obey=raising(fault))})
    assert results[2] is fault
    assert texts(results) == {"Disagreement: process 2 has another version"}
    assert time.monotonic() - begin < 10  # not the wait, which is 30 s


def test_a_process_without_a_kernel_does_not_wait_for_the_others_to_measure() -> None:
    fault, is_told = NoKernel("no kernel can do it"), threading.Event()

    def choose() -> Answer:
        assert is_told.wait(20)
        return answer(0)

    def choose_nothing() -> Answer:
        is_told.set()
        raise fault

    unable = participant(2, choose=choose_nothing, obey=raising(fault), is_unable=True)
    results = settled({0: participant(0, choose=choose), 1: participant(1), 2: unable})
    assert results[2] is fault
    assert texts({p: results[p] for p in (0, 1)}) == {"NoKernel: process 2: no kernel can do it"}


def test_a_late_process_that_cannot_obey_raises() -> None:
    store = Store()
    with pytest.warns(RuntimeWarning, match="process 2 did not come"):
        assert settled({0: participant(0, 0.2), 1: participant(1, 0.2)}, store) == {0: "kernel 0", 1: "kernel 0"}
    fault = Disagreement("process 2 has another version")
    assert settled({2: participant(2, obey=raising(fault))}, store) == {2: fault}


def test_a_process_that_decides_and_dies_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_agreement, "GRACE_S", 0.1)
    store = Store()
    store.set_once(f"{QUESTION.name}/answer", text_of(answer(0)))
    results = settled({1: participant(1, 0.2)}, store)
    assert texts(results) == {"Disagreement: scale(8): process 0 has chosen, and does not go on after 0.3 s"}


def test_an_interrupted_process_can_ask_again() -> None:
    agreement, choices = Agreement(Store(), 0), []

    def choose() -> Answer:
        choices.append(0)
        if len(choices) == 1:
            raise KeyboardInterrupt
        return answer(0)

    question = attrs.evolve(QUESTION, processes=(0,))
    with pytest.raises(KeyboardInterrupt):
        agreement.settle(question, participant(0, choose=choose))
    assert agreement.settle(question, participant(0, choose=choose)).backend == "kernel 0"


def test_threads_of_a_process_get_one_answer_and_choose_once() -> None:
    agreement, choices, backends = Agreement(Store(), 0), [], []
    question = attrs.evolve(QUESTION, processes=(0,))

    def choose() -> Answer:
        time.sleep(0.2)
        choices.append(0)
        return answer(0)

    def run() -> None:
        backends.append(agreement.settle(question, participant(0, choose=choose)).backend)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(choices), set(backends), len(backends)) == (1, {"kernel 0"}, 8)


def test_an_answer_holds_and_so_does_a_failure_until_all_renew() -> None:
    agreement, question = Agreement(Store(), 0), attrs.evolve(QUESTION, processes=(0,))
    faults = [ValueError("too early")]

    def choose() -> Answer:
        if faults:
            raise faults.pop()
        return answer(0)

    for _ in range(2):
        with pytest.raises(ValueError, match="too early"):
            agreement.settle(question, participant(0, choose=choose))
    agreement.renew()
    renewed = attrs.evolve(question, circumstances={**question.circumstances, "renew()": agreement.generation})
    assert agreement.settle(renewed, participant(0, choose=choose)).backend == "kernel 0"
    assert agreement.known_answer(renewed) == answer(0)
    assert agreement.known_answer(question) is None


@pytest.mark.filterwarnings("ignore:scale:RuntimeWarning")
def test_processes_in_other_scopes_raise_after_the_wait() -> None:
    store, results = Store(), {}
    mine = [attrs.evolve(QUESTION, processes=(0, 1), circumstances={"mode of policy_override": m}) for m in ("a", "b")]

    def run(process: int) -> None:
        results.update(settled({process: participant(process, 0.3)}, store, mine[process]))

    threads = [threading.Thread(target=run, args=(process,)) for process in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [type(results[process]) for process in (0, 1)] == [Disagreement, Disagreement]
    assert (
        "process 1 makes this call in other circumstances than process 0: mode of policy_override (b there, a"
        in str(results[0])
    )


def test_an_absent_process_that_made_the_call_before_in_another_scope_is_no_disagreement() -> None:
    store = Store()
    agreements = {process: Agreement(store, process) for process in (0, 1)}
    pair = attrs.evolve(QUESTION, processes=(0, 1))

    def run(process: int, question: Question) -> Any:
        return agreements[process].settle(question, participant(process, 0.3)).backend

    other = threading.Thread(target=run, args=(1, pair))
    other.start()
    assert run(0, pair) == "kernel 0"
    other.join()
    with pytest.warns(RuntimeWarning, match="process 1 did not come"):
        assert run(0, attrs.evolve(pair, circumstances={"backend=": "xla"})) == "kernel 0"


# -- answers ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Config:
    block: int = 2


def scale(x, *, shift=0): ...


@hookimpl
def run_backend(inv, cfg):
    return inv["x"] * 2


def kernel(heuristic: Any = Config(), refusal: str = "", version: int = 1, **attributes: Any) -> SimpleNamespace:
    @hookimpl
    def heuristic_cfg(inv):
        if refusal:
            raise Unsupported(refusal)
        return heuristic

    attributes.setdefault("Config", type(heuristic))
    return SimpleNamespace(VERSION=version, heuristic_cfg=heuristic_cfg, run_backend=run_backend, **attributes)


def registry_with(**kernels: Any) -> Registry:
    registry = Registry(plugins="")
    registry.register(Operation(name="scale", signature=scale, outputs=lambda a: (a["x"],)))
    for name, plugin in kernels.items():
        registry.register(plugin, f"scale.{name}")
    return registry


def obeyed(theirs: Registry, ours: Registry) -> Choice:
    """The choice of process 1, after process 0 has chosen with its registry."""
    plan = theirs.plan("scale", X)
    text = text_of(answer_of(plan.choice, [Candidate(plan.kernel, plan.cfg)], 0))
    content = read(text, 1)
    assert isinstance(content, Answer)
    inv = attrs.evolve(ours.invocation("scale", X), processes=(0, 1))
    kernels, broken = ours.kernels("scale")
    candidates, verdicts = candidates_for(inv, kernels, None, None)
    question = question_of(inv, inv.key, None, current_scope(), 0)
    return obedient_choice(content, question, inv, 1, candidates, [*broken, *verdicts])


def test_a_choice_is_made_after_that_of_another_process() -> None:
    choice = obeyed(registry_with(one=kernel(Config(64))), registry_with(one=kernel(Config(32)), two=kernel()))
    assert (choice.backend, choice.cfg, choice.origin) == ("one", Config(64), "heuristic")
    assert str(choice) == "heuristic (process 0 has chosen for processes 0 and 1)"


def test_a_configuration_that_has_no_json_is_found_among_those_of_the_kernel() -> None:
    @hookimpl
    def config_space(inv):
        return [16, 32, 64]

    ours = registry_with(one=kernel(16, config_space=config_space))
    assert obeyed(registry_with(one=kernel(64)), ours).cfg == 64
    with pytest.raises(Disagreement, match="cannot be written as JSON, and is none that scale.one offers"):
        obeyed(registry_with(one=kernel(65)), ours)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ({"one": kernel(version=4)}, r"by heuristic, with scale.one 1. Process 1 has scale.one 4: install the same"),
        ({"two": kernel()}, "scale.one, by heuristic, which process 1 cannot run: it is not installed"),
        ({"one": kernel(refusal="no driver")}, "cannot run: scale.one (registered at run time): refused, no driver"),
        ({"one": kernel(attrs.make_class("Other", ["size"], frozen=True)(3))}, "cannot run: "),
    ],
    ids=["version", "kernel", "refusal", "type"],
)
def test_a_process_that_cannot_obey_says_why(ours: dict[str, Any], words: str) -> None:
    with pytest.raises(Disagreement) as error:
        obeyed(registry_with(one=kernel()), registry_with(**ours))
    assert words.replace("\\", "") in str(error.value)


def test_check_cfg_is_asked() -> None:
    @hookimpl
    def check_cfg(inv, cfg):
        if cfg.block > 32:
            raise Unsupported("too little memory")

    ours = registry_with(one=kernel(Config(32), check_cfg=check_cfg))
    with pytest.raises(Disagreement, match="which process 1 cannot run: too little memory"):
        obeyed(registry_with(one=kernel(Config(64))), ours)


def test_answers_of_another_format_are_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_answer, "FORMAT", 2)
    monkeypatch.setattr(_answer, "version", lambda name: "9.9")
    text = text_of(answer(0))
    monkeypatch.undo()
    content = read(text, 1)
    assert isinstance(content, Failure)
    assert "process 0 has ejkernel-agree 9.9, process 1 has " in content.message
    assert isinstance(content.exception, Disagreement)


@pytest.mark.parametrize("kind", [NoConfig, NoKernel, PluginError, Unsupported, TypeError, ValueError, MemoryError])
def test_a_failure_has_its_own_type_in_all_processes(kind: type[Exception]) -> None:
    content = read(text_of(Failure.of(kind("too large"), 3)), 0)
    assert isinstance(content, Failure)
    assert type(content.exception) is kind
    assert content.exception.args[0] == "process 3: too large"


def test_a_failure_of_an_unknown_type_is_a_disagreement() -> None:
    class Strange(Exception): ...

    exception = Failure.of(Strange("odd"), 3).exception
    assert (type(exception), str(exception)) == (Disagreement, "process 3 failed with Strange: odd")


def test_a_failure_whose_text_cannot_be_made_has_the_name_of_its_type() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ZeroDivisionError

    exception = Failure.of(Silent(), 3).exception
    assert isinstance(exception, Disagreement)
    assert str(exception) == "process 3 failed with Silent: Silent"


# -- questions --------------------------------------------------------------------------------------------------------


def question(processes: Any = (0, 1), backend: str | None = None, generation: int = 0, **options: Any) -> Question:
    inv = registry_with(one=kernel()).invocation("scale", X, **options)
    inv = attrs.evolve(inv, processes=processes)
    return question_of(inv, inv.key, backend, current_scope(), generation)


def test_what_decides_a_choice_is_in_the_name_of_its_answer() -> None:
    names = [question().name, question((0, 2)).name, question(backend="one").name, question(generation=1).name]
    names.append(question(shift=1).name)
    with policy_override(budget_s=3):
        names.append(question().name)
    with overlay_cache({"some key": 3}):
        names.append(question().name)
    assert len(set(names)) == 7
    assert question().name == names[0]


def test_the_device_is_not_in_the_name() -> None:
    inv = attrs.evolve(registry_with(one=kernel()).invocation("scale", X), processes=(0, 1))
    other = attrs.evolve(inv, device_kind="another processor")
    assert inv.key != other.key
    names = [question_of(each, each.key, None, current_scope(), 0).name for each in (inv, other)]
    assert names[0] == names[1]


# -- the policy -------------------------------------------------------------------------------------------------------


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """The store of a program of two processes, of which this one is the first; the other one obeys at once."""

    class Obeyed(Store):
        def folder(self, key: str) -> dict[str, str]:
            return {"1": ""}

    shared = Obeyed()
    monkeypatch.setattr(policy, "connected_client", lambda: shared)
    monkeypatch.setattr(policy, "JaxClient", lambda client: client)
    monkeypatch.setattr(policy, "_current", [])
    return shared


def choose(registry: Registry, may_measure: bool = True) -> Any:
    inv = attrs.evolve(registry.invocation("scale", X), processes=(0, 1))
    return registry.choose(inv, None, None, attrs.evolve(current_scope(), may_measure=may_measure))


def test_the_policy_settles_once_and_explanations_know_the_answer(store: Store) -> None:
    registry = registry_with(one=kernel())
    registry.register(policy, "agree")
    before = choose(registry, may_measure=False)
    assert store.texts == {}
    assert "processes 0 and 1 agree when the call is compiled" in str(before)
    plan = choose(registry)
    assert (plan.cfg, plan.choice.note) == (Config(2), "process 0 has chosen for processes 0 and 1")
    registry.register(kernel(Config(64)), "scale.one")
    assert choose(registry, may_measure=False).cfg == choose(registry).cfg == Config(2)
    ejkernel_agree.renew()
    assert choose(registry).cfg == Config(64)


def test_without_jax_distributed_the_policy_has_no_choice() -> None:
    registry = registry_with(one=kernel())
    registry.register(policy, "agree")
    ejkernel_agree.renew()
    assert "agree (registered at run time): no answer, it has no choice" in str(choose(registry))


def test_a_program_of_other_processes_and_a_call_without_a_key_are_not_settled(store: Store) -> None:
    registry = registry_with(one=kernel())
    registry.register(policy, "agree")
    inv = attrs.evolve(registry.invocation("scale", X), processes=(1, 2))
    assert "it has no choice" in str(registry.choose(inv, None, None, current_scope()))
    without_key = attrs.evolve(registry.invocation("scale", X, shift=object()), processes=(0, 1))
    assert "it has no choice" in str(registry.choose(without_key, None, None, current_scope()))
    assert store.texts == {}


@pytest.mark.parametrize(("text", "seconds"), [("", 60.0), ("2.5", 2.5), ("-1", 60.0), ("soon", 60.0), ("nan", 60.0)])
@pytest.mark.filterwarnings("ignore:EJKERNEL_AGREE_WAIT_S takes seconds above 0")
def test_the_wait_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float) -> None:
    monkeypatch.setenv("EJKERNEL_AGREE_WAIT_S", text)
    assert policy._wait_s() == seconds


@pytest.mark.parametrize(("mode", "seconds"), [("off", 60.0), ("on_miss", 67.0), ("error_on_miss", 60.0)])
def test_an_answer_is_awaited_for_the_budget_too_where_the_first_may_measure(
    store: Store, monkeypatch: pytest.MonkeyPatch, mode: str, seconds: float
) -> None:
    registry, waits = registry_with(one=kernel()), []
    registry.register(policy, "agree")

    def settle(self: Agreement, question: Question, participant: Participant) -> Answer:
        waits.append((participant.answer_wait_s, participant.report_wait_s))
        raise NoConfig("enough")

    monkeypatch.setattr(Agreement, "settle", settle)
    with policy_override(mode=mode, budget_s=7), pytest.raises(NoConfig):
        choose(registry)
    assert waits == [(seconds, 60.0)]


# -- the client of JAX ------------------------------------------------------------------------------------------------


class Client:
    """A client with the errors of JAX's."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def key_value_set(self, key: str, text: str, allow_overwrite: bool = False) -> None:
        if key in self.texts and not allow_overwrite:
            raise jax.errors.JaxRuntimeError(f"ALREADY_EXISTS: key {key} already exists.")
        self.texts[key] = text

    def key_value_try_get(self, key: str) -> str:
        if key not in self.texts:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return self.texts[key]

    def blocking_key_value_get(self, key: str, milliseconds: int) -> str:
        time.sleep(milliseconds / 1000)
        if key not in self.texts:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out with key")
        return self.texts[key]

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        return [item for item in self.texts.items() if item[0].startswith(key)]


def test_the_client_of_jax() -> None:
    client = JaxClient(Client())
    assert (client.get("a/1"), client.wait("a/1", 0.05), client.folder("a")) == (None, None, {})
    client.set_once("a/1", "x")
    client.set_once("a/1", "y")
    client.replace("a/2", "y")
    client.replace("a/2", "z")
    assert (client.get("a/1"), client.wait("a/2", 0.05)) == ("x", "z")
    assert client.folder("a") == {"1": "x", "2": "z"}


def test_other_errors_of_the_client_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: the coordination service has gone")

    fake = Client()
    client = JaxClient(fake)
    for method in ("key_value_set", "key_value_try_get", "blocking_key_value_get", "key_value_dir_get"):
        monkeypatch.setattr(fake, method, fail)
    for call in (
        lambda: client.set_once("a", "x"),
        lambda: client.replace("a", "x"),
        lambda: client.get("a"),
        lambda: client.wait("a", 1),
        lambda: client.folder("a"),
    ):
        with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
            call()
