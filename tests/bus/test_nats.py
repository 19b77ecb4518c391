"""The NATS bus keeps the guarantees on a real server."""

from __future__ import annotations

import pytest

from busllm.testing.bus_conformance import BusConformance
from busllm.testing.bus_fault_conformance import BusFaultConformance
from busllm.testing.nats_harness import NatsHarness

pytestmark = pytest.mark.anyio


@pytest.fixture
def harness(nats_harness: NatsHarness) -> NatsHarness:
    return nats_harness


class TestNatsBus(BusConformance):
    pass


class TestNatsBusUnderFaults(BusFaultConformance):
    pass
