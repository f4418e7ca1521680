// The `act` of an operator, by its name.
#pragma once

#include <cstring>
#include <memory>

#include "activation.h"
#include "tensors.h"

namespace leannorm {

// The activation with this name, which is freed: torch's own conversion to std::string leaks one in each call.
inline int activation_index(StringHandle name) {
#define LEANNORM_NAME(enumerator, name, from_output) name,
  static const char* const names[] = {LEANNORM_ACTIVATIONS(LEANNORM_NAME)};
#undef LEANNORM_NAME
  const std::unique_ptr<StringOpaque, decltype(&torch_delete_string)> freed(name, torch_delete_string);
  const char* text = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(name, &text));
  for (int i = 0; i < kActivations; ++i)
    if (std::strcmp(text, names[i]) == 0) return i;
  STD_TORCH_CHECK(false, "leannorm: unknown activation ", text);
}

// Whether the output determines the derivative.
inline bool from_output(int act) {
#define LEANNORM_FROM_OUTPUT(enumerator, name, from_output) from_output,
  static const bool told[] = {LEANNORM_ACTIVATIONS(LEANNORM_FROM_OUTPUT)};
#undef LEANNORM_FROM_OUTPUT
  return told[act];
}

}  // namespace leannorm
