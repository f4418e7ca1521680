// Devices that run asynchronously: the host waits for no value there, and what was made on one stream is read on another one
// only after that has waited, while the allocator knows of both.
#pragma once

#include "shown.h"

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <optional>

namespace leannorm::recording {

inline bool is_on_device(const Geometry& g) { return !g.device.is_cpu() && !g.device.is_meta() && !g.fake; }

// The stream on which this thread calls operators of the device; none where it has no streams.
inline std::optional<c10::Stream> stream_of(const Geometry& g) {
  if (!is_on_device(g) || !c10::impl::hasDeviceGuardImpl(g.device.type())) return {};
  return c10::impl::VirtualGuardImpl(g.device.type()).getStream(g.device);
}

// Before this thread's stream reads what was made on the other one. Autograd orders the gradients of nodes, not what they read.
inline void share(const Tensor& t, const Geometry& g, const std::optional<c10::Stream>& made_on) {
  if (!made_on) return;
  const auto here = stream_of(g);
  if (!here || *here == *made_on) return;
  const c10::impl::VirtualGuardImpl guard(g.device.type());
  c10::Event event(g.device.type());
  event.record(*made_on);
  event.block(*here);
  guard.recordDataPtrOnStream(t.storage().data_ptr(), *here);
}

// capturing(tensor): is a CUDA graph being captured, in which nothing may be looked at?
inline py::object& asks_capturing() {
  static auto* const function = new py::object();
  return *function;
}
inline bool is_captured(const Tensor& t) {
  const py::gil_scoped_acquire gil;
  return asks_capturing() && py::cast<bool>(asks_capturing()(t));
}

}  // namespace leannorm::recording
