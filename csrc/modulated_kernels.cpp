// The table of the kernels with a gate; compiled once for each instruction set.
#include "gated_lines.h"
#include "modulated_lines.h"

namespace leannorm::LEANNORM_ISA {

#define EACH_TYPE(kernel) \
  {modulated::kernel<float>, modulated::kernel<double>, modulated::kernel<bfloat16>, modulated::kernel<float16>}

extern const ModulatedKernels modulated_kernels = {
    EACH_TYPE(gate_backward), EACH_TYPE(gated_forward), EACH_TYPE(gated_backward),
};

}  // namespace leannorm::LEANNORM_ISA
