"""A group of ranks over torch's process groups: gloo between CPUs, NCCL between CUDA devices.

Owns: the store where the ranks meet, the two process groups, their time limits, and the translation of their errors.
Does not know: what is computed, the bus (by which the store's address reaches the other ranks).
Next on the path: `layers.py`.

On CPU the host is inside an operation until it is done. On CUDA it goes on at once and waits for the device later, in
whatever asks for a value first; so a mark behind each operation tells whether it is done. There the library's own limit
is a last resort: it ends the process without a word of who was missing.

There are two process groups. The one of the steps carries tensors, and there a rank that does not come along within
`COLLECTIVE_TIMEOUT_S` is taken for dead. The other is the door: a rank that has its plan waits there until the first
rank has heard that all have theirs, and that may take as long as the bus is away.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import PrefixStore, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from busllm.engine.host_copy import StepMark
from busllm.engine.parallel.group import COLLECTIVE_TIMEOUT_S
from busllm.engine.parallel.shard import Shard
from busllm.errors import EngineError

MEETING_TIMEOUT_S = 60.0
_DOOR_TIMEOUT_S = 7 * 24 * 3600.0  # who is gone is told by the closed connection or by missing heartbeats
_BACKLOG = 128


class Store:
    """Where the ranks of a replica find each other; it lives in the first rank's process."""

    def __init__(self, host: str, port: int) -> None:
        """Listens on this address only; port 0 = a free one.

        Raises:
            EngineError: the address cannot be bound.
        """
        try:
            family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listener = socket.socket(family, socket.SOCK_STREAM)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind(where)
                listener.listen(_BACKLOG)
            except OSError:
                listener.close()
                raise
        except OSError as error:
            raise EngineError(
                f"The ranks cannot meet on {host}:{port}: {error.strerror}. Change scheduler.collective_listen."
            ) from error
        self.port: int = listener.getsockname()[1]
        self._server = TCPStore(
            host,
            self.port,
            world_size=None,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=MEETING_TIMEOUT_S),
        )


class Mark(Protocol):
    """A point in the device's queue."""

    @property
    def is_passed(self) -> bool:
        """Whether the device has passed it."""
        ...

    def wait(self) -> None:
        """Waits until it has."""
        ...


class TorchGroup:
    """Implements `Group`. Inert until `connect`.

    Args:
        shard: which rank this is.
        device: of the tensors.
        timeout_s: of an operation in which the host waits.
        mark: marks the present end of the device's queue.
    """

    def __init__(
        self,
        shard: Shard,
        device: str,
        *,
        timeout_s: float = COLLECTIVE_TIMEOUT_S,
        mark: Callable[[torch.device], Mark] = StepMark,
    ) -> None:
        self._shard = shard
        self._device = torch.device(device)
        self._timeout_s = timeout_s if self._device.type == "cpu" else MEETING_TIMEOUT_S
        self._limit_s = MEETING_TIMEOUT_S  # of operations, until all have met
        self._mark = mark
        self._steps: Any = None
        self._door: Any = None
        self._has_met = False
        self._waits_since_s: float | None = None
        self._behind: deque[tuple[float, Mark]] = deque()  # began at, mark behind it; the oldest first

    @property
    def shard(self) -> Shard:
        return self._shard

    @property
    def waits_since_s(self) -> float | None:
        if not self._has_met:
            return None
        if self._waits_since_s is not None:
            return self._waits_since_s
        return next((began_s for began_s, mark in list(self._behind) if not mark.is_passed), None)

    def connect(self, host: str, port: int, epoch: str) -> None:
        """Meets the other ranks. Returns when all are there.

        Args:
            host, port: of the first rank's `Store`.
            epoch: names this meeting, so that nobody of an earlier one gets in.

        Raises:
            EngineError: somebody is missing.
        """
        rank, size = self._shard.rank, self._shard.num_ranks
        try:
            store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=MEETING_TIMEOUT_S))
            own_address = _address_towards(host, port)
            meeting = PrefixStore(epoch, store)
            self._door = _gloo(PrefixStore("door", meeting), rank, size, own_address)
            steps = PrefixStore("steps", meeting)
            if self._device.type == "cuda":
                self._steps = _nccl(steps, rank, size)
            else:
                self._steps = _gloo(steps, rank, size, own_address)
            self._warm_up()
        except (RuntimeError, OSError, EngineError) as error:  # torch's errors of stores and groups are RuntimeErrors
            said = _first_line(error)
            raise EngineError(f"Rank {rank} of {size} did not meet the others at {host}:{port}: {said}") from error

    def _warm_up(self) -> None:
        """Does each operation once: NCCL connects the ranks in the first ones, which takes longer than a step may."""
        something = torch.zeros(1, device=self._device)
        self.sum(something)
        self.gather(something)
        self.from_first(something)
        self._mark(self._device).wait()
        self._limit_s, self._has_met = self._timeout_s, True

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        part = part.contiguous()
        if part.is_cuda:
            limited = self._limited(distributed_c10d.AllreduceOptions())
            self._wait_for(lambda: self._steps.allreduce([part], limited))
            return part
        # A ring adds the pieces of a tensor in different orders, so a row would depend on its place in the batch.
        parts = [torch.empty_like(part) for _ in range(self._shard.num_ranks)]
        options = self._limited(distributed_c10d.AllgatherOptions())  # type: ignore[attr-defined]
        self._wait_for(lambda: self._steps.allgather([parts], [part], options))
        total = parts[0].float()
        for other in parts[1:]:
            total = total + other
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor) -> list[torch.Tensor] | None:
        part = part.contiguous()
        options = self._limited(distributed_c10d.GatherOptions())
        options.rootRank = 0
        parts = [torch.empty_like(part) for _ in range(self._shard.num_ranks)] if self._shard.is_first else []
        self._wait_for(lambda: self._steps.gather([parts] if parts else [], [part], options))
        return parts or None

    def from_first(self, values: torch.Tensor) -> torch.Tensor:
        values = values.contiguous()
        self._wait_for(lambda: self._steps.broadcast([values], _from_first(self._limit_s)))
        return values

    def enter(self, number: int) -> None:
        told = torch.tensor([number])
        try:
            self._door.broadcast([told], _from_first(_DOOR_TIMEOUT_S)).wait()
        except RuntimeError as error:
            raise self._left_alone(error) from error
        if int(told) != number:
            raise EngineError(f"Rank {self._shard.rank} came with step {number}, the first with {int(told)}.")

    def close(self) -> None:
        for group in (self._steps, self._door):
            if group is not None:
                with suppress(RuntimeError):  # the others may be gone
                    group.shutdown()

    def _limited(self, options: Any) -> Any:
        options.timeout = timedelta(seconds=self._limit_s)
        return options

    def _wait_for(self, start: Callable[[], Any]) -> None:
        began_s = self._waits_since_s = time.monotonic()
        try:
            start().wait()
            while self._behind and self._behind[0][1].is_passed:
                self._behind.popleft()
            self._behind.append((began_s, self._mark(self._device)))
        except RuntimeError as error:
            raise self._left_alone(error) from error
        finally:
            self._waits_since_s = None

    def _left_alone(self, error: RuntimeError) -> EngineError:
        said = _first_line(error)
        return EngineError(f"Rank {self._shard.rank} was left alone in a step; another rank is gone or frozen: {said}")


def _first_line(error: Exception) -> str:
    """Without the place in torch's sources that stands before it, and the frames that stand behind."""
    return str(error).splitlines()[0].rpartition("] ")[2]


def _from_first(timeout_s: float) -> Any:
    options = distributed_c10d.BroadcastOptions()
    options.timeout = timedelta(seconds=timeout_s)
    options.rootRank = 0
    options.rootTensor = 0
    return options


def _gloo(store: PrefixStore, rank: int, size: int, address: str) -> Any:
    kind: Any = distributed_c10d.ProcessGroupGloo
    options = kind._Options()  # the only way to say which address the ranks talk on
    options._devices = [kind.create_device(hostname=address)]
    options._timeout = timedelta(seconds=MEETING_TIMEOUT_S)  # of connecting; each operation has its own
    options._threads = 1
    return kind(store, rank, size, options)


def _nccl(store: PrefixStore, rank: int, size: int) -> Any:
    kind: Any = distributed_c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=MEETING_TIMEOUT_S)
    return kind(store, rank, size, options)


def _address_towards(host: str, port: int) -> str:
    """This host's own address on the way to another: the one that the others reach it by."""
    family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(where)  # sends nothing
        address: str = probe.getsockname()[0]
    return address
