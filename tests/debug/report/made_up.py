"""Recordings that no compiler made: a small one with everything in it, and large ones of any number of nodes."""

from __future__ import annotations

from torchkiln.debug.recording.model import (
    About,
    Argument,
    Bandwidth,
    BufferLife,
    CacheLookup,
    Compilation,
    Fusion,
    GraphBreak,
    Guards,
    Kernel,
    LibraryCall,
    Limits,
    Line,
    Memory,
    MemoryStep,
    Node,
    Pass,
    Recompiled,
    Recording,
    Stage,
)

MODEL = "app/model.py"
TRAIN = "app/train.py"
NASTY = "</script><script>window.broken = 1</script><img src=x onerror='window.broken = 1'>"
SOURCES = {
    MODEL: f'''"""A block."""
import torch


class Block(torch.nn.Module):
    """Three quotes
    over two lines."""

    def forward(self, x):
        h = self.linear(x)  # {NASTY}
        h = torch.relu(h)
        return torch.softmax(h + x, -1)
''',
    TRAIN: "model = torch.compile(Block(), backend='kiln')\nprint(model(x))\nloss = model(x).sum()\n",
}
ABOUT = About("train.py <b>&amp;</b> Block", "2026-01-02 03:04", "2.13.0", "0.1.0", "x86-64, 8 × float32", 2)
LIMITS = Limits((Bandwidth(1 << 15, 9e10), Bandwidth(1 << 28, 1.2e10)), 2.4e11)
CALL = Line(TRAIN, 2)


def _node(name: str, target: str, line: int = 0, reads: str = "", comes_from: str = "", module: str = "block") -> Node:
    lines = (Line(MODEL, line), CALL) if line else ()
    op = {"": "placeholder", "output": "output"}.get(target, "call_function")
    sizes = () if op == "output" else (32, 64)
    source = tuple((comes_from or name).split())
    return Node(
        name, op, target or name, name, module if line else "", lines, "" if op == "output" else "float32", sizes,
        tuple(reads.split()), source,
    )  # fmt: skip


CAPTURED = (
    _node("x", ""),
    _node("weight", ""),
    _node("linear", "torch.nn.functional.linear", 10, "x weight", module="block.linear"),
    _node("relu", "torch.relu", 11, "linear"),
    _node("add", "_operator.add", 12, "relu x"),
    _node("softmax", "torch.softmax", 12, "add"),
    _node("output", "output", reads="softmax"),
)
LOWERED = (
    _node("x", ""),
    _node("weight", ""),
    _node("permute", "aten.permute.default", 10, "weight", "linear", "block.linear"),
    _node("mm", "aten.mm.default", 10, "x permute", "linear", "block.linear"),
    _node("relu", "aten.relu.default", 11, "mm"),
    _node("add", "aten.add.Tensor", 12, "relu x"),
    _node("_softmax", "aten._softmax.default", 12, "add", "softmax"),
    _node("output", "output", reads="_softmax"),
)


def _text(nodes: tuple[Node, ...]) -> str:
    return "\n".join(f"{node.id} = {node.target}({', '.join(node.reads)})" for node in nodes)


def small() -> Recording:
    """A forward graph with a kernel and a library call, and a backward graph that runs eagerly."""
    before = _text(LOWERED).replace("aten.permute.default", "aten.t.default")
    plan = "arena of 8192 bytes\nkernel0(x, mm, b9)"
    texts = (_text(CAPTURED), before, _text(LOWERED), "buffers\nloops", plan, NASTY)
    kernel = Kernel(
        "kernel0", "kernel0: cpu lanes 64 rows i0 < 32\n    red0 = max(%0[64*i0 + r0])", "define void @kernel0(ptr %0)",
        "\tvaddps\t%ymm0, %ymm1, %ymm2\n\tret", ("relu", "add", "_softmax"), (Line(MODEL, 11), Line(MODEL, 12)), 1,
        24576, 100000, 2.5e-6,
    )  # fmt: skip
    copy = Kernel("kernel1", "kernel1: copies", "", "", (), (), 2, 4096, 0, 1e-6)
    call = LibraryCall(
        "sgemm", "x, weight", ("permute", "mm"), (Line(MODEL, 10),), "float32 matmuls go to BLAS", 24576, 262144, 4e-6
    )
    memory = Memory(
        16384,
        8192,
        (MemoryStep("sgemm", 8192), MemoryStep("kernel0", 16384), MemoryStep("kernel1", 16384)),
        (BufferLife("mm", 8192, 0, 1, "arena + 0"), BufferLife("b9", 8192, 1, 2, "its own tensor")),
    )
    forward = Compilation(
        "graph 1 forward", "forward", 1,
        (Argument("x", "float32", (32, 64), (64, 1), "cpu", True), Argument("s0", "int", value="32")),
        0.2, (0, 1, 2, 3), (0, 1, 2),
        (
            Fusion("fuse", ("relu",), ("add",), True),
            Fusion("inline", ("relu",), ("add",), True),
            Fusion("fuse", ("mm",), ("relu",), False, f"mm is a library call {NASTY}"),
        ),
        (kernel, copy), (call,), memory, (CacheLookup("graph 1", False, "the source of add differs"),),
    )  # fmt: skip
    backward = Compilation("graph 1 backward", "backward", 1, (), 0.1, (0,), fallback="an operator is not known")
    nothing = Memory(0, 0, (MemoryStep("reorder", 0),), ())
    weights = Compilation("graph 1 weights", "weights", 1, (), 0.1, (0,), memory=nothing)
    return Recording(
        ABOUT,
        SOURCES,
        (GraphBreak(f"call of print {NASTY}", CALL),),
        (Guards("forward", "x.dtype == torch.float32\nx.size(0) == 32", Line(MODEL, 9)),),
        (Recompiled("forward", ("x.size(0) == 32",), Line(MODEL, 9)),),
        texts,
        (
            Stage("captured", 0, 0.01, CAPTURED),
            Stage("post-grad", 2, 0.03, LOWERED),
            Stage("program", 3, 0.05),
            Stage("plan", 4, 0.02),
        ),
        (
            Pass(1, "pre_grad", "normalize", "captured", 0.001, False, 0, 0),
            Pass(2, "joint", "canonical", "joint", 0.004, True, 1, 2),
            Pass(3, "post_grad", "Nasty", "forward", 0.002, True, 2, 5),
        ),
        (forward, backward, weights),
        seconds={"AOTAutograd": 0.08, "codegen": 0.03},
        eager_seconds=1.5e-4,
        compiled_seconds=5e-5,
        limits=LIMITS,
    )


OPERATORS = ("aten.mm.default", "aten.add.Tensor", "aten.gelu.default", "aten.mean.dim", "aten.view.default")


def large(count: int, *, modules: bool = True) -> Recording:
    """Three stages of ``count`` nodes each, forty passes that each change ten lines, a kernel for every ten nodes."""
    lines = 400
    source = "\n".join(f"    h{k} = torch.gelu(self.weights[{k}] @ h{k - 1})" for k in range(lines))
    names = [f"node_{k}" for k in range(count)]
    stages = []
    for stage in range(3):
        nodes = []
        for k, name in enumerate(names):
            module = f"model.layers.{k * 48 // count}.{('attention', 'mlp')[k // 7 % 2]}.part{k % 3}" if modules else ""
            stack = tuple(Line(MODEL, 1 + (k + depth * 37) % lines) for depth in range(4))
            reads = tuple(names[k - back] for back in (1, 5) if k >= back)
            target = OPERATORS[k % len(OPERATORS)]
            nodes.append(
                Node(name, "call_function", target, target.split(".")[1], module, stack, "float32", (32, 128 + k),
                     reads, (name,) if stage else ())
            )  # fmt: skip
        stages.append(tuple(nodes))
    texts = [_text(stages[0])]
    for number in range(40):
        changed = texts[-1].split("\n")
        for k in range(10):
            changed[(number * 113 + k * 7) % count] += f"  # by pass {number}"
        texts.append("\n".join(changed))
    code = "\n".join(f"  %{k} = fadd <8 x float> %{k - 1}, %{k - 2}" for k in range(200))
    kernels = tuple(
        Kernel(f"kernel{k}", f"kernel{k}: cpu lanes 64\n    out = {k}", f"define @kernel{k}\n{code}",
               f"kernel{k}:\n{code}", tuple(names[10 * k : 10 * k + 10]), (Line(MODEL, 1 + k % lines),), 1,
               4096 * (k + 1), 1000 * (k + 1) * (1 + k % 90), 1e-6 * (1 + k % 50) + 4e-7 * k)
        for k in range(count // 10)
    )  # fmt: skip
    steps = tuple(MemoryStep(kernel.name, 4096 * (1 + k % 40)) for k, kernel in enumerate(kernels))
    buffers = tuple(BufferLife(f"b{k}", 4096, k, k + 1, f"arena + {4096 * (k % 40)}") for k in range(len(kernels) - 1))
    fusions = tuple(Fusion("fuse", (names[k],), (names[k + 1],), k % 3 > 0, "sizes differ") for k in range(count - 1))
    compilation = Compilation(
        "graph 1 inference", "inference", 1, (), 9.0, (0, 1, 2), tuple(range(40)), fusions, kernels,
        memory=Memory(4096 * 40, 4096 * 40, steps, buffers),
    )  # fmt: skip
    passes = (Pass(k + 1, "post_grad", f"Pass{k}", "inference", 0.01, True, k, k + 1) for k in range(40))
    return Recording(
        ABOUT,
        {MODEL: source},
        texts=tuple(texts),
        stages=tuple(Stage(f"stage {k}", 0, 1.0, nodes) for k, nodes in enumerate(stages)),
        passes=tuple(passes),
        compilations=(compilation,),
        limits=LIMITS,
    )
