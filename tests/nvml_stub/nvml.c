/* A stand-in for libnvidia-ml.so.1, for tests and benchmarks without a GPU.
 *
 * THIS IS NOT NVIDIA'S LIBRARY, and holds none of its code. Struct layouts, error codes and semantics follow the
 * published NVML API reference (docs.nvidia.com/deploy/nvml-api). It says so in its driver version string.
 * What its GPUs do comes from world.h's script. Beside NVML it exports, for tests:
 *
 *   int nvmlStubLiveSamples(void)           GPM samples allocated and not freed
 *   int nvmlStubBadFrees(void)              frees of what was no live sample
 *   int nvmlStubInitialised(void)           nvmlInit calls not yet shut down
 *   unsigned long nvmlStubCalls(const char *name)   how often a function was called on a GPU, or at all
 */
#include "world.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int nvmlReturn_t;
typedef struct gpu *nvmlDevice_t;
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, MEMORY = 20, ARGUMENT_VERSION_MISMATCH = 25,
};

static struct world *w;
static int initialised, live_samples, bad_frees;
static struct { char name[64]; unsigned long n; } calls[64];

static void count(const char *name) {
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        if (!*calls[i].name) snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        if (!strcmp(calls[i].name, name)) { calls[i].n++; return; }
    }
}

/* What every call goes through: initialised, the script's rules, a device that is there. */
static nvmlReturn_t enter(const char *name, const nvmlDevice_t *device) {
    if (!initialised) return UNINITIALIZED;
    w = world_now();
    if (w->driver_gone) initialised = 0;
    if (!initialised) return UNINITIALIZED;
    count(name);
    if (!device) return world_verdict(name, -1);
    if (*device < w->gpu || *device >= w->gpu + MAX_GPUS) return INVALID_ARGUMENT;
    return (*device)->lost ? GPU_IS_LOST : world_verdict(name, (int)(*device - w->gpu));
}

#define ENTER() do { nvmlReturn_t r_ = enter(__func__, NULL); if (r_) return r_; } while (0)
#define ENTER_DEVICE(d) do { nvmlReturn_t r_ = enter(__func__, &(d)); if (r_) return r_; } while (0)
#define NEED(p) do { if (!(p)) return INVALID_ARGUMENT; } while (0)

int nvmlStubLiveSamples(void) { return live_samples; }
int nvmlStubBadFrees(void) { return bad_frees; }
int nvmlStubInitialised(void) { return initialised; }
unsigned long nvmlStubCalls(const char *name) {
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (!strcmp(calls[i].name, name)) return calls[i].n;
    return 0;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    w = world_now();
    int verdict = w->driver_gone ? DRIVER_NOT_LOADED : world_verdict(__func__, -1);
    initialised += !verdict;
    return verdict;
}

nvmlReturn_t nvmlShutdown(void) {
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return SUCCESS;
}

const char *nvmlErrorString(nvmlReturn_t code) {
    static char text[64];
    snprintf(text, sizeof text, "stand-in error %d", code);
    return text;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) {
    ENTER();
    snprintf(version, length, "0.0 stand-in, not NVIDIA");
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *n) {
    ENTER();
    *n = w->count;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) {
    if (initialised && (w = world_now())->count <= index) return INVALID_ARGUMENT;
    nvmlDevice_t wanted = initialised ? &w->gpu[index] : NULL;
    ENTER_DEVICE(wanted);
    *device = wanted;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t d, char *name, unsigned length) {
    ENTER_DEVICE(d);
    snprintf(name, length, "%s", d->name);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t d, char *uuid, unsigned length) {
    ENTER_DEVICE(d);
    snprintf(uuid, length, "%s", d->uuid);
    return SUCCESS;
}

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t d, nvmlPciInfo_t *pci) {
    ENTER_DEVICE(d);
    unsigned bus = (unsigned)(d - w->gpu) + 16;
    *pci = (nvmlPciInfo_t){.bus = bus, .pciDeviceId = d->pci};
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", bus);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t d, unsigned *current, unsigned *pending) {
    ENTER_DEVICE(d);
    *current = *pending = d->mig;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t d, unsigned link, unsigned *active) {
    ENTER_DEVICE(d);
    if (!d->links) return NOT_SUPPORTED;
    if (link >= d->links) return INVALID_ARGUMENT;
    *active = 1;
    return SUCCESS;
}

#define GAUGE(function, type, expression)                      \
    nvmlReturn_t function(nvmlDevice_t d, type *out) {         \
        ENTER_DEVICE(d);                                       \
        NEED(out);                                             \
        *out = (type)(expression);                             \
        return SUCCESS;                                        \
    }

GAUGE(nvmlDeviceGetPowerUsage, unsigned, d->power_mw)
GAUGE(nvmlDeviceGetEnforcedPowerLimit, unsigned, d->limit_mw)
GAUGE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, d->energy_mj)
GAUGE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, d->reasons)
GAUGE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, d->reasons)

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t d, unsigned sensor, unsigned *celsius) {
    ENTER_DEVICE(d);
    if (sensor != 0) return INVALID_ARGUMENT;
    *celsius = d->celsius;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t d, unsigned domain, unsigned *mhz) {
    ENTER_DEVICE(d);
    if (domain > 3) return INVALID_ARGUMENT;
    *mhz = domain == 1 ? d->sm_mhz : 1; /* 1: NVML_CLOCK_SM */
    return SUCCESS;
}

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t d, nvmlMemory_t *m) {
    ENTER_DEVICE(d);
    unsigned long long used = d->mem_used + d->mem_reserved; /* the first version does not tell them apart */
    *m = (nvmlMemory_t){d->mem_total, d->mem_total - used, used};
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t d, nvmlMemory_v2_t *m) {
    ENTER_DEVICE(d);
    if (m->version != (sizeof *m | 2u << 24)) return ARGUMENT_VERSION_MISMATCH;
    m->total = d->mem_total, m->reserved = d->mem_reserved, m->used = d->mem_used;
    m->free = d->mem_total - d->mem_reserved - d->mem_used;
    return SUCCESS;
}

typedef struct { unsigned gpu, memory; } nvmlUtilization_t;

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t d, nvmlUtilization_t *u) {
    ENTER_DEVICE(d);
    *u = (nvmlUtilization_t){d->util, 0};
    return SUCCESS;
}

typedef union {
    double dVal; unsigned uiVal; unsigned long ulVal; unsigned long long ullVal; long long sllVal; int siVal;
    unsigned short usVal;
} nvmlValue_t;
typedef struct { unsigned long long timeStamp; nvmlValue_t sampleValue; } nvmlSample_t;

nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t d, unsigned kind, unsigned long long last, unsigned *type,
                                  unsigned *n, nvmlSample_t *samples) {
    ENTER_DEVICE(d);
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

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t d, unsigned *n, nvmlProcessInfo_t *out) {
    ENTER_DEVICE(d);
    unsigned room = *n;
    *n = d->processes;
    if (!d->processes) return SUCCESS;
    if (!out || room < d->processes) return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < d->processes; i++)
        out[i] = (nvmlProcessInfo_t){d->process[i].pid, d->process[i].bytes, ~0u, ~0u};
    return SUCCESS;
}

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t d, int n, nvmlFieldValue_t *v) {
    ENTER_DEVICE(d);
    for (int i = 0; i < n; i++) {
        bool tx = v[i].fieldId == 138, rx = v[i].fieldId == 139; /* NVLINK_THROUGHPUT_DATA_TX, _RX */
        /* A scope other than UINT_MAX is one link only. */
        unsigned share = v[i].scopeId == ~0u ? 1 : d->links;
        v[i].valueType = 3, v[i].nvmlReturn = (tx || rx) && d->links ? SUCCESS : NOT_SUPPORTED;
        if (!v[i].nvmlReturn)
            v[i].value.ullVal = (unsigned long long)(d->counter[tx ? NVLINK_TX : NVLINK_RX] * 1024) / share;
    }
    return SUCCESS;
}

/* ---- GPM ---- */
static const unsigned LIVE = 0x600D600D, DEAD = 0xDEADDEAD;
typedef struct { unsigned magic; struct gpu *of; double at, counter[RATES]; } *nvmlGpmSample_t;
typedef struct {
    unsigned metricId;
    nvmlReturn_t nvmlReturn;
    double value;
    struct { char *shortName, *longName, *unit; } metricInfo;
} nvmlGpmMetric_t;
typedef struct {
    unsigned version, numMetrics;
    nvmlGpmSample_t sample1, sample2;
    nvmlGpmMetric_t metrics[]; /* its declared length grows from driver to driver; numMetrics is what counts */
} nvmlGpmMetricsGet_t;
typedef struct { unsigned version, isSupportedDevice; } nvmlGpmSupport_t;
static const unsigned METRIC_ID[RATES] = {1, 2, 3, 5, 10, 11, 12, 13, 20, 21, 61, 60};

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t d, nvmlGpmSupport_t *support) {
    ENTER_DEVICE(d);
    if (support->version != 1) return ARGUMENT_VERSION_MISMATCH;
    support->isSupportedDevice = d->gpm;
    return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
    ENTER();
    *sample = calloc(1, sizeof **sample);
    if (!*sample) return MEMORY;
    (*sample)->magic = LIVE;
    live_samples++;
    return SUCCESS;
}

/* A freed sample stays mapped: a second free, or a use after it, must be seen rather than crash. */
nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    if (!sample || sample->magic != LIVE) return bad_frees++, INVALID_ARGUMENT;
    sample->magic = DEAD;
    live_samples--;
    return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t d, nvmlGpmSample_t sample) {
    ENTER_DEVICE(d);
    if (!d->gpm) return NOT_SUPPORTED;
    if (!sample || sample->magic != LIVE) return INVALID_ARGUMENT;
    sample->of = d, sample->at = w->now;
    memcpy(sample->counter, d->counter, sizeof sample->counter);
    return SUCCESS;
}

static void measure(nvmlGpmMetric_t *m, nvmlGpmSample_t a, nvmlGpmSample_t b) {
    if (m->metricId < MAX_METRIC && b->of->metric_code[m->metricId] == -1) return;
    m->nvmlReturn = NOT_SUPPORTED;
    for (int r = 0; r < RATES; r++)
        if (METRIC_ID[r] == m->metricId) {
            m->nvmlReturn = SUCCESS;
            m->value = (b->counter[r] - a->counter[r]) / (b->at - a->at); /* equal times: not a number, as there */
            if (r >= NVLINK_TX && !b->of->links) m->nvmlReturn = NOT_SUPPORTED;
        }
    if (m->metricId < MAX_METRIC && b->of->metric_code[m->metricId])
        m->nvmlReturn = b->of->metric_code[m->metricId], m->value = 0;
    if (m->metricId < MAX_METRIC && b->of->metric_nan[m->metricId]) m->value = NAN;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
    if (initialised && get->sample2 && get->sample2->magic == LIVE && get->sample2->of) {
        ENTER_DEVICE(get->sample2->of);
    } else {
        ENTER();
    }
    nvmlGpmSample_t a = get->sample1, b = get->sample2;
    if (get->version != 1) return ARGUMENT_VERSION_MISMATCH;
    if (!a || !b || a->magic != LIVE || b->magic != LIVE || !a->of || a->of != b->of) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < get->numMetrics; i++) measure(&get->metrics[i], a, b);
    return SUCCESS;
}
