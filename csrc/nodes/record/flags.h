// The global flags that change the bits of kernels.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/headeronly/version.h>

#include <cstdint>

namespace leannorm::recording {

// All of them in one number. saving/flags.py reads and sets them.
inline uint64_t flags_now() {
  const auto& context = at::globalContext();
  uint64_t bits = at::get_num_threads();
  for (const bool flag : {context.deterministicAlgorithms(), context.deterministicAlgorithmsWarnOnly(), context.userEnabledMkldnn(),
                          context.deterministicMkldnn(), context.userEnabledNNPACK(), context.benchmarkCuDNN(), context.allowFP16ReductionCPU()})
    bits = bits * 2 + flag;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV})
    bits = bits * 16 + static_cast<uint64_t>(at::globalContext().float32Precision(at::Float32Backend::MKLDNN, op));
#endif
  for (const bool flag : {context.userEnabledCuDNN(), context.deterministicCuDNN()}) bits = bits * 2 + flag;
  if (context.hasCUDA()) {
    bits = bits * 16 + static_cast<uint64_t>(context.allowFP16ReductionCuBLAS()) * 4 + static_cast<uint64_t>(context.allowBF16ReductionCuBLAS());
    bits = bits * 2 + context.allowFP16AccumulationCuBLAS();
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
    for (const auto op : {at::Float32Op::MATMUL, at::Float32Op::CONV})
      bits = bits * 16 + static_cast<uint64_t>(context.float32Precision(at::Float32Backend::CUDA, op));
#else
    bits = bits * 4 + context.allowTF32CuBLAS() * 2 + context.allowTF32CuDNN();
#endif
  }
  volatile double tiny = 4.9406564584124654e-324;  // 0 where this thread flushes denormal numbers
  return bits * 2 + (tiny == 0.0);
}

}  // namespace leannorm::recording
