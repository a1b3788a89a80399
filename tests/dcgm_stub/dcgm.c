/* A stand-in for libdcgm.so.4, for tests and benchmarks without a GPU.
 *
 * THIS IS NOT NVIDIA'S LIBRARY, and holds none of its code. Layouts, codes and semantics follow the published API
 * (dcgm_agent.h, dcgm_structs.h) and the behaviour of NVIDIA's open source of it. It says so in its version text.
 * What its engine and GPUs do comes from world.h's script. Beside DCGM it exports, for tests:
 *
 *   unsigned long dcgmStubCount(const char *what)   groups, field_groups, watches, connections that there are;
 *                                                   requests for values, errors_logged (world.h)
 *   unsigned long dcgmStubCalls(const char *name)   how often a function was called
 */
#include <stdio.h>
#include <string.h>

#include "clients.h"
#include "world.h"

unsigned long dcgmStubCount(const char *what) {
    unsigned long n = 0;
    lock();
    world_now();
    if (!strcmp(what, "groups")) n = group_count();
    else if (!strcmp(what, "field_groups")) n = field_group_count();
    else if (!strcmp(what, "watches")) n = engine_watches();
    else if (!strcmp(what, "connections")) n = client_count();
    else if (!strcmp(what, "requests")) n = requests;
    else if (!strcmp(what, "errors_logged")) n = errors_logged;
    else die("nothing of that name is counted", what);
    unlock();
    return n;
}

/* ---- the library ---- */

status_t dcgmInit(void) {
    lock();
    world_now();
    count_call(__func__);
    status_t status = verdict(__func__, -1);
    initialised = initialised || !status;
    return leave(status);
}

status_t dcgmShutdown(void) {
    lock();
    clients_wipe(true);
    embed(false);
    initialised = false;
    return leave(OK);
}

const char *errorString(status_t status) {
    static _Thread_local char text[64];
    snprintf(text, sizeof text, "stand-in error %d", status);
    return text;
}

status_t dcgmVersionInfo(struct version_info *info) {
    lock();
    world_now();
    if (info->version != VERSION(struct version_info, 2)) return leave(VER_MISMATCH);
    snprintf(info->text, sizeof info->text, "%s", world.version);
    return leave(OK);
}

int DcgmFieldsInit(void) { return 0; }

static struct field_meta *meta(int field) {
    static struct field_meta metas[MAX_FIELDS];
    if (field < 0) return NULL;
    const struct field *f = &FIELDS[field];
    metas[field] = (struct field_meta){.id = f->id, .type = f->type, .size = 8, .scope = 1, .level = f->level};
    snprintf(metas[field].tag, sizeof metas[field].tag, "%s", f->tag);
    return &metas[field];
}

struct field_meta *DcgmFieldGetById(uint16_t id) {
    lock();
    world_now();
    struct field_meta *found = meta(field_at(id));
    unlock();
    return found;
}

struct field_meta *DcgmFieldGetByTag(const char *tag) {
    for (int f = 0; f < FIELD_COUNT; f++)
        if (!strcmp(FIELDS[f].tag, tag)) return DcgmFieldGetById(FIELDS[f].id);
    return NULL;
}

/* ---- connections ---- */

static bool listening(const char *address, bool unix_socket) {
    char full[TEXT];
    bool port = unix_socket || strrchr(address, ':');
    snprintf(full, sizeof full, "%s%s", address, port ? "" : ":5555");
    for (unsigned i = 0; i < world.listens; i++)
        if (!strcmp(world.listen[i], full) && (*full == '/') == unix_socket) return true;
    return !world.listens && !unix_socket && (!strcmp(full, "localhost:5555") || !strcmp(full, "127.0.0.1:5555"));
}

/* An engine that hangs takes the connection; when its answers have been waited for long enough, DCGM gives the
 * connection up and says OK: the handle is dead from the start (dcgmConnect_v2 returns what dcgmDisconnect does). */
status_t dcgmConnect_v2(const char *address, struct connect_params *params, handle_t *handle) {
    if (!address || !*address || !params || !handle) return BADPARAM;
    lock();
    world_now();
    count_call(__func__);
    status_t status = !initialised ? UNINITIALIZED : verdict(__func__, -1);
    if (!status && params->version != VERSION(struct connect_params, 2)) status = VER_MISMATCH;
    if (!status && (world.down || !listening(address, params->unix_socket))) status = CONNECTION_NOT_VALID;
    if (status) return leave(status);
    *handle = connect_client(params->persist);
    if (hang() || world.down) disconnect_client(*handle);
    return leave(OK);
}

/* Always OK, for dead handles and for such as never were. */
status_t dcgmDisconnect(handle_t handle) {
    lock();
    world_now();
    count_call(__func__);
    status_t status = verdict(__func__, -1);
    if (!status && initialised) disconnect_client(handle);
    return leave(status);
}

/* A second start gives OK and the null handle, as in DCGM. */
status_t dcgmStartEmbedded(int mode, handle_t *handle) {
    lock();
    world_now();
    count_call(__func__);
    status_t status = !initialised ? UNINITIALIZED : world.embedded ? world.embedded : verdict(__func__, -1);
    if (mode != 1 && mode != 2) status = BADPARAM;
    if (status) return leave(status);
    *handle = embedded_runs() ? 0 : EMBEDDED_HANDLE;
    embed(true);
    return leave(OK);
}

status_t dcgmStopEmbedded(handle_t handle) {
    if (handle != EMBEDDED_HANDLE) return BADPARAM;
    lock();
    world_now();
    count_call(__func__);
    if (initialised) embed(false);
    return leave(initialised ? OK : UNINITIALIZED);
}

status_t dcgmHostengineIsHealthy(handle_t h, struct engine_health *health) {
    ENTER(h);
    if (health->version != VERSION(struct engine_health, 1)) return leave(VER_MISMATCH);
    health->overall = 0;
    return leave(OK);
}

status_t dcgmModuleGetStatuses(handle_t h, struct module_statuses *statuses) {
    ENTER(h);
    if (statuses->version != VERSION(struct module_statuses, 1)) return leave(VER_MISMATCH);
    statuses->count = 9;
    for (unsigned id = 0; id < statuses->count; id++) {
        statuses->module[id].id = id;
        statuses->module[id].status = id == 8 && world.profiling == MODULE_NOT_LOADED ? 2 : 3; /* failed, loaded */
    }
    return leave(OK);
}

/* ---- groups ---- */

status_t dcgmGroupCreate(handle_t h, int type, const char *name, group_t *id) {
    ENTER(h);
    return leave(name && id ? group_create(h, type, name, id) : BADPARAM);
}

status_t dcgmGroupDestroy(handle_t h, group_t id) {
    ENTER(h);
    return leave(group_destroy(id));
}

status_t dcgmGroupAddEntity(handle_t h, group_t id, unsigned kind, unsigned entity) {
    ENTER(h);
    int place = place_of((struct entity){kind, entity});
    status_t status = place < 0 ? OK : verdict(__func__, gpu_of(place));
    return leave(status ? status : group_add(id, (struct entity){kind, entity}));
}

status_t dcgmGroupAddDevice(handle_t h, group_t id, unsigned gpu) { return dcgmGroupAddEntity(h, id, FE_GPU, gpu); }

status_t dcgmGroupRemoveEntity(handle_t h, group_t id, unsigned kind, unsigned entity) {
    ENTER(h);
    return leave(group_remove(id, (struct entity){kind, entity}));
}

status_t dcgmGroupRemoveDevice(handle_t h, group_t id, unsigned gpu) {
    return dcgmGroupRemoveEntity(h, id, FE_GPU, gpu);
}

status_t dcgmGroupGetInfo(handle_t h, group_t id, struct group_info *info) {
    ENTER(h);
    if (info->version != VERSION(struct group_info, 2)) return leave(VER_MISMATCH);
    const struct group *g = group_found(id);
    snprintf(info->name, sizeof info->name, "%s", g ? g->name : "DCGM_ALL_SUPPORTED_GPUS");
    return leave(group_entities(id, info->entity, &info->count));
}

status_t dcgmGroupGetAllIds(handle_t h, group_t *ids, unsigned *n) {
    ENTER(h);
    *n = 0;
    ids[(*n)++] = 0, ids[(*n)++] = 1; /* the engine's own: all GPUs, all switches */
    for (int i = 0; i < MAX_GROUPS; i++)
        if (group_at(i)) ids[(*n)++] = group_at(i)->id;
    return leave(OK);
}

status_t dcgmFieldGroupCreate(handle_t h, int n, const uint16_t *fields, const char *name, group_t *id) {
    ENTER(h);
    if (n < 1 || n >= MAX_GROUP_FIELDS || !name || !*name) return leave(BADPARAM);
    return leave(field_group_create(h, name, fields, n, id));
}

status_t dcgmFieldGroupDestroy(handle_t h, group_t id) {
    ENTER(h);
    return leave(field_group_destroy(id));
}

static void tell(const struct field_group *g, struct field_group_info *info) {
    info->version = VERSION(struct field_group_info, 1), info->id = g->id, info->count = g->count;
    memcpy(info->name, g->name, sizeof info->name);
    memcpy(info->field, g->field, sizeof info->field);
}

status_t dcgmFieldGroupGetInfo(handle_t h, struct field_group_info *info) {
    ENTER(h);
    if (info->version != VERSION(struct field_group_info, 1)) return leave(VER_MISMATCH);
    if (!field_group_found(info->id)) return leave(NO_DATA);
    tell(field_group_found(info->id), info);
    return leave(OK);
}

status_t dcgmFieldGroupGetAll(handle_t h, struct all_field_groups *all) {
    ENTER(h);
    if (all->version != VERSION(struct all_field_groups, 1)) return leave(VER_MISMATCH);
    all->count = 0;
    for (int i = 0; i < MAX_FIELD_GROUPS; i++)
        if (field_group_at(i)) tell(field_group_at(i), &all->group[all->count++]);
    return leave(OK);
}
