// Statistics and parameters as the coefficients of the kernels.
#pragma once

#include <vector>

#include "channel_plan.h"

namespace leannorm {

// How statistics and parameters become one coefficient for every channel of every sample (or of the
// batch), spread over the slots of a cut.
class ChannelCoefficients {
 public:
  ChannelCoefficients(const Shape& s, const Cut& cut, int64_t groups, const Optional& weight, const Optional& bias)
      : s_(s), cut_(cut), groups_(groups), weight_(values(weight)), bias_(values(bias)),
        size_((groups == 0 ? 1 : s.n) * s.c * cut.fold), values_(6 * size_) {
    STD_TORCH_CHECK(weight_.empty() || int64_t(weight_.size()) == s.c, "leannorm: weight must have one value a channel");
    STD_TORCH_CHECK(bias_.empty() || int64_t(bias_.size()) == s.c, "leannorm: bias must have one value a channel");
  }

  double weight(int64_t c) const { return weight_.empty() ? 1.0 : weight_[c]; }
  int64_t statistic(int64_t set, int64_t c) const {
    return groups_ == 0 ? c : cut_.columns ? set * groups_ + c / (s_.c / groups_) : set;
  }
  // The channels of a set and, in the numbering of all samples, the first of them.
  int64_t channels() const { return cut_.columns ? s_.c : cut_.step == 0 ? 1 : cut_.planes; }
  int64_t first(int64_t set) const { return set * channels(); }

  void set_forward(int64_t set, const double* mean, const double* rstd) {
    each(set, [&](int64_t at, int64_t c) {
      const int64_t i = statistic(set, c);
      values_[at] = mean[i];
      values_[size_ + at] = rstd[i] * weight(c);
      values_[2 * size_ + at] = bias_.empty() ? 0.0 : bias_[c];
    });
  }
  // Without these the statistics are constants.
  void set_backward(int64_t set, const double* rstd, const double* p, const double* q) {
    constant_ = false;
    each(set, [&](int64_t at, int64_t c) {
      const int64_t i = statistic(set, c);
      values_[3 * size_ + at] = rstd[i];
      values_[4 * size_ + at] = -rstd[i] * q[i];
      values_[5 * size_ + at] = -rstd[i] * p[i];
    });
  }
  Coefficients at(int64_t index) const {
    const double* v = values_.data() + index;
    return {v, v + size_, v + 2 * size_, v + 3 * size_, constant_ ? nullptr : v + 4 * size_, v + 5 * size_, cut_.step};
  }

 private:
  template <class Visit> void each(int64_t set, Visit visit) {
    const int64_t n = channels();
    for (int64_t f = 0; f < cut_.fold; ++f)
      for (int64_t j = 0; j < n; ++j) visit((set * cut_.fold + f) * n + j, (set * n + j) % s_.c);
  }

  const Shape s_;
  const Cut cut_;
  const int64_t groups_;
  const std::vector<double> weight_, bias_;
  const int64_t size_;
  bool constant_ = true;
  std::vector<double> values_;
};

}  // namespace leannorm
