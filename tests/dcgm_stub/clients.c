/* Clients of the engine, and their groups of entities and of fields; see world.h. Not NVIDIA's code.
 *
 * As in DCGM: two of the 64 groups are the engine's own, groups may share a name while groups of fields may not, and
 * destroying a group leaves what it watches watched until the client unwatches it or disconnects. */
#include "clients.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "world.h"

enum { MAX_CLIENTS = 256, OWN_GROUPS = 2 };

static struct { uint64_t id; bool alive, persist; } client[MAX_CLIENTS];
static struct group groups[MAX_GROUPS];
static struct field_group field_groups[MAX_FIELD_GROUPS];
static uint64_t last_client;
static group_t last_group = OWN_GROUPS - 1, last_field_group;
static bool embedded;

/* ---- clients ---- */

uint64_t connect_client(bool persist) {
    int free = 0;
    while (free < MAX_CLIENTS && client[free].alive) free++;
    if (free == MAX_CLIENTS) die("too many connections", "a test leaks them");
    client[free].id = ++last_client, client[free].alive = true, client[free].persist = persist;
    return last_client;
}

static void forget(uint64_t id) {
    engine_forget_client(id);
    for (int i = 0; i < MAX_GROUPS; i++)
        if (groups[i].client == id) groups[i].id = 0;
    for (int i = 0; i < MAX_FIELD_GROUPS; i++)
        if (field_groups[i].client == id) field_groups[i].id = 0;
}

static void end(int i) {
    if (!client[i].persist) forget(client[i].id);
    client[i].alive = false;
}

bool client_alive(uint64_t id) {
    if (id == EMBEDDED_HANDLE) return embedded;
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (client[i].id == id) return client[i].alive;
    return false;
}

void disconnect_client(uint64_t id) {
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (client[i].id == id && client[i].alive) end(i);
}

unsigned client_count(void) {
    unsigned n = embedded;
    for (int i = 0; i < MAX_CLIENTS; i++) n += client[i].alive;
    return n;
}

void clients_drop(uint64_t up_to) {
    for (int i = 0; i < MAX_CLIENTS; i++)
        if (client[i].alive && client[i].id <= up_to) end(i);
}

/* The engine is another process than before, or none: nothing survives, unless ours runs in this process. */
void clients_wipe(bool embedded_too) {
    for (int i = 0; i < MAX_CLIENTS; i++) {
        if (client[i].id) forget(client[i].id);
        client[i].alive = false;
    }
    if (embedded && !embedded_too) return;
    forget(EMBEDDED_HANDLE);
    engine_wipe();
    last_group = OWN_GROUPS - 1, last_field_group = 0;
}

void embed(bool on) {
    if (!on && embedded) clients_wipe(true);
    embedded = on;
}

bool embedded_runs(void) { return embedded; }

/* ---- groups of entities ---- */

struct group *group_found(group_t id) {
    for (int i = 0; i < MAX_GROUPS; i++)
        if (groups[i].id && groups[i].id == id) return &groups[i];
    return NULL;
}

struct group *group_at(int i) { return groups[i].id ? &groups[i] : NULL; }

static unsigned all_of(uint32_t kind, struct entity *to) {
    unsigned n = 0;
    for (int place = 0; place < ENTITIES && n < MAX_GROUP_ENTITIES; place++)
        if (exists(place) && entity_at(place).group == kind && gpu_status((unsigned)gpu_of(place)) == STATUS_OK)
            to[n++] = entity_at(place);
    return n;
}

status_t group_create(uint64_t owner, int type, const char *name, group_t *id) {
    int free = 0, own = MAX_GROUPS - OWN_GROUPS;
    while (free < own && groups[free].id) free++;
    if (free == own) return MAX_LIMIT;
    struct group *g = &groups[free];
    *g = (struct group){.id = ++last_group, .client = owner};
    snprintf(g->name, sizeof g->name, "%s", name);
    uint32_t kind = type == 0 ? FE_GPU : type == 3 ? FE_GPU_I : type == 4 ? FE_GPU_CI : FE_NONE;
    if (kind) g->count = all_of(kind, g->entity);
    return *id = g->id, OK;
}

status_t group_destroy(group_t id) {
    struct group *g = group_found(id);
    return g ? g->id = 0, OK : NOT_CONFIGURED;
}

static bool is_all(group_t id) { return (id & 0xffffffff) == GROUP_ALL_GPUS || !id; }

status_t group_add(group_t id, struct entity entity) {
    static const int REFUSED[] = {BADPARAM, OK, GPU_NOT_SUPPORTED, BADPARAM, GPU_IS_LOST, BADPARAM, BADPARAM, BADPARAM};
    struct group *g = group_found(id);
    int place = place_of(entity);
    if (!g) return NOT_CONFIGURED;
    if (place < 0) return BADPARAM;
    int refused = REFUSED[gpu_status((unsigned)gpu_of(place))];
    for (unsigned i = 0; i < g->count; i++)
        if (!memcmp(&g->entity[i], &entity, sizeof entity)) refused = refused ? refused : BADPARAM;
    if (!refused && g->count == MAX_GROUP_ENTITIES) refused = MAX_LIMIT;
    if (!refused) g->entity[g->count++] = entity;
    return refused;
}

status_t group_remove(group_t id, struct entity entity) {
    struct group *g = group_found(id);
    if (!g) return NOT_CONFIGURED;
    for (unsigned i = 0; i < g->count; i++)
        if (!memcmp(&g->entity[i], &entity, sizeof entity)) {
            memmove(&g->entity[i], &g->entity[i + 1], (--g->count - i) * sizeof entity);
            return OK;
        }
    return BADPARAM;
}

status_t group_entities(group_t id, struct entity *to, unsigned *n) {
    const struct group *g = group_found(id);
    if (is_all(id)) return *n = all_of(FE_GPU, to), OK;
    if ((id & 0xffffffff) == GROUP_ALL_INSTANCES) return *n = all_of(FE_GPU_I, to), OK;
    if ((id & 0xffffffff) == GROUP_ALL_COMPUTES) return *n = all_of(FE_GPU_CI, to), OK;
    if (!g) return NOT_CONFIGURED;
    memcpy(to, g->entity, sizeof g->entity);
    return *n = g->count, OK;
}

unsigned group_count(void) {
    unsigned n = 0;
    for (int i = 0; i < MAX_GROUPS; i++) n += groups[i].id != 0;
    return n;
}

/* ---- groups of fields ---- */

struct field_group *field_group_found(group_t id) {
    for (int i = 0; i < MAX_FIELD_GROUPS; i++)
        if (field_groups[i].id && field_groups[i].id == id) return &field_groups[i];
    return NULL;
}

struct field_group *field_group_at(int i) { return field_groups[i].id ? &field_groups[i] : NULL; }

status_t field_group_create(uint64_t owner, const char *name, const uint16_t *fields, int n, group_t *id) {
    int free = 0;
    for (int i = 0; i < n; i++)
        if (field_at(fields[i]) < 0) return BADPARAM; /* an unknown field, in DCGM's words */
    while (free < MAX_FIELD_GROUPS && field_groups[free].id) free++;
    if (free == MAX_FIELD_GROUPS) return MAX_LIMIT;
    for (int i = 0; i < MAX_FIELD_GROUPS; i++)
        if (field_groups[i].id && !strcmp(field_groups[i].name, name)) return DUPLICATE_KEY;
    struct field_group *g = &field_groups[free];
    *g = (struct field_group){.id = ++last_field_group, .client = owner, .count = (unsigned)n};
    snprintf(g->name, sizeof g->name, "%s", name);
    memcpy(g->field, fields, (size_t)n * sizeof *fields);
    return *id = g->id, OK;
}

status_t field_group_destroy(group_t id) {
    struct field_group *g = field_group_found(id);
    return g ? g->id = 0, OK : NO_DATA;
}

status_t group_fields(group_t id, uint16_t *to, unsigned *n) {
    const struct field_group *g = field_group_found(id);
    if (!g) return NO_DATA;
    memcpy(to, g->field, sizeof g->field);
    return *n = g->count, OK;
}

unsigned field_group_count(void) {
    unsigned n = 0;
    for (int i = 0; i < MAX_FIELD_GROUPS; i++) n += field_groups[i].id != 0;
    return n;
}
