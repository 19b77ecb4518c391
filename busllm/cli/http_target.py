"""Which HTTP server a command talks to.

Owns: the order of looking: `--url`, then the state file of a cluster that runs on this host; the API key; the model
that is served when none was named.
Does not know: what is asked there.
"""

from __future__ import annotations

import argparse
import os
from urllib.parse import urlsplit

import httpx
import msgspec

from busllm.cli.arguments import Once
from busllm.errors import BusllmError, ConfigError, Unavailable
from busllm.topology.state import find_cluster

API_KEY_VARIABLE = "BUSLLM_API_KEY"
CONNECT_TIMEOUT_S = 5.0
_NO_PROXY_FOR = ("localhost", "127.0.0.1", "[::1]")


class HttpTarget(msgspec.Struct, frozen=True):
    """A server.

    Attributes:
        url: without a slash at the end and without `/v1`.
        api_key: None = none is sent.
    """

    url: str
    api_key: str | None

    @property
    def headers(self) -> dict[str, str]:
        """What every request carries."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    def client(self, timeout_s: float | None) -> httpx.Client:
        """A client of it; what runs on this host is reached without a proxy.

        Args:
            timeout_s: the longest silence; None = any.
        """
        direct: dict[str, httpx.BaseTransport | None] = {f"all://{host}": None for host in _NO_PROXY_FOR}
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=timeout, mounts=direct)


class HttpFailure(BusllmError):
    """A server answered with an error, or not at all."""

    code = "http_failure"


def add_http_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments by which commands find an HTTP server."""
    parser.add_argument(
        "--url", metavar="URL", action=Once, help="server, e.g. http://host:8000; without it, the cluster of this host"
    )
    parser.add_argument("--cluster", metavar="NAME", action=Once, help="which cluster, when several run on this host")
    parser.add_argument("--model", metavar="NAME", action=Once, help="model; without it, the first one that is served")


def find_http_target(arguments: argparse.Namespace) -> HttpTarget:
    """Finds the server that the arguments of `add_http_arguments` name.

    Raises:
        ConfigError: there is none, or the URL is none.
    """
    api_key = os.environ.get(API_KEY_VARIABLE) or None
    if arguments.url is not None:
        return HttpTarget(_checked(arguments.url), api_key)
    running = find_cluster(arguments.cluster)
    if not running.http:
        raise ConfigError(f"cluster {running.cluster!r} has no frontend on this host; name one with --url.")
    return HttpTarget(_checked(running.http[0]), api_key)


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url is {url!r}; it must look like http://host:8000.")
    return url.rstrip("/").removesuffix("/v1")


def served_model(target: HttpTarget) -> str:
    """The first model that a server lists.

    Raises:
        HttpFailure: it lists none, or does not answer.
    """
    try:
        with target.client(timeout_s=CONNECT_TIMEOUT_S) as client:
            response = client.get("/v1/models")
            if response.status_code != httpx.codes.OK:
                raise HttpFailure(error_text(response.status_code, response.content))
            models = response.json()["data"]
            return str(models[0]["id"])
    except httpx.HTTPError as error:
        raise Unavailable(f"{target.url} does not answer: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise HttpFailure(f"{target.url}/v1/models does not list a model; name one with --model.") from error


def error_text(status: int | None, body: bytes) -> str:
    """What an error answer, or an error in a stream (status None), says, on one line."""
    begin = "" if status is None else str(status)
    try:
        error = msgspec.json.decode(body)["error"]
        words = [begin, str(error.get("code") or error.get("type") or ""), str(error.get("message") or "")]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError):
        words = [begin, body[:200].decode(errors="replace")]
    return " ".join(" ".join(words).split())
