#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace lazytrain {
namespace {

constexpr int kSpins = 4000;  // some 40-100 us: longer than the gap between the tensors of a unit, short for everyone else

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

// Denormals and rounding as IEEE has them, whatever the calling process set (torch.set_flush_denormal); restored at the end.
class IeeeMode {
  public:
#if defined(__x86_64__)
    IeeeMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~IeeeMode() { _mm_setcsr(saved_); }

  private:
    unsigned saved_;
#endif
};

}  // namespace

Pool::Pool(int num_threads) {
    for (int i = 1; i < num_threads; i++) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(sleep_mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::take_chunks() {
    for (;;) {
        const int64_t chunk = next_chunk_.fetch_add(1, std::memory_order_relaxed);
        if (chunk >= num_chunks_) return;
        body_(context_, chunk);
    }
}

void Pool::run(Body body, const void* context, int64_t num_chunks) {
    IeeeMode ieee;
    if (workers_.empty() || num_chunks <= 1) {
        for (int64_t chunk = 0; chunk < num_chunks; chunk++) body(context, chunk);
        return;
    }
    body_ = body;
    context_ = context;
    num_chunks_ = num_chunks;
    next_chunk_.store(0, std::memory_order_relaxed);
    gate_.store(((gate_.load() / kJob + 1) * kJob) | kOpen);  // nobody is inside: the last job waited for that
    if (sleepers_.load() > 0) {
        { std::lock_guard<std::mutex> lock(sleep_mutex_); }  // a thread about to sleep has either seen the job or is asleep by now
        wake_.notify_all();
    }
    take_chunks();
    gate_.fetch_and(~kOpen);
    for (int spins = 0; (gate_.load(std::memory_order_acquire) & kInside) != 0; spins++)
        spins < kSpins ? relax() : std::this_thread::yield();
}

void Pool::work() {
    IeeeMode ieee;
    uint64_t seen = 0;
    while (!stop_.load(std::memory_order_relaxed)) {
        uint64_t gate = gate_.load();
        for (int spins = 0; gate / kJob == seen && spins < kSpins && !stop_.load(std::memory_order_relaxed); spins++) {
            relax();
            gate = gate_.load();
        }
        if (gate / kJob == seen) {
            std::unique_lock<std::mutex> lock(sleep_mutex_);
            sleepers_.fetch_add(1);
            wake_.wait(lock, [&] { return stop_.load() || gate_.load() / kJob != seen; });
            sleepers_.fetch_sub(1);
            continue;
        }
        seen = gate / kJob;
        bool entered = false;
        while ((gate & kOpen) && gate / kJob == seen && !(entered = gate_.compare_exchange_weak(gate, gate + 1))) {
        }
        if (!entered) continue;
        take_chunks();
        gate_.fetch_sub(1);
    }
}

}  // namespace lazytrain
