/* The engine's cache: what is watched, when it is sampled, and the values kept; see world.h. Not NVIDIA's code. */
#include <stdlib.h>
#include <string.h>

#include "world.h"

enum { MAX_WATCHES = 32, EARLY_US = 60 };
static const uint64_t OUTSIDE = ~0ULL; /* the client that the script speaks of */
static const double LONGEST_S = 3600;

struct watch { uint64_t client; int64_t period; double keep; bool unsampled; };
struct series {
    int place, field, watches, first, count, room;
    struct watch watch[MAX_WATCHES];
    struct value *value;
    struct baseline base;
    int64_t period, grid, due, cycle;
};
static struct series *table[ENTITIES][MAX_FIELDS], *all[ENTITIES * MAX_FIELDS];
static int series_count;
unsigned long errors_logged;
static bool started, paused;
static unsigned incarnation;
static int64_t held_until; /* by the driver, which answers for a slow board */
static uint64_t layout[MAX_GPUS], events[MAX_GPUS][MAX_XIDS]; /* events: those of the script before */

static struct series *series(int place, int field, bool make) {
    struct series **at = &table[place][field];
    if (!*at && make) {
        *at = all[series_count++] = calloc(1, sizeof **at);
        (*at)->place = place, (*at)->field = field;
    }
    return *at;
}

static void empty(struct series *s) {
    free(s->value);
    *s = (struct series){.place = s->place, .field = s->field};
}

/* ---- values ---- */

static double kept_seconds(const struct series *s) {
    double longest = 0;
    for (int i = 0; i < s->watches; i++)
        if (s->watch[i].keep > longest) longest = s->watch[i].keep;
    return longest;
}

static void append(struct series *s, struct value value) {
    int64_t expired = value.at - (int64_t)(kept_seconds(s) * 1e6);
    while (s->count && s->value[s->first].at < expired) s->first++, s->count--;
    if (s->first + s->count == s->room) {
        if (s->first > s->room / 2) {
            memmove(s->value, s->value + s->first, (size_t)s->count * sizeof *s->value);
            s->first = 0;
        } else {
            s->room = s->room ? 2 * s->room : 8;
            s->value = realloc(s->value, (size_t)s->room * sizeof *s->value);
        }
    }
    s->value[s->first + s->count++] = value;
}

static int64_t lateness(int field) {
    for (unsigned i = world.lates; i-- > 0;)
        if (world.late[i].field == FIELDS[field].id) return world.late[i].us;
    return 0;
}

/* On older boards the profiling module samples these fields, and the cache may have watches that it has ended. */
static bool sampled(const struct series *s) {
    if (!profiled(s->field) || world.gpu[gpu_of(s->place)].gpm) return s->watches;
    for (int i = 0; i < s->watches; i++)
        if (!s->watch[i].unsampled) return true;
    return false;
}

bool engine_sampled(int place, int field) { return table[place][field] && sampled(table[place][field]); }

static bool measure(struct series *s, struct value *to) {
    const struct field *f = &FIELDS[s->field];
    const struct gpu *g = &world.gpu[gpu_of(s->place)];
    int level = (int)entity_at(s->place).group, instance = instance_of(s->place);
    if (g->stuck || g->detached || unit_at(s->place)->status[s->field]) return false;
    if (!profiled(s->field)) return measure_gauge(s->place, s->field, to);
    if (!sampled(s)) return s->base.known = false;
    errors_logged += level > f->level || unit_at(s->place)->blank[s->field] == 1;
    if (level > f->level || (instance >= 0 && !g->instance[instance].computes)) return false;
    if ((paused || world.paused) && !g->gpm)
        return blank_of(s->field, 1, to), s->base.known = false, rates_forget(s->place), true;
    if (f->kind != RATIO && f->kind != BYTES) return measure_gauge(s->place, s->field, to);
    return measure_rate(s->place, s->field, s->period, &s->base, to);
}

/* One field after the other is processed, each cycle somewhat faster or slower than the last. */
static int64_t scattered(const struct series *s) {
    uint64_t mixed = (uint64_t)s->cycle * 2654435761u ^ (uint64_t)(s->field + 1) * 40503u ^ (uint64_t)s->place * 97u;
    return (int64_t)(mixed % (uint64_t)world.scatter_us);
}

/* The stamps of one cycle lie some microseconds apart, before its end; the first one is when the watch was made. */
static void sample(struct series *s, int64_t at) {
    struct value value = {.at = s->cycle++ ? at - EARLY_US + s->field * 7 % EARLY_US : at};
    if (world.scatter_us && s->cycle > 1) value.at += scattered(s);
    value.stored = value.at + lateness(s->field);
    if (value.stored < held_until) value.stored = held_until;
    if (exists(s->place) && measure(s, &value)) append(s, value);
}

/* ---- watches ---- */

static void reschedule(struct series *s) {
    int64_t before = s->period, last = s->grid - before;
    s->period = 0;
    for (int i = 0; i < s->watches; i++)
        if (!s->period || s->watch[i].period < s->period) s->period = s->watch[i].period;
    if (!s->watches) return;
    s->grid = before ? last + s->period : world.now;
    if (s->grid < world.now) s->grid = world.now;
    s->due = s->grid;
}

/* Cycles that passed while the loop was held are left out. */
static void advance(struct series *s, int64_t at) {
    do s->grid += s->period;
    while (s->grid <= at - world.jitter_us);
    s->due = s->grid + (s->cycle % 2 ? 0 : world.jitter_us);
}

static struct watch *watch_of(struct series *s, uint64_t client) {
    for (int i = 0; s && i < s->watches; i++)
        if (s->watch[i].client == client) return &s->watch[i];
    return NULL;
}

status_t engine_watch(int place, int field, uint64_t client, int64_t period, double keep, int samples) {
    struct series *s = series(place, field, true);
    struct watch *w = watch_of(s, client);
    if (!w && s->watches == MAX_WATCHES) die("too many clients watch one field", FIELDS[field].tag);
    bool first = !s->watches;
    if (!w) w = &s->watch[s->watches++];
    if (keep <= 0 || keep > LONGEST_S) keep = LONGEST_S;
    if (samples > 0 && 2e-6 * samples * (double)period < keep) keep = 2e-6 * samples * (double)period;
    *w = (struct watch){.client = client, .period = period, .keep = keep};
    reschedule(s);
    if (first) s->cycle = 0, sample(s, world.now), advance(s, world.now);
    return OK;
}

static void remove_watch(struct series *s, struct watch *w) {
    *w = s->watch[--s->watches];
    reschedule(s);
}

status_t engine_unwatch(int place, int field, uint64_t client) {
    struct watch *w = watch_of(series(place, field, false), client);
    if (!w) return NOT_WATCHED;
    remove_watch(table[place][field], w);
    return OK;
}

void engine_end_profiling(int place, uint64_t client) {
    for (int f = 0; f < FIELD_COUNT; f++) {
        struct watch *w = profiled(f) ? watch_of(table[place][f], client) : NULL;
        if (w) w->unsampled = true;
    }
}

void engine_forget_client(uint64_t client) {
    for (int i = 0; i < series_count; i++) {
        struct watch *w = watch_of(all[i], client);
        if (w) remove_watch(all[i], w);
    }
}

unsigned engine_watches(void) {
    unsigned n = 0;
    for (int i = 0; i < series_count; i++)
        for (int k = 0; k < all[i]->watches; k++) n += all[i]->watch[k].client != OUTSIDE;
    return n;
}

bool engine_watched(int place, int field) { return table[place][field] && table[place][field]->watches; }

void engine_pause(bool on) { paused = on; }

void engine_wipe(void) {
    for (int i = 0; i < series_count; i++) empty(all[i]);
    for (int place = 0; place < ENTITIES; place++) rates_forget(place);
    paused = false, held_until = 0;
}

/* ---- the run of time ---- */

int64_t engine_held_us(void) { return held_until > world.now ? held_until - world.now : 0; }

static int64_t round_takes(int64_t at) {
    bool asked[MAX_GPUS] = {false};
    int64_t us = 0;
    for (int i = 0; i < series_count; i++)
        if (all[i]->watches && all[i]->due <= at && exists(all[i]->place)) asked[gpu_of(all[i]->place)] = true;
    for (int i = 0; i < MAX_GPUS; i++) us += asked[i] * world.gpu[i].slow_ms * 1000;
    return us;
}

static void run(int64_t to) {
    for (;;) {
        int64_t next = to + 1;
        for (int i = 0; i < series_count; i++)
            if (all[i]->watches && all[i]->due < next) next = all[i]->due;
        if (next < held_until) next = held_until;
        if (next > to) break;
        rates_run(next);
        held_until = next + round_takes(next);
        for (int i = 0; i < series_count; i++)
            if (all[i]->watches && all[i]->due <= next) sample(all[i], next), advance(all[i], next);
    }
    rates_run(to);
}

static int64_t outside_period(const struct series *s) {
    int64_t shortest = 0;
    for (unsigned i = 0; i < world.watchers; i++)
        if (world.watcher[i].field == FIELDS[s->field].id && (!shortest || world.watcher[i].us < shortest))
            shortest = world.watcher[i].us;
    return exists(s->place) && (int)entity_at(s->place).group <= FIELDS[s->field].level ? shortest : 0;
}

static void follow_outside(void) {
    for (unsigned i = 0; i < world.watchers; i++)
        for (int place = 0; place < ENTITIES; place++)
            if (exists(place)) series(place, field_at(world.watcher[i].field), true);
    for (int i = 0; i < series_count; i++) {
        struct watch *w = watch_of(all[i], OUTSIDE);
        int64_t period = outside_period(all[i]);
        if (w && w->period == period) continue;
        if (w && !period) remove_watch(all[i], w);
        if (period) engine_watch(all[i]->place, all[i]->field, OUTSIDE, period, 1, 0);
    }
}

/* A new layout ends the watches of the old instances, with their values. */
static void follow_layout(int gpu) {
    const struct gpu *g = &world.gpu[gpu];
    uint64_t now = g->mig;
    for (unsigned i = 0; i < g->instances; i++)
        now = now * 1000003 + g->instance[i].slices * 100 + g->instance[i].computes + 7;
    if (now == layout[gpu]) return;
    layout[gpu] = now;
    for (int place = MAX_GPUS; place < ENTITIES; place++) {
        if (gpu_of(place) != gpu) continue;
        for (int f = 0; f < MAX_FIELDS; f++)
            if (table[place][f]) empty(table[place][f]);
        rates_forget(place);
    }
}

static void follow_event(int gpu) {
    const struct gpu *g = &world.gpu[gpu];
    struct series *s = field_at(230) < 0 ? NULL : table[gpu][field_at(230)];
    uint64_t now[MAX_XIDS] = {0};
    for (int i = 0; i < g->xids; i++) {
        bool known = false;
        now[i] = (uint64_t)g->xid[i] << 32 | (unsigned)g->xid_sequence[i];
        for (int k = 0; k < MAX_XIDS; k++) known = known || events[gpu][k] == now[i];
        if (known || world.blind || !s || !s->watches) continue;
        append(s, (struct value){world.now - (g->xids - 1 - i), world.now, {.i64 = g->xid[i]}});
    }
    memcpy(events[gpu], now, sizeof now);
}

/* A fatal Xid blinds the process that met it, whatever the script leaves out later; the next process sees. */
static void follow_blindness(void) {
    static bool said, blind;
    if (world.down || world.incarnation != incarnation) blind = false;
    if (world.blind && !said) blind = true;
    said = world.blind, world.blind = blind;
}

static void follow_engine(void) {
    if (world.down || world.incarnation != incarnation) clients_wipe(false);
    incarnation = world.incarnation;
    clients_drop(world.drop);
    for (int i = 0; i < MAX_GPUS; i++) {
        follow_layout(i);
        if (world.gpu[i].set_energy) counters[i][WATTS] = world.gpu[i].energy / 1000;
    }
}

void world_now(void) {
    bool changed;
    int64_t before = world.now, now = script_read(&changed);
    if (!started) rates_start(before = now), world.now = now, incarnation = world.incarnation;
    if (changed) follow_blindness();
    if (changed && started) follow_engine();
    started = true;
    world.now = before;
    if (changed) follow_outside();
    if (now > before) run(now);
    world.now = now;
    for (int i = 0; changed && i < MAX_GPUS; i++) follow_event(i);
}

/* ---- questions ---- */

static status_t nothing(int place, const struct series *s) {
    if (!s || !s->watches) return NOT_WATCHED;
    return world.gpu[gpu_of(place)].lost ? GPU_IS_LOST : NO_DATA;
}

status_t engine_since(int place, int field, int64_t since, struct value **to, int *n) {
    struct series *s = table[place][field];
    *n = 0, *to = NULL;
    if (exists(place) && unit_at(place)->status[field]) return unit_at(place)->status[field];
    if (!s || !s->count) return nothing(place, s);
    *to = malloc((size_t)s->count * sizeof **to);
    for (int i = s->first; i < s->first + s->count; i++)
        if (s->value[i].at >= since && s->value[i].at <= world.now && s->value[i].stored <= world.now)
            (*to)[(*n)++] = s->value[i];
    return *n ? OK : NO_DATA;
}

static status_t live(int place, int field, struct value *to) {
    if (world.gpu[gpu_of(place)].lost) return GPU_IS_LOST;
    to->at = world.now;
    if (FIELDS[field].kind == XID) blank_of(field, 1, to);
    else measure_gauge(place, field, to);
    return OK;
}

status_t engine_latest(int place, int field, bool now, struct value *to) {
    struct series *s = table[place][field];
    if (exists(place) && unit_at(place)->status[field]) return unit_at(place)->status[field];
    if (now && !profiled(field)) return live(place, field, to);
    errors_logged += profiled(field) && !engine_watched(place, field);
    for (int i = s ? s->first + s->count - 1 : -1; s && i >= s->first; i--)
        if (s->value[i].stored <= world.now) return *to = s->value[i], OK;
    return nothing(place, s);
}
