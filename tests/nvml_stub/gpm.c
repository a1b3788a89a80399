/* GPM: samples of counters, of a board or of a GPU instance, and the metrics between two of them; see library.h. */
#include "library.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const unsigned LIVE = 0x600D600D, DEAD = 0xDEADDEAD;
static int live_samples;

typedef struct {
    unsigned magic, generation;
    nvmlDevice_t of;
    int gi;
    double at, counter[RATES];
} *nvmlGpmSample_t;
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
static const unsigned METRIC_ID[RATES] = {1, 2, 3, 5, 10, 11, 12, 13, 4, 20, 21, 61, 60, 100, 101};

/* Counters since reboot. Cycles add up over the SMs of an H100 at its clock; a link has its share of NVLink's bytes. */
enum { CYCLES_ELAPSED = 248, FIRST_LINK = 261, LINKS = 36 };
static const double CYCLES_A_SECOND = 132 * 1.755e9, MIB = 1024.0 * 1024.0;
static const struct { unsigned id; enum rate rate; } CYCLES[] = {
    {249, SM}, {250, TENSOR}, {252, TENSOR}, {257, INT}, {258, FP64}, {259, FP32}, {260, FP16},
};

int nvmlStubLiveSamples(void) { return live_samples; }

nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t h, nvmlGpmSupport_t *support) {
    ENTER_BOARD(h);
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

static nvmlReturn_t take(nvmlDevice_t h, int gi, const struct gpu *d, const double *counter, nvmlGpmSample_t sample) {
    if (!d->gpm) return NOT_SUPPORTED;
    if (!sample || sample->magic != LIVE) return INVALID_ARGUMENT;
    sample->of = h, sample->gi = gi, sample->generation = d->generation, sample->at = w->now;
    memcpy(sample->counter, counter, sizeof sample->counter);
    return SUCCESS;
}

nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t h, nvmlGpmSample_t sample) {
    ENTER_BOARD(h);
    return take(h, -1, d, d->counter, sample);
}

nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t h, unsigned gi, nvmlGpmSample_t sample) {
    ENTER_BOARD(h);
    if (!d->mig) return NOT_SUPPORTED;
    if (gi >= MAX_GI || !d->instance[gi].profile) return NOT_FOUND;
    DOOR(world_verdict(__func__, t.index, (int)gi));
    return take(h, (int)gi, d, d->instance[gi].counter, sample);
}

static nvmlReturn_t since_reboot(unsigned id, const struct gpu *d, nvmlGpmSample_t s, double *value) {
    unsigned link = (id - FIRST_LINK) / 2;
    if (!d->cumulative) return NOT_SUPPORTED;
    if (id == CYCLES_ELAPSED) return *value = s->at * CYCLES_A_SECOND, SUCCESS;
    for (unsigned i = 0; i < sizeof CYCLES / sizeof *CYCLES; i++)
        if (CYCLES[i].id == id) return *value = s->counter[CYCLES[i].rate] / 100 * CYCLES_A_SECOND, SUCCESS;
    if (s->gi >= 0) return NOT_SUPPORTED;
    if (id == 255 || id == 256) return *value = s->counter[id == 255 ? PCIE_TX : PCIE_RX] * MIB, SUCCESS;
    if (id < FIRST_LINK || link >= LINKS || link >= d->links) return NOT_SUPPORTED;
    return *value = s->counter[(id - FIRST_LINK) % 2 ? NVLINK_TX : NVLINK_RX] * MIB / d->links, SUCCESS;
}

static void measure(nvmlGpmMetric_t *m, const struct gpu *d, nvmlGpmSample_t a, nvmlGpmSample_t b) {
    if (m->metricId < MAX_METRIC && d->metric_code[m->metricId] == -1) return;
    m->nvmlReturn = NOT_SUPPORTED;
    for (int r = 0; r < RATES; r++)
        if (METRIC_ID[r] == m->metricId) {
            m->nvmlReturn = SUCCESS;
            m->value = (b->counter[r] - a->counter[r]) / (b->at - a->at); /* equal times: not a number, as there */
            bool nvlink = r == NVLINK_TX || r == NVLINK_RX, c2c = r == C2C_TX || r == C2C_RX;
            if ((nvlink && !d->links) || (c2c && !d->c2c) || (r >= PCIE_TX && b->gi >= 0)) m->nvmlReturn = NOT_SUPPORTED;
        }
    if (m->metricId >= CYCLES_ELAPSED) {
        m->nvmlReturn = since_reboot(m->metricId, d, b, &m->value);
        if (m->metricId > CYCLES_ELAPSED) m->value *= d->counted / 100.0;
    }
    if (m->metricId < MAX_METRIC && d->metric_code[m->metricId])
        m->nvmlReturn = d->metric_code[m->metricId], m->value = 0;
    if (m->metricId < MAX_METRIC && d->metric_nan[m->metricId]) m->value = NAN;
}

nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
    nvmlGpmSample_t a = get->sample1, b = get->sample2;
    if (get->version != 1) return ARGUMENT_VERSION_MISMATCH;
    if (!a || !b || a->magic != LIVE || b->magic != LIVE || !a->of || a->of != b->of || a->gi != b->gi)
        return INVALID_ARGUMENT;
    ENTER_BOARD(b->of);
    if (a->generation != b->generation) return INVALID_ARGUMENT;
    for (unsigned i = 0; i < get->numMetrics; i++) measure(&get->metrics[i], d, a, b);
    return SUCCESS;
}
