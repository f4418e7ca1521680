// What an operator of another file does to running statistics.
#pragma once

#include "tensors.h"

namespace leannorm {

// Updates running statistics (and a number of batches) with those of a batch, all of them or, if one would not be
// finite, none; checks all arguments before it writes.
void move_running_(const Tensor& running_mean, const Tensor& running_var, const Optional& num_batches,
                   std::optional<double> momentum, const Tensor& mean, const Tensor& m2, int64_t count,
                   const Optional& total_count);

}  // namespace leannorm
