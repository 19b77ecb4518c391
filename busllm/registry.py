"""Plug-ins: separately installed packages, found by entry point.

Owns: the groups, and loading one plug-in by group and name.
Does not know: what a plug-in does; its group's seam says what the loaded object must be.

A package offers a plug-in in its `pyproject.toml`:

    [project.entry-points."busllm.bus"]
    unix = "busllm_bus_unix:make_bus"
"""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from busllm.errors import MissingPackage

PluginGroup = Literal["busllm.bus", "busllm.stage", "busllm.attention", "busllm.model"]


def plugin_names(group: PluginGroup) -> tuple[str, ...]:
    """Names of the installed plug-ins of a group, sorted."""
    return tuple(sorted({entry.name for entry in entry_points(group=group)}))


def load_plugin(group: PluginGroup, name: str, *, built_in: tuple[str, ...] = ()) -> Any:
    """Loads one plug-in. Only this one is imported.

    Args:
        group: what it plugs into.
        name: as the topology names it.
        built_in: names that need no plug-in, for the message.

    Returns:
        The object that the entry point names.

    Raises:
        MissingPackage: no installed package offers it, or the one that does lacks another package.
    """
    entry = _find(group, name, built_in)
    try:
        return entry.load()
    except ImportError as error:
        package = entry.dist.name if entry.dist is not None else entry.value
        raise MissingPackage(
            f"the plug-in {name!r} ({group}, of the package {package!r}) cannot be loaded: {error}. "
            "Install what is missing."
        ) from error


def require_plugin(group: PluginGroup, name: str, *, built_in: tuple[str, ...] = ()) -> None:
    """Checks that a name is a built-in one or an installed plug-in; imports nothing.

    Raises:
        MissingPackage: no installed package offers it.
    """
    if name not in built_in:
        _find(group, name, built_in)


def _find(group: PluginGroup, name: str, built_in: tuple[str, ...]) -> EntryPoint:
    found: list[EntryPoint] = list(entry_points(group=group, name=name))
    if not found:
        raise MissingPackage(_not_installed(group, name, built_in))
    return found[0]


def _not_installed(group: PluginGroup, name: str, built_in: tuple[str, ...]) -> str:
    installed = plugin_names(group)
    near = difflib.get_close_matches(name, (*built_in, *installed), n=1)
    parts = [f"no plug-in {name!r} is installed ({group})."]
    if near:
        parts.append(f"Did you mean {near[0]!r}?")
    if built_in:
        parts.append(f"Built in: {', '.join(built_in)}.")
    parts.append(f"Installed: {', '.join(installed) or 'none'}.")
    parts.append(f"Install the package whose entry point in the group {group} has that name.")
    return " ".join(parts)
