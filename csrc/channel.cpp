// The per-channel operators: what `channel_*` of ops/backends/reference.py computes, over dense tensors.
#include "channel_sums.h"

namespace leannorm {
namespace {

const ChannelKernels& kernels() { return LEANNORM_PICK(channel_kernels); }

int activation_index(const std::string& name) {
  static const char* const names[] = {"identity", "relu", "leaky_relu", "silu", "gelu", "gelu_tanh",
                                      "hardswish", "hardtanh", "relu6", "elu", "mish"};
  for (int i = 0; i < 11; ++i)
    if (name == names[i]) return i;
  STD_TORCH_CHECK(false, "leannorm: unknown activation ", name);
}
// Does the output tell the derivative?
bool from_output(int act) { return act == 1 || act == 2 || act == 7 || act == 8 || act == 9; }

std::vector<int64_t> statistics_sizes(const Shape& s, int64_t groups) {
  return groups == 0 ? std::vector<int64_t>{s.c} : std::vector<int64_t>{s.n, groups};
}
int64_t groups_of(const Tensor& statistics) { return statistics.dim() == 1 ? 0 : statistics.size(1); }
Tensor new_doubles(const Tensor& x, const std::vector<int64_t>& sizes) {
  return new_tensor(x, sizes, ScalarType::Double);
}
double* doubles(const Tensor& v) { return static_cast<double*>(v.mutable_data_ptr()); }

void check(const Shape& s, const Tensor& x, const Tensor& other, const char* name) {
  STD_TORCH_CHECK(other.scalar_type() == x.scalar_type() && other.numel() == x.numel() && s.same(other),
                  "leannorm: ", name, " must have the dtype, shape and layout of x");
}
void check(const Shape& s, const Tensor& x, const Optional& other, const char* name) {
  if (other.has_value()) check(s, x, *other, name);
}

// How statistics and parameters become one coefficient for every channel of every sample (or of the
// batch), spread over the slots of a cut.
class Coefs {
 public:
  Coefs(const Shape& s, const Cut& cut, int64_t groups, const Optional& weight, const Optional& bias, bool backward)
      : s_(s), cut_(cut), groups_(groups), weight_(values(weight)), bias_(values(bias)),
        size_((groups == 0 ? 1 : s.n) * s.c * cut.fold), values_((backward ? 6 : 3) * size_) {
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
  void set_backward(int64_t set, const double* rstd, const double* p, const double* q) {
    each(set, [&](int64_t at, int64_t c) {
      const int64_t i = statistic(set, c);
      values_[3 * size_ + at] = rstd[i];
      values_[4 * size_ + at] = -rstd[i] * q[i];
      values_[5 * size_ + at] = -rstd[i] * p[i];
    });
  }
  Coefficients at(int64_t index, bool constant = false) const {
    const double* v = values_.data() + index;
    const bool backward = int64_t(values_.size()) > 3 * size_;
    if (!backward || constant) return {v, v + size_, v + 2 * size_, nullptr, nullptr, nullptr, cut_.step};
    return {v, v + size_, v + 2 * size_, v + 3 * size_, v + 4 * size_, v + 5 * size_, cut_.step};
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
  std::vector<double> values_;
};

struct Tensors {
  const char *x, *residual, *dy, *out;
  char *result, *dz;
  int64_t bytes;

  Operands at(int64_t offset) const {
    const int64_t d = offset * bytes;
    const auto move = [d](auto p) { return p == nullptr ? p : p + d; };
    return {move(x), move(residual), move(dy), move(out), move(result), move(dz)};
  }
};

// Walks the moments of a set into mean, m2 and rstd.
void merge_moments(MomentPartials& partials, const Shape& s, const Cut& cut, int64_t groups, int64_t set,
                   double eps, double* mean, double* m2, double* rstd) {
  const int64_t per_set = !cut.columns ? 1 : groups == 0 ? s.c : groups, base = set * per_set;
  const int64_t per_group = groups == 0 ? 1 : s.c / groups;
  std::vector<int64_t> counts(per_set);
  for (int64_t i = 0; i < per_set; ++i) mean[base + i] = m2[base + i] = 0;
  partials.merge(set, [&](int64_t slot, int64_t count, double slot_mean, double slot_m2) {
    const int64_t i = cut.columns ? slot % s.c / per_group : 0;
    const double total = double(counts[i] + count), difference = slot_mean - mean[base + i];
    mean[base + i] += difference * (count / total);
    m2[base + i] += slot_m2 + difference * difference * (double(counts[i]) * (count / total));
    counts[i] += count;
  });
  if (rstd == nullptr) return;
  for (int64_t i = 0; i < per_set; ++i)
    rstd[base + i] = 1 / std::sqrt(m2[base + i] / std::max<int64_t>(counts[i], 1) + eps);
}

void nothing(int64_t, int64_t) {}

std::tuple<Tensor, Tensor> channel_moments(const Tensor& x, int64_t groups) {
  const Shape s(x);
  const Cut cut = moments_cut(s, groups);
  const Tensor mean = new_doubles(x, statistics_sizes(s, groups)), m2 = new_doubles(x, statistics_sizes(s, groups));
  MomentPartials partials(cut, x);
  in_two_passes(
      cut, cut, [&](int64_t set, int64_t i) { partials.add(kernels(), set, i); },
      [&](int64_t set) { merge_moments(partials, s, cut, groups, set, 0, doubles(mean), doubles(m2), nullptr); }, nothing);
  return {mean, m2};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, m) {
  m.impl("channel_moments", TORCH_BOX(&channel_moments));
}

}  // namespace leannorm
