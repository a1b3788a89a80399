/* The world a stand-in libdcgm shows: a host engine, its clients, and a few GPUs whose counters run with a clock.
 *
 * THIS IS NOT NVIDIA'S LIBRARY. It is test code written for this project.
 *
 * The world comes from the text file named by DCGM_STUB_SCRIPT, read again whenever it changes; without one it is two
 * busy H100s on the real clock, their engine at localhost:5555. One statement a line, '#' begins a comment:
 *
 *   clock US                the engine's clock, microseconds since 1970; the values of this file hold from the previous
 *                           clock to this one. Without it the world runs on the real clock.
 *   count N                 GPUs there are (default 2)
 *   version TEXT            what dcgmVersionInfo says
 *   knows FIELD, lacks FIELD    a field this DCGM has or has not; 1084-1096 (DCGM 4.6), 1425 and 1523 are lacking
 *                           unless known
 *   listen ADDRESS          an address at which the engine answers: host:port, or /path of a unix socket; the first
 *                           such line replaces localhost:5555
 *   engine up [N]           N is the engine's incarnation: another number is a restart. Handles of the former one stay
 *                           dead, its watches, groups and values are gone
 *   engine down             nobody answers; as a restart for those connected
 *   engine blind            a fatal Xid made it stop all driver calls: every field of every GPU is blank, and no Xid is
 *                           told, until it is another incarnation, whether or not this line stands
 *   engine hung [MS]        it accepts connections and answers nothing, until the script says otherwise or MS real
 *                           milliseconds (default 60000) have passed; a request then times out
 *   drop N                  the first N connections ever made are broken; the engine lives
 *   embedded CODE           dcgmStartEmbedded fails
 *   error CALL CODE         that DCGM function fails, on every GPU or as a whole
 *   sleep CALL MS           that DCGM function takes so long (real time)
 *   profiling CODE          watching profiling fields and asking for their metric groups fails with CODE
 *   paused 1                another client has paused profiling: blanks of the boards without GPM. The others cannot
 *                           be paused: dcgmProfPause and dcgmProfResume are NOT_SUPPORTED where there are no others
 *   watcher FIELD MS        another client watches that field on everything with this period
 *   late FIELD MS           values of that field are stored so long after their stamp
 *   jitter US               every other cycle comes so much late
 *   scatter US              the stamps of one cycle lie up to so far apart, later than the cycle's end
 *   driver_window US        field 203 is the mean of gr over the driver's last window of this length instead of `util`
 *   gpu N|* KEY VALUE       a value of one GPU or of all, see below
 *   gpu N|* field ID VALUE  likewise by field number
 *   gpu N|* blank ID KIND   the field says it has no value: blank, not_found, not_supported, not_permissioned, each
 *                           also as int32_KIND (in an integer field)
 *   gpu N|* status ID CODE  the field has no value but a status
 *   gpu N|* error CALL CODE, gpu N|* sleep CALL MS, gpu N|* profiling CODE    as above, where the call touches it
 *   gpu N|* refuse ID CODE  watching that field fails with CODE
 *   gpu N|* lost            status LOST, blanks, GPU_IS_LOST for what has no value yet
 *   gpu N|* detached        not listed any more, not sampled
 *   gpu N|* unsupported     listed as such, and refused by groups
 *   gpu N|* gone            not listed any more, and unknown when asked
 *   gpu N|* failing         the driver's calls for it fail: listed as OK, all its fields are blank
 *   gpu N|* stuck           nothing of it is sampled any more
 *   gpu N|* slow MS         the driver takes so long to answer for it: the engine's only loop samples and stores nothing
 *                           of any GPU meanwhile, and a live question of any waits (real time)
 *   gpu N|* gpm 0           a board before Hopper: three passes for the profiling fields of major group 1
 *   gpu N|* group MAJOR MINOR FIELD...  a metric group instead of the default ones
 *   gpu N|* xid CODE [SEQ]  an error event; another code or SEQ is a new one, and several lines are several events
 *   gpu N|* index K         its index in NVML, if it is another than follows from `bound`
 *   gpu N|* bound US        it was bound to the driver anew: all its fields are blank until the clock is this, and its index in
 *                           NVML is the last one: those after it move up
 *   gpu N|* energy MJ       sets the energy counter (a driver reload resets it)
 *   gpu N|* mig [PROFILE...]    MIG mode with these instances, as 1g.10gb or 3g.40gb/2 (two compute instances; /0 none)
 *   gpu N|* instance K KEY VALUE    a value of the Kth instance; instances are as busy as their board otherwise
 *
 * Keys: name TEXT, uuid TEXT, pci HEX (device id and vendor), gr sm occ tensor dram fp64 fp32 fp16 imma hmma dfma int
 * (percent), pcie_tx pcie_rx nvlink_tx nvlink_rx c2c_tx c2c_rx (MiB/s), links (NVLinks), c2c 0|1 (a chip-to-chip link,
 * default 0), power limit (W), temp memory_temp margin slowdown (C), sm_clock (MHz), util enc_util dec_util (percent),
 * reasons (bits), fb_total fb_used fb_reserved (MiB), slices,
 * ecc_sbe ecc_dbe remap_failure remap_pending recovery nvlink_flit nvlink_data nvlink_replay nvlink_recovery,
 * smoothing, virtual.
 *
 * A line overrides those before it; a file says all of the world, what it leaves out is as by default. An unknown
 * word ends the process with a message: a test must not pass for a typing error.
 *
 * What is left out: dcgmPolicy*, dcgmHealth*, dcgmDiag*, links and switches, manual operation mode, the seconds that
 * connecting to nobody takes (say `sleep dcgmConnect_v2 MS`), and values that several passes extrapolate (they are 0).
 */
#ifndef WORLD_H
#define WORLD_H

#include <stdbool.h>
#include <stdint.h>

#include "vendor.h"

enum {
    MAX_XIDS = 8, MAX_GPUS = 16, MAX_FIELDS = 120, MAX_RULES = 64, MAX_LISTENS = 8, MAX_NAME = 96,
    ENTITIES = MAX_GPUS * (1 + 2 * INSTANCES_PER_GPU)
};

/* What runs with time, in the order of RATE_KEYS: percent, then MiB/s; then time itself and watts. */
enum rate {
    GR, SM, OCC, TENSOR, DRAM, FP64, FP32, FP16, IMMA, HMMA, DFMA, INT, PCIE_TX, PCIE_RX, NVLINK_TX, NVLINK_RX,
    C2C_TX, C2C_RX, ELAPSED, WATTS, RATES
};
enum { SETTABLE_RATES = ELAPSED };

enum kind { GAUGE, RATIO, BYTES, CYCLES, BYTES_TOTAL, ENERGY, FB_FREE, INDEX, NAME, UUID, BUS, PCI, MIG, VISIBLE,
            ATTRIBUTES, XID };
struct field {
    uint16_t id;
    char type; /* 'd' double, 'i' integer, 's' text, 'b' a structure */
    enum kind kind;
    int level; /* the smallest entity it exists for */
    double param; /* a rate, or a gauge's default */
    const char *key, *tag;
};
extern const struct field FIELDS[];
extern const int FIELD_COUNT;

struct unit {
    double rate[RATES], gauge[MAX_FIELDS];
    int blank[MAX_FIELDS], status[MAX_FIELDS]; /* by place in FIELDS; 0: as it should be */
};
struct instance {
    struct unit unit;
    unsigned slices, memory_gb, computes, nvml_id;
};
struct gpu {
    struct unit unit;
    struct instance instance[INSTANCES_PER_GPU];
    struct metric_group group[MAX_METRIC_GROUPS];
    char name[MAX_NAME], uuid[MAX_NAME];
    unsigned pci, links, instances, groups;
    int profiling, index, xids, xid[MAX_XIDS], xid_sequence[MAX_XIDS];
    int refusal[MAX_FIELDS]; /* by place in FIELDS; 0: it may be watched */
    long slow_ms;
    bool gpm, c2c, mig, lost, detached, unsupported, gone, stuck, failing, set_energy;
    double energy;
    int64_t bound_until;
};
struct rule {
    char call[64];
    int gpu; /* -1: every GPU, and calls on none */
    long value;
};
struct world {
    struct gpu gpu[MAX_GPUS];
    struct rule error[MAX_RULES], sleep[MAX_RULES];
    struct { uint16_t field; int64_t us; } watcher[MAX_RULES], late[MAX_RULES];
    char listen[MAX_LISTENS][MAX_NAME], version[MAX_NAME];
    unsigned errors, sleeps, watchers, lates, listens, count, incarnation;
    int profiling, embedded;
    long hung_ms, jitter_us, scatter_us, driver_window_us;
    uint64_t drop;
    bool lacking[MAX_FIELDS], down, hung, blind, paused, own_clock;
    int64_t now; /* microseconds since 1970 */
};
extern struct world world;

/* script.c: reads the script if it changed and gives the time it says, or that of the real clock. */
int64_t script_read(bool *changed);
_Noreturn void die(const char *why, const char *what);

/* fields.c */
int field_at(unsigned id); /* place in FIELDS; -1: this DCGM has no such field */
int field_named(const char *key);

/* engine.c: the cache of values. A place is an entity's index, 0 to ENTITIES - 1. */
struct value { int64_t at, stored; union { int64_t i64; double dbl; const char *text; } is; };
struct series;
void world_now(void); /* brings the world up to now, or to the script's clock */
int place_of(struct entity entity); /* -1: there is none now */
struct entity entity_at(int place);
int gpu_of(int place);
int gpu_status(unsigned gpu);
int instance_of(int place); /* of a GPU or compute instance; -1 */
unsigned compute_of(int place); /* of a compute instance: its number within its GPU instance */
struct unit *unit_at(int place);
bool exists(int place);
void engine_wipe(void);
status_t engine_watch(int place, int field, uint64_t client, int64_t period, double keep, int samples);
status_t engine_unwatch(int place, int field, uint64_t client);
void engine_end_profiling(int place, uint64_t client); /* ends the sampling of all its profiling fields, if not by GPM */
void engine_forget_client(uint64_t client);
unsigned engine_watches(void);
void engine_pause(bool paused);
int64_t engine_held_us(void); /* how long its loop still waits for the driver */
/* Values stamped from `since` to now, oldest first, for the caller to free; or NO_DATA, NOT_WATCHED, the field's
 * status. */
status_t engine_since(int place, int field, int64_t since, struct value **to, int *n);
status_t engine_latest(int place, int field, bool live, struct value *to);
bool profiled(int field); /* it is one of the profiling fields */
bool engine_watched(int place, int field);
bool engine_sampled(int place, int field); /* not only watched */
/* Lines of its own log in which the engine complains of a profiling field: one a sample that the driver does not have,
 * and one a question for a field that nobody watches. */
extern unsigned long errors_logged;
/* Messages to the engine that ask for values: the latest of many are one, those since a time one a field and entity. */
extern unsigned long requests;
void request(void); /* counts one, and makes the round trip if DCGM_STUB_ROUND_TRIPS is set */

/* passes.c: which profiling fields can be read together. */
unsigned metric_groups(unsigned gpu, struct metric_group *to);
status_t multi_pass(int place, const uint16_t *fields, unsigned n); /* whether these can be watched beside what is */
bool in_turn(int place, int field, int64_t cycle);

/* rates.c: counters, and means of rates over the time since a baseline. */
extern double counters[ENTITIES][RATES]; /* rates integrated over seconds */
void rates_run(int64_t to);  /* integrates up to then */
void rates_forget(int place); /* the baselines of an entity */
void rates_start(int64_t at);
double driver_utilization(int place); /* percent, as the driver shows it now */
bool settled(int place); /* its GPU has values again after it was bound */
struct baseline { int64_t at; double counter; bool known; };
bool measure_rate(int place, int field, int64_t period, struct baseline *base, struct value *to);

/* measure.c: what a field of an entity says at a moment. */
bool measure_gauge(int place, int field, struct value *to); /* false: nothing to store */
void blank_of(int field, int kind, struct value *to); /* kind: 1 to 8 as in the script's list */
int blank_kind(const char *word);
struct mig_attributes attributes_of(int place);

/* clients.c, see clients.h */
void clients_wipe(bool embedded_too);
void clients_drop(uint64_t up_to);

/* enter.c: what every call goes through. */
status_t enter(const char *call, handle_t handle);
status_t leave(status_t status);
extern bool initialised;
status_t verdict(const char *call, int gpu); /* the script's error for that call on that GPU; sleeps first if told to */
void wait_ms(long ms); /* real time, without the lock */
bool hang(void); /* waits while the engine hangs; whether it still does */
void count_call(const char *name);
void lock(void);
void unlock(void);

#define ENTER(h) do { status_t r_ = enter(__func__, h); if (r_) return r_; } while (0)

#endif
