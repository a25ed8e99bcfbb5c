"""Several processes of one host that make one file: who does what, and how all of them write to it.

Started by torchrun (or by anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT), or with torch.distributed
already set up by the caller. A process alone is a team of one, and nothing of torch.distributed is imported.
"""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from kitchen_core.errors import KitchenError, UnsupportedError

from .writer import Planned, SafetensorsWriter, writing

T = TypeVar("T")
PATIENCE = timedelta(
    days=1
)  # a rank may wait long for the others; where one dies its connection closes, and none waits


class Team:
    """The processes that work together; ``rank`` is this one's number of ``size``."""

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank, self.size = rank, size
        self._group = group

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; it waits for the slowest. Raises KitchenError where another rank is gone."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(found, value, group=self._group)
        except RuntimeError as error:
            raise KitchenError(
                f"rank {self.rank} of {self.size} stops, because another rank did: see that one's message"
            ) from error
        return found

    def share(self, items: Sequence[T], costs: Iterable[float]) -> list[T]:
        """This rank's part of the items: consecutive ones, so that each rank reads on in few files, of about equal cost."""
        costs = list(costs)
        total, before, mine = sum(costs) or 1, 0.0, []
        for item, cost in zip(items, costs, strict=True):
            if min(int((before + cost / 2) * self.size / total), self.size - 1) == self.rank:
                mine.append(item)
            before += cost
        return mine


@contextlib.contextmanager
def team() -> Iterator[Team]:
    """The team that this process belongs to. Raises UnsupportedError where its ranks are on several hosts."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    dist = sys.modules.get("torch.distributed")
    started = dist is not None and dist.is_available() and dist.is_initialized()
    if not started and size == 1:
        yield Team()
        return
    import torch.distributed as dist

    if not started:
        dist.init_process_group("gloo", timeout=PATIENCE)
    group = dist.new_group(backend="gloo", timeout=PATIENCE)
    try:
        made = Team(dist.get_rank(), dist.get_world_size(), group)
        hosts = sorted(set(made.gather(platform.node())))
        if len(hosts) > 1:
            raise UnsupportedError(
                f"the {made.size} ranks are on {len(hosts)} hosts ({', '.join(hosts[:4])}); all must be on one, since they "
                "write one file: give torchrun --nnodes 1"
            )
        yield made
    finally:
        dist.destroy_process_group(group)
        if not started:
            dist.destroy_process_group()


@contextlib.contextmanager
def writing_together(
    members: Team, path: Path, planned: Sequence[Planned], mine: Iterable[str], metadata: dict[str, str]
) -> Iterator[SafetensorsWriter]:
    """As ``writing``, by all ranks at once: each puts the tensors named in ``mine``, at their places in one file.

    Rank 0 makes the file, which has no name yet, and the others open it through /proc. It gets its name when all are done:
    where any rank fails, or is killed, there is no file.
    """
    if members.size == 1:
        with writing(path, planned, metadata) as writer:
            yield writer
        return
    others = {p.name for p in planned} - set(mine)
    if members.rank == 0:
        with writing(path, planned, metadata) as writer:
            writer.skip(others)
            members.gather((os.getpid(), writer.descriptor))
            yield writer
            members.gather(None)
    else:
        process, number = members.gather(None)[0]
        descriptor = _open_of(process, number)
        try:
            writer = SafetensorsWriter(descriptor, planned, metadata)
            writer.skip(others)
            yield writer
            writer.finish()
            members.gather(None)
        finally:
            os.close(descriptor)
    members.gather(None)  # rank 0 has named the file: whoever returns may read it


def _open_of(process: int, number: int) -> int:
    try:
        return os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
    except OSError as error:
        raise UnsupportedError(
            f"the file of rank 0 (process {process}) cannot be opened from another process: {error.strerror}; run all ranks "
            "as one user in one container, or run without torchrun"
        ) from error
