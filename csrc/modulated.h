// The kernels of one instruction set for norms with inputs besides the parameters: what modulated.cpp may call.
//
// Tensors are rows of `kept` values. Statistics and parameters are of the compute type.
#pragma once

#include <cstdint>

#include "rows.h"

namespace leannorm {

// dbranch = gate * dtotal.
struct GateBackward {
  int64_t kept;
  const void *dtotal, *branch;
  Lines gate;
  void* dbranch;
  bool own;
};

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

struct ModulatedKernels {
  // [ElementType]. The sums of dtotal * branch, and of the weight's gradient, are added to the present values; null
  // if not requested. With `own` the first is lines of all rows, of the gate's type, which are written. `scratch` has
  // space for two lines of the compute type.
  void (*gate_backward[4])(const GateBackward&, int64_t begin, int64_t end, void* dgate);
  void (*gated_forward[4])(const GatedForward&, int64_t begin, int64_t end, void* scratch);
  void (*gated_backward[4])(const GatedBackward&, int64_t begin, int64_t end, void* dweight, void* scratch);
};

LEANNORM_DECLARE(ModulatedKernels, modulated_kernels)

}  // namespace leannorm
