"""Branches on how many units have each home, strategy and so on, instead of on single units.

The layers of a decoder are alike: that unit 17 is not resident says nothing, its neighbour will be. That 7 or 8 are
does, and so does where the head's states rest. Each node is the relaxation with such counts bounded, solved from the
last node's basis. The lowest bound among the open nodes holds for the whole program.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import highspy

from lazytrain_plugin.plan.deadline import Deadline
from lazytrain_plugin.plan.names import name
from lazytrain_plugin.plan.problem import PlacementProblem
from lazytrain_plugin.plan.relaxation import RelaxationError, Relaxed, solve_relaxation
from lazytrain_plugin.plan.variables import Variables

INTEGRAL = 1e-4
"""How close to a whole number is one."""


@dataclass(frozen=True, slots=True)
class _Count:
    """A sum of choices that is a whole number: one column, or a row that adds columns up."""

    index: int
    is_row: bool
    columns: tuple[int, ...]
    weight: float
    """Branching goes to the count with the largest weight times distance from a whole number."""
    is_use: bool = False

    def value(self, values: list[float]) -> float:
        return sum(values[column] for column in self.columns)


class CountBounds:
    """The search over counts, in portions. It changes bounds of the model, and `restore` puts them back."""

    def __init__(self, problem: PlacementProblem, model: highspy.Highs, v: Variables, root: Relaxed) -> None:
        self._model = model
        self._counts = [*self._uses(v), *self._stem_counts(problem, v), *self._unit_counts(v)]
        self._nodes: list[tuple[float, int, dict[int, tuple[float, float]], list[float]]] = [
            (root.bound_ms, 0, {}, root.values)
        ]
        self._closed_ms = math.inf
        self._applied: dict[int, tuple[float, float]] = {}
        self.deepest: Relaxed | None = None
        """The relaxation of the first node whose counts are all whole; may be taken away, for the next one."""
        self.num_nodes = 0

    @property
    def bound_ms(self) -> float:
        """No placement of the program has a shorter step; infinite: there is none at all."""
        return min(self._closed_ms, self._nodes[0][0] if self._nodes else math.inf)

    @property
    def is_exhausted(self) -> bool:
        """No branch on counts can raise the bound any more."""
        return not self._nodes or self._nodes[0][0] >= self._closed_ms

    def raise_bound(self, enough_ms: float, *, deadline: Deadline, max_nodes: int) -> float:
        """The best bound in ms that so many more nodes prove.

        Args:
            enough_ms: the search ends when it is proven that no placement is faster than this.
            deadline: when it ends at the latest.
        """
        self._model.setOptionValue("solve_relaxation", True)
        last = self.num_nodes + max_nodes
        while not self.is_exhausted and self._nodes[0][0] < enough_ms:
            if deadline.has_passed or self.num_nodes >= last:
                break
            self._branch(*heapq.heappop(self._nodes))
        return self.bound_ms

    def _branch(self, bound_ms: float, _: int, bounds: dict[int, tuple[float, float]], values: list[float]) -> None:
        place, value = self._most_fractional(values)
        if place is None:
            # All counts are whole: what is left is in which order, and no branch on counts can say more.
            self._closed_ms = min(self._closed_ms, bound_ms)
            return
        low, high = bounds.get(place, (0.0, float(len(self._counts[place].columns))))
        for limits in ((low, math.floor(value)), (math.ceil(value), high)):
            child = {**bounds, place: limits}
            self._apply(child)
            self.num_nodes += 1
            try:
                relaxed = solve_relaxation(self._model)
            except RelaxationError:
                self._closed_ms = min(self._closed_ms, bound_ms)  # nothing is known below this node
                continue
            if relaxed is not None:
                child_ms = max(bound_ms, relaxed.bound_ms)
                heapq.heappush(self._nodes, (child_ms, self.num_nodes, child, relaxed.values))
                if self.deepest is None and self._most_fractional(relaxed.values)[0] is None:
                    self.deepest = relaxed

    def restore(self) -> None:
        """The model as it was."""
        self._apply({})
        self._model.setOptionValue("solve_relaxation", False)
        self._model.clearSolver()

    def _most_fractional(self, values: list[float]) -> tuple[int | None, float]:
        best, best_score, best_value = None, 0.0, 0.0
        for place, count in enumerate(self._counts):
            value = count.value(values)
            distance = abs(value - round(value))
            # A use is as small a fraction as few units have it; the smaller, the more its slots are missed.
            score = count.weight * (1 - value if count.is_use else distance)
            if distance > INTEGRAL and score > best_score:
                best, best_score, best_value = place, score, value
        return best, best_value

    def _apply(self, bounds: dict[int, tuple[float, float]]) -> None:
        for place in {**self._applied, **bounds}:
            count = self._counts[place]
            low, high = bounds.get(place, (0.0, float(len(count.columns))))
            change = self._model.changeRowBounds if count.is_row else self._model.changeColBounds
            change(count.index, low, high)
        self._applied = bounds

    @staticmethod
    def _uses(v: Variables):
        for column in v.used.values():
            yield _Count(column.index, False, (column.index,), 1e4, is_use=True)

    @staticmethod
    def _stem_counts(problem: PlacementProblem, v: Variables):
        for cost, columns in zip(problem.stem, zip(v.stem_on_gpu, v.stem_streams)):
            # Small tensors are not worth a branch.
            weight = 100.0 if cost.num_trainable > 1e-3 * sum(unit.num_trainable for unit in problem.units) else 0.0
            for column in columns:
                if not isinstance(column, int):
                    yield _Count(column.index, False, (column.index,), weight)

    def _unit_counts(self, v: Variables):
        groups = {f"num_{home}": columns for home, columns in v.homes.items()}
        for choice in dict.fromkeys(choice for choices in v.saved for choice in choices):
            groups["num_" + "_".join(choice)] = [choices.get(choice, 0) for choices in v.saved]
        groups["num_boundary_cpu"] = v.boundary_on_cpu
        groups["num_boundary_nvme"] = v.boundary_on_nvme
        for label, columns in groups.items():
            present = [column for column in columns if not isinstance(column, int)]
            if len(present) < 2:
                continue
            row = self._model.getNumRow()
            self._model.addConstr(sum(present) <= len(present), name=name(label))
            yield _Count(row, True, tuple(column.index for column in present), 1.0)
