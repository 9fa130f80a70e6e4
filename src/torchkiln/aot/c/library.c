/* The C interface of a package: loads its weights, checks arguments and runs the compiled graph, without Python.
 *
 * tables.h is generated: what the package takes and returns, its weights and the texts of its errors. */

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Arithmetic of Python, which conditions on sizes are written in. */

static inline int64_t quotient(int64_t a, int64_t b, int *undefined) {
  if (!b) return *undefined = 1, 0;
  return a / b - (a % b && (a < 0) != (b < 0));
}

static inline int64_t remainder_of(int64_t a, int64_t b, int *undefined) { return a - quotient(a, b, undefined) * b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

#include "tables.h"

#define EXPORT __attribute__((visibility("default")))

static _Thread_local char error_text[2048];

static int32_t fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error_text, sizeof error_text, format, arguments);
  va_end(arguments);
  return 1;
}

/* Weak: before 2.13, torch has no such function and writes the text of an error to stderr. */
__attribute__((weak)) const char *torch_exception_get_what_without_backtrace(void);

static int32_t fail_in_torch(const char *what) {
  if (!torch_exception_get_what_without_backtrace)
    return fail("%s: this version of torch writes its message to stderr", what);
  return fail("%s: %s", what, torch_exception_get_what_without_backtrace());
}

/* In place of Python.
 *
 * Compiled graphs release the interpreter while they run and raise errors as Python exceptions. Without Python there is
 * nothing to release, and the text of an error is kept for last_error. No graph of such a library calls Python. */

void *PyEval_SaveThread(void) { return NULL; }
void PyEval_RestoreThread(void *thread) { (void)thread; }
int PyGILState_Ensure(void) { return 0; }
void PyGILState_Release(int state) { (void)state; }
void *PyErr_Occurred(void) { return NULL; }

void *PyErr_Format(void *class, const char *format, ...) {
  (void)class;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(error_text, sizeof error_text, format, arguments);
  va_end(arguments);
  return NULL;
}

/* A call that failed is made once more through Python for the class of its error: here its text is all there is. */
void *PyTuple_GetItem(void *tuple, int64_t position) { return (void)tuple, (void)position, NULL; }
void *PyList_New(int64_t length) { return (void)length, NULL; }
int PyList_SetItem(void *list, int64_t position, void *item) { return (void)list, (void)position, (void)item, -1; }
void *PyLong_FromLongLong(long long value) { return (void)value, NULL; }
void Py_DecRef(void *object) { (void)object; }
void *PyCapsule_New(void *handle, const char *name, void *destructor) {
  (void)name, (void)destructor;
  aoti_torch_delete_tensor_object((AtenTensorHandle)handle);
  return NULL;
}
void *PyObject_CallFunctionObjArgs(void *function, ...) {
  (void)function;
  fail_in_torch("an operator of torch failed");
  return NULL;
}

/* What only the entry for Python calls, which is linked in and never run. */
#define NEVER_CALLED(name) \
  void name(void) { abort(); }
NEVER_CALLED(Py_IncRef)
NEVER_CALLED(PyBool_FromLong)
NEVER_CALLED(PyCapsule_GetPointer)
NEVER_CALLED(PyErr_Clear)
NEVER_CALLED(PyErr_Fetch)
NEVER_CALLED(PyErr_NormalizeException)
NEVER_CALLED(PyErr_Restore)
NEVER_CALLED(PyImport_ImportModule)
NEVER_CALLED(PyList_GetItem)
NEVER_CALLED(PyList_Size)
NEVER_CALLED(PyLong_AsLongLong)
NEVER_CALLED(PyObject_CallMethodObjArgs)
NEVER_CALLED(PyObject_GetAttrString)
NEVER_CALLED(PyType_IsSubtype)
NEVER_CALLED(PyUnicode_FromFormat)
NEVER_CALLED(PyUnicode_FromString)
NEVER_CALLED(_Z16THPVariable_WrapRKN2at10TensorBaseE)
char PyLong_Type, _Py_NoneStruct;
void *PyExc_RuntimeError, *PyExc_IndexError, *PyExc_ZeroDivisionError;
void *PyExc_OverflowError, *PyExc_ValueError, *PyExc_TypeError;

/* The processor */

#ifdef __x86_64__
#include <cpuid.h>

static uint32_t saved_registers(void) {
  uint32_t low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return low;
}

static const char *missing_feature(void) {
  uint32_t registers[4];
  __cpuid(1, registers[0], registers[1], registers[2], registers[3]);
  uint32_t saved = registers[2] >> 27 & 1 ? saved_registers() : 0;
  for (int k = 0; k < FEATURES; k++) {
    const struct feature *f = &feature_table[k];
    int known = __get_cpuid_count(f->leaf, f->subleaf, &registers[0], &registers[1], &registers[2], &registers[3]);
    if (!known || !(registers[f->in_register] >> f->bit & 1) || (saved & f->saved_registers) != f->saved_registers)
      return f->name;
  }
  return NULL;
}
#else
static const char *missing_feature(void) { return NULL; }
#endif

/* The model */

int32_t kiln_run(void **inputs, void **constants, void *objects, void **outs, void **owned, int64_t reuse);
extern char kiln_weights[], kiln_constants[];

struct MODEL {
  AtenTensorHandle weights[WEIGHTS + 1];
  AtenTensorHandle constants[CONSTANTS + 1];
};

static int32_t make_tensors(const struct stored_tensor *table, int count, char *memory, AtenTensorHandle *handles) {
  for (int k = 0; k < count; k++) {
    const struct stored_tensor *t = &table[k];
    if (aoti_torch_create_tensor_from_blob(
            memory + t->offset, t->dim, t->sizes, t->strides, 0, t->dtype, aoti_torch_device_type_cpu(), 0,
            &handles[k]))
      return fail_in_torch("a weight cannot be made a tensor");
  }
  return 0;
}

EXPORT const char *NAME(last_error)(void) { return error_text; }

EXPORT void NAME(delete)(struct MODEL *model) {
  if (!model) return;
  for (int k = 0; k < WEIGHTS; k++)
    if (model->weights[k]) aoti_torch_delete_tensor_object(model->weights[k]);
  for (int k = 0; k < CONSTANTS; k++)
    if (model->constants[k]) aoti_torch_delete_tensor_object(model->constants[k]);
  free(model);
}

EXPORT int32_t NAME(create)(struct MODEL **created) {
  *created = NULL;
  const char *missing = missing_feature();
  if (missing) return fail("this library was compiled for %s, and this processor lacks %s", TARGET, missing);
  struct MODEL *model = calloc(1, sizeof *model);
  if (!model) return fail("there is no memory for a model");
  if (make_tensors(weight_table, WEIGHTS, kiln_weights, model->weights) ||
      make_tensors(constant_table, CONSTANTS, kiln_constants, model->constants)) {
    NAME(delete)(model);
    return 1;
  }
  *created = model;
  return 0;
}

EXPORT int32_t NAME(set_weight)(struct MODEL *model, const char *name, AtenTensorHandle tensor) {
  for (int k = 0; k < WEIGHTS; k++) {
    if (strcmp(weight_table[k].name, name)) continue;
    AtenTensorHandle handle;
    if (aoti_torch_new_tensor_handle(tensor, &handle)) return fail_in_torch("the tensor cannot be shared");
    aoti_torch_delete_tensor_object(model->weights[k]);
    model->weights[k] = handle;
    return 0;
  }
  return fail("the model has no weight %s", name);
}

/* Arguments */

static int32_t check_size(const struct size *expected, int64_t given, int dim, const char *name, int64_t *symbols) {
  if (expected->kind == ANY_SIZE) return 0;
  if (expected->kind == FIXED_SIZE) {
    if (given == expected->plus) return 0;
    return fail("size %d of the argument %s must be %lld, not %lld", dim, name, (long long)expected->plus,
                (long long)given);
  }
  int64_t rest = given - expected->plus, value = rest / expected->times;
  const struct range *range = &range_table[expected->symbol];
  if (rest % expected->times || value < range->least || value > range->most)
    return fail("size %d of the argument %s must be %s, not %lld", dim, name, expected->allowed, (long long)given);
  if (symbols[expected->symbol] >= 0 && symbols[expected->symbol] != value)
    return fail("size %d of the argument %s must be %lld, as a size before it says, not %lld", dim, name,
                (long long)(symbols[expected->symbol] * expected->times + expected->plus), (long long)given);
  symbols[expected->symbol] = value;
  return 0;
}

static int32_t check_input(const struct input *expected, AtenTensorHandle given, int64_t *symbols) {
  int32_t dtype, device;
  int64_t dim, *sizes;
  if (!given) return fail("the argument %s is missing", expected->name);
  if (aoti_torch_get_dtype(given, &dtype) || aoti_torch_get_device_type(given, &device) ||
      aoti_torch_get_dim(given, &dim) || aoti_torch_get_sizes(given, &sizes))
    return fail_in_torch(expected->name);
  if (dtype != expected->dtype)
    return fail("the argument %s must have the dtype %d, not %d", expected->name, expected->dtype, dtype);
  if (device != aoti_torch_device_type_cpu())
    return fail("the argument %s must be on the CPU, not on a device of type %d", expected->name, device);
  if (dim != expected->dim)
    return fail("the argument %s must have %d dimensions, not %lld", expected->name, expected->dim, (long long)dim);
  for (int d = 0; d < dim; d++)
    if (check_size(&expected->sizes[d], sizes[d], d, expected->name, symbols)) return 1;
  return 0;
}

EXPORT int32_t NAME(run)(struct MODEL *model, const AtenTensorHandle *inputs, int64_t num_inputs,
                         AtenTensorHandle *outputs, int64_t num_outputs) {
  if (num_inputs != INPUTS) return fail("the model takes %d inputs, not %lld", INPUTS, (long long)num_inputs);
  if (num_outputs != OUTPUTS) return fail("the model returns %d outputs, not %lld", OUTPUTS, (long long)num_outputs);
  int64_t symbols[SYMBOLS + 1];
  for (int k = 0; k < SYMBOLS; k++) symbols[k] = -1;
  void *arguments[WEIGHTS + INPUTS + 1], *made[TENSOR_OUTPUTS + 1], *none_given_away[WEIGHTS + INPUTS + 1] = {0};
  for (int k = 0; k < WEIGHTS; k++) arguments[k] = model->weights[k];
  for (int k = 0; k < INPUTS; k++) {
    if (check_input(&input_table[k], inputs[k], symbols)) return 1;
    arguments[WEIGHTS + k] = inputs[k];
  }
  const char *broken = broken_condition(symbols);
  if (broken) return fail("the model was compiled for sizes where %s, which those of this call are not", broken);
  error_text[0] = 0;
  if (kiln_run(arguments, (void **)model->constants, NULL, made, none_given_away, 0)) {
    if (!error_text[0]) fail_in_torch("the compiled graph failed");
    return 1;
  }
  int32_t failed = 0;
  for (int k = 0; k < OUTPUTS; k++) {
    if (output_table[k].made)
      outputs[k] = (AtenTensorHandle)made[output_table[k].number];
    else if (aoti_torch_new_tensor_handle((AtenTensorHandle)arguments[output_table[k].number], &outputs[k]))
      outputs[k] = NULL, failed = fail_in_torch("an argument that is returned cannot be shared");
  }
  return failed;
}
