"""The compilers that are compared: how each is asked for, and whether it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import torch

from torchkiln.bench.cells import Cell, Job, Precision
from torchkiln.bench.own_apis import onnxruntime_api, openvino_api

Function = Callable[..., Any]
Compile = Callable[[Function, bool], Function]


@dataclass(frozen=True)
class Backend:
    """``compile(function, dynamic)`` is what a user would write; ``needs`` are packages it takes.

    ``environment`` is what a user would set for the whole process.
    """

    name: str
    compile: Compile
    jobs: tuple[Job, ...] = (Job.inference, Job.training)
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    precisions: tuple[Precision, ...] = tuple(Precision)

    def takes(self, cell: Cell) -> bool:
        """Whether it can run the program of a cell; the cell is measured without it otherwise."""
        return cell.job in self.jobs and cell.precision in self.precisions

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(package for package in self.needs if find_spec(package) is None)


def _eager(function: Function, dynamic: bool) -> Function:
    return function


def torch_compile(backend: str | Function, *, mode: str | None = None, **options: object) -> Compile:
    """What a user writes to ask for a backend."""

    def compile_it(function: Function, dynamic: bool) -> Function:
        given: dict[str, Any] = {"mode": mode} if mode else {"options": options} if options else {}
        compiled: Function = torch.compile(function, backend=backend, dynamic=dynamic, **given)
        return compiled

    return compile_it


_INFERENCE = (Job.inference,)
_ONNXRUNTIME = ("onnxruntime", "onnxscript")
# What converts: OpenVINO 2026.4 knows no quantize and dequantize of torch's PT2E flow, and ONNX Runtime 1.31 has no
# convolution in bfloat16 for the CPU.
_OPENVINO, _RUNTIME = (Precision.float32, Precision.bfloat16), (Precision.float32, Precision.int8)

# kiln is measured with what it compiled, never with eager calls in its place; "kiln-default" is what a user gets, who
# may get eager where it was measured to be faster. Inductor's freezing is asked for by the environment: Dynamo looks at
# the process's setting when it decides whether parameters are constants, not at the options of a compilation. With
# the option alone, ResNet-50 takes 61 ms instead of 42. For ONNX Runtime, torch registers no backend any more (2.13).
_ALL = (
    Backend("eager", _eager),
    Backend("inductor", torch_compile("inductor")),
    Backend("inductor-max-autotune", torch_compile("inductor", mode="max-autotune")),
    Backend("inductor-cpp-wrapper", torch_compile("inductor", cpp_wrapper=True)),
    Backend(
        "inductor-freezing",
        torch_compile("inductor"),
        jobs=_INFERENCE,
        environment={"TORCHINDUCTOR_FREEZING": "1"},
    ),
    Backend("openvino", torch_compile("openvino"), jobs=_INFERENCE, needs=("openvino",)),
    Backend("openvino-api", openvino_api, jobs=_INFERENCE, needs=("openvino",), precisions=_OPENVINO),
    Backend("onnxruntime-api", onnxruntime_api, jobs=_INFERENCE, needs=_ONNXRUNTIME, precisions=_RUNTIME),
    Backend("kiln", torch_compile("kiln", fallback=False, adaptive=False)),
    Backend("kiln-frozen", torch_compile("kiln", fallback=False, adaptive=False, freezing=True), jobs=_INFERENCE),
    Backend("kiln-default", torch_compile("kiln")),
)

BACKENDS: Mapping[str, Backend] = MappingProxyType({backend.name: backend for backend in _ALL})
