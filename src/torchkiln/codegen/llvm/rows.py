"""The statements of a row as LLVM code: loops over columns, sums in chunks, and what is hoisted out of loops.

All devices share this. Where the rows come from, and how columns are divided, is theirs (:mod:`.kernel` and
:mod:`.gpu.kernel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchkiln.codegen.llvm.module import ModuleBuilder
from torchkiln.codegen.llvm.reduce import Accumulator, Reductions, is_float_sum
from torchkiln.ir import expr as ex
from torchkiln.ir import index as ix
from torchkiln.ir.expr import Constant, Expr, FlatLoad, IndexValue, Interleaved, Masked, Parameter, Reduced
from torchkiln.ir.index import DataIndex, Extent, Index, Quotient, Remainder, Var
from torchkiln.schedule.cpu import round_up_power
from torchkiln.schedule.kernel import Accumulate, LoopNest, Phase, Statement, Store
from torchkiln.schedule.loops import indices_of_values

# Terms of a float sum that a lane adds one after the other; beyond twice as many, chunks of this many are summed by
# themselves first, and chunks of chunks. Equal terms are all rounded in one direction, so the error grows with the
# longest run: 1e7 times 0.1 was off by 2.3e-5 with runs of 2,441 and is by 1.1e-7 so, eager's cascade by 5.8e-7.
# Runs of 32 are off by 3.9e-7 and no faster.
SUM_CHUNK = 16
# Levels of chunks within chunks at the most: of 64 lanes, the longest then are 4 million terms.
_LEVELS = 4


Body = Callable[[str], None]  # what a loop does at a position
Sums = Sequence[Accumulator]


@dataclass(frozen=True)
class Split:
    """Along a variable full vectors run to ``whole``; ``rest`` values follow, in one vector of ``lanes``."""

    whole: str
    rest: int | str
    lanes: int


@dataclass(frozen=True)
class Walk:
    """A loop over columns; in the ``innermost`` one no other loop is inside."""

    start: str
    end: str
    step: int
    innermost: bool


class RowWriter(Reductions):
    """Writes the statements of ``nest``, of which a run computes ``lanes`` neighbouring values."""

    def __init__(self, module: ModuleBuilder, nest: LoopNest, lanes: int) -> None:
        super().__init__(module, nest.lane, (*nest.rows, *nest.columns))
        self.nest = nest
        self.full_lanes = lanes
        self.unbound: set[Var] = set()
        self.reduces_lanes = nest.lane is not None and nest.lane in nest.columns
        self.folded = nest.folded
        self.statements: list[Statement] = nest.statements
        loads = [node for node in ex.walk(tuple(s.value for s in self.statements)) if isinstance(node, FlatLoad)]
        self.loaded = {load.memory for load in loads}
        self.gathers = sum(bool(ex.index_operands(load.offset)) for load in loads)
        self.stored = {s.memory for s in self.statements if isinstance(s, Store)}

    def _compute_extents(self) -> None:
        """Extents and divisors first, so that no loop recomputes them."""
        for var in (*self.nest.rows, *self.nest.columns):
            self._extent(var.extent)
        indices = self._indices()
        while indices:
            for atom in indices.pop().atoms():
                if isinstance(atom, Quotient | Remainder):
                    self._divisor(atom.divisor)
                    indices.append(atom.numerator)

    def _indices(self) -> list[Index]:
        """Those that are computed."""
        return indices_of_values(self.nest)

    def _split(self, extent: Extent, lanes: int) -> Split:
        """Where the full vectors of ``lanes`` along a variable end, and how the rest is done."""
        if isinstance(extent, int):
            rest = extent % lanes
            return Split(str(extent - rest), rest, round_up_power(rest))
        length = self._extent(extent)
        whole = self.f.fresh(f"and i64 {length}, {-lanes}")
        return Split(whole, self.f.fresh(f"sub i64 {length}, {whole}"), lanes)

    def _tail(self, split: Split, here: str | None, body: Callable[[], None]) -> None:
        """What is left after the full vectors, if anything; ``here`` is a comparison that must hold as well."""
        if split.rest == 0:
            return
        condition = None if here is None else self.f.fresh(here)
        if isinstance(split.rest, str):
            some = self.f.fresh(f"icmp ne i64 {split.rest}, 0")
            condition = some if condition is None else self.f.fresh(f"and i1 {condition}, {some}")

        def in_lanes() -> None:
            with self._open_lanes(split.lanes, split.rest, split.whole):
                body()

        if condition is None:
            with self._scope():
                in_lanes()
        else:
            self._if(condition, in_lanes)

    # -- one row (or one vector of rows) --------------------------------------------------------------------

    def _row(self) -> None:
        self.reduced = {}
        for phase in self.nest.phases:
            self._run(phase.before)
            if phase.inside:
                self._columns(phase)

    def _run(self, statements: Iterable[Statement], accumulators: dict[str, Accumulator] | None = None) -> None:
        """Emit statements. Stores to memory that is read here come last, after everything was read."""
        late: list[Callable[[], None]] = []
        store: Callable[[], None]
        for statement in statements:
            if isinstance(statement.value, Interleaved):
                assert isinstance(statement, Store)
                parts = [self._value(part) for part in statement.value.parts]
                store = partial(self._store_interleaved, statement, parts)
            elif isinstance(statement, Store):
                store = partial(self._store, statement, self._value(statement.value))
            else:
                assert accumulators is not None
                self._accumulate(accumulators[statement.name], self._value(statement.value))
                continue
            if statement.memory in self.loaded and isinstance(statement.memory, Parameter):
                late.append(store)
            else:
                store()
        for store in late:
            store()

    def _columns(self, phase: Phase) -> None:
        vector = self.nest.lane if self.reduces_lanes else None
        inner_lanes = self.full_lanes if vector is not None else self.lanes
        split = self._split(vector.extent, inner_lanes) if vector is not None else Split("", 0, inner_lanes)
        widths = [] if split.whole == "0" else [inner_lanes]
        if split.rest != 0 and split.lanes not in widths:
            widths.append(split.lanes)
        accumulators = {s.name: self._accumulator(s, widths) for s in phase.inside if isinstance(s, Accumulate)}
        plain = [v for v in self.nest.columns if v is not vector]
        lanes = [] if vector is None else [(vector, self._step(inner_lanes))]
        loops = [(v, self._turns(v)[1]) for v in plain] + lanes
        chunks = _chunks_of_nest(loops)
        sums = [accumulator for accumulator in accumulators.values() if is_float_sum(accumulator.statement)]
        run = partial(self._run, phase.inside, accumulators)

        def nest(depth: int) -> None:
            remaining = {*plain[depth:], *((vector,) if vector is not None else ())}
            self._hoist(phase.inside, remaining)
            if depth < len(plain):

                def step(position: str) -> None:
                    self.variables[plain[depth]] = position
                    nest(depth + 1)

                start, apart = self._turns(plain[depth])
                innermost = vector is None and depth == len(plain) - 1
                loop = Walk(start, self._extent(plain[depth].extent), apart, innermost)
                self._sum_loop(loop, chunks[depth], sums, step)
            elif vector is not None:
                # With loops around it, what it adds up is one term of theirs, and is set aside.
                short = not plain and ix.hint_of(vector.extent) <= 2 * min(chunks[depth], default=0)
                self._vector_columns(inner_lanes, split, chunks[depth], sums, run, short=short)
            else:
                run()

        nest(0)
        for name, accumulator in accumulators.items():
            self.reduced[name] = self._finish(accumulator)

    def _turns(self, _column: Var) -> tuple[str, int]:
        """The first value that is taken of a column outside of the lanes, and how far apart the values are."""
        return "0", 1

    def _step(self, lanes: int) -> int:
        """How far apart the runs of ``lanes`` are that one after the other are added up."""
        return lanes

    def _vector_columns(
        self, lanes: int, split: Split, chunks: Sequence[int], sums: Sums, body: Callable[[], None], *, short: bool
    ) -> None:
        def vector(position: str) -> None:
            with self._open_lanes(lanes, lanes, position):
                body()

        if split.whole == str(lanes):
            with self._scope():
                vector("0")
        elif split.whole != "0":
            self._sum_loop(Walk("0", split.whole, lanes, innermost=True), chunks, sums, vector, short=short)
        self._tail(split, None, body)

    def _sum_loop(self, loop: Walk, chunks: Sequence[int], sums: Sums, body: Body, *, short: bool = False) -> None:
        """A loop that takes ``sums`` in chunks of these lengths, the longest first, one inside the other.

        With ``short``, few steps are likely, and those that need no chunks have a loop of their own.
        """
        if chunks and sums and short:
            # Setting aside the only chunk took as long as its sum: 512 x 512 sums of 64 values 1.8 ms instead of 1.1.
            few = self.f.fresh(f"icmp sle i64 {loop.end}, {2 * chunks[-1]}")
            whole, chunked = (partial(self._chunks, loop, lengths, sums, body) for lengths in ((), chunks))
            self._if(few, whole, chunked)
        else:
            self._chunks(loop, chunks if sums else (), sums, body)

    def _chunks(self, loop: Walk, lengths: Sequence[int], sums: Sums, body: Body) -> None:
        """A loop in chunks of the first length, each in chunks of the others; without lengths, of single steps."""
        if not lengths:
            self._walk(loop, body)
            return
        with self._loop(loop.start, loop.end, lengths[0]) as position:
            after = self.f.fresh(f"add nsw i64 {position}, {lengths[0]}")
            past = self.f.fresh(f"icmp sgt i64 {after}, {loop.end}")
            here = self.f.fresh(f"select i1 {past}, i64 {loop.end}, i64 {after}")
            aside = self._begin_chunk(sums)
            if lengths[0] == loop.step:  # the terms of one iteration are as many as a chunk has
                body(position)
            else:
                self._chunks(replace(loop, start=position, end=here), lengths[1:], sums, body)
            self._end_chunk(aside)

    def _walk(self, loop: Walk, body: Body) -> None:
        with self._loop(loop.start, loop.end, loop.step) as position:
            body(position)

    # -- hoisting -------------------------------------------------------------------------------------------

    def _hoist(self, statements: Iterable[Statement], inner: set[Var]) -> None:
        """Emit now whatever the statements need that does not change with ``inner``.

        Memory is read early only where every loop of ``inner`` is sure to run.
        """
        sure = all(ix.bounds_of(v.extent)[0] >= 1 for v in inner)
        inner = inner | self.unbound
        seen: set[Expr] = set()
        stack: list[Expr] = []
        for statement in statements:
            stack.append(statement.value)
            if isinstance(statement, Store):
                self._hoist_index(statement.offset, inner)
        while stack:
            node = stack.pop()
            if node in seen or isinstance(node, Constant | Reduced):
                continue
            seen.add(node)
            if isinstance(node, Interleaved):
                stack.extend(node.parts)
                continue
            if not node.variables & inner and not self._waits(node) and (sure or not ex.reads_memory(node)):
                self._value(node)
                continue
            if isinstance(node, Masked):
                stack.append(node.condition)
                continue
            if isinstance(node, FlatLoad):
                self._hoist_index(node.offset, inner)
            elif isinstance(node, IndexValue):
                self._hoist_index(node.index, inner)
            stack.extend(node.operands)

    def _waits(self, node: Expr) -> bool:
        """Whether a value needs a reduction that is not finished yet, or memory that this kernel writes."""
        return any(
            (isinstance(n, Reduced) and n.name not in self.reduced)
            or (isinstance(n, FlatLoad) and n.memory in self.stored)
            for n in ex.walk((node,))
        )

    def _hoist_index(self, index: Index, inner: set[Var]) -> None:
        fixed = {
            m: c for m, c in index.terms.items() if not any(ix.atom_variables(a) & inner for a in m) and not _reads(m)
        }
        if fixed:
            self._scalar_index(Index(fixed, index.const))


def _chunks_of_nest(loops: Sequence[tuple[Var, int]]) -> list[tuple[int, ...]]:
    """For each loop of a nest, outermost first, the lengths of the chunks in which it takes sums, the longest first.

    A loop is its variable and its step. Wherever terms or chunks are added one after the other, they are about
    ``SUM_CHUNK``, and twice as many at the most: across the loops of the nest, not in each of them alone.
    """
    found: list[tuple[int, ...]] = []
    terms = 1  # that one iteration adds to what there is so far
    for var, step in reversed(loops):
        trips, most = ix.hint_of(var.extent) // step, ix.bounds_of(var.extent)[1] // step
        length = max(1, SUM_CHUNK // terms)
        lengths: list[int] = []
        while most > 2 * length and len(lengths) < _LEVELS:
            lengths.append(length)
            length *= SUM_CHUNK
        terms = max(1, -(-trips // lengths[-1]) if lengths else trips * terms)
        found.append(tuple(step * n for n in reversed(lengths)))
    return found[::-1]


def _reads(monomial: tuple[ix.Atom, ...]) -> bool:
    """Whether a term needs a value from memory (which may be guarded, so it is not moved out of its place)."""
    return any(
        isinstance(a, DataIndex)
        or (isinstance(a, Quotient | Remainder) and any(_reads((b,)) for b in a.numerator.atoms()))
        for a in monomial
    )
