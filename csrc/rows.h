// The per-row kernels of one instruction set: what the driver (rows.cpp) may call.
//
// A tensor is (outer, kept, inner) in memory; every (outer, inner) is a row of `kept` values. With
// inner = 1 a row is contiguous (a line); otherwise neighbouring rows are interleaved, and `panel` of them are
// worked on together, so that every load is of neighbours.
#pragma once

#include <cstdint>

#include "isa.h"

namespace leannorm {

struct RowShape {
  int64_t outer, kept, inner;
  int64_t panel, panels;  // rows in a panel, panels to an outer index
};

// Rows that are worked on together, at most: what they have in common is loaded once, and the rest of their sums is
// computed for all at once.
constexpr int kLinesTogether = 8;

// A line for each row, `row` elements from one to the next, or with 0 one for all; p is null if there is none. Of the
// compute type, or if it is `narrow` of the tensors' own.
struct Lines {
  const void* p;
  int64_t row;
  bool narrow;
};

// y = xhat * (one + weight) + bias of x, or of total = x + gate * residual. Statistics are of the compute type; with
// panels one line is used for all rows. Lines: this many elements from one row to the next; a residual and its
// tensors follow each other. `ahead`: where what is read next is, unless it follows.
struct RowForward {
  RowShape shape;
  const void *x, *residual;
  Lines gate, weight, bias;
  void *y, *total, *mean, *rstd;
  double one, eps;
  bool rms, cast, stream;  // cast: round before the weight; stream: write past the caches
  int64_t x_row, y_row, statistics_row, x_ahead;
};

struct RowBackward {
  RowShape shape;
  const void *dy, *dtotal, *x, *mean, *rstd;
  Lines weight;
  void* dx;
  double one;
  bool rms, own, stream;  // own: the weight's gradient is a line for each row
  int64_t dy_row, dtotal_row, x_row, dx_row, statistics_row, x_ahead, dy_ahead;
};

// dresidual = gate * dtotal. With `own` the gate's gradient is a line for each row.
struct GateBackward {
  int64_t kept;
  const void *dtotal, *residual;
  Lines gate;
  void* dresidual;
  bool own;
};

struct RowKernels {
  using Forward = void (*)(const RowForward&, int64_t begin, int64_t end);
  // Adds the units' share to dweight and dbias, compute type, of length kept; null if not requested. With `own`
  // dweight is lines of all rows, of the weight's type and consecutive, which are written, and dbias is null.
  using Backward = void (*)(const RowBackward&, int64_t begin, int64_t end, void* dweight, void* dbias);
  // Adds dtotal * residual of the rows to dgate; with `own` writes it. Null if not requested.
  using Gate = void (*)(const GateBackward&, int64_t begin, int64_t end, void* dgate);
  // to = the sum of `count` vectors, `stride` elements apart, of columns begin..end.
  using Sum = void (*)(const void* from, int64_t count, int64_t stride, int64_t begin, int64_t end, void* to);

  // [lines, panels][ElementType]
  Forward forward[2][4];
  Backward backward[2][4];
  Gate gate_backward[4];
  Sum sum[2];  // float, double
  void (*settle)();  // at the end of a thread's share of what is streamed, before anybody else reads it
};

LEANNORM_DECLARE(RowKernels, row_kernels)

}  // namespace leannorm
