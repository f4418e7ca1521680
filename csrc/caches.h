// From which size on results are written past the caches.
#pragma once

#include <cstdint>

namespace leannorm {

// Channels: bytes of the result. Planes are written while their input lies in the cache; columns, which pass by
// twice as a whole, gain sooner.
constexpr int64_t kStreamedPlanes = 8 << 20, kStreamedColumns = 4 << 20;

// The last cache before memory, as one core sees it; 0 bytes where nothing tells.
struct LastCache {
  int64_t bytes, processors;  // that share it
  const char* source;
};
const LastCache& last_cache();

// Rows: bytes that a call reads and writes, by the size of the last cache. While a good part of it takes them
// all, a line written past it would have to be driven out first, at twice the time.
int64_t streamed_traffic();

}  // namespace leannorm
