"""HTTPS."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from pathlib import Path

import anyio
import httpx
import pytest

from busllm.stages.frontend.settings import Tls
from busllm.testing.fake_owner import FakeOwner
from busllm.testing.frontend_server import FrontendServer, fake_settings, serving

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made with openssl"),
]


def make_certificate(directory: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1; returns the paths of certificate and key."""
    certificate, key = str(directory / f"{name}.pem"), str(directory / f"{name}-key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", certificate, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key


async def get_health(server: FrontendServer, authority: str, client: tuple[str, str] | None = None) -> httpx.Response:
    context = ssl.create_default_context(cafile=authority)
    if client is not None:
        context.load_cert_chain(*client)
    async with httpx.AsyncClient(verify=context, trust_env=False) as https:
        return await https.get(f"https://127.0.0.1:{server.port}/health")


async def test_with_a_certificate_the_frontend_speaks_https_only(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    async with serving(FakeOwner(), fake_settings(tls=Tls(certificate=certificate, key=key))) as server:
        answer = await get_health(server, certificate)
        with anyio.fail_after(5), pytest.raises(httpx.HTTPError):
            await server.client.get("/health")
        assert (await get_health(server, certificate)).status_code == 200
    assert answer.json() == {"status": "ok"}


async def test_client_certificates_are_required_when_authorities_are_named(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, "server")
    client = make_certificate(tmp_path, "client")
    tls = Tls(certificate=certificate, key=key, client_authorities=client[0])
    async with serving(FakeOwner(), fake_settings(tls=tls)) as server:
        with pytest.raises((httpx.HTTPError, ssl.SSLError)):
            await get_health(server, certificate)
        answer = await get_health(server, certificate, client)
    assert answer.status_code == 200
