"""What torchkiln finds on this machine: versions, processor, threads, settings, and whether compiling works."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path

import llvmlite.binding as llvm
import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import torchkiln
from torchkiln import config
from torchkiln.errors import KilnError, first_line
from torchkiln.native.host import host_processor
from torchkiln.native.tensor_layout import check_layout

# First and first unsupported version of torch, as in the package's requirements.
_TORCH_FROM, _TORCH_BEFORE = (2, 11), (2, 14)

# Instruction sets that change what code is generated, by LLVM's names.
_FEATURES = (
    "sse4.2 avx avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512bf16 avx512fp16 avx512vnni"
    " amx-tile amx-bf16 amx-int8 neon dotprod fullfp16 bf16 i8mm sve sve2"
)


@dataclass(frozen=True)
class Finding:
    """One line of the report; ``ok`` is False where it stops compilation, None where it is only a fact."""

    subject: str
    text: str
    ok: bool | None = None


@dataclass(frozen=True)
class Report:
    """Everything ``kiln doctor`` shows; of each setting its name, value, who gave it, and what it does."""

    findings: tuple[Finding, ...]
    settings: tuple[tuple[str, str, str, str], ...] = ()

    @property
    def problems(self) -> tuple[Finding, ...]:
        """The findings that stop compilation."""
        return tuple(finding for finding in self.findings if finding.ok is False)


def examine() -> Report:
    """Look at this process and machine; compiles one small function to see that it works."""
    findings = [*_versions(), *_processor(), *_threads()]
    settings: tuple[tuple[str, str, str, str], ...] = ()
    try:
        settings = _settings_in_force()
        findings.append(Finding("settings", "all valid", True))
    except KilnError as error:
        findings.append(Finding("settings", str(error), False))
    if not any(finding.ok is False for finding in findings):
        findings += [_layout(), _trial()]
    return Report(tuple(findings), settings)


def _versions() -> Iterator[Finding]:
    yield Finding("torchkiln", torchkiln.__version__)
    yield Finding("Python", f"{platform.python_version()} ({platform.python_implementation()})")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    supported = _TORCH_FROM <= version < _TORCH_BEFORE
    limits = f"{'.'.join(map(str, _TORCH_FROM))} up to but not including {'.'.join(map(str, _TORCH_BEFORE))}"
    yield Finding("torch", torch.__version__ if supported else f"{torch.__version__}; supported is {limits}", supported)
    yield Finding("llvmlite", f"{metadata.version('llvmlite')} (LLVM {'.'.join(map(str, llvm.llvm_version_info))})")
    yield Finding("entry point", *_entry_point())


def _entry_point() -> tuple[str, bool]:
    found = [entry.value for entry in metadata.entry_points(group="torch_dynamo_backends") if entry.name == "kiln"]
    if not found:
        return 'torch.compile does not know backend="kiln"; install the package again', False
    return f'backend="kiln" is {found[0]}', True


def _processor() -> Iterator[Finding]:
    host = host_processor()
    yield Finding("processor", f"{host.name} ({platform.machine()}), {os.cpu_count()} logical cores")
    present = " ".join(feature for feature in _FEATURES.split() if feature in host.enabled)
    yield Finding("instruction sets", present or "none beyond the base")
    yield Finding("vector registers", f"{host.vector_bits} bits")


def _threads() -> Iterator[Finding]:
    limits = [f"{name}={os.environ[name]}" for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in os.environ]
    text = f"{torch.get_num_threads()} for a kernel"
    yield Finding("threads", f"{text} ({', '.join(limits)})" if limits else text)
    yield Finding("parallel runtime", ", ".join([_parallel_backend(), *_loaded_openmp()]))


def _parallel_backend() -> str:
    for line in torch.__config__.parallel_info().splitlines():
        if line.startswith("ATen parallel backend:"):
            return line.split(":", 1)[1].strip()
    return "unknown"


def _loaded_openmp() -> list[str]:
    """File names of the OpenMP libraries in this process; two of them are a known cause of slow or stuck threads."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return []
    paths = {line.split()[-1] for line in maps.read_text().splitlines() if "/" in line}
    names = {Path(path).name for path in paths}
    return sorted(name for name in names if name.startswith(("libgomp", "libomp", "libiomp")))


def _settings_in_force() -> tuple[tuple[str, str, str, str], ...]:
    resolved = config.resolve()
    found = []
    for item in fields(resolved):
        variable = config.environment_name(item.name)
        source = variable if variable in os.environ else "default"
        meaning = item.metadata["doc"].replace("`", "")
        found.append((item.name, repr(getattr(resolved, item.name)), source, meaning))
    return tuple(found)


def _layout() -> Finding:
    check = check_layout()
    if check.usable:
        return Finding("tensor layout", f"{check.reason}: inputs are read in place", True)
    # Not a problem: graphs are then entered through torch's public functions, a little slower per call.
    return Finding("tensor layout", f"{check.reason}: inputs go through torch's handle functions")


def _trial() -> Finding:
    def trial(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.sin(x) * 2 + 1, -1)

    x = torch.linspace(-3, 3, 60).view(4, 15)
    try:
        result = torch.compile(trial, backend="kiln", options={"fallback": False, "cache": False})(x)
        torch.testing.assert_close(result, trial(x))
    except Exception as error:  # whatever stops compilation is what the user wants to read here
        cause = getattr(error, "inner_exception", error)  # Dynamo wraps what a backend raises
        return Finding("compiling", f"{type(cause).__name__}: {first_line(cause)}", False)
    return Finding("compiling", "a small function compiles, runs and matches eager", True)


def render(report: Report) -> RenderableType:
    """The report for a terminal."""
    facts = Table.grid(padding=(0, 2))
    marks = {True: Text("ok", "green"), False: Text("no", "bold red"), None: Text("")}
    for finding in report.findings:
        facts.add_row(Text(finding.subject, "bold"), Text(finding.text), marks[finding.ok])
    settings = Table(title="settings", title_justify="left", expand=False)
    for heading in ("name", "value", "from", "meaning"):
        settings.add_column(heading)
    for setting in report.settings:
        settings.add_row(*map(Text, setting))
    if report.problems:
        verdict = Text(f"torchkiln cannot compile here: {report.problems[0].subject}", "bold red")
    else:
        verdict = Text("torchkiln can compile here", "bold green")
    parts: list[RenderableType] = [facts, Text()]
    if report.settings:
        parts += [settings, Text()]
    return Group(*parts, verdict)
