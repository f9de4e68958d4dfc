// Preloaded into a process: counts its calls that change something outside it, over all threads, and at the
// armed one kills the process or fails the call. strace counts each thread apart, so that what two threads do
// at their first call is never told apart; this counts the process.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long count;
static atomic_long armed_at;    // 0: never
static atomic_int armed_error;  // 0: SIGKILL
static atomic_int only_syncs;   // count fsync and fdatasync alone

long fault_count(void) { return atomic_load(&count); }

void fault_arm(long at, int error, int syncs) {
  atomic_store(&count, 0);
  atomic_store(&armed_error, error);
  atomic_store(&only_syncs, syncs);
  atomic_store(&armed_at, at);
}

// 0, or the errno with which this call is to fail.
static int step(int is_sync) {
  if (atomic_load(&armed_at) < 0 || (atomic_load(&only_syncs) && !is_sync)) return 0;
  if (atomic_fetch_add(&count, 1) + 1 != atomic_load(&armed_at)) return 0;
  if (atomic_load(&armed_error)) return atomic_load(&armed_error);
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static int is_outside(int fd) {  // a pipe or a socket between threads of one process changes nothing
  struct stat found;
  return fstat(fd, &found) == 0 && S_ISREG(found.st_mode);
}

#define REAL(name, type, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))
#define FAIL_OR(is_sync, call)         \
  int failed = step(is_sync);          \
  if (failed) return errno = failed, -1; \
  return call

ssize_t write(int fd, const void* data, size_t size) {
  static ssize_t (*real)(int, const void*, size_t);
  if (!real) real = REAL(write, ssize_t, int, const void*, size_t);
  if (!is_outside(fd)) return real(fd, data, size);
  FAIL_OR(0, real(fd, data, size));
}

static ssize_t do_pwrite(int fd, const void* data, size_t size, off64_t at) {
  static ssize_t (*real)(int, const void*, size_t, off64_t);
  if (!real) real = REAL(pwrite64, ssize_t, int, const void*, size_t, off64_t);
  FAIL_OR(0, real(fd, data, size, at));
}
ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) { return do_pwrite(fd, data, size, at); }
ssize_t pwrite(int fd, const void* data, size_t size, off_t at) { return do_pwrite(fd, data, size, at); }

ssize_t send(int fd, const void* data, size_t size, int flags) {  // to PostgreSQL: by libpq
  static ssize_t (*real)(int, const void*, size_t, int);
  if (!real) real = REAL(send, ssize_t, int, const void*, size_t, int);
  int failed = step(0);
  if (failed) return errno = ECONNRESET, -1;
  return real(fd, data, size, flags);
}

int fsync(int fd) { FAIL_OR(1, REAL(fsync, int, int)(fd)); }
int fdatasync(int fd) { FAIL_OR(1, REAL(fdatasync, int, int)(fd)); }
int rename(const char* from, const char* to) { FAIL_OR(0, REAL(rename, int, const char*, const char*)(from, to)); }
int link(const char* from, const char* to) { FAIL_OR(0, REAL(link, int, const char*, const char*)(from, to)); }
int linkat(int a, const char* from, int b, const char* to, int flags) {
  FAIL_OR(0, REAL(linkat, int, int, const char*, int, const char*, int)(a, from, b, to, flags));
}
int unlink(const char* path) { FAIL_OR(0, REAL(unlink, int, const char*)(path)); }
int unlinkat(int fd, const char* path, int flags) {
  FAIL_OR(0, REAL(unlinkat, int, int, const char*, int)(fd, path, flags));
}
int mkdir(const char* path, mode_t mode) { FAIL_OR(0, REAL(mkdir, int, const char*, mode_t)(path, mode)); }
int rmdir(const char* path) { FAIL_OR(0, REAL(rmdir, int, const char*)(path)); }
int fchmod(int fd, mode_t mode) { FAIL_OR(0, REAL(fchmod, int, int, mode_t)(fd, mode)); }
int ftruncate64(int fd, off64_t size) { FAIL_OR(0, REAL(ftruncate64, int, int, off64_t)(fd, size)); }
int ftruncate(int fd, off_t size) { FAIL_OR(0, REAL(ftruncate64, int, int, off64_t)(fd, size)); }

static int do_fallocate(int fd, off64_t at, off64_t size) {  // returns the error instead of setting it
  int failed = step(0);
  return failed ? failed : REAL(posix_fallocate64, int, int, off64_t, off64_t)(fd, at, size);
}
int posix_fallocate64(int fd, off64_t at, off64_t size) { return do_fallocate(fd, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) { return do_fallocate(fd, at, size); }

static int do_open(const char* path, int flags, mode_t mode) {
  static int (*real)(const char*, int, ...);
  if (!real) real = REAL(open64, int, const char*, int, ...);
  if (flags & O_CREAT) {
    int failed = step(0);
    if (failed) return errno = failed, -1;
  }
  return real(path, flags, mode);
}
#define MODE_OF(flags, mode)              \
  mode_t mode = 0;                        \
  if ((flags) & (O_CREAT | O_TMPFILE)) {  \
    va_list list;                         \
    va_start(list, flags);                \
    mode = va_arg(list, mode_t);          \
    va_end(list);                         \
  }
int open64(const char* path, int flags, ...) {
  MODE_OF(flags, mode)
  return do_open(path, flags, mode);
}
int open(const char* path, int flags, ...) {
  MODE_OF(flags, mode)
  return do_open(path, flags, mode);
}
