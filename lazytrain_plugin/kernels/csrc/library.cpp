// The C ABI of the library (native.py is its only caller): picks the instruction set, owns the thread pool, cuts work into chunks.
// Nothing here or below knows torch or Python; pointers and counts are checked by the caller.
#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace lazytrain {
namespace {

constexpr int64_t kSmallestChunk = 16 * 1024;   // elements: some 10 us of work, and a whole number of blocks and rows
constexpr int64_t kLargestChunk = 128 * 1024;

std::mutex g_mutex;     // one job at a time; the pool is made and replaced under it
Pool* g_pool = nullptr;
int g_num_threads = 1;
const Kernels* g_kernels = nullptr;

bool runs_here(const Kernels& kernels) {
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (&kernels == &kAvx512vbmi) return avx512 && __builtin_cpu_supports("avx512vbmi");
    if (&kernels == &kAvx512) return avx512;
    if (&kernels == &kAvx2) return __builtin_cpu_supports("avx2");
#endif
    return &kernels == &kGeneric;
}

const Kernels* const kTables[] = {
#if defined(__x86_64__)
    &kAvx512vbmi, &kAvx512, &kAvx2,
#endif
    &kGeneric};

const Kernels& kernels() {
    if (!g_kernels)
        for (const Kernels* table : kTables)
            if (!g_kernels && runs_here(*table)) g_kernels = table;
    return *g_kernels;
}

void after_fork_in_child() {  // the threads are gone and the mutex may be held by one of them: start afresh, leak the old pool
    g_pool = nullptr;
    new (&g_mutex) std::mutex;
}

template <class Function>
void run_chunks(int64_t num_chunks, const Function& function) {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (!g_pool) {
        static const int registered = pthread_atfork(nullptr, nullptr, after_fork_in_child);
        (void)registered;
        g_pool = new Pool(g_num_threads);
    }
    g_pool->run([](const void* f, int64_t chunk) { (*static_cast<const Function*>(f))(chunk); }, &function, num_chunks);
}

// Elements of a chunk: whole blocks, few enough to balance the threads, enough to stream.
int64_t chunk_for(int64_t numel) {
    const int64_t chunk = numel / (8 * std::max(1, g_num_threads)) / kLanes * kLanes;
    return std::min(std::max(chunk, kSmallestChunk), kLargestChunk);
}

// function(begin, end) over [0, numel) in chunks.
template <class Function>
void run_ranges(int64_t numel, const Function& function) {
    const int64_t chunk = chunk_for(numel);
    run_chunks((numel + chunk - 1) / chunk,
               [&](int64_t c) { function(c * chunk, std::min(numel, (c + 1) * chunk)); });
}

}  // namespace
}  // namespace lazytrain

using namespace lazytrain;

#pragma GCC visibility push(default)
extern "C" {

int lazytrain_abi_version() { return 3; }

const char* lazytrain_isa() { return kernels().name; }

// Null name: the best set again. Returns 0, or -1 when the name is unknown or the processor lacks it.
int lazytrain_force_isa(const char* name) {
    if (!name) {
        g_kernels = nullptr;
        return 0;
    }
    for (const Kernels* table : kTables)
        if (std::strcmp(table->name, name) == 0 && runs_here(*table)) {
            g_kernels = table;
            return 0;
        }
    return -1;
}

int lazytrain_num_threads() { return g_num_threads; }

void lazytrain_set_num_threads(int num_threads) {
    std::lock_guard<std::mutex> lock(g_mutex);
    if (num_threads == g_num_threads) return;
    delete g_pool;
    g_pool = nullptr;
    g_num_threads = std::max(1, num_threads);
}

// Updates of several tensors as one job, so that threads wait for each other once and not after every tensor (with a thread more than
// cores, each such wait can cost a time slice). An item has 8-bit states where exp_avg_codes is set.
void lazytrain_adamw_many(const AdamW* items, int64_t num_items) {
    int64_t numel = 0;
    for (int64_t item = 0; item < num_items; item++) numel += items[item].numel;
    const int64_t chunk = chunk_for(numel);
    std::vector<int64_t> first_chunk(num_items + 1, 0);
    for (int64_t item = 0; item < num_items; item++)
        first_chunk[item + 1] = first_chunk[item] + (items[item].numel + chunk - 1) / chunk;
    run_chunks(first_chunk[num_items], [&](int64_t c) {
        const int64_t item = std::upper_bound(first_chunk.begin(), first_chunk.end(), c) - first_chunk.begin() - 1;
        const AdamW& a = items[item];
        const int64_t begin = (c - first_chunk[item]) * chunk, end = std::min(a.numel, begin + chunk);
        a.exp_avg_codes ? kernels().adamw_8bit(a, begin, end) : kernels().adamw_fp32(a, begin, end);
    });
}

void lazytrain_quantize(const float* values, uint8_t* codes, float* scales, const CodeBook* book, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) { kernels().quantize(values, codes, scales, *book, begin, end); });
}

void lazytrain_dequantize(const uint8_t* codes, const float* scales, float* values, const CodeBook* book, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) { kernels().dequantize(codes, scales, values, *book, begin, end); });
}

void lazytrain_split(const float* master, uint16_t* weight, int16_t* remainder, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) { kernels().split(master, weight, remainder, begin, end); });
}

void lazytrain_join(const uint16_t* weight, const int16_t* remainder, float* master, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) { kernels().join(weight, remainder, master, begin, end); });
}

void lazytrain_accumulate(float* accumulator, const void* gradient, int gradient_is_bf16, int first, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) {
        kernels().accumulate(accumulator, gradient, gradient_is_bf16, first, begin, end);
    });
}

// lanes: [1024], written. A part never depends on the number of threads, so neither does the sum.
void lazytrain_sum_squares(const Gradient* gradient, int64_t numel, double* lanes) {
    const int64_t rows = (numel + kLanes - 1) / kLanes, num_parts = std::min(rows, kParts);
    if (num_parts <= 1) return kernels().sum_squares_part(*gradient, numel, 0, lanes);
    std::unique_ptr<double[]> parts(new double[num_parts * kLanes]);
    const int64_t parts_per_chunk = std::max<int64_t>(1, num_parts / 64);
    run_chunks((num_parts + parts_per_chunk - 1) / parts_per_chunk, [&](int64_t c) {
        for (int64_t p = c * parts_per_chunk; p < std::min(num_parts, (c + 1) * parts_per_chunk); p++)
            kernels().sum_squares_part(*gradient, numel, p, parts.get() + p * kLanes);
    });
    kernels().add_lanes(lanes, parts.get(), num_parts);
}

void lazytrain_encode_gradient(const void* values, int is_bf16, const CodedGradient* coded, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) { kernels().encode_gradient(values, is_bf16, *coded, begin, end); });
}

void lazytrain_decode_gradient(const Gradient* gradient, float* values, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) { kernels().decode_gradient(*gradient, values, begin, end); });
}

// total (16 bits) = what came (8 bits) if first, else total + what came.
void lazytrain_add_codes(const CodedGradient* total, const Gradient* arrived, int first, int64_t numel) {
    run_ranges(numel, [&](int64_t begin, int64_t end) { kernels().add_codes(*total, *arrived, first, begin, end); });
}

}  // extern "C"
#pragma GCC visibility pop
