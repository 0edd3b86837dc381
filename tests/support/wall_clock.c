/* Preloaded into a process, moves its wall clock by what a file says at each look at it.
 *
 * The file holds one 64-bit number, in nanoseconds; `PGLOCK_TEST_CLOCK` names it. Every other
 * clock stays, and so does what the kernel does with it: sleeps, timers, time-outs. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *off;

__attribute__((constructor)) static void open_clock(void)
{
    const char *name = getenv("PGLOCK_TEST_CLOCK");
    int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *page = mmap(NULL, sizeof *off, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED)
        off = page;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && off && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long moved = *off;
        now->tv_sec += moved / 1000000000;
        now->tv_nsec += moved % 1000000000;
        if (now->tv_nsec < 0) {
            now->tv_sec--;
            now->tv_nsec += 1000000000;
        } else if (now->tv_nsec >= 1000000000) {
            now->tv_sec++;
            now->tv_nsec -= 1000000000;
        }
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now)
{
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise))
        return -1;
    if (now)
        *now = precise.tv_sec;
    return precise.tv_sec;
}
