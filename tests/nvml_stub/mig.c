/* MIG: the mode, the profiles, the GPU instances and their devices; see library.h. */
#include "library.h"

#include <stdio.h>
#include <string.h>

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t h, unsigned *current, unsigned *pending) {
    ENTER_BOARD(h);
    *current = *pending = d->mig;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t h, unsigned *n) {
    ENTER_BOARD(h);
    *n = d->mig ? profiles_of(d)->slices : 0;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t h, unsigned index, nvmlDevice_t *mig) {
    ENTER_BOARD(h);
    return index < profiles_of(d)->slices ? mig_handle(t.index, index, mig) : INVALID_ARGUMENT;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t h, unsigned *gi) {
    ENTER_EITHER(h);
    if (!t.in) return NOT_SUPPORTED;
    *gi = (unsigned)t.gi;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t h, unsigned *ci) {
    ENTER_EITHER(h);
    if (!t.in) return NOT_SUPPORTED;
    *ci = t.ci;
    return SUCCESS;
}

typedef struct {
    unsigned multiprocessorCount, copyEngines, decoders, encoders, jpegs, ofas;
    unsigned gpuInstanceSliceCount, computeInstanceSliceCount;
    unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

/* The multiprocessors are the compute instance's, the memory is the GPU instance's. */
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t h, nvmlDeviceAttributes_t *a) {
    ENTER_EITHER(h);
    if (!t.in) return NOT_SUPPORTED;
    const struct profile *p = t.in->profile;
    *a = (nvmlDeviceAttributes_t){.multiprocessorCount = p->multiprocessors / t.in->cis, .memorySizeMB = p->megabytes,
                                  .gpuInstanceSliceCount = p->slices,
                                  .computeInstanceSliceCount = t.in->cis == 1 ? p->slices : 1};
    return SUCCESS;
}

static const struct profile *by_kind(const struct gpu *d, unsigned kind) {
    for (const struct profile *p = profiles_of(d); p->name; p++)
        if (p->kind == kind) return p;
    return NULL;
}

static const struct profile *by_id(const struct gpu *d, unsigned id) {
    for (const struct profile *p = profiles_of(d); p->name; p++)
        if (p->id == id) return p;
    return NULL;
}

enum { KINDS = 17 }; /* NVML_GPU_INSTANCE_PROFILE_COUNT of this library */
typedef struct {
    unsigned id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, engines[5];
    unsigned long long memorySizeMB;
} nvmlGpuInstanceProfileInfo_t;
typedef struct {
    unsigned version, id, isP2pSupported, sliceCount, instanceCount, multiprocessorCount, engines[5];
    unsigned long long memorySizeMB;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t h, unsigned kind, nvmlGpuInstanceProfileInfo_t *info) {
    ENTER_BOARD(h);
    if (kind >= KINDS) return INVALID_ARGUMENT;
    const struct profile *p = by_kind(d, kind);
    if (!p) return NOT_SUPPORTED;
    *info = (nvmlGpuInstanceProfileInfo_t){.id = p->id, .sliceCount = p->slices, .instanceCount = p->count,
                                           .multiprocessorCount = p->multiprocessors, .memorySizeMB = p->megabytes};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t h, unsigned kind, nvmlGpuInstanceProfileInfo_v2_t *info) {
    ENTER_BOARD(h);
    if (kind >= KINDS || info->version != (sizeof *info | 2u << 24)) return INVALID_ARGUMENT;
    const struct profile *p = by_kind(d, kind);
    if (!p) return NOT_SUPPORTED;
    info->id = p->id, info->isP2pSupported = 0, info->sliceCount = p->slices, info->instanceCount = p->count;
    info->multiprocessorCount = p->multiprocessors, info->memorySizeMB = p->megabytes;
    snprintf(info->name, sizeof info->name, "MIG %s", p->name);
    return SUCCESS;
}

/* By slices of compute and of memory; real boards also have places where an instance may begin. */
nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t h, unsigned id, unsigned *n) {
    ENTER_BOARD(h);
    const struct profile *p = by_id(d, id), *whole = profiles_of(d);
    if (!p) return INVALID_ARGUMENT;
    if (!d->mig) return NOT_SUPPORTED;
    unsigned slices = whole->slices, memory = whole->memory_slices, same = 0;
    for (int gi = 0; gi < MAX_GI; gi++) {
        const struct profile *taken = d->instance[gi].profile;
        if (taken) slices -= taken->slices, memory -= taken->memory_slices, same += taken == p;
    }
    unsigned by_slices = slices / p->slices, by_memory = memory / p->memory_slices, left = p->count - same;
    *n = by_slices < by_memory ? by_slices : by_memory;
    *n = *n < left ? *n : left;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t h, unsigned id, void **instances, unsigned *n) {
    ENTER_BOARD(h);
    const struct profile *p = by_id(d, id);
    if (!p) return INVALID_ARGUMENT;
    *n = 0;
    for (int gi = 0; gi < MAX_GI; gi++)
        if (d->instance[gi].profile == p) instances[(*n)++] = &d->instance[gi];
    return SUCCESS;
}
