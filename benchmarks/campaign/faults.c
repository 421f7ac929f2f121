/* Faults in the calls by which a process changes files below one folder; loaded with LD_PRELOAD.

   `campaign_arm` begins to count such calls. At call number `at` the process is killed before it, or in the middle of
   it (half of a write), or the call fails with an error number, once. `campaign_record` writes down each call instead,
   so that what a power loss would leave can be told. Files are those whose path begins with the folder. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { KILL_BEFORE = -1, KILL_WITHIN = -2 }; /* above 0: an error number */

static char folder[PATH_MAX];
static size_t folder_length; /* 0: nothing is watched */
static atomic_long calls;
static long at;
static int action, with_reads;
static int record_to = -1;


static pthread_mutex_t record_order = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

void campaign_arm(const char *where, long call, int what, int reads) {
  strncpy(folder, where, sizeof folder - 1);
  at = call, action = what, with_reads = reads;
  atomic_store(&calls, 0);
  folder_length = strlen(folder);
}
void campaign_record(const char *where, int file) {
  record_to = file;
  campaign_arm(where, 0, 0, 0);
}
long campaign_calls(void) { return atomic_load(&calls); }
void campaign_disarm(void) { folder_length = 0; }

static int watched(const char *path) {
  return folder_length && !strncmp(path, folder, folder_length) && (path[folder_length] == '/' || !path[folder_length]);
}
static int path_of(int file, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t size = readlink(link, path, PATH_MAX - 1);
  if (size < 0) return 0;
  path[size] = 0;
  return watched(path);
}
static int path_at(int parent, const char *name, char *path) {
  if (name[0] == '/' || parent == AT_FDCWD) {
    if (name[0] == '/') snprintf(path, PATH_MAX, "%s", name);
    else if (!getcwd(path, PATH_MAX)) return 0;
    else snprintf(path + strlen(path), PATH_MAX - strlen(path), "/%s", name);
    return watched(path);
  }
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", parent);
  ssize_t size = readlink(link, path, PATH_MAX - 1);
  if (size < 0) return 0;
  snprintf(path + size, PATH_MAX - size, "/%s", name);
  return watched(path);
}

/* Counts a call. Returns 0 to go on, or -1 with errno set; does not return where the process is killed before it. */
static int strike(int torn_possible) {
  if (record_to >= 0 || atomic_fetch_add(&calls, 1) + 1 != at) return 0;
  if (action > 0) {
    errno = action;
    return -1;
  }
  if (action == KILL_WITHIN && torn_possible) return 1;
  kill(getpid(), SIGKILL);
  pause();
  return 0;
}
static void die(void) {
  kill(getpid(), SIGKILL);
  pause();
}

/* A record: kind, numbers, two texts, bytes. */
static void note(char kind, int64_t inode, int64_t offset, const char *one, const char *two, const void *data, int64_t size) {
  int32_t lengths[2] = {one ? strlen(one) : 0, two ? strlen(two) : 0};
  struct iovec parts[] = {{&kind, 1}, {&inode, 8}, {&offset, 8}, {&size, 8}, {lengths, 8},
                          {(void *)one, lengths[0]}, {(void *)two, lengths[1]}, {(void *)data, data ? size : 0}};
  (void)!REAL(writev)(record_to, parts, 8);
}
static int64_t inode_of(int file) {
  struct stat about;
  return fstat(file, &about) ? -1 : (int64_t)about.st_ino;
}
#define RECORDED(call, ...)                     \
  if (record_to < 0) return call;               \
  pthread_mutex_lock(&record_order);            \
  __typeof__(call) found = call;                \
  int kept = errno;                             \
  if (found >= 0) { __VA_ARGS__; }              \
  pthread_mutex_unlock(&record_order);          \
  errno = kept;                                 \
  return found;

#define WRITER(name, parameters, arguments, data, size, where)                                   \
  ssize_t name parameters {                                                                      \
    char path[PATH_MAX];                                                                         \
    if (!folder_length || !path_of(file, path)) return REAL(name) arguments;                     \
    int struck = strike(1);                                                                      \
    if (struck < 0) return -1;                                                                   \
    if (struck) {                                                                                \
      size_t half = (size) / 2;                                                                  \
      (void)!syscall(SYS_pwrite64, file, data, half, (off_t)(where));                            \
      die();                                                                                     \
    }                                                                                            \
    off_t offset = where;                                                                        \
    RECORDED(REAL(name) arguments, note('w', inode_of(file), offset, path, 0, data, found))      \
  }
static off_t place(int file) {
  if (fcntl(file, F_GETFL) & O_APPEND) {
    struct stat about;
    return fstat(file, &about) ? 0 : about.st_size;
  }
  return lseek(file, 0, SEEK_CUR);
}
WRITER(write, (int file, const void *data, size_t size), (file, data, size), data, size, place(file))
WRITER(pwrite, (int file, const void *data, size_t size, off_t to), (file, data, size, to), data, size, to)
WRITER(pwrite64, (int file, const void *data, size_t size, off_t to), (file, data, size, to), data, size, to)

/* Joined, so that a half of it is a half and a record has one piece. */
static void *joined(const struct iovec *parts, int count, size_t *size) {
  *size = 0;
  for (int i = 0; i < count; i++) *size += parts[i].iov_len;
  char *all = malloc(*size + 1), *end = all;
  for (int i = 0; i < count; end += parts[i].iov_len, i++) memcpy(end, parts[i].iov_base, parts[i].iov_len);
  return all;
}
ssize_t writev(int file, const struct iovec *parts, int count) {
  char path[PATH_MAX];
  if (!folder_length || !path_of(file, path)) return REAL(writev)(file, parts, count);
  size_t size;
  void *all = joined(parts, count, &size);
  ssize_t found = write(file, all, size);
  free(all);
  return found;
}
ssize_t pwritev(int file, const struct iovec *parts, int count, off_t to) {
  char path[PATH_MAX];
  if (!folder_length || !path_of(file, path)) return REAL(pwritev)(file, parts, count, to);
  size_t size;
  void *all = joined(parts, count, &size);
  ssize_t found = pwrite(file, all, size, to);
  free(all);
  return found;
}
ssize_t pwritev64(int file, const struct iovec *parts, int count, off_t to) { return pwritev(file, parts, count, to); }

/* Copies within the kernel are refused, as some file systems do: who calls them falls back to read and write. */
ssize_t copy_file_range(int in, off64_t *a, int out, off64_t *b, size_t size, unsigned flags) {
  char path[PATH_MAX];
  if (folder_length && path_of(out, path)) return errno = EXDEV, -1;
  return REAL(copy_file_range)(in, a, out, b, size, flags);
}
#define SENDFILE(name)                                                             \
  ssize_t name(int out, int in, off_t *from, size_t size) {                        \
    char path[PATH_MAX];                                                           \
    if (folder_length && path_of(out, path)) return errno = EINVAL, -1;            \
    return ((ssize_t(*)(int, int, off_t *, size_t))real(#name))(out, in, from, size); \
  }
SENDFILE(sendfile)
SENDFILE(sendfile64)

#define ON_FILE(name, kind)                                                       \
  int name(int file) {                                                            \
    char path[PATH_MAX];                                                          \
    if (!folder_length || !path_of(file, path)) return REAL(name)(file);          \
    if (strike(0) < 0) return -1;                                                 \
    RECORDED(REAL(name)(file), note(kind, inode_of(file), 0, path, 0, 0, 0))      \
  }
ON_FILE(fsync, 's')
ON_FILE(fdatasync, 's')

#define TRUNCATE(name)                                                            \
  int name(int file, off_t size) {                                                \
    char path[PATH_MAX];                                                          \
    if (!folder_length || !path_of(file, path)) return REAL(name)(file, size);    \
    if (strike(0) < 0) return -1;                                                 \
    RECORDED(REAL(name)(file, size), note('t', inode_of(file), size, path, 0, 0, 0)) \
  }
TRUNCATE(ftruncate)
TRUNCATE(ftruncate64)

static int two_paths(int from, const char *a, int to, const char *b, char *one, char *two) {
  int first = path_at(from, a, one), second = path_at(to, b, two);
  return first || second;
}
#define TWO(name, parameters, arguments, from, a, to, b, kind)                           \
  int name parameters {                                                                  \
    char one[PATH_MAX], two[PATH_MAX];                                                   \
    if (!folder_length || !two_paths(from, a, to, b, one, two)) return REAL(name) arguments; \
    if (strike(0) < 0) return -1;                                                        \
    RECORDED(REAL(name) arguments, note(kind, 0, 0, one, two, 0, 0))                     \
  }
TWO(rename, (const char *a, const char *b), (a, b), AT_FDCWD, a, AT_FDCWD, b, 'r')
TWO(renameat, (int f, const char *a, int t, const char *b), (f, a, t, b), f, a, t, b, 'r')
TWO(renameat2, (int f, const char *a, int t, const char *b, unsigned n), (f, a, t, b, n), f, a, t, b, 'r')
TWO(link, (const char *a, const char *b), (a, b), AT_FDCWD, a, AT_FDCWD, b, 'l')
TWO(linkat, (int f, const char *a, int t, const char *b, int n), (f, a, t, b, n), f, a, t, b, 'l')

#define ONE(name, parameters, arguments, parent, given, kind)                            \
  int name parameters {                                                                  \
    char path[PATH_MAX];                                                                 \
    if (!folder_length || !path_at(parent, given, path)) return REAL(name) arguments;    \
    if (strike(0) < 0) return -1;                                                        \
    RECORDED(REAL(name) arguments, note(kind, 0, 0, path, 0, 0, 0))                      \
  }
ONE(unlink, (const char *a), (a), AT_FDCWD, a, 'u')
ONE(unlinkat, (int p, const char *a, int n), (p, a, n), p, a, 'u')
ONE(rmdir, (const char *a), (a), AT_FDCWD, a, 'u')
ONE(mkdir, (const char *a, mode_t m), (a, m), AT_FDCWD, a, 'm')
ONE(mkdirat, (int p, const char *a, mode_t m), (p, a, m), p, a, 'm')

/* An open counts where it makes or empties a file, or for reading where reads count; a folder that is opened does not. */
static int opened(int parent, const char *given, int flags, mode_t mode) {
  char path[PATH_MAX];
  int changes = flags & (O_CREAT | O_TRUNC);
  if (!folder_length || !path_at(parent, given, path) || !(changes || (with_reads && !(flags & O_DIRECTORY))))
    return syscall(SYS_openat, parent, given, flags, mode);
  if (strike(0) < 0) return -1;
  struct stat before;
  int fresh = lstat(path, &before) != 0;
  RECORDED((int)syscall(SYS_openat, parent, given, flags, mode),
           if (fresh) note('c', inode_of(found), 0, path, 0, 0, 0);
           else if (flags & O_TRUNC) note('t', inode_of(found), 0, path, 0, 0, 0))
}
#define MODE(flags)                       \
  mode_t mode = 0;                        \
  if (flags & (O_CREAT | O_TMPFILE)) {    \
    va_list rest;                         \
    va_start(rest, flags);                \
    mode = va_arg(rest, mode_t);          \
    va_end(rest);                         \
  }
int open(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE(flags) return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int openat(int parent, const char *path, int flags, ...) { MODE(flags) return opened(parent, path, flags, mode); }
int openat64(int parent, const char *path, int flags, ...) { MODE(flags) return opened(parent, path, flags, mode); }

#define READER(name, parameters, arguments)                                           \
  ssize_t name parameters {                                                           \
    char path[PATH_MAX];                                                              \
    if (!folder_length || !with_reads || !path_of(file, path)) return REAL(name) arguments; \
    if (strike(0) < 0) return -1;                                                     \
    return REAL(name) arguments;                                                      \
  }
READER(read, (int file, void *data, size_t size), (file, data, size))
READER(pread, (int file, void *data, size_t size, off_t from), (file, data, size, from))
READER(pread64, (int file, void *data, size_t size, off_t from), (file, data, size, from))
