"""Memory that is used for the first time before anybody waits for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from busllm.engine.first_use import FirstUse
from busllm.engine.loader import LoadConfig, load_runner
from busllm.testing.tiny_model import write_tiny_model

MB = 2**20


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_all_of_it_is_there_afterwards_and_holds_what_it_held() -> None:
    first, second = np.zeros(64 * MB, np.uint8), np.zeros(16 * MB, np.uint8)
    first[12345], second[-1] = 7, 8
    memory = FirstUse(((first.ctypes.data, first.nbytes), (second.ctypes.data + 5, second.nbytes - 5)))
    before = resident_bytes()
    calls = 1
    while memory.some():
        calls += 1
    assert resident_bytes() - before > 70 * MB
    assert 40 <= calls <= 44, "2 MB at a time"
    assert (first[12345], second[-1]) == (7, 8)
    assert first.sum() + second.sum() == 15
    assert not memory.some()


def test_blocks_are_used_alike_from_their_beginnings() -> None:
    first, second = np.zeros(64 * MB, np.uint8), np.zeros(64 * MB, np.uint8)
    memory = FirstUse(((first.ctypes.data, first.nbytes), (second.ctypes.data, second.nbytes)))
    before = resident_bytes()
    for _ in range(16):
        assert memory.some()
    grown = resident_bytes() - before
    first[: 14 * MB : 4096] = second[: 14 * MB : 4096] = 1
    assert resident_bytes() - before - grown < 4 * MB, "the first half of what was asked for was there already"


def test_a_system_that_cannot_do_it_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    some = np.zeros(8 * MB, np.uint8)
    memory, asked = FirstUse(((some.ctypes.data, some.nbytes),)), []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        return -1

    monkeypatch.setattr(memory, "_advise", refuse)
    assert not memory.some()
    assert not memory.some()
    assert len(asked) == 1


@pytest.mark.parametrize("attention", ["cpu", "torch"])
def test_a_runner_prepares_its_keys_and_values(tmp_path: Path, attention: str) -> None:
    directory = write_tiny_model(tmp_path / "llama", "llama")
    runner = load_runner(str(directory), LoadConfig(device="cpu", attention=attention, quantization="none"))
    num_pages = 100 * MB // (16 * runner.model.kv_bytes_per_token)
    runner.allocate(num_pages=num_pages, page_tokens=16, max_running=2, max_context_tokens=64)
    before = resident_bytes()
    while runner.prepare_memory():
        pass
    assert resident_bytes() - before > 90 * MB
    runner.close()
