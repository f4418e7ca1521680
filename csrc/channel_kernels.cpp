// The table of per-channel kernels; compiled once for each instruction set.
#include "channel_columns.h"
#include "channel_planes.h"

namespace leannorm::LEANNORM_ISA {

#define BY_FORWARD_FORM(name)                                                              \
  template <class T> void name(Operands o, Block b, Coefficients c, int act) {             \
    if constexpr (kManyForms<T>) {                                                         \
      const Form form = forward_form(act);                                                 \
      if (form == kCommon) return name<T, kCommon>(o, b, c, act);                          \
      if (form == kQuick) return name<T, kQuick>(o, b, c, act);                            \
    }                                                                                      \
    name<T, kAny>(o, b, c, act);                                                           \
  }
#define BY_BACKWARD_FORM(name, parameters, ...)                                            \
  template <class T> void name parameters {                                                \
    if constexpr (kManyForms<T>) {                                                         \
      const Form form = backward_form(o, act);                                             \
      if (form == kPlain) return name<T, kPlain>(__VA_ARGS__);                             \
      if (form == kReluFromInput) return name<T, kReluFromInput>(__VA_ARGS__);             \
      if (form == kReluFromOutput) return name<T, kReluFromOutput>(__VA_ARGS__);           \
    }                                                                                      \
    name<T, kAny>(__VA_ARGS__);                                                            \
  }
#define SUMS_PARAMETERS (Operands o, Block b, Coefficients c, int act, double* s, double* t)
#define GRAD_PARAMETERS (Operands o, Block b, Coefficients c, int act)

BY_FORWARD_FORM(plane_normalize)
BY_FORWARD_FORM(column_normalize)
BY_BACKWARD_FORM(plane_grad_sums, SUMS_PARAMETERS, o, b, c, act, s, t)
BY_BACKWARD_FORM(column_grad_sums, SUMS_PARAMETERS, o, b, c, act, s, t)
BY_BACKWARD_FORM(plane_input_grad, GRAD_PARAMETERS, o, b, c, act)
BY_BACKWARD_FORM(column_input_grad, GRAD_PARAMETERS, o, b, c, act)

#define BY_TYPE(kernel) {kernel<float>, kernel<double>, kernel<bfloat16>, kernel<float16>}
#define BY_LAYOUT(verb) {BY_TYPE(plane_##verb), BY_TYPE(column_##verb)}

extern const ChannelKernels channel_kernels = {BY_LAYOUT(moments), BY_LAYOUT(wide_moments), BY_LAYOUT(normalize), BY_LAYOUT(grad_sums),
                                               BY_LAYOUT(input_grad)};

}  // namespace leannorm::LEANNORM_ISA
