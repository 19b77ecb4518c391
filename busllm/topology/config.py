"""The topology file as frozen Structs, with a default for every value.

Owns: the names, types, ranges and defaults of every key; the hash of what all hosts of a cluster must agree on.
Does not know: TOML (`read.py`), combinations that cannot work (`checks.py`), which process holds what (`placement.py`).
Next on the path: `read.py` makes these from a file, `placement.py` lays them out.

Paths in the file are relative to the working directory of the command that reads it.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

StageKind = Literal["frontend", "tokenizer", "scheduler", "detokenizer"]
STAGE_KINDS: tuple[StageKind, ...] = get_args(StageKind)  # in the order of a request's path

MIB = 1024 * 1024
DEFAULT_KV_TOKENS = 65536
DEFAULT_PAGE_TOKENS = 16

Count = Annotated[int, Meta(ge=1)]
Tokens = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0)]
Name = Annotated[str, Meta(min_length=1)]


class BusTls(msgspec.Struct, frozen=True):
    """TLS towards the bus server; its presence demands it.

    Attributes:
        ca_file: PEM file with the authorities to trust; None = those of the system.
        certificate_file: PEM file with this side's certificate, for servers that ask for one.
        key_file: its private key, unless it is in the same file.
        server_name: the name that the server's certificate must have; None = the host of the URL.
        handshake_first: TLS begins before the server says anything.
    """

    ca_file: Name | None = None
    certificate_file: Name | None = None
    key_file: Name | None = None
    server_name: Name | None = None
    handshake_first: bool = False


class BusConfig(msgspec.Struct, frozen=True):
    """`[bus]`: what carries the messages.

    Attributes:
        kind: `nats`, `memory` (one process) or the name of an installed plug-in.
        url: of a running server; None = `busllm up` starts its own nats-server on the loopback interface.
        credentials: a NATS credentials file.
        tls: see `BusTls`.
        max_payload_bytes: largest message of a memory bus and of the server that `up` starts; a server of your own
            has its own limit, which is asked for.
        options: passed to a plug-in as they are.
    """

    kind: Name = "nats"
    url: Name | None = None
    credentials: Name | None = None
    tls: BusTls | None = None
    max_payload_bytes: Annotated[int, Meta(ge=4096, le=64 * MIB)] = 8 * MIB
    options: dict[str, Any] = {}


class NullConfig(msgspec.Struct, frozen=True):
    """`[model.null]`: settings of the engine without a model, for tests of everything around it.

    Attributes:
        step_time_s: how long each step takes.
        load_time_s: how long loading takes.
        eos_one_in: an answer ends by itself at one token in so many, on average; None = only at its limit.
    """

    step_time_s: Seconds = 0.0
    load_time_s: Seconds = 0.0
    eos_one_in: Tokens | None = None


class ModelConfig(msgspec.Struct, frozen=True):
    """`[model]`: what is served.

    Attributes:
        source: alias, hub id, directory, `file.gguf`, or "null" (no model).
        name: served name; None = derived from the source.
        dtype: number format of activations; "auto" = the best for the device.
        quantization: of the weights; "auto" = the file's own.
        max_context_tokens: a lower limit than the model's own.
        null: see `NullConfig`.
    """

    source: Name = "smollm2-135m"
    name: Name | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    max_context_tokens: Annotated[int, Meta(ge=2)] | None = None
    null: NullConfig | None = None


class FrontendTls(msgspec.Struct, frozen=True):
    """TLS towards HTTP clients: PEM files with the certificate (and its chain) and its private key."""

    certificate_file: Name
    key_file: Name


class FrontendConfig(msgspec.Struct, frozen=True):
    """`[frontend]`: HTTP.

    Attributes:
        count: how many.
        listen: `host:port`; one address shared by all frontends of a host, or a list with one per index.
        api_keys_file: file with one API key per line; None = open to everybody.
        max_body_bytes: larger bodies are answered with 413.
        max_queued: requests that may wait in one frontend before their first token; more are answered with 429.
        header_wait_s: status and headers leave at the latest after that time.
        drain_timeout_s: how long running requests may go on after SIGTERM.
        resume_deadline_s: how long a request that lost its stage waits for another one.
        tls: see `FrontendTls`; None = plain HTTP.
        cors_origins: web origins whose pages may call the API; "*" = all.
    """

    count: Count = 1
    listen: Name | tuple[Name, ...] = "127.0.0.1:8000"
    api_keys_file: Name | None = None
    max_body_bytes: Annotated[int, Meta(ge=1024)] = 8 * MIB
    max_queued: Count = 1024
    header_wait_s: Annotated[float, Meta(gt=0)] = 10.0
    drain_timeout_s: Seconds = 30.0
    resume_deadline_s: Seconds = 60.0
    tls: FrontendTls | None = None
    cors_origins: tuple[Name, ...] = ()


class TokenizerConfig(msgspec.Struct, frozen=True):
    """`[tokenizer]`."""

    count: Count = 1


class SchedulerConfig(msgspec.Struct, frozen=True):
    """`[scheduler]`: the engine replicas.

    Attributes:
        count: replicas, each with its own copy of the model.
        tensor_parallel: ranks (devices) per replica.
        device: where the engine computes.
        attention: `auto`, `torch`, `cpu`, `flashinfer` or the name of an installed plug-in.
        page_tokens: tokens per KV page; "auto" = what the attention backend likes.
        step_tokens: most tokens computed in one step; "auto" = the most that keeps a step short.
        kv_tokens: size of the KV cache in tokens.
        kv_memory: its size as memory: "4GiB", or a share of what is free (0 … 1). At most one of the two; neither =
            `DEFAULT_KV_TOKENS` tokens.
        prefix_cache: whether prompts that begin alike share their KV pages.
        max_running: sequences computed at the same time.
        max_waiting: sequences that may wait; more are answered with 429.
        collective_listen: `host:port` where rank 0 gathers the other ranks; None = this host's address, a free port.
    """

    count: Count = 1
    tensor_parallel: Count = 1
    device: Name = "auto"
    attention: Name = "auto"
    page_tokens: Literal["auto"] | Tokens = "auto"
    step_tokens: Literal["auto"] | Tokens = "auto"
    kv_tokens: Tokens | None = None
    kv_memory: Name | Annotated[float, Meta(gt=0, le=1)] | None = None
    prefix_cache: Literal["radix", "none"] = "radix"
    max_running: Count = 128
    max_waiting: Count = 1024
    collective_listen: Name | None = None


class DetokenizerConfig(msgspec.Struct, frozen=True):
    """`[detokenizer]`."""

    count: Count = 1


class TraceConfig(msgspec.Struct, frozen=True):
    """`[trace]`: how much of a request's way is published."""

    level: Literal["off", "requests", "tokens"] = "requests"


class ProcessConfig(msgspec.Struct, frozen=True):
    """One `[[process]]`.

    Attributes:
        stages: `tokenizer` = all of them, `scheduler:0` = one of them (all its ranks), `scheduler:0.1` = one rank.
        host: name of the host it runs on; None = the host of the `busllm up` that reads the file.
    """

    stages: tuple[Name, ...]
    host: Name | None = None


class Topology(msgspec.Struct, frozen=True):
    """The whole file.

    Attributes:
        cluster: second token of every subject; two clusters can share one bus server.
        process: where things run; empty = the default placement.
    """

    cluster: Name = "local"
    bus: BusConfig = BusConfig()
    model: ModelConfig = ModelConfig()
    frontend: FrontendConfig = FrontendConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    detokenizer: DetokenizerConfig = DetokenizerConfig()
    trace: TraceConfig = TraceConfig()
    process: tuple[ProcessConfig, ...] = ()

    def count_of(self, kind: StageKind) -> int:
        """How many stages of a kind the cluster has."""
        table: FrontendConfig | TokenizerConfig | SchedulerConfig | DetokenizerConfig = getattr(self, kind)
        return table.count

    def listen_of(self, index: int) -> str:
        """The address of one frontend, as `host:port`."""
        listen = self.frontend.listen
        return listen if isinstance(listen, str) else listen[index]


def topology_hash(topology: Topology) -> str:
    """Digest of what all hosts of a cluster must agree on, as 16 hex digits.

    Two hosts may reach the bus by different URLs, keep the model in different directories, listen elsewhere: those are
    left out (the files of the model have a fingerprint of their own).
    """
    model, scheduler = topology.model, topology.scheduler
    agreed = {
        "cluster": topology.cluster,
        "bus": topology.bus.kind,
        "model": [model.name, model.dtype, model.quantization, model.max_context_tokens, model.null],
        "counts": {kind: topology.count_of(kind) for kind in STAGE_KINDS},
        "scheduler": [scheduler.tensor_parallel, scheduler.page_tokens, scheduler.prefix_cache],
        "process": topology.process,
    }
    return hashlib.sha256(msgspec.json.encode(agreed, order="deterministic")).hexdigest()[:16]
