"""Reading flags, with the nearest right word for a misspelt one.

Owns: the parser that every command uses, and the arguments that several commands share.
Does not know: commands.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from busllm.topology.nearest import nearest

EXIT_USAGE = 2


class Parser(argparse.ArgumentParser):
    """An argument parser without abbreviations that says what a misspelt word was most likely meant to be."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings)

    def error(self, message: str) -> NoReturn:
        """Prints the mistake with a suggestion and exits with status 2."""
        suggestion = self._suggestion(message)
        hint = f" Did you mean {suggestion!r}?" if suggestion else ""
        print(f"{self.prog}: {message}.{hint} See `{self.prog} --help`.", file=sys.stderr)
        sys.exit(EXIT_USAGE)

    def _suggestion(self, message: str) -> str | None:
        unknown = re.search(r"unrecognized arguments: (-[^\s=]*)", message)
        if unknown is None:
            return None
        flags = [flag for action in self._actions for flag in action.option_strings]
        return nearest(unknown[1], flags)


class Once(argparse.Action):
    """Stores one value; a flag given twice is a mistake, for nobody can tell which of the two was meant."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        """Called by argparse for each occurrence."""
        if getattr(namespace, self.dest) is not self.default:
            parser.error(f"{option_string} is given twice")
        setattr(namespace, self.dest, values)


def add_topology_argument(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Adds `--topology FILE`."""
    parser.add_argument(
        "--topology",
        metavar="FILE",
        action=Once,
        required=required,
        help="topology file (TOML)" if required else "topology file (TOML); without it, the built-in local one",
    )


def add_cluster_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments by which client commands find a cluster; `cluster.py` reads them."""
    parser.add_argument("--cluster", metavar="NAME", action=Once, help="which cluster, when several run on this host")
    parser.add_argument("--bus", metavar="URL", action=Once, help="bus of the cluster, e.g. nats://token@host:4222")
    parser.add_argument("--topology", metavar="FILE", action=Once, help="find cluster and bus in this topology file")
