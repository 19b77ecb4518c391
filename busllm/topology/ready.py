"""Waits until this host's part of the cluster can serve.

Owns: asking each frontend's `/ready`, and the heartbeats where no frontend is; a frontend's `/health` as a sign of life
where there is no bus to hear it on.
Does not know: what ready takes (the frontend tells).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence, Set

import anyio
import httpx

from busllm.topology.heartbeats import Heartbeats

_LOOK_S = 0.1
_ANSWER_S = 2.0


def local_client() -> httpx.AsyncClient:
    """An HTTP client for the frontends of this host, whose certificates are made out to other names."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return httpx.AsyncClient(verify=context, timeout=_ANSWER_S, trust_env=False)


async def wait_until_ready(
    urls: Sequence[str],
    stages: Set[tuple[str, int]],
    heartbeats: Heartbeats | None,
    show: Callable[[list[str]], None],
) -> None:
    """Returns when every stage has announced ready and then every URL has answered `/ready` with 200.

    Args:
        urls: of the frontends of this host.
        stages: (kind, index) of those that must announce ready; looked at only with heartbeats.
        heartbeats: None = there is no bus to hear them on.
        show: told what is still starting.
    """
    while heartbeats is not None and not stages <= heartbeats.ready_stages():
        show(heartbeats.progress())
        await anyio.sleep(_LOOK_S)
    async with local_client() as client:
        for url in urls:
            while not await _answers(client, url, "/ready"):
                await anyio.sleep(_LOOK_S)


async def watch_health(url: str, heard: Callable[[], None], pause_s: float) -> None:
    """Calls `heard` whenever the frontend answers `/health`, until cancelled."""
    async with local_client() as client:
        while True:
            if await _answers(client, url, "/health"):
                heard()
            await anyio.sleep(pause_s)


async def _answers(client: httpx.AsyncClient, url: str, path: str) -> bool:
    """Whether a GET is answered with 200; a refused connection or a late answer is a no."""
    try:
        return (await client.get(url + path)).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
