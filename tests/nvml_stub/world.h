/* The world a stand-in NVML shows: a few GPUs whose counters run with a clock.
 *
 * THIS IS NOT NVIDIA'S LIBRARY. It is test code written for this project.
 *
 * The world comes from the text file named by NVML_STUB_SCRIPT, read again whenever it changes; without one it is
 * eight busy H100s on the real clock. One statement a line, '#' begins a comment:
 *
 *   clock MS                the world's own time; the values of this file hold from the previous clock to this one.
 *                           Without it the world runs on the real clock.
 *   count N                 GPUs that nvmlDeviceGetCount reports (default 8)
 *   driver gone             nothing answers but UNINITIALIZED; nvmlInit gives DRIVER_NOT_LOADED
 *   error CALL CODE         that NVML function fails on every GPU, or as a whole
 *   sleep CALL MS           that NVML function takes so long (a hang)
 *   gpu N|* KEY VALUE...    a value of one GPU or of all, see below
 *   gpu N|* error CALL CODE, gpu N|* sleep CALL MS
 *   gpu N|* lost            every call on it gives GPU_IS_LOST, its handle included
 *   gpu N|* metric ID CODE  that GPM metric fails with the code while the request as a whole succeeds; with -1 its
 *                           slot is left as it came, as a driver may do that does not know the metric
 *   gpu N|* nan ID          that GPM metric is not a number
 *   gpu N|* idle            no process (each GPU has one by default)
 *   gpu N|* process PID [BYTES]   without BYTES: NVML_VALUE_NOT_AVAILABLE
 *   gpu N|* energy MJ       sets the energy counter (a driver reload resets it)
 *   gpu N|* nvlink_mib MIB  likewise both NVLink counters
 *
 * Keys: name TEXT, uuid TEXT, pci HEX (nvmlPciInfo_t.pciDeviceId), gr sm occ tensor dram fp64 fp32 fp16 (percent),
 * pcie_tx pcie_rx nvlink_tx nvlink_rx (MiB/s), power_mw, limit_mw, temp, sm_mhz, util, links (NVLinks), mem_total,
 * mem_reserved, mem_used (bytes), reasons (bits), gpm 0|1, mig 0|1.
 *
 * A line overrides those before it; a file says all of the world, what it leaves out is as by default. An unknown
 * word ends the process with a message: a test must not pass for a typing error.
 */
#ifndef WORLD_H
#define WORLD_H

#include <stdbool.h>
#include <stdint.h>

enum { MAX_GPUS = 16, MAX_RULES = 64, MAX_PROCESSES = 32, MAX_SAMPLES = 120, MAX_METRIC = 512, MAX_TEXT = 96 };

/* Rates of a GPU, in the order of RATE_KEYS: percent, then MiB/s. */
enum rate { GR, SM, OCC, TENSOR, DRAM, FP64, FP32, FP16, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX, RATES };

struct rule {
    char call[64];
    int gpu; /* -1: every GPU, and calls on none */
    long value;
};

struct process {
    unsigned pid;
    unsigned long long bytes;
};

struct sample {
    unsigned long long us;
    unsigned value;
};

struct gpu {
    char name[MAX_TEXT], uuid[MAX_TEXT];
    unsigned pci;
    double rate[RATES], counter[RATES]; /* a counter is its rate integrated over seconds */
    double power_mw, energy_mj;
    unsigned limit_mw, celsius, sm_mhz, util, links;
    unsigned long long mem_total, mem_reserved, mem_used, reasons;
    bool gpm, mig, lost;
    short metric_code[MAX_METRIC];
    bool metric_nan[MAX_METRIC];
    struct process process[MAX_PROCESSES];
    unsigned processes;
    struct sample sample[MAX_SAMPLES]; /* a ring, newest at samples - 1 */
    unsigned long samples;
};

struct world {
    struct gpu gpu[MAX_GPUS];
    struct rule error[MAX_RULES], sleep[MAX_RULES];
    unsigned errors, sleeps, count;
    bool driver_gone, own_clock;
    double now; /* seconds */
};

/* Brings the world up to now, or to the script's clock. */
struct world *world_now(void);

/* The code a call must fail with on that GPU (-1: on none), 0 when it may go on; sleeps first if told to. */
int world_verdict(const char *call, int gpu);

#endif
