// The library's own threads: they sleep between calls, so that torch's keep the cores.
#pragma once

#include <cstdint>
#include <functional>

namespace memkv {

int num_threads();

// Throws std::invalid_argument unless 1 <= count <= 1024. Waits for a running parallel_for.
void set_num_threads(int count);

// Runs work(0) .. work(count - 1), each once, on the caller and the pool's threads. Which thread
// runs which is open: a result may depend on the index only. The first exception is thrown again
// here. A second caller at the same time runs its work alone.
void parallel_for(int64_t count, const std::function<void(int64_t)>& work);

}  // namespace memkv
