"""Reads a topology file: TOML text in, checked Structs out.

Owns: strict types (no text for a number, no 8000.0 for 8000, no true for 1, no nan), unknown keys, and errors that name
file, line, full key and the nearest right one.
Does not know: which tables and keys there are (`config.py`), which values do not go together (`checks.py`).
Next on the path: `placement.py`.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from busllm.errors import ConfigError
from busllm.topology.checks import find_problems
from busllm.topology.config import Topology
from busllm.topology.toml_lines import KeyLines, KeyPath
from busllm.topology.typed_values import Mistake, key_text, typed_value


def load_topology(path: str | Path | None) -> Topology:
    """Reads a topology file; None = the built-in `local` topology, which is what all the defaults make.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a mistake.
    """
    return Topology() if path is None else parse_topology(read_text(path), str(path))


def read_text(path: str | Path) -> str:
    """The text of a topology file.

    Raises:
        ConfigError: the file cannot be read or is not UTF-8.
    """
    try:
        return Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise ConfigError("there is no such file.", file=str(path)) from error
    except IsADirectoryError as error:
        raise ConfigError("this is a directory; a TOML file is needed.", file=str(path)) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}.", file=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 (byte {error.start}); save it as UTF-8.", file=str(path)) from error


def parse_topology(text: str, file: str | None = None) -> Topology:
    """Reads the text of a topology file. An empty text is the default topology.

    Args:
        text: TOML.
        file: where it is from, for errors.

    Raises:
        ConfigError: the text is not TOML or has a mistake; names the first one.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message, line = _syntax_error(str(error), text)
        raise ConfigError(f"is not valid TOML: {message}.", file=file, line=line) from error
    try:
        topology: Topology = typed_value(tables, Topology)
    except Mistake as mistake:
        raise _config_error(mistake.path, mistake.message, mistake.suggestion, text, file) from None
    for problem in find_problems(topology):
        raise _config_error(problem.path, problem.message, problem.suggestion, text, file)
    return topology


def _config_error(path: KeyPath, message: str, suggestion: str | None, text: str, file: str | None) -> ConfigError:
    return ConfigError(
        message, file=file, key=key_text(path) or None, line=KeyLines(text).find(path), suggestion=suggestion
    )


def _syntax_error(message: str, text: str) -> tuple[str, int]:
    """Takes the parser's "... (at line 3, column 8)" or "... (at end of document)" apart."""
    match = re.fullmatch(r"(?s)(.*?) \(at (?:line (\d+), column \d+|end of document)\)", message)
    last_line = len(text.splitlines())
    if match is None:
        return message, last_line
    return match[1], int(match[2] or last_line)
