/* The table of fields and the entities they are read of; see world.h. Not NVIDIA's code. */
#include "world.h"

#include <string.h>

#define INSTANCE_WIDE FE_GPU_I
#define COMPUTE FE_GPU_CI

/* Numbers, types and entity levels as in dcgm_fields.h and dcgm_fields.cpp. */
const struct field FIELDS[] = {
    {50, 's', NAME, FE_GPU, 0, "", "name"},
    {52, 'i', INDEX, FE_GPU, 0, "", "nvml_index"},
    {54, 's', UUID, COMPUTE, 0, "", "uuid"},
    {57, 's', BUS, FE_GPU, 0, "", "pci_busid"},
    {58, 'i', PCI, FE_GPU, 0, "", "pci_combined_id"},
    {67, 'i', MIG, FE_GPU, 0, "", "mig_mode"},
    {68, 's', VISIBLE, COMPUTE, 0, "", "cuda_visible_devices"},
    {69, 'i', GAUGE, FE_GPU, 7, "slices", "max_slices"},
    {75, 'b', ATTRIBUTES, COMPUTE, 0, "", "mig_attributes"},
    {100, 'i', GAUGE, FE_GPU, 1755, "sm_clock", "sm_clock"},
    {101, 'i', GAUGE, FE_GPU, 2619, "memory_clock", "memory_clock"},
    {112, 'i', GAUGE, FE_GPU, 0, "reasons", "clocks_throttle_reasons"},
    {140, 'i', GAUGE, FE_GPU, 70, "memory_temp", "memory_temp"},
    {150, 'i', GAUGE, FE_GPU, 60, "temp", "gpu_temp"},
    {153, 'i', GAUGE, FE_GPU, 27, "margin", "gpu_temp_tlimit"},
    {155, 'd', GAUGE, FE_GPU, 500, "power", "power_usage"},
    {156, 'i', ENERGY, FE_GPU, WATTS, "", "total_energy_consumption"},
    {158, 'i', GAUGE, FE_GPU, 87, "slowdown", "slowdown_temp"},
    {159, 'i', GAUGE, FE_GPU, 92, "shutdown", "shutdown_temp"},
    {160, 'd', GAUGE, FE_GPU, 700, "power_limit", "power_mgmt_limit"},
    {161, 'd', GAUGE, FE_GPU, 200, "power_limit_min", "power_mgmt_limit_min"},
    {162, 'd', GAUGE, FE_GPU, 700, "power_limit_max", "power_mgmt_limit_max"},
    {163, 'd', GAUGE, FE_GPU, 700, "power_limit_default", "power_mgmt_limit_def"},
    {164, 'd', GAUGE, FE_GPU, 700, "limit", "enforced_power_limit"},
    {190, 'i', GAUGE, FE_GPU, 0, "pstate", "pstate"},
    {203, 'i', GAUGE, FE_GPU, 95, "util", "gpu_utilization"},
    {204, 'i', GAUGE, FE_GPU, 30, "memory_util", "mem_copy_utilization"},
    {206, 'i', GAUGE, FE_GPU, 0, "enc_util", "enc_utilization"},
    {207, 'i', GAUGE, FE_GPU, 0, "dec_util", "dec_utilization"},
    {230, 'i', XID, FE_GPU, 0, "", "xid_errors"},
    {240, 'i', GAUGE, FE_GPU, 0, "power_violation", "power_violation"},
    {241, 'i', GAUGE, FE_GPU, 0, "thermal_violation", "thermal_violation"},
    {250, 'i', GAUGE, INSTANCE_WIDE, 81559, "fb_total", "fb_total"},
    {251, 'i', FB_FREE, INSTANCE_WIDE, 0, "", "fb_free"},
    {252, 'i', GAUGE, INSTANCE_WIDE, 38000, "fb_used", "fb_used"},
    {253, 'i', GAUGE, INSTANCE_WIDE, 600, "fb_reserved", "fb_resv"},
    {310, 'i', GAUGE, FE_GPU, 0, "ecc_sbe", "ecc_sbe_volatile_total"},
    {311, 'i', GAUGE, FE_GPU, 0, "ecc_dbe", "ecc_dbe_volatile_total"},
    {312, 'i', GAUGE, FE_GPU, 0, "ecc_sbe_aggregate", "ecc_sbe_aggregate_total"},
    {313, 'i', GAUGE, FE_GPU, 0, "ecc_dbe_aggregate", "ecc_dbe_aggregate_total"},
    {390, 'i', GAUGE, FE_GPU, 0, "retired_sbe", "retired_pages_sbe"},
    {391, 'i', GAUGE, FE_GPU, 0, "retired_dbe", "retired_pages_dbe"},
    {392, 'i', GAUGE, FE_GPU, 0, "retired_pending", "retired_pages_pending"},
    {393, 'i', GAUGE, FE_GPU, 0, "remap_uncorrectable", "uncorrectable_remapped_rows"},
    {394, 'i', GAUGE, FE_GPU, 0, "remap_correctable", "correctable_remapped_rows"},
    {395, 'i', GAUGE, FE_GPU, 0, "remap_failure", "row_remap_failure"},
    {396, 'i', GAUGE, FE_GPU, 0, "remap_pending", "row_remap_pending"},
    {409, 'i', GAUGE, FE_GPU, 0, "nvlink_flit", "nvlink_flit_crc_error_count_total"},
    {419, 'i', GAUGE, FE_GPU, 0, "nvlink_data", "nvlink_data_crc_error_count_total"},
    {429, 'i', GAUGE, FE_GPU, 0, "nvlink_replay", "nvlink_replay_error_count_total"},
    {439, 'i', GAUGE, FE_GPU, 0, "nvlink_recovery", "nvlink_recovery_error_count_total"},
    {500, 'i', GAUGE, FE_GPU, 0, "virtual", "virtualization_mode"},
    {1001, 'd', RATIO, COMPUTE, GR, "", "gr_engine_active"},
    {1002, 'd', RATIO, COMPUTE, SM, "", "sm_active"},
    {1003, 'd', RATIO, COMPUTE, OCC, "", "sm_occupancy"},
    {1004, 'd', RATIO, COMPUTE, TENSOR, "", "tensor_active"},
    {1005, 'd', RATIO, INSTANCE_WIDE, DRAM, "", "dram_active"},
    {1006, 'd', RATIO, COMPUTE, FP64, "", "fp64_active"},
    {1007, 'd', RATIO, COMPUTE, FP32, "", "fp32_active"},
    {1008, 'd', RATIO, COMPUTE, FP16, "", "fp16_active"},
    {1009, 'i', BYTES, FE_GPU, PCIE_TX, "", "pcie_tx_bytes"},
    {1010, 'i', BYTES, FE_GPU, PCIE_RX, "", "pcie_rx_bytes"},
    {1011, 'i', BYTES, FE_GPU, NVLINK_TX, "", "nvlink_tx_bytes"},
    {1012, 'i', BYTES, FE_GPU, NVLINK_RX, "", "nvlink_rx_bytes"},
    {1013, 'd', RATIO, COMPUTE, IMMA, "", "tensor_imma_active"},
    {1014, 'd', RATIO, COMPUTE, HMMA, "", "tensor_hmma_active"},
    {1015, 'd', RATIO, COMPUTE, DFMA, "", "tensor_dfma_active"},
    {1016, 'd', RATIO, COMPUTE, INT, "", "integer_active"},
    {1076, 'i', BYTES, FE_GPU, C2C_TX, "", "c2c_tx_all_bytes"},
    {1078, 'i', BYTES, FE_GPU, C2C_RX, "", "c2c_rx_all_bytes"},
    {1084, 'i', CYCLES, COMPUTE, ELAPSED, "", "sm_cycles_elapsed_total"},
    {1085, 'i', CYCLES, COMPUTE, SM, "", "sm_cycles_active_total"},
    {1086, 'i', CYCLES, COMPUTE, TENSOR, "", "mma_cycles_active_total"},
    {1087, 'i', CYCLES, COMPUTE, DFMA, "", "dmma_cycles_active_total"},
    {1088, 'i', CYCLES, COMPUTE, HMMA, "", "hmma_cycles_active_total"},
    {1089, 'i', CYCLES, COMPUTE, IMMA, "", "imma_cycles_active_total"},
    {1090, 'i', CYCLES, COMPUTE, DFMA, "", "dfma_cycles_active_total"},
    {1091, 'i', BYTES_TOTAL, FE_GPU, PCIE_TX, "", "pcie_tx_bytes_total"},
    {1092, 'i', BYTES_TOTAL, FE_GPU, PCIE_RX, "", "pcie_rx_bytes_total"},
    {1093, 'i', CYCLES, COMPUTE, INT, "", "int_cycles_active_total"},
    {1094, 'i', CYCLES, COMPUTE, FP64, "", "fp64_cycles_active_total"},
    {1095, 'i', CYCLES, COMPUTE, FP32, "", "fp32_cycles_active_total"},
    {1096, 'i', CYCLES, COMPUTE, FP16, "", "fp16_cycles_active_total"},
    {1425, 'i', GAUGE, FE_GPU, 0, "smoothing", "pwr_smoothing_enabled"},
    {1523, 'i', GAUGE, FE_GPU, 0, "recovery", "gpu_recovery_action"},
};
const int FIELD_COUNT = sizeof FIELDS / sizeof *FIELDS;
_Static_assert(sizeof FIELDS / sizeof *FIELDS <= MAX_FIELDS, "more fields than places");

int field_at(unsigned id) {
    for (int i = 0; i < FIELD_COUNT; i++)
        if (FIELDS[i].id == id) return world.lacking[i] ? -1 : i;
    return -1;
}

int field_named(const char *key) {
    for (int i = 0; i < FIELD_COUNT; i++)
        if (*key && !strcmp(FIELDS[i].key, key)) return i;
    return -1;
}

bool profiled(int field) { return FIELDS[field].id > 1000 && FIELDS[field].id < 1100; }

/* ---- places: all GPUs, then eight instances of each, then eight compute instances of each ---- */

enum { FIRST_INSTANCE = MAX_GPUS, FIRST_COMPUTE = MAX_GPUS * (1 + INSTANCES_PER_GPU) };

int gpu_of(int place) {
    if (place < FIRST_INSTANCE) return place;
    return (place - (place < FIRST_COMPUTE ? FIRST_INSTANCE : FIRST_COMPUTE)) / INSTANCES_PER_GPU;
}

static int within(int place) { return (place - FIRST_INSTANCE) % INSTANCES_PER_GPU; }

int instance_of(int place) {
    const struct gpu *g = &world.gpu[gpu_of(place)];
    if (place < FIRST_INSTANCE) return -1;
    if (place < FIRST_COMPUTE) return within(place) < (int)g->instances ? within(place) : -1;
    int left = within(place);
    for (unsigned i = 0; i < g->instances; left -= (int)g->instance[i++].computes)
        if (left < (int)g->instance[i].computes) return (int)i;
    return -1;
}

unsigned compute_of(int place) {
    const struct gpu *g = &world.gpu[gpu_of(place)];
    int left = within(place);
    for (unsigned i = 0; i < g->instances && left >= (int)g->instance[i].computes; i++) left -= (int)g->instance[i].computes;
    return (unsigned)left;
}

bool exists(int place) {
    const struct gpu *g = &world.gpu[gpu_of(place)];
    return gpu_of(place) < (int)world.count && !g->gone && (place < FIRST_INSTANCE || instance_of(place) >= 0);
}

struct entity entity_at(int place) {
    if (place < FIRST_INSTANCE) return (struct entity){FE_GPU, (uint32_t)place};
    bool compute = place >= FIRST_COMPUTE;
    return (struct entity){compute ? FE_GPU_CI : FE_GPU_I,
                           (uint32_t)(place - (compute ? FIRST_COMPUTE : FIRST_INSTANCE))};
}

int place_of(struct entity e) {
    unsigned limit = e.group == FE_GPU ? MAX_GPUS : MAX_GPUS * INSTANCES_PER_GPU;
    if ((e.group != FE_GPU && e.group != FE_GPU_I && e.group != FE_GPU_CI) || e.id >= limit) return -1;
    int first = e.group == FE_GPU ? 0 : e.group == FE_GPU_I ? FIRST_INSTANCE : FIRST_COMPUTE;
    return exists(first + (int)e.id) ? first + (int)e.id : -1;
}

struct unit *unit_at(int place) {
    struct gpu *g = &world.gpu[gpu_of(place)];
    return place < FIRST_INSTANCE ? &g->unit : &g->instance[instance_of(place)].unit;
}

int gpu_status(unsigned gpu) {
    if (gpu >= world.count || world.gpu[gpu].gone) return STATUS_UNKNOWN;
    const struct gpu *g = &world.gpu[gpu];
    return g->detached ? STATUS_DETACHED : g->lost ? STATUS_LOST : g->unsupported ? STATUS_UNSUPPORTED : STATUS_OK;
}
