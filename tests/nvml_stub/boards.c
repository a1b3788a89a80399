/* The inventory, the gauges and the processes of the stand-in; see library.h. */
#include "library.h"

#include <stdio.h>
#include <string.h>

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *n) {
    ENTER();
    *n = w->count;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    struct target t;
    nvmlDevice_t wanted;
    if (!nvmlStubInitialised()) return UNINITIALIZED;
    if ((w = world_now())->count <= index) return INVALID_ARGUMENT;
    DOOR(board_handle((int)index, &wanted));
    DOOR(enter_board(__func__, wanted, &t));
    *device = wanted;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t h, char *name, unsigned length) {
    ENTER_EITHER(h);
    if (!t.in) snprintf(name, length, "%s", d->name);
    else if (t.in->cis == 1) snprintf(name, length, "%s MIG %s", d->name, t.in->profile->name);
    else snprintf(name, length, "%s MIG 1c.%s", d->name, t.in->profile->name);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t h, char *uuid, unsigned length) {
    ENTER_EITHER(h);
    if (t.in) snprintf(uuid, length, "MIG-5700b000-%04d-%04u-0000-%s", t.gi, t.ci, d->uuid + strlen("GPU-5700b000-0000-0000-0000-"));
    else snprintf(uuid, length, "%s", d->uuid);
    return SUCCESS;
}

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t h, nvmlPciInfo_t *pci) {
    ENTER_BOARD(h);
    unsigned bus = (unsigned)t.index + 16;
    *pci = (nvmlPciInfo_t){.bus = bus, .pciDeviceId = d->pci};
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", bus);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetVirtualizationMode(nvmlDevice_t h, unsigned *mode) {
    ENTER_BOARD(h);
    *mode = d->vgpu ? 2 : 0; /* NVML_GPU_VIRTUALIZATION_MODE_VGPU, _NONE */
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t h, unsigned link, unsigned *active) {
    ENTER_BOARD(h);
    if (!d->links) return NOT_SUPPORTED;
    if (link >= d->links) return INVALID_ARGUMENT;
    *active = 1;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t h, unsigned *cores) {
    ENTER_BOARD(h);
    *cores = strstr(d->name, "A100") ? 108 * 64 : strstr(d->name, "A30") ? 56 * 64 : 132 * 128;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t h, int *major, int *minor) {
    ENTER_EITHER(h);
    *major = strstr(d->name, "A100") || strstr(d->name, "A30") ? 8 : 9, *minor = 0;
    return SUCCESS;
}

#define GAUGE(function, type, expression)                      \
    nvmlReturn_t function(nvmlDevice_t h, type *out) {         \
        ENTER_BOARD(h);                                        \
        NEED(out);                                             \
        *out = (type)(expression);                             \
        return SUCCESS;                                        \
    }

GAUGE(nvmlDeviceGetPowerUsage, unsigned, d->power_mw)
GAUGE(nvmlDeviceGetEnforcedPowerLimit, unsigned, d->limit_mw)
GAUGE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, d->energy_mj)
GAUGE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, d->reasons)
GAUGE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, d->reasons)

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t h, unsigned sensor, unsigned *celsius) {
    ENTER_BOARD(h);
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = d->celsius;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t h, unsigned kind, unsigned *celsius) {
    ENTER_BOARD(h);
    if (kind != 1) return INVALID_ARGUMENT; /* NVML_TEMPERATURE_THRESHOLD_SLOWDOWN */
    *celsius = d->slowdown;
    return SUCCESS;
}

typedef struct { unsigned version; int margin; } nvmlMarginTemperature_t;

nvmlReturn_t nvmlDeviceGetMarginTemperature(nvmlDevice_t h, nvmlMarginTemperature_t *margin) {
    ENTER_BOARD(h);
    if (margin->version != (sizeof *margin | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    margin->margin = d->margin;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t h, unsigned domain, unsigned *mhz) {
    ENTER_BOARD(h);
    if (domain > 3) return INVALID_ARGUMENT;
    *mhz = domain == 1 ? d->sm_mhz : 1; /* 1: NVML_CLOCK_SM */
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t h, nvmlMemory_t *m) {
    ENTER_EITHER(h);
    unsigned long long total = t.in ? t.in->profile->megabytes << 20 : d->mem_total;
    /* The first version does not tell what is used from what is reserved. */
    unsigned long long used = t.in ? t.in->mem_used : d->mem_used + d->mem_reserved;
    *m = (nvmlMemory_t){total, total - used, used};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t h, nvmlMemory_v2_t *m) {
    ENTER_EITHER(h);
    if (m->version != (sizeof *m | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    m->total = t.in ? t.in->profile->megabytes << 20 : d->mem_total;
    m->reserved = t.in ? 0 : d->mem_reserved, m->used = t.in ? t.in->mem_used : d->mem_used;
    m->free = m->total - m->reserved - m->used;
    return SUCCESS;
}

typedef struct { unsigned gpu, memory; } nvmlUtilization_t;

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t h, nvmlUtilization_t *u) {
    ENTER_BOARD(h);
    if (d->mig) return NOT_SUPPORTED;
    *u = (nvmlUtilization_t){d->util, 0};
    return SUCCESS;
}

#define VIDEO(function, expression)                                                  \
    nvmlReturn_t function(nvmlDevice_t h, unsigned *percent, unsigned *period_us) {  \
        ENTER_BOARD(h);                                                              \
        if (d->mig) return NOT_SUPPORTED;                                            \
        NEED(percent && period_us);                                                  \
        *percent = (expression), *period_us = 200000;                                \
        return SUCCESS;                                                              \
    }

VIDEO(nvmlDeviceGetEncoderUtilization, d->encoder)
VIDEO(nvmlDeviceGetDecoderUtilization, d->decoder)

typedef struct { unsigned long long timeStamp; nvmlValue_t sampleValue; } nvmlSample_t;

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t h, unsigned kind, unsigned long long last, unsigned *type,
                                  unsigned *n, nvmlSample_t *samples) {
    ENTER_BOARD(h);
    if (d->mig) return NOT_SUPPORTED;
    if (kind != 1) return INVALID_ARGUMENT; /* 1: NVML_GPU_UTILIZATION_SAMPLES */
    *type = 1;                              /* NVML_VALUE_TYPE_UNSIGNED_INT */
    if (!samples) return *n = MAX_SAMPLES, SUCCESS;
    unsigned got = 0;
    unsigned long oldest = d->samples > MAX_SAMPLES ? d->samples - MAX_SAMPLES : 0;
    for (unsigned long i = oldest; i < d->samples && got < *n; i++) {
        const struct sample *s = &d->sample[i % MAX_SAMPLES];
        if (s->us > last) samples[got++] = (nvmlSample_t){s->us, {.uiVal = s->value}};
    }
    *n = got;
    return got ? SUCCESS : NOT_FOUND;
}

typedef struct { unsigned pid; unsigned long long usedGpuMemory; unsigned gi, ci; } nvmlProcessInfo_t;

/* Of a board in MIG mode those of all its instances, as a privileged caller gets them. */
static unsigned listed(const struct target *t, nvmlProcessInfo_t *out) {
    unsigned n = 0;
    if (!t->in && !t->d->mig)
        for (; n < t->d->processes; n++)
            out[n] = (nvmlProcessInfo_t){t->d->process[n].pid, t->d->process[n].bytes, ~0u, ~0u};
    for (int gi = 0; t->d->mig && gi < MAX_GI; gi++) {
        const struct instance *in = &t->d->instance[gi];
        for (unsigned i = 0; in->profile && (!t->in || t->in == in) && i < in->processes; i++)
            if (!t->in || in->process[i].ci == t->ci)
                out[n++] = (nvmlProcessInfo_t){in->process[i].pid, in->process[i].bytes, (unsigned)gi, in->process[i].ci};
    }
    return n;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t h, unsigned *n, nvmlProcessInfo_t *out) {
    static nvmlProcessInfo_t all[MAX_GI * MAX_PROCESSES];
    ENTER_EITHER(h);
    unsigned room = *n;
    *n = listed(&t, all);
    if (!*n) return SUCCESS;
    if (!out || room < *n) return INSUFFICIENT_SIZE;
    memcpy(out, all, *n * sizeof *all);
    return SUCCESS;
}
