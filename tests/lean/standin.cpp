// A device for tests, on torch's key PrivateUse1. Its tensors' addresses cannot be read or written by the host: the same pages
// lie at a second address, where operators run as on a CPU. It counts where the host waits for values, what is launched, and what
// streams do. What it captures as a graph it makes again, in the same memory.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <sys/mman.h>
#include <unistd.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// ---------------------------------------------------------------- memory

struct Memory {
  static constexpr size_t kSize = size_t{1} << 36;  // of addresses
  struct Block {
    int pool;  // whose memory no other pool takes; 0 outside of captures
    size_t size;
    auto operator<=>(const Block&) const = default;
  };
  char *device = nullptr, *host = nullptr;
  size_t used = 4096;
  int pool = 0;
  std::map<Block, std::vector<void*>> free;
  std::unordered_map<void*, Block> blocks;
  std::mutex mutex;

  Memory() {
    const int file = memfd_create("standin", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, kSize) == 0, "no memory for the stand-in");
    host = static_cast<char*>(mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0));
    device = static_cast<char*>(mmap(nullptr, kSize, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0));
    TORCH_CHECK(host != MAP_FAILED && device != MAP_FAILED, "no addresses for the stand-in");
  }
  char* seen_by_host(const void* p) { return p == nullptr ? nullptr : host + (static_cast<const char*>(p) - device); }
  void* take(size_t n) {
    const std::lock_guard lock(mutex);
    const Block block{pool, (n + 63) / 64 * 64};
    if (auto& same = free[block]; !same.empty()) {
      void* const p = same.back();
      same.pop_back();
      return p;
    }
    void* const p = device + used;
    used += block.size, blocks[p] = block;
    return p;
  }
  void give_back(void* p) {
    const std::lock_guard lock(mutex);
    const Block block = blocks[p];
    memset(seen_by_host(p), 0xAB, block.size);
    free[block].push_back(p);
  }
};
Memory& memory() {
  static auto* const made = new Memory();
  return *made;
}
void give_back(void* p) { memory().give_back(p); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    void* const p = n == 0 ? nullptr : memory().take(n);
    return {p, p, n == 0 ? &c10::detail::deleteNothing : &give_back, c10::Device(kType, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(memory().seen_by_host(to), memory().seen_by_host(from), n); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// ---------------------------------------------------------------- streams and notes

std::map<std::string, int> waits, launches;
std::vector<std::tuple<std::string, int64_t, int64_t>> streams;  // what: from (or an address), to
thread_local int64_t stream_now = 0;

// The calls of a capture.
struct Graph {
  std::vector<std::function<void()>> calls;
  void replay() const {
    const at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& call : calls) call();
  }
};
std::shared_ptr<Graph> captured;
template <class Call> void run_and_capture(Call call) {
  call();
  if (captured) captured->calls.push_back(std::move(call));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return {kType, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, 0), id); }
  c10::Stream getStream(c10::Device) const override { return stream(stream_now); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getNewStream(c10::Device, int) const override {
    static int64_t last = 100;
    return stream(++last);
  }
  c10::Stream exchangeStream(c10::Stream s) const override { return stream(std::exchange(stream_now, s.id())); }
  void record(void** event, const c10::Stream& s, c10::DeviceIndex, c10::EventFlag) const override { *event = reinterpret_cast<void*>(s.id() + 1); }
  void block(void* event, const c10::Stream& s) const override { streams.emplace_back("waits", reinterpret_cast<int64_t>(event) - 1, s.id()); }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { ++waits["synchronize"]; }
  void synchronizeEvent(void*) const override { ++waits["synchronize"]; }
  void synchronizeDevice(c10::DeviceIndex) const override { ++waits["synchronize"]; }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override {
    streams.emplace_back("used", reinterpret_cast<int64_t>(data.get()), s.id());
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::globalContext().defaultGenerator(c10::kCPU); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::globalContext().defaultGenerator(c10::kCPU).clone(); }
};

// ---------------------------------------------------------------- operators

at::Tensor bare(c10::Storage storage, const at::Tensor& like, int64_t offset) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), offset);
  return made;
}

// The tensors of one call as the host sees them, and which of the device's they are.
class Seen {
 public:
  at::Tensor on_host(const at::Tensor& t) {
    if (!t.defined() || t.device().type() != kType) return t;
    auto& storage = storages_[t.storage().unsafeGetStorageImpl()];
    if (!storage) {
      char* const p = memory().seen_by_host(t.storage().data());
      storage = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), c10::DataPtr(p, c10::kCPU), c10::GetAllocator(c10::kCPU), true);
      owners_[storage.unsafeGetStorageImpl()] = t.storage();
    }
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
    tensors_.emplace_back(made, t);
    return made;
  }
  at::Tensor on_device(const at::Tensor& t) {
    const size_t number = results_++;
    if (!t.defined() || t.device().type() != c10::kCPU) return t;
    for (const auto& [host, device] : tensors_)
      if (host.is_same(t)) return device;
    if (const auto owner = owners_.find(t.storage().unsafeGetStorageImpl()); owner != owners_.end()) return bare(owner->second, t, t.storage_offset());
    const size_t n = t.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), n, &allocator, /*resizable=*/true);
    if (n > 0) memcpy(memory().seen_by_host(storage.data()), t.storage().data(), n);
    fresh_.emplace_back(number, memory().seen_by_host(storage.data()));
    return bare(std::move(storage), t, t.storage_offset());
  }
  // Where the results that are new tensors lie, by their numbers among all results, and arguments that got more memory.
  std::vector<std::pair<size_t, char*>> fresh() const { return fresh_; }
  std::vector<std::pair<at::Tensor, char*>> resized() const { return resized_; }
  // What an operator has resized is so on the device.
  void resize() {
    for (const auto& [host, device] : tensors_) {
      if (host.sizes() == device.sizes() && host.strides() == device.strides()) continue;
      const size_t n = host.storage().nbytes();
      if (n > device.storage().nbytes()) {
        auto data = allocator.allocate(n);
        memcpy(memory().seen_by_host(data.get()), host.storage().data(), n);
        resized_.emplace_back(host, memory().seen_by_host(data.get()));
        device.storage().unsafeGetStorageImpl()->set_data_ptr(std::move(data)), device.storage().unsafeGetStorageImpl()->set_nbytes(n);
      }
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    }
  }
  c10::IValue on_host(const c10::IValue& v) {
    if (v.isTensor()) return on_host(v.toTensor());
    if (v.isDevice() && v.toDevice().type() == kType) return c10::Device(c10::kCPU);
    if (v.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& t : v.toTensorVector()) list.push_back(on_host(t));
      return list;
    }
    if (v.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional(on_host(*t)) : std::nullopt);
      return list;
    }
    return v;
  }
  c10::IValue on_device(const c10::IValue& v) {
    if (v.isTensor()) return on_device(v.toTensor());
    if (!v.isTensorList()) return v;
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorVector()) list.push_back(on_device(t));
    return list;
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_, owners_;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors_;
  std::vector<std::pair<size_t, char*>> fresh_;
  std::vector<std::pair<at::Tensor, char*>> resized_;
  size_t results_ = 0;
};

// A call that is made again puts its new tensors where the captured one put them.
void put(const std::vector<at::Tensor>& results, const std::vector<std::pair<size_t, char*>>& fresh) {
  for (const auto& [number, to] : fresh) memcpy(to, results[number].storage().data(), results[number].storage().nbytes());
}
std::vector<at::Tensor> tensors_of(const torch::jit::Stack& results) {
  std::vector<at::Tensor> tensors;
  for (const c10::IValue& v : results) {
    if (v.isTensor()) tensors.push_back(v.toTensor());
    else if (v.isTensorList())
      for (const at::Tensor& t : v.toTensorVector()) tensors.push_back(t);
  }
  return tensors;
}

// Does it launch nothing, as its results lie in an argument's memory?
bool is_view(const c10::FunctionSchema& schema) {
  const auto& results = schema.returns();
  const auto is_alias = [](const c10::Argument& a) { return a.alias_info() != nullptr && !a.alias_info()->isWrite(); };
  return !results.empty() && std::all_of(results.begin(), results.end(), is_alias);
}

bool is_wait(const std::string& name) {
  for (const char* one : {"aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero", "aten::masked_select", "aten::_unique2"})
    if (name == one) return true;
  return false;
}

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const std::string name = op.operator_name().name;
  if (is_wait(name)) {
    TORCH_CHECK(!captured, name, " while a graph is captured");
    ++waits[name];
  }
  if (!is_view(op.schema())) ++launches[name];
  Seen seen;
  const size_t n = op.schema().arguments().size();
  torch::jit::Stack arguments;
  for (const c10::IValue& v : torch::jit::last(stack, n)) arguments.push_back(seen.on_host(v));
  torch::jit::drop(stack, n);
  torch::jit::Stack results = arguments;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &results);
  seen.resize();
  for (const c10::IValue& v : results) stack->push_back(seen.on_device(v));
  if (!captured) return;
  captured->calls.push_back([op, arguments, fresh = seen.fresh(), resized = seen.resized()] {
    torch::jit::Stack again = arguments;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &again);
    put(tensors_of(again), fresh);
    for (const auto& [host, to] : resized) memcpy(to, host.storage().data(), host.storage().nbytes());
  });
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(!captured || from.device() == to.device(), "a copy between host and device while a graph is captured");
  if (to.device().type() != kType && !non_blocking) ++waits["copy to the host"];
  ++launches["copy"];
  Seen seen;
  run_and_capture([to = seen.on_host(to), from = seen.on_host(from)] { to.copy_(from); });
  return to;
}
void copy_all(at::TensorList to, at::TensorList from, bool) {
  const at::AutoDispatchBelowADInplaceOrView below;
  ++launches["copies at once"];
  for (size_t i = 0; i < to.size(); ++i) {
    Seen seen;
    run_and_capture([to = seen.on_host(to[i]), from = seen.on_host(from[i])] { to.copy_(from); });
  }
}
at::Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(at::get_default_dtype_as_scalartype()), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::get_default_dtype_as_scalartype()));
}
void record_stream(at::Tensor& t, c10::Stream s) { streams.emplace_back("used", reinterpret_cast<int64_t>(t.storage().data()), s.id()); }
at::Tensor& set(at::Tensor& t, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  t.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  t.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  return t;
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::IntArrayRef stride, at::IntArrayRef padding,
                       at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  const at::AutoDispatchBelowADInplaceOrView below;
  ++launches["aten::convolution"];
  Seen seen;
  const auto call = [=, x = seen.on_host(x), weight = seen.on_host(weight), bias = bias ? std::optional(seen.on_host(*bias)) : std::nullopt,
                     stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), more = output_padding.vec()] {
    return at::convolution(x, weight, bias, stride, padding, dilation, transposed, more, groups);
  };
  const auto y = seen.on_device(call());
  if (captured) captured->calls.push_back([call, fresh = seen.fresh()] { put({call()}, fresh); });
  return y;
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight, at::IntArrayRef stride,
                                                                    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                                                                    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const at::AutoDispatchBelowADInplaceOrView below;
  ++launches["aten::convolution_backward"];
  Seen seen;
  const std::vector<int64_t> bias{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  const auto call = [=, dy = seen.on_host(dy), x = seen.on_host(x), weight = seen.on_host(weight), stride = stride.vec(), padding = padding.vec(),
                     dilation = dilation.vec(), more = output_padding.vec()] {
    const auto [a, b, c] = at::convolution_backward(dy, x, weight, at::OptionalIntArrayRef(bias), stride, padding, dilation, transposed, more, groups, mask);
    return std::vector<at::Tensor>{a, b, c};
  };
  const auto found = call();
  const std::tuple<at::Tensor, at::Tensor, at::Tensor> made{seen.on_device(found[0]), seen.on_device(found[1]), seen.on_device(found[2])};
  if (captured) captured->calls.push_back([call, fresh = seen.fresh()] { put(call(), fresh); });
  return made;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty), m.impl("empty_strided", &empty_strided);
  m.impl("convolution_overrideable", &convolution), m.impl("convolution_backward_overrideable", &convolution_backward);
  m.impl("_copy_from", &copy_from), m.impl("_foreach_copy_", &copy_all), m.impl("set_.source_Storage_storage_offset", &set), m.impl("record_stream", &record_stream);
}
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using at::autocast::CastPolicy;
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(conv2d, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("waits", [] { return waits; });
  m.def("launches", [] { return launches; });
  m.def("streams", [] { return streams; });
  m.def("forget", [] { waits.clear(), launches.clear(), streams.clear(); });
  m.def("set_stream", [](int64_t id) { stream_now = id; });
  py::class_<Graph, std::shared_ptr<Graph>>(m, "Graph").def("replay", &Graph::replay);
  m.def("is_capturing", [] { return captured != nullptr; });
  m.def("begin_capture", [](int pool) { captured = std::make_shared<Graph>(), memory().pool = pool; });
  m.def("end_capture", [] { return memory().pool = 0, std::exchange(captured, nullptr); });
}
