"""Harnesses that run the bus conformance suite in memory.

Owns: `FaultyMemoryHarness` on a `FaultyBus`, and `MemoryHarness` on the `MemoryBus` that users get, without faults.
Does not know: the tests.
"""

from __future__ import annotations

from busllm.bus.memory import MemoryBus
from busllm.bus.protocol import Bus
from busllm.bus.queue import QueueBounds
from busllm.testing.bus_harness import REFUSED_PREFIX, Connections
from busllm.testing.faulty_bus import FaultyBus


class FaultyMemoryHarness(Connections):
    """A `BusHarness` whose faults are played."""

    refused_prefix = REFUSED_PREFIX

    def __init__(self) -> None:
        super().__init__()
        self.faulty_bus = FaultyBus(refused=f"{REFUSED_PREFIX}.>")

    def bus(self, bounds: QueueBounds) -> Bus:
        """Always the same bus: connections of two memory buses would not hear each other."""
        self.faulty_bus.bounds = bounds
        return self.faulty_bus

    async def cut(self) -> None:
        """See `FaultyBus.cut`."""
        self.faulty_bus.cut()

    async def mend(self) -> None:
        """See `FaultyBus.mend`."""
        self.faulty_bus.mend()

    async def freeze(self) -> None:
        """See `FaultyBus.freeze`."""
        self.faulty_bus.freeze()

    async def thaw(self) -> None:
        """See `FaultyBus.thaw`."""
        self.faulty_bus.thaw()


class MemoryHarness(Connections):
    """Connections of a plain `MemoryBus`, for the tests that need no fault."""

    refused_prefix = REFUSED_PREFIX

    def __init__(self) -> None:
        super().__init__()
        self.memory_bus = MemoryBus()

    def bus(self, bounds: QueueBounds) -> Bus:
        """Always the same bus."""
        self.memory_bus.bounds = bounds
        return self.memory_bus
