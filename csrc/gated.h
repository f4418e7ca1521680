// The kernels of one instruction set for RMS norm with a gate of the input's shape: what gated.cpp may call.
//
// Tensors are rows of `kept` values. Statistics and parameters are of the compute type.
#pragma once

#include <cstdint>

#include "isa.h"

namespace leannorm {

// y = rms_norm(x) * act(gate), or with `behind` rms_norm(x * act(gate)). Rows of x, gate and dy may be apart.
struct GatedForward {
  int64_t kept, x_row, gate_row;
  const void *x, *gate, *weight;
  void *y, *rstd;
  double eps;
  int act;
  bool behind, cast, stream;
};
struct GatedBackward {
  int64_t kept, x_row, gate_row, dy_row;
  const void *dy, *x, *gate, *rstd, *weight;
  void *dx, *dgate;
  int act;
  bool behind, stream;
};

struct GatedKernels {
  // [ElementType]. The weight's gradient is added to the present values; null if not requested. `scratch` has space
  // for two lines of the compute type.
  void (*forward[4])(const GatedForward&, int64_t begin, int64_t end, void* scratch);
  void (*backward[4])(const GatedBackward&, int64_t begin, int64_t end, void* dweight, void* scratch);
};

LEANNORM_DECLARE(GatedKernels, gated_kernels)

}  // namespace leannorm
