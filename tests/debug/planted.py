"""Bugs to find: each function plants one into the compiler of this process and returns what takes it out again.

``plant(NAME)`` does so by name, for processes that tests start.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchkiln
from torchkiln import schedule
from torchkiln.codegen.llvm import blas, math_exponential, operations
from torchkiln.debug import check
from torchkiln.graph.weights import is_weight
from torchkiln.ir import expr as ex
from torchkiln.lowering import outputs
from torchkiln.lowering.registry import LOWERINGS
from torchkiln.schedule import inline

aten = torch.ops.aten
Undo = Callable[[], None]

_ROOT = Path(__file__).resolve().parents[2]


def _patched(owner: Any, name: str, value: Any) -> Undo:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _patched_item(owner: dict[Any, Any], key: Any, value: Any) -> Undo:
    before = owner[key]
    owner[key] = value
    return lambda: owner.update({key: before})


def wrong_rewrite() -> Undo:
    """A rewrite of tanh that is a thousandth off."""

    @torchkiln.rewrite(stage="joint", example_inputs=(torch.empty(4, 8),))
    class NearlyTanh:
        def search(x):
            return torch.tanh(x)

        def replace(x):
            return torch.tanh(x * 1.001)

    return NearlyTanh.unregister


def wrong_fusion() -> Undo:
    """Loops that a cosine is inlined into come out one percent too large."""
    right = inline._substitute

    def wrong(loop: Any, definitions: Any) -> Any:
        made = right(loop, definitions)
        inlined = {load.buffer for load in ex.loads(loop.value)} & definitions.keys()
        if any("cos" in node for name in inlined for node in definitions[name].origin.nodes):
            factor = ex.Constant(1.01, made.value.dtype)
            return dataclasses.replace(made, value=ex.op("mul", made.value, factor))
        return made

    return _patched(inline, "_substitute", wrong)


def wrong_constant() -> Undo:
    """A coefficient of the polynomial for exp."""
    first, *rest = math_exponential._EXP
    return _patched(math_exponential, "_EXP", (first, rest[0] + 0.01, *rest[1:]))


def crash_in_lowering() -> Undo:
    """The lowering of erf raises something."""

    def raises(*_: Any, **__: Any) -> Any:
        raise ValueError("planted")

    return _patched_item(LOWERINGS, aten.erf.default, raises)


def crash_with_symbolic_sizes() -> Undo:
    """A pass on joint graphs raises something where sizes are symbolic."""

    @torchkiln.graph_pass(stage="joint")
    def takes_fixed_sizes(graph_module: torch.fx.GraphModule) -> bool:
        inputs = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
        if any(isinstance(value, torch.SymInt) for value in inputs):
            raise ValueError("planted")
        return False

    return lambda: torchkiln.remove_graph_pass("takes_fixed_sizes")


def crash_with_inline_limit() -> Undo:
    """Inlining raises something with a limit of 3."""
    right = schedule.inline_pointwise

    def raises(*args: Any, most_nodes: int, **kwargs: Any) -> Any:
        if most_nodes == 3:
            raise ValueError("planted")
        return right(*args, most_nodes=most_nodes, **kwargs)

    return _patched(schedule, "inline_pointwise", raises)


def segfault() -> Undo:
    """Code of isinf writes to address 8."""
    right = operations._FLOAT_FUNCTIONS["isinf"]

    def wrong(f: Any, x: Any) -> Any:
        f.emit("store volatile i64 0, ptr inttoptr (i64 8 to ptr)")
        return right(f, x)

    return _patched_item(operations._FLOAT_FUNCTIONS, "isinf", wrong)


def nan() -> Undo:
    """The sigmoid as a quotient, of which both parts overflow."""
    right = LOWERINGS[aten.exp.default]

    def wrong(builder: Any, x: Any) -> Any:
        exponential = right(builder, x)
        mul, div, add = (LOWERINGS[getattr(aten, name).Tensor] for name in ("mul", "div", "add"))
        return div(builder, exponential, add(builder, mul(builder, exponential, 1.0), 1.0))

    return _patched_item(LOWERINGS, aten.sigmoid.default, wrong)


def dtype_in_joint_pass() -> Undo:
    """A pass on joint graphs that rounds what goes into a sine to bfloat16."""

    @torchkiln.graph_pass(stage="joint")
    def rounds_sines(graph_module: torch.fx.GraphModule) -> bool:
        sines = graph_module.graph.find_nodes(op="call_function", target=aten.sin.default)
        for node in sines:
            with graph_module.graph.inserting_before(node):
                narrow = graph_module.graph.call_function(
                    torch.ops.prims.convert_element_type.default, (node.args[0], torch.bfloat16)
                )
                wide = graph_module.graph.call_function(
                    torch.ops.prims.convert_element_type.default, (narrow, torch.float32)
                )
            node.args = (wide,)
        return bool(sines)

    return lambda: torchkiln.remove_graph_pass("rounds_sines")


def wrong_weights() -> Undo:
    """A pass of joint graphs that changes what only weights of inference are read by."""

    @torchkiln.graph_pass(stage="joint")
    def scales_weights(graph_module: torch.fx.GraphModule) -> bool:
        read = [n for n in graph_module.graph.find_nodes(op="placeholder") if is_weight(n) and n.meta["val"].dim() > 1]
        for node in read:
            with graph_module.graph.inserting_after(node):
                scaled = graph_module.graph.call_function(aten.mul.Tensor, (node, 1.01))
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, scaled=scaled: user is not scaled)
        return bool(read)

    return lambda: torchkiln.remove_graph_pass("scales_weights")


def strides_of_library_call() -> Undo:
    """Matmuls take a transposed matrix for one that is not."""
    right = blas.form_of
    return _patched(blas, "form_of", lambda matrix: (True, right(matrix)[1]))


def strides_in_joint_pass() -> Undo:
    """A pass on joint graphs that lays a transposed result of sigmoid out in rows."""

    @torchkiln.graph_pass(stage="joint")
    def lays_out_sigmoids(graph_module: torch.fx.GraphModule) -> bool:
        sigmoids = graph_module.graph.find_nodes(op="call_function", target=aten.sigmoid.default)
        for node in sigmoids:
            with graph_module.graph.inserting_after(node):
                rows = graph_module.graph.call_function(aten.clone.default, (node,))
            rows.kwargs = {"memory_format": torch.contiguous_format}
            node.replace_all_uses_with(rows, delete_user_cb=lambda user, rows=rows: user is not rows)
        return bool(sigmoids)

    return lambda: torchkiln.remove_graph_pass("lays_out_sigmoids")


def strides_of_result() -> Undo:
    """Results of an addition are stored in rows, whatever strides were promised."""
    right = outputs._lower_output

    def wrong(builder: Any, item: Any, values: Any, *args: Any) -> Any:
        if getattr(item, "target", None) is not aten.add.Tensor:
            return right(builder, item, values, *args)
        builder.lower_for(item)
        return outputs._stored(builder, values[item], (values[item].shape[1], 1))

    return _patched(outputs, "_lower_output", wrong)


def slow_call() -> Undo:
    """Compiled graphs with a cosine take 5 ms longer than they need."""
    right = check.compile_fx

    def wrong(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        slow = any("cos" in node.name for node in gm.graph.nodes)
        compiled = right(gm, *args, **kwargs)

        def call(*inputs: Any) -> Any:
            time.sleep(0.005 if slow else 0)
            return compiled(*inputs)

        return call

    return _patched(check, "compile_fx", wrong)


PLANTS: dict[str, Callable[[], Undo]] = {
    plant.__name__: plant
    for plant in (
        wrong_rewrite,
        wrong_fusion,
        wrong_constant,
        crash_in_lowering,
        crash_with_symbolic_sizes,
        crash_with_inline_limit,
        segfault,
        nan,
        dtype_in_joint_pass,
        wrong_weights,
        strides_of_library_call,
        strides_in_joint_pass,
        strides_of_result,
        slow_call,
    )
}


def plant(name: str) -> Undo:
    """Plant a bug by name, unless the environment variable ``WITHOUT_BUGS`` is there."""
    return (lambda: None) if "WITHOUT_BUGS" in os.environ else PLANTS[name]()


def run_file(file: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file that reproduces a planted bug, which its setup imports from here."""
    paths = os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])
    variables = {**os.environ, "PYTHONPATH": paths, **environment}
    return subprocess.run([sys.executable, str(file)], env=variables, capture_output=True, text=True, check=False)
