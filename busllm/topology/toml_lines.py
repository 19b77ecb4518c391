"""Finds the line of a key in a TOML text.

Owns: a scan of a text that a TOML parser has accepted already; keys inside an inline table are found at the line where
the outermost value begins.
Does not know: what the keys mean. `read.py` uses it to say where a mistake is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

KeyPath = tuple[str | int, ...]  # ("process", 0, "stages"): numbers count the tables of an array

_PIECE = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|\n|[\[\]{}]|[^"\'#\n\[\]{}]+',
    re.DOTALL,
)
_KEY = re.compile(r'\s*(?:"((?:\\.|[^"\\])*)"|\'([^\']*)\'|([A-Za-z0-9_-]+))\s*')


class KeyLines:
    """Line numbers of one text.

    Args:
        text: well-formed TOML.
    """

    def __init__(self, text: str) -> None:
        self._line_of: dict[KeyPath, int] = {}
        table: KeyPath = ()
        for line, statement in _statements(text):
            if statement.startswith("[["):
                name = _dotted_key(statement[2:])
                self._line_of.setdefault(name, line)
                table = (*name, self._next_index(name))
                self._line_of[table] = line
            elif statement.startswith("["):
                table = _dotted_key(statement[1:])
                self._line_of[table] = line
            else:
                self._add_key(table, _dotted_key(statement), line)

    def find(self, path: KeyPath) -> int | None:
        """The 1-based line of a key, or of the nearest table around it; None = it stands nowhere."""
        for length in range(len(path), 0, -1):
            line = self._line_of.get(path[:length])
            if line is not None:
                return line
        return None

    def _next_index(self, name: KeyPath) -> int:
        index = 0
        while (*name, index) in self._line_of:
            index += 1
        return index

    def _add_key(self, table: KeyPath, key: KeyPath, line: int) -> None:
        for length in range(1, len(key) + 1):
            self._line_of.setdefault((*table, *key[:length]), line)


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of each table header and each `key = value`, over line ends inside values."""
    line, start, depth, parts = 1, 1, 0, list[str]()
    for piece in _PIECE.findall(text + "\n"):
        if piece == "\n" and depth == 0:
            statement = "".join(parts).strip()
            if statement:
                yield start, statement
            parts = []
        elif not piece.startswith("#"):
            if not "".join(parts).strip():
                start = line
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(piece, 0)
            parts.append(piece)
        line += piece.count("\n")


def _dotted_key(text: str) -> KeyPath:
    """The key that `text` begins with: `a."b c".d = 1` gives ("a", "b c", "d")."""
    names: list[str] = []
    position = 0
    while match := _KEY.match(text, position):
        names.append(next(group for group in match.groups() if group is not None))
        position = match.end()
        if not text.startswith(".", position):
            break
        position += 1
    return tuple(names)
