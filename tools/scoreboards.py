"""Loads from shared memory that may be under way where their place is handed back, told from the machine code of a kernel.

An arrival on a barrier in shared memory, or of a cluster, does not wait for the loads in front of it, and neither does a copy
that the copy engine or another SM carries out: who may refill a place after such an instruction may overtake a load of it.
Only a use of what was loaded waits. ptxas knows of cp.async alone, whose writes it orders behind loads itself.

A load that takes one of six scoreboards has ended where an instruction waits for that scoreboard. Loads from shared memory end
in their order, and ptxas gives a scoreboard to the last of a row alone: one that has ended says so of all in front of it.
Both are read from the upper half of an instruction's 128 bits, which cuobjdump prints in the line below it (sm_90a).

What place a load reads is not known here: so no load at all may be under way at an arrival, save those that ALLOWED describes.
Run by tools/compile_check.py over every kernel of ARCHS.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

ARCHS = ("90a",)
CODE = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s", re.MULTILINE)
LINE = re.compile(
    r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<text>(?P<op>[A-Z][\w.]*)[^;\n]*?)\s*;"
    r".*\n\s+/\* 0x(?P<upper>[0-9a-f]{16}) \*/",
    re.MULTILINE,
)
ARRIVAL = re.compile(r"SYNCS\..*ARRIVE|ARRIVES\b|UCGABAR_ARV|UBLKCP|UTMALDG|STAS")
SHARED_LOAD = re.compile(r"LDSM?\b")
GENERIC_LOAD = re.compile(r"LD\b")  # of another block's shared memory among others; these end in no order
JUMP = re.compile(r"(BRA|CALL|WARPSYNC\.COLLECTIVE)\b")
CONTROL = re.compile(r"(BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|BSSY|BSYNC|WARPSYNC\.COLLECTIVE)\b")
NO_SCOREBOARD = 7
ROW_ENDED = 1 << 6  # beside the bits of six scoreboards: a later load from shared memory has ended, and a row with it
EVERYTHING = 127


class Instruction(NamedTuple):
    address: int
    guard: str | None  # the predicate, "!PT": never
    op: str
    text: str  # without the predicate
    scoreboard: int  # that it holds until its result is there, or NO_SCOREBOARD
    waits: int  # bits of the scoreboards that it waits for

    @property
    def target(self) -> int:
        """The address that a jump or a BSSY names."""
        return int(self.text.rpartition("0x")[2], 16)

    @property
    def offset(self) -> int:
        """The constant part of the address that a load or a store names."""
        found = re.search(r"\+(0x[0-9a-f]+)\]", self.text)
        return int(found[1], 16) if found else 0

    @property
    def goes_on(self) -> bool:
        """Whether the next instruction may follow."""
        if self.guard is not None:
            return True
        if self.op == "BRA":
            return not re.fullmatch(r"BRA 0x[0-9a-f]+", self.text)  # others name a predicate of their own
        return not re.match(r"(BRXU?|JMP|JMX|RET|EXIT|BSYNC)\b", self.op)

    def __str__(self) -> str:
        return f"{self.address:04x} {self.text}"


class UnderWay(NamedTuple):
    """An instruction that may hand memory back, and the loads that nothing on some way to it waited for."""

    arrival: int  # both are numbers of instructions
    loads: list[int]


# ---------------------------------------------------------------------------------------------------- what is allowed


def table_of_w4a8_hopper(code: list[Instruction], arrival: int, load: int) -> bool:
    """The decode table: filled by plain stores in front of the block's first barrier, and by nothing behind it."""
    start = next((n for n, i in enumerate(code) if i.op.startswith("BAR.")), 0)
    filled = {i.offset for i in code[:start] if i.op.startswith("STS")}
    return code[load].offset > 0 and code[load].offset in filled


def next_stage_of_awq_gemm(code: list[Instruction], arrival: int, load: int) -> bool:
    """Behind the loop over stages, what its last round reads of a next one: that round has none, by the condition that ends it.

    So these are read right behind a wait for a stage, and the arrival comes where every wgmma has ended."""
    ended = before(code, arrival, "WARPGROUP.DEPBAR.LE").text.endswith("gsb0, 0x0")
    return ended and before(code, load, "SYNCS.PHASECHK", "HGMMA").op.startswith("SYNCS.PHASECHK")


# (kernel, whether an arrival and a load under way at it are what the docstring says): no address that changes with each build.
ALLOWED: list[tuple[str, Callable[[list[Instruction], int, int], bool]]] = [
    (r"w4a8_hopper<", table_of_w4a8_hopper),
    (r"awq_gemm_kernel<", next_stage_of_awq_gemm),
]


def before(code: list[Instruction], at: int, *ops: str) -> Instruction:
    """The last instruction listed in front of one that begins so; the first of the kernel where there is none."""
    return next((code[n] for n in range(at - 1, 0, -1) if code[n].op.startswith(ops)), code[0])


# ---------------------------------------------------------------------------------------------------------- the check


def complaints(kernel: str, listing: str) -> list[str]:
    """What is wrong with a kernel, from its part of what `cuobjdump -sass` prints."""
    if not ARRIVAL.search(listing) or not re.search(r"\bLD(SM?)?\b", listing):
        return []
    code = instructions(listing)
    permits = [permit for pattern, permit in ALLOWED if re.search(pattern, kernel)]
    found = []
    for arrival, loads in under_way(code):
        wrong = [str(code[load]) for load in loads if not any(permit(code, arrival, load) for permit in permits)]
        if wrong:
            found.append(
                f"{code[arrival]} hands memory back and does not wait for {', '.join(wrong)}: "
                "arrive behind an instruction that needs what was made of these"
            )
    return found


def instructions(listing: str) -> list[Instruction]:
    code = []
    for line in LINE.finditer(listing):
        at, upper = int(line["address"], 16), int(line["upper"], 16)
        code.append(Instruction(at, line["guard"], line["op"], line["text"], upper >> 46 & 7, upper >> 52 & 63))
    listed = len(CODE.findall(listing))
    if len(code) != listed:
        raise ValueError(
            f"of {listed} instructions of a kernel {len(code)} could be read: LINE in {__file__} has to know all"
        )
    return code


def under_way(code: list[Instruction]) -> Iterator[UnderWay]:
    """Every instruction that may hand memory back while loads are under way."""
    arrivals = [n for n, i in enumerate(code) if ARRIVAL.match(i.op) and i.guard != "!PT"]
    shared = {n for n, i in enumerate(code) if SHARED_LOAD.match(i.op) and i.guard != "!PT"}
    generic = {n for n, i in enumerate(code) if GENERIC_LOAD.match(i.op) and i.guard != "!PT"}
    if arrivals and (shared or generic):
        leads_to = shortened(predecessors(code), {n for n, i in enumerate(code) if i.waits} | shared | generic)
        for arrival in arrivals:
            if loads := pending(code, leads_to, arrival, shared, generic):
                yield UnderWay(arrival, loads)


def pending(
    code: list[Instruction], leads_to: list[list[int]], arrival: int, shared: set[int], generic: set[int]
) -> list[int]:
    """Loads that may be under way at an arrival.

    Goes back from it, and keeps for each instruction what is waited for on every way from there to the arrival."""
    found = set()
    known = dict.fromkeys(leads_to[arrival], code[arrival].waits)
    todo = list(known)
    while todo:
        n = todo.pop()
        instruction, waited = code[n], known[n]
        ended = instruction.scoreboard != NO_SCOREBOARD and bool(waited >> instruction.scoreboard & 1)
        if n in shared:
            ended |= instruction.scoreboard == NO_SCOREBOARD and bool(waited & ROW_ENDED)
            waited |= ROW_ENDED if ended else 0
        if not ended and (n in shared or n in generic):
            found.add(n)
        if waited == EVERYTHING:
            continue
        waited |= instruction.waits
        for earlier in leads_to[n]:
            both = known.get(earlier, EVERYTHING) & waited
            if earlier not in known or both != known[earlier]:
                known[earlier] = both
                todo.append(earlier)
    return sorted(found)


def predecessors(code: list[Instruction]) -> list[list[int]]:
    """For each instruction those that may come in front of it."""
    leads_to = [[n - 1] if n and code[n - 1].goes_on else [] for n in range(len(code))]
    for n, targets in jumps(code).items():
        for target in targets:
            leads_to[target].append(n)
    # The table of a BRX is not in the listing: its cases are taken to begin where nothing else leads to.
    tables = [n for n, instruction in enumerate(code) if instruction.op in ("BRX", "BRXU")]
    return [ways or tables for ways in leads_to]


def shortened(leads_to: list[list[int]], wanted: set[int]) -> list[list[int]]:
    """The same without instructions in between that are not wanted and follow a single other one."""
    for n, ways in enumerate(leads_to):
        leads_to[n] = [leads_to[way][0] if way not in wanted and len(leads_to[way]) == 1 else way for way in ways]
    return leads_to


def jumps(code: list[Instruction]) -> dict[int, set[int]]:
    """Where a jump may lead, beside to the next instruction."""
    at = {instruction.address: n for n, instruction in enumerate(code)}
    controls = [n for n, instruction in enumerate(code) if CONTROL.match(instruction.op)]
    called = {n + 1 for n in controls if code[n].op.startswith("CALL")}
    leads: dict[int, set[int]] = defaultdict(set)
    for n in controls:
        if JUMP.match(code[n].op):
            leads[n].add(at[code[n].target])
        elif code[n].op.startswith("RET"):
            leads[n] |= called
    # A BSYNC leads to what the last BSSY of its register names. Others may lie between the two: so until no more is found.
    forks = [n for n in controls if code[n].op.startswith("BSSY")]
    news = True
    while news:
        news = False
        for fork in forks:
            target = at[code[fork].target]
            for meeting in meetings(code, controls, leads, fork):
                news |= target not in leads[meeting]
                leads[meeting].add(target)
    return leads


def meetings(code: list[Instruction], controls: list[int], leads: dict[int, set[int]], fork: int) -> Iterator[int]:
    """The BSYNCs that a BSSY leads to, as far as is known."""
    register = re.search(r"\bB\d+\b", code[fork].text)[0]
    seen, todo = set(), [fork + 1]
    while todo:
        n = controls[bisect_left(controls, todo.pop())]  # every kernel ends with one
        if n in seen:
            continue
        seen.add(n)
        if code[n].op.startswith(("BSSY", "BSYNC")) and re.search(rf"\b{register}\b", code[n].text):
            if code[n].op.startswith("BSYNC"):
                yield n
            continue
        todo += leads.get(n, ())
        if code[n].goes_on:
            todo.append(n + 1)
