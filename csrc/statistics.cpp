// What happens to per-channel statistics between two kernels: the update of the running ones, reading those, sums
// that ranks add up, and moments from such sums. The formulas of ops/running.py and ops/sums.py, as one call each.
#include <cmath>
#include <type_traits>

#include "statistics.h"

namespace leannorm {
namespace {

constexpr double kSplit = (int64_t(1) << 41) + 1;  // Veltkamp's constant: 53 - 41 = 12 bits stay

double leading_bits(double v) {
  const volatile double shifted = v * kSplit;  // rounded: no compiler may contract it into the difference
  const double lead = shifted - (shifted - v);
  return std::isfinite(lead) ? lead : v;
}
// The rest to add to its leading bits; 0 if those are not a finite number.
double behind(double lead, double rest) { return std::isfinite(lead) ? rest : 0.0; }

const double* doubles(const Tensor& v) {
  STD_TORCH_CHECK(v.scalar_type() == ScalarType::Double && v.is_contiguous(),
                  "leannorm: statistics must be float64 and contiguous");
  return static_cast<const double*>(v.const_data_ptr());
}
Tensor new_doubles(const Tensor& like, int64_t n) { return new_tensor(like, {n}, ScalarType::Double); }
double* mutable_doubles(const Tensor& v) { return static_cast<double*>(v.mutable_data_ptr()); }

// As torch.lerp, with the same roundings.
template <class T> T moved(T from, T to, T weight) {
  return std::abs(weight) < T(0.5) ? std::fma(weight, to - from, from) : std::fma(weight - 1, to - from, to);
}

template <class Use> void with_type(ElementType type, Use use) {
  switch (type) {
    case kFloat: return use(float());
    case kDouble: return use(double());
    case kBFloat16: return use(c10::BFloat16());
    default: return use(c10::Half());
  }
}

// The new value of a running statistic, rounded as it is stored; false if a value of the batch is not finite, or the
// statistic would no longer be.
template <class Value> bool advance(const Tensor& running, double weight, Value value, double* next) {
  bool finite = true;
  with_type(element_type(running), [&](auto like) {
    using Stored = decltype(like);
    using Computed = std::conditional_t<std::is_same_v<Stored, double>, double, float>;
    const auto* const p = static_cast<const Stored*>(running.const_data_ptr());
    const int64_t stride = running.stride(0), n = running.numel();
    for (int64_t i = 0; i < n; ++i) {
      const double to = value(i);
      const Computed from = p[i * stride];
      const Computed end = Computed(Stored(moved(from, Computed(to), Computed(weight))));
      next[i] = end;
      finite &= bool(std::isfinite(to) & (std::isfinite(end) | !std::isfinite(from)));
    }
  });
  return finite;
}
void store(const Tensor& running, const double* next) {
  with_type(element_type(running), [&](auto like) {
    using Stored = decltype(like);
    auto* const p = static_cast<Stored*>(running.mutable_data_ptr());
    const int64_t stride = running.stride(0), n = running.numel();
    for (int64_t i = 0; i < n; ++i) p[i * stride] = Stored(next[i]);
  });
}

// One axis, in memory of its own.
void check_written(const Tensor& running) {
  STD_TORCH_CHECK(running.dim() == 1 && (running.numel() < 2 || running.stride(0) != 0),
                  "leannorm: running statistics must have one axis, which is not expanded");
}

}  // namespace

void move_running_(const Tensor& running_mean, const Tensor& running_var, const Optional& num_batches,
                   std::optional<double> momentum, const Tensor& mean, const Tensor& m2, int64_t count,
                   const Optional& total_count) {
  const double *means = doubles(mean), *m2s = doubles(m2);
  const int64_t n = mean.numel();
  STD_TORCH_CHECK(m2.numel() == n && running_mean.numel() == n && running_var.numel() == n,
                  "leannorm: statistics must have one value a channel");
  check_written(running_mean);
  check_written(running_var);
  int64_t* batches = nullptr;
  if (num_batches.has_value()) {
    STD_TORCH_CHECK(num_batches->scalar_type() == ScalarType::Long && num_batches->numel() == 1,
                    "leannorm: num_batches must be one int64");
    batches = static_cast<int64_t*>(num_batches->mutable_data_ptr());
  }
  const double values = total_count.has_value() ? *doubles(*total_count) : double(count);
  if (values == 0) return;  // an empty batch: an average over the batches does not count it either
  const double weight = momentum.has_value() ? *momentum : batches == nullptr ? 0.0 : 1.0 / double(*batches + 1);
  const double degrees = std::max(values - 1, 1.0);
  std::vector<double> next(2 * n);
  if (!advance(running_mean, weight, [&](int64_t i) { return means[i]; }, next.data()) ||
      !advance(running_var, weight, [&](int64_t i) { return m2s[i] / degrees; }, next.data() + n)) {
    return;
  }
  store(running_mean, next.data());
  store(running_var, next.data() + n);
  if (batches != nullptr) ++*batches;
}

namespace {

// Mean and rstd of evaluation, as float64, from running statistics of any dtype.
std::tuple<Tensor, Tensor> constants_of(const Tensor& running_mean, const Tensor& running_var, double eps) {
  STD_TORCH_CHECK(running_mean.dim() == 1 && running_var.dim() == 1, "leannorm: running statistics must have one axis");
  const int64_t n = running_mean.numel(), mean_stride = running_mean.stride(0), var_stride = running_var.stride(0);
  STD_TORCH_CHECK(running_var.numel() == n, "leannorm: statistics must have one value a channel");
  const Tensor mean = new_doubles(running_mean, n), rstd = new_doubles(running_mean, n);
  const ElementType mean_type = element_type(running_mean), var_type = element_type(running_var);
  const void *const means = running_mean.const_data_ptr(), *const vars = running_var.const_data_ptr();
  double *const out = mutable_doubles(mean), *const rstds = mutable_doubles(rstd);
  for (int64_t i = 0; i < n; ++i) {
    out[i] = value_at(mean_type, means, i * mean_stride);
    rstds[i] = 1 / std::sqrt(value_at(var_type, vars, i * var_stride) + eps);
  }
  return {mean, rstd};
}

// (4 C,): the sums of `sums_of`.
Tensor sums_of(const Tensor& mean, const Tensor& m2, int64_t count) {
  const double *means = doubles(mean), *m2s = doubles(m2), n = double(count);
  const int64_t c = mean.numel();
  const Tensor sums = new_doubles(mean, 4 * c);
  double* const out = mutable_doubles(sums);
  for (int64_t i = 0; i < c; ++i) {
    const double lead = leading_bits(means[i]), rest = behind(lead, means[i] - lead);
    const double n_lead = n * lead, n_rest = n * rest;
    out[i] = n_lead;
    out[c + i] = n_rest;
    out[2 * c + i] = n_lead * lead;
    out[3 * c + i] = m2s[i] + rest * (n_rest + 2 * n_lead);
  }
  return sums;
}

// `total` is the count and the sums, added up over the ranks; returns mean, m2, rstd and the count.
std::tuple<Tensor, Tensor, Tensor, Tensor> moments_of(const Tensor& total, double eps) {
  const int64_t c = total.numel() / 4;
  const Tensor mean = new_doubles(total, c), m2 = new_doubles(total, c), rstd = new_doubles(total, c);
  const Tensor count = new_tensor(total, std::vector<int64_t>{}, ScalarType::Double);
  const double* const in = doubles(total);
  double *const means = mutable_doubles(mean), *const m2s = mutable_doubles(m2), *const rstds = mutable_doubles(rstd);
  *mutable_doubles(count) = in[0];
  const double n = std::max(in[0], 1.0);
  for (int64_t i = 0; i < c; ++i) {
    const double* const sums = in + 1 + i;
    const double n_lead = sums[0], n_rest = sums[c], square_lead = sums[2 * c], square_rest = sums[3 * c];
    const double lead = leading_bits((n_lead + n_rest) / n), n_merged = n * lead;
    // the rest of n * mean without its leading bits; small, as the difference is taken before it is rounded
    const double n_left = (n_lead - n_merged) + n_rest, left = n_left / n;
    const double between = (square_lead - n_merged * lead) - n_left * (left + 2 * lead), sum = square_rest + between;
    means[i] = lead + behind(lead, left);
    m2s[i] = sum < 0 ? 0.0 : sum;  // NaN stays
    rstds[i] = 1 / std::sqrt(m2s[i] / n + eps);
  }
  return {mean, m2, rstd, count};
}

// `total` is a count that nobody reads and the two gradient sums; returns p and q.
std::tuple<Tensor, Tensor> means_of(const Tensor& total, const Optional& weight, const Tensor& count) {
  const int64_t c = total.numel() / 2;
  const Tensor p = new_doubles(total, c), q = new_doubles(total, c);
  const double* const sums = doubles(total) + 1;
  const double n = std::max(*doubles(count), 1.0);
  const Values weights(weight);
  STD_TORCH_CHECK(!weights.given() || weights.n == c, "leannorm: weight must have one value a channel");
  double *const ps = mutable_doubles(p), *const qs = mutable_doubles(q);
  for (int64_t i = 0; i < c; ++i) {
    const double w = weights.given() ? weights[i] : 1.0;
    ps[i] = sums[i] * w / n;
    qs[i] = sums[c + i] * w / n;
  }
  return {p, q};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, m) {
  m.impl("move_running_", TORCH_BOX(&move_running_));
  m.impl("constants_of", TORCH_BOX(&constants_of));
  m.impl("sums_of", TORCH_BOX(&sums_of));
  m.impl("moments_of", TORCH_BOX(&moments_of));
  m.impl("means_of", TORCH_BOX(&means_of));
}

}  // namespace leannorm
