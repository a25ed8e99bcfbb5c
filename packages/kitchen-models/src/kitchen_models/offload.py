"""Running a model's blocks from host memory: their state is copied ahead, into buffers on the device that equal blocks share.

    from kitchen_models.offload import BlockOffload
    offload = BlockOffload(model.transformer_blocks, "cuda")   # the blocks run in this order
    ...
    offload.remove()                                           # everything is where and what it was

While a block computes, the next one is copied on a stream of its own, from pinned memory. Blocks whose state has the same
names, shapes and dtypes share buffers; a block in another format, or one left in bf16, gets buffers of its own kind. Only the
``.data`` of parameters and buffers is exchanged, so module, hooks and names stay what they are. Weights are read, never
written back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from kitchen_core.errors import UnsupportedError

Signature = tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


def signature(block: nn.Module) -> Signature:
    """Name, dtype and shape of all that a block holds, parameters and buffers, in a stable order: what a copy needs."""
    return tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in _state(block))


def _state(block: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*block.named_parameters(), *block.named_buffers()]


@dataclass
class _Buffer:
    """Tensors on the device for one block at a time; ``owner`` is the block whose state is in it, or on its way."""

    tensors: list[torch.Tensor]
    owner: int | None = None
    filled: Any = None  # event: the copy has ended
    free: Any = None  # event: the last computation that reads it has ended


@dataclass
class _Block:
    module: nn.Module
    kind: Signature
    held: list[torch.Tensor]  # the block's parameters and buffers themselves
    home: list[torch.Tensor] = field(default_factory=list)  # their data on the host
    devices: list[torch.device] = field(default_factory=list)  # where their data was
    marks: list[Any] = field(default_factory=list)  # of the state at rest
    runs: bool = False


class BlockOffload:
    """Keeps ``blocks`` in host memory and brings each to ``device`` when it runs, and the ``ahead`` next ones while it does.

    Memory on the device is at most ``ahead`` + 1 times a block of each kind. Blocks run one after another, in the order in
    which they are given, again and again; another order works, and then copies are waited for. Attach LoRAs before.
    A block whose state was changed since (a LoRA, a merge, ``load_state_dict``) does not run before ``remove``, which keeps the
    change. Raises UnsupportedError for a block on the meta device, for two blocks that share a tensor, and without a GPU.
    """

    def __init__(
        self, blocks: Iterable[nn.Module], device: torch.device | str, ahead: int = 1, pin: bool = True
    ) -> None:
        if ahead < 0:
            raise UnsupportedError(f"ahead counts the blocks that are copied while one runs, 0 or more; got {ahead}")
        self.device, self.ahead = torch.device(device), ahead
        self._cuda = self.device.type == "cuda"
        if self._cuda and not torch.cuda.is_available():
            raise UnsupportedError(
                f"blocks cannot run on {device}: torch sees no CUDA device here; `kitchen doctor` says why. Give a device "
                "that is there"
            )
        self._stream = torch.cuda.Stream(self.device) if self._cuda else None
        self.blocks = [_Block(b, signature(b), [t for _, t in _state(b)]) for b in blocks]
        self._check()
        for block in self.blocks:
            block.devices = [tensor.device for tensor in block.held]
            block.home = [_to_host(tensor.data, pin and self._cuda) for tensor in block.held]
            _give(block, block.home)
            block.marks = _marks(block.module)
        kinds = [block.kind for block in self.blocks]
        self.buffers = {kind: self._make(kind, min(ahead + 1, kinds.count(kind))) for kind in dict.fromkeys(kinds)}
        self._hooks = []
        for number, block in enumerate(self.blocks):
            self._hooks += [
                block.module.register_forward_pre_hook(self._before(number), prepend=True),
                block.module.register_forward_hook(self._after(number), always_call=True),
            ]

    def _make(self, kind: Signature, count: int) -> list[_Buffer]:
        """Buffers for one kind. What was in their memory before may still be in use on the current stream."""
        made = []
        for _ in range(count):
            tensors = [torch.empty(shape, dtype=dtype, device=self.device) for _, dtype, shape in kind]
            free = torch.cuda.current_stream(self.device).record_event() if self._cuda else None
            made.append(_Buffer(tensors, free=free))
        return made

    def _check(self) -> None:
        seen: set[int] = set()
        for block in self.blocks:
            for (name, _, _), tensor in zip(block.kind, block.held, strict=True):
                if tensor.is_meta:
                    raise UnsupportedError(
                        f"{name} of a block is on the meta device; load the weights before offloading"
                    )
                if id(tensor) in seen:
                    raise UnsupportedError(f"two blocks share {name!r}, which cannot be in two places; keep it outside")
                seen.add(id(tensor))

    @property
    def device_bytes(self) -> int:
        """Bytes of all buffers on the device."""
        return sum(t.nbytes for buffers in self.buffers.values() for b in buffers for t in b.tensors)

    # -------------------------------------------------------------------------------------------------------- hooks

    def _before(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any) -> None:
            block = self.blocks[number]
            if module is not block.module:  # a deepcopy, which has its hooks and is not offloaded
                return
            _check_unchanged(block)
            block.runs = True
            buffer = self._bring(number, number)
            if self._cuda:
                torch.cuda.current_stream(self.device).wait_event(buffer.filled)
            _give(block, buffer.tensors)
            for step in range(1, min(self.ahead, len(self.blocks) - 1) + 1):  # while this one computes
                self._bring((number + step) % len(self.blocks), number)

        return hook

    def _after(self, number: int) -> Any:
        def hook(module: nn.Module, arguments: Any, result: Any) -> None:
            block, buffer = self.blocks[number], self._of(number)
            if not block.runs:  # refused before it ran, or a copy
                return
            block.runs = False
            _give(block, block.home)
            if buffer is not None and self._cuda:
                buffer.free = torch.cuda.current_stream(self.device).record_event()

        return hook

    def _of(self, number: int) -> _Buffer | None:
        buffers = self.buffers[self.blocks[number].kind]
        return next((buffer for buffer in buffers if buffer.owner == number), None)

    def _bring(self, number: int, running: int) -> _Buffer:
        """The buffer with this block's state, whose copy has at least begun. That of the block that runs is left alone."""
        found = self._of(number)
        if found is not None:
            return found
        usable = [b for b in self.buffers[self.blocks[number].kind] if b.owner != running]
        buffer = max(
            usable, key=lambda b: len(self.blocks) if b.owner is None else (b.owner - number) % len(self.blocks)
        )
        buffer.owner = number
        if not self._cuda:
            self._copy(number, buffer)
            return buffer
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.free)  # the kernels that read the last owner have ended
            self._copy(number, buffer)
            buffer.filled = self._stream.record_event()
        return buffer

    def _copy(self, number: int, buffer: _Buffer) -> None:
        for target, source in zip(buffer.tensors, self.blocks[number].home, strict=True):
            target.copy_(source, non_blocking=True)

    def remove(self) -> None:
        """Put every block's state back on the device where it was, bit for bit, and drop hooks and buffers.

        What was changed since then stays changed; a tensor that was not there goes to the device of the block's first.
        """
        if self._cuda:
            torch.cuda.synchronize(self.device)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for block in self.blocks:
            devices = {id(tensor): device for tensor, device in zip(block.held, block.devices, strict=True)}
            first = next(iter(block.devices), self.device)
            for _, tensor in _state(block.module):
                tensor.data = tensor.data.to(devices.get(id(tensor), first))
        self.blocks.clear()
        self.buffers.clear()


def _to_host(tensor: torch.Tensor, pin: bool) -> torch.Tensor:
    host = tensor.to("cpu")
    return host.pin_memory() if pin and host.numel() else host


def _marks(block: nn.Module) -> list[Any]:
    """Equal for two times between which nothing was replaced or written to."""
    tensors = [tensor for _, tensor in _state(block)]
    return [(id(t), t.data_ptr(), None if t.is_inference() else t._version) for t in tensors]


def _check_unchanged(block: _Block) -> None:
    if _marks(block.module) != block.marks:
        raise UnsupportedError(
            "the state of a block was changed while it was offloaded (by a LoRA, a merge, load_state_dict, .to(), or by the "
            "block itself); call remove(), which keeps the change, and offload it again"
        )


def _give(block: _Block, tensors: list[torch.Tensor]) -> None:
    for held, tensor in zip(block.held, tensors, strict=True):
        held.data = tensor
