/* A library that injects disk faults and records all writes in their order.
 *
 * Preloaded (ld.so(8), LD_PRELOAD) into any program, it intercepts libc's file calls for the files of one folder only.
 * It simulates a disk that is full, hangs, returns errors, or loses power between two writes. Without rules every call
 * is passed to the kernel (tests/history/test_disk.py checks this). It does not intercept stat(2) nor stores to mapped
 * memory, which SQLite uses only for its -shm file.
 *
 *   DISK_FOLDER   the folder; nothing is intercepted without it
 *   DISK_RULES    a file with one rule per line: CALL SUFFIX FIRST COUNT WHAT [ARGUMENT]
 *                 CALL is open, read, write, sync, truncate, unlink or *; SUFFIX is the end of the file's name, * any;
 *                 the rule applies to COUNT matching calls from the FIRST on, counted since the rules changed (COUNT 0:
 *                 to all further calls); WHAT is an errno's name, short (write at most ARGUMENT bytes), slow (wait
 *                 ARGUMENT milliseconds), or hang (until the rules change)
 *   DISK_JOURNAL  a file that records each write, truncation, sync, creation, removal and rename, in their order:
 *                 kind, offset, length of the name, length of the data (four little-endian int64), name, data
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define RULES 32
#define REAL(name) ((__typeof__(&name))real(#name))

struct rule {
    char call[16], suffix[32], what[16];
    long first, count, argument, met;
};

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static struct rule rules[RULES];
static int ruled;
static struct timespec changed;
static ino_t inode;

static void *real(const char *name) {
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

static int number_of(const char *what) {
    static const struct { const char *name; int number; } known[] = {
        {"ENOSPC", ENOSPC}, {"EIO", EIO}, {"EROFS", EROFS}, {"EACCES", EACCES}, {"EDQUOT", EDQUOT}, {"EMFILE", EMFILE},
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, what))
            return known[i].number;
    return 0;
}

/* Whether a path is in the folder. */
static int ours(const char *path) {
    const char *folder = getenv("DISK_FOLDER");
    size_t length = folder ? strlen(folder) : 0;
    return length && !strncmp(path, folder, length) && (path[length] == '/' || !path[length]);
}

/* Sets `path` to the path of an open file; empty if it is not in the folder. */
static void path_of(int fd, char path[PATH_MAX]) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    if (length < 0 || !ours(path))
        path[0] = 0;
}

static void full_path(int folder, const char *path, char full[PATH_MAX]) {
    char base[PATH_MAX] = "";
    if (path[0] == '/') {
        snprintf(full, PATH_MAX, "%s", path);
        return;
    }
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base))
            base[0] = 0;
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, base, sizeof base - 1);
        base[length > 0 ? length : 0] = 0;
    }
    if (snprintf(full, PATH_MAX, "%s/%s", base, path) >= PATH_MAX)
        full[0] = 0;
}

/* Reads the rules again if their file was replaced or changed. */
static void look(void) {
    const char *name = getenv("DISK_RULES");
    struct stat now;
    if (!name || stat(name, &now)) {
        ruled = 0;
        inode = 0;
        return;
    }
    if (now.st_ino == inode && now.st_mtim.tv_sec == changed.tv_sec && now.st_mtim.tv_nsec == changed.tv_nsec)
        return;
    inode = now.st_ino;
    changed = now.st_mtim;
    ruled = 0;
    FILE *file = fopen(name, "re");
    char line[256];
    while (file && ruled < RULES && fgets(line, sizeof line, file)) {
        struct rule *one = &rules[ruled];
        memset(one, 0, sizeof *one);
        if (sscanf(line, "%15s %31s %ld %ld %15s %ld", one->call, one->suffix, &one->first, &one->count, one->what,
                   &one->argument) >= 5)
            ruled++;
    }
    if (file)
        fclose(file);
}

static int fits(const struct rule *one, const char *call, const char *path) {
    size_t end = strlen(one->suffix), whole = strlen(path);
    return (!strcmp(one->call, "*") || !strcmp(one->call, call)) &&
           (!strcmp(one->suffix, "*") || (whole >= end && !strcmp(path + whole - end, one->suffix)));
}

static void sleep_ms(long ms) {
    struct timespec rest = {ms / 1000, ms % 1000 * 1000000};
    nanosleep(&rest, NULL);
}

/* Applies the rules to a call and returns an errno, or 0. `most` is reduced if only a part is to be written. */
static int trouble(const char *call, const char *path, size_t *most) {
    for (;;) {
        int number = 0, again = 0;
        long rest = 0;
        pthread_mutex_lock(&turn);
        look();
        for (int i = 0; i < ruled && !number && !again; i++) {
            struct rule *one = &rules[i];
            if (!fits(one, call, path))
                continue;
            one->met++;
            if (one->met < one->first || (one->count && one->met >= one->first + one->count))
                continue;
            number = number_of(one->what);
            if (!strcmp(one->what, "short") && most && *most > (size_t)one->argument)
                *most = (size_t)one->argument;
            if (!strcmp(one->what, "slow"))
                rest = one->argument;
            if (!strcmp(one->what, "hang")) {
                one->met--;
                again = 1;
            }
        }
        pthread_mutex_unlock(&turn);
        sleep_ms(again ? 10 : rest);
        if (!again)
            return number;
    }
}

/* Appends to the journal. The caller holds `turn` and has already made the call. */
static void tell(char kind, const char *path, int64_t offset, const void *data, size_t length) {
    static int journal = -1;
    const char *name = getenv("DISK_JOURNAL");
    size_t end = strlen(path);
    if (!name || (end > 4 && !strcmp(path + end - 4, "-shm")))
        return;
    if (journal < 0)
        journal = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    int64_t head[4] = {kind, offset, (int64_t)end, (int64_t)length};
    char *whole = malloc(sizeof head + end + length);
    memcpy(whole, head, sizeof head);
    memcpy(whole + sizeof head, path, end);
    if (length)
        memcpy(whole + sizeof head + end, data, length);
    size_t size = sizeof head + end + length;
    if (syscall(SYS_write, journal, whole, size) != (long)size)
        abort();
    free(whole);
}

/* Returns from the calling function with the error that the rules give, if any. */
#define FAIL(call, path, most)                                                                                        \
    do {                                                                                                               \
        int number = trouble(call, path, most);                                                                        \
        if (number) {                                                                                                  \
            errno = number;                                                                                            \
            return -1;                                                                                                 \
        }                                                                                                              \
    } while (0)

static ssize_t wrote(int fd, const void *data, size_t size, int64_t at, int placed) {
    char path[PATH_MAX];
    path_of(fd, path);
    if (!path[0])
        return placed ? REAL(pwrite64)(fd, data, size, at) : REAL(write)(fd, data, size);
    FAIL("write", path, &size);
    pthread_mutex_lock(&turn);
    if (!placed) {
        struct stat now;
        int flags = fcntl(fd, F_GETFL);
        at = flags & O_APPEND ? (fstat(fd, &now) ? 0 : now.st_size) : lseek(fd, 0, SEEK_CUR);
    }
    ssize_t done = placed ? REAL(pwrite64)(fd, data, size, at) : REAL(write)(fd, data, size);
    int kept = errno;
    if (done > 0)
        tell('W', path, at, data, (size_t)done);
    pthread_mutex_unlock(&turn);
    errno = kept;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) { return wrote(fd, data, size, 0, 0); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return wrote(fd, data, size, at, 1); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return wrote(fd, data, size, at, 1); }

ssize_t pread64(int fd, void *data, size_t size, off64_t at) {
    char path[PATH_MAX];
    path_of(fd, path);
    if (path[0])
        FAIL("read", path, NULL);
    return REAL(pread64)(fd, data, size, at);
}

ssize_t pread(int fd, void *data, size_t size, off_t at) { return pread64(fd, data, size, at); }

ssize_t read(int fd, void *data, size_t size) {
    char path[PATH_MAX];
    path_of(fd, path);
    if (path[0])
        FAIL("read", path, NULL);
    return REAL(read)(fd, data, size);
}

#define CHANGE(call, kind, offset, doing)                                                                             \
    char path[PATH_MAX];                                                                                               \
    path_of(fd, path);                                                                                                 \
    if (!path[0])                                                                                                      \
        return doing;                                                                                                  \
    FAIL(call, path, NULL);                                                                                            \
    pthread_mutex_lock(&turn);                                                                                         \
    int done = doing, kept = errno;                                                                                    \
    if (!done)                                                                                                         \
        tell(kind, path, offset, NULL, 0);                                                                             \
    pthread_mutex_unlock(&turn);                                                                                       \
    errno = kept;                                                                                                      \
    return done;

int ftruncate(int fd, off_t size) { CHANGE("truncate", 'T', size, REAL(ftruncate)(fd, size)) }
int ftruncate64(int fd, off64_t size) { CHANGE("truncate", 'T', size, REAL(ftruncate64)(fd, size)) }
int fsync(int fd) { CHANGE("sync", 'S', 0, REAL(fsync)(fd)) }
int fdatasync(int fd) { CHANGE("sync", 'S', 0, REAL(fdatasync)(fd)) }

static int opened(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    full_path(folder, name, path);
    if (!ours(path))
        return REAL(openat64)(folder, name, flags, mode);
    FAIL("open", path, NULL);
    pthread_mutex_lock(&turn);
    struct stat now;
    int fresh = (flags & O_CREAT) && lstat(path, &now);
    int fd = REAL(openat64)(folder, name, flags, mode), kept = errno;
    if (fd >= 0 && fresh)
        tell('C', path, 0, NULL, 0);
    else if (fd >= 0 && (flags & O_TRUNC))
        tell('T', path, 0, NULL, 0);
    pthread_mutex_unlock(&turn);
    errno = kept;
    return fd;
}

static mode_t mode_in(int flags, va_list more) { return flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; }

#define OPEN(name, folder, ...)                                                                                       \
    int name(__VA_ARGS__ const char *path, int flags, ...) {                                                           \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        mode_t mode = mode_in(flags, more);                                                                            \
        va_end(more);                                                                                                  \
        return opened(folder, path, flags, mode);                                                                      \
    }
#define COMMA ,
OPEN(open, AT_FDCWD, )
OPEN(open64, AT_FDCWD, )
OPEN(openat, folder, int folder COMMA)
OPEN(openat64, folder, int folder COMMA)

#define NAME(doing, kind, target)                                                                                     \
    FAIL("unlink", full, NULL);                                                                                        \
    pthread_mutex_lock(&turn);                                                                                         \
    int done = doing, kept = errno;                                                                                    \
    if (!done)                                                                                                         \
        tell(kind, full, 0, target, strlen(target));                                                                   \
    pthread_mutex_unlock(&turn);                                                                                       \
    errno = kept;                                                                                                      \
    return done;

int unlink(const char *path) {
    char full[PATH_MAX];
    full_path(AT_FDCWD, path, full);
    if (!ours(full))
        return REAL(unlink)(path);
    NAME(REAL(unlink)(path), 'U', "")
}

int rename(const char *from, const char *to) {
    char full[PATH_MAX], target[PATH_MAX];
    full_path(AT_FDCWD, from, full);
    full_path(AT_FDCWD, to, target);
    if (!ours(full))
        return REAL(rename)(from, to);
    NAME(REAL(rename)(from, to), 'R', target)
}
