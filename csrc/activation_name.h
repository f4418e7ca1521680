// The `act` of an operator, by its name.
#pragma once

#include <cstring>
#include <memory>

#include "channel.h"
#include "tensors.h"

namespace leannorm {

// The activation of this name, which is freed: torch's own conversion, to std::string, forgets one in each call.
inline int activation_index(StringHandle name) {
  static const char* const names[] = {"identity", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh",
                                      "hardswish", "hardtanh", "relu6", "elu", "mish"};
  const std::unique_ptr<StringOpaque, decltype(&torch_delete_string)> freed(name, torch_delete_string);
  const char* text = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_string_c_str(name, &text));
  for (int i = 0; i < 11; ++i)
    if (std::strcmp(text, names[i]) == 0) return i;
  STD_TORCH_CHECK(false, "leannorm: unknown activation ", text);
}
// Does the output tell the derivative?
inline bool from_output(int act) {
  return act == kRelu || act == kLeakyRelu || act == kHardtanh || act == kRelu6 || act == kElu;
}

}  // namespace leannorm
