"""Plug-ins by entry points: listed from metadata alone, imported when first used, isolated when they fail.

Groups: ``kitchen.formats`` (a Format class), ``kitchen.kernels`` (a registry.Provider), ``kitchen.commands`` (a
function that adds a subcommand to the ``kitchen`` command). Nothing here imports torch.
"""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points

from .abi import KITCHEN_ABI
from .errors import BuildMismatchError, PluginError

log = logging.getLogger("kitchen")

GROUPS = ("kitchen.formats", "kitchen.kernels", "kitchen.commands")


@dataclass
class Plugin:
    """One entry point: what it is, and what became of loading it."""

    entry: EntryPoint
    loaded: object = None
    error: Exception | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock, repr=False)

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def distribution(self) -> str:
        """Name and version of the installed distribution that offers this plug-in."""
        dist = self.entry.dist
        return f"{dist.name} {dist.version}" if dist is not None else "unknown distribution"

    def load(self) -> object | None:
        """The plug-in's object, or None after a failure, which is remembered in ``error`` and logged once."""
        with self._lock:
            if self.loaded is None and self.error is None:
                try:
                    loaded = self.entry.load()
                    _check_abi(self, loaded)
                    self.loaded = loaded
                except Exception as error:  # a broken plug-in must not take the others with it
                    self.error = error
                    log.warning("kitchen: plug-in %s is unusable: %s", self, self.why_not())
            return self.loaded

    def why_not(self) -> str:
        """The first real error of loading, in one line; empty when there was none."""
        return "" if self.error is None else f"{type(self.error).__name__}: {self.error}"

    def require(self) -> object:
        """The plug-in's object. Raises PluginError with the first real error when it cannot be had."""
        loaded = self.load()
        if loaded is None:
            raise PluginError(
                f"plug-in {self} could not be loaded: {self.why_not()}. Reinstall or remove it; `kitchen doctor` shows all"
            ) from self.error
        return loaded

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution})"


def _check_abi(plugin: Plugin, loaded: object) -> None:
    if plugin.entry.group == "kitchen.commands":
        return
    abi = getattr(loaded, "abi", None)
    if abi != KITCHEN_ABI:
        raise BuildMismatchError(
            f"it speaks kitchen ABI {abi}, kitchen-core speaks {KITCHEN_ABI}; install matching versions of both"
        )


def _allowed(entry: EntryPoint) -> bool:
    """KITCHEN_PLUGINS restricts the set: comma-separated plug-in or distribution names; unset means all."""
    wanted = os.environ.get("KITCHEN_PLUGINS")
    if wanted is None:
        return True
    names = {name.strip() for name in wanted.split(",")}
    return entry.name in names or (entry.dist is not None and entry.dist.name in names)


def is_excluded(group: str, name: str) -> bool:
    """Whether a plug-in of this name is installed but left out by KITCHEN_PLUGINS."""
    return any(entry.name == name and not _allowed(entry) for entry in entry_points(group=group))


def unknown_names() -> list[str]:
    """What KITCHEN_PLUGINS names and nothing that is installed is called."""
    names = {name.strip() for name in os.environ.get("KITCHEN_PLUGINS", "").split(",")} - {"", "kitchen-core"}
    entries = [entry for group in GROUPS for entry in entry_points(group=group)]
    return sorted(names - {e.name for e in entries} - {e.dist.name for e in entries if e.dist is not None})


@cache
def plugins(group: str) -> dict[str, Plugin]:
    """Plug-ins of a group by name, in the order of their names. Imports none of them."""
    found: dict[str, Plugin] = {}
    entries = sorted(entry_points(group=group), key=lambda e: (e.name, e.dist.name if e.dist else ""))
    for entry in filter(_allowed, entries):
        if entry.name not in found:
            found[entry.name] = Plugin(entry)
        elif found[entry.name].entry.value != entry.value:
            log.warning(
                "kitchen: two plug-ins of group %s are named %s; %s is used", group, entry.name, found[entry.name]
            )
    return found


def forget_plugins() -> None:
    """Scan the installed distributions again on the next use (after an installation in a running process)."""
    plugins.cache_clear()
