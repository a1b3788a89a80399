/* The functions of the API that watch fields and give their values; see world.h. Not NVIDIA's code. */
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "clients.h"
#include "world.h"

/* ---- watching ---- */

static bool has_profiling(const uint16_t *fields, unsigned n) {
    for (unsigned k = 0; k < n; k++)
        if (fields[k] > 1000 && fields[k] < 1100) return true;
    return false;
}

static status_t refused(const struct entity *e, unsigned entities, const uint16_t *fields, unsigned n) {
    status_t status = OK;
    bool profiling = has_profiling(fields, n);
    for (unsigned i = 0; i < entities && !status; i++) {
        int place = place_of(e[i]);
        if (place < 0) return BADPARAM;
        status = verdict("dcgmWatchFields", gpu_of(place));
        if (!status && profiling) status = world.gpu[gpu_of(place)].profiling;
        if (!status && profiling) status = world.profiling;
        if (!status && profiling) status = multi_pass(place, fields, n);
        for (unsigned k = 0; k < n && !status; k++)
            if (field_at(fields[k]) >= 0) status = world.gpu[gpu_of(place)].refusal[field_at(fields[k])];
    }
    return status;
}

static status_t each(uint64_t client, const struct entity *e, unsigned entities, const uint16_t *fields, unsigned n,
                     bool watch, int64_t us, double keep, int samples) {
    status_t status = OK;
    for (unsigned i = 0; i < entities; i++)
        for (unsigned k = 0; k < n; k++) {
            int place = place_of(e[i]), field = field_at(fields[k]);
            if (place < 0 || field < 0) continue;
            status_t s = watch ? engine_watch(place, field, client, us, keep, samples)
                               : engine_unwatch(place, field, client);
            if (s) status = s;
        }
    return status;
}

/* Unwatches these fields; and where the profiling module samples them, before Hopper, it ends all that this client
 * profiles of the group: it is told the group alone. So does NVIDIA's DcgmHostEngineHandler::UnwatchFieldGroup, with
 * DCGM_PROFILING_SR_UNWATCH_FIELDS ("Unwatch all fields for a group of GPUs"). */
static status_t unwatch(uint64_t client, const struct entity *e, unsigned entities, const uint16_t *fields, unsigned n) {
    status_t status = each(client, e, entities, fields, n, false, 0, 0, 0);
    for (unsigned i = 0; i < entities && has_profiling(fields, n); i++)
        if (place_of(e[i]) >= 0) engine_end_profiling(place_of(e[i]), client);
    return status;
}

/* What fails on one GPU leaves nothing of the group watched: WatchFieldGroup then calls UnwatchFieldGroup. */
status_t dcgmWatchFields(handle_t h, group_t group, group_t fields, int64_t us, double keep, int samples) {
    ENTER(h);
    struct entity e[MAX_GROUP_ENTITIES];
    uint16_t field[MAX_GROUP_FIELDS];
    unsigned entities, n;
    status_t status = group ? group_entities(group, e, &entities) : BADPARAM;
    if (!status) status = group_fields(fields, field, &n);
    if (!status && us <= 0) status = BADPARAM;
    if (status) return leave(status);
    status = refused(e, entities, field, n);
    if (status) unwatch(h, e, entities, field, n);
    else each(h, e, entities, field, n, true, us, keep, samples);
    return leave(status);
}

status_t dcgmUnwatchFields(handle_t h, group_t group, group_t fields) {
    ENTER(h);
    struct entity e[MAX_GROUP_ENTITIES];
    uint16_t field[MAX_GROUP_FIELDS];
    unsigned entities, n;
    status_t status = group ? group_entities(group, e, &entities) : BADPARAM;
    if (!status) status = group_fields(fields, field, &n);
    return leave(status ? status : unwatch(h, e, entities, field, n));
}

status_t dcgmUpdateAllFields(handle_t h, int wait) {
    ENTER(h);
    (void)wait; /* what is due has been sampled on the way in */
    return leave(OK);
}

/* ---- values ---- */

struct told { struct entity entity; uint16_t field; status_t status; struct value value; };

/* A status comes as an integer 0 at time 0, whatever the field's type is. */
static void fill(const struct told *t, int16_t *type, int64_t *at, union payload *value) {
    int field = field_at(t->field);
    bool silent = t->status || field < 0;
    *type = silent ? 'i' : FIELDS[field].type;
    *at = silent ? 0 : t->value.at;
    if (silent) value->i64 = 0;
    else if (*type == 'b') {
        struct mig_attributes a = attributes_of(place_of(t->entity));
        memcpy(value->blob, &a, sizeof a);
    } else if (*type == 's') snprintf(value->str, sizeof value->str, "%s", t->value.is.text);
    else if (*type == 'd') value->dbl = t->value.is.dbl;
    else value->i64 = t->value.is.i64;
}

static void to_first(const struct told *t, struct field_value *to) {
    memset(to, 0, offsetof(struct field_value, value));
    to->version = VERSION(struct field_value, 1), to->field = t->field, to->status = t->status;
    fill(t, &to->type, &to->at, &to->value);
}

static void to_second(const struct told *t, struct field_value_2 *to) {
    memset(to, 0, offsetof(struct field_value_2, value));
    to->version = VERSION(struct field_value_2, 2), to->entity_group = t->entity.group;
    to->entity_id = t->entity.id, to->field = t->field, to->status = t->status;
    fill(t, &to->type, &to->at, &to->value);
}

static struct told latest(const char *call, struct entity entity, uint16_t id, bool live) {
    struct told t = {.entity = entity, .field = id};
    int place = place_of(entity), field = field_at(id);
    if (field < 0) t.status = UNKNOWN_FIELD;
    else if (place < 0) t.status = NOT_WATCHED;
    else t.status = verdict(call, gpu_of(place));
    if (!t.status) t.status = engine_latest(place, field, live, &t.value);
    return t;
}

/* Tells values to the caller's function, without the lock; a callback that does not return 0 ends it. */
static status_t tell_all(struct told *told, unsigned n, gpu_callback gpu, entity_callback entity, void *user) {
    struct field_value *value = malloc(sizeof *value);
    int stop = 0;
    unlock();
    for (unsigned i = 0; i < n && !stop; i++) {
        to_first(&told[i], value);
        if (entity) stop = entity(told[i].entity.group, told[i].entity.id, value, 1, user);
        else if (told[i].entity.group == FE_GPU) stop = gpu(told[i].entity.id, value, 1, user);
    }
    free(value);
    free(told);
    return stop;
}

static status_t latest_of_group(const char *call, handle_t h, group_t group, group_t fields, gpu_callback gpu,
                                entity_callback entity, void *user) {
    status_t status = enter(call, h);
    struct entity e[MAX_GROUP_ENTITIES];
    uint16_t field[MAX_GROUP_FIELDS];
    unsigned entities, n, told = 0;
    if (status) return status;
    status = group_entities(group, e, &entities);
    if (!status) status = entities ? group_fields(fields, field, &n) : GROUP_IS_EMPTY;
    if (status) return leave(status);
    struct told *list = calloc(entities * n, sizeof *list);
    for (unsigned i = 0; i < entities; i++)
        for (unsigned k = 0; k < n; k++) list[told++] = latest(call, e[i], field[k], false);
    tell_all(list, told, gpu, entity, user);
    return OK;
}

status_t dcgmGetLatestValues(handle_t h, group_t group, group_t fields, gpu_callback call, void *user) {
    return latest_of_group(__func__, h, group, fields, call, NULL, user);
}

status_t dcgmGetLatestValues_v2(handle_t h, group_t group, group_t fields, entity_callback call, void *user) {
    return latest_of_group(__func__, h, group, fields, NULL, call, user);
}

status_t dcgmEntityGetLatestValues(handle_t h, unsigned kind, unsigned id, const uint16_t *fields, unsigned n,
                                   struct field_value *to) {
    ENTER(h);
    if (!n || n > MAX_GROUP_FIELDS) return leave(BADPARAM);
    for (unsigned k = 0; k < n; k++) {
        struct told t = latest(__func__, (struct entity){kind, id}, fields[k], false);
        to_first(&t, &to[k]);
    }
    return leave(OK);
}

/* A live question is asked of the driver, behind what the engine's loop asks it. */
static void wait_for_driver(const struct entity *e, unsigned n) {
    long ms = engine_held_us() / 1000;
    for (unsigned i = 0; i < n; i++)
        if (place_of(e[i]) >= 0) ms += world.gpu[gpu_of(place_of(e[i]))].slow_ms;
    if (ms) wait_ms(ms);
}

status_t dcgmEntitiesGetLatestValues(handle_t h, const struct entity *e, unsigned entities, const uint16_t *fields,
                                     unsigned n, unsigned flags, struct field_value_2 *to) {
    ENTER(h);
    if (!entities || !n || entities > MAX_GROUP_ENTITIES || n > MAX_GROUP_FIELDS) return leave(BADPARAM);
    request();
    if (flags & FLAG_LIVE) wait_for_driver(e, entities);
    for (unsigned i = 0; i < entities; i++)
        for (unsigned k = 0; k < n; k++) {
            struct told t = latest(__func__, e[i], fields[k], flags & FLAG_LIVE);
            to_second(&t, to++);
        }
    return leave(OK);
}

/* ---- values since ---- */

struct list { struct told *told; unsigned n, room; };

static void add(struct list *list, struct told t) {
    if (list->n == list->room) {
        list->room = list->room ? 2 * list->room : 64;
        list->told = realloc(list->told, list->room * sizeof *list->told);
    }
    list->told[list->n++] = t;
}

static status_t collect(const char *call, struct entity e, uint16_t id, int64_t since, struct list *list) {
    int place = place_of(e), field = field_at(id), n;
    struct value *values;
    request();
    if (place < 0 || field < 0) return NOT_WATCHED;
    status_t status = verdict(call, gpu_of(place));
    if (!status) status = engine_since(place, field, since, &values, &n);
    if (status) return status == NO_DATA ? OK : status;
    for (int i = 0; i < n; i++) add(list, (struct told){.entity = e, .field = id, .value = values[i]});
    free(values);
    return OK;
}

/* Entity by entity, field by field. An error ends the call, after what came before it has been told. */
static status_t since_of_group(const char *call, handle_t h, group_t group, group_t fields, int64_t since,
                               int64_t *next, gpu_callback gpu, entity_callback entity, void *user) {
    status_t status = enter(call, h);
    struct entity e[MAX_GROUP_ENTITIES];
    uint16_t field[MAX_GROUP_FIELDS];
    unsigned entities, n;
    struct list list = {0};
    if (status) return status;
    *next = since;
    status = group_fields(fields, field, &n);
    if (!status) status = group_entities(group, e, &entities);
    if (status) return leave(status);
    int64_t until = world.now;
    for (unsigned i = 0; i < entities && gpu; i++)
        if (e[i].group != FE_GPU) return leave(NOT_SUPPORTED);
    for (unsigned i = 0; i < entities && !status; i++)
        for (unsigned k = 0; k < n && !status; k++) status = collect(call, e[i], field[k], since, &list);
    if (tell_all(list.told, list.n, gpu, entity, user)) return OK;
    if (!status) *next = until + 1;
    return status;
}

status_t dcgmGetValuesSince(handle_t h, group_t group, group_t fields, int64_t since, int64_t *next, gpu_callback call,
                            void *user) {
    return since_of_group(__func__, h, group, fields, since, next, call, NULL, user);
}

status_t dcgmGetValuesSince_v2(handle_t h, group_t group, group_t fields, int64_t since, int64_t *next,
                               entity_callback call, void *user) {
    return since_of_group(__func__, h, group, fields, since, next, NULL, call, user);
}

/* ---- profiling ---- */

status_t dcgmProfGetSupportedMetricGroups(handle_t h, struct metric_groups *groups) {
    ENTER(h);
    if (groups->version != VERSION(struct metric_groups, 3)) return leave(VER_MISMATCH);
    if (groups->gpu >= world.count || world.gpu[groups->gpu].gone) return leave(BADPARAM);
    status_t status = verdict(__func__, (int)groups->gpu);
    if (!status) status = world.gpu[groups->gpu].profiling ? world.gpu[groups->gpu].profiling : world.profiling;
    if (!status) groups->count = metric_groups(groups->gpu, groups->group);
    return leave(status);
}

/* Only what the profiling module samples can be paused: where every board has GPM, there is nothing. */
static status_t pause_profiling(bool on) {
    for (unsigned i = 0; i < world.count; i++)
        if (!world.gpu[i].gpm) return engine_pause(on), OK;
    return NOT_SUPPORTED;
}

status_t dcgmProfPause(handle_t h) {
    ENTER(h);
    return leave(pause_profiling(true));
}

status_t dcgmProfResume(handle_t h) {
    ENTER(h);
    return leave(pause_profiling(false));
}
