// The table of per-channel kernels with a mask; compiled once for each instruction set.
#include "masked.h"

#include "masked_planes.h"

namespace leannorm::LEANNORM_ISA {

template <class T> void normalize(Operands o, Block b, Valid v, Coefficients c, int act) {
  switch (forward_form(act)) {
    case kPlain: return masked_normalize<T, kPlain>(o, b, v, c, act);
    case kReluFromInput: return masked_normalize<T, kReluFromInput>(o, b, v, c, act);
    default: return masked_normalize<T, kAny>(o, b, v, c, act);
  }
}
template <class T> void grad_sums(Operands o, Block b, Valid v, Coefficients c, int act, double* s, double* t) {
  switch (backward_form(o, act)) {
    case kPlain: return masked_grad_sums<T, kPlain>(o, b, v, c, act, s, t);
    case kReluFromInput: return masked_grad_sums<T, kReluFromInput>(o, b, v, c, act, s, t);
    default: return masked_grad_sums<T, kAny>(o, b, v, c, act, s, t);
  }
}
template <class T> void input_grad(Operands o, Block b, Valid v, Coefficients c, int act) {
  switch (backward_form(o, act)) {
    case kPlain: return masked_input_grad<T, kPlain>(o, b, v, c, act);
    case kReluFromInput: return masked_input_grad<T, kReluFromInput>(o, b, v, c, act);
    default: return masked_input_grad<T, kAny>(o, b, v, c, act);
  }
}

#define BY_TYPE(kernel) {kernel<float>, kernel<double>, kernel<bfloat16>, kernel<float16>}

extern const MaskedKernels masked_kernels = {BY_TYPE(masked_moments), BY_TYPE(masked_wide_moments), BY_TYPE(normalize),
                                             BY_TYPE(grad_sums), BY_TYPE(input_grad)};

}  // namespace leannorm::LEANNORM_ISA
