"""The reference of the subjects lists what is built, and what travels is what it says."""

from __future__ import annotations

import importlib
import inspect
import re

import anyio
import msgspec
import pytest

from busllm.bus.memory import MemoryBus
from busllm.bus.protocol import Message
from busllm.bus.subjects import Subjects
from busllm.messages import control, to_detokenizer, to_frontend, to_ranks, to_scheduler, to_tokenizer
from busllm.messages.codec import Decoder
from busllm.telemetry.trace import TraceEvent
from busllm.testing.stack import PATIENT_TIMINGS, StackConfig, request, running_stack
from tests.docs.pages import DOCS, ROOT, blocks, code, read, sections, table

PAGE = read("reference/subjects.md")
ROWS = table(sections(PAGE)["All subjects"])
CLUSTER = "<cluster>"
NO_SUBJECTS = ("all_of", "parts")  # patterns, and taking subjects apart
PATIENCE_S = 20.0
DECODERS: dict[str, Decoder[object]] = {
    "Tokenize": to_tokenizer.decoder,
    "Generate": to_scheduler.decoder,
    "Allocate": to_ranks.decoder,
    "Step": to_ranks.decoder,
    "OrderTaken": to_ranks.taken_decoder,
    "StopMatched": to_scheduler.decoder,
    "StepTokens": to_detokenizer.decoder,
    "StepText": to_frontend.decoder,
    "Taken": to_frontend.decoder,
    "Tokenized": to_frontend.decoder,
    "Failed": to_frontend.decoder,
    "TraceEvent": Decoder(TraceEvent, json=True),
    "Announcement": control.announcement_decoder,
}


def built() -> dict[str, str]:
    """Method of `Subjects` → the subject that it builds, with names for words."""
    methods = {
        name: function
        for name, function in inspect.getmembers(Subjects, inspect.isfunction)
        if not name.startswith("_") and name not in NO_SUBJECTS
    }
    return {
        name: example_of(name, list(inspect.signature(function).parameters)[1:]) for name, function in methods.items()
    }


def example_of(name: str, words: list[str]) -> str:
    subject: str = getattr(Subjects("cluster"), name)(*(f"<{word}>" for word in words))
    return subject.replace(".cluster.", f".{CLUSTER}.")


def is_used(name: str) -> bool:
    """Whether anything in the package builds this subject."""
    pattern = re.compile(rf"[sS]ubjects(\([^)]*\))?\.{name}\(")
    return any(pattern.search(path.read_text(encoding="utf-8")) for path in (ROOT / "busllm").rglob("*.py"))


def test_every_subject_is_documented_and_every_documented_one_is_built() -> None:
    assert {code(row["subject"]) for row in ROWS} == set(built().values())


@pytest.mark.parametrize("name", sorted(built()))
def test_a_subject_is_called_reserved_exactly_when_nothing_uses_it(name: str) -> None:
    (row,) = [row for row in ROWS if code(row["subject"]) == built()[name]]
    assert row["from → to"].startswith("reserved") != is_used(name)


def test_every_named_payload_is_a_message() -> None:
    modules = [importlib.import_module(f"busllm.messages.{name}") for name in ("parts", *payload_modules())]
    for name in re.findall(r"\[`(\w+)`\]", " ".join(row["payload"] for row in ROWS)):
        types = [getattr(module, name) for module in modules if hasattr(module, name)] + [TraceEvent]
        assert issubclass(types[0], msgspec.Struct)


def payload_modules() -> tuple[str, ...]:
    return ("to_tokenizer", "to_ranks", "to_scheduler", "to_detokenizer", "to_frontend", "control")


def test_the_subjects_of_the_examples_are_documented() -> None:
    code_of_page = "\n".join(block.code for block in blocks(DOCS / "reference/subjects.md", "sh"))
    shown = re.findall(r"nats (?:sub|pub|req) '?(busllm\.local\.[^\s']+)", code_of_page)
    assert len(shown) >= 5
    for subject in shown:
        examples = [subject.replace(">", ".".join(["any"] * number)).replace("*", "any") for number in (1, 2, 3)]
        assert any(re.fullmatch(pattern_of(row), example) for row in ROWS for example in examples), subject


def pattern_of(row: dict[str, str]) -> str:
    """A documented subject as a regular expression."""
    parts = [r"[^.]+" if part.startswith("<") else re.escape(part) for part in code(row["subject"]).split(".")]
    return r"\.".join(parts)


@pytest.mark.anyio
async def test_what_travels_with_a_request_is_documented_with_its_payload() -> None:
    bus = MemoryBus()
    seen: dict[str, set[str]] = {}
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(bus, StackConfig(schedulers=2, ranks=2, timings=PATIENT_TIMINGS)) as stack:
            watcher = await bus.connect(name="watcher", inbox="inbox.watcher")
            await watcher.subscribe(">")
            stopped = request("a stop string ends it", max_tokens=500, stop=tuple("etaoinshrdlu"))
            async for _ in stack.owner.submit(stopped):
                pass
            live = stack.owner.submit(request("and this one is left", max_tokens=50_000))
            await anext(live)
            stack.owner.abort(live.uid)
            while not any(subject.startswith("busllm.test.abort.") for subject in seen):
                for item in await watcher.receive():
                    assert isinstance(item, Message)
                    seen.setdefault(item.subject, set()).add(documented_payload(item))
            await watcher.close()
    kinds = {subject.split(".")[2] for subject in seen}
    assert {"tokenize", "generate", "plan", "detokenize", "stop", "reply", "trace", "abort"} <= kinds


def documented_payload(message: Message) -> str:
    """The type of a message, which its subject's row has to name."""
    row = next(
        (row for row in ROWS if re.fullmatch(pattern_of(row) + inbox_tail(row), message.subject)),
        None,
    )
    assert row is not None, f"{message.subject} is not documented"
    for name in re.findall(r"\[`(\w+)`\]", row["payload"]):
        decoded = DECODERS[name].decode(message.payload)
        if type(decoded).__name__ == name:
            return name
    assert row["payload"].startswith(("empty", "the answer")), f"{message.subject} carries something else"
    return ""


def inbox_tail(row: dict[str, str]) -> str:
    return r"(\.[^.]+)+" if ".inbox." in row["subject"] else ""
