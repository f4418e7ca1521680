// Which instruction set the kernels run on. `*_kernels.cpp` is compiled once for each of them into the
// namespace that LEANNORM_ISA names, so that nothing compiled for one leaks into another.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace leannorm {

enum class Isa { base, v3, v4 };

inline Isa detect_isa() {
#if defined(__x86_64__)
  // LEANNORM_ISA in the environment lowers the choice, so that one machine can test all of them.
  const char* most = std::getenv("LEANNORM_ISA");
  const bool base_only = most != nullptr && std::strcmp(most, "base") == 0;
  const bool v3_at_most = most != nullptr && std::strcmp(most, "v3") == 0;
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                  __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512vl");
  if (v4 && !v3_at_most && !base_only) return Isa::v4;
  if (v3 && !base_only) return Isa::v3;
#endif
  return Isa::base;
}

inline Isa isa() {
  static const Isa detected = detect_isa();
  return detected;
}

// `LEANNORM_DECLARE(Table, name)` declares one table of kernels per instruction set;
// `LEANNORM_PICK(name)` is the one for this machine.
#if defined(__x86_64__)
#define LEANNORM_DECLARE(Table, name)            \
  namespace base { extern const Table name; }    \
  namespace v3 { extern const Table name; }      \
  namespace v4 { extern const Table name; }
#define LEANNORM_PICK(name) \
  (isa() == Isa::v4 ? v4::name : isa() == Isa::v3 ? v3::name : base::name)
#else
#define LEANNORM_DECLARE(Table, name) namespace base { extern const Table name; }
#define LEANNORM_PICK(name) (base::name)
#endif

}  // namespace leannorm
