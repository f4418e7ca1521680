// The state in which the log makes calls, and the tensors that it makes of memory.
#pragma once

#include "log.h"

#include <ATen/autocast_mode.h>

namespace leannorm::recording {

// The state in which the log makes calls: below autograd, without autocast and modes, and unlogged. Fake tensors need their mode.
class Below {
 public:
  Below() : Below(nullptr) {}
  explicit Below(const std::shared_ptr<py::object>& fake) {
    if (!fake) real_.emplace();
    else sets_ = sets_mode_of_fakes(*fake);
  }
  ~Below() {
    if (sets_) c10::impl::TorchDispatchModeTLS::unset_mode(c10::impl::TorchDispatchModeKey::FAKE);
  }
  Below(const Below&) = delete;

 private:
  const Busy busy_;
  const at::AutoDispatchBelowADInplaceOrView below_;
  const c10::impl::ExcludeDispatchKeyGuard without_{c10::autocast_dispatch_keyset};
  std::optional<PastModes> real_;
  bool sets_ = false;
};

// Sets the global flags under which a call ran.
class UnderFlags {
 public:
  UnderFlags(const Log& log, const Call& call) {
    if (flags_now() == log.flags_of(call)) return;
    const py::gil_scoped_acquire gil;
    set_ = (call.flags == 0 ? log.first->flags : *log.others_flags[call.flags - 1].object).attr("set")();
    set_.attr("__enter__")();
  }
  UnderFlags(const UnderFlags&) = delete;
  ~UnderFlags() {
    if (!set_) return;
    const py::gil_scoped_acquire gil;
    try {
      set_.attr("__exit__")(py::none(), py::none(), py::none());
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("leannorm.lean()");
    }
    set_ = {};
  }

 private:
  py::object set_;
};

// A copy of the whole storage, so that views of it have the same offsets.
inline Tensor copy_of(const Tensor& t, const Geometry& as) {
  if (is_on_host(t)) {
    auto* const allocator = c10::GetAllocator(c10::DeviceType::CPU);
    const size_t size = t.storage().nbytes();
    c10::Storage storage(c10::Storage::use_byte_size_t(), size, allocator, /*resizable=*/true);
    if (size > 0) std::memcpy(storage.mutable_data(), t.storage().data(), size);
    return over(std::move(storage), as);
  }
  const Below below(as.fake);
  Geometry bytes = as;
  bytes.sizes = {static_cast<int64_t>(t.storage().nbytes())}, bytes.strides = {1}, bytes.offset = 0, bytes.dtype = at::kByte;
  return over(over(t.storage(), bytes).clone().storage(), as);
}

inline Tensor shown(const Tensor& t, const Geometry& as) {
  TORCH_CHECK(as.extent() <= static_cast<int64_t>(t.storage().nbytes()),
              "leannorm.lean() has to rebuild a tensor from one whose memory was freed or resized after the forward pass."
              " Keep that memory until backward(), or leave lean() out of this part");
  if (as.is_of(t)) return t;
  if (as.dtype != t.scalar_type() || as.is_on_host() || as.fake) return over(t.storage(), as);
  const Below below;
  return t.as_strided(as.sizes, as.strides, as.offset);
}

}  // namespace leannorm::recording
