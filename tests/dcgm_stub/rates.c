/* Counters that run with the clock, and the means over the time since a baseline that profiling fields are.
 * See world.h. Not NVIDIA's code. */
#include <stdlib.h>
#include <string.h>

#include "world.h"

enum { KEPT = 512 };
struct snapshot { int64_t at; double counter[RATES]; };
static struct { struct snapshot *at; int n; } history[ENTITIES]; /* boards with GPM: the samples taken of an entity */
static int64_t reached;

static struct { int64_t at; double counter, mean; } driver[ENTITIES]; /* the driver's last window of utilisation */

double counters[ENTITIES][RATES];

void rates_start(int64_t at) { reached = at; }

/* The driver averages over windows of its own, and shows the mean of the last one until the next has ended. */
static void end_windows(int place, double rate, int64_t to) {
    int64_t window = world.driver_window_us;
    for (int64_t edge = window ? (reached / window + 1) * window : to + 1; edge <= to; edge += window) {
        double there = counters[place][GR] + rate * (double)(edge - reached) / 1e6;
        bool whole = driver[place].at == edge - window;
        driver[place].mean = whole ? (there - driver[place].counter) / ((double)window / 1e6) : rate;
        driver[place].at = edge, driver[place].counter = there;
    }
}

double driver_utilization(int place) { return driver[place].mean; }

bool settled(int place) { return reached >= world.gpu[gpu_of(place)].bound_until; }

void rates_run(int64_t to) {
    double seconds = (double)(to - reached) / 1e6;
    for (int place = 0; place < ENTITIES && seconds > 0; place++) {
        if (!exists(place)) continue;
        const struct unit *u = unit_at(place);
        end_windows(place, u->rate[GR], to);
        for (int r = 0; r < WATTS; r++) counters[place][r] += u->rate[r] * seconds;
        counters[place][WATTS] += u->gauge[field_at(155)] * seconds;
    }
    reached = to;
}

void rates_forget(int place) { history[place].n = 0; }

static struct snapshot *newest(int place) {
    return history[place].n ? &history[place].at[history[place].n - 1] : NULL;
}

static struct snapshot *take(int place) {
    if (!history[place].at) history[place].at = calloc(KEPT, sizeof(struct snapshot));
    struct snapshot *all = history[place].at;
    if (history[place].n == KEPT) memmove(all, all + KEPT / 2, KEPT / 2 * sizeof *all), history[place].n = KEPT / 2;
    struct snapshot *s = &all[history[place].n++];
    s->at = reached;
    memcpy(s->counter, counters[place], sizeof s->counter);
    return s;
}

/* As DcgmGpmManager does it: the newest sample serves a field if it is younger than the field's period, and the
 * baseline is the newest one at least a period older, but never the oldest of all. */
static bool mean_by_gpm(int place, int rate, int64_t period, double *mean) {
    struct snapshot *now = newest(place);
    if (!now || reached - now->at >= period) now = take(place);
    struct snapshot *oldest = history[place].at, *base = now;
    while (base > oldest && base->at > now->at - period) base--;
    if (base == oldest || base == now) return false;
    *mean = (now->counter[rate] - base->counter[rate]) / ((double)(now->at - base->at) / 1e6);
    return true;
}

static bool mean_by_field(int place, int rate, struct baseline *base, double *mean) {
    struct baseline before = *base;
    *base = (struct baseline){.at = reached, .counter = counters[place][rate], .known = true};
    if (!before.known || before.at >= reached) return false;
    *mean = (base->counter - before.counter) / ((double)(reached - before.at) / 1e6);
    return true;
}

bool measure_rate(int place, int field, int64_t period, struct baseline *base, struct value *to) {
    const struct field *f = &FIELDS[field];
    const struct gpu *g = &world.gpu[gpu_of(place)];
    int rate = (int)f->param, blank = unit_at(place)->blank[field];
    double mean = 0;
    bool nvlink = rate == NVLINK_TX || rate == NVLINK_RX, c2c = rate == C2C_TX || rate == C2C_RX;
    bool known = g->gpm ? mean_by_gpm(place, rate, period, &mean) : mean_by_field(place, rate, base, &mean);
    if (!g->gpm && !in_turn(place, field, reached / period)) mean = 0; /* another pass was measured */
    if (g->lost || g->failing || world.blind || !settled(place) || !known) blank = 1;
    else if ((nvlink && !g->links) || (c2c && !g->c2c)) blank = 3;
    if (blank) blank_of(field, blank, to);
    else if (f->type == 'd') to->is.dbl = mean / 100;
    else to->is.i64 = (int64_t)(mean * 1024 * 1024);
    return true;
}
