// The per-channel operators: what `channel_*` of ops/backends/reference.py computes, over dense tensors.
#include "channel_call.h"
#include "statistics.h"

namespace leannorm {
namespace {

// A compiler passes any layout (the operator's tag in ops/schema.py); one that is not dense is copied.
std::tuple<Tensor, Tensor, Tensor> channel_moments(const Tensor& given, int64_t groups, const Optional& given_mask) {
  const bool taken = given.dim() < 2 || given.is_contiguous() || Shape::channels_last(given);
  const Tensor x = taken ? given : torch::stable::contiguous(given);
  const Optional mask = given_mask ? Optional(torch::stable::contiguous(*given_mask)) : std::nullopt;
  const Call call(x, mask, groups, {}, {}, {}, kIdentity);
  Cut cut = moments_cut(call.s, groups);
  cut.alone = true;
  const auto sizes = statistics_sizes(call.s, groups);
  const Tensor mean = new_doubles(x, sizes), m2 = new_doubles(x, sizes);
  const Statistics statistics{cut, call.count, 0, doubles(mean), doubles(m2), nullptr};
  if (mask) in_first_pass(call.cut, [&] { return MaskedMoments(call, statistics, x); });
  else in_first_pass(cut, [&] { return Moments(call, statistics, x); });
  return {mean, m2, call.valid_count(x)};
}

Tensor channel_normalize(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Optional& weight,
                         const Optional& bias, const Optional& residual, StringHandle act, const Optional& mask) {
  Call call(x, mask, groups_of(mean, x), weight, bias, residual, activation_index(act));
  const Tensor y = new_like(x);
  call.results(y);
  const Given given(call, mean, rstd);
  struct Normalize : GivenWorker {
    using GivenWorker::GivenWorker;
    void second(int64_t i) { call.normalize(coefficients, set, i); }
  };
  in_one_pass(call.cut, [&] { return Normalize(call, given); });
  return y;
}

template <class OfMoments> struct Forward : OfMoments {
  const Given& made;
  SetCoefficients coefficients;

  Forward(const Call& call, const Statistics& statistics, const Tensor& x, const Given& made)
      : OfMoments(call, statistics, x), made(made), coefficients(call.coefficients()) {}
  void between() {
    OfMoments::between();
    coefficients.set_forward(this->set, made.mean, made.rstd);
  }
  void second(int64_t i) { this->call.normalize(coefficients, this->set, i); }
};

// The results, and the count of valid values if there is a mask.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> forward(const Tensor& x, const Optional& mask, const Optional& weight,
                                                           const Optional& bias, const Optional& residual, double eps,
                                                           int act, int64_t groups) {
  Call call(x, mask, groups, weight, bias, residual, act);
  const Tensor y = new_like(x);
  call.results(y);
  const auto sizes = statistics_sizes(call.s, groups);
  const Tensor mean = new_doubles(x, sizes), m2 = new_doubles(x, sizes), rstd = new_doubles(x, sizes);
  const Cut cut = mask ? call.cut : moments_cut(call.s, groups);
  const Statistics statistics{cut, call.count, eps, doubles(mean), doubles(m2), doubles(rstd)};
  const Given made(call, mean, rstd);
  if (mask) in_two_passes(cut, call.cut, [&] { return Forward<MaskedMoments>(call, statistics, x, made); });
  else in_two_passes(cut, call.cut, [&] { return Forward<Moments>(call, statistics, x, made); });
  return {y, mean, m2, rstd, call.valid_count(x)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> channel_forward(const Tensor& x, const Optional& weight,
                                                                   const Optional& bias, const Optional& residual,
                                                                   double eps, StringHandle act, int64_t groups,
                                                                   const Optional& mask) {
  return forward(x, mask, weight, bias, residual, eps, activation_index(act), groups);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> channel_forward_tracked_(
    const Tensor& x, const Optional& weight, const Optional& bias, const Optional& residual, double eps,
    StringHandle act, const Tensor& running_mean, const Tensor& running_var, const Optional& num_batches,
    std::optional<double> momentum) {
  STD_TORCH_CHECK(x.numel() == 0 || x.numel() > x.size(1), "leannorm: a batch must have more than one value a channel");
  const auto [y, mean, m2, rstd, none] = forward(x, {}, weight, bias, residual, eps, activation_index(act), 0);
  const int64_t count = x.numel() / std::max<int64_t>(1, mean.numel());
  move_running_(running_mean, running_var, num_batches, momentum, mean, m2, count, {});
  return {y, mean, m2, rstd};
}

std::tuple<Tensor, Tensor> channel_grad_sums(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                             const Optional& weight, const Optional& bias, const Optional& residual,
                                             const Optional& out, StringHandle act, const Optional& mask) {
  Call call(x, mask, groups_of(mean, x), weight, bias, residual, activation_index(act));
  call.cut.alone = !mask;
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const auto sizes = call.groups == 0 ? std::vector<int64_t>{call.s.c} : std::vector<int64_t>{call.blocks(), call.s.c};
  const Tensor sum_dz = new_doubles(x, sizes), sum_dz_xhat = new_doubles(x, sizes);
  in_first_pass(call.cut, [&] { return GradSums(call, given, doubles(sum_dz), doubles(sum_dz_xhat)); });
  return {sum_dz, sum_dz_xhat};
}

std::tuple<Tensor, Tensor> channel_input_grad(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                              const Optional& weight, const Optional& bias, const Optional& residual,
                                              const Optional& out, const Optional& mean_dz,
                                              const Optional& mean_dz_xhat, StringHandle act, bool want_dz,
                                              const Optional& mask) {
  Call call(x, mask, groups_of(mean, x), weight, bias, residual, activation_index(act));
  call.cut.alone = !mask;
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const Tensor dx = new_like(x), dz = want_dz ? new_like(x) : Tensor();
  call.results(dx, want_dz ? &dz : nullptr);
  const Values of_dz(mean_dz), of_dz_xhat(mean_dz_xhat);
  call.constant = !of_dz.given() || !of_dz_xhat.given();
  STD_TORCH_CHECK(call.constant || (of_dz.n == call.statistics() && of_dz_xhat.n == call.statistics()),
                  "leannorm: the means of dz and of dz * xhat must have one value for each statistic");
  struct InputGrad : GivenWorker {
    const Values of_dz, of_dz_xhat;

    InputGrad(const Call& call, const Given& given, const Values& of_dz, const Values& of_dz_xhat)
        : GivenWorker(call, given), of_dz(of_dz), of_dz_xhat(of_dz_xhat) {}
    void begin(int64_t next) {
      GivenWorker::begin(next);
      if (!call.constant) coefficients.set_backward(set, given.rstd, of_dz, of_dz_xhat, 0);
    }
    void second(int64_t i) { call.input_grad(coefficients, set, i, nullptr); }
  };
  in_one_pass(call.cut, [&] { return InputGrad(call, given, of_dz, of_dz_xhat); });
  return {dx, dz};
}

// A parameter's gradient from its sums, over the samples if there are several; as float32 if the weight is no wider.
Tensor gradient(const Tensor& x, const Optional& weight, double* sums, int64_t n, int64_t channels) {
  for (int64_t i = channels; i < n; i += channels)
    for (int64_t j = 0; j < channels; ++j) sums[j] += sums[i + j];
  const bool wide = !weight.has_value() || weight->scalar_type() == ScalarType::Double;
  const Tensor result = new_tensor(x, &channels, 1, wide ? ScalarType::Double : ScalarType::Float);
  if (wide)
    std::copy_n(sums, channels, doubles(result));
  else
    std::copy_n(sums, channels, static_cast<float*>(result.mutable_data_ptr()));
  return result;
}

// Both passes of a gradient. Between them it has the means of dz and of dz * xhat, times the weight, over each set.
struct Backward : GradSums {
  const Values& sizes;  // of the sets, if a mask leaves out some of their values
  std::vector<double> mean_dz, mean_dz_xhat;
  const bool in_result;
  std::unique_ptr<float[]> dz;

  Backward(const Call& call, const Given& given, const Values& sizes, double* sum_dz, double* sum_dz_xhat)
      : GradSums(call, given, sum_dz, sum_dz_xhat), sizes(sizes), in_result(call.keeps_in_result()),
        dz(call.keeps() ? new float[call.cut.kept_size() + kLine] : nullptr) {}
  // From the first cache line on. (`new` of an aligned type needs a newer C++ library than the wheel may.)
  void* kept(int64_t i) {
    if (in_result) return call.tensors.at(call.cut.chunk(set, i).offset).result;
    float* const p = dz.get();
    if (p == nullptr) return nullptr;
    return p + -reinterpret_cast<uintptr_t>(p) / sizeof(float) % kLine + call.cut.kept_at(i);
  }
  void first(int64_t i) { call.grad_sums(coefficients, partials, set, i, kept(i)); }
  void between() {
    GradSums::between();
    if (call.constant) return;
    if (call.positions) {
      const double values = std::max(1.0, sizes[call.groups == 0 ? 0 : call.cut.first_channel(set) / call.s.c]);
      set_means([=](double weight) { return weight / values; });
    } else {
      set_means([share = 1.0 / call.count](double weight) { return weight * share; });
    }
  }
  void second(int64_t i) { call.input_grad(coefficients, set, i, kept(i)); }

 private:
  template <class Scaled> void set_means(Scaled scaled) {
    const Cut& cut = call.cut;
    const int64_t first = cut.first_channel(set), n = cut.channels(set);
    mean_dz.assign(cut.statistics, 0.0);
    mean_dz_xhat.assign(cut.statistics, 0.0);
    const double* const weights = coefficients.weights(set);
    cut.each_channel(n, [&](int64_t j, int64_t statistic) {
      const double share = scaled(weights[j]);
      mean_dz[statistic] += share * sum_dz[first + j];
      mean_dz_xhat[statistic] += share * sum_dz_xhat[first + j];
    });
    coefficients.set_backward(set, given.rstd, Values(mean_dz), Values(mean_dz_xhat), cut.first_statistic(set));
  }
};

std::tuple<Tensor, Tensor, Tensor> backward_into(const Tensor& dx, const Tensor& dy, const Tensor& x,
                                                 const Tensor& mean, const Tensor& rstd, const Optional& weight,
                                                 const Optional& bias, const Optional& residual, const Optional& out,
                                                 int act, int64_t groups, bool want_dz, bool constant,
                                                 const Optional& mask, const Optional& count) {
  Call call(x, mask, groups, weight, bias, residual, act);
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const Values sizes(count);
  STD_TORCH_CHECK(!mask || constant || sizes.n == call.blocks(), "leannorm: count must have one value, or one for each sample");
  const Tensor dz = want_dz ? new_like(x) : Tensor();
  call.results(dx, want_dz ? &dz : nullptr);
  const int64_t channels = call.s.c, sums = std::max<int64_t>(1, call.blocks()) * channels;
  std::vector<double> buffer(2 * sums);
  double *const sum_dz = buffer.data(), *const sum_dz_xhat = sum_dz + sums;
  call.constant = constant;
  if (call.keeps_in_result()) call.tensors.past = false;  // its lines are in the cache
  in_two_passes(call.cut, call.cut, [&] { return Backward(call, given, sizes, sum_dz, sum_dz_xhat); });
  return {gradient(x, weight, sum_dz_xhat, sums, channels), gradient(x, weight, sum_dz, sums, channels), dz};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> channel_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                            const Tensor& rstd, const Optional& weight,
                                                            const Optional& bias, const Optional& residual,
                                                            const Optional& out, StringHandle act,
                                                            int64_t groups, bool want_dz, bool constant,
                                                            const Optional& mask, const Optional& count) {
  const Tensor dx = new_like(x);
  auto [dweight, dbias, dz] = backward_into(dx, dy, x, mean, rstd, weight, bias, residual, out, activation_index(act),
                                            groups, want_dz, constant, mask, count);
  return {dx, dweight, dbias, dz};
}

std::tuple<Tensor, Tensor, Tensor> channel_backward_(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                     const Tensor& rstd, const Optional& weight, const Optional& bias,
                                                     const Optional& residual, const Optional& out,
                                                     StringHandle act, int64_t groups, bool want_dz) {
  return backward_into(x, dy, x, mean, rstd, weight, bias, residual, out, activation_index(act), groups, want_dz,
                       false, {}, {});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(leannorm, CPU, m) {
  m.impl("channel_moments", TORCH_BOX(&channel_moments));
  m.impl("channel_normalize", TORCH_BOX(&channel_normalize));
  m.impl("channel_grad_sums", TORCH_BOX(&channel_grad_sums));
  m.impl("channel_input_grad", TORCH_BOX(&channel_input_grad));
  m.impl("channel_forward", TORCH_BOX(&channel_forward));
  m.impl("channel_forward_tracked_", TORCH_BOX(&channel_forward_tracked_));
  m.impl("channel_backward", TORCH_BOX(&channel_backward));
  m.impl("channel_backward_", TORCH_BOX(&channel_backward_));
}

}  // namespace leannorm
