/* The world a stand-in NVML shows: a few GPUs, whole or cut into MIG instances, whose counters run with a clock.
 *
 * THIS IS NOT NVIDIA'S LIBRARY. It is test code written for this project.
 *
 * The world comes from the text file named by NVML_STUB_SCRIPT, read again whenever it changes; without one it is
 * eight busy H100s on the real clock. One statement a line, '#' begins a comment:
 *
 *   clock MS                the world's own time; the values of this file hold from the previous clock to this one.
 *                           Without it the world runs on the real clock.
 *   count N                 GPUs that nvmlDeviceGetCount reports (default 8)
 *   version TEXT            the driver's version (default 0.0)
 *   driver gone             nothing answers but UNINITIALIZED; nvmlInit gives DRIVER_NOT_LOADED
 *   stray XID               a critical error of no GPU that NVML can name; each such line happens once
 *   error CALL CODE         that NVML function fails on every GPU, or as a whole
 *   sleep CALL MS           that NVML function takes so long (a hang)
 *   gpu N|* KEY VALUE...    a value of one GPU or of all, see below
 *   gpu N|* error CALL CODE, gpu N|* sleep CALL MS
 *   gpu N|* lost            every call on it gives GPU_IS_LOST, its handle included
 *   gpu N|* reset [K]       it has been reset K times (default 1): handles given before are INVALID_ARGUMENT, and its
 *                           counters began anew
 *   gpu N|* vgpu            it is a vGPU in a guest: most calls are NOT_SUPPORTED
 *   gpu N|* xid XID         a critical error; the n-th such line of a GPU happens once, however often it is read
 *   gpu N|* no_events       it cannot tell critical errors
 *   gpu N|* metric ID CODE  that GPM metric fails with the code while the request as a whole succeeds; with -1 its
 *                           slot is left as it came, as a driver may do that does not know the metric
 *   gpu N|* nan ID          that GPM metric is not a number
 *   gpu N|* idle            no process (each GPU and each instance has one by default)
 *   gpu N|* process PID [BYTES]   without BYTES: NVML_VALUE_NOT_AVAILABLE
 *   gpu N|* use PID PERCENT   that process uses so much of the SMs, there or not; the driver remembers it
 *   gpu N|* use_stamp US    all that buffer is of that time, whatever was asked for
 *   gpu N|* energy MJ       sets the energy counter (a driver reload resets it)
 *   gpu N|* nvlink_mib MIB  likewise both NVLink counters
 *   gpu N|* field ID VALUE|none|fails CODE   what nvmlDeviceGetFieldValues says, of each link where it is asked by link
 *   gpu N|* mig off|on|PLACE...   MIG mode, and its instances in the order of their indices. A PLACE is
 *                           PROFILE[:GI][/CIS] ("3g.40gb:2", "2g.20gb:3/2"; CIS compute instances, default 1), or "-"
 *                           for an index without a device. Without :GI the lowest id that is free, from 1.
 *   gpu N|* gi ID KEY VALUE...    a value of one instance: the rates, mem_used, idle, process PID [BYTES [CI]]
 *   gpu N|* gi ID error CALL CODE
 *
 * Keys: name TEXT, uuid TEXT, pci HEX (nvmlPciInfo_t.pciDeviceId), gr sm occ tensor dram fp64 fp32 fp16 int (percent),
 * pcie_tx pcie_rx nvlink_tx nvlink_rx c2c_tx c2c_rx (MiB/s), power_mw, limit_mw, temp, margin, slowdown, sm_mhz, util,
 * encoder, decoder (percent), links (NVLinks), mem_total, mem_reserved, mem_used (bytes), reasons (bits), gpm 0|1,
 * c2c 0|1 (a chip-to-chip link, default 0), cumulative 0|1 (GPM's counters since reboot, default 0), counted PERCENT
 * (what they count of what happened, default 100); fields by name: ecc_corrected, ecc_uncorrected, remap_pending, remap_failure, recovery, memory_temp, smoothing. A name with A100 or A30 in it has
 * that board's MIG profiles, any other an H100's.
 *
 * A line overrides those before it; a file says all of the world, what it leaves out is as by default. An unknown
 * word ends the process with a message: a test must not pass for a typing error.
 */
#ifndef WORLD_H
#define WORLD_H

#include <stdbool.h>
#include <stdint.h>

enum {
    MAX_GPUS = 16, MAX_RULES = 128, MAX_PROCESSES = 32, MAX_SAMPLES = 120, MAX_METRIC = 512, MAX_TEXT = 96, MAX_GI = 16,
    MAX_PLACES = 8, MAX_FIELD = 320, MAX_XIDS = 128, MAX_USES = 8,
};

/* Rates of a GPU, in the order of RATE_KEYS: percent, then MiB/s. */
enum rate {
    GR, SM, OCC, TENSOR, DRAM, FP64, FP32, FP16, INT, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX, C2C_TX, C2C_RX, RATES
};

struct rule {
    char call[64];
    int gpu; /* -1: every GPU, and calls on none */
    int gi;  /* -1: the GPU and every instance of it */
    long value;
};

/* The kernel gives no pid as large: whatever else runs on the machine, none of the world's own processes is in /proc. */
#define NO_PID (1U << 22)

struct process {
    unsigned pid, ci;
    unsigned long long bytes;
};

struct use {
    unsigned pid, percent;
};

struct sample {
    unsigned long long us;
    unsigned value, uses;
    struct use use[MAX_USES];
};

struct profile {
    const char *name;
    unsigned kind; /* NVML_GPU_INSTANCE_PROFILE_* */
    unsigned id, slices, memory_slices, count, multiprocessors;
    unsigned long long megabytes;
};

struct instance {
    const struct profile *profile; /* NULL: there is none of this id */
    const struct profile *before;  /* what it was when the script was last read */
    unsigned cis;
    double rate[RATES], counter[RATES];
    unsigned long long mem_used;
    struct process process[MAX_PROCESSES];
    unsigned processes;
};

struct place { /* an index among a board's MIG devices; gi -1: no device there */
    int gi;
    unsigned ci;
};

struct gpu {
    char name[MAX_TEXT], uuid[MAX_TEXT];
    unsigned pci;
    double rate[RATES], counter[RATES]; /* a counter is its rate integrated over seconds */
    double power_mw, energy_mj;
    unsigned limit_mw, celsius, sm_mhz, util, encoder, decoder, links, slowdown, counted;
    int margin;
    unsigned long long mem_total, mem_reserved, mem_used, reasons;
    bool gpm, mig, lost, vgpu, events, c2c, cumulative;
    unsigned generation, was; /* how often it was reset, now and when the script was last read */
    short metric_code[MAX_METRIC];
    bool metric_nan[MAX_METRIC];
    unsigned long long field[MAX_FIELD];
    int field_code[MAX_FIELD]; /* of each, 0: it is there */
    struct process process[MAX_PROCESSES];
    unsigned processes;
    struct use use[MAX_USES];
    unsigned uses;
    bool stamped;
    unsigned long long stamp; /* of all samples of processes, if stamped */
    struct sample sample[MAX_SAMPLES]; /* a ring, newest at samples - 1 */
    unsigned long samples;
    struct instance instance[MAX_GI]; /* by GPU instance id */
    struct place place[MAX_PLACES];
    unsigned places;
    unsigned xid[MAX_XIDS], xids; /* all that the script says */
    unsigned happened;            /* of which so many have been told to whoever listened */
};

struct world {
    struct gpu gpu[MAX_GPUS];
    struct rule error[MAX_RULES], sleep[MAX_RULES];
    unsigned errors, sleeps, count;
    unsigned stray[MAX_XIDS], strays, strayed; /* likewise, of no GPU */
    char version[MAX_TEXT];
    bool driver_gone, own_clock;
    double now; /* seconds */
};

/* The profiles of a board, by kind; the last has no name. The first is the whole board. */
const struct profile *profiles_of(const struct gpu *g);

/* Values as by default; counters, sample buffers and the clock go on. */
void world_reset(struct world *the);

/* Takes the script in if it changed; gives the time it says, or that of the real clock. */
double world_script(struct world *the, bool started);

/* Brings the world up to now, or to the script's clock. */
struct world *world_now(void);

/* The code a call must fail with on that GPU (-1: on none) and instance (-1: the GPU itself), 0 when it may go on;
 * sleeps first if told to. */
int world_verdict(const char *call, int gpu, int gi);

#endif
