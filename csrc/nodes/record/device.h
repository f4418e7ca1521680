// Devices that run asynchronously. The host waits for no value there. A stream that reads what another one made waits for
// it first, and the allocator learns of both.
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

// Makes this thread's stream wait for the one that made the tensor. Autograd does that for gradients, not for what nodes read.
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

// capturing(tensor): whether a CUDA graph is being captured, during which the host may not read values.
inline py::object& asks_capturing() {
  static auto* const function = new py::object();
  return *function;
}
inline bool is_captured(const Tensor& t) {
  const py::gil_scoped_acquire gil;
  return asks_capturing() && py::cast<bool>(asks_capturing()(t));
}

}  // namespace leannorm::recording
