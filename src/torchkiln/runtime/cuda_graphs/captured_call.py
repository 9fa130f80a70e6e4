"""One captured call of a compiled graph: the memory it reads, its replays, and who holds what it has computed.

Inputs are read *in place*, where every replay finds a tensor at the captured address, or are copied into memory of the
capture. Results that are not copied out lie in memory of the capture; it is not replayed while somebody holds them.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchkiln.artifact.artifact import EntryInfo, OutputSource
from torchkiln.runtime.card import CardArray
from torchkiln.runtime.cuda_graphs.device import StreamMemory
from torchkiln.runtime.plain_tensors import is_plain

SMALL = 256 << 10
"""Bytes of a result of inference or backward up to which a copy is handed out, where there are few of these."""
FEW = 8


def _same_addresses(inputs: list[Any], addresses: list[int | None], positions: list[int]) -> bool:
    """Whether the tensors at these positions lie at the addresses at the same positions."""
    return all(inputs[position].data_ptr() == addresses[position] for position in positions)


# The same in C++, which builds of torch with CUDA have: 200 tensors take 20 µs in Python.
_at_addresses: Callable[[list[Any], list[int | None], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _same_addresses
)

Layout = tuple[torch.Size, tuple[int, ...]]


@dataclass(frozen=True)
class Places:
    """How a capture is to read the inputs of a graph, by position: in place, or copied.

    Of ``known`` ones, which are read in place, later calls compare the address alone, of ``checked`` ones the layout,
    too.
    """

    known: tuple[int, ...]
    checked: tuple[int, ...]
    copied: tuple[int, ...]
    numbers: tuple[int, ...]


def layout_of(tensor: torch.Tensor) -> Layout:
    return tensor.shape, tensor.stride()


class CapturedCall:
    """Made by capturing; :meth:`fits` says whether a call can be a replay of it, :meth:`is_free` whether it may be.

    ``run`` runs the graph with a list of inputs, its arena in ``scratch``. Callers hold the lock of ``memory``, here as
    in all methods.
    """

    def __init__(
        self,
        run: Callable[[list[Any]], list[Any]],
        inputs: Sequence[Any],
        places: Places,
        info: EntryInfo,
        card: CardArray,
        memory: StreamMemory,
        scratch: torch.Tensor,
    ) -> None:
        assert info.card is not None
        captures = card.captures
        given = list(inputs)
        for position in places.copied:
            given[position] = _with_same_layout(inputs[position])

        def captured(stream: int, tensors: list[Any]) -> list[Any]:
            with card.lending(stream, scratch):
                return run([*tensors])

        with torch.inference_mode(False), torch.no_grad():
            self._replay, results = captures.capture(captured, given)
        # Let go of after what replays its kernels in this memory.
        self._card, self._scratch = card, scratch
        self._in_place = [*places.known, *places.checked]
        self._addresses = [inputs[p].data_ptr() if p in self._in_place else None for p in range(len(inputs))]
        self._layouts = [(p, layout_of(inputs[p])) for p in (*places.checked, *places.copied)]
        self._numbers = [(p, inputs[p]) for p in places.numbers]
        self._copied = places.copied
        self._targets = [_distinct(given[p]) for p in places.copied]
        self._sources = tuple(info.outputs)
        self._results = _Results(results, self._sources, given, info.card.saved)
        memory.owned |= self._results.addresses
        weakref.finalize(self, memory.owned.difference_update, self._results.addresses).atexit = False

    def fits(self, inputs: list[Any]) -> bool:
        """Whether a replay computes what a call with these inputs does."""
        if not _at_addresses(inputs, self._addresses, self._in_place):
            return False
        for position, number in self._numbers:
            if inputs[position] != number:
                return False
        for position, layout in self._layouts:
            tensor = inputs[position]
            if not is_plain(tensor) or layout_of(tensor) != layout:
                return False
        return True

    @property
    def is_free(self) -> bool:
        """Whether nobody holds what an earlier replay has computed."""
        return self._results.are_free

    def replay(self, inputs: Sequence[Any]) -> list[Any]:
        with torch.no_grad():
            if self._targets:
                torch._foreach_copy_(self._targets, [_distinct(inputs[p]) for p in self._copied])
            self._replay()
            return self._results.handed_out(inputs)


class _Results:
    """The results of a capture, as each replay hands them out."""

    def __init__(
        self, results: Sequence[Any], sources: Sequence[OutputSource], given: Sequence[Any], saved: Sequence[int]
    ) -> None:
        self._results, self._sources = results, sources
        in_inputs = {
            tensor.untyped_storage().data_ptr(): (position, tensor)
            for position, tensor in enumerate(given)
            if isinstance(tensor, torch.Tensor) and tensor.numel()
        }
        own: list[int] = []
        self._of_inputs: dict[int, tuple[int, int]] = {}  # views of an input: its position, and where in it they begin
        for k, source in enumerate(sources):
            tensor = results[k]
            if source.kind != "tensor" or not isinstance(tensor, torch.Tensor):
                continue
            position, shown = in_inputs.get(tensor.untyped_storage().data_ptr(), (-1, tensor))
            if position < 0 or not tensor.numel():
                own.append(k)
            elif shown.dtype == tensor.dtype:
                self._of_inputs[k] = position, int(tensor.storage_offset() - shown.storage_offset())
            else:
                raise RuntimeError(f"result {k} shows an input in another dtype")
        first: dict[int, int] = {}
        self._first = {k: first.setdefault(results[k].untyped_storage()._cdata, k) for k in own}
        self._copied_out = _copied_out(results, self._first, saved)
        storages = {number: results[k].untyped_storage() for number, k in first.items()}
        self.addresses = {storage.data_ptr() for storage in storages.values()}
        # What is copied out keeps its memory, too: the next replay writes to it.
        self._storages = list(storages.values())
        del storages
        self._unheld = self._counts()

    def _counts(self) -> list[tuple[int, int]]:
        """References to each storage, from C++ and from Python."""
        return [(torch._C._storage_Use_Count(s._cdata), sys.getrefcount(s)) for s in self._storages]

    @property
    def are_free(self) -> bool:
        return self._counts() == self._unheld

    def handed_out(self, inputs: Sequence[Any]) -> list[Any]:
        found: list[Any] = []
        for k, (source, result) in enumerate(zip(self._sources, self._results, strict=True)):
            if source.kind == "input":
                found.append(inputs[source.number])
            elif k in self._of_inputs:
                found.append(_view(inputs[self._of_inputs[k][0]], result, self._of_inputs[k][1]))
            elif k in self._copied_out:
                found.append(result.clone())
            elif k in self._first:
                found.append(self._alias(k, found))
            else:
                found.append(result)
        return found

    def _alias(self, k: int, found: Sequence[Any]) -> Any:
        """A new tensor over the memory of result ``k``; those in one storage count their versions together."""
        result, first = self._results[k], self._first[k]
        if first == k or first in self._copied_out or found[first].dtype != result.dtype:
            return result.data
        if result is self._results[first]:
            return found[first]
        return _view(found[first], result, result.storage_offset() - self._results[first].storage_offset())


def _copied_out(results: Sequence[Any], first: dict[int, int], saved: Sequence[int]) -> frozenset[int]:
    """The results of which copies are handed out, so that holding one holds no memory of the capture.

    Of a forward these are all that the caller gets: a loss is still held when the next step begins, and all that is
    saved for backward would need memory twice. Of other graphs only small ones.
    """
    visible = [k for k in first if k not in saved]
    shared = Counter(first[k] for k in visible)
    small = [
        k
        for k in visible
        if shared[first[k]] == 1
        and (saved or results[k].nbytes <= SMALL)
        and results[k].stride() == torch.empty_like(results[k], device="meta").stride()
    ]
    return frozenset(small) if len(small) <= FEW else frozenset()


def _view(base: torch.Tensor, like: torch.Tensor, begin: int) -> torch.Tensor:
    return base.as_strided(like.shape, like.stride(), base.storage_offset() + begin).detach()


def _with_same_layout(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        memory = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        _distinct(memory).copy_(_distinct(tensor))
        return memory


def _distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The same without dimensions along which all elements are one place in memory."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
