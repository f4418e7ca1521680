// The kernels of one instruction set for rows that meet more than parameters: what modulated.cpp may call.
//
// Tensors are rows of `kept` values. A factor, an addend or a gate of the sum is one line for so many rows that
// follow each other (`each`). Statistics, parameters and those lines are of the compute type; lines of every row
// may be `narrow`, of the tensors' own.
#pragma once

#include <cstdint>

#include "isa.h"

namespace leannorm {

// A line for every `each` rows, `step` elements from one to the next; p is null where there is none.
struct Lines {
  const void* p;
  int64_t each, step;
  bool narrow;
};

// y = xhat * (one + factor) + addend of x, or of total = x + gate * branch.
struct AdaForward {
  int64_t kept;
  const void *x, *branch;
  Lines gate, factor, addend;
  void *y, *total, *mean, *rstd;
  double one, eps;
  bool rms, stream;
};
struct AdaBackward {
  int64_t kept;
  const void *dy, *dtotal, *x, *mean, *rstd;
  Lines factor;
  void* dx;
  double one;
  bool rms, stream;
};
// dbranch = gate * dtotal.
struct GateBackward {
  int64_t kept;
  const void *dtotal, *branch;
  Lines gate;
  void* dbranch;
};

// y = rms_norm(x) * act(gate), or with `behind` rms_norm(x * act(gate)). Rows of x, gate and dy may lie apart.
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
  // [ElementType]. The sums of dy * xhat and of dy, of dtotal * branch, and of the weight's gradient are added
  // to what stands there; null where unwanted. Where each row has a line of its own, the first and the third are
  // lines of all rows, which are written, and the second, which would be dy, is null.
  // `scratch` is for two lines of the compute type.
  void (*ada_forward[4])(const AdaForward&, int64_t begin, int64_t end);
  void (*ada_backward[4])(const AdaBackward&, int64_t begin, int64_t end, void* with_xhat, void* plain);
  void (*gate_backward[4])(const GateBackward&, int64_t begin, int64_t end, void* dgate);
  void (*gated_forward[4])(const GatedForward&, int64_t begin, int64_t end, void* scratch);
  void (*gated_backward[4])(const GatedBackward&, int64_t begin, int64_t end, void* dweight, void* scratch);
};

LEANNORM_DECLARE(ModulatedKernels, modulated_kernels)

}  // namespace leannorm
