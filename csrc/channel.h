// The per-channel kernels of one instruction set: what the driver (channel.cpp) may call.
//
// Contiguous (N, C, *) is computed in planes: `count` runs of `length` elements per statistic, `stride` elements
// apart. Channels-last and (N, C) are computed in columns: `count` rows of `length` columns, `stride` elements apart,
// each column with its own statistic. Short planes are columns too: the planes of one sample together are a row.
#pragma once

#include <cstdint>

#include "activation.h"
#include "isa.h"

namespace leannorm {

// The first pass over a set prefetches what is `next` elements further, if that is not 0, and the second what is
// `ahead`: the next set if a set stays in the cache, otherwise the next plane. If the gradient's two passes go over a
// set that stays in the cache (`shared`), both prefetch the next set, so that memory is idle in neither. Planes:
// those of `statistics` statistics, each `length` elements after the one before. Columns: `each` neighbouring ones
// share a statistic.
struct Block { int64_t count, stride, length, ahead, next = 0, statistics = 1, each = 1; bool shared = false; };

// Values of each column, or of each statistic of the planes, in the compute type: float64 for float64 elements, else
// float32. The mean is in two parts, so that a large one loses no digits. z = (x - mean) * scale + bias; dx = scale *
// dz + (x - mean) * rstd * slope + shift, or scale * dz where the statistics are constants.
struct Coefficients {
  const void *mean, *mean_rest, *scale, *bias, *rstd, *slope, *shift;
  bool constant;
};

// The first element of each tensor; null if there is none.
struct Operands {
  const void *x, *residual, *dy, *out;
  void *result, *dz;
  bool past;  // the result is so large that it is written past the caches, where it is aligned
  // Activations other than relu: space for dz in the compute type, which the gradient's sums write and the input's
  // gradient reads. Planes: from the start of a cache line on, a vector for every one that is processed; columns,
  // float32 only: laid out as the result, which it may be.
  void* kept = nullptr;
};

// Operands and coefficients are passed by value: through a reference they would be read again after every store.
struct ChannelKernels {
  // Adds the sums of (x - shift) and of its square, of each statistic of the planes or of each column; `wide_moments`
  // does without float32, for any values and any shift.
  using Moments = void (*)(const void* x, Block, const double* shift, double* sums, double* squares);
  // result = act(z + residual)
  using Normalize = void (*)(Operands, Block, Coefficients, int act);
  // Adds the sums of dz and of dz * (x - mean), of each statistic of the planes or
  // each column.
  using GradSums = void (*)(Operands, Block, Coefficients, int act, double* sum_dz,
                            double* sum_dz_centred);
  // result = dx; also dz, if requested.
  using InputGrad = void (*)(Operands, Block, Coefficients, int act);

  // [planes, columns][ElementType]
  Moments moments[2][4], wide_moments[2][4];
  Normalize normalize[2][4];
  GradSums grad_sums[2][4];
  InputGrad input_grad[2][4];
};

LEANNORM_DECLARE(ChannelKernels, channel_kernels)

}  // namespace leannorm
