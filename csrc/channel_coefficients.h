// Statistics and parameters as the coefficients of the kernels.
#pragma once

#include <memory>

#include "channel_plan.h"

namespace leannorm {

// The coefficients of one set: how its statistics and the parameters of its channels become one value for
// every channel, or for every slot of folded columns. Each thread makes those that it works with.
class SetCoefficients {
 public:
  SetCoefficients(ElementType type, const Cut& cut, int64_t channels, const Values& weight, const Values& bias)
      : double_(type == kDouble), cut_(cut), channels_(std::max<int64_t>(1, channels)), weight_(weight), bias_(bias),
        size_(cut.channels() * cut.fold), values_(new float[7 * size_ * (double_ ? 2 : 1)]) {}

  double weight(int64_t channel) const { return weight_.given() ? weight_[channel] : 1.0; }
  // The parameters of a set's channel j.
  int64_t channel(int64_t set, int64_t j) const { return cut_.first_channel(set) % channels_ + j; }

  // mean and rstd: of all statistics.
  void set_forward(int64_t set, const Values& mean, const Values& rstd) {
    each(set, [&](int64_t at, int64_t i, int64_t c) {
      put(0, at, mean[i]);
      put(1, at, double_ ? 0.0 : mean[i] - float(mean[i]));
      put(2, at, rstd[i] * weight(c));
      put(3, at, bias_.given() ? bias_[c] : 0.0);
    });
  }
  // Without these the statistics are constants. p and q: of the statistics from `first` on.
  void set_backward(int64_t set, const Values& rstd, const Values& p, const Values& q, int64_t first) {
    constant_ = false;
    each(set, [&](int64_t at, int64_t i, int64_t) {
      put(4, at, rstd[i]);
      put(5, at, -rstd[i] * q[i - first]);
      put(6, at, -rstd[i] * p[i - first]);
    });
  }
  // From a chunk's first channel on.
  Coefficients at(int64_t index) const {
    const auto row = [&](int64_t k) -> const void* { return values_.get() + (k * size_ + index) * (double_ ? 2 : 1); };
    return {row(0), row(1), row(2), row(3), row(4), row(5), row(6), constant_};
  }

 private:
  void put(int64_t row, int64_t at, double value) {
    for (int64_t f = 0; f < cut_.fold; ++f) {
      const int64_t i = row * size_ + f * cut_.channels() + at;
      if (double_) std::memcpy(values_.get() + 2 * i, &value, sizeof value);
      else values_[i] = float(value);
    }
  }

  template <class Visit> void each(int64_t set, Visit visit) {
    const int64_t n = cut_.channels(), c = channel(set, 0);
    int64_t statistic = cut_.first_statistic(set), left = cut_.per_statistic;
    for (int64_t j = 0; j < n; ++j) {
      visit(j, statistic, c + j);
      if (--left == 0) ++statistic, left = cut_.per_statistic;
    }
  }

  const bool double_;
  const Cut cut_;
  const int64_t channels_;
  const Values weight_, bias_;
  const int64_t size_;
  bool constant_ = true;
  std::unique_ptr<float[]> values_;  // or float64, two places each; written before they are read
};

}  // namespace leannorm
