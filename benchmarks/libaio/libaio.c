#include "libaio.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

_Static_assert(sizeof(struct iocb) == 64 && sizeof(struct io_event) == 32, "as the kernel has them");

static int result(long value) { return value < 0 ? -errno : (int)value; }

int io_queue_init(int max_events, io_context_t* context) {
    *context = 0;
    return result(syscall(SYS_io_setup, max_events, context));
}

int io_queue_release(io_context_t context) { return result(syscall(SYS_io_destroy, context)); }

int io_submit(io_context_t context, long count, struct iocb** requests) {
    return result(syscall(SYS_io_submit, context, count, requests));
}

int io_getevents(io_context_t context, long at_least, long at_most, struct io_event* events, struct timespec* timeout) {
    return result(syscall(SYS_io_getevents, context, at_least, at_most, events, timeout));
}

int io_pgetevents(io_context_t context, long at_least, long at_most, struct io_event* events, struct timespec* timeout,
                  sigset_t* blocked) {
    struct {
        const sigset_t* set;
        size_t nbytes;
    } mask = {blocked, 8};
    return result(syscall(SYS_io_pgetevents, context, at_least, at_most, events, timeout, blocked ? &mask : 0));
}
