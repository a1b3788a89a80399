/* Preloaded into slurmd and its slurmstepd: shows them control groups v2 alone in /proc/PID/cgroup.
 *
 * On a machine that also has v1 hierarchies they refuse to use cgroup/v2 ("Hybrid mode is not supported"), though the
 * v2 hierarchy mounted for them is complete but for controllers. Everything else about their groups is real. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static FILE *libc_fopen(const char *path, const char *mode)
{
    FILE *(*real)(const char *, const char *) = (FILE * (*)(const char *, const char *)) dlsym(RTLD_NEXT, "fopen");
    return real(path, mode);
}

static int is_cgroup(const char *path)
{
    size_t length = strlen(path);
    return !strncmp(path, "/proc/", 6) && length > 7 && !strcmp(path + length - 7, "/cgroup");
}

/* Return a descriptor of the file's line of the v2 hierarchy, or -1. */
static int unified(const char *path)
{
    FILE *file = libc_fopen(path, "re");
    if (!file)
        return -1;
    int found = memfd_create("cgroup", MFD_CLOEXEC);
    char line[4096];
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, "0::", 3))
            dprintf(found, "%s", line);
    fclose(file);
    lseek(found, 0, SEEK_SET);
    return found;
}

#define OPEN(name)                                                                                  \
    int name(const char *path, int flags, ...)                                                      \
    {                                                                                               \
        va_list more;                                                                               \
        va_start(more, flags);                                                                      \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;                     \
        va_end(more);                                                                               \
        if (is_cgroup(path))                                                                        \
            return unified(path);                                                                   \
        int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...)) dlsym(RTLD_NEXT, #name); \
        return real(path, flags, mode);                                                             \
    }
OPEN(open)
OPEN(open64)

FILE *fopen(const char *path, const char *mode)
{
    if (!is_cgroup(path))
        return libc_fopen(path, mode);
    int found = unified(path);
    return found < 0 ? NULL : fdopen(found, "r");
}

FILE *fopen64(const char *path, const char *mode)
{
    return fopen(path, mode);
}
