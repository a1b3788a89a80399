/* The door every call goes through, the handles, and the beginning and end of the library; see library.h. */
#include "library.h"

#include <stdio.h>
#include <string.h>

enum { GENERATIONS = 8 };

struct world *w;
int bad_frees;
static int initialised;
static struct { char name[64]; unsigned long n; } calls[96];
static struct handle boards[MAX_GPUS][GENERATIONS], places[MAX_GPUS][MAX_PLACES];

/* In a vGPU guest the board's sensors and links are the host's affair (NVIDIA vGPU Software User Guide). */
static const char *const NOT_IN_A_GUEST[] = {
    "nvmlDeviceGetPowerUsage", "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureThreshold", "nvmlDeviceGetMarginTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetMigMode", "nvmlDeviceRegisterEvents", "nvmlDeviceGetSamples", "nvmlDeviceGetNumGpuCores",
};

void tally(const char *name, unsigned long n) {
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
        if (!*calls[i].name) snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
        if (!strcmp(calls[i].name, name)) { calls[i].n += n; return; }
    }
}

int nvmlStubBadFrees(void) { return bad_frees; }
int nvmlStubInitialised(void) { return initialised; }
unsigned long nvmlStubCalls(const char *name) {
    for (size_t i = 0; i < sizeof calls / sizeof *calls; i++)
        if (!strcmp(calls[i].name, name)) return calls[i].n;
    return 0;
}

static nvmlReturn_t awake(const char *name) {
    if (!initialised) return UNINITIALIZED;
    w = world_now();
    if (w->driver_gone) initialised = 0;
    if (!initialised) return UNINITIALIZED;
    tally(name, 1);
    happen();
    return SUCCESS;
}

nvmlReturn_t enter(const char *name) {
    nvmlReturn_t asleep = awake(name);
    return asleep ? asleep : world_verdict(name, -1, -1);
}

static bool guest(const struct gpu *d, const char *name) {
    for (size_t i = 0; d->vgpu && i < sizeof NOT_IN_A_GUEST / sizeof *NOT_IN_A_GUEST; i++)
        if (!strcmp(name, NOT_IN_A_GUEST[i])) return true;
    return false;
}

/* Whether it lies in one of our tables at all: anything else is an address that means nothing. */
static bool ours(nvmlDevice_t h) {
    return (h >= &boards[0][0] && h < &boards[0][0] + MAX_GPUS * GENERATIONS) ||
           (h >= &places[0][0] && h < &places[0][0] + MAX_GPUS * MAX_PLACES);
}

nvmlReturn_t enter_either(const char *name, nvmlDevice_t h, struct target *t) {
    DOOR(awake(name));
    if (!ours(h)) return INVALID_ARGUMENT;
    struct gpu *d = &w->gpu[h->gpu];
    *t = (struct target){.d = d, .index = h->gpu, .gi = h->gi, .ci = h->ci};
    if (d->lost) return GPU_IS_LOST;
    if (h->generation != d->generation) return INVALID_ARGUMENT;
    if (h->place >= 0) {
        const struct place *p = &d->place[h->place];
        bool same = d->mig && (unsigned)h->place < d->places && p->gi == h->gi && p->ci == h->ci;
        if (!same) return INVALID_ARGUMENT;
        t->in = &d->instance[h->gi];
    }
    return guest(d, name) ? NOT_SUPPORTED : world_verdict(name, h->gpu, h->gi);
}

nvmlReturn_t enter_board(const char *name, nvmlDevice_t h, struct target *t) {
    nvmlReturn_t verdict = enter_either(name, h, t);
    return !verdict && t->in ? NOT_SUPPORTED : verdict;
}

nvmlReturn_t board_handle(int gpu, nvmlDevice_t *handle) {
    unsigned generation = w->gpu[gpu].generation;
    if (generation >= GENERATIONS) return INVALID_ARGUMENT;
    *handle = &boards[gpu][generation];
    **handle = (struct handle){.gpu = gpu, .place = -1, .gi = -1, .generation = generation};
    return SUCCESS;
}

nvmlReturn_t mig_handle(int gpu, unsigned place, nvmlDevice_t *handle) {
    const struct gpu *d = &w->gpu[gpu];
    if (!d->mig || place >= d->places || d->place[place].gi < 0) return NOT_FOUND;
    *handle = &places[gpu][place];
    **handle = (struct handle){gpu, (int)place, d->place[place].gi, d->place[place].ci, d->generation};
    return SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    w = world_now();
    int verdict = w->driver_gone ? DRIVER_NOT_LOADED : world_verdict(__func__, -1, -1);
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
    snprintf(version, length, "%s stand-in, not NVIDIA", w->version);
    return SUCCESS;
}
