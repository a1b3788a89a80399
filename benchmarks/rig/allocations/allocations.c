/* Counts what Python asks its allocators for, of memory and of objects: a call and its bytes, whether or not they are
 * given back. What Python takes from free lists of its own (small tuples, floats, frames) never gets here. The raw
 * domain is left out: what is large passes through it a second time. See ../noted.py. */
#include <stddef.h>

struct allocator { /* PyMemAllocatorEx (Python's C API, memory management) */
    void *ctx;
    void *(*malloc)(void *ctx, size_t size);
    void *(*calloc)(void *ctx, size_t n, size_t size);
    void *(*realloc)(void *ctx, void *was, size_t size);
    void (*free)(void *ctx, void *was);
};
enum { MEMORY = 1, DOMAINS = 3 };
extern void PyMem_GetAllocator(int domain, struct allocator *into);
extern void PyMem_SetAllocator(int domain, struct allocator *from);

static struct allocator real[DOMAINS];
static long calls, bytes;

static void count(size_t size) { /* both domains are used with the interpreter's lock held */
    calls++;
    bytes += (long)size;
}

static void *counted_malloc(void *ctx, size_t size) {
    struct allocator *to = ctx;
    return count(size), to->malloc(to->ctx, size);
}

static void *counted_calloc(void *ctx, size_t n, size_t size) {
    struct allocator *to = ctx;
    return count(n * size), to->calloc(to->ctx, n, size);
}

static void *counted_realloc(void *ctx, void *was, size_t size) {
    struct allocator *to = ctx;
    return count(size), to->realloc(to->ctx, was, size);
}

static void uncounted_free(void *ctx, void *was) {
    struct allocator *to = ctx;
    to->free(to->ctx, was);
}

void begin_counting(void) { /* once */
    for (int domain = MEMORY; domain < DOMAINS; domain++) {
        struct allocator ours = {&real[domain], counted_malloc, counted_calloc, counted_realloc, uncounted_free};
        PyMem_GetAllocator(domain, &real[domain]);
        PyMem_SetAllocator(domain, &ours);
    }
}

long counted_calls(void) { return calls; }
long counted_bytes(void) { return bytes; }
