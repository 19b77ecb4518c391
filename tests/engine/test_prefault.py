"""Memory that is used for the first time before anybody waits for it."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest

from busllm.engine import prefault
from busllm.engine.loader import LoadConfig, load_runner
from busllm.engine.model_runner import ModelRunner
from busllm.engine.prefault import Prefault
from busllm.errors import EngineError
from busllm.testing.tiny_model import write_tiny_model

MB = 2**20


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def fresh(megabytes: int) -> np.ndarray:
    """Memory that nobody has used, which numpy's own may not be."""
    memory = mmap.mmap(-1, megabytes * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, np.uint8)


def prefault_of(*blocks: np.ndarray) -> Prefault:
    return Prefault(tuple((block.ctypes.data, block.nbytes) for block in blocks))


def can_prefault() -> bool:
    some = fresh(8)
    return prefault_of(some).advance()


needs_linux_5_14 = pytest.mark.skipif(not can_prefault(), reason="this kernel has no MADV_POPULATE_WRITE")


@needs_linux_5_14
def test_all_of_it_is_there_afterwards_and_holds_what_it_held() -> None:
    first, second = fresh(64), fresh(16)
    first[12345], second[-1] = 7, 8
    memory = prefault_of(first, second[5:])
    before = resident_bytes()
    calls = 1
    while memory.advance():
        calls += 1
    assert resident_bytes() - before > 70 * MB
    assert 40 <= calls <= 44, "2 MB at a time"
    assert (first[12345], second[-1]) == (7, 8)
    assert first.sum() + second.sum() == 15
    assert not memory.advance()


@needs_linux_5_14
def test_blocks_are_used_alike_from_their_beginnings() -> None:
    first, second = fresh(64), fresh(64)
    memory = prefault_of(first, second)
    before = resident_bytes()
    for _ in range(16):
        assert memory.advance()
    grown = resident_bytes() - before
    first[: 14 * MB : 4096] = second[: 14 * MB : 4096] = 1
    assert resident_bytes() - before - grown < 4 * MB, "the first half of what was asked for was there already"


def test_a_system_that_cannot_do_it_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    some = fresh(8)
    memory, asked = prefault_of(some), []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        return -1

    monkeypatch.setattr(memory, "_advise", refuse)
    assert not memory.advance()
    assert not memory.advance()
    assert len(asked) == 1


@pytest.mark.parametrize(("free", "mapped"), [(2**30 - 1, 0), (2**32, 2**32), (None, 0)])
def test_a_host_with_little_memory_keeps_it(monkeypatch: pytest.MonkeyPatch, free: int | None, mapped: int) -> None:
    def free_bytes() -> int:
        if free is None:
            raise EngineError("the kernel does not say")
        return free

    monkeypatch.setattr(prefault, "free_memory_bytes", free_bytes)
    some = fresh(64)
    before = resident_bytes()
    assert not Prefault(((some.ctypes.data, some.nbytes),), mapped).advance()
    assert resident_bytes() - before < 2 * MB


@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_a_runner_has_all_of_its_keys_and_values_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    directory = write_tiny_model(tmp_path / "llama", "llama")
    runner = load_runner(str(directory), LoadConfig(device="cpu", attention=attention, quantization="none"))
    assert isinstance(runner, ModelRunner)
    num_pages = 100 * MB // (16 * runner.model.kv_bytes_per_token)
    runner.allocate(num_pages=num_pages, page_tokens=16, max_running=2, max_context_tokens=64)
    asked: list[tuple[int, int]] = []

    def advise(begin: int, size: int, advice: int) -> int:
        assert advice == 23
        asked.append((begin, begin + size))
        return 0

    assert runner._allocated is not None
    monkeypatch.setattr(runner._allocated.kv_prefault, "_advise", advise)
    while runner.prefault_memory():
        pass
    memory = runner._allocated.forward.attention.cache.host_memory
    assert sum(size for _, size in memory) > 90 * MB
    for address, size in memory:
        reached = address
        for begin, end in sorted(asked):
            if begin <= reached:
                reached = max(reached, end)
        assert reached >= address + size
    runner.close()
