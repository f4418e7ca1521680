// The table of per-row kernels; compiled once for each instruction set.
#include "row_gate.h"
#include "row_panels.h"

namespace leannorm::LEANNORM_ISA {
namespace rows {

template <class T>
void sum_vectors(const void* from, int64_t count, int64_t stride, int64_t begin, int64_t end, void* to) {
  using V = VectorOf<T>;
  const T* p = static_cast<const T*>(from) + begin;
  each_vector<lanes<V>>(end - begin, [&](auto extent, int64_t i, int64_t n) {
    using E = decltype(extent);
    Wide<V> sum{};
    for (int64_t k = 0; k < count; ++k) sum = sum + widen(load<E>(p + k * stride + i, n));
    double lane[lanes<V>];
    store_wide(lane, sum, lanes<V>);
    for (int64_t j = 0; j < n; ++j) static_cast<T*>(to)[begin + i + j] = static_cast<T>(lane[j]);
  });
}

}  // namespace rows

#define EACH_TYPE(kernel) \
  {rows::kernel<float>, rows::kernel<double>, rows::kernel<bfloat16>, rows::kernel<float16>}

extern const RowKernels row_kernels = {
    {EACH_TYPE(line_forward), EACH_TYPE(panel_forward)},
    {EACH_TYPE(line_backward), EACH_TYPE(panel_backward)},
    EACH_TYPE(gate_backward),
    {rows::sum_vectors<float>, rows::sum_vectors<double>},
    settle,
};

}  // namespace leannorm::LEANNORM_ISA
