// What a failing disk under a mapped file does to who touches the mapping is SIGBUS: no error to return, no exception to raise, and
// by default no word. The handler here says which file it was and what to do, and then lets the signal do what it would have done.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>

namespace lazytrain {
namespace {

constexpr int kMost = 4096;

struct Mapped {
    std::atomic<uintptr_t> start{0};  // 0: free
    std::atomic<uintptr_t> end{0};
    char message[640];
};

Mapped table[kMost];
std::atomic<int> used{0};  // entries that were ever taken
std::mutex adding;
struct sigaction before;

// Only what a signal handler may do: no locks, no allocation.
void on_bus_error(int, siginfo_t* info, void*) {
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    for (int i = 0, end = used.load(); i < end; i++) {
        if (table[i].start.load() == 0 || address < table[i].start.load() || address >= table[i].end.load()) continue;
        const ssize_t written = write(STDERR_FILENO, table[i].message, strlen(table[i].message));
        (void)written;
        break;
    }
    sigaction(SIGBUS, &before, nullptr);  // on return the access fails again, and whoever was asked before us is asked
}

}  // namespace
}  // namespace lazytrain

using namespace lazytrain;

#pragma GCC visibility push(default)
extern "C" {

// Watches a mapping of `path`; returns its entry, or -1 when there are too many.
int lazytrain_mapping_add(void* start, int64_t nbytes, const char* path) {
    std::lock_guard<std::mutex> lock(adding);
    int i = 0;
    while (i < kMost && table[i].start.load() != 0) i++;
    if (i == kMost) return -1;
    std::snprintf(table[i].message, sizeof(table[i].message),
                  "LazyTrain: weights on NVMe can't be read: the disk under %.380s failed, or another program truncated the file. "
                  "Look at `dmesg`, name another disk in \"nvme_path\", then resume from the last checkpoint.\n",
                  path);
    table[i].end = reinterpret_cast<uintptr_t>(start) + nbytes;
    table[i].start = reinterpret_cast<uintptr_t>(start);
    if (i >= used.load()) used = i + 1;
    struct sigaction now;
    if (sigaction(SIGBUS, nullptr, &now) == 0 && now.sa_sigaction != on_bus_error) {
        before = now;
        struct sigaction ours = {};
        ours.sa_sigaction = on_bus_error;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, nullptr);
    }
    return i;
}

void lazytrain_mapping_remove(int entry) {
    if (entry >= 0 && entry < kMost) table[entry].start = 0;
}

}  // extern "C"
#pragma GCC visibility pop
