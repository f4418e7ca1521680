// The size from which on results are written past the caches.
#pragma once

#include <cstdint>

namespace leannorm {

// Channels: bytes of the result. Planes are written while their input is in the cache; columns, which are read twice
// as a whole, gain from a smaller size on.
constexpr int64_t kStreamedPlanes = 8 << 20, kStreamedColumns = 4 << 20;

// The last cache before memory, as one core sees it; 0 bytes if nothing reports it.
struct LastCache {
  int64_t bytes, processors;  // that share it
  const char* source;
};
const LastCache& last_cache();

// Rows: bytes that a call reads and writes, by the size of the last cache. As long as a good part of it holds them
// all, a line written past the cache would first have to be evicted, which takes twice the time.
int64_t streamed_traffic();

}  // namespace leannorm
