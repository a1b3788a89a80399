/* The script reader and the running of counters; see world.h for the language. Not NVIDIA's code. */
#include "world.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static const char *const RATE_KEYS[RATES] = {"gr",   "sm",   "occ",  "tensor",  "dram",    "fp64",
                                             "fp32", "fp16", "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx"};
static const double LOAD[RATES] = {90, 70, 40, 40, 30, 0, 10, 5, 100, 200, 3000, 3000};
static const double SAMPLE_EVERY = 0.2; /* seconds between entries of the driver's utilisation buffer */

static struct world the;
static struct stat seen;
static double sampled;
static bool started;

static double real_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Values as by default; counters, sample buffers and the clock go on. */
static void reset(void) {
    for (int i = 0; i < MAX_GPUS; i++) {
        struct gpu *g = &the.gpu[i];
        snprintf(g->name, sizeof g->name, "NVIDIA H100 80GB HBM3");
        snprintf(g->uuid, sizeof g->uuid, "GPU-5700b000-0000-0000-0000-%012d", i);
        memcpy(g->rate, LOAD, sizeof g->rate);
        g->pci = 0x233010DE;
        g->power_mw = 500000, g->limit_mw = 700000, g->celsius = 60, g->sm_mhz = 1755, g->util = 95, g->links = 18;
        g->mem_total = 85520809984ULL, g->mem_reserved = 500000000ULL, g->mem_used = 40000000000ULL;
        g->reasons = 0, g->gpm = true, g->mig = false, g->lost = false;
        g->process[0] = (struct process){.pid = (unsigned)(4000 + i), .bytes = 39000000000ULL};
        g->processes = 1;
        memset(g->metric_code, 0, sizeof g->metric_code);
        memset(g->metric_nan, 0, sizeof g->metric_nan);
    }
    the.count = 8, the.errors = the.sleeps = 0, the.driver_gone = the.own_clock = false;
}

static void die(const char *why, const char *line) {
    fprintf(stderr, "stand-in NVML: %s in the script: %s\n", why, line);
    abort();
}

static void add_rule(bool error, int gpu, const char *call, long value) {
    unsigned *n = error ? &the.errors : &the.sleeps;
    if (*n == MAX_RULES) die("too many rules", call);
    struct rule *rule = (error ? the.error : the.sleep) + (*n)++;
    snprintf(rule->call, sizeof rule->call, "%s", call);
    rule->gpu = gpu, rule->value = value;
}

static void *unsigned_field(struct gpu *g, const char *key) {
    const struct { const char *key; void *at; } fields[] = {
        {"pci", &g->pci}, {"limit_mw", &g->limit_mw}, {"temp", &g->celsius},
        {"sm_mhz", &g->sm_mhz}, {"util", &g->util}, {"links", &g->links},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (!strcmp(key, fields[i].key)) return fields[i].at;
    return NULL;
}

static void *long_field(struct gpu *g, const char *key) {
    const struct { const char *key; void *at; } fields[] = {
        {"mem_total", &g->mem_total}, {"mem_reserved", &g->mem_reserved}, {"mem_used", &g->mem_used},
        {"reasons", &g->reasons},
    };
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (!strcmp(key, fields[i].key)) return fields[i].at;
    return NULL;
}

static bool set_number(struct gpu *g, const char *key, const char *text) {
    void *at;
    for (int r = 0; r < RATES; r++)
        if (!strcmp(key, RATE_KEYS[r])) return g->rate[r] = atof(text), true;
    if ((at = unsigned_field(g, key))) return *(unsigned *)at = (unsigned)strtoul(text, NULL, 0), true;
    if ((at = long_field(g, key))) return *(unsigned long long *)at = strtoull(text, NULL, 0), true;
    if (!strcmp(key, "power_mw")) return g->power_mw = atof(text), true;
    if (!strcmp(key, "energy")) return g->energy_mj = atof(text), true;
    if (!strcmp(key, "nvlink_mib")) return g->counter[NVLINK_TX] = g->counter[NVLINK_RX] = atof(text), true;
    if (!strcmp(key, "gpm")) return g->gpm = atoi(text), true;
    if (!strcmp(key, "mig")) return g->mig = atoi(text), true;
    return false;
}

static void set_gpu(int i, char *rest, const char *line) {
    struct gpu *g = &the.gpu[i];
    char key[64] = "", one[64] = "", two[64] = "";
    int from = 0;
    sscanf(rest, "%63s %n%63s %63s", key, &from, one, two);
    unsigned id = (unsigned)atoi(one) % MAX_METRIC;
    if (!strcmp(key, "name")) snprintf(g->name, sizeof g->name, "%s", rest + from);
    else if (!strcmp(key, "uuid")) snprintf(g->uuid, sizeof g->uuid, "%s", one);
    else if (!strcmp(key, "lost")) g->lost = true;
    else if (!strcmp(key, "error")) add_rule(true, i, one, atol(two));
    else if (!strcmp(key, "sleep")) add_rule(false, i, one, atol(two));
    else if (!strcmp(key, "metric")) g->metric_code[id] = (short)atoi(two);
    else if (!strcmp(key, "nan")) g->metric_nan[id] = true;
    else if (!strcmp(key, "idle")) g->processes = 0;
    else if (!strcmp(key, "process") && g->processes < MAX_PROCESSES)
        g->process[g->processes++] =
            (struct process){.pid = (unsigned)atoi(one), .bytes = *two ? strtoull(two, NULL, 10) : ~0ULL};
    else if (!set_number(g, key, one)) die("unknown key", line);
}

static void obey(char *line, double *clock) {
    char word[64] = "", one[64] = "", two[64] = "";
    int from = 0;
    line[strcspn(line, "#\n")] = 0;
    if (sscanf(line, "%63s %63s %n%63s", word, one, &from, two) < 1) return;
    if (!strcmp(word, "clock")) the.own_clock = true, *clock = atof(one) / 1000;
    else if (!strcmp(word, "count")) the.count = (unsigned)atoi(one) > MAX_GPUS ? MAX_GPUS : (unsigned)atoi(one);
    else if (!strcmp(word, "driver")) the.driver_gone = !strcmp(one, "gone");
    else if (!strcmp(word, "error")) add_rule(true, -1, one, atol(two));
    else if (!strcmp(word, "sleep")) add_rule(false, -1, one, atol(two));
    else if (strcmp(word, "gpu")) die("unknown statement", line);
    else
        for (int i = 0; i < MAX_GPUS; i++)
            if (*one == '*' || atoi(one) == i) set_gpu(i, line + from, line);
}

/* Reads the script if it changed; gives the time it says, or that of the real clock. */
static double script(void) {
    const char *path = getenv("NVML_STUB_SCRIPT");
    struct stat now;
    double clock = the.own_clock ? the.now : real_seconds();
    if (!path || !*path) return started ? clock : (reset(), real_seconds());
    if (stat(path, &now)) die("no file", path);
    if (started && now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return clock;
    FILE *file = fopen(path, "r");
    if (!file) die("cannot open", path);
    char line[512];
    reset(), seen = now, clock = real_seconds();
    while (fgets(line, sizeof line, file)) obey(line, &clock);
    fclose(file);
    return clock;
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
}

static void fill_samples(double from, double to) {
    for (sampled = fmax(sampled, from); sampled + SAMPLE_EVERY <= to + 1e-9; sampled += SAMPLE_EVERY)
        for (int i = 0; i < MAX_GPUS; i++)
            the.gpu[i].sample[the.gpu[i].samples++ % MAX_SAMPLES] =
                (struct sample){.us = (unsigned long long)((sampled + SAMPLE_EVERY) * 1e6), .value = the.gpu[i].util};
}

struct world *world_now(void) {
    double before = the.now, now = script(), passed = started ? fmax(0, now - before) : 0;
    bool scripted = getenv("NVML_STUB_SCRIPT") != NULL;
    for (int i = 0; i < MAX_GPUS; i++) {
        if (!scripted) live(&the.gpu[i], i, now);
        run(&the.gpu[i], passed);
    }
    fill_samples(started ? now - passed : now - 20 * SAMPLE_EVERY, now);
    the.now = now, started = true;
    return &the;
}

static long match(const struct rule *rules, unsigned n, const char *call, int gpu) {
    for (unsigned i = n; i-- > 0;)
        if (!strcmp(rules[i].call, call) && (rules[i].gpu == -1 || rules[i].gpu == gpu)) return rules[i].value;
    return 0;
}

int world_verdict(const char *call, int gpu) {
    long ms = match(the.sleep, the.sleeps, call, gpu);
    struct timespec pause = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
    if (ms) nanosleep(&pause, NULL);
    return (int)match(the.error, the.errors, call, gpu);
}
