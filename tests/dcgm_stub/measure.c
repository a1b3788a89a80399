/* What a field of an entity says at a moment, rates apart; see world.h. Not NVIDIA's code. */
#include "world.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double MIB = 1024.0 * 1024.0, CYCLES_A_SECOND = 132 * 1.755e9; /* all SMs of an H100 at its clock */

/* Texts live as long as the process: values point at them. */
static const char *kept(const char *text) {
    static char *seen[1024];
    static int n;
    for (int i = 0; i < n; i++)
        if (!strcmp(seen[i], text)) return seen[i];
    if (n == (int)(sizeof seen / sizeof *seen)) die("too many texts", text);
    return seen[n++] = strdup(text);
}

static const char *const KINDS[] = {"blank", "not_found", "not_supported", "not_permissioned"};

int blank_kind(const char *word) {
    bool narrow = !strncmp(word, "int32_", 6);
    for (int i = 0; i < 4; i++)
        if (!strcmp(word + (narrow ? 6 : 0), KINDS[i])) return 1 + i + (narrow ? 4 : 0);
    die("unknown blank", word);
}

void blank_of(int field, int kind, struct value *to) {
    static const char *const TEXTS[] = {"<<<NULL>>>", "<<<NOT_FOUND>>>", "<<<NOT_SUPPORTED>>>", "<<<NOT_PERM>>>"};
    int offset = (kind - 1) % 4;
    if (FIELDS[field].type == 's') to->is.text = TEXTS[offset];
    else if (FIELDS[field].type == 'd') to->is.dbl = 140737488355328.0 + offset; /* 2^47 */
    else to->is.i64 = (kind > 4 ? 0x7ffffff0 : 0x7ffffffffffffff0) + offset;
}

/* The driver's own UUID of a board or of a MIG device. */
static void say_uuid(int place, char *text, size_t room) {
    struct entity e = entity_at(place);
    if (e.group == FE_GPU) snprintf(text, room, "%s", world.gpu[gpu_of(place)].uuid);
    else snprintf(text, room, "MIG-00000000-0000-0000-000%u-%012u", e.group == FE_GPU_I ? 4 : 5, e.id);
}

/* Not the driver's UUID: DCGM 3.1 to 4.6 make MIG-<board>/<instance>[/<compute instance>] of their own list. */
static void say_visible(int place, char *text, size_t room) {
    const struct gpu *g = &world.gpu[gpu_of(place)];
    int instance = instance_of(place);
    if (instance < 0) snprintf(text, room, "%s", g->uuid);
    else if (entity_at(place).group == FE_GPU_I)
        snprintf(text, room, "MIG-%s/%u", g->uuid, g->instance[instance].nvml_id);
    else snprintf(text, room, "MIG-%s/%u/%u", g->uuid, g->instance[instance].nvml_id, compute_of(place));
}

static const char *text_of(int place, const struct field *f) {
    const struct gpu *g = &world.gpu[gpu_of(place)];
    char text[MAX_NAME] = "";
    if (f->kind == NAME) snprintf(text, sizeof text, "%s", g->name);
    else if (f->kind == UUID) say_uuid(place, text, sizeof text);
    else if (f->kind == BUS) snprintf(text, sizeof text, "00000000:%02X:00.0", 16 + gpu_of(place));
    else say_visible(place, text, sizeof text);
    return kept(text);
}

/* The driver numbers a board that was bound anew after all others, which move up. */
static int drivers_index(int gpu) {
    int before = 0;
    for (int i = 0; i < (int)world.count; i++) {
        bool later = world.gpu[i].bound_until > 0, own = world.gpu[gpu].bound_until > 0;
        before += later != own ? own : i < gpu;
    }
    return before;
}

static int64_t integer_of(int place, int field) {
    const struct field *f = &FIELDS[field];
    const struct gpu *g = &world.gpu[gpu_of(place)];
    const double *now = counters[place], *gauge = unit_at(place)->gauge;
    int rate = (int)f->param;
    switch (f->kind) {
    case INDEX: return g->index < 0 ? drivers_index(gpu_of(place)) : g->index;
    case PCI: return g->pci;
    case MIG: return g->mig;
    case CYCLES: return (int64_t)(now[rate] / 100 * CYCLES_A_SECOND);
    case BYTES_TOTAL: return (int64_t)(now[rate] * MIB);
    case ENERGY: return (int64_t)(now[rate] * 1000);
    case FB_FREE:
        return (int64_t)(gauge[field_at(250)] - gauge[field_at(252)] - gauge[field_at(253)]);
    case GAUGE:
        if (f->id == 203 && world.driver_window_us) return (int64_t)(driver_utilization(place) + 0.5);
        return (int64_t)gauge[field];
    default: return (int64_t)gauge[field];
    }
}

bool measure_gauge(int place, int field, struct value *to) {
    const struct field *f = &FIELDS[field];
    const struct gpu *g = &world.gpu[gpu_of(place)];
    if (f->kind == XID) return false; /* an event has its own time: see events() in engine.c */
    int level = (int)entity_at(place).group, kind = unit_at(place)->blank[field];
    if (g->lost || g->failing || world.blind || !settled(place)) kind = 1;
    if (!kind && level > f->level && f->kind != VISIBLE) kind = 3;
    if (kind) blank_of(field, kind, to);
    else if (f->type == 's') to->is.text = text_of(place, f);
    else if (f->type == 'd') to->is.dbl = unit_at(place)->gauge[field];
    else to->is.i64 = f->type == 'b' ? 0 : integer_of(place, field);
    return true;
}

struct mig_attributes attributes_of(int place) {
    const struct gpu *g = &world.gpu[gpu_of(place)];
    struct mig_attributes a = {.version = VERSION(struct mig_attributes, 1), .devices = g->instances};
    if (instance_of(place) < 0) return a;
    const struct instance *i = &g->instance[instance_of(place)];
    a.info_version = 56 | 1u << 24, a.gpu_instance = i->nvml_id, a.multiprocessors = 16 * i->slices;
    a.gpu_slices = a.compute_slices = i->slices, a.memory_mb = i->memory_gb * 1024;
    return a;
}
