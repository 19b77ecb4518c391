"""The bus on a NATS server.

Owns: connections that outlive their sessions: the first connect, reconnecting for ever, subscriptions, and turning
what a session tells into messages and events of one queue.
Does not know: one session's frames and pings (`bus/nats_session.py`), nats-py's internals (`bus/nats_wire.py`), how a
server is started (`bus/nats_server.py`).
Next on the path: `bus/queue.py`, from which the receiving actor reads.
"""

from __future__ import annotations

import asyncio
import ssl
import time

import anyio
import anyio.lowlevel

from busllm.bus.inbox import Inbox
from busllm.bus.matching import check_pattern, check_subject
from busllm.bus.nats_options import NatsOptions, public_url
from busllm.bus.nats_session import NatsSession, Unreachable
from busllm.bus.protocol import BusEvent, Disconnected, Message, PermissionRefused, Reconnected, Subscription
from busllm.bus.queue import IncomingQueue
from busllm.bus.retry import RetryPace
from busllm.errors import BusDown, BusPermissionDenied, PayloadTooLarge
from busllm.telemetry.logging import get_logger

_INBOX_NUMBER = 0  # the connection's own subscription; an actor's are numbered from 1


class NatsBus:
    """A bus on NATS servers; implements `Bus`.

    Args:
        options: where the servers are, credentials, TLS, bounds.

    Raises:
        ConfigError: a URL is not `nats://…` or `tls://…`, or the credentials file is not there.
        MissingPackage: a credentials file needs the package `nkeys`.
    """

    def __init__(self, options: NatsOptions) -> None:
        options.check()
        self._options = options

    @property
    def address(self) -> str:
        """The URLs without secrets, joined by commas."""
        return ",".join(public_url(url) for url in self._options.urls)

    async def connect(self, *, name: str, inbox: str) -> NatsConnection:
        """Connects, trying for as long as it takes; the first failure is logged at once, later ones ever more rarely.

        Raises:
            BusPermissionDenied: the server refuses the credentials or the inbox.
            BadSubject: `inbox` is not a subject.
            ConfigError: the TLS files cannot be used.
        """
        check_subject(inbox)
        tls_context = None if self._options.tls is None else self._options.tls.context()
        connection = NatsConnection(self, self._options, tls_context, name, inbox)
        await connection.open()
        return connection


class NatsConnection:
    """One actor's connection to a NATS server; implements `Connection`. Made by `NatsBus.connect`.

    Args:
        bus: for its address in logs.
        options: how to connect.
        tls_context: made from the options.
        name: shown by the server's monitoring.
        inbox: subject prefix for replies.
    """

    def __init__(
        self, bus: NatsBus, options: NatsOptions, tls_context: ssl.SSLContext | None, name: str, inbox: str
    ) -> None:
        self._options = options
        self._tls_context = tls_context
        self._name = name
        self._log = get_logger("busllm.bus", bus=bus.address, connection=name)
        self._inbox = Inbox(inbox)
        self._queue = IncomingQueue(options.bounds)
        self._subscriptions = {_INBOX_NUMBER: Subscription(_INBOX_NUMBER, self._inbox.pattern)}
        self._num_subscribed = 0
        self._num_dialled = 0
        self._session: NatsSession | None = None
        self._lost = anyio.Event()
        self._max_payload_bytes = 0
        self._down_reason = "not connected yet"
        self._is_closed = False
        self._keeper: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connects for the first time and begins to keep the connection; see `NatsBus.connect`."""
        self._use(await self._dial(RetryPace(self._options.retry), is_first=True))
        # Not in a task group: the task belongs to the connection, which ends it in `close`.
        self._keeper = asyncio.create_task(self._keep(), name=f"bus connection of {self._name}")
        self._keeper.add_done_callback(self._on_kept)

    # ---------------------------------------------------------------- what an actor calls

    @property
    def max_payload_bytes(self) -> int:
        """The largest payload that `publish` takes: the server's word when it was last connected."""
        return self._max_payload_bytes

    @property
    def is_connected(self) -> bool:
        """Whether `publish` would hand a message over now."""
        return self._session is not None

    @property
    def inbox(self) -> str:
        """Subject prefix of this connection's own inbox."""
        return self._inbox.prefix

    def publish(self, subject: str, payload: bytes, reply: str | None = None) -> None:
        """Hands one message over; it leaves in this turn of the event loop."""
        check_subject(subject)
        if reply is not None:
            check_subject(reply)
        if len(payload) > self._max_payload_bytes:
            raise PayloadTooLarge(len(payload), self._max_payload_bytes, subject)
        self._connected().publish(subject, payload, reply)

    async def subscribe(self, pattern: str, *, queue_group: str | None = None) -> Subscription:
        """Subscribes and waits for the server's word."""
        check_pattern(pattern, queue_group)
        session = self._connected()
        self._num_subscribed += 1
        subscription = Subscription(self._num_subscribed, pattern, queue_group)
        self._subscriptions[subscription.number] = subscription
        is_in_force = False
        try:
            refused = await session.subscribe([subscription])
            if refused:
                raise BusPermissionDenied(f"the bus server refuses {pattern!r}: {refused[subscription.number]}.")
            is_in_force = True
        finally:
            if not is_in_force:
                self._forget(subscription)
        return subscription

    async def unsubscribe(self, subscription: Subscription) -> None:
        """Ends a subscription and forgets what waits of it; one that has ended already is left alone."""
        self._forget(subscription)
        await anyio.lowlevel.cancel_shielded_checkpoint()

    def _forget(self, subscription: Subscription) -> None:
        if self._subscriptions.pop(subscription.number, None) is not None:
            self._queue.discard([subscription.number])
            if self._session is not None:
                self._session.unsubscribe(subscription.number)

    async def receive(self) -> list[Message | BusEvent]:
        """Waits for at least one item and returns all that are ready."""
        return await self._queue.receive()

    async def request(self, subject: str, payload: bytes, *, timeout_s: float) -> bytes:
        """Publishes a request and returns the first reply's payload."""
        return await self._inbox.request(self.publish, subject, payload, timeout_s)

    async def flush(self) -> None:
        """Waits until the server has everything published so far."""
        await self._connected().ping()

    async def close(self) -> None:
        """Flushes, for at most `close_timeout_s`, and ends the connection."""
        if self._is_closed:
            return
        self._is_closed = True
        session, self._session = self._session, None
        self._down_reason = "the connection was closed"
        self._inbox.fail_all(self._down_reason)
        self._queue.close()
        with anyio.CancelScope(shield=True):
            if self._keeper is not None:
                self._keeper.cancel()
                await asyncio.wait([self._keeper], timeout=self._options.close_timeout_s)
            if session is not None:
                await self._end(session)

    async def _end(self, session: NatsSession) -> None:
        try:
            with anyio.move_on_after(self._options.close_timeout_s):
                await session.ping()
        except BusDown as lost:
            self._log.info("bus_lost_while_closing", cause=str(lost))
        await session.close()

    def _connected(self) -> NatsSession:
        if self._session is None:
            raise BusDown(f"the bus is not connected: {self._down_reason}.")
        return self._session

    # ---------------------------------------------------------------- what a session tells

    def on_message(self, number: int, subject: str, payload: bytes, reply: str | None, is_no_responders: bool) -> None:
        """A message arrived."""
        if number == _INBOX_NUMBER:
            self._inbox.deliver(Message(subject, payload, reply, number, is_no_responders))
        elif number in self._subscriptions:
            self._queue.put(Message(subject, payload, reply, number, is_no_responders))

    def on_refused(self, reason: str) -> None:
        """The server refused a publish."""
        self._queue.tell(PermissionRefused(reason))

    def on_lost(self, session: NatsSession, reason: str) -> None:
        """A session is over; `_dial` hears of one that was not in use yet by its own exception."""
        if session is not self._session:
            return
        self._session = None
        self._down_reason = reason
        self._log.warning("bus_lost", cause=reason)
        self._inbox.fail_all(f"the bus connection was lost: {reason}.")
        self._queue.tell(Disconnected(reason))
        self._lost.set()

    # ---------------------------------------------------------------- keeping it

    def _use(self, session: NatsSession) -> None:
        self._session = session
        self._max_payload_bytes = session.max_payload_bytes
        self._lost = anyio.Event()

    async def _keep(self) -> None:
        pace = RetryPace(self._options.retry)
        while not self._is_closed:
            began_at = time.monotonic()
            await self._watch()
            lost_at = time.monotonic()
            if lost_at - began_at > self._options.retry.max_pause_s:
                pace.reset()  # it held; a server that takes connections only to drop them is left its growing pauses
            await anyio.sleep(pace.next_pause_s())
            session = await self._dial(pace, is_first=False)
            if self._is_closed:  # nats-py's `wait_for` may swallow the cancellation by `close`
                await session.close()
                return
            self._use(session)
            outage_s = time.monotonic() - lost_at
            self._log.info("bus_back", outage_s=round(outage_s, 3))
            self._queue.tell(Reconnected(outage_s))

    def _on_kept(self, keeper: asyncio.Task[None]) -> None:
        """A connection that nobody keeps is closed, so that its actor hears of it."""
        error = None if keeper.cancelled() else keeper.exception()
        if error is not None and not self._is_closed:
            self._log.error("bus_connection_failed", exc_info=error)
            self._queue.close()

    async def _watch(self) -> None:
        """Pings until the session is lost."""
        while self._session is not None:
            with anyio.move_on_after(self._options.ping_interval_s):
                await self._lost.wait()
            if self._session is not None:
                self._session.keep_alive()

    async def _dial(self, pace: RetryPace, *, is_first: bool) -> NatsSession:
        """Tries until a session stands with all subscriptions in force."""
        while True:
            url = self._options.urls[self._num_dialled % len(self._options.urls)]
            self._num_dialled += 1
            try:
                return await self._dial_once(url, is_first)
            except (BusDown, BusPermissionDenied) as error:
                if self._is_closed or (is_first and isinstance(error, BusPermissionDenied)):
                    raise
                if pace.is_time_to_log():
                    self._log.warning("bus_unreachable", url=public_url(url), cause=str(error))
            await anyio.sleep(pace.next_pause_s())

    async def _dial_once(self, url: str, is_first: bool) -> NatsSession:
        session = NatsSession(self._options, self._tls_context, self)
        await session.open(url, self._name)
        is_standing = False
        try:
            wanted = list(self._subscriptions.values())
            refused = await session.subscribe(wanted)
            if refused and is_first:
                raise BusPermissionDenied(f"the bus server refuses the inbox: {refused[_INBOX_NUMBER]}.")
            for reason in refused.values():
                self._queue.tell(PermissionRefused(reason))
            for subscription in wanted:
                if subscription.number not in self._subscriptions:  # it ended meanwhile
                    session.unsubscribe(subscription.number)
            if session.is_lost:
                raise Unreachable("the session was lost while it was set up")
            is_standing = True
        finally:
            if not is_standing:
                with anyio.CancelScope(shield=True):
                    await session.close()
        return session
