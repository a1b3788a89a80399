/* Shapes and codes of the DCGM C API that the stand-in speaks: layouts as published (dcgm_structs.h of DCGM 4.0), the
 * names ours. Every struct that has a version is checked against its size, so a wrong layout is an error, not luck. */
#ifndef VENDOR_H
#define VENDOR_H

#include <stdint.h>

typedef int status_t;
typedef uintptr_t handle_t, group_t;

enum {
    OK = 0, BADPARAM = -1, GENERIC_ERROR = -3, NOT_CONFIGURED = -5, NOT_SUPPORTED = -6, INIT_ERROR = -7,
    UNINITIALIZED = -10, TIMEOUT = -11, VER_MISMATCH = -12, UNKNOWN_FIELD = -13, NO_DATA = -14, NOT_WATCHED = -16,
    GPU_IS_LOST = -18, CONNECTION_NOT_VALID = -21, GPU_NOT_SUPPORTED = -22, MAX_LIMIT = -24, DUPLICATE_KEY = -26,
    INSUFFICIENT_SIZE = -31, MODULE_NOT_LOADED = -33, GROUP_IS_EMPTY = -35, PROFILING_NOT_SUPPORTED = -36,
    PROFILING_MULTI_PASS = -38,
};
enum { FE_NONE = 0, FE_GPU = 1, FE_GPU_I = 4, FE_GPU_CI = 5 };
enum { STATUS_UNKNOWN = 0, STATUS_OK = 1, STATUS_UNSUPPORTED = 2, STATUS_LOST = 4, STATUS_DETACHED = 7 };
enum {
    EMBEDDED_HANDLE = 0x7fffffff, GROUP_ALL_GPUS = 0x7fffffff, GROUP_ALL_INSTANCES = 0x7ffffffd,
    GROUP_ALL_COMPUTES = 0x7ffffffc, MAX_GROUPS = 64, MAX_FIELD_GROUPS = 64, MAX_GROUP_ENTITIES = 64,
    MAX_GROUP_FIELDS = 128, MAX_METRIC_GROUPS = 10, MAX_METRIC_FIELDS = 64, MAX_DEVICES = 32, TEXT = 256,
    MAX_HIERARCHY = 448, INSTANCES_PER_GPU = 8, FLAG_LIVE = 1, FLAG_ONLY_SUPPORTED = 1,
};

#define VERSION(type, n) ((unsigned)sizeof(type) | (unsigned)(n) << 24)

struct entity { uint32_t group, id; };

union payload { int64_t i64; double dbl; char str[TEXT]; unsigned char blob[4096]; };
struct field_value { unsigned version; uint16_t field; int16_t type; int status; int64_t at; union payload value; };
struct field_value_2 {
    unsigned version, entity_group, entity_id;
    uint16_t field;
    int16_t type;
    int status;
    unsigned unused;
    int64_t at;
    union payload value;
};
typedef int (*gpu_callback)(unsigned gpu, struct field_value *values, int n, void *user);
typedef int (*entity_callback)(unsigned group, unsigned id, struct field_value *values, int n, void *user);

struct connect_params { unsigned version, persist, timeout_ms, unix_socket; };
struct group_info { unsigned version, count; char name[TEXT]; struct entity entity[MAX_GROUP_ENTITIES]; };
struct field_group_info {
    uint32_t version, count;
    group_t id;
    char name[TEXT];
    uint16_t field[MAX_GROUP_FIELDS];
};
struct all_field_groups { uint32_t version, count; struct field_group_info group[MAX_FIELD_GROUPS]; };

struct mig_info { char gpu_uuid[128]; unsigned gpu_index, instance, compute, profile, slices; };
struct mig_row { struct entity entity, parent; struct mig_info info; };
struct mig_hierarchy { unsigned version, count; struct mig_row row[MAX_HIERARCHY]; };
struct mig_attributes {
    unsigned version, devices, info_version, gpu_instance, compute_instance, multiprocessors, copy_engines, decoders,
        encoders, jpegs, ofas, gpu_slices, compute_slices;
    unsigned unused;
    uint64_t memory_mb;
};

struct attributes {
    unsigned version;
    struct { unsigned version, count; struct { unsigned version, memory, sm; } clock[256]; } clocks;
    struct { unsigned version, slowdown, shutdown; } thermals;
    struct { unsigned version, current, by_default, enforced, least, most; } power;
    struct {
        unsigned version;
        char brand[TEXT], name[TEXT], bus[TEXT], serial[TEXT], uuid[TEXT], vbios[TEXT], inforom[TEXT];
        unsigned device, subsystem;
        char driver[TEXT];
        unsigned virtualisation;
    } identifiers;
    struct { unsigned version, bar1, total, used, free; } memory;
    struct { unsigned version, persistence, mig, confidential; } settings;
};

struct metric_group { uint16_t major, minor; uint32_t count; uint16_t field[MAX_METRIC_FIELDS]; };
struct metric_groups { uint32_t version, unused, gpu, count; struct metric_group group[MAX_METRIC_GROUPS]; };
struct module_statuses { unsigned version; uint32_t count; struct { uint32_t id, status; } module[16]; };
struct version_info { uint32_t version; char text[2 * TEXT]; };
struct engine_health { unsigned version, overall; };

struct field_meta {
    uint16_t id;
    char type;
    unsigned char size;
    char tag[48];
    int scope, nvml_field, level;
    void *format;
};

#endif
