"""TLS between the NATS bus and its server."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from structlog.testing import capture_logs

from busllm.bus.nats import NatsBus
from busllm.bus.nats_options import NatsOptions, TlsOptions
from busllm.bus.nats_server import EmbeddedNatsServer, NatsServerOptions
from busllm.errors import ConfigError
from busllm.testing.bus_harness import PATIENCE_S, receive_messages
from busllm.testing.nats_harness import QUICK_RETRY

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with the openssl command"),
]


class TlsNatsServer(EmbeddedNatsServer):
    """The embedded server with a self-signed certificate, which it asks of its clients too."""

    def __init__(self, options: NatsServerOptions, certificate: Path, key: Path) -> None:
        super().__init__(options)
        self._tls = f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{certificate}", verify: true }}'

    def authorization(self) -> str:
        return f"{super().authorization()}\n{self._tls}"


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    paths = tmp_path / "certificate.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=busllm"
    subject = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "extendedKeyUsage=serverAuth,clientAuth"]
    subprocess.run(
        [*command.split(), *subject, "-out", str(paths[0]), "-keyout", str(paths[1])], check=True, capture_output=True
    )
    return paths


@pytest.fixture
async def tls_server(tmp_path: Path, certificate: tuple[Path, Path]) -> AsyncIterator[TlsNatsServer]:
    server = TlsNatsServer(NatsServerOptions(runtime_dir=tmp_path / "run"), *certificate)
    await server.start()
    yield server
    await server.stop()


async def test_messages_of_every_size_travel_over_tls(
    tls_server: TlsNatsServer, certificate: tuple[Path, Path]
) -> None:
    tls = TlsOptions(ca_file=str(certificate[0]), certificate_file=str(certificate[0]), key_file=str(certificate[1]))
    bus = NatsBus(NatsOptions(urls=(tls_server.url,), tls=tls))
    with anyio.fail_after(PATIENCE_S):
        connection = await bus.connect(name="a", inbox="inbox.a")
    await connection.subscribe("tls")
    sizes = [0, 1, 1000, 100_000, 3_000_000, 10]
    for size in sizes:
        connection.publish("tls", b"x" * size)
    assert [len(message.payload) for message in await receive_messages(connection, len(sizes))] == sizes
    await connection.close()


async def test_a_server_that_is_not_trusted_is_not_connected_to(tls_server: TlsNatsServer) -> None:
    bus = NatsBus(NatsOptions(urls=(tls_server.url,), tls=TlsOptions(), retry=QUICK_RETRY))
    with capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: bus.connect(name="a", inbox="inbox.a"))
            with anyio.fail_after(PATIENCE_S):
                while not logs:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
    assert "certificate" in logs[0]["cause"].lower()


async def test_tls_files_that_cannot_be_used_are_a_configuration_error(tmp_path: Path) -> None:
    tls = TlsOptions(ca_file=str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"bus\.tls"):
        await NatsBus(NatsOptions(urls=("nats://127.0.0.1:1",), tls=tls)).connect(name="a", inbox="inbox.a")
