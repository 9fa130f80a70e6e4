"""LLVM's library takes memory only while something is compiled."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from tests.conftest import BACKEND
from torchkiln.native import library_pages
from torchkiln.native.host import host_processor
from torchkiln.native.jit import compile_module
from torchkiln.native.library_pages import release_library_pages

_MODULE = "define i64 @twice(i64 %x) {\n  %y = shl i64 %x, 1\n  ret i64 %y\n}"


def _resident_mib() -> float:
    """Of the library, all its mappings."""
    total = 0
    for mapping in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        if "libllvmlite" in mapping.partition("\n")[0]:
            total += int(re.findall(r"(?m)^Rss:\s+(\d+) kB$", mapping)[0])
    return total / 1024


def test_pages_are_given_back_and_come_back() -> None:
    expected = compile_module(_MODULE, host_processor())
    assert _resident_mib() > 10
    release_library_pages()
    assert _resident_mib() < 5
    assert compile_module(_MODULE, host_processor()) == expected
    assert _resident_mib() > 10


@pytest.mark.usefixtures("no_cache")
def test_nothing_of_the_library_stays_after_a_compilation() -> None:
    x = torch.randn(7, 5)
    compiled = torch.compile(lambda x: torch.nn.functional.gelu(x).sum(1), backend=BACKEND)
    torch.testing.assert_close(compiled(x), torch.nn.functional.gelu(x).sum(1))
    assert _resident_mib() < 5


def test_memory_that_differs_from_its_file_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(b"x" * 4 * mmap.PAGESIZE)
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    with path.open("rb") as file:
        pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    try:
        assert pages[:] == path.read_bytes()  # all are touched
        assert library_pages._is_as_in_file(pagemap, address, len(pages))
        pages[2 * mmap.PAGESIZE] = 0
        assert not library_pages._is_as_in_file(pagemap, address, len(pages))
        assert library_pages._is_as_in_file(pagemap, address, 2 * mmap.PAGESIZE)
    finally:
        pages.close()
        os.close(pagemap)
