// The activations: one row each, in the order of the table in ops/activation.py, which defines them.
#pragma once

namespace leannorm {

// X(enumerator, name, whether the output determines the derivative)
#define LEANNORM_ACTIVATIONS(X)      \
  X(kIdentity, "identity", true)     \
  X(kRelu, "relu", true)             \
  X(kLeakyRelu, "leaky_relu", true)  \
  X(kSilu, "silu", false)            \
  X(kGelu, "gelu", false)            \
  X(kGeluTanh, "gelu_tanh", false)   \
  X(kHardswish, "hardswish", false)  \
  X(kHardtanh, "hardtanh", true)     \
  X(kRelu6, "relu6", true)           \
  X(kElu, "elu", true)               \
  X(kMish, "mish", false)

#define LEANNORM_ENUMERATOR(enumerator, name, from_output) enumerator,
enum Activation { LEANNORM_ACTIVATIONS(LEANNORM_ENUMERATOR) kActivations };
#undef LEANNORM_ENUMERATOR

}  // namespace leannorm
