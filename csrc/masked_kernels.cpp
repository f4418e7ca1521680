// The table of per-channel kernels with a mask; compiled once for each instruction set.
#include "masked.h"

#include "masked_planes.h"

namespace leannorm::LEANNORM_ISA {

#define BY_FORM(name, parameters, ...)                                          \
  template <class T> void name parameters {                                     \
    if constexpr (kManyForms<T>)                                                \
      if (act == kIdentity || act == kRelu) return name<T, kCommon>(__VA_ARGS__); \
    name<T, kAny>(__VA_ARGS__);                                                 \
  }
BY_FORM(masked_normalize, (Operands o, Block b, Valid v, Coefficients c, int act), o, b, v, c, act)
BY_FORM(masked_grad_sums, (Operands o, Block b, Valid v, Coefficients c, int act, double* s, double* t), o, b, v, c, act, s, t)
BY_FORM(masked_input_grad, (Operands o, Block b, Valid v, Coefficients c, int act), o, b, v, c, act)

#define BY_TYPE(kernel) {kernel<float>, kernel<double>, kernel<bfloat16>, kernel<float16>}

extern const MaskedKernels masked_kernels = {BY_TYPE(masked_moments), BY_TYPE(masked_wide_moments), BY_TYPE(masked_normalize),
                                             BY_TYPE(masked_grad_sums), BY_TYPE(masked_input_grad)};

}  // namespace leannorm::LEANNORM_ISA
