// The per-channel operators: what `channel_*` of ops/backends/reference.py computes, over dense tensors.
#include "channel_coefficients.h"
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

struct Tensors {
  const char *x, *residual, *dy, *out;
  char *result, *dz;
  int64_t bytes;
  bool past = false;

  Operands at(int64_t offset) const {
    const int64_t d = offset * bytes;
    const auto move = [d](auto p) { return p == nullptr ? p : p + d; };
    return {move(x), move(residual), move(dy), move(out), move(result), move(dz), past};
  }
};

int64_t count_of(const Shape& s, int64_t groups) {
  return groups == 0 ? s.n * s.inner : s.c / groups * s.inner;
}

// Mean, M2 and rstd of a set, from the moments of its chunks.
struct Statistics {
  const Shape& s;
  const Cut& cut;
  int64_t groups;
  double eps, *mean, *m2, *rstd;

  void merge(MomentPartials& partials, int64_t set) const {
    const int64_t channels = cut.channels(), per_group = groups == 0 ? 1 : s.c / groups;
    const int64_t per_set = !cut.columns ? 1 : channels / per_group;
    const int64_t base = set * (!cut.columns ? 1 : cut.channels() / per_group);
    const int64_t count = std::max<int64_t>(count_of(s, groups), 1);
    std::fill_n(mean + base, per_set, 0.0);
    std::fill_n(m2 + base, per_set, 0.0);
    struct Slot { int64_t at, n; double mean, m2, left; };
    std::vector<Slot> slots;  // several to a statistic: merged from the mean of all, which costs no digit
    partials.merge(set, [&](int64_t slot, int64_t n, double slot_mean, double slot_m2, double left) {
      if (n == count) {  // the slot is the whole statistic
        mean[base + slot] = slot_mean, m2[base + slot] = slot_m2;
        return;
      }
      const int64_t i = base + slot % channels / per_group;
      slots.push_back({i, n, slot_mean, slot_m2, left});
      mean[i] += slot_mean * (double(n) / double(count));
    });
    std::vector<double> rest(slots.empty() ? 0 : per_set);  // what rounding left of the mean
    for (const Slot& part : slots) {
      const double difference = (part.mean - mean[part.at]) + part.left;
      m2[part.at] += part.m2 + difference * difference * double(part.n);
      rest[part.at - base] += difference * (double(part.n) / double(count));
    }
    for (size_t i = 0; i < rest.size(); ++i) mean[base + i] += rest[i];
    if (rstd == nullptr) return;
    for (int64_t i = base; i < base + per_set; ++i) rstd[i] = 1 / std::sqrt(m2[i] / count + eps);
  }
};

std::tuple<Tensor, Tensor> channel_moments(const Tensor& x, int64_t groups) {
  const Shape s(x, groups);
  const Cut cut = moments_cut(s, groups);
  const Tensor mean = new_doubles(x, statistics_sizes(s, groups)), m2 = new_doubles(x, statistics_sizes(s, groups));
  const Statistics statistics{s, cut, groups, 0, doubles(mean), doubles(m2), nullptr};
  MomentPartials partials(cut, x);
  in_two_passes(
      cut, cut, [&](int64_t set, int64_t i) { partials.add(kernels(), set, i); },
      [&](int64_t set) { statistics.merge(partials, set); }, [](int64_t, int64_t) {});
  return {mean, m2};
}

// One call's tensors, its cut and its coefficients: what the four operators below share.
struct Call {
  const Shape s;
  const ElementType type;
  const int64_t groups;
  const int act;
  const Cut cut;
  ChannelCoefficients coefficients;
  Tensors tensors;

  Call(const Tensor& x, int64_t groups, const Optional& weight, const Optional& bias, const Optional& residual,
       const std::string& act)
      : s(x, groups), type(element_type(x)), groups(groups), act(activation_index(act)), cut(channel_cut(s, groups)),
        coefficients(type, s, cut, groups, weight, bias),
        tensors{data(x), data(residual), nullptr, nullptr, nullptr, nullptr, element_size(type)} {
    check(s, x, residual, "residual");
  }
  void backward(const Tensor& dy, const Tensor& x, const Optional& out) {
    check(s, x, dy, "dy");
    check(s, x, out, "out");
    tensors.dy = data(dy);
    if (from_output(act)) tensors.out = data(out);
  }
  // dx, or null where it takes the place of x; dz where there is one.
  void results(const Tensor& result, const Tensor& dz) {
    tensors.result = mutable_data(result);
    tensors.past = result.numel() * tensors.bytes >= kStreamed && tensors.result != tensors.x;
    if (dz.numel() > 0) tensors.dz = mutable_data(dz);
  }
  void given_statistics(const std::vector<double>& mean, const std::vector<double>& rstd) {
    const int64_t n = groups == 0 ? s.c : s.n * groups;
    STD_TORCH_CHECK(int64_t(mean.size()) == n && int64_t(rstd.size()) == n,
                    "leannorm: mean and rstd must have one value for each statistic");
    for (int64_t set = 0; set < cut.sets; ++set) coefficients.set_forward(set, mean.data(), rstd.data());
  }

  void normalize(int64_t set, int64_t i) const {
    const Chunk chunk = cut.chunk(set, i);
    kernels().normalize[cut.columns][type](tensors.at(chunk.offset), chunk.block, coefficients.at(chunk.index), act);
  }
  void grad_sums(GradPartials& partials, int64_t set, int64_t i) const {
    const Chunk chunk = cut.chunk(set, i);
    kernels().grad_sums[cut.columns][type](tensors.at(chunk.offset), chunk.block, coefficients.at(chunk.index), act,
                                           partials.dz(set, i), partials.dz_centred(set, i));
  }
  void input_grad(int64_t set, int64_t i) const {
    const Chunk chunk = cut.chunk(set, i);
    kernels().input_grad[cut.columns][type](tensors.at(chunk.offset), chunk.block, coefficients.at(chunk.index), act);
  }
  // The gradient sums of a set, by channel (and by sample, where the statistics are).
  void merge(GradPartials& partials, int64_t set, const double* rstd, double* sum_dz, double* sum_dz_xhat) const {
    const int64_t first = coefficients.first(set), n = cut.channels();
    std::fill_n(sum_dz + first, n, 0.0);
    std::fill_n(sum_dz_xhat + first, n, 0.0);
    partials.merge(set, [&](int64_t channel, double dz, double dz_centred) {
      sum_dz[channel] += dz;
      sum_dz_xhat[channel] += dz_centred;
    });
    for (int64_t i = first; i < first + n; ++i) sum_dz_xhat[i] *= rstd[coefficients.statistic(set, i % s.c)];
  }
};

Tensor channel_normalize(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Optional& weight,
                         const Optional& bias, const Optional& residual, const std::string& act) {
  Call call(x, groups_of(mean), weight, bias, residual, act);
  const Tensor y = new_like(x);
  call.results(y, no_tensor(x));
  call.given_statistics(values(mean), values(rstd));
  in_one_pass(call.cut, [&](int64_t set, int64_t i) { call.normalize(set, i); });
  return y;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> channel_forward(const Tensor& x, const Optional& weight,
                                                           const Optional& bias, const Optional& residual, double eps,
                                                           const std::string& act, int64_t groups) {
  Call call(x, groups, weight, bias, residual, act);
  const Tensor y = new_like(x);
  call.results(y, no_tensor(x));
  const auto sizes = statistics_sizes(call.s, groups);
  const Tensor mean = new_doubles(x, sizes), m2 = new_doubles(x, sizes), rstd = new_doubles(x, sizes);
  const Cut moments = moments_cut(call.s, groups);
  const Statistics statistics{call.s, moments, groups, eps, doubles(mean), doubles(m2), doubles(rstd)};
  MomentPartials partials(moments, x);
  in_two_passes(
      moments, call.cut, [&](int64_t set, int64_t i) { partials.add(kernels(), set, i); },
      [&](int64_t set) {
        statistics.merge(partials, set);
        call.coefficients.set_forward(set, statistics.mean, statistics.rstd);
      },
      [&](int64_t set, int64_t i) { call.normalize(set, i); });
  return {y, mean, m2, rstd};
}

std::tuple<Tensor, Tensor> channel_grad_sums(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                             const Optional& weight, const Optional& bias, const Optional& residual,
                                             const Optional& out, const std::string& act) {
  Call call(x, groups_of(mean), weight, bias, residual, act);
  call.backward(dy, x, out);
  const auto rstds = values(rstd);
  call.given_statistics(values(mean), rstds);
  const auto sizes = call.groups == 0 ? std::vector<int64_t>{call.s.c} : std::vector<int64_t>{call.s.n, call.s.c};
  const Tensor sum_dz = new_doubles(x, sizes), sum_dz_xhat = new_doubles(x, sizes);
  GradPartials partials(call.cut);
  double *a = doubles(sum_dz), *b = doubles(sum_dz_xhat);
  in_two_passes(
      call.cut, call.cut, [&](int64_t set, int64_t i) { call.grad_sums(partials, set, i); },
      [&](int64_t set) { call.merge(partials, set, rstds.data(), a, b); }, [](int64_t, int64_t) {});
  return {sum_dz, sum_dz_xhat};
}

std::tuple<Tensor, Tensor> channel_input_grad(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                              const Optional& weight, const Optional& bias, const Optional& residual,
                                              const Optional& out, const Optional& p, const Optional& q,
                                              const std::string& act, bool want_dz) {
  Call call(x, groups_of(mean), weight, bias, residual, act);
  call.backward(dy, x, out);
  const Tensor dx = new_like(x), dz = want_dz ? new_like(x) : no_tensor(x);
  call.results(dx, dz);
  const auto rstds = values(rstd), ps = values(p), qs = values(q);
  call.given_statistics(values(mean), rstds);
  if (!ps.empty() && !qs.empty()) {
    STD_TORCH_CHECK(ps.size() == rstds.size() && qs.size() == rstds.size(),
                    "leannorm: p and q must have one value for each statistic");
    for (int64_t set = 0; set < call.cut.sets; ++set)
      call.coefficients.set_backward(set, rstds.data(), ps.data(), qs.data());
  }
  in_one_pass(call.cut, [&](int64_t set, int64_t i) { call.input_grad(set, i); });
  return {dx, dz};
}

std::tuple<Tensor, Tensor, Tensor> backward_into(const Tensor& dx, const Tensor& dy, const Tensor& x,
                                                 const Tensor& mean, const Tensor& rstd, const Optional& weight,
                                                 const Optional& bias, const Optional& residual, const Optional& out,
                                                 const std::string& act, int64_t groups, bool want_dz) {
  Call call(x, groups, weight, bias, residual, act);
  call.backward(dy, x, out);
  const Tensor dz = want_dz ? new_like(x) : no_tensor(x);
  call.results(dx, dz);
  const auto rstds = values(rstd);
  call.given_statistics(values(mean), rstds);
  const Shape& s = call.s;
  const ChannelCoefficients& coefficients = call.coefficients;
  const Tensor dweight = new_doubles(x, {s.c}), dbias = new_doubles(x, {s.c});
  std::vector<double> by_sample(groups == 0 ? 0 : 2 * s.n * s.c), p(rstds.size()), q(rstds.size());
  double* const sum_dz = groups == 0 ? doubles(dbias) : by_sample.data();
  double* const sum_dz_xhat = groups == 0 ? doubles(dweight) : sum_dz + s.n * s.c;
  const double count = std::max<int64_t>(count_of(s, groups), 1);
  GradPartials partials(call.cut);
  in_two_passes(
      call.cut, call.cut, [&](int64_t set, int64_t i) { call.grad_sums(partials, set, i); },
      [&](int64_t set) {
        call.merge(partials, set, rstds.data(), sum_dz, sum_dz_xhat);
        const int64_t first = coefficients.first(set);
        for (int64_t i = first; i < first + call.cut.channels(); ++i) {
          const int64_t statistic = coefficients.statistic(set, i % s.c);
          const double scaled = coefficients.weight(i % s.c) / count;
          p[statistic] += scaled * sum_dz[i];
          q[statistic] += scaled * sum_dz_xhat[i];
        }
        call.coefficients.set_backward(set, rstds.data(), p.data(), q.data());
      },
      [&](int64_t set, int64_t i) { call.input_grad(set, i); });
  if (groups != 0) {
    std::fill_n(doubles(dbias), s.c, 0.0);
    std::fill_n(doubles(dweight), s.c, 0.0);
    for (int64_t i = 0; i < s.n * s.c; ++i) {
      doubles(dbias)[i % s.c] += sum_dz[i];
      doubles(dweight)[i % s.c] += sum_dz_xhat[i];
    }
  }
  return {dweight, dbias, dz};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> channel_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                            const Tensor& rstd, const Optional& weight,
                                                            const Optional& bias, const Optional& residual,
                                                            const Optional& out, const std::string& act,
                                                            int64_t groups, bool want_dz) {
  const Tensor dx = new_like(x);
  auto [dweight, dbias, dz] =
      backward_into(dx, dy, x, mean, rstd, weight, bias, residual, out, act, groups, want_dz);
  return {dx, dweight, dbias, dz};
}

std::tuple<Tensor, Tensor, Tensor> channel_backward_(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                     const Tensor& rstd, const Optional& weight, const Optional& bias,
                                                     const Optional& residual, const Optional& out,
                                                     const std::string& act, int64_t groups, bool want_dz) {
  return backward_into(x, dy, x, mean, rstd, weight, bias, residual, out, act, groups, want_dz);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, m) {
  m.impl("channel_moments", TORCH_BOX(&channel_moments));
  m.impl("channel_normalize", TORCH_BOX(&channel_normalize));
  m.impl("channel_grad_sums", TORCH_BOX(&channel_grad_sums));
  m.impl("channel_input_grad", TORCH_BOX(&channel_input_grad));
  m.impl("channel_forward", TORCH_BOX(&channel_forward));
  m.impl("channel_backward", TORCH_BOX(&channel_backward));
  m.impl("channel_backward_", TORCH_BOX(&channel_backward_));
}

}  // namespace leannorm
