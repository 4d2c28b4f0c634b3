// Disk requests on threads of their own: whole blocks by pread/pwrite, many in flight, a hash of every block. The callers
// (runtime/nvme/io.py) see jobs: groups of requests with one outcome. After the first error nothing more is done: a block that was
// lost must not be followed by one that assumes it.
//
// Threads and not io_uring or libaio: at blocks of megabytes a disk is saturated by a handful of blocked threads, which need no
// privilege, no library and no kernel option, and which have a processor for the hash.
//
// Reads and writes wait in queues of their own, and where both wait they get half of the threads each: in one queue a unit's
// hundreds of blocks in one direction would keep a disk that can do both at once from the other.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace lazytrain {
namespace {

enum Kind : int32_t { kRead = 0, kWrite = 1, kWriteBack = 2, kWarm = 3 };
constexpr int32_t kDropFromCache = 1;  // flag: the page cache need not keep what was read or written
constexpr int32_t kUrgent = 2;         // flag: a read that goes before those that wait

// Codes beside errno, outside its range.
constexpr int32_t kShort = 1000, kChecksum = 1001, kStopped = 1002;

struct Request {
    int32_t fd;
    int32_t kind;
    int32_t flags;
    int32_t unused;
    int64_t offset;
    void* memory;
    int64_t nbytes;
    uint64_t* checksum;  // null: unchecked; 0 in it: never written, reads as zeros
};

struct Failure {
    int32_t code;
    int32_t fd;
    int32_t kind;
    int32_t unused;
    int64_t offset;
    int64_t nbytes;
};

struct Job {
    int64_t remaining = 0;
    bool failed = false;
};

struct Queued {
    Request request;
    std::shared_ptr<Job> job;
};

uint64_t rotate(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

// A hash of a block against disk faults, not against an adversary: eight independent multiply-rotate chains, so that the processor
// overlaps them (memory speed without special instructions), then one avalanche over chains, tail and length. Never 0.
uint64_t hash_block(const void* memory, int64_t nbytes) {
    constexpr uint64_t kOdd1 = 0x9E3779B97F4A7C15ull, kOdd2 = 0xC2B2AE3D27D4EB4Full;
    const auto* bytes = static_cast<const unsigned char*>(memory);
    uint64_t chain[8];
    for (int i = 0; i < 8; i++) chain[i] = kOdd1 * (i + 1);
    int64_t position = 0;
    for (; position + 64 <= nbytes; position += 64)
        for (int i = 0; i < 8; i++) {
            uint64_t word;
            std::memcpy(&word, bytes + position + 8 * i, 8);
            chain[i] = rotate((chain[i] ^ word) * kOdd1, 29);
        }
    uint64_t total = static_cast<uint64_t>(nbytes) * kOdd2;
    auto mix = [&](uint64_t word) {
        total = (total ^ word) * kOdd2;
        total ^= total >> 31;
    };
    for (uint64_t word : chain) mix(word);
    for (; position < nbytes; position++) mix(bytes[position] + 1);
    return total ? total : 1;
}

class IoEngine {
  public:
    explicit IoEngine(int num_threads) {
        for (int i = 0; i < num_threads; i++) threads_.emplace_back([this] { work(); });
    }

    void finish() {  // what was submitted is done, what comes later fails
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (stop_) return;
            stop_ = true;
        }
        wake_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    std::shared_ptr<Job> submit(const Request* requests, int64_t count) {
        auto job = std::make_shared<Job>();
        std::lock_guard<std::mutex> lock(mutex_);
        if (stop_ && !failure_.code && count) {
            const Request& r = requests[0];
            failure_ = {kStopped, r.fd, r.kind, 0, r.offset, r.nbytes};
        }
        if (failure_.code) {
            job->failed = true;
            return job;
        }
        job->remaining = count;
        for (int64_t i = 0; i < count; i++) queue_of(requests[i]).push_back({requests[i], job});
        wake_.notify_all();
        return job;
    }

    // 0: not yet; 1: done; -1: failed, see `failure`.
    int wait(const Job& job, int64_t timeout_ms, Failure* failure) {
        std::unique_lock<std::mutex> lock(mutex_);
        done_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return job.remaining == 0; });
        if (job.failed) *failure = failure_;
        if (job.remaining) return 0;
        return job.failed ? -1 : 1;
    }

    void set_delay(int64_t delay_us) {
        std::lock_guard<std::mutex> lock(mutex_);
        delay_us_ = delay_us;
    }

    void moved(int64_t* read_bytes, int64_t* written_bytes) {
        std::lock_guard<std::mutex> lock(mutex_);
        *read_bytes = read_bytes_;
        *written_bytes = written_bytes_;
    }

  private:
    static bool reads(const Request& r) { return r.kind == kRead || r.kind == kWarm; }

    std::deque<Queued>& queue_of(const Request& r) {
        return !reads(r) ? writes_ : r.flags & kUrgent ? urgent_reads_ : reads_;
    }

    // Under the lock. Null: nothing waits.
    std::deque<Queued>* next_queue() {
        std::deque<Queued>& first = urgent_reads_.empty() ? reads_ : urgent_reads_;
        if (first.empty()) return writes_.empty() ? nullptr : &writes_;
        return !writes_.empty() && num_writing_ < num_reading_ ? &writes_ : &first;
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            wake_.wait(lock, [&] { return stop_ || next_queue() != nullptr; });
            std::deque<Queued>* const queue = next_queue();
            if (queue == nullptr) return;
            Queued next = std::move(queue->front());
            queue->pop_front();
            int& in_flight = reads(next.request) ? num_reading_ : num_writing_;
            in_flight++;
            const int64_t delay_us = delay_us_;
            int32_t code = kStopped;
            if (!failure_.code) {
                lock.unlock();
                if (delay_us) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
                code = run(next.request);
                lock.lock();
            }
            in_flight--;
            if (code) {
                next.job->failed = true;
                const Request& r = next.request;
                if (!failure_.code) failure_ = {code, r.fd, r.kind, 0, r.offset, r.nbytes};
            } else {
                (reads(next.request) ? read_bytes_ : written_bytes_) += next.request.nbytes;
            }
            if (--next.job->remaining == 0) done_.notify_all();
        }
    }

    static int32_t run(const Request& r) {
        if (r.kind == kWriteBack) {
            // `memory` is a mapping of the range: its page table entries go first, since pages that are mapped stay in the
            // cache. The mapping shows the same bytes before and after.
            if (r.memory) madvise(r.memory, r.nbytes, MADV_DONTNEED);
            return write_back(r);
        }
        if (r.kind == kWarm) return warm(r);
        if (r.kind == kWrite && r.checksum) *r.checksum = hash_block(r.memory, r.nbytes);
        if (r.kind == kRead && r.checksum && *r.checksum == 0) {
            std::memset(r.memory, 0, r.nbytes);
            return 0;
        }
        int64_t done = 0;
        while (done < r.nbytes) {
            char* at = static_cast<char*>(r.memory) + done;
            const ssize_t moved = r.kind == kRead ? pread(r.fd, at, r.nbytes - done, r.offset + done)
                                                  : pwrite(r.fd, at, r.nbytes - done, r.offset + done);
            if (moved < 0 && errno == EINTR) continue;
            if (moved < 0) return errno;
            if (moved == 0) return kShort;
            done += moved;
        }
        if (r.kind == kRead && r.checksum && *r.checksum != hash_block(r.memory, r.nbytes)) return kChecksum;
        if (r.kind == kRead && r.flags & kDropFromCache) posix_fadvise(r.fd, r.offset, r.nbytes, POSIX_FADV_DONTNEED);
        if (r.kind == kWrite && r.flags & kDropFromCache) return write_back(r);
        return 0;
    }

    // Into the page cache, by reading: an error comes back as one here, and as a fatal signal to who touches a mapping.
    static int32_t warm(const Request& r) {
        std::vector<char> scratch(std::min<int64_t>(r.nbytes, 1 << 20));
        for (int64_t done = 0; done < r.nbytes;) {
            const ssize_t moved =
                pread(r.fd, scratch.data(), std::min<int64_t>(r.nbytes - done, scratch.size()), r.offset + done);
            if (moved < 0 && errno == EINTR) continue;
            if (moved <= 0) return moved < 0 ? errno : kShort;
            done += moved;
        }
        return 0;
    }

    // Dirty pages of the range to the disk, then out of the page cache.
    static int32_t write_back(const Request& r) {
        constexpr unsigned kAll = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
        if (sync_file_range(r.fd, r.offset, r.nbytes, kAll) != 0 && errno != ENOSYS && errno != ESPIPE) return errno;
        posix_fadvise(r.fd, r.offset, r.nbytes, POSIX_FADV_DONTNEED);
        return 0;
    }

    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::deque<Queued> urgent_reads_, reads_, writes_;
    int num_reading_ = 0, num_writing_ = 0;  // in flight
    std::vector<std::thread> threads_;
    bool stop_ = false;
    Failure failure_ = {};
    int64_t delay_us_ = 0, read_bytes_ = 0, written_bytes_ = 0;
};

}  // namespace
}  // namespace lazytrain

using namespace lazytrain;

#pragma GCC visibility push(default)
extern "C" {

void* lazytrain_io_open(int num_threads) { return new IoEngine(num_threads); }

// Ends the threads. The object stays: another thread may be waiting in it.
void lazytrain_io_close(void* engine) { static_cast<IoEngine*>(engine)->finish(); }

void* lazytrain_io_submit(void* engine, const Request* requests, int64_t count) {
    return new std::shared_ptr<Job>(static_cast<IoEngine*>(engine)->submit(requests, count));
}

int lazytrain_io_wait(void* engine, void* job, int64_t timeout_ms, Failure* failure) {
    return static_cast<IoEngine*>(engine)->wait(**static_cast<std::shared_ptr<Job>*>(job), timeout_ms, failure);
}

void lazytrain_io_forget(void* job) { delete static_cast<std::shared_ptr<Job>*>(job); }

void lazytrain_io_set_delay(void* engine, int64_t delay_us) { static_cast<IoEngine*>(engine)->set_delay(delay_us); }

void lazytrain_io_moved(void* engine, int64_t* read_bytes, int64_t* written_bytes) {
    static_cast<IoEngine*>(engine)->moved(read_bytes, written_bytes);
}

uint64_t lazytrain_io_hash(const void* memory, int64_t nbytes) { return hash_block(memory, nbytes); }

}  // extern "C"
#pragma GCC visibility pop
