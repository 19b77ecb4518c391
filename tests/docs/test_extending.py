"""The Python on the pages runs; the plug-ins are installed as the package that the page describes."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import pytest

import busllm
from busllm.bus.connect import BusOptions, open_bus
from busllm.bus.memory import MemoryBus
from busllm.messages.control import raise_if_error
from busllm.testing.bus_conformance import BusConformance
from busllm.testing.stack import running_stack
from busllm.testing.tiny_model import write_tiny_model
from tests.docs.pages import DOCS, blocks

MODULE = "busllm_example"
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The module made of the page's Python, found by the entry points of the page's TOML."""
    directory = tmp_path_factory.mktemp("example")
    page = DOCS / "extending.md"
    code = "from __future__ import annotations\n" + "\n".join(block.code for block in blocks(page, "python"))
    (directory / f"{MODULE}.py").write_text(code)
    (project,) = (tomllib.loads(block.code)["project"] for block in blocks(page, "toml"))
    information = directory / f"{MODULE}-{project['version']}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "".join(f"{name} = {at}\n" for name, at in named.items()) for group, named in groups]
    (information / "entry_points.txt").write_text("\n".join(lines))
    patch = pytest.MonkeyPatch()
    patch.syspath_prepend(directory)
    try:
        yield __import__(MODULE)
    finally:
        sys.modules.pop(MODULE, None)
        patch.undo()


def test_the_example_of_the_engine_runs() -> None:
    for block in blocks(DOCS / "engine.md", "python"):
        exec(compile(block.code, str(block), "exec"), {})


def test_the_bus_is_opened_by_its_name(example: Any) -> None:
    bus = open_bus("example", BusOptions(extra={"max_payload_bytes": 5000}))
    assert isinstance(bus, MemoryBus)
    connection = anyio.run(lambda: bus.connect(name="a", inbox="inbox.a"))
    assert connection.max_payload_bytes == 5000


@pytest.mark.anyio
class TestTheBusOfThePage(BusConformance):
    """Held to the guarantees by the harness of the page."""

    @pytest.fixture
    async def harness(self, example: Any) -> AsyncIterator[Any]:
        harness = example.ExampleHarness()
        yield harness
        await harness.close()


def test_the_attention_backend_gives_the_tokens_of_the_reference(example: Any, tmp_path: Path) -> None:
    source = str(write_tiny_model(tmp_path, "mistral", sliding_window=7))
    prompts = [[7, 9, 11], list(range(1, 60)), list(range(200, 221))]
    sampling = busllm.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
    answers = {}
    for attention in ("torch", "row-by-row"):
        with busllm.LLM(source, attention=attention, device="cpu", step_tokens=64, kv_tokens=2048) as llm:
            answers[attention] = llm.generate(prompts, sampling)
    for ours, theirs in zip(answers["row-by-row"], answers["torch"], strict=True):
        assert ours.token_ids == theirs.token_ids
        assert [one.chosen for one in ours.logprobs or ()] == pytest.approx(
            [one.chosen for one in theirs.logprobs or ()], abs=1e-4
        )


@pytest.mark.anyio
async def test_the_stage_hears_answers_and_is_asked_like_any_other(example: Any) -> None:
    bus = MemoryBus()
    with anyio.fail_after(PATIENCE_S):
        async with running_stack(bus) as stack, anyio.create_task_group() as tasks:
            tally = example.make_actor(bus, "test")
            tasks.start_soon(tally.run)
            await tally.ready.wait()
            await stack.generate("hello", max_tokens=8)
            await stack.wait_for(lambda: tally.announcement().statistics == {"length": 1})
            subject = tally.subjects.control(tally.instance, "tally")
            asking = stack.actors["owner:0"].connection
            answer = await asking.request(subject, b"", timeout_s=PATIENCE_S)
            raise_if_error(answer)
            assert answer == b'{"length":1}'
            tally.stop()
