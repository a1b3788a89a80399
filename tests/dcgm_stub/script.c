/* The script reader; see world.h for the language. Not NVIDIA's code. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "world.h"

static const char *const RATE_KEYS[SETTABLE_RATES] = {"gr",   "sm",   "occ",  "tensor", "dram",    "fp64",
                                                      "fp32", "fp16", "imma", "hmma",   "dfma",    "int",
                                                      "pcie_tx", "pcie_rx", "nvlink_tx", "nvlink_rx", "c2c_tx", "c2c_rx"};
static const double LOAD[RATES] = {90, 70, 40, 40, 30, 0, 10, 5, 0, 35, 0, 15, 100, 200, 3000, 3000, 0, 0, 100, 0};

struct world world;
static struct stat seen;
static bool started;

static int64_t real_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

void die(const char *why, const char *what) {
    fprintf(stderr, "stand-in libdcgm: %s: %s\n", why, what);
    abort();
}

static void reset_unit(struct unit *u) {
    memset(u, 0, sizeof *u);
    memcpy(u->rate, LOAD, sizeof u->rate);
    for (int f = 0; f < FIELD_COUNT; f++)
        if (FIELDS[f].kind == GAUGE) u->gauge[f] = FIELDS[f].param;
}

static void reset_gpu(int i) {
    struct gpu *g = &world.gpu[i];
    memset(g, 0, sizeof *g);
    reset_unit(&g->unit);
    snprintf(g->name, sizeof g->name, "NVIDIA H100 80GB HBM3");
    snprintf(g->uuid, sizeof g->uuid, "GPU-00000000-0000-0000-0000-%012d", i);
    g->pci = 0x233010DE, g->links = 18, g->gpm = true, g->index = -1;
}

/* Values as by default; the clock goes on. */
static void reset(void) {
    int64_t now = world.now;
    memset(&world, 0, sizeof world);
    world.now = now, world.count = 2;
    snprintf(world.version, sizeof world.version, "version:4.0.0;stand-in, not NVIDIA's");
    for (int i = 0; i < MAX_GPUS; i++) reset_gpu(i);
    for (int f = 0; f < FIELD_COUNT; f++)
        world.lacking[f] = FIELDS[f].id == 1425 || FIELDS[f].id == 1523 || (FIELDS[f].id > 1083 && FIELDS[f].id < 1097);
}

static void add_rule(bool error, int gpu, const char *call, long value) {
    unsigned *n = error ? &world.errors : &world.sleeps;
    if (*n == MAX_RULES) die("too many rules in the script", call);
    struct rule *rule = (error ? world.error : world.sleep) + (*n)++;
    snprintf(rule->call, sizeof rule->call, "%s", call);
    rule->gpu = gpu, rule->value = value;
}

/* A field's place, whether or not this DCGM has it. */
static int any_field(const char *id) {
    for (int f = 0; f < FIELD_COUNT; f++)
        if (FIELDS[f].id == atoi(id)) return f;
    die("a field this stand-in does not know", id);
}

static void add_instance(struct gpu *g, const char *profile) {
    static const unsigned FIRST_ID[] = {0, 7, 3, 1, 1, 0, 0, 0, 0};
    struct instance *i = &g->instance[g->instances];
    unsigned before = 0;
    if (g->instances == INSTANCES_PER_GPU || sscanf(profile, "%ug.%ugb", &i->slices, &i->memory_gb) != 2 ||
        i->slices > 8)
        die("not a MIG profile, or too many", profile);
    for (unsigned k = 0; k < g->instances; k++) before += g->instance[k].slices == i->slices;
    const char *slash = strchr(profile, '/');
    i->computes = slash ? (unsigned)atoi(slash + 1) : 1;
    i->nvml_id = FIRST_ID[i->slices] + before;
    i->unit = g->unit;
    i->unit.gauge[any_field("250")] = i->memory_gb * 1024;
    i->unit.gauge[any_field("252")] = i->memory_gb * 512;
    i->unit.gauge[any_field("253")] = 10;
    g->instances++;
}

static void set_mig(struct gpu *g, char *profiles) {
    g->mig = true, g->instances = 0;
    for (char *word = strtok(profiles, " \t"); word; word = strtok(NULL, " \t")) add_instance(g, word);
}

static void add_group(struct gpu *g, char *words) {
    char *major = strtok(words, " \t"), *minor = strtok(NULL, " \t");
    if (!minor || g->groups == MAX_METRIC_GROUPS) die("a metric group needs two numbers, and there are ten", g->name);
    struct metric_group *group = &g->group[g->groups++];
    *group = (struct metric_group){.major = (uint16_t)atoi(major), .minor = (uint16_t)atoi(minor)};
    for (char *word = strtok(NULL, " \t"); word; word = strtok(NULL, " \t"))
        group->field[group->count++] = FIELDS[any_field(word)].id;
}

static bool set_unit(struct unit *u, const char *key, const char *one, const char *two) {
    int field = field_named(key);
    for (int r = 0; r < SETTABLE_RATES; r++)
        if (!strcmp(key, RATE_KEYS[r])) return u->rate[r] = atof(one), true;
    if (!strcmp(key, "field")) return u->gauge[any_field(one)] = strtod(two, NULL), true;
    if (!strcmp(key, "blank")) return u->blank[any_field(one)] = blank_kind(two), true;
    if (!strcmp(key, "status")) return u->status[any_field(one)] = atoi(two), true;
    if (field >= 0) u->gauge[field] = strtod(one, NULL); /* takes 0x8, too */
    return field >= 0;
}

static bool set_state(struct gpu *g, const char *key, const char *one, const char *two) {
    struct { const char *word; bool *is; } flags[] = {
        {"lost", &g->lost}, {"detached", &g->detached}, {"unsupported", &g->unsupported}, {"gone", &g->gone},
        {"stuck", &g->stuck}, {"failing", &g->failing},
    };
    for (unsigned i = 0; i < sizeof flags / sizeof *flags; i++)
        if (!strcmp(key, flags[i].word)) return *flags[i].is = true;
    if (!strcmp(key, "uuid")) return snprintf(g->uuid, sizeof g->uuid, "%.*s", MAX_NAME - 1, one) > 0;
    if (!strcmp(key, "pci")) return g->pci = (unsigned)strtoul(one, NULL, 16), true;
    if (!strcmp(key, "links")) return g->links = (unsigned)atoi(one), true;
    if (!strcmp(key, "gpm")) return g->gpm = atoi(one), true;
    if (!strcmp(key, "c2c")) return g->c2c = atoi(one), true;
    if (!strcmp(key, "profiling")) return g->profiling = atoi(one), true;
    if (!strcmp(key, "refuse")) return g->refusal[any_field(one)] = atoi(two), true;
    if (!strcmp(key, "energy")) return g->energy = atof(one), g->set_energy = true;
    if (!strcmp(key, "slow")) return g->slow_ms = atol(one), true;
    if (!strcmp(key, "index")) return g->index = atoi(one), true;
    if (!strcmp(key, "bound")) return g->bound_until = atoll(one), true;
    if (!strcmp(key, "xid")) {
        if (g->xids == MAX_XIDS) die("too many error events of one GPU in the script", one);
        g->xid[g->xids] = atoi(one), g->xid_sequence[g->xids++] = atoi(two);
        return true;
    }
    return false;
}

static void set_instance(struct gpu *g, const char *number, const char *rest, const char *line) {
    char key[64] = "", one[64] = "", two[64] = "";
    sscanf(rest, "%*s %63s %63s %63s", key, one, two);
    if (atoi(number) >= (int)g->instances || !set_unit(&g->instance[atoi(number)].unit, key, one, two))
        die("no such instance or key in the script", line);
}

static void set_gpu(int i, char *rest, const char *line) {
    struct gpu *g = &world.gpu[i];
    char key[64] = "", one[128] = "", two[128] = "";
    int from = 0;
    sscanf(rest, "%63s %n%127s %127s", key, &from, one, two);
    if (!from) from = (int)strlen(rest);
    char tail[512];
    snprintf(tail, sizeof tail, "%s", rest + from);
    if (!strcmp(key, "name")) snprintf(g->name, sizeof g->name, "%.*s", MAX_NAME - 1, tail);
    else if (!strcmp(key, "error")) add_rule(true, i, one, atol(two));
    else if (!strcmp(key, "sleep")) add_rule(false, i, one, atol(two));
    else if (!strcmp(key, "mig")) set_mig(g, tail);
    else if (!strcmp(key, "group")) add_group(g, tail);
    else if (!strcmp(key, "instance")) set_instance(g, one, tail, line);
    else if (!set_state(g, key, one, two) && !set_unit(&g->unit, key, one, two)) die("unknown key in the script", line);
}

static void set_engine(const char *state, const char *number) {
    if (!strcmp(state, "up")) world.incarnation = (unsigned)atoi(number);
    else if (!strcmp(state, "down")) world.down = true;
    else if (!strcmp(state, "hung")) world.hung = true, world.hung_ms = *number ? atol(number) : 60000;
    else if (!strcmp(state, "blind")) world.blind = true;
    else die("an engine is up, down, blind or hung, not", state);
}

static bool obey_engine(const char *word, const char *one, const char *two) {
    if (!strcmp(word, "engine")) set_engine(one, two);
    else if (!strcmp(word, "drop")) world.drop = strtoull(one, NULL, 10);
    else if (!strcmp(word, "embedded")) world.embedded = atoi(one);
    else if (!strcmp(word, "profiling")) world.profiling = atoi(one);
    else if (!strcmp(word, "paused")) world.paused = atoi(one);
    else if (!strcmp(word, "jitter")) world.jitter_us = atol(one);
    else if (!strcmp(word, "scatter")) world.scatter_us = atol(one);
    else if (!strcmp(word, "driver_window")) world.driver_window_us = atol(one);
    else if (!strcmp(word, "knows")) world.lacking[any_field(one)] = false;
    else if (!strcmp(word, "lacks")) world.lacking[any_field(one)] = true;
    else if (!strcmp(word, "listen") && world.listens < MAX_LISTENS)
        snprintf(world.listen[world.listens++], MAX_NAME, "%.*s", MAX_NAME - 1, one);
    else if (!strcmp(word, "watcher") && world.watchers < MAX_RULES)
        world.watcher[world.watchers].field = FIELDS[any_field(one)].id,
        world.watcher[world.watchers++].us = atoll(two) * 1000;
    else if (!strcmp(word, "late") && world.lates < MAX_RULES)
        world.late[world.lates].field = FIELDS[any_field(one)].id, world.late[world.lates++].us = atoll(two) * 1000;
    else return false;
    return true;
}

static void obey(char *line, int64_t *clock) {
    char word[64] = "", one[128] = "", two[128] = "";
    int from = 0;
    line[strcspn(line, "#\n")] = 0;
    if (sscanf(line, "%63s %127s %n%127s", word, one, &from, two) < 1) return;
    if (!strcmp(word, "clock")) world.own_clock = true, *clock = atoll(one);
    else if (!strcmp(word, "count")) world.count = (unsigned)atoi(one) > MAX_GPUS ? MAX_GPUS : (unsigned)atoi(one);
    else if (!strcmp(word, "version")) snprintf(world.version, sizeof world.version, "%.*s", MAX_NAME - 1, one);
    else if (!strcmp(word, "error")) add_rule(true, -1, one, atol(two));
    else if (!strcmp(word, "sleep")) add_rule(false, -1, one, atol(two));
    else if (!strcmp(word, "gpu"))
        for (int i = 0; i < MAX_GPUS; i++) {
            if (*one == '*' || atoi(one) == i) set_gpu(i, line + from, line);
        }
    else if (!obey_engine(word, one, two)) die("unknown statement in the script, or too many", line);
}

int64_t script_read(bool *changed) {
    const char *path = getenv("DCGM_STUB_SCRIPT");
    struct stat now;
    int64_t clock = world.own_clock ? world.now : real_us();
    *changed = !started;
    if (!path || !*path) {
        if (!started) reset();
        return started = true, real_us();
    }
    if (stat(path, &now)) die("no script", path);
    if (started && now.st_ino == seen.st_ino && now.st_size == seen.st_size &&
        now.st_mtim.tv_sec == seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return clock;
    FILE *file = fopen(path, "r");
    if (!file) die("cannot open the script", path);
    char line[512];
    *changed = started = true;
    reset(), seen = now, clock = real_us();
    while (fgets(line, sizeof line, file)) obey(line, &clock);
    fclose(file);
    return clock;
}
