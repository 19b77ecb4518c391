"""From a kind and options to a bus."""

from __future__ import annotations

from pathlib import Path

import pytest

from busllm.bus.connect import BusOptions, open_bus
from busllm.bus.memory import MemoryBus
from busllm.bus.nats import NatsBus
from busllm.errors import ConfigError, MissingPackage


def test_a_memory_bus_needs_no_options() -> None:
    bus = open_bus("memory", BusOptions(max_payload_bytes=4096))
    assert isinstance(bus, MemoryBus)
    assert (bus.address, bus.max_payload_bytes) == ("memory", 4096)


def test_a_nats_bus_takes_several_urls_and_shows_them_without_secrets() -> None:
    bus = open_bus("nats", BusOptions(url="nats://token@one:4222, tls://user:password@two:4223"))
    assert isinstance(bus, NatsBus)
    assert bus.address == "nats://one:4222,tls://two:4223"


@pytest.mark.parametrize("url", [None, "", "http://one:1", "nats://", "ws://one:1", "nats://one:port", "one:4222"])
def test_a_wrong_url_is_a_configuration_error(url: str | None) -> None:
    with pytest.raises(ConfigError) as wrong:
        open_bus("nats", BusOptions(url=url))
    assert wrong.value.key == "bus.url"


def test_a_wrong_url_is_named_without_its_password() -> None:
    with pytest.raises(ConfigError) as wrong:
        open_bus("nats", BusOptions(url="http://user:password@one:1"))
    assert "password" not in str(wrong.value)


def test_an_unknown_tls_key_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="ca_fil") as wrong:
        open_bus("nats", BusOptions(url="nats://one:4222", tls={"ca_fil": "x"}))
    assert wrong.value.key == "bus.tls"


@pytest.mark.parametrize("kind", ["memory", "nats"])
def test_an_option_that_the_bus_does_not_know_is_a_configuration_error(kind: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        open_bus(kind, BusOptions(url="nats://one:4222", extra={"colour": "red"}))
    assert wrong.value.key == "bus.colour"


def test_missing_credentials_are_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as wrong:
        open_bus("nats", BusOptions(url="nats://one:4222", credentials_file=str(tmp_path / "missing.creds")))
    assert wrong.value.key == "bus.credentials"


def test_an_unknown_kind_names_what_is_built_in_and_the_nearest_one() -> None:
    with pytest.raises(MissingPackage, match=r"Did you mean 'nats'.*Built in: memory, nats"):
        open_bus("natz", BusOptions())
