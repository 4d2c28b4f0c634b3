"""Inputs that are dropped, and activations on NVMe: variables and constraints, one function per equation.

The numbers are those of docs/formulation.md. Without the capabilities there are no columns and no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import highspy

from lazytrain_plugin.plan.choices import drops_boundaries, parks_boundaries
from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import PlacementProblem, UnitCost, mib, ms
from lazytrain_plugin.plan.variables import Expression, Variables, parks_anything
from lazytrain_plugin.units import MIB
from lazytrain_plugin.vocab import Activations, Tier


def define_inputs(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """drop(u), boundary_nvme(u) in {0, 1}; found(u) >= 0 in MiB; parked(u), fetched(u) >= 0 in ms (V6)."""
    drops, parks, units = drops_boundaries(problem), parks_boundaries(problem), range(len(problem.units))
    parks_any = parks_anything(problem)

    def binary(kind: str, u: int) -> object:
        return model.addVariable(0, 1, type=highspy.HighsVarType.kInteger, name=name(kind, u))

    def positive(column: str) -> object:
        return model.addVariable(0, highspy.kHighsInf, name=column)

    # The first unit's input is no unit's output.
    v.dropped = [binary("drop", u) if drops and u else 0 for u in units]
    v.boundary_on_nvme = [binary("boundary_nvme", u) if parks else 0 for u in units]
    codes = [not isinstance(coded_input(cost, v, u), int) for u, cost in enumerate(problem.units)]
    v.coded_on_gpu = [positive(name("coded_on_gpu", u)) if codes[u] else 0 for u in units]
    v.found_mib = [positive(name("found", u)) if drops and u else 0 for u in units]
    if parks_any:
        v.parked_slot_mib = positive("parked_slot_mib")
        v.parked_ms = [positive(name("parked", u)) for u in units]
        v.fetched_ms = [positive(name("fetched", u)) for u in units]


def add_one_place(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """An input rests in one place or is dropped, and what must be computed again can be (Eq. 22).

    boundary_cpu(u) + boundary_nvme(u) + drop(u) <= 1;  drop(u) + keep(u) <= 1;  drop(u) + keep(u-1) <= 1
    Rows: `one_place(u)`, `drop_needs(u)`, `drop_from(u)`.
    """
    for u in range(len(problem.units)):
        places = v.boundary_on_cpu[u] + v.boundary_on_nvme[u] + v.dropped[u]
        if isinstance(places, (int, float)):
            continue
        model.addConstr(places <= 1, name=name("one_place", u))
        if not isinstance(v.dropped[u], int):
            for row, at in (("drop_needs", u), ("drop_from", u - 1)):
                keeps = sum(column for (a, _), column in v.saved[at].items() if a == Activations.KEEP)
                if not isinstance(keeps, int):
                    model.addConstr(v.dropped[u] + keeps <= 1, name=name(row, u))


def coded_input(cost: UnitCost, v: Variables, u: int) -> Expression:
    """1 where unit u saves in such a way that its input waits in codes too."""
    return sum(
        column
        for (activations, _), column in v.saved[u].items()
        if cost.spared_input_bytes(activations) and not isinstance(column, int)
    )


def add_coded_inputs(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Inputs of units that save in codes wait in codes, on the GPU or off it (Eq. 27).

    coded_on_gpu(u) <= coded(u), on_gpu(u);  coded_on_gpu(u) >= coded(u) - 1 + on_gpu(u). With whole numbers it is their
    product. Rows: `coded_on_gpu(u,code)`, `coded_on_gpu(u,place)`, `coded_on_gpu(u,both)`.
    """
    for u, cost in enumerate(problem.units):
        column = v.coded_on_gpu[u]
        if isinstance(column, int):
            continue
        coded, away = coded_input(cost, v, u), v.boundary_on_cpu[u] + v.boundary_on_nvme[u] + v.dropped[u]
        model.addConstr(column <= coded, name=name("coded_on_gpu", u, "code"))
        model.addConstr(column <= 1 - away, name=name("coded_on_gpu", u, "place"))
        model.addConstr(column >= coded - away, name=name("coded_on_gpu", u, "both"))


def add_edge_length(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """What runs again finds its weights in the slots: of P units in a row one keeps its input (Eq. 23).

    sum of drop(w) for w = u .. u+P-1 <= P - 1. Rows: `edge_length(u)`.
    """
    slots = problem.weight_slots
    for u in range(1, len(problem.units) - slots + 1):
        dropped = sum(v.dropped[u : u + slots])
        if not isinstance(dropped, int):
            model.addConstr(dropped <= slots - 1, name=name("edge_length", u))


def add_found_again(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Inputs that are computed again, or come back early for it, wait on the device (Eq. 24). In MiB.

    found(u) >= found(u-1) + I(u) drop(u) - most(u) (1 - drop(u))
    found(u) >= I(u-1) (boundary_cpu + boundary_nvme)(u-1) + I(u) drop(u) - I(u-1) (1 - drop(u))
    most(u): what can have been found before. Rows: `found(u)`, `found_from(u)`.
    """
    for u in range(1, len(problem.units)):
        drop = v.dropped[u]
        if isinstance(drop, int):
            continue
        own, before = mib(problem.units[u].boundary_bytes), mib(problem.units[u - 1].boundary_bytes)
        most = mib(sum(cost.boundary_bytes for cost in problem.units[max(0, u - problem.weight_slots) : u]))
        if u > 1:
            again = v.found_mib[u - 1] + own * drop - most * (1 - drop)
            model.addConstr(v.found_mib[u] >= again, name=name("found", u))
        source = before * (v.boundary_on_cpu[u - 1] + v.boundary_on_nvme[u - 1])
        model.addConstr(v.found_mib[u] >= source + own * drop - before * (1 - drop), name=name("found_from", u))


def wider_mib(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """By how much the workspace of units that run again for unit u exceeds its own."""
    others = problem.units[max(0, u - problem.weight_slots + 1) : u]
    wider = max((cost.workspace_bytes for cost in others), default=0) - problem.units[u].workspace_bytes
    return mib(max(0, wider)) * v.dropped[u]


def again_ms(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """The forward of the unit before, once more, where the input of unit u was dropped."""
    return ms(problem.units[u - 1].forward_s) * v.dropped[u] if u else 0


def parked_mib(problem: PlacementProblem, v: Variables, u: int) -> Expression:
    """What of unit u's activations rests on NVMe: its input, and what it saves."""
    cost = problem.units[u]
    return mib(cost.boundary_bytes) * v.boundary_on_nvme[u] + sum(
        mib(cost.saved_bytes(activations)) * column
        for (activations, tier), column in v.saved[u].items()
        if tier == Tier.NVME
    )


def _parts(v: Variables, u: int) -> Iterator[tuple[str, Expression]]:
    """0 or 1, for the input and for what is saved: whether it rests on NVMe."""
    saved = sum(column for (_, tier), column in v.saved[u].items() if tier == Tier.NVME)
    for suffix, column in (("", v.boundary_on_nvme[u]), ("_saved", saved)):
        if not isinstance(column, int):
            yield suffix, column


def add_parked(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """Activations cross one of D buffers on their way to the disk, in forward order (Eq. 25). x: what of u is parked.

    parked_slot >= x(u);  parked(u) >= each of parked(u-1), left(u), + write(x), the first after all writes of updates
    left(u) >= parked(u-D) + x(u) over D2H - lag (1 - boundary_nvme(u)), and the same for what is saved.
    `lag`: D writes, the most that the disk can be behind.
    Rows: `parked_slot(u)`, `park_order(u)`, `park(u)`, `park_buffer(u)`.
    """
    if not v.parked_ms:
        return
    slots = problem.nvme_slots
    largest = max(cost.boundary_bytes + cost.kept_bytes for cost in problem.units)
    lag = ms(slots * problem.nvme_write_s(largest, each=True))
    for u in range(len(problem.units)):
        parked = parked_mib(problem, v, u)
        write = ms(problem.nvme_write_s(MIB, each=True)) * parked
        model.addConstr(v.parked_slot_mib >= parked, name=name("parked_slot", u))
        # The disk works in program order, too: what updates write comes first.
        before = v.parked_ms[u - 1] if u else v.disk_written_ms[-1]
        model.addConstr(v.parked_ms[u] >= before + write, name=name("park_order", u))
        model.addConstr(v.parked_ms[u] >= v.left_ms[u] + write, name=name("park", u))
        if u >= slots:
            leaves = ms(problem.d2h_s(MIB)) * parked
            for suffix, nvme in _parts(v, u):
                free = v.parked_ms[u - slots] - lag * (1 - nvme)
                model.addConstr(v.left_ms[u] >= free + leaves, name=name("park_buffer" + suffix, u))


def add_fetched(model: highspy.Highs, problem: PlacementProblem, v: Variables) -> None:
    """They are read in reverse order, into D buffers; those of the last D units are still there (Eq. 26).

    fetched(u) >= each of fetched(u+1), parked(u) - loss, returned(u+D), + read(x), for u < N - D
    returned(u) >= fetched(u) + x(u) over H2D. Rows: `fetch_order(u)`, `fetch(u)`, `fetch_buffer(u)`, ...
    """
    if not v.fetched_ms:
        return
    slots, num_units = problem.nvme_slots, len(problem.units)
    for u in reversed(range(num_units - slots)):
        parked = parked_mib(problem, v, u)
        read = ms(problem.nvme_read_s(MIB, each=True)) * parked
        fetched = v.fetched_ms[u]
        if u + 1 < num_units - slots:
            model.addConstr(fetched >= v.fetched_ms[u + 1] + read, name=name("fetch_order", u))
        model.addConstr(fetched >= v.parked_ms[u] - v.loss_ms + read, name=name("fetch", u))
        model.addConstr(fetched >= v.returned_ms[u + slots] + read, name=name("fetch_buffer", u))
        back = ms(problem.h2d_s(MIB)) * parked
        model.addConstr(v.returned_ms[u] >= fetched + back, name=name("return_fetched", u))


def place_of_input(v: Variables, u: int, chosen: Callable[[object], bool]) -> Tier | None:
    """Where a solution has the input of unit u; None: it is dropped."""
    if chosen(v.dropped[u]):
        return None
    places = ((v.boundary_on_nvme, Tier.NVME), (v.boundary_on_cpu, Tier.CPU))
    return next((tier for columns, tier in places if chosen(columns[u])), Tier.GPU)
