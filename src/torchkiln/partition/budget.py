"""The decision what to save for backward, under a memory budget.

``choose_saved_values`` is the one place that decides. At budget 1 it takes the minimum cut under the rules. Below, it
makes a fixed list of candidate plans (values chosen by knapsack for a ladder of limits, stretches between narrow
places, minimum cuts under fewer rules), simulates each, and walks down the ladder, taking at every step a fast
candidate within the limit whose peak is not above that of the step before. So a lower budget never has a higher peak,
whatever the candidates are. A step looks two steps ahead: the fastest plan of one step may have so low a peak that it
bars the fast plans of the next, and where those steps together are faster with another one, that is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch.fx import Node

from torchkiln.config import Settings, bytes_of
from torchkiln.errors import OptionError
from torchkiln.partition.classify import NodeInfo
from torchkiln.partition.cost import COSTS
from torchkiln.partition.extract import Schedule, schedule_for
from torchkiln.partition.kinds import computing_node, is_projection
from torchkiln.partition.knapsack import SOLVERS
from torchkiln.partition.min_cut import smallest_saved
from torchkiln.partition.rules import RULES, RuleContext, forbidden, rules_for
from torchkiln.partition.segments import segment_plans
from torchkiln.partition.simulate import MemoryUse, Simulator
from torchkiln.target import Target

# Shares of what the minimum cut saves, from all to nothing. A budget between two steps counts as the lower one.
LADDER = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0)
# How many steps are chosen together. Seven convolutions with batch norm, at 0.5: 3.8 ms of recomputation each on its
# own, 1.1 ms with two ahead.
_TOGETHER = 3
# Times are estimates, bytes are facts: of plans whose times differ by less than this share of a training step, which
# takes about three times as long as forward, the one that saves the fewest bytes is taken.
_SAME_TIME = 0.01 * 3


@dataclass(frozen=True)
class _Item:
    """What a knapsack may keep, values of one operator together: the time that spares, and their bytes."""

    nodes: tuple[Node, ...]
    seconds: float
    nbytes: int


@dataclass(frozen=True, eq=False)
class SavedPlan:
    """What is saved and what is recomputed, with what that costs. Inputs of forward cost nothing to save."""

    schedule: Schedule
    saved_bytes: int
    extra_seconds: float
    """Estimated run time of what backward recomputes."""
    simulator: Simulator

    @cached_property
    def memory(self) -> MemoryUse:
        """Simulated when it is first asked for."""
        return self.simulator.run(self.schedule)

    @property
    def saved(self) -> tuple[Node, ...]:
        return self.schedule.saved

    @property
    def recomputed(self) -> frozenset[Node]:
        return self.schedule.recomputed

    @property
    def peak_bytes(self) -> int:
        return self.memory.peak


def choose_saved_values(info: NodeInfo, settings: Settings, target: Target) -> frozenset[Node]:
    """The nodes to hand from forward to backward, beside the inputs of forward.

    The setting ``memory_budget`` is a share from 0 to 1 of what the minimum cut saves, or bytes such as ``"2GiB"`` that
    the simulated peak stays under. A share that cannot be reached gives the least that can; bytes raise OptionError.
    """
    if settings.memory_budget == 1:
        return smallest_saved(info, forbidden(RuleContext(info), rules_for(settings)))
    return frozenset(Planner(info, settings, target).plan(settings.memory_budget).saved)


class Planner:
    """Candidate plans of one joint graph, made when they are first needed, and the choice among them."""

    def __init__(self, info: NodeInfo, settings: Settings, target: Target) -> None:
        self.info = info
        self._settings = settings
        self._simulator = Simulator(info)
        self._seconds = COSTS[settings.recomputation_costs](info, target)
        self._by_step: dict[float, list[SavedPlan]] = {}
        self._plans: dict[frozenset[Node], SavedPlan] = {}
        self._always = frozenset(
            node
            for node in info.savable
            if node not in info.recomputable or node in info.kept or info.aliases.root(node) in info.alive_anyway
        )
        self._context = RuleContext(info)
        self._known_items: dict[object, list[_Item]] = {}
        self._forward_seconds = self.seconds_of(info.required_forward)
        self._same_time = _SAME_TIME * self._forward_seconds
        self.default = self.evaluate(smallest_saved(info, forbidden(self._context, rules_for(settings))))

    def seconds_of(self, nodes: Iterable[Node]) -> float:
        """The estimated run time of ``nodes`` of forward."""
        return sum(self._seconds.get(node, 0.0) for node in nodes)

    def evaluate(self, chosen: Iterable[Node]) -> SavedPlan:
        """The plan that saves ``chosen``, what of it backward needs, and what cannot be recomputed."""
        nodes = self._always.union(chosen)
        if nodes not in self._plans:
            schedule = schedule_for(self.info, nodes)
            # Results of operators that backward runs anyway, for other results, need not be saved.
            needless = {
                node
                for node in schedule.saved
                if is_projection(node) and node not in self._always and computing_node(node) in schedule.extra
            }
            schedule = schedule_for(self.info, nodes - needless) if needless else schedule
            extra = sum(self._seconds[node] for node in self.info.position if node in schedule.recomputed)
            self._plans[nodes] = SavedPlan(schedule, self._simulator.saved_bytes(schedule), extra, self._simulator)
        return self._plans[nodes]

    def plan(self, budget: float | str) -> SavedPlan:
        """The plan for ``budget``, as :func:`choose_saved_values` says."""
        if isinstance(budget, str):
            return self._under(bytes_of(budget), budget)
        for step, plan in self.ladder():
            if step <= budget + 1e-9:
                return plan
        raise AssertionError("the ladder ends at 0")

    def ladder(self) -> Iterator[tuple[float, SavedPlan]]:
        """The plans for falling budgets: bytes saved, as far as they can, and the peak fall, the run time grows."""
        current = self.default
        for place, step in enumerate(LADDER):
            limit = int(step * self.default.saved_bytes)
            if current.saved_bytes > limit:
                ahead = LADDER[place : place + _TOGETHER]
                plans = self.candidates(ahead[-1])
                _, together = self._together(ahead, plans, current, float("inf"))
                if together[0] is not current:
                    current = self._leaner(plans, together[0], together[1].peak_bytes if together[1:] else 0)
                else:
                    no_larger = [plan for plan in plans if plan.saved_bytes <= current.saved_bytes]
                    current = _first(no_larger, _saved_alone, current.peak_bytes) or current
            yield step, current

    def _leaner(self, plans: Iterable[SavedPlan], plan: SavedPlan, least_peak: int) -> SavedPlan:
        """The plan that saves the fewest bytes of those about as fast as ``plan``, with a peak of ``least_peak`` or
        more, which leaves those chosen for the next steps open.
        """
        slowest = plan.extra_seconds + self._same_time
        for other in sorted(plans, key=_smallest):
            if other.saved_bytes >= plan.saved_bytes:
                break
            if other.extra_seconds <= slowest and least_peak <= other.peak_bytes <= plan.peak_bytes:
                return other
        return plan

    def _together(
        self, steps: Sequence[float], plans: Sequence[SavedPlan], above: SavedPlan, most: float
    ) -> tuple[float, tuple[SavedPlan, ...]]:
        """Plans for ``steps`` below that of ``above`` that take the least time in sum, and that time.

        A step whose limit no plan reaches without a higher peak stays at ``above``. Nothing is found where it would
        take ``most`` or longer.
        """
        if not steps:
            return 0.0, ()
        limit = int(steps[0] * self.default.saved_bytes)
        if above.saved_bytes <= limit:
            open_to = [above, *(p for p in plans if p.saved_bytes <= limit and _fastest(p) < _fastest(above))]
        else:
            open_to = [plan for plan in plans if plan.saved_bytes <= limit]
        best: tuple[float, tuple[SavedPlan, ...]] = (most, ())
        highest = -1
        for plan in sorted(open_to, key=_fastest):
            if plan.extra_seconds * len(steps) >= best[0]:
                break  # the steps after it are no faster: what they may save is less
            if highest < plan.peak_bytes <= above.peak_bytes and plan.saved_bytes <= above.saved_bytes:
                highest = plan.peak_bytes
                rest, after = self._together(steps[1:], plans, plan, best[0] - plan.extra_seconds)
                if len(after) == len(steps) - 1 and plan.extra_seconds + rest < best[0]:
                    best = plan.extra_seconds + rest, (plan, *after)
        if best[1] or highest >= 0:
            return best
        # Bytes over the limit count as the time to recompute them, at what all of forward takes for all of them.
        over = (above.saved_bytes - limit) / self.default.saved_bytes * self._forward_seconds
        cost = above.extra_seconds + over
        rest, after = self._together(steps[1:], plans, above, most - cost)
        return (cost + rest, (above, *after)) if len(after) == len(steps) - 1 else (most, ())

    def _under(self, limit: int, budget: str) -> SavedPlan:
        plans = [self.default] if self.default.peak_bytes <= limit else self.candidates()
        found = _first(plans, _fastest, limit)
        if found is None:
            least = min(plan.peak_bytes for plan in plans)
            raise OptionError(
                f"Setting 'memory_budget' is {budget!r} ({limit:,} bytes), but the activations of this graph take at"
                f" least {least:,} bytes ({least / 2**20:.4g}MiB) whatever is recomputed; give at least that."
            )
        return found

    def candidates(self, down_to: float = 0.0) -> list[SavedPlan]:
        """The plans to choose from at ``down_to``, those of the steps of the ladder above it included.

        What is chosen at a step must not depend on the steps below it, so that asking for one budget makes no more
        plans than needed.
        """
        steps = [step for step in LADDER if down_to <= step < 1]
        for step in steps:
            if step not in self._by_step:
                self._by_step[step] = list(map(self.evaluate, self._filled(step)))
        return [*self._fixed, *(plan for step in steps for plan in self._by_step[step])]

    @cached_property
    def _segments(self) -> list[frozenset[Node]]:
        return list(segment_plans(self.info, self.default.schedule.forward, self._seconds))

    @cached_property
    def _fixed(self) -> list[SavedPlan]:
        """Plans for no step in particular: the default, cuts under fewer rules, and segments."""
        return [self.default, *map(self.evaluate, (*self._cuts(), *self._segments))]

    def _cuts(self) -> Iterator[frozenset[Node]]:
        """Minimum cuts under fewer and fewer rules."""
        rules = {rule.setting: rule for rule in RULES}
        for kept in (("save_matmuls", "save_far_used"), ("save_matmuls",), ()):
            wanted = [rules[name] for name in kept if rules[name].applies(self._settings)]
            yield smallest_saved(self.info, forbidden(self._context, wanted))

    def _filled(self, step: float) -> Iterator[frozenset[Node]]:
        """Knapsacks for one limit: of a plan that saves more, alone and beside what crosses a few narrow places.

        Below what the first cut under fewer rules saves, only its values are weighed: the others of the default plan
        are next to free to recompute, and would do no more than fill up the limit.
        """
        limit = int(step * self.default.saved_bytes)
        relaxed = self._fixed[1]
        plan = self.default if limit > relaxed.saved_bytes else relaxed
        yield self._knapsack(plan, frozenset(), limit)
        # The most stretches that take no more than half of what may be saved.
        fitting = [base for base in self._segments if base and self._size(base) <= limit / 2]
        for base in fitting[-1:]:
            yield base | self._knapsack(plan, base, limit)

    def _size(self, nodes: Iterable[Node]) -> int:
        return sum(self.info.nbytes[node] for node in nodes)

    def _knapsack(self, plan: SavedPlan, base: frozenset[Node], limit: int) -> frozenset[Node]:
        """What of ``plan`` to keep beside ``base``: the run time it spares against its bytes."""
        items = self._items(plan, base)
        fixed = self._size(node for node in plan.saved if node in self._always)
        solve = SOLVERS[self._settings.budget_solver]
        # A price of bytes, too low to weigh against time: it decides between what takes the same time.
        price = self._same_time / 100 / max(1, plan.saved_bytes)
        values = [max(0.0, item.seconds - price * item.nbytes) for item in items]
        chosen = solve(values, [item.nbytes for item in items], limit - fixed - self._size(base))
        return frozenset(node for place in chosen for node in items[place].nodes)

    def _items(self, plan: SavedPlan, base: frozenset[Node]) -> list[_Item]:
        """Values of ``plan`` that can be recomputed from its other values and from ``base``."""
        key = plan.saved, base
        if key not in self._known_items:
            info = self.info
            groups: dict[Node, list[Node]] = {}
            for node in plan.saved:
                if info.nbytes[node] and node not in self._always and node not in base:
                    groups.setdefault(computing_node(node), []).append(node)
            stops = base.union(plan.saved)
            self._known_items[key] = [
                _Item(tuple(nodes), self._recompute_seconds(nodes, stops), self._size(nodes))
                for nodes in groups.values()
            ]
        return self._known_items[key]

    def _recompute_seconds(self, nodes: list[Node], stops: frozenset[Node]) -> float:
        seen: set[Node] = set(nodes)
        pending = list(nodes)
        total = 0.0
        while pending:
            node = pending.pop()
            total += self._seconds[node]
            for source in self.info.recompute_reads[node]:
                if source not in seen and source not in stops and source in self.info.recomputable:
                    seen.add(source)
                    pending.append(source)
        return total


Key = tuple[float, float]


def _fastest(plan: SavedPlan) -> Key:
    return plan.extra_seconds, plan.saved_bytes


def _smallest(plan: SavedPlan) -> Key:
    return plan.saved_bytes, plan.extra_seconds


def _saved_alone(plan: SavedPlan) -> Key:
    return plan.saved_bytes, 0.0


def _first(plans: Iterable[SavedPlan], key: Callable[[SavedPlan], Key], peak: int) -> SavedPlan | None:
    """The first by ``key`` whose peak is at most ``peak``, of equal ones that with the lowest peak.

    As few as possible are simulated, which is most of the time that choosing takes.
    """
    found: SavedPlan | None = None
    for plan in sorted(plans, key=key):
        if found is not None and key(plan) != key(found):
            break
        if plan.peak_bytes <= min(peak, found.peak_bytes - 1 if found is not None else peak):
            found = plan
    return found
