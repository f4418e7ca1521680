// The table of the gated norm's kernels; compiled once for each instruction set.
#include "gated_lines.h"

namespace leannorm::LEANNORM_ISA {

#define EACH_TYPE(kernel) \
  {gated::kernel<float>, gated::kernel<double>, gated::kernel<bfloat16>, gated::kernel<float16>}

extern const GatedKernels gated_kernels = {EACH_TYPE(forward), EACH_TYPE(backward)};

}  // namespace leannorm::LEANNORM_ISA
