/* A stand-in for libcuda.so.1, for the child of benchmarks/accuracy.py without a GPU.
 *
 * THIS IS NOT NVIDIA'S LIBRARY, and holds none of its code. Signatures follow the published CUDA Driver API reference.
 * Its device runs one kernel at a time, each for as long as its arguments say, on the real clock: a launch returns at
 * once, cuCtxSynchronize sleeps until the last is done. It is as strict as a debugger: an address that is not
 * allocated, or too small for what the kernel would write, is CUDA_ERROR_ILLEGAL_ADDRESS, memory that is not freed at
 * the end of the process is told on standard error.
 *
 * CUDA_STUB_FAIL="cuMemAlloc_v2 2" makes that function fail with the code. CUDA_STUB_TELL=1 tells on standard error
 * which kernels were launched on how many blocks of how many threads, each once, and CUDA_VISIBLE_DEVICES.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, INVALID_CONTEXT = 201, INVALID_PTX = 218, NOT_FOUND = 500, ILLEGAL = 700 };
enum { SMS = 132, MAX_BLOCKS = 64 };

static struct { uint64_t at; size_t size; } block[MAX_BLOCKS];
static int initialised, device_of_context, context, current, module;
static int64_t free_at; /* nanoseconds: when the device has done all it was told */
static const char *const KERNELS[] = {"spin", "copy", "mma"};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static int failing(const char *name) {
    const char *told = getenv("CUDA_STUB_FAIL");
    size_t length = strlen(name);
    return told && !strncmp(told, name, length) && told[length] == ' ' ? atoi(told + length) : 0;
}

#define ENTER() do { int code_ = failing(__func__); if (code_) return code_; if (!initialised) return NOT_INITIALIZED; } while (0)
#define IN_CONTEXT() do { ENTER(); if (!current) return INVALID_CONTEXT; } while (0)

static int held(uint64_t at, uint64_t size) {
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (block[i].size && at >= block[i].at && at + size <= block[i].at + block[i].size) return 1;
    return 0;
}

static void tell(const char *name, unsigned blocks, unsigned threads) {
    static struct { const char *name; unsigned blocks, threads; } told[16];
    if (!getenv("CUDA_STUB_TELL")) return;
    for (size_t i = 0; i < sizeof told / sizeof *told; i++) {
        if (told[i].name == name && told[i].blocks == blocks && told[i].threads == threads) return;
        if (told[i].name) continue;
        told[i].name = name, told[i].blocks = blocks, told[i].threads = threads;
        fprintf(stderr, "%s: %u blocks of %u threads on %s\n", name, blocks, threads, getenv("CUDA_VISIBLE_DEVICES"));
        return;
    }
}

static void run(int64_t nanoseconds) {
    int64_t begins = free_at > now() ? free_at : now();
    free_at = begins + nanoseconds;
}

__attribute__((destructor)) static void leaks(void) {
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (block[i].size) fprintf(stderr, "stand-in libcuda: %zu bytes were never freed\n", block[i].size);
}

int cuInit(unsigned flags) {
    int code = failing(__func__);
    initialised = !code && !flags;
    return code ? code : flags ? INVALID_VALUE : 0;
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER();
    *device = ordinal;
    return ordinal ? 101 : 0; /* CUDA_ERROR_INVALID_DEVICE: there is one */
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER();
    if (attribute != 16 || device) return INVALID_VALUE; /* MULTIPROCESSOR_COUNT */
    *value = SMS;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **out, int device) {
    ENTER();
    device_of_context = device, *out = &context;
    return 0;
}

int cuCtxSetCurrent(void *wanted) {
    ENTER();
    current = wanted == &context;
    return current ? 0 : INVALID_CONTEXT;
}

int cuCtxSynchronize(void) {
    IN_CONTEXT();
    int64_t left = free_at - now();
    struct timespec pause = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
    if (left > 0) nanosleep(&pause, NULL);
    return 0;
}

int cuModuleLoadData(void **out, const void *image) {
    IN_CONTEXT();
    if (!strstr(image, ".version") || !strstr(image, ".target sm_")) return INVALID_PTX;
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++) {
        char entry[64];
        snprintf(entry, sizeof entry, ".visible .entry %s(", KERNELS[i]);
        if (!strstr(image, entry)) return INVALID_PTX;
    }
    *out = &module;
    return 0;
}

int cuModuleGetFunction(void **out, void *of, const char *name) {
    IN_CONTEXT();
    if (of != &module) return INVALID_VALUE;
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++)
        if (!strcmp(KERNELS[i], name)) return *out = (void *)&KERNELS[i], 0;
    return NOT_FOUND;
}

int cuMemAlloc_v2(uint64_t *at, size_t size) {
    IN_CONTEXT();
    static uint64_t next = 0x7f0000000000; /* beyond 32 bits, as a device's addresses are */
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (!block[i].size) {
            block[i].at = *at = next, block[i].size = size, next += (size + 511) / 512 * 512;
            return 0;
        }
    return 2; /* CUDA_ERROR_OUT_OF_MEMORY */
}

int cuMemFree_v2(uint64_t at) {
    IN_CONTEXT();
    for (int i = 0; i < MAX_BLOCKS; i++)
        if (block[i].size && block[i].at == at) return block[i].size = 0, 0;
    return INVALID_VALUE;
}

int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t count) {
    IN_CONTEXT();
    (void)value;
    return held(at, count) ? 0 : ILLEGAL;
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, void *stream) {
    IN_CONTEXT();
    if (stream) return INVALID_VALUE;
    if (!held(to, size) || !held(from, size) || to == from) return ILLEGAL;
    run((int64_t)(size / 1500)); /* 1.5 TB/s copied: twice that moved */
    return 0;
}

int cuLaunchKernel(const void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, void **parameters, void **extra) {
    IN_CONTEXT();
    if (gy != 1 || gz != 1 || by != 1 || bz != 1 || !gx || !bx || bx > 1024 || shared || stream || extra)
        return INVALID_VALUE;
    const char *name = *(const char *const *)function;
    uint64_t one = *(uint64_t *)parameters[0], two = *(uint64_t *)parameters[1];
    tell(name, gx, bx);
    if (!strcmp(name, "spin")) {
        if (!held(two, 4)) return ILLEGAL;
        run((int64_t)one);
    } else if (!strcmp(name, "mma")) {
        if (!held(two, 4ULL * gx * bx) || !one) return ILLEGAL;
        run((int64_t)one * 100);
    } else {
        uint64_t size = *(uint64_t *)parameters[2] * 16;
        if (!held(one, size) || !held(two, size) || one == two) return ILLEGAL;
        run((int64_t)(size / 1500));
    }
    return 0;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == 2 ? "out of memory" : "stand-in error";
    return 0;
}
