"""The C interface of a package as text: the header for its users, and the tables that ``c/library.c`` is built with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchkiln.aot.safetensors import StoredTensor
from torchkiln.aot.signature import ComputedResult, Range, Signature, Size, SymbolicSize, TensorInput
from torchkiln.aot.size_conditions import SizeCondition
from torchkiln.artifact import Artifact
from torchkiln.errors import PackageError
from torchkiln.native.cpuid import feature_bit
from torchkiln.native.levels import needed_features
from torchkiln.native.symbols import dtype_code
from torchkiln.target import Target

# Where a range has no bound.
_LEAST, _MOST = 0, 2**62


@dataclass(frozen=True)
class ConstantTensor:
    """A constant of the graph, and where its memory begins among those of all."""

    tensor: torch.Tensor
    offset: int


def header(name: str, signature: Signature) -> str:
    """The header of the library ``name``, which C and C++ can include."""
    guard = f"{name.upper()}_H"
    return f"""/* {name}, compiled ahead of time by torchkiln. Link {name}.so, libtorch_cpu.so and libc10.so.
 *
 * Inputs:
{_listed(_described_inputs(signature))}
 * Outputs: {_output_count(signature)} tensors, in the order in which the model returns them.
 *
 * Functions return 0, or 1 where they fail: {name}_last_error says why, in the thread that called. */

#ifndef {guard}
#define {guard}

#include <stdint.h>

#ifdef __cplusplus
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
extern "C" {{
#else
/* The part of torch's C ABI by which tensors are made and read; its own header is C++. */
typedef struct AtenTensorOpaque *AtenTensorHandle;
typedef int32_t AOTITorchError;
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_float64(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_int32(void);
int32_t aoti_torch_dtype_int64(void);
int32_t aoti_torch_dtype_bool(void);
AOTITorchError aoti_torch_create_tensor_from_blob(
    void *data, int64_t ndim, const int64_t *sizes, const int64_t *strides, int64_t storage_offset, int32_t dtype,
    int32_t device_type, int32_t device_index, AtenTensorHandle *result);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
AOTITorchError aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle *result);
AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void **result);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t *result);
AOTITorchError aoti_torch_get_device_type(AtenTensorHandle tensor, int32_t *result);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t *result);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t **result);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t **result);
AOTITorchError aoti_torch_get_numel(AtenTensorHandle tensor, int64_t *result);
#endif

typedef struct {name}_model {name}_model;

/* The model with its weights. Models are independent of each other, but for buffers that a call writes to. */
int32_t {name}_create({name}_model **model);
void {name}_delete({name}_model *model);

/* Outputs are new handles, which the caller deletes. Inputs stay the caller's. */
int32_t {name}_run({name}_model *model, const AtenTensorHandle *inputs, int64_t num_inputs, AtenTensorHandle *outputs,
                   int64_t num_outputs);

/* Use another tensor, of the same dtype, sizes and strides, for a weight. */
int32_t {name}_set_weight({name}_model *model, const char *name, AtenTensorHandle tensor);

/* What failed last in this thread. */
const char *{name}_last_error(void);

#ifdef __cplusplus
}}
#endif
#endif
"""


def tables(
    name: str,
    signature: Signature,
    artifact: Artifact,
    target: Target,
    weights: Sequence[StoredTensor],
    constants: Sequence[ConstantTensor],
) -> str:
    """``tables.h`` of a library."""
    inputs = _tensor_inputs(signature)
    stored = [
        _tensor_row(w.names[0], s.begin, w.dtype, w.shape, w.strides)
        for w, s in zip(signature.weights, weights, strict=True)
    ]
    held = [_tensor_row("", c.offset, c.tensor.dtype, c.tensor.shape, c.tensor.stride()) for c in constants]
    outputs = [_output_row(artifact, number) for number in _output_numbers(signature)]
    texts = [_c_text(text.text(artifact.sources)) for text in artifact.texts]
    features = _feature_rows(target)
    return f"""#include "{name}.h"

#define NAME(function) {name}_##function
#define MODEL {name}_model
#define TARGET {_c_text(target.cpu)}
#define INPUTS {len(inputs)}
#define OUTPUTS {len(outputs)}
#define TENSOR_OUTPUTS {artifact.entry.tensor_outputs + artifact.entry.number_outputs}
#define WEIGHTS {len(stored)}
#define CONSTANTS {len(held)}
#define SYMBOLS {len(signature.ranges)}
#define FEATURES {len(features)}

enum {{ FIXED_SIZE, SYMBOLIC_SIZE, ANY_SIZE }};
struct size {{ int kind, symbol; int64_t times, plus; const char *allowed; }};
struct range {{ int64_t least, most; }};
struct input {{ const char *name; int32_t dtype; int dim; struct size sizes[64]; }};
struct output {{ int made, number; }};
struct feature {{ const char *name; uint32_t leaf, subleaf; int in_register, bit; uint32_t saved_registers; }};
struct stored_tensor {{ const char *name; int64_t offset; int32_t dtype; int64_t dim, sizes[64], strides[64]; }};

{_table("struct range", "range_table", [_range_row(r) for r in signature.ranges])}
{_table("struct input", "input_table", [_input_row(i, signature) for i in inputs])}
{_table("struct output", "output_table", outputs)}
{_table("struct stored_tensor", "weight_table", stored)}
{_table("struct stored_tensor", "constant_table", held)}
{_table("char *const", "kiln_texts", texts, linkage="")}
{_table("struct feature", "feature_table", features)}

/* The first condition that sizes do not fulfil; NULL where they fulfil all. */
static const char *broken_condition(const int64_t *symbols) {{
  int undefined = 0;
  (void)symbols, (void)undefined;
{"".join(map(_condition, signature.conditions))}  return NULL;
}}
"""


def _condition(condition: SizeCondition) -> str:
    return f"  if (!{condition.in_c()} || undefined) return {_c_text(condition.text)};\n"


def _feature_rows(target: Target) -> list[str]:
    bits = {name: feature_bit(name) for name in sorted(needed_features(target.processor))}
    return [
        f"{{{_c_text(name)}, {bit.leaf}u, {bit.subleaf}u, {bit.register}, {bit.bit}, {bit.saved_registers}u}}"
        for name, bit in bits.items()
        if bit is not None
    ]


def _tensor_inputs(signature: Signature) -> list[TensorInput]:
    inputs = []
    for found in signature.inputs:
        if isinstance(found, TensorInput):
            inputs.append(found)
        elif hasattr(found, "value") and isinstance(found.value, SymbolicSize):
            raise PackageError(f"The argument {found.name} is an integer, which a shared library cannot take.")
    return inputs


def _output_numbers(signature: Signature) -> list[int]:
    return [result.number for result in signature.results if isinstance(result, ComputedResult)]


def _output_count(signature: Signature) -> int:
    return len(_output_numbers(signature))


def _output_row(artifact: Artifact, number: int) -> str:
    source = artifact.entry.outputs[number]
    if source.kind not in ("tensor", "input"):
        raise PackageError("The model returns a number, which a shared library cannot; return it as a tensor.")
    return f"{{{int(source.kind == 'tensor')}, {source.number}}}"


def _table(kind: str, name: str, rows: Sequence[str], linkage: str = "static ") -> str:
    """An array of C, of at least one element."""
    lines = "".join(f"  {row},\n" for row in rows or ["0" if "*" in kind else "{0}"])
    return f"{linkage}const {kind} {name}[] = {{\n{lines}}};"


def _tensor_row(
    name: str, offset: int, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]
) -> str:
    return f"{{{_c_text(name)}, {offset}, {dtype_code(dtype)}, {len(shape)}, {_numbers(shape)}, {_numbers(strides)}}}"


def _input_row(found: TensorInput, signature: Signature) -> str:
    sizes = ", ".join(_size_row(size, signature) for size in found.sizes) or "{0}"
    return f"{{{_c_text(found.name)}, {dtype_code(found.dtype)}, {len(found.sizes)}, {{{sizes}}}}}"


def _size_row(size: Size, signature: Signature) -> str:
    if size is None:
        return "{ANY_SIZE, 0, 0, 0, 0}"
    if isinstance(size, int):
        return f"{{FIXED_SIZE, 0, 0, {size}, 0}}"
    allowed = _c_text(_allowed(size, signature))
    return f"{{SYMBOLIC_SIZE, {size.symbol}, {size.times}, {size.plus}, {allowed}}}"


def _allowed(size: SymbolicSize, signature: Signature) -> str:
    steps = f" in steps of {abs(size.times)}" if abs(size.times) != 1 else ""
    return f"{signature.ranges[size.symbol].scaled(size.times, size.plus)}{steps}"


def _range_row(found: Range) -> str:
    least = _LEAST if found.least is None else found.least
    return f"{{{least}, {_MOST if found.most is None else found.most}}}"


def _numbers(values: Sequence[int]) -> str:
    return f"{{{', '.join(map(str, values)) or '0'}}}"


def _c_text(text: str) -> str:
    """A string literal; JSON's escapes are C's but for those of other characters than ASCII."""
    return json.dumps(text.encode("ascii", "backslashreplace").decode()).replace("?", "\\?")


def _listed(lines: Iterator[str]) -> str:
    return "\n".join(f" *   {line}" for line in lines) or " *   none"


def _described_inputs(signature: Signature) -> Iterator[str]:
    for found in _tensor_inputs(signature):
        sizes = ", ".join(_described_size(size, signature) for size in found.sizes)
        yield f"{found.name}: {str(found.dtype).removeprefix('torch.')} [{sizes}]"


def _described_size(size: Size, signature: Signature) -> str:
    if not isinstance(size, SymbolicSize):
        return "any" if size is None else str(size)
    return f"{_allowed(size, signature)} (size {size.symbol})"
