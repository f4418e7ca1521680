// From which size on results are written past the caches.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace leannorm {

// Channels: bytes of the result. Planes are written while their input lies in the cache; columns, which pass by
// twice as a whole, gain sooner.
constexpr int64_t kStreamedPlanes = 8 << 20, kStreamedColumns = 4 << 20;

inline int64_t last_cache() {
  // LEANNORM_CACHE in the environment is another size in bytes, so that a test can have either way.
  if (const char* bytes = std::getenv("LEANNORM_CACHE")) return std::atoll(bytes);
#if defined(_SC_LEVEL3_CACHE_SIZE)
  return sysconf(_SC_LEVEL3_CACHE_SIZE);
#else
  return 0;
#endif
}

// Rows: bytes that a call reads and writes, by the size of the last cache. While a good part of it takes them
// all, a line written past it would have to be driven out first, at twice the time.
inline int64_t streamed_traffic() {
  static const int64_t share = last_cache() / 6, least = 16 << 20;
  return share > least ? share : least;
}

}  // namespace leannorm
