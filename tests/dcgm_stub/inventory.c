/* The functions of the API that tell what GPUs there are; see world.h. Not NVIDIA's code. */
#include <stdio.h>
#include <string.h>

#include "world.h"

static bool listed(unsigned gpu, bool only_supported) {
    int status = gpu_status(gpu);
    return status != STATUS_UNKNOWN && status != STATUS_DETACHED && !(only_supported && status == STATUS_UNSUPPORTED);
}

static status_t list(bool only_supported, unsigned *ids, int *n) {
    *n = 0;
    for (unsigned gpu = 0; gpu < world.count; gpu++)
        if (listed(gpu, only_supported)) ids[(*n)++] = gpu;
    return OK;
}

status_t dcgmGetAllDevices(handle_t h, unsigned *ids, int *n) {
    ENTER(h);
    return leave(list(false, ids, n));
}

status_t dcgmGetAllSupportedDevices(handle_t h, unsigned *ids, int *n) {
    ENTER(h);
    return leave(list(true, ids, n));
}

status_t dcgmGetEntityGroupEntities(handle_t h, unsigned kind, uint32_t *ids, int *n, unsigned flags) {
    ENTER(h);
    int room = *n;
    *n = 0;
    if (kind != FE_GPU && kind != FE_GPU_I && kind != FE_GPU_CI) return leave(kind > FE_GPU_CI ? BADPARAM : OK);
    for (int place = 0; place < ENTITIES; place++) {
        struct entity e = entity_at(place);
        bool there = exists(place) && listed((unsigned)gpu_of(place), flags & FLAG_ONLY_SUPPORTED);
        if (e.group != kind || !there) continue;
        if (*n < room) ids[*n] = e.id;
        ++*n;
    }
    return leave(*n > room ? INSUFFICIENT_SIZE : OK);
}

status_t dcgmGetGpuStatus(handle_t h, unsigned gpu, int *status) {
    ENTER(h);
    *status = gpu_status(gpu);
    return leave(gpu < MAX_GPUS ? verdict(__func__, (int)gpu) : BADPARAM);
}

static int blank_or(double value, bool blank) { return blank ? 0x7ffffff0 : (int)value; }

static void describe(unsigned gpu, struct attributes *a) {
    const struct gpu *g = &world.gpu[gpu];
    const double *gauge = g->unit.gauge;
    snprintf(a->identifiers.name, TEXT, "%s", g->name);
    snprintf(a->identifiers.uuid, TEXT, "%s", g->uuid);
    snprintf(a->identifiers.bus, TEXT, "00000000:%02X:00.0", 16 + gpu);
    snprintf(a->identifiers.brand, TEXT, "NVIDIA");
    snprintf(a->identifiers.driver, TEXT, "0.0 stand-in");
    a->identifiers.device = g->pci;
    a->thermals.slowdown = (unsigned)blank_or(gauge[field_at(158)], g->lost);
    a->power.enforced = (unsigned)blank_or(gauge[field_at(164)], g->lost);
    a->memory.total = (unsigned)blank_or(gauge[field_at(250)], g->lost);
    a->memory.used = (unsigned)blank_or(gauge[field_at(252)], g->lost);
    a->settings.mig = g->mig;
}

status_t dcgmGetDeviceAttributes(handle_t h, unsigned gpu, struct attributes *a) {
    ENTER(h);
    if (a->version != VERSION(struct attributes, 3)) return leave(VER_MISMATCH);
    if (gpu >= world.count || world.gpu[gpu].gone) return leave(BADPARAM);
    status_t status = verdict(__func__, (int)gpu);
    if (!status) describe(gpu, a);
    return leave(status);
}

/* ---- MIG ---- */

static const unsigned PROFILE[] = {0, 1, 2, 3, 4, 0, 7, 5, 6}; /* slices -> DcgmMigProfileGpuInstanceSlice* */

static void tell_instance(unsigned gpu, unsigned k, struct mig_row *row) {
    const struct instance *i = &world.gpu[gpu].instance[k];
    *row = (struct mig_row){.entity = {FE_GPU_I, gpu * INSTANCES_PER_GPU + k}, .parent = {FE_GPU, gpu}};
    row->info = (struct mig_info){.gpu_index = gpu, .instance = i->nvml_id, .slices = i->slices};
    row->info.compute = ~0u, row->info.profile = PROFILE[i->slices];
    snprintf(row->info.gpu_uuid, sizeof row->info.gpu_uuid, "%s", world.gpu[gpu].uuid);
}

static void tell_compute(unsigned gpu, unsigned k, unsigned c, unsigned nth, struct mig_row *row) {
    unsigned slices = world.gpu[gpu].instance[k].slices / world.gpu[gpu].instance[k].computes;
    tell_instance(gpu, k, row);
    row->entity = (struct entity){FE_GPU_CI, gpu * INSTANCES_PER_GPU + nth};
    row->parent = (struct entity){FE_GPU_I, gpu * INSTANCES_PER_GPU + k};
    row->info.compute = c, row->info.slices = slices, row->info.profile = 29 + PROFILE[slices];
}

status_t dcgmGetGpuInstanceHierarchy(handle_t h, struct mig_hierarchy *hierarchy) {
    ENTER(h);
    if (hierarchy->version != VERSION(struct mig_hierarchy, 2)) return leave(VER_MISMATCH);
    unsigned n = 0;
    for (unsigned gpu = 0; gpu < world.count; gpu++) {
        unsigned nth = 0;
        if (!listed(gpu, true)) continue;
        for (unsigned k = 0; k < world.gpu[gpu].instances; k++) {
            tell_instance(gpu, k, &hierarchy->row[n++]);
            for (unsigned c = 0; c < world.gpu[gpu].instance[k].computes; c++)
                tell_compute(gpu, k, c, nth++, &hierarchy->row[n++]);
        }
    }
    hierarchy->count = n;
    return leave(OK);
}
