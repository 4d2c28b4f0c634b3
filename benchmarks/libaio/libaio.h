// The part of the libaio interface that DeepSpeed's async_io uses, over the kernel's own calls, for machines where the
// library's headers are not installed. Structures are laid out as <linux/aio_abi.h> has them.
#pragma once

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct io_context* io_context_t;

struct io_iocb_common {
    void* buf;
    uint64_t nbytes;
    int64_t offset;
    uint64_t reserved;
    uint32_t flags;
    uint32_t eventfd;
};

struct iocb {  // 64 bytes
    void* data;
    uint32_t key;
    uint32_t rw_flags;
    uint16_t aio_lio_opcode;
    int16_t aio_reqprio;
    int32_t aio_fildes;
    union {
        struct io_iocb_common c;
    } u;
};

struct io_event {  // 32 bytes
    void* data;
    struct iocb* obj;
    uint64_t res;
    uint64_t res2;
};

// All return the negative error number when they fail.
int io_queue_init(int max_events, io_context_t* context);
int io_queue_release(io_context_t context);
int io_submit(io_context_t context, long count, struct iocb** requests);
int io_getevents(io_context_t context, long at_least, long at_most, struct io_event* events, struct timespec* timeout);
int io_pgetevents(io_context_t context, long at_least, long at_most, struct io_event* events, struct timespec* timeout,
                  sigset_t* blocked);

static inline void io_prep(struct iocb* request, int opcode, int fd, void* memory, size_t nbytes, long long offset) {
    memset(request, 0, sizeof(*request));
    request->aio_fildes = fd;
    request->aio_lio_opcode = (uint16_t)opcode;
    request->u.c.buf = memory;
    request->u.c.nbytes = nbytes;
    request->u.c.offset = offset;
}

static inline void io_prep_pread(struct iocb* request, int fd, void* memory, size_t nbytes, long long offset) {
    io_prep(request, 0, fd, memory, nbytes, offset);
}

static inline void io_prep_pwrite(struct iocb* request, int fd, void* memory, size_t nbytes, long long offset) {
    io_prep(request, 1, fd, memory, nbytes, offset);
}

#ifdef __cplusplus
}
#endif
