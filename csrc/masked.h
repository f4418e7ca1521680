// The per-channel kernels for a mask, under which some positions are not data. Of a plane the end, or more, is not read.
// Columns need no kernels of their own, as those of channel.h go over runs of valid rows.
#pragma once

#include "channel.h"

namespace leannorm {

#define LEANNORM_ALWAYS inline __attribute__((always_inline))  // otherwise the linker keeps one copy for all machines

// For the planes of a block, from its first one on: positions from `ends` on (of every sample, in positions of a
// whole plane) are not data, nor are those before where `mask` is 0; null if it is 1 everywhere. The block begins at
// position `at` of its planes.
struct Valid {
  const int64_t* ends;
  const uint8_t* mask;
  int64_t positions;   // of a sample
  int64_t at;
  bool of_one_sample;  // all planes are, with their own coefficients and sums; otherwise each is of the next sample

  LEANNORM_ALWAYS int64_t end(int64_t plane, int64_t length) const {
    const int64_t end = ends[of_one_sample ? 0 : plane] - at;
    return end < 0 ? 0 : end < length ? end : length;
  }
  LEANNORM_ALWAYS int64_t first(int64_t plane) const { return (of_one_sample ? 0 : plane * positions) + at; }
  LEANNORM_ALWAYS int64_t statistic(int64_t plane) const { return of_one_sample ? plane : 0; }
};

// As `ChannelKernels`; results are 0 at positions that are not data.
struct MaskedKernels {
  using Moments = void (*)(const void* x, Block, Valid, double shift, double* sum, double* square);
  using Normalize = void (*)(Operands, Block, Valid, Coefficients, int act);
  using GradSums = void (*)(Operands, Block, Valid, Coefficients, int act, double* sum_dz, double* sum_dz_centred);
  using InputGrad = void (*)(Operands, Block, Valid, Coefficients, int act);

  // [ElementType]
  Moments moments[4], wide_moments[4];
  Normalize normalize[4];
  GradSums grad_sums[4];
  InputGrad input_grad[4];
};

LEANNORM_DECLARE(MaskedKernels, masked_kernels)

}  // namespace leannorm
