/* The script reader: its words, and where their values go; see world.h for the language. Not NVIDIA's code. */
#include "world.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

static const char *const RATE_KEYS[RATES] = {"gr",   "sm",   "occ",  "tensor",  "dram",    "fp64",
                                             "fp32", "fp16", "int",  "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx",
                                             "c2c_tx", "c2c_rx"};
static const struct { const char *key; unsigned id; } FIELD_KEYS[] = {
    {"ecc_corrected", 3}, {"ecc_uncorrected", 4}, {"remap_pending", 144}, {"remap_failure", 145},
    {"recovery", 230}, {"memory_temp", 82}, {"smoothing", 251},
};

static struct stat seen;

struct words { /* the words of one statement about one GPU or instance, after its number */
    char key[64], one[64], two[64], three[64];
    const char *rest; /* all behind the key */
};

static double real_seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void die(const char *why, const char *line) {
    fprintf(stderr, "stand-in NVML: %s in the script: %s\n", why, line);
    abort();
}

static struct words split(const char *text) {
    struct words w = {.rest = text};
    int from = (int)strlen(text);
    sscanf(text, "%63s %n%63s %63s %63s", w.key, &from, w.one, w.two, w.three);
    w.rest = text + from;
    return w;
}

static void add_rule(struct world *the, bool error, struct rule rule, const struct words *w) {
    unsigned *n = error ? &the->errors : &the->sleeps;
    if (*n == MAX_RULES) die("too many rules", w->one);
    snprintf(rule.call, sizeof rule.call, "%s", w->one);
    rule.value = atol(w->two);
    (error ? the->error : the->sleep)[(*n)++] = rule;
}

static bool set_rate(double *rate, const char *key, const char *text) {
    for (int r = 0; r < RATES; r++)
        if (!strcmp(key, RATE_KEYS[r])) return rate[r] = atof(text), true;
    return false;
}

static void add_process(struct process *process, unsigned *n, const struct words *w) {
    if (*n == MAX_PROCESSES) die("too many processes", w->one);
    unsigned long long bytes = *w->two ? strtoull(w->two, NULL, 10) : ~0ULL;
    process[(*n)++] = (struct process){.pid = (unsigned)atoi(w->one), .ci = (unsigned)atoi(w->three), .bytes = bytes};
}

static void add_use(struct gpu *g, const struct words *w) {
    if (g->uses == MAX_USES) die("too many users", w->one);
    g->use[g->uses++] = (struct use){(unsigned)strtoul(w->one, NULL, 10), (unsigned)strtoul(w->two, NULL, 10)};
}

static void set_field(struct gpu *g, unsigned id, const char *value, const char *code) {
    if (id >= MAX_FIELD) die("no such field", value);
    g->field_code[id] = !strcmp(value, "none") ? 3 : !strcmp(value, "fails") ? atoi(code) : 0;
    g->field[id] = strtoull(value, NULL, 0);
}

static void *unsigned_field(struct gpu *g, const char *key) {
    const struct { const char *key; void *at; } fields[] = {
        {"pci", &g->pci}, {"limit_mw", &g->limit_mw}, {"temp", &g->celsius}, {"sm_mhz", &g->sm_mhz},
        {"util", &g->util}, {"encoder", &g->encoder}, {"decoder", &g->decoder}, {"links", &g->links},
        {"counted", &g->counted}, {"margin", &g->margin}, {"slowdown", &g->slowdown},
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
    if (set_rate(g->rate, key, text)) return true;
    if ((at = unsigned_field(g, key))) return *(unsigned *)at = (unsigned)strtol(text, NULL, 0), true;
    if ((at = long_field(g, key))) return *(unsigned long long *)at = strtoull(text, NULL, 0), true;
    for (size_t i = 0; i < sizeof FIELD_KEYS / sizeof *FIELD_KEYS; i++)
        if (!strcmp(key, FIELD_KEYS[i].key)) return set_field(g, FIELD_KEYS[i].id, text, ""), true;
    if (!strcmp(key, "power_mw")) return g->power_mw = atof(text), true;
    if (!strcmp(key, "energy")) return g->energy_mj = atof(text), true;
    if (!strcmp(key, "nvlink_mib")) return g->counter[NVLINK_TX] = g->counter[NVLINK_RX] = atof(text), true;
    if (!strcmp(key, "gpm")) return g->gpm = atoi(text), true;
    if (!strcmp(key, "c2c")) return g->c2c = atoi(text), true;
    if (!strcmp(key, "cumulative")) return g->cumulative = atoi(text), true;
    return false;
}

/* One PLACE of "mig": a hole, or PROFILE[:GI][/CIS]. */
static void place(struct gpu *g, char *word) {
    char *cis = strchr(word, '/'), *id = strchr(word, ':');
    if (cis) *cis++ = 0;
    if (id) *id++ = 0;
    int gi = id ? atoi(id) : 1;
    while (!id && gi < MAX_GI - 1 && g->instance[gi].profile) gi++;
    const struct profile *profile = profiles_of(g);
    while (profile->name && strcmp(profile->name, word)) profile++;
    bool hole = !strcmp(word, "-");
    if (!hole && (!profile->name || gi < 0 || gi >= MAX_GI)) die("no such profile or instance", word);
    unsigned n = hole ? 1 : cis ? (unsigned)atoi(cis) : 1;
    if (!hole) g->instance[gi].profile = profile, g->instance[gi].cis = n;
    for (unsigned ci = 0; ci < n && g->places < MAX_PLACES; ci++)
        g->place[g->places++] = (struct place){hole ? -1 : gi, ci};
}

static void set_mig(struct gpu *g, const char *rest) {
    char text[512], *save = NULL;
    snprintf(text, sizeof text, "%s", rest);
    char *word = strtok_r(text, " ", &save);
    g->mig = word && strcmp(word, "off");
    if (g->mig && !strcmp(word, "on")) word = strtok_r(NULL, " ", &save);
    for (; g->mig && word; word = strtok_r(NULL, " ", &save)) place(g, word);
}

static void set_instance(struct world *the, int gpu, const char *rest, const char *line) {
    int gi = -1, from = 0;
    sscanf(rest, "%d %n", &gi, &from);
    if (gi < 0 || gi >= MAX_GI) die("no such instance", line);
    struct instance *in = &the->gpu[gpu].instance[gi];
    struct words w = split(rest + from);
    if (!strcmp(w.key, "error")) add_rule(the, true, (struct rule){.gpu = gpu, .gi = gi}, &w);
    else if (!strcmp(w.key, "idle")) in->processes = 0;
    else if (!strcmp(w.key, "process")) add_process(in->process, &in->processes, &w);
    else if (!strcmp(w.key, "mem_used")) in->mem_used = strtoull(w.one, NULL, 0);
    else if (!set_rate(in->rate, w.key, w.one)) die("unknown key", line);
}

static void set_gpu(struct world *the, int i, const char *rest, const char *line) {
    struct gpu *g = &the->gpu[i];
    struct words w = split(rest);
    unsigned id = (unsigned)atoi(w.one) % MAX_METRIC;
    struct rule rule = {.gpu = i, .gi = -1};
    if (!strcmp(w.key, "name")) snprintf(g->name, sizeof g->name, "%.95s", w.rest);
    else if (!strcmp(w.key, "uuid")) snprintf(g->uuid, sizeof g->uuid, "%s", w.one);
    else if (!strcmp(w.key, "lost")) g->lost = true;
    else if (!strcmp(w.key, "vgpu")) g->vgpu = true, g->gpm = g->events = false;
    else if (!strcmp(w.key, "reset")) g->generation = *w.one ? (unsigned)atoi(w.one) : 1;
    else if (!strcmp(w.key, "no_events")) g->events = false;
    else if (!strcmp(w.key, "xid") && g->xids < MAX_XIDS) g->xid[g->xids++] = (unsigned)atoi(w.one);
    else if (!strcmp(w.key, "error")) add_rule(the, true, rule, &w);
    else if (!strcmp(w.key, "sleep")) add_rule(the, false, rule, &w);
    else if (!strcmp(w.key, "metric")) g->metric_code[id] = (short)atoi(w.two);
    else if (!strcmp(w.key, "nan")) g->metric_nan[id] = true;
    else if (!strcmp(w.key, "idle")) g->processes = 0;
    else if (!strcmp(w.key, "process")) add_process(g->process, &g->processes, &w);
    else if (!strcmp(w.key, "use")) add_use(g, &w);
    else if (!strcmp(w.key, "use_stamp")) g->stamped = true, g->stamp = strtoull(w.one, NULL, 10);
    else if (!strcmp(w.key, "field")) set_field(g, (unsigned)atoi(w.one), w.two, w.three);
    else if (!strcmp(w.key, "mig")) set_mig(g, w.rest);
    else if (!strcmp(w.key, "gi")) set_instance(the, i, w.rest, line);
    else if (!set_number(g, w.key, w.one)) die("unknown key", line);
}

static void obey(struct world *the, char *line, double *clock) {
    line[strcspn(line, "#\n")] = 0;
    struct words w = split(line);
    struct rule rule = {.gpu = -1, .gi = -1};
    if (!*w.key) return;
    if (!strcmp(w.key, "clock")) the->own_clock = true, *clock = atof(w.one) / 1000;
    else if (!strcmp(w.key, "count")) the->count = (unsigned)atoi(w.one) > MAX_GPUS ? MAX_GPUS : (unsigned)atoi(w.one);
    else if (!strcmp(w.key, "version")) snprintf(the->version, sizeof the->version, "%s", w.one);
    else if (!strcmp(w.key, "stray") && the->strays < MAX_XIDS) the->stray[the->strays++] = (unsigned)atoi(w.one);
    else if (!strcmp(w.key, "driver")) the->driver_gone = !strcmp(w.one, "gone");
    else if (!strcmp(w.key, "error")) add_rule(the, true, rule, &w);
    else if (!strcmp(w.key, "sleep")) add_rule(the, false, rule, &w);
    else if (strcmp(w.key, "gpu")) die("unknown statement", line);
    else
        for (int i = 0; i < MAX_GPUS; i++)
            if (*w.one == '*' || atoi(w.one) == i) set_gpu(the, i, w.rest + strlen(w.one), line);
}

/* What begins anew when the script makes it another: a board's counters by a reset, an instance's by its creation. */
static void begin_anew(struct gpu *g) {
    if (g->generation != g->was) g->energy_mj = 0, memset(g->counter, 0, sizeof g->counter);
    for (int gi = 0; gi < MAX_GI; gi++)
        if (g->generation != g->was || g->instance[gi].profile != g->instance[gi].before)
            memset(g->instance[gi].counter, 0, sizeof g->instance[gi].counter);
}

double world_script(struct world *the, bool started) {
    const char *path = getenv("NVML_STUB_SCRIPT");
    struct stat now;
    double clock = the->own_clock ? the->now : real_seconds();
    if (!path || !*path) return started ? clock : (world_reset(the), real_seconds());
    if (stat(path, &now)) die("no file", path);
    if (started && now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return clock;
    FILE *file = fopen(path, "r");
    if (!file) die("cannot open", path);
    char line[512];
    world_reset(the), seen = now, clock = real_seconds();
    while (fgets(line, sizeof line, file)) obey(the, line, &clock);
    fclose(file);
    for (int i = 0; i < MAX_GPUS; i++) begin_anew(&the->gpu[i]);
    return clock;
}
