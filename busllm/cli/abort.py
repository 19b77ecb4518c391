"""`busllm abort`: ends requests.

Owns: its flags, and what is said of each uid.
Does not know: how an abort travels (`busllm/client.py`).
"""

from __future__ import annotations

import argparse
import sys

import anyio

from busllm.cli.arguments import add_cluster_arguments
from busllm.cli.bus_client import run_with_client, uid
from busllm.client import Client

GONE_WITHIN_S = 3.0  # a step that runs is finished first
ASK_AGAIN_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    parser.add_argument("uids", metavar="UID", nargs="+", type=uid, help="uid, or the id in an answer's body")
    add_cluster_arguments(parser)


def execute(arguments: argparse.Namespace) -> int:
    """Ends requests and says what became of each.

    Status 1 when one of them is unknown to every stage, or did not end.
    """
    uids = list(dict.fromkeys(arguments.uids))
    return run_with_client(arguments, lambda client: abort_all(client, uids))


async def abort_all(client: Client, uids: list[str]) -> int:
    """Aborts each request; 0 when all were known and have ended."""
    are_well = [await _abort(client, uid) for uid in uids]
    return 0 if all(are_well) else 1


async def _abort(client: Client, uid: str) -> bool:
    held = await client.holders(uid)
    await client.abort(uid)
    if held.states:
        where = ", ".join(f"{state} at {instance}" for instance, state in held.states.items())
        if await _is_gone(client, uid):
            print(f"{uid}: aborted; it was {where}")
            return True
        print(f"{uid}: did not end within {GONE_WITHIN_S:g} s; it was {where}", file=sys.stderr)
        return False
    if (await client.trace(uid)).events:
        print(f"{uid}: had ended before")
        return True
    silent = f" ({', '.join(held.silent)} gave no answer)" if held.silent else ""
    print(f"{uid}: unknown to every stage{silent}", file=sys.stderr)
    return False


async def _is_gone(client: Client, uid: str) -> bool:
    give_up_at = anyio.current_time() + GONE_WITHIN_S
    while (await client.holders(uid)).states:
        if anyio.current_time() > give_up_at:
            return False
        await anyio.sleep(ASK_AGAIN_S)
    return True
