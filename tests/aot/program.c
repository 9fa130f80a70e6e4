/* Runs a model of one input and one output: numbers of float32 from a file in, numbers to the standard output.
 *
 * Arguments: the file, then the sizes of the input. */

#include <stdio.h>
#include <stdlib.h>

#include "mlp.h"

static int failed(const char *what) {
  fprintf(stderr, "%s: %s\n", what, mlp_last_error());
  return 1;
}

int main(int count, char **arguments) {
  int64_t sizes[8], strides[8], numel = 1, dim = count - 2, length;
  for (int d = 0; d < dim; d++) sizes[d] = atoll(arguments[d + 2]);
  for (int d = dim - 1; d >= 0; d--) strides[d] = numel, numel *= sizes[d];
  float *numbers = malloc(numel * sizeof(float)), *results;
  FILE *file = fopen(arguments[1], "rb");
  if (!file || fread(numbers, sizeof(float), numel, file) != (size_t)numel) return 2;
  fclose(file);

  mlp_model *model;
  AtenTensorHandle input, output;
  if (mlp_create(&model)) return failed("create");
  aoti_torch_create_tensor_from_blob(numbers, dim, sizes, strides, 0, aoti_torch_dtype_float32(),
                                     aoti_torch_device_type_cpu(), 0, &input);
  if (mlp_run(model, &input, 1, &output, 1)) return failed("run");
  aoti_torch_get_data_ptr(output, (void **)&results);
  aoti_torch_get_numel(output, &length);
  for (int64_t k = 0; k < length; k++) printf("%.9g\n", results[k]);
  aoti_torch_delete_tensor_object(output);
  aoti_torch_delete_tensor_object(input);
  mlp_delete(model);
  return 0;
}
