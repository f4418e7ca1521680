// The table of per-channel kernels with a mask; compiled once for each instruction set.
#include "masked.h"

#include "masked_planes.h"

namespace leannorm::LEANNORM_ISA {

#define BY_TYPE(kernel) {kernel<float>, kernel<double>, kernel<bfloat16>, kernel<float16>}

extern const MaskedKernels masked_kernels = {BY_TYPE(masked_moments), BY_TYPE(masked_wide_moments), BY_TYPE(masked_normalize),
                                             BY_TYPE(masked_grad_sums), BY_TYPE(masked_input_grad)};

}  // namespace leannorm::LEANNORM_ISA
