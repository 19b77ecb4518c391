"""The reference of the messages says what the types, the verbs and the trace events say."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import anyio
import msgspec
import pytest

from busllm import messages
from busllm.actors.control import TracesQuestion
from busllm.bus.memory import MemoryBus
from busllm.errors import RemoteError
from busllm.messages.control import raise_if_error
from busllm.plan import TokenLogprobs
from busllm.requests.owner import RequestOwner
from busllm.sampling import Grammar, SamplingParams
from busllm.stages.frontend.settings import FrontendSettings
from busllm.stages.frontend.stage import FrontendStage
from busllm.stages.scheduler.engine_statistics import engine_statistics
from busllm.stages.tokenizer import DetokenizeQuestion, TokenizeQuestion
from busllm.telemetry.trace import TraceEvent, TraceLevel
from busllm.testing.stack import Stack, StackConfig, request, running_stack
from tests.docs.pages import ROOT, Table, code, read, sections, table

PAGE = read("reference/messages.md")
SECTIONS = sections(PAGE)
PATIENCE_S = 20.0
OWNER_FILES = "busllm/requests"
SCHEDULER_FILES = ("busllm/engine", "busllm/stages/scheduler")


def message_types() -> dict[str, type[msgspec.Struct]]:
    """Every Struct of `busllm/messages`, and those of other files that travel inside them."""
    found: dict[str, type[msgspec.Struct]] = {
        type_.__name__: type_ for type_ in (TokenLogprobs, SamplingParams, Grammar, TraceEvent)
    }
    for info in pkgutil.iter_modules(messages.__path__, "busllm.messages."):
        module = importlib.import_module(info.name)
        own = (value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__)
        found |= {
            value.__name__: value for value in own if isinstance(value, type) and issubclass(value, msgspec.Struct)
        }
    return found


TYPES = message_types()


def test_every_message_has_a_section_and_every_section_of_a_type_a_message() -> None:
    documented = {title.strip("`") for title in SECTIONS if title.startswith("`")}
    assert documented == set(TYPES)


@pytest.mark.parametrize("name", sorted(TYPES))
def test_the_fields_of_a_message_are_documented_in_order_with_type_and_default(name: str) -> None:
    type_ = TYPES[name]
    documented = [(code(row["field"]), code(row["type"]), code(row["default"])) for row in table(SECTIONS[f"`{name}`"])]
    actual = [
        (field.name, type_.__annotations__[field.name], default_text(field)) for field in msgspec.structs.fields(type_)
    ]
    assert documented == actual


def default_text(field: msgspec.structs.FieldInfo) -> str:
    """A default in Python's notation; a Struct without what it repeats."""
    if field.default_factory is not msgspec.NODEFAULT:
        return repr(field.default_factory())
    if field.default is msgspec.NODEFAULT:
        return ""
    return f"{type(field.default).__name__}()" if isinstance(field.default, msgspec.Struct) else repr(field.default)


# ---------------------------------------------------------------- trace events


def recorded_events() -> set[tuple[str, str, frozenset[str]]]:
    """(stage, event, data) of every call that records one, read from the source."""
    found = set()
    for path in sorted((ROOT / "busllm").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="record"), args=[_, ast.Constant(value=str(name)), *_]):
                    found.add((stage_of(path), name, frozenset(data_of(node))))
                case ast.Call(func=ast.Attribute(attr="event"), args=[_, ast.Constant(value=str(name)), *_]):
                    # The engine's; the stage adds the choice.
                    found.add((stage_of(path), name, frozenset(data_of(node) | {"choice"})))
    return found


def data_of(call: ast.Call) -> set[str]:
    """Names of the data; `at_s`, when it happened, is none."""
    return {keyword.arg for keyword in call.keywords if keyword.arg not in (None, "at_s")}


def stage_of(path: Path) -> str:
    text = str(path.relative_to(ROOT))
    if text.startswith(OWNER_FILES):
        return "owner"
    return "scheduler" if text.startswith(SCHEDULER_FILES) else path.parent.name.replace("stages", path.stem)


def documented_events() -> set[tuple[str, str, frozenset[str]]]:
    return {
        (row["stage"], code(row["event"]), frozenset(re.findall(r"`(\w+)`", row["data"])))
        for row in table(SECTIONS["Events"])
    }


def test_every_trace_event_is_documented_with_its_data() -> None:
    assert documented_events() == recorded_events()


# ---------------------------------------------------------------- what a running cluster says


def rows(title: str) -> Table:
    return table(SECTIONS[title])


def verbs_of(kind: str) -> dict[str, str]:
    """Documented verbs and an example of each question."""
    return {
        code(row["verb"]): row["question"]
        for row in rows("Control verbs")
        if row["kind"] == "every" or kind in row["kind"].split(", ")
    }


QUESTIONS = {
    "probe": b'{"uids": ["a"]}',
    "tokenize": b'{"prompt": "a"}',
    "detokenize": b'{"token_ids": [97]}',
    "traces": b'{"limit": 3}',
}


async def ask(stack: Stack, name: str, verb: str) -> bytes:
    actor = stack.actors[name]
    subject = actor.subjects.control(actor.instance, verb)
    asking = stack.actors["owner:0"].connection
    return await asking.request(subject, QUESTIONS.get(verb, b""), timeout_s=PATIENCE_S)


def verbs_in_code() -> set[str]:
    """Words that functions which answer control questions compare a verb with."""
    found = set()
    folders = (ROOT / "busllm" / name for name in ("stages", "requests", "actors"))
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(function, ast.AsyncFunctionDef) and function.name in ("control", "answer_control"):
                for node in ast.walk(function):
                    match node:
                        case ast.MatchValue(value=ast.Constant(value=str(word))):
                            found.add(word)
                        case ast.Compare(left=ast.Name(id="verb"), comparators=[ast.Constant(value=str(word))]):
                            found.add(word)
    return found


def test_every_verb_in_the_code_is_documented() -> None:
    assert {code(row["verb"]) for row in rows("Control verbs")} == verbs_in_code()


@pytest.mark.parametrize(
    ("verb", "question"),
    [("traces", TracesQuestion), ("tokenize", TokenizeQuestion), ("detokenize", DetokenizeQuestion)],
)
def test_the_keys_of_a_question_are_documented(verb: str, question: type[msgspec.Struct]) -> None:
    (text,) = {row["question"] for row in rows("Control verbs") if code(row["verb"]) == verb}
    documented = set(re.findall(r'"(\w+)":', text))
    assert documented == set(question.__struct_fields__)


@pytest.mark.anyio
async def test_stages_answer_exactly_the_documented_verbs() -> None:
    every = verbs_in_code()
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus()) as stack:
            for name, kind in (
                ("owner:0", "client"),
                ("tokenizer:0", "tokenizer"),
                ("scheduler:0", "scheduler"),
                ("detokenizer:0", "detokenizer"),
            ):
                for verb in sorted(every - {"drain"}):
                    answer = await ask(stack, name, verb)
                    if verb in verbs_of(kind):
                        raise_if_error(answer)
                    else:
                        with pytest.raises(RemoteError):
                            raise_if_error(answer)


@pytest.mark.anyio
async def test_stages_announce_exactly_the_documented_statistics() -> None:
    documented: dict[str, set[str]] = {}
    for row in rows("Statistics"):
        documented.setdefault(row["kind"], set()).add(code(row["key"]))
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus()) as stack:
            announced = {
                announcement.kind: announcement
                for announcement in (actor.announcement() for actor in stack.actors.values())
            }
    for kind, announcement in announced.items():
        assert set(announcement.statistics) == documented[kind]
        assert set(announcement.load) == {"requests"}
    frontend = FrontendStage(FrontendSettings(model_name="m", max_model_len=8, vocab_size=8), [], RequestOwner(1))
    assert set(frontend.statistics()) == documented["frontend"]
    assert engine_statistics(None) == {}


@pytest.mark.anyio
async def test_the_events_of_a_request_are_the_documented_ones() -> None:
    documented = documented_events()
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(MemoryBus(), StackConfig(trace_level=TraceLevel.TOKENS)) as stack:
            live = stack.owner.submit(request("hello", max_tokens=8))
            async for _ in live:
                pass
            detokenizer = stack.actors["detokenizer:0"].trace
            await stack.wait_for(lambda: bool(detokenizer.events_of(live.uid)))
            events = [event for actor in stack.actors.values() for event in actor.trace.events_of(live.uid)]
    seen = {
        ("owner" if event.stage == "client" else event.stage, event.event, frozenset(event.data)) for event in events
    }
    assert {("owner", "received"), ("owner", "delta"), ("detokenizer", "finished")} <= {entry[:2] for entry in seen}
    assert seen <= documented
