/* The running of counters, the boards' profiles, and the rules of what fails; see world.h. Not NVIDIA's code. */
#include "world.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static const double LOAD[RATES] = {90, 70, 40, 40, 30, 0, 10, 5, 15, 100, 200, 3000, 3000, 0, 0};
static const double SAMPLE_EVERY = 0.2; /* seconds between entries of the driver's utilisation buffer */

/* As `nvidia-smi mig -lgip` lists them (NVIDIA's MIG user guide); the engines are left out. */
static const struct profile H100[] = {
    {"7g.80gb", 4, 0, 7, 8, 1, 132, 81152},  {"1g.10gb", 0, 19, 1, 1, 7, 16, 9984},
    {"1g.10gb+me", 7, 20, 1, 1, 1, 16, 9984}, {"1g.20gb", 9, 15, 1, 2, 4, 26, 20096},
    {"2g.20gb", 1, 14, 2, 2, 3, 32, 20096},  {"3g.40gb", 2, 9, 3, 4, 2, 60, 40448},
    {"4g.40gb", 3, 5, 4, 4, 1, 64, 40448},   {NULL, 0, 0, 0, 0, 0, 0, 0},
};
static const struct profile A100[] = {
    {"7g.40gb", 4, 0, 7, 8, 1, 98, 40192},  {"1g.5gb", 0, 19, 1, 1, 7, 14, 4864},
    {"1g.5gb+me", 7, 20, 1, 1, 1, 14, 4864}, {"1g.10gb", 9, 15, 1, 2, 4, 14, 9856},
    {"2g.10gb", 1, 14, 2, 2, 3, 28, 9856},  {"3g.20gb", 2, 9, 3, 4, 2, 42, 19968},
    {"4g.20gb", 3, 5, 4, 4, 1, 56, 19968},  {NULL, 0, 0, 0, 0, 0, 0, 0},
};
static const struct profile A30[] = {
    {"4g.24gb", 3, 0, 4, 4, 1, 56, 24064}, {"1g.6gb", 0, 14, 1, 1, 4, 14, 5952},
    {"2g.12gb", 1, 5, 2, 2, 2, 28, 11968}, {NULL, 0, 0, 0, 0, 0, 0, 0},
};

static struct world the;
static double sampled;
static bool started;

const struct profile *profiles_of(const struct gpu *g) {
    return strstr(g->name, "A100") ? A100 : strstr(g->name, "A30") ? A30 : H100;
}

static void default_fields(struct gpu *g) {
    /* ECC totals, remapped rows pending and failed, recovery action, memory temperature, power smoothing, and by link
     * replay, recovery and CRC errors. */
    static const struct { unsigned id, value; } there[] = {
        {3, 0}, {4, 0}, {144, 0}, {145, 0}, {230, 0}, {82, 65}, {251, 0}, {161, 0}, {162, 0}, {163, 0},
    };
    for (unsigned id = 0; id < MAX_FIELD; id++) g->field_code[id] = 3; /* NVML_ERROR_NOT_SUPPORTED */
    for (unsigned i = 0; i < sizeof there / sizeof *there; i++)
        g->field[there[i].id] = there[i].value, g->field_code[there[i].id] = 0;
}

static void default_instances(struct gpu *g, int gpu) {
    for (int gi = 0; gi < MAX_GI; gi++) {
        struct instance *in = &g->instance[gi];
        in->before = in->profile, in->profile = NULL, in->mem_used = 1ULL << 30, in->processes = 1, in->cis = 1;
        memcpy(in->rate, LOAD, sizeof in->rate);
        in->process[0] = (struct process){.pid = NO_PID + 1000 + (unsigned)(100 * gpu + gi), .bytes = 1ULL << 30};
    }
    g->places = 0, g->mig = false;
}

void world_reset(struct world *w) {
    for (int i = 0; i < MAX_GPUS; i++) {
        struct gpu *g = &w->gpu[i];
        strcpy(g->name, "NVIDIA H100 80GB HBM3");
        memcpy(g->uuid, "GPU-5700b000-0000-0000-0000-000000000000", 41);
        g->uuid[39] = (char)('0' + i % 10), g->uuid[38] = (char)('0' + i / 10);
        memcpy(g->rate, LOAD, sizeof g->rate);
        g->pci = 0x233010DE;
        g->power_mw = 500000, g->limit_mw = 700000, g->celsius = 60, g->sm_mhz = 1755, g->util = 95, g->links = 18;
        g->encoder = g->decoder = 0, g->counted = 100, g->c2c = g->cumulative = false;
        g->margin = 27, g->slowdown = 87;
        g->mem_total = 85520809984ULL, g->mem_reserved = 500000000ULL, g->mem_used = 40000000000ULL;
        g->reasons = 0, g->gpm = g->events = true, g->lost = g->vgpu = false;
        g->was = g->generation, g->generation = 0, g->xids = 0;
        g->process[0] = (struct process){.pid = NO_PID + (unsigned)i, .bytes = 39000000000ULL};
        g->processes = 1, g->uses = 0, g->stamped = false;
        memset(g->metric_code, 0, sizeof g->metric_code);
        memset(g->metric_nan, 0, sizeof g->metric_nan);
        default_fields(g), default_instances(g, i);
    }
    w->count = 8, w->errors = w->sleeps = w->strays = 0, w->driver_gone = w->own_clock = false;
    strcpy(w->version, "0.0");
}

/* Without a script each GPU lives a life of its own, so that a daemon run against it has something to tell. */
static void live(struct gpu *g, int i, double t) {
    double wave = 0.5 + 0.5 * sin(t / 20 + i), busy = i == 3 ? 0 : i == 5 ? fmod(t, 30) < 15 : 1;
    double hung = i == 6 && fmod(t, 900) > 450;
    for (int r = 0; r < RATES; r++) g->rate[r] = LOAD[r] * busy * (0.5 + 0.6 * wave);
    if (hung) memset(g->rate, 0, sizeof g->rate);
    if (hung) g->rate[GR] = g->rate[SM] = 100;
    g->util = hung ? 100 : (unsigned)(95 * busy);
    g->power_mw = 110000 + (hung ? 20000 : 450000 * busy * (0.5 + 0.5 * wave));
    g->sm_mhz = busy > 0 ? 1755 : 345;
}

static void run(struct gpu *g, double seconds) {
    for (int r = 0; r < RATES; r++) g->counter[r] += g->rate[r] * seconds;
    g->energy_mj += g->power_mw * seconds;
    for (int gi = 0; g->mig && gi < MAX_GI; gi++)
        for (int r = 0; g->instance[gi].profile && r < RATES; r++)
            g->instance[gi].counter[r] += g->instance[gi].rate[r] * seconds;
}

static void add_sample(struct gpu *g, double seconds) {
    struct sample *s = &g->sample[g->samples++ % MAX_SAMPLES];
    *s = (struct sample){.us = (unsigned long long)(seconds * 1e6), .value = g->util, .uses = g->uses};
    memcpy(s->use, g->use, sizeof s->use);
}

static void fill_samples(double to) {
    for (; sampled + SAMPLE_EVERY <= to + 1e-9; sampled += SAMPLE_EVERY)
        for (int i = 0; i < MAX_GPUS; i++) add_sample(&the.gpu[i], sampled + SAMPLE_EVERY);
}

struct world *world_now(void) {
    double before = the.now, now = world_script(&the, started), passed = started ? fmax(0, now - before) : 0;
    bool scripted = getenv("NVML_STUB_SCRIPT") != NULL;
    for (int i = 0; i < MAX_GPUS && (passed > 0 || !started); i++) {
        if (!scripted) live(&the.gpu[i], i, now);
        run(&the.gpu[i], passed);
    }
    if (!started) sampled = now - 20 * SAMPLE_EVERY;
    fill_samples(now);
    the.now = now, started = true;
    return &the;
}

static long match(const struct rule *rules, unsigned n, const char *call, int gpu, int gi) {
    for (unsigned i = n; i-- > 0;)
        if (!strcmp(rules[i].call, call) && (rules[i].gpu == -1 || rules[i].gpu == gpu) &&
            (rules[i].gi == -1 || rules[i].gi == gi))
            return rules[i].value;
    return 0;
}

int world_verdict(const char *call, int gpu, int gi) {
    long ms = match(the.sleep, the.sleeps, call, gpu, gi);
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    if (ms) nanosleep(&pause, NULL);
    return (int)match(the.error, the.errors, call, gpu, gi);
}
