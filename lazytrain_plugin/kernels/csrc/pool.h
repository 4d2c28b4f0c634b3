// A persistent pool of threads for ranges that take microseconds to milliseconds.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace lazytrain {

// Runs `body(context, chunk)` for chunk 0 .. num_chunks - 1 on the caller and on the pool's threads, in no order.
// A thread that wakes too late finds the job closed and is not waited for, so a short job costs what its chunks cost.
class Pool {
  public:
    using Body = void (*)(const void* context, int64_t chunk);

    explicit Pool(int num_threads);  // the caller counts as one
    ~Pool();
    int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
    void run(Body body, const void* context, int64_t num_chunks);

  private:
    void work();
    void take_chunks();

    // gate_: job number << 17 | open << 16 | threads inside. Entering is one compare-and-swap, so no thread can enter a closed job.
    static constexpr uint64_t kOpen = 1u << 16, kInside = kOpen - 1, kJob = 1u << 17;
    std::atomic<uint64_t> gate_{0};
    std::atomic<int64_t> next_chunk_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    Body body_ = nullptr;
    const void* context_ = nullptr;
    int64_t num_chunks_ = 0;
    std::mutex sleep_mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace lazytrain
