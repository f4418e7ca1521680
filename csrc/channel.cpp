// The per-channel operators: what `channel_*` of ops/backends/reference.py computes, over dense tensors.
#include "activation_name.h"
#include "caches.h"
#include "channel_coefficients.h"
#include "channel_sums.h"
#include "statistics.h"

namespace leannorm {
namespace {

const ChannelKernels& kernels() { return LEANNORM_PICK(channel_kernels); }

std::vector<int64_t> statistics_sizes(const Shape& s, int64_t groups) {
  if (groups == 0) return {s.c};
  return groups > 0 ? std::vector<int64_t>{s.n, groups} : std::vector<int64_t>{s.n / -groups, s.c};
}
int64_t groups_of(const Tensor& statistics, const Tensor& x) {
  if (statistics.dim() == 1) return 0;
  const int64_t sets = statistics.size(0);
  return sets == x.size(0) || sets == 0 ? statistics.size(1) : -(x.size(0) / sets);
}
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
  return groups > 0 ? s.c / groups * s.inner : (groups == 0 ? s.n : -groups) * s.inner;
}

// One call's tensors, its cut and its parameters: what the operators below share.
struct Call {
  const Shape s;
  const ElementType type;
  const int64_t groups, count;  // count: elements of a statistic
  const int act;
  Cut cut;
  const Values weight, bias;
  Tensors tensors;
  bool constant = false;  // no gradient goes through the statistics

  Call(const Tensor& x, int64_t groups, const Optional& weight, const Optional& bias, const Optional& residual,
       int act)
      : s(x, groups), type(element_type(x)), groups(groups), count(std::max<int64_t>(count_of(s, groups), 1)),
        act(act), cut(channel_cut(s, groups)), weight(weight), bias(bias),
        tensors{data(x), data(residual), nullptr, nullptr, nullptr, nullptr, element_size(type)} {
    STD_TORCH_CHECK(!this->weight.given() || this->weight.n == s.c, "leannorm: weight must have one value a channel");
    STD_TORCH_CHECK(!this->bias.given() || this->bias.n == s.c, "leannorm: bias must have one value a channel");
    STD_TORCH_CHECK((!weight || weight->dim() == 1) && (!bias || bias->dim() == 1),
                    "leannorm: weight and bias must have one axis");
    check(s, x, residual, "residual");
  }
  void backward(const Tensor& dy, const Tensor& x, const Optional& out) {
    check(s, x, dy, "dy");
    check(s, x, out, "out");
    tensors.dy = data(dy);
    if (from_output(act)) tensors.out = data(out);
  }
  // dx, which may take the place of x; dz where there is one.
  void results(const Tensor& result, const Tensor* dz = nullptr) {
    tensors.result = mutable_data(result);
    const int64_t least = cut.columns ? kStreamedColumns : kStreamedPlanes;
    tensors.past = result.numel() * tensors.bytes >= least && tensors.result != tensors.x;
    if (dz != nullptr && dz->numel() > 0) tensors.dz = mutable_data(*dz);
  }
  int64_t statistics() const { return groups > 0 ? s.n * groups : blocks() * s.c; }
  int64_t blocks() const { return groups == 0 ? 1 : groups > 0 ? s.n : s.n / -groups; }  // that have gradient sums
  SetCoefficients coefficients() const { return {type, cut, s.c, weight, bias}; }

  void normalize(const SetCoefficients& c, int64_t set, int64_t i) const {
    const Chunk chunk = cut.chunk(set, i);
    kernels().normalize[cut.columns][type](tensors.at(chunk.offset), chunk.block, c.at(chunk.index), act);
  }
  void grad_sums(const SetCoefficients& c, GradPartials& partials, int64_t set, int64_t i, void* kept) const {
    const Chunk chunk = cut.chunk(set, i);
    Operands o = tensors.at(chunk.offset);
    o.kept = kept;
    kernels().grad_sums[cut.columns][type](o, chunk.block, c.at(chunk.index), act, partials.dz(i), partials.dz_centred(i));
  }
  void input_grad(const SetCoefficients& c, int64_t set, int64_t i, void* kept) const {
    const Chunk chunk = cut.chunk(set, i);
    Operands o = tensors.at(chunk.offset);
    o.kept = kept;
    kernels().input_grad[cut.columns][type](o, chunk.block, c.at(chunk.index), act);
  }
  // Is the activation's derivative dear, so that what it makes of a set is kept between the passes?
  bool keeps() const { return type != kDouble && act != kIdentity && act != kRelu && cut.kept_size() <= kKept && cut.kept_size() > 0; }
  // In the result, where that and what is read of the sets under way are likely to be in the last cache.
  bool keeps_in_result() const {
    const int64_t sets = std::min<int64_t>(cut.sets, carries_whole_sets(cut, cut) ? torch::stable::get_num_threads() : cut.sets);
    return cut.columns && type == kFloat && act != kIdentity && !from_output(act) && tensors.result != tensors.x &&
           3 * sets * cut.set_elements() * tensors.bytes <= last_cache().bytes;
  }
  // The gradient sums of a set, by channel (and by sample, where the statistics are).
  void merge(GradPartials& partials, int64_t set, const Values& rstd, double* sum_dz, double* sum_dz_xhat) const {
    const int64_t first = cut.first_channel(set), n = cut.channels(set), statistic = cut.first_statistic(set);
    std::fill_n(sum_dz + first, n, 0.0);
    std::fill_n(sum_dz_xhat + first, n, 0.0);
    partials.merge(set, [&](int64_t channel, double dz, double dz_centred) {
      sum_dz[first + channel] += dz;
      sum_dz_xhat[first + channel] += dz_centred;
    });
    cut.each_channel(n, [&](int64_t j, int64_t i) { sum_dz_xhat[first + j] *= rstd[statistic + i]; });
  }
};

// The first line of memory from here on. (`new` of an aligned type asks for a newer C++ library than the wheel may.)
float* next_line(float* p) { return p + -reinterpret_cast<uintptr_t>(p) / sizeof(float) % kLine; }

// The statistics of an operator's arguments.
struct Given {
  const Values mean, rstd;

  Given(const Call& call, const Tensor& mean, const Tensor& rstd) : mean(mean), rstd(rstd) {
    STD_TORCH_CHECK(this->mean.n == call.statistics() && this->rstd.n == call.statistics(),
                    "leannorm: mean and rstd must have one value for each statistic");
  }
};

// A worker (see `in_two_passes`) that has nothing to do but in the passes that it says.
struct Worker {
  const Call& call;
  int64_t set = 0;

  explicit Worker(const Call& call) : call(call) {}
  void begin(int64_t next) { set = next; }
  void first(int64_t) {}
  void between() {}
  void second(int64_t) {}
};
struct Moments : Worker {
  const Statistics& statistics;
  MomentPartials partials;

  Moments(const Call& call, const Statistics& statistics, const Tensor& x)
      : Worker(call), statistics(statistics), partials(statistics.cut, x) {}
  void first(int64_t i) { partials.add(kernels(), set, i); }
  void between() { statistics.merge(partials, set); }
};

struct GivenWorker : Worker {
  const Given& given;
  SetCoefficients coefficients;

  GivenWorker(const Call& call, const Given& given) : Worker(call), given(given), coefficients(call.coefficients()) {}
  void begin(int64_t next) {
    Worker::begin(next);
    coefficients.set_forward(set, given.mean, given.rstd);
  }
};

struct GradSums : GivenWorker {
  double *const sum_dz, *const sum_dz_xhat;
  GradPartials partials;

  GradSums(const Call& call, const Given& given, double* sum_dz, double* sum_dz_xhat)
      : GivenWorker(call, given), sum_dz(sum_dz), sum_dz_xhat(sum_dz_xhat), partials(call.cut) {}
  void begin(int64_t next) {
    GivenWorker::begin(next);
    partials.clear();
  }
  void first(int64_t i) { call.grad_sums(coefficients, partials, set, i, nullptr); }
  void between() { call.merge(partials, set, given.rstd, sum_dz, sum_dz_xhat); }
};

// A compiler hands in any layout (the operator's tag in ops/schema.py); one that is not dense is copied.
std::tuple<Tensor, Tensor> channel_moments(const Tensor& given, int64_t groups) {
  const bool taken = given.dim() < 2 || given.is_contiguous() || Shape::channels_last(given);
  const Tensor x = taken ? given : torch::stable::contiguous(given);
  const Call call(x, groups, {}, {}, {}, kIdentity);
  Cut cut = moments_cut(call.s, groups);
  cut.alone = true;
  const Tensor mean = new_doubles(x, statistics_sizes(call.s, groups)), m2 = new_doubles(x, statistics_sizes(call.s, groups));
  const Statistics statistics{cut, call.count, 0, doubles(mean), doubles(m2), nullptr};
  in_first_pass(cut, [&] { return Moments(call, statistics, x); });
  return {mean, m2};
}

Tensor channel_normalize(const Tensor& x, const Tensor& mean, const Tensor& rstd, const Optional& weight,
                         const Optional& bias, const Optional& residual, StringHandle act) {
  Call call(x, groups_of(mean, x), weight, bias, residual, activation_index(act));
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

std::tuple<Tensor, Tensor, Tensor, Tensor> forward(const Tensor& x, const Optional& weight, const Optional& bias,
                                                   const Optional& residual, double eps, int act, int64_t groups) {
  Call call(x, groups, weight, bias, residual, act);
  const Tensor y = new_like(x);
  call.results(y);
  const auto sizes = statistics_sizes(call.s, groups);
  const Tensor mean = new_doubles(x, sizes), m2 = new_doubles(x, sizes), rstd = new_doubles(x, sizes);
  const Cut moments = moments_cut(call.s, groups);
  const Statistics statistics{moments, call.count, eps, doubles(mean), doubles(m2), doubles(rstd)};
  const Given taken(call, mean, rstd);
  struct Forward : Moments {
    const Given taken;
    SetCoefficients coefficients;

    Forward(const Call& call, const Statistics& statistics, const Tensor& x, const Given& taken)
        : Moments(call, statistics, x), taken(taken), coefficients(call.coefficients()) {}
    void between() {
      Moments::between();
      coefficients.set_forward(set, taken.mean, taken.rstd);
    }
    void second(int64_t i) { call.normalize(coefficients, set, i); }
  };
  in_two_passes(moments, call.cut, [&] { return Forward(call, statistics, x, taken); });
  return {y, mean, m2, rstd};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> channel_forward(const Tensor& x, const Optional& weight,
                                                           const Optional& bias, const Optional& residual, double eps,
                                                           StringHandle act, int64_t groups) {
  return forward(x, weight, bias, residual, eps, activation_index(act), groups);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> channel_forward_tracked_(
    const Tensor& x, const Optional& weight, const Optional& bias, const Optional& residual, double eps,
    StringHandle act, const Tensor& running_mean, const Tensor& running_var, const Optional& num_batches,
    std::optional<double> momentum) {
  STD_TORCH_CHECK(x.numel() == 0 || x.numel() > x.size(1), "leannorm: a batch must have more than one value a channel");
  auto result = forward(x, weight, bias, residual, eps, activation_index(act), 0);
  const auto& [y, mean, m2, rstd] = result;
  const int64_t count = x.numel() / std::max<int64_t>(1, mean.numel());
  move_running_(running_mean, running_var, num_batches, momentum, mean, m2, count, {});
  return result;
}

std::tuple<Tensor, Tensor> channel_grad_sums(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                             const Optional& weight, const Optional& bias, const Optional& residual,
                                             const Optional& out, StringHandle act) {
  Call call(x, groups_of(mean, x), weight, bias, residual, activation_index(act));
  call.cut.alone = true;
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const auto sizes = call.groups == 0 ? std::vector<int64_t>{call.s.c} : std::vector<int64_t>{call.blocks(), call.s.c};
  const Tensor sum_dz = new_doubles(x, sizes), sum_dz_xhat = new_doubles(x, sizes);
  in_first_pass(call.cut, [&] { return GradSums(call, given, doubles(sum_dz), doubles(sum_dz_xhat)); });
  return {sum_dz, sum_dz_xhat};
}

std::tuple<Tensor, Tensor> channel_input_grad(const Tensor& dy, const Tensor& x, const Tensor& mean, const Tensor& rstd,
                                              const Optional& weight, const Optional& bias, const Optional& residual,
                                              const Optional& out, const Optional& p, const Optional& q,
                                              StringHandle act, bool want_dz) {
  Call call(x, groups_of(mean, x), weight, bias, residual, activation_index(act));
  call.cut.alone = true;
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const Tensor dx = new_like(x), dz = want_dz ? new_like(x) : no_tensor(x);
  call.results(dx, &dz);
  const Values ps(p), qs(q);
  call.constant = !ps.given() || !qs.given();
  STD_TORCH_CHECK(call.constant || (ps.n == call.statistics() && qs.n == call.statistics()),
                  "leannorm: p and q must have one value for each statistic");
  struct InputGrad : GivenWorker {
    const Values p, q;

    InputGrad(const Call& call, const Given& given, const Values& p, const Values& q)
        : GivenWorker(call, given), p(p), q(q) {}
    void begin(int64_t next) {
      GivenWorker::begin(next);
      if (!call.constant) coefficients.set_backward(set, given.rstd, p, q, 0);
    }
    void second(int64_t i) { call.input_grad(coefficients, set, i, nullptr); }
  };
  in_one_pass(call.cut, [&] { return InputGrad(call, given, ps, qs); });
  return {dx, dz};
}

// A parameter's gradient from its sums, over the samples where there are several; as float32 where the weight
// holds no more.
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

std::tuple<Tensor, Tensor, Tensor> backward_into(const Tensor& dx, const Tensor& dy, const Tensor& x,
                                                 const Tensor& mean, const Tensor& rstd, const Optional& weight,
                                                 const Optional& bias, const Optional& residual, const Optional& out,
                                                 int act, int64_t groups, bool want_dz, bool constant) {
  Call call(x, groups, weight, bias, residual, act);
  call.backward(dy, x, out);
  const Given given(call, mean, rstd);
  const Tensor dz = want_dz ? new_like(x) : no_tensor(x);
  call.results(dx, &dz);
  const int64_t channels = call.s.c, sums = std::max<int64_t>(1, call.blocks()) * channels;
  std::vector<double> buffer(2 * sums);
  double *const sum_dz = buffer.data(), *const sum_dz_xhat = sum_dz + sums;
  call.constant = constant;
  if (call.keeps_in_result()) call.tensors.past = false;  // its lines are in the cache
  struct Backward : GradSums {
    std::vector<double> p, q;
    const bool in_result;
    std::unique_ptr<float[]> dz;

    Backward(const Call& call, const Given& given, double* sum_dz, double* sum_dz_xhat)
        : GradSums(call, given, sum_dz, sum_dz_xhat), in_result(call.keeps_in_result()),
          dz(call.keeps() ? new float[call.cut.kept_size() + kLine] : nullptr) {}
    void* kept(int64_t i) {
      if (in_result) return call.tensors.at(call.cut.chunk(set, i).offset).result;
      return dz == nullptr ? nullptr : next_line(dz.get()) + call.cut.kept_at(i);
    }
    void first(int64_t i) { call.grad_sums(coefficients, partials, set, i, kept(i)); }
    void between() {
      GradSums::between();
      if (call.constant) return;
      const Cut& cut = call.cut;
      const int64_t first = cut.first_channel(set), n = cut.channels(set);
      p.assign(cut.statistics, 0.0);
      q.assign(cut.statistics, 0.0);
      const double* const weights = coefficients.weights(set);
      cut.each_channel(n, [&, share = 1.0 / call.count](int64_t j, int64_t statistic) {
        const double scaled = weights[j] * share;
        p[statistic] += scaled * sum_dz[first + j];
        q[statistic] += scaled * sum_dz_xhat[first + j];
      });
      coefficients.set_backward(set, given.rstd, Values(p), Values(q), cut.first_statistic(set));
    }
    void second(int64_t i) { call.input_grad(coefficients, set, i, kept(i)); }
  };
  in_two_passes(call.cut, call.cut, [&] { return Backward(call, given, sum_dz, sum_dz_xhat); });
  return {gradient(x, weight, sum_dz_xhat, sums, channels), gradient(x, weight, sum_dz, sums, channels), dz};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> channel_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                            const Tensor& rstd, const Optional& weight,
                                                            const Optional& bias, const Optional& residual,
                                                            const Optional& out, StringHandle act,
                                                            int64_t groups, bool want_dz, bool constant) {
  const Tensor dx = new_like(x);
  auto [dweight, dbias, dz] = backward_into(dx, dy, x, mean, rstd, weight, bias, residual, out, activation_index(act),
                                            groups, want_dz, constant);
  return {dx, dweight, dbias, dz};
}

std::tuple<Tensor, Tensor, Tensor> channel_backward_(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                                     const Tensor& rstd, const Optional& weight, const Optional& bias,
                                                     const Optional& residual, const Optional& out,
                                                     StringHandle act, int64_t groups, bool want_dz) {
  return backward_into(x, dy, x, mean, rstd, weight, bias, residual, out, activation_index(act), groups, want_dz,
                       false);
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
