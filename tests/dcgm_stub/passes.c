/* Metric groups: which profiling fields can be read together; see world.h. Not NVIDIA's code. */
#include <string.h>

#include "world.h"

enum { MOST_PASSES = 5 };

/* As NVIDIA's documentation lists them for boards before Hopper. */
static const struct metric_group OLDER[] = {
    {1, 1, 4, {1002, 1003, 1004, 1007}}, {1, 2, 1, {1006}}, {1, 3, 1, {1008}},
    {2, 0, 1, {1005}}, {3, 0, 2, {1009, 1010}}, {4, 0, 1, {1001}}, {5, 0, 2, {1011, 1012}},
};

static bool has(const struct metric_group *group, unsigned id) {
    for (unsigned i = 0; i < group->count; i++)
        if (group->field[i] == id) return true;
    return false;
}

unsigned metric_groups(unsigned gpu, struct metric_group *to) {
    const struct gpu *g = &world.gpu[gpu];
    if (g->groups) return memcpy(to, g->group, sizeof g->group), g->groups;
    if (!g->gpm) return memcpy(to, OLDER, sizeof OLDER), sizeof OLDER / sizeof *OLDER;
    *to = (struct metric_group){.major = 1};
    for (int f = 0; f < FIELD_COUNT; f++)
        if (profiled(f) && !world.lacking[f]) to->field[to->count++] = FIELDS[f].id;
    return 1;
}

static bool wanted(const struct metric_group *group, int place, const uint16_t *more, unsigned n) {
    for (unsigned i = 0; i < group->count; i++) {
        int field = field_at(group->field[i]);
        if (field >= 0 && engine_sampled(place, field)) return true;
        for (unsigned k = 0; k < n; k++)
            if (more[k] == group->field[i]) return true;
    }
    return false;
}

status_t multi_pass(int place, const uint16_t *fields, unsigned n) {
    struct metric_group group[MAX_METRIC_GROUPS];
    unsigned groups = metric_groups((unsigned)gpu_of(place), group);
    if (world.gpu[gpu_of(place)].gpm) return OK;
    for (unsigned i = 0; i < groups; i++) {
        int passes = 0;
        for (unsigned k = 0; k < groups; k++)
            passes += group[k].major == group[i].major && wanted(&group[k], place, fields, n);
        if (passes > MOST_PASSES) return PROFILING_MULTI_PASS;
    }
    return OK;
}

bool in_turn(int place, int field, int64_t cycle) {
    struct metric_group group[MAX_METRIC_GROUPS];
    unsigned groups = metric_groups((unsigned)gpu_of(place), group), home = 0;
    while (home < groups && !has(&group[home], FIELDS[field].id)) home++;
    if (home == groups) return false; /* this board does not measure it */
    int passes = 0, ours = 0;
    for (unsigned k = 0; k < groups; k++) {
        if (group[k].major != group[home].major || !wanted(&group[k], place, NULL, 0)) continue;
        if (k == home) ours = passes;
        passes++;
    }
    return passes < 2 || cycle % passes == ours;
}
