// The per-channel kernels of one instruction set: what the driver (channel.cpp) may call.
//
// Contiguous (N, C, *) is worked on in planes: `count` runs of `length` elements to a statistic, `stride` elements
// apart. Channels-last and (N, C) are worked on in columns: `count` rows of
// `length` columns, `stride` elements apart, each column with its own statistic. Short planes are columns too:
// the planes of one sample side by side are a row.
#pragma once

#include <cstdint>

#include "activation.h"
#include "isa.h"

namespace leannorm {

// The first pass over a set fetches what lies `next` elements further, if that is not 0, and the second what lies
// `ahead`: of a set that stays in the cache the next set, else the next plane. Where the gradient's two passes go over
// a set that stays in the cache (`shared`), both fetch of the next set: memory is idle in neither.
// Planes: those of so many `statistics`, one statistic's `length` elements after the other's. Columns: so many
// neighbouring ones as `each` says share a statistic.
struct Block { int64_t count, stride, length, ahead, next = 0, statistics = 1, each = 1; bool shared = false; };

// Values of each column, or of each statistic of the planes, in the
// compute type: float64 for float64 elements, else float32. The mean is in two parts, so that a large one
// loses nothing. z = (x - mean) * scale + bias; dx = scale * dz + (x - mean) * rstd * slope + shift, or
// scale * dz where the statistics are constants.
struct Coefficients {
  const void *mean, *mean_rest, *scale, *bias, *rstd, *slope, *shift;
  bool constant;
};

// The first element of each tensor; null where there is none.
struct Operands {
  const void *x, *residual, *dy, *out;
  void *result, *dz;
  bool past;  // the result is so large that it is written past the caches, where it is aligned
  // Activations other than relu: room for dz in the compute type. The gradient's sums leave it there, and the input's
  // gradient takes it up. Planes: from a line's start on, a vector for every one that is taken; columns, float32 alone:
  // as the result, which it may be.
  void* kept = nullptr;
};

// Operands and coefficients are given by value: behind a reference they would be read again after every store.
struct ChannelKernels {
  // Adds the sums of (x - shift) and of its square, of each statistic of the planes or of each column;
  // `wide_moments` does without float32, whatever the values and the shift.
  using Moments = void (*)(const void* x, Block, const double* shift, double* sums, double* squares);
  // result = act(z + residual)
  using Normalize = void (*)(Operands, Block, Coefficients, int act);
  // Adds the sums of dz and of dz * (x - mean), of each statistic of the planes or
  // each column.
  using GradSums = void (*)(Operands, Block, Coefficients, int act, double* sum_dz,
                            double* sum_dz_centred);
  // result = dx; dz where it is asked for.
  using InputGrad = void (*)(Operands, Block, Coefficients, int act);

  // [planes, columns][ElementType]
  Moments moments[2][4], wide_moments[2][4];
  Normalize normalize[2][4];
  GradSums grad_sums[2][4];
  InputGrad input_grad[2][4];
};

LEANNORM_DECLARE(ChannelKernels, channel_kernels)

}  // namespace leannorm
