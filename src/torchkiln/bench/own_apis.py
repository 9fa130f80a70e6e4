"""Peers through their own interfaces: a model is converted once, and calls go to the peer's runtime.

Results are the floating-point tensors that the model returns, in order; a peer knows no other structure.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchkiln.bench.entries.entry import tensors

Function = Callable[..., Any]
Call = Callable[[list[Tensor]], tuple[Tensor, ...]]


class _Flat(nn.Module):
    """``function`` with the arguments ``names`` by position, which returns a tuple of tensors."""

    def __init__(self, function: Function, names: tuple[str, ...]) -> None:
        super().__init__()
        self.function, self.names = function, names

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensors(self.function(**dict(zip(self.names, given, strict=True)))))


def converted_at_first_call(
    convert: Callable[[_Flat, tuple[Tensor, ...]], Call],
) -> Callable[[Function, bool], Function]:
    """What ``kiln bench`` compiles with, of a conversion that needs example inputs."""

    def compile_it(function: Function, dynamic: bool) -> Function:
        if dynamic:
            raise ValueError("is compared with static sizes alone")
        run: list[Call] = []

        def call(**given: Tensor) -> tuple[Tensor, ...]:
            if not run:
                model = _Flat(function, tuple(given))
                model.training = False  # alone: exported models, which int8 ones are, refuse to be asked for eval()
                run.append(convert(model, tuple(given.values())))
            return run[0](list(given.values()))

        return call

    return compile_it


def _openvino(model: _Flat, given: tuple[Tensor, ...]) -> Call:
    import openvino

    converted = openvino.convert_model(model, example_input=given, input=[list(x.shape) for x in given])
    floats = {x.dtype for x in model.parameters()}
    precision = "bf16" if torch.bfloat16 in floats else "f32"
    options = {"INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    options["INFERENCE_NUM_THREADS"] = str(torch.get_num_threads())
    compiled = openvino.compile_model(converted, "CPU", options)
    request = compiled.create_infer_request()
    bf16 = openvino.Type.bf16

    def as_given(x: Tensor) -> Any:
        if x.dtype == torch.bfloat16:
            return openvino.Tensor(x.view(torch.uint16).numpy(), x.shape, bf16)
        return openvino.Tensor(x.numpy(), shared_memory=True)

    def as_tensor(x: Any) -> Tensor:
        if x.element_type == bf16:
            return torch.from_numpy(x.data.view("uint16").copy()).view(torch.bfloat16)
        return torch.from_numpy(x.data.copy())  # the next call writes to the same memory

    def call(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        for number, x in enumerate(inputs):
            request.set_input_tensor(number, as_given(x))
        request.infer()
        return tuple(as_tensor(x) for x in request.output_tensors)

    return call


def _onnxruntime(model: _Flat, given: tuple[Tensor, ...]) -> Call:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model, given, str(path), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]

    def call(inputs: list[Tensor]) -> tuple[Tensor, ...]:
        values = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return tuple(map(torch.from_numpy, session.run(None, values)))

    return call


openvino_api = converted_at_first_call(_openvino)
onnxruntime_api = converted_at_first_call(_onnxruntime)
