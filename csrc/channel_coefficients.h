// Statistics and parameters as the coefficients of the kernels.
#pragma once

#include <vector>

#include "channel_plan.h"

namespace leannorm {

// How statistics and parameters become one coefficient for every channel of every sample (or of the
// batch), spread over the slots of a cut.
class ChannelCoefficients {
 public:
  ChannelCoefficients(ElementType type, const Shape& s, const Cut& cut, int64_t groups, const Optional& weight, const Optional& bias)
      : double_(type == kDouble), s_(s), cut_(cut), groups_(groups), weight_(values(weight)), bias_(values(bias)),
        size_((groups == 0 ? 1 : s.n) * s.c * cut.fold), values_(7 * size_ * (double_ ? 2 : 1)) {
    STD_TORCH_CHECK(weight_.empty() || int64_t(weight_.size()) == s.c, "leannorm: weight must have one value a channel");
    STD_TORCH_CHECK(bias_.empty() || int64_t(bias_.size()) == s.c, "leannorm: bias must have one value a channel");
  }

  double weight(int64_t c) const { return weight_.empty() ? 1.0 : weight_[c]; }
  int64_t statistic(int64_t set, int64_t c) const {
    return groups_ == 0 ? c : cut_.columns ? set * groups_ + c / (s_.c / groups_) : set;
  }
  // The first channel of a set, in the numbering of all samples.
  int64_t first(int64_t set) const { return set * cut_.channels(); }

  void set_forward(int64_t set, const double* mean, const double* rstd) {
    each(set, [&](int64_t at, int64_t c) {
      const int64_t i = statistic(set, c);
      put(0, at, mean[i]);
      put(1, at, double_ ? 0.0 : mean[i] - float(mean[i]));
      put(2, at, rstd[i] * weight(c));
      put(3, at, bias_.empty() ? 0.0 : bias_[c]);
    });
  }
  // Without these the statistics are constants.
  void set_backward(int64_t set, const double* rstd, const double* p, const double* q) {
    constant_ = false;
    each(set, [&](int64_t at, int64_t c) {
      const int64_t i = statistic(set, c);
      put(4, at, rstd[i]);
      put(5, at, -rstd[i] * q[i]);
      put(6, at, -rstd[i] * p[i]);
    });
  }
  Coefficients at(int64_t index) const {
    const auto row = [&](int64_t k) -> const void* { return values_.data() + (k * size_ + index) * (double_ ? 2 : 1); };
    return {row(0), row(1), row(2), row(3), row(4), row(5), row(6), cut_.step, constant_};
  }

 private:
  void put(int64_t row, int64_t at, double value) {
    const int64_t i = row * size_ + at;
    if (double_) std::memcpy(values_.data() + 2 * i, &value, sizeof value);
    else values_[i] = float(value);
  }

  template <class Visit> void each(int64_t set, Visit visit) {
    const int64_t n = cut_.channels(), first = this->first(set);
    for (int64_t f = 0; f < cut_.fold; ++f)
      for (int64_t j = 0; j < n; ++j) visit(first * cut_.fold + f * n + j, (first + j) % s_.c);
  }

  const bool double_;
  const Shape s_;
  const Cut cut_;
  const int64_t groups_;
  const std::vector<double> weight_, bias_;
  const int64_t size_;
  bool constant_ = true;
  std::vector<float> values_;  // or float64, two places each
};

}  // namespace leannorm
