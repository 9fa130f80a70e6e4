"""What small programs look like at every stage, from the functional graph to LLVM: a change of any shows here.

``EXPECTTEST_ACCEPT=1 pytest tests/test_stages.py`` writes the texts anew; read the difference before committing it.
"""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from expecttest import TestCase
from torch import Tensor

from torchkiln.recorder import Record, listen
from torchkiln.target import Target

# Registers of four floats, one thread, no maker's own choices: short code that is the same on every machine.
_OPTIONS = {"fallback": False, "vector_bits": 128, "threads": 1}


def _stages(function: Callable[..., Any], *inputs: Tensor, dynamic: bool = False) -> str:
    """The functional graph, the program and the plan of a function, and its first kernel as LLVM."""
    found: list[Record] = []
    with listen(found.append), patch.object(Target, "is_amd", False):
        torch.compile(function, backend="kiln", dynamic=dynamic, options=_OPTIONS)(*inputs)
    made = {record.stage: record.value for record in found}
    text = made["code"].text
    begin = text.find("define void @kernel0")
    kernel = text[begin : text.index("\n}", begin) + 2] if begin >= 0 else "no kernel"
    nodes = (str(node.format_node()).replace(", kwargs = {})", ")") for node in made["inference graph"].graph.nodes)
    parts = {"graph": "\n".join(nodes), "program": made["program"], "plan": made["plan"], "llvm": kernel}
    return "\n".join(f"-- {name}\n{part}" for name, part in parts.items())


class TestStages(TestCase):
    maxDiff = None

    def setUp(self) -> None:
        torch._dynamo.reset()

    def test_pointwise(self) -> None:
        self.assertExpectedInline(_stages(lambda x, y: (x + y) * 2, torch.zeros(8), torch.zeros(8)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%arg1_1 : [num_users=1] = placeholder[target=arg1_1]
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%arg0_1, %arg1_1))
%mul : [num_users=1] = call_function[target=torch.ops.aten.mul.Tensor](args = (%add, 2))
return (mul,)
-- program
input arg0_1 -> a0
input arg1_1 -> a1
buffer a0: float32[8] strides [1]
buffer a1: float32[8] strides [1]
buffer b2: float32[8] strides [1]
buffer b3: float32[8] strides [1]
for i0 < 8: b2[i0] = add(a0[i0], a1[i0])
for i0 < 8: b3[i0] = mul(b2[i0], 2.0)
output b3.as_strided([8], [1], 0)
-- plan
arena of 0 bytes, peak 32
a0 in input 0
a1 in input 1
b3 in its own tensor
kernel0(a0, a1, b3)
kernel0: cpu lanes 8 blocks 1 of 1 iterations 1 grain 0 rows i0 < 8 columns none lane i0
    %2[i0] = mul(add(%0[i0], %1[i0]), 2.0)
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  %v5 = getelementptr ptr, ptr %context, i64 2
  %v6 = load ptr, ptr %v5
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v7 = load i64, ptr %slot1
  %v8 = icmp slt i64 %v7, %end
  br i1 %v8, label %body2, label %done3
body2:
  %v9 = getelementptr inbounds float, ptr %v2, i64 0
  %v10 = load <8 x float>, ptr %v9, align 4
  %v11 = getelementptr inbounds float, ptr %v4, i64 0
  %v12 = load <8 x float>, ptr %v11, align 4
  %v13 = fadd contract <8 x float> %v10, %v12
  %v14 = fmul contract <8 x float> %v13, splat (float 0x4000000000000000)
  %v15 = getelementptr inbounds float, ptr %v6, i64 0
  %v16 = shufflevector <8 x float> %v14, <8 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  store <4 x float> %v16, ptr %v15, align 4
  %v17 = shufflevector <8 x float> %v14, <8 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %v18 = getelementptr float, ptr %v15, i64 4
  store <4 x float> %v17, ptr %v18, align 4
  %v19 = add nsw i64 %v7, 1
  store i64 %v19, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_broadcast_over_rows(self) -> None:
        self.assertExpectedInline(_stages(lambda x, y: x + y, torch.zeros(3, 4), torch.zeros(4)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%arg1_1 : [num_users=1] = placeholder[target=arg1_1]
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%arg0_1, %arg1_1))
return (add,)
-- program
input arg0_1 -> a0
input arg1_1 -> a1
buffer a0: float32[3, 4] strides [4, 1]
buffer a1: float32[4] strides [1]
buffer b2: float32[3, 4] strides [4, 1]
for i0 < 3, i1 < 4: b2[i0, i1] = add(a0[i0, i1], a1[i1])
output b2.as_strided([3, 4], [4, 1], 0)
-- plan
arena of 0 bytes, peak 48
a0 in input 0
a1 in input 1
b2 in its own tensor
kernel0(a0, a1, b2)
kernel0: cpu lanes 4 blocks 1 of 1 iterations 3 grain 0 rows i0 < 3, i1 < 4 columns none lane i1
    %2[4*i0 + i1] = add(%0[4*i0 + i1], %1[i1])
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  %v5 = getelementptr ptr, ptr %context, i64 2
  %v6 = load ptr, ptr %v5
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v7 = load i64, ptr %slot1
  %v8 = icmp slt i64 %v7, %end
  br i1 %v8, label %body2, label %done3
body2:
  %v9 = mul nsw i64 %v7, 4
  %v10 = add nsw i64 %v9, 0
  %v11 = getelementptr inbounds float, ptr %v2, i64 %v10
  %v12 = load <4 x float>, ptr %v11, align 4
  %v13 = getelementptr inbounds float, ptr %v4, i64 0
  %v14 = load <4 x float>, ptr %v13, align 4
  %v15 = fadd contract <4 x float> %v12, %v14
  %v16 = getelementptr inbounds float, ptr %v6, i64 %v10
  store <4 x float> %v15, ptr %v16, align 4
  %v17 = add nsw i64 %v7, 1
  store i64 %v17, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_a_sum_of_rows(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x.sum(1), torch.zeros(2, 8)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%sum_1 : [num_users=1] = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%arg0_1, [1]))
return (sum_1,)
-- program
input arg0_1 -> a0
buffer a0: float32[2, 8] strides [8, 1]
buffer b1: float32[2] strides [1]
for i0 < 2: b1[i0] = sum(r0 < 8: a0[i0, r0])
output b1.as_strided([2], [1], 0)
-- plan
arena of 0 bytes, peak 8
a0 in input 0
b1 in its own tensor
kernel0(a0, b1)
kernel0: cpu lanes 8 blocks 1 of 1 iterations 2 grain 0 rows i0 < 2 columns r0 < 8 lane r0
    red0 = sum(%0[8*i0 + r0])
  %1[i0] = red0
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %slot2 = alloca <8 x float>, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  %v7 = mul nsw i64 %v5, 8
  store <8 x float> splat (float 0x0000000000000000), ptr %slot2
  %v8 = add nsw i64 %v7, 0
  %v9 = getelementptr inbounds float, ptr %v2, i64 %v8
  %v10 = load <8 x float>, ptr %v9, align 4
  %v11 = load <8 x float>, ptr %slot2
  %v12 = fadd contract <8 x float> %v11, %v10
  store <8 x float> %v12, ptr %slot2
  %v13 = load <8 x float>, ptr %slot2
  %v14 = call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0x8000000000000000, <8 x float> %v13)
  %v15 = getelementptr inbounds float, ptr %v4, i64 %v5
  store float %v14, ptr %v15, align 4
  %v16 = add nsw i64 %v5, 1
  store i64 %v16, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_a_maximum_of_columns(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x.amax(0), torch.zeros(2, 8)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%amax : [num_users=1] = call_function[target=torch.ops.aten.amax.default](args = (%arg0_1, [0]))
return (amax,)
-- program
input arg0_1 -> a0
buffer a0: float32[2, 8] strides [8, 1]
buffer b1: float32[8] strides [1]
for i0 < 8: b1[i0] = max(r0 < 2: a0[r0, i0])
output b1.as_strided([8], [1], 0)
-- plan
arena of 0 bytes, peak 32
a0 in input 0
b1 in its own tensor
kernel0(a0, b1)
kernel0: cpu lanes 8 blocks 1 of 8 iterations 1 grain 0 rows i0 < 8 columns r0 < 2 lane i0
    red0 = max(%0[i0 + 8*r0])
  %1[i0] = red0
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %slot2 = alloca <8 x i32>, align 64
  %slot3 = alloca <8 x float>, align 64
  %slot4 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  store <8 x i32> splat (i32 0), ptr %slot2
  store <8 x float> splat (float 0xFFF0000000000000), ptr %slot3
  store i64 0, ptr %slot4
  br label %head4
head4:
  %v7 = load i64, ptr %slot4
  %v8 = icmp slt i64 %v7, 2
  br i1 %v8, label %body5, label %done6
body5:
  %v9 = mul nsw i64 %v7, 8
  %v10 = getelementptr inbounds float, ptr %v2, i64 %v9
  %v11 = load <8 x float>, ptr %v10, align 4
  %v12 = load <8 x float>, ptr %slot3
  %v13 = bitcast <8 x float> %v11 to <8 x i32>
  %v14 = and <8 x i32> %v13, splat (i32 2147483647)
  %v15 = load <8 x i32>, ptr %slot2
  %v16 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %v15, <8 x i32> %v14)
  store <8 x i32> %v16, ptr %slot2
  %v17 = fcmp ogt <8 x float> %v11, %v12
  %v18 = select <8 x i1> %v17, <8 x float> %v11, <8 x float> %v12
  store <8 x float> %v18, ptr %slot3
  %v19 = add nsw i64 %v7, 1
  store i64 %v19, ptr %slot4
  br label %head4
done6:
  %v20 = load <8 x float>, ptr %slot3
  %v21 = load <8 x i32>, ptr %slot2
  %v22 = icmp sgt <8 x i32> %v21, splat (i32 2139095040)
  %v23 = select <8 x i1> %v22, <8 x float> splat (float 0x7FF8000000000000), <8 x float> %v20
  %v24 = getelementptr inbounds float, ptr %v4, i64 0
  %v25 = shufflevector <8 x float> %v23, <8 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  store <4 x float> %v25, ptr %v24, align 4
  %v26 = shufflevector <8 x float> %v23, <8 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %v27 = getelementptr float, ptr %v24, i64 4
  store <4 x float> %v26, ptr %v27, align 4
  %v28 = add nsw i64 %v5, 1
  store i64 %v28, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_normalized_rows(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x / x.sum(1, keepdim=True), torch.zeros(2, 8)), """\
-- graph
%arg0_1 : [num_users=2] = placeholder[target=arg0_1]
%sum_1 : [num_users=1] = call_function[target=torch.ops.aten.sum.dim_IntList](args = (%arg0_1, [1], True))
%div : [num_users=1] = call_function[target=torch.ops.aten.div.Tensor](args = (%arg0_1, %sum_1))
return (div,)
-- program
input arg0_1 -> a0
buffer a0: float32[2, 8] strides [8, 1]
buffer b1: float32[2] strides [1]
buffer b2: float32[2, 8] strides [8, 1]
for i0 < 2: b1[i0] = sum(r0 < 8: a0[i0, r0])
for i0 < 2, i1 < 8: b2[i0, i1] = div(a0[i0, i1], b1[i0])
output b2.as_strided([2, 8], [8, 1], 0)
-- plan
arena of 0 bytes, peak 64
a0 in input 0
b2 in its own tensor
kernel0(a0, b2)
kernel0: cpu lanes 8 blocks 1 of 1 iterations 2 grain 0 rows i0 < 2 columns r0 < 8 lane r0
    red0 = sum(%0[8*i0 + r0])
    %1[8*i0 + r0] = div(%0[8*i0 + r0], red0)
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %slot2 = alloca <8 x float>, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  %v7 = mul nsw i64 %v5, 8
  store <8 x float> splat (float 0x0000000000000000), ptr %slot2
  %v8 = add nsw i64 %v7, 0
  %v9 = getelementptr inbounds float, ptr %v2, i64 %v8
  %v10 = load <8 x float>, ptr %v9, align 4
  %v11 = load <8 x float>, ptr %slot2
  %v12 = fadd contract <8 x float> %v11, %v10
  store <8 x float> %v12, ptr %slot2
  %v13 = load <8 x float>, ptr %slot2
  %v14 = call reassoc float @llvm.vector.reduce.fadd.v8f32(float 0x8000000000000000, <8 x float> %v13)
  %v15 = add nsw i64 %v7, 0
  %v16 = getelementptr inbounds float, ptr %v2, i64 %v15
  %v17 = load <8 x float>, ptr %v16, align 4
  %v18 = insertelement <8 x float> poison, float %v14, i64 0
  %v19 = shufflevector <8 x float> %v18, <8 x float> poison, <8 x i32> zeroinitializer
  %v20 = fdiv contract <8 x float> %v17, %v19
  %v21 = getelementptr inbounds float, ptr %v4, i64 %v15
  %v22 = shufflevector <8 x float> %v20, <8 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  store <4 x float> %v22, ptr %v21, align 4
  %v23 = shufflevector <8 x float> %v20, <8 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %v24 = getelementptr float, ptr %v21, i64 4
  store <4 x float> %v23, ptr %v24, align 4
  %v25 = add nsw i64 %v5, 1
  store i64 %v25, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_a_transposed_copy(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x.t().contiguous(), torch.zeros(2, 3)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%transpose : [num_users=1] = call_function[target=torch.ops.aten.permute.default](args = (%arg0_1, [1, 0]))
%clone : [num_users=1] = call_function[target=torch.ops.aten.clone.default](args = (%transpose,), kwargs = {memory_format: torch.contiguous_format})
return (clone,)
-- program
input arg0_1 -> a0
buffer a0: float32[2, 3] strides [3, 1]
buffer b1: float32[3, 2] strides [2, 1]
for i0 < 3, i1 < 2: b1[i0, i1] = a0[i1, i0]
output b1.as_strided([3, 2], [2, 1], 0)
-- plan
arena of 0 bytes, peak 24
a0 in input 0
b1 in its own tensor
kernel0(a0, b1)
kernel0: cpu lanes 8 blocks 1 of 1 iterations 1 grain 0 rows i0 < 3 columns none lane i0
    %1[2*i0] = interleaved(%0[i0], %0[i0 + 3])
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  %v7 = mul nsw i64 0, 2
  %v8 = add nsw i64 3, 0
  %v9 = getelementptr inbounds float, ptr %v2, i64 %v8
  %v10 = call <4 x float> @llvm.masked.load.v4f32.p0(ptr align 4 %v9, <4 x i1> <i1 true, i1 true, i1 true, i1 false>, <4 x float> zeroinitializer)
  %v11 = getelementptr inbounds float, ptr %v2, i64 0
  %v12 = call <4 x float> @llvm.masked.load.v4f32.p0(ptr align 4 %v11, <4 x i1> <i1 true, i1 true, i1 true, i1 false>, <4 x float> zeroinitializer)
  %v13 = getelementptr inbounds float, ptr %v4, i64 %v7
  %v14 = shufflevector <4 x float> %v12, <4 x float> %v10, <4 x i32> <i32 0, i32 4, i32 1, i32 5>
  %v15 = shufflevector <4 x float> %v12, <4 x float> %v10, <4 x i32> <i32 2, i32 6, i32 3, i32 7>
  store <4 x float> %v14, ptr %v13, align 4
  %v16 = getelementptr float, ptr %v13, i64 4
  call void @llvm.masked.store.v4f32.p0(<4 x float> %v15, ptr align 4 %v16, <4 x i1> <i1 true, i1 true, i1 false, i1 false>)
  %v17 = add nsw i64 %v5, 1
  store i64 %v17, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_a_view_is_no_kernel(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x[1:].view(6), torch.zeros(3, 3)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%slice_1 : [num_users=1] = call_function[target=torch.ops.aten.slice.Tensor](args = (%arg0_1, 0, 1, 9223372036854775807))
%view : [num_users=1] = call_function[target=torch.ops.aten.view.default](args = (%slice_1, [6]))
return (view,)
-- program
input arg0_1 -> a0
buffer a0: float32[3, 3] strides [3, 1]
output a0.as_strided([6], [1], 3)
-- plan
arena of 0 bytes, peak 0
a0 in input 0
-- llvm
no kernel""")

    def test_a_concatenation(self) -> None:
        self.assertExpectedInline(_stages(lambda x, y: torch.cat([x, y]), torch.zeros(2), torch.zeros(2)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%arg1_1 : [num_users=1] = placeholder[target=arg1_1]
%cat : [num_users=1] = call_function[target=torch.ops.aten.cat.default](args = ([%arg0_1, %arg1_1],))
return (cat,)
-- program
input arg0_1 -> a0
input arg1_1 -> a1
buffer a0: float32[2] strides [1]
buffer a1: float32[2] strides [1]
buffer b2: float32[4] strides [1]
for i0 < 4: b2[i0] = where(lt(index(i0), 2), masked(lt(index(i0), 2), a0[i0]), masked(ge(index(i0), 2), a1[i0 + -2]))
output b2.as_strided([4], [1], 0)
-- plan
arena of 0 bytes, peak 16
a0 in input 0
a1 in input 1
b2 in its own tensor
kernel0(a0, a1, b2)
kernel0: cpu lanes 4 blocks 1 of 1 iterations 1 grain 0 rows i0 < 4 columns none lane i0
    %2[i0] = where(lt(index(i0), 2), masked(lt(index(i0), 2), %0[i0]), masked(ge(index(i0), 2), %1[i0 + -2]))
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  %v5 = getelementptr ptr, ptr %context, i64 2
  %v6 = load ptr, ptr %v5
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v7 = load i64, ptr %slot1
  %v8 = icmp slt i64 %v7, %end
  br i1 %v8, label %body2, label %done3
body2:
  %v9 = add <4 x i32> splat (i32 0), <i32 0, i32 1, i32 2, i32 3>
  %v10 = icmp slt <4 x i32> %v9, splat (i32 2)
  %v11 = getelementptr inbounds float, ptr %v2, i64 0
  %v12 = call <4 x float> @llvm.masked.load.v4f32.p0(ptr align 4 %v11, <4 x i1> %v10, <4 x float> zeroinitializer)
  %v13 = select <4 x i1> %v10, <4 x float> %v12, <4 x float> splat (float 0x0000000000000000)
  %v14 = icmp sge <4 x i32> %v9, splat (i32 2)
  %v15 = add nsw i64 -2, 0
  %v16 = getelementptr inbounds float, ptr %v4, i64 %v15
  %v17 = call <4 x float> @llvm.masked.load.v4f32.p0(ptr align 4 %v16, <4 x i1> %v14, <4 x float> zeroinitializer)
  %v18 = select <4 x i1> %v14, <4 x float> %v17, <4 x float> splat (float 0x0000000000000000)
  %v19 = select <4 x i1> %v10, <4 x float> %v13, <4 x float> %v18
  %v20 = getelementptr inbounds float, ptr %v6, i64 0
  store <4 x float> %v19, ptr %v20, align 4
  %v21 = add nsw i64 %v7, 1
  store i64 %v21, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_a_choice_by_position(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x.tril(), torch.zeros(2, 4)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%tril : [num_users=1] = call_function[target=torch.ops.aten.tril.default](args = (%arg0_1,))
return (tril,)
-- program
input arg0_1 -> a0
buffer a0: float32[2, 4] strides [4, 1]
buffer b1: float32[2, 4] strides [4, 1]
for i0 < 2, i1 < 4: b1[i0, i1] = where(le(index(-1*i0 + i1), 0), a0[i0, i1], 0.0)
output b1.as_strided([2, 4], [4, 1], 0)
-- plan
arena of 0 bytes, peak 32
a0 in input 0
b1 in its own tensor
kernel0(a0, b1)
kernel0: cpu lanes 4 blocks 1 of 1 iterations 2 grain 0 rows i0 < 2, i1 < 4 columns none lane i1
    %1[4*i0 + i1] = where(le(index(-1*i0 + i1), 0), %0[4*i0 + i1], 0.0)
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  %v7 = mul nsw i64 %v5, 4
  %v8 = mul nsw i64 %v5, -1
  %v9 = add nsw i64 %v7, 0
  %v10 = add <4 x i32> splat (i32 0), <i32 0, i32 1, i32 2, i32 3>
  %v11 = trunc i64 %v8 to i32
  %v12 = insertelement <4 x i32> poison, i32 %v11, i64 0
  %v13 = shufflevector <4 x i32> %v12, <4 x i32> poison, <4 x i32> zeroinitializer
  %v14 = add <4 x i32> %v10, %v13
  %v15 = icmp sle <4 x i32> %v14, splat (i32 0)
  %v16 = getelementptr inbounds float, ptr %v2, i64 %v9
  %v17 = load <4 x float>, ptr %v16, align 4
  %v18 = select <4 x i1> %v15, <4 x float> %v17, <4 x float> splat (float 0x0000000000000000)
  %v19 = getelementptr inbounds float, ptr %v4, i64 %v9
  store <4 x float> %v18, ptr %v19, align 4
  %v20 = add nsw i64 %v5, 1
  store i64 %v20, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_indices_are_checked(self) -> None:
        self.assertExpectedInline(_stages(lambda x, i: x[i], torch.zeros(4), torch.zeros(2, dtype=torch.int64)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%arg1_1 : [num_users=1] = placeholder[target=arg1_1]
%index : [num_users=1] = call_function[target=torch.ops.aten.index.Tensor](args = (%arg0_1, [%arg1_1]))
return (index,)
-- program
input arg0_1 -> a0
input arg1_1 -> a1
buffer a0: float32[4] strides [1]
buffer a1: int64[2] strides [1]
buffer b2: bool[] strides []
buffer b3: float32[2] strides [1]
for (): b2[] = any(r0 < 2: logical_or(lt(a1[r0], -4), ge(a1[r0], 4)))
 = kiln.check.default(b2.as_strided([], [], 0), IndexError, index out of range in aten.index.Tensor, None)
for i0 < 2: b3[i0] = a0[[a1[i0]]]
output b3.as_strided([2], [1], 0)
-- plan
arena of 64 bytes, peak 72
a0 in input 0
a1 in input 1
b3 in its own tensor
b2 in arena + 0
kernel0(a1, b2, a0, b3)
 = kiln.check.default(b2.as_strided([], [], 0), IndexError, index out of range in aten.index.Tensor, None)
kernel0: cpu lanes 8 blocks 1 of 1 iterations 1 grain 0 rows none columns r0 < 2 lane r0
    red0 = any(logical_or(lt(%0[r0], -4), ge(%0[r0], 4)))
    %3[r0] = %2[[%0[r0]]]
  %1[0] = red0
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %slot2 = alloca <2 x i1>, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  %v5 = getelementptr ptr, ptr %context, i64 2
  %v6 = load ptr, ptr %v5
  %v7 = getelementptr ptr, ptr %context, i64 3
  %v8 = load ptr, ptr %v7
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v9 = load i64, ptr %slot1
  %v10 = icmp slt i64 %v9, %end
  br i1 %v10, label %body2, label %done3
body2:
  store <2 x i1> splat (i1 false), ptr %slot2
  %v11 = getelementptr inbounds i64, ptr %v2, i64 0
  %v12 = load <2 x i64>, ptr %v11, align 8
  %v13 = icmp slt <2 x i64> %v12, splat (i64 -4)
  %v14 = icmp sge <2 x i64> %v12, splat (i64 4)
  %v15 = or <2 x i1> %v13, %v14
  %v16 = load <2 x i1>, ptr %slot2
  %v17 = or <2 x i1> %v16, %v15
  store <2 x i1> %v17, ptr %slot2
  %v18 = add <2 x i64> %v12, splat (i64 4)
  %v19 = icmp slt <2 x i64> %v12, splat (i64 0)
  %v20 = select <2 x i1> %v19, <2 x i64> %v18, <2 x i64> %v12
  %v21 = icmp uge <2 x i64> %v20, splat (i64 4)
  %v22 = select <2 x i1> %v21, <2 x i64> splat (i64 0), <2 x i64> %v20
  %v23 = trunc <2 x i64> %v22 to <2 x i32>
  %v24 = getelementptr inbounds float, ptr %v6, <2 x i32> %v23
  %v25 = call <2 x float> @llvm.masked.gather.v2f32.v2p0(<2 x ptr> align 4 %v24, <2 x i1> splat (i1 true), <2 x float> zeroinitializer)
  %v26 = getelementptr inbounds float, ptr %v8, i64 0
  store <2 x float> %v25, ptr %v26, align 4
  %v27 = load <2 x i1>, ptr %slot2
  %v28 = call i1 @llvm.vector.reduce.or.v2i1(<2 x i1> %v27)
  %v29 = zext i1 %v28 to i8
  %v30 = getelementptr inbounds i8, ptr %v4, i64 0
  store i8 %v29, ptr %v30, align 1
  %v31 = add nsw i64 %v9, 1
  store i64 %v31, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_integers(self) -> None:
        self.assertExpectedInline(_stages(lambda x: (x & 3) + 1, torch.zeros(4, dtype=torch.int32)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%bitwise_and : [num_users=1] = call_function[target=torch.ops.aten.bitwise_and.Scalar](args = (%arg0_1, 3))
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%bitwise_and, 1))
return (add,)
-- program
input arg0_1 -> a0
buffer a0: int32[4] strides [1]
buffer b1: int32[4] strides [1]
buffer b2: int32[4] strides [1]
for i0 < 4: b1[i0] = bitwise_and(a0[i0], 3)
for i0 < 4: b2[i0] = add(b1[i0], 1)
output b2.as_strided([4], [1], 0)
-- plan
arena of 0 bytes, peak 16
a0 in input 0
b2 in its own tensor
kernel0(a0, b2)
kernel0: cpu lanes 4 blocks 1 of 1 iterations 1 grain 0 rows i0 < 4 columns none lane i0
    %1[i0] = add(bitwise_and(%0[i0], 3), 1)
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  %v7 = getelementptr inbounds i32, ptr %v2, i64 0
  %v8 = load <4 x i32>, ptr %v7, align 4
  %v9 = and <4 x i32> %v8, splat (i32 3)
  %v10 = add <4 x i32> %v9, splat (i32 1)
  %v11 = getelementptr inbounds i32, ptr %v4, i64 0
  store <4 x i32> %v10, ptr %v11, align 4
  %v12 = add nsw i64 %v5, 1
  store i64 %v12, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_bfloat16_is_computed_in_float32(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x + 1, torch.zeros(4, dtype=torch.bfloat16)), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%arg0_1, 1))
return (add,)
-- program
input arg0_1 -> a0
buffer a0: bfloat16[4] strides [1]
buffer b1: bfloat16[4] strides [1]
for i0 < 4: b1[i0] = narrow:bfloat16(add(cast:float32(a0[i0]), 1.0))
output b1.as_strided([4], [1], 0)
-- plan
arena of 0 bytes, peak 8
a0 in input 0
b1 in its own tensor
kernel0(a0, b1)
kernel0: cpu lanes 4 blocks 1 of 1 iterations 1 grain 0 rows i0 < 4 columns none lane i0
    %1[i0] = narrow:bfloat16(add(cast:float32(%0[i0]), 1.0))
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  %v7 = getelementptr inbounds i16, ptr %v2, i64 0
  %v8 = load <4 x i16>, ptr %v7, align 2
  %v9 = zext <4 x i16> %v8 to <4 x i32>
  %v10 = shl <4 x i32> %v9, splat (i32 16)
  %v11 = bitcast <4 x i32> %v10 to <4 x float>
  %v12 = fadd contract <4 x float> %v11, splat (float 0x3FF0000000000000)
  %v13 = bitcast <4 x float> %v12 to <4 x i32>
  %v14 = and <4 x i32> %v13, splat (i32 65536)
  %v15 = icmp ne <4 x i32> %v14, splat (i32 0)
  %v16 = select <4 x i1> %v15, <4 x i32> splat (i32 32768), <4 x i32> splat (i32 32767)
  %v17 = add <4 x i32> %v13, %v16
  %v18 = fcmp uno <4 x float> %v12, splat (float 0x0000000000000000)
  %v19 = select <4 x i1> %v18, <4 x i32> splat (i32 2143289344), <4 x i32> %v17
  %v20 = lshr <4 x i32> %v19, splat (i32 16)
  %v21 = trunc <4 x i32> %v20 to <4 x i16>
  %v22 = getelementptr inbounds i16, ptr %v4, i64 0
  store <4 x i16> %v21, ptr %v22, align 2
  %v23 = add nsw i64 %v5, 1
  store i64 %v23, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_a_matmul_between_kernels(self) -> None:
        x, w = torch.zeros(16, 16), torch.zeros(16, 32)
        self.assertExpectedInline(_stages(lambda x, w: torch.relu((x + 1) @ w), x, w), """\
-- graph
%arg0_1 : [num_users=1] = placeholder[target=arg0_1]
%arg1_1 : [num_users=1] = placeholder[target=arg1_1]
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%arg0_1, 1))
%mm : [num_users=1] = call_function[target=torch.ops.aten.mm.default](args = (%add, %arg1_1))
%relu : [num_users=1] = call_function[target=torch.ops.aten.relu.default](args = (%mm,))
return (relu,)
-- program
input arg0_1 -> a0
input arg1_1 -> a1
buffer a0: float32[16, 16] strides [16, 1]
buffer a1: float32[16, 32] strides [32, 1]
buffer b2: float32[16, 16] strides [16, 1]
buffer x3: float32[16, 32] strides [32, 1]
buffer b4: float32[16, 32] strides [32, 1]
for i0 < 16, i1 < 16: b2[i0, i1] = add(a0[i0, i1], 1.0)
x3 = aten.mm.default(b2.as_strided([16, 16], [16, 1], 0), a1.as_strided([16, 32], [32, 1], 0))
for i0 < 16, i1 < 32: b4[i0, i1] = where(lt(x3[i0, i1], 0.0), 0.0, x3[i0, i1])
output b4.as_strided([16, 32], [32, 1], 0)
-- plan
arena of 3072 bytes, peak 5120
a0 in input 0
a1 in input 1
b4 in its own tensor
x3 in arena + 0
b2 in arena + 2048
kernel0(a0, b2)
x3 = aten.mm.default(b2.as_strided([16, 16], [16, 1], 0), a1.as_strided([16, 32], [32, 1], 0))
kernel1(x3, b4)
kernel0: cpu lanes 16 blocks 1 of 1 iterations 1 grain 0 rows i0 < 256 columns none lane i0
    %1[i0] = add(%0[i0], 1.0)
kernel1: cpu lanes 16 blocks 1 of 1 iterations 1 grain 0 rows i0 < 512 columns none lane i0
    %1[i0] = where(lt(%0[i0], 0.0), 0.0, %0[i0])
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %slot2 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v5 = load i64, ptr %slot1
  %v6 = icmp slt i64 %v5, %end
  br i1 %v6, label %body2, label %done3
body2:
  store i64 0, ptr %slot2
  br label %head4
head4:
  %v7 = load i64, ptr %slot2
  %v8 = icmp slt i64 %v7, 256
  br i1 %v8, label %body5, label %done6
body5:
  %v9 = getelementptr inbounds float, ptr %v2, i64 %v7
  %v10 = load <16 x float>, ptr %v9, align 4
  %v11 = fadd contract <16 x float> %v10, splat (float 0x3FF0000000000000)
  %v12 = getelementptr inbounds float, ptr %v4, i64 %v7
  %v13 = shufflevector <16 x float> %v11, <16 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  store <4 x float> %v13, ptr %v12, align 4
  %v14 = shufflevector <16 x float> %v11, <16 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %v15 = getelementptr float, ptr %v12, i64 4
  store <4 x float> %v14, ptr %v15, align 4
  %v16 = shufflevector <16 x float> %v11, <16 x float> poison, <4 x i32> <i32 8, i32 9, i32 10, i32 11>
  %v17 = getelementptr float, ptr %v12, i64 8
  store <4 x float> %v16, ptr %v17, align 4
  %v18 = shufflevector <16 x float> %v11, <16 x float> poison, <4 x i32> <i32 12, i32 13, i32 14, i32 15>
  %v19 = getelementptr float, ptr %v12, i64 12
  store <4 x float> %v18, ptr %v19, align 4
  %v20 = add nsw i64 %v7, 16
  store i64 %v20, ptr %slot2
  br label %head4
done6:
  %v21 = add nsw i64 %v5, 1
  store i64 %v21, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_sizes_known_at_run_time(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x + 1, torch.zeros(5, 3), dynamic=True), """\
-- graph
%arg0_1 : [num_users=0] = placeholder[target=arg0_1]
%arg1_1 : [num_users=0] = placeholder[target=arg1_1]
%arg2_1 : [num_users=1] = placeholder[target=arg2_1]
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%arg2_1, 1))
return (add,)
-- program
input arg0_1 -> None
input arg1_1 -> None
input arg2_1 -> a0
size s77 in [2, 9223372036854775807]
size s27 in [2, 9223372036854775807]
buffer a0: float32[s77, s27] strides [s27, 1]
buffer b1: float32[s77, s27] strides [s27, 1]
for i0 < s77, i1 < s27: b1[i0, i1] = add(a0[i0, i1], 1.0)
output b1.as_strided([s77, s27], [s27, 1], 0)
-- plan
arena of 0 bytes, peak 60
a0 in input 2
b1 in its own tensor
kernel0(a0, b1, s27, s77)
kernel0: cpu lanes 16 blocks 1 of 1 iterations 1 grain (16384 // (n0*n1)) rows i0 < n0*n1 columns none lane i0
    %1[i0] = add(%0[i0], 1.0)
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %slot2 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  %v3 = getelementptr ptr, ptr %context, i64 1
  %v4 = load ptr, ptr %v3
  %v5 = getelementptr i64, ptr %context, i64 2
  %v6 = load i64, ptr %v5
  %v7 = getelementptr i64, ptr %context, i64 3
  %v8 = load i64, ptr %v7
  %v9 = mul nsw i64 %v6, %v8
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v10 = load i64, ptr %slot1
  %v11 = icmp slt i64 %v10, %end
  br i1 %v11, label %body2, label %done3
body2:
  %v12 = and i64 %v9, -16
  %v13 = sub i64 %v9, %v12
  store i64 0, ptr %slot2
  br label %head4
head4:
  %v14 = load i64, ptr %slot2
  %v15 = icmp slt i64 %v14, %v12
  br i1 %v15, label %body5, label %done6
body5:
  %v16 = getelementptr inbounds float, ptr %v2, i64 %v14
  %v17 = load <16 x float>, ptr %v16, align 4
  %v18 = fadd contract <16 x float> %v17, splat (float 0x3FF0000000000000)
  %v19 = getelementptr inbounds float, ptr %v4, i64 %v14
  %v20 = shufflevector <16 x float> %v18, <16 x float> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  store <4 x float> %v20, ptr %v19, align 4
  %v21 = shufflevector <16 x float> %v18, <16 x float> poison, <4 x i32> <i32 4, i32 5, i32 6, i32 7>
  %v22 = getelementptr float, ptr %v19, i64 4
  store <4 x float> %v21, ptr %v22, align 4
  %v23 = shufflevector <16 x float> %v18, <16 x float> poison, <4 x i32> <i32 8, i32 9, i32 10, i32 11>
  %v24 = getelementptr float, ptr %v19, i64 8
  store <4 x float> %v23, ptr %v24, align 4
  %v25 = shufflevector <16 x float> %v18, <16 x float> poison, <4 x i32> <i32 12, i32 13, i32 14, i32 15>
  %v26 = getelementptr float, ptr %v19, i64 12
  store <4 x float> %v25, ptr %v26, align 4
  %v27 = add nsw i64 %v14, 16
  store i64 %v27, ptr %slot2
  br label %head4
done6:
  %v28 = icmp ne i64 %v13, 0
  br i1 %v28, label %then7, label %after8
then7:
  %v29 = call i64 asm "", "=r,0"(i64 %v13)
  %v30 = trunc i64 %v29 to i8
  %v31 = insertelement <16 x i8> poison, i8 %v30, i64 0
  %v32 = shufflevector <16 x i8> %v31, <16 x i8> poison, <16 x i32> zeroinitializer
  %v33 = icmp ugt <16 x i8> %v32, <i8 0, i8 1, i8 2, i8 3, i8 4, i8 5, i8 6, i8 7, i8 8, i8 9, i8 10, i8 11, i8 12, i8 13, i8 14, i8 15>
  %v34 = getelementptr inbounds float, ptr %v2, i64 %v12
  %v35 = call <16 x float> @llvm.masked.load.v16f32.p0(ptr align 4 %v34, <16 x i1> %v33, <16 x float> zeroinitializer)
  %v36 = fadd contract <16 x float> %v35, splat (float 0x3FF0000000000000)
  %v37 = getelementptr inbounds float, ptr %v4, i64 %v12
  call void @llvm.masked.store.v16f32.p0(<16 x float> %v36, ptr align 4 %v37, <16 x i1> %v33)
  br label %after8
after8:
  %v38 = add nsw i64 %v10, 1
  store i64 %v38, ptr %slot1
  br label %head1
done3:
  ret void
}""")

    def test_a_write_into_an_input(self) -> None:
        self.assertExpectedInline(_stages(lambda x: x.add_(1), torch.zeros(4)), """\
-- graph
%arg0_1 : [num_users=2] = placeholder[target=arg0_1]
%add : [num_users=1] = call_function[target=torch.ops.aten.add.Tensor](args = (%arg0_1, 1))
%copy_ : [num_users=1] = call_function[target=torch.ops.aten.copy_.default](args = (%arg0_1, %add))
return (copy_,)
-- program
input arg0_1 -> a0
buffer a0: float32[4] strides [1]
buffer b1: float32[4] strides [1]
for i0 < 4: b1[i0] = add(a0[i0], 1.0)
for i0 < 4: a0[i0] = b1[i0]
output a0.as_strided([4], [1], 0)
-- plan
arena of 0 bytes, peak 0
a0 in input 0
kernel0(a0)
kernel0: cpu lanes 4 blocks 1 of 1 iterations 1 grain 0 rows i0 < 4 columns none lane i0
    %0[i0] = add(%0[i0], 1.0)
-- llvm
define void @kernel0(i64 %begin, i64 %end, ptr %context) #0 {
entry:
  %slot0 = alloca [64 x i8], align 64
  %slot1 = alloca i64, align 64
  %v1 = getelementptr ptr, ptr %context, i64 0
  %v2 = load ptr, ptr %v1
  store i64 %begin, ptr %slot1
  br label %head1
head1:
  %v3 = load i64, ptr %slot1
  %v4 = icmp slt i64 %v3, %end
  br i1 %v4, label %body2, label %done3
body2:
  %v5 = getelementptr inbounds float, ptr %v2, i64 0
  %v6 = load <4 x float>, ptr %v5, align 4
  %v7 = fadd contract <4 x float> %v6, splat (float 0x3FF0000000000000)
  %v8 = getelementptr inbounds float, ptr %v2, i64 0
  store <4 x float> %v7, ptr %v8, align 4
  %v9 = add nsw i64 %v3, 1
  store i64 %v9, ptr %slot1
  br label %head1
done3:
  ret void
}""")


if __name__ == "__main__":
    unittest.main()
