/* What the parts of the stand-in library share: NVML's codes and handles, and the door every call goes through.
 *
 * THIS IS NOT NVIDIA'S LIBRARY, and holds none of its code. Struct layouts, error codes and semantics follow the
 * published NVML API reference (docs.nvidia.com/deploy/nvml-api). It says so in its driver version string.
 * What its GPUs do comes from world.h's script. Beside NVML it exports, for tests:
 *
 *   int nvmlStubLiveSamples(void)           GPM samples allocated and not freed
 *   int nvmlStubLiveSets(void)              event sets created and not freed
 *   int nvmlStubBadFrees(void)              frees of what was no live sample or set
 *   int nvmlStubInitialised(void)           nvmlInit calls not yet shut down
 *   unsigned long nvmlStubCalls(const char *name)   how often a function was called on a GPU, or at all; of "field
 *                                           values" how many were asked for
 */
#ifndef LIBRARY_H
#define LIBRARY_H

#include "world.h"

#include <stddef.h>

typedef int nvmlReturn_t;
enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, TIMEOUT = 10, GPU_IS_LOST = 15, MEMORY = 20, ARGUMENT_VERSION_MISMATCH = 25,
};

/* A board, or a place among its MIG devices. Like the library's, a handle of a place is used again for whatever
 * device is there next. */
struct handle {
    int gpu, place;      /* place -1: the board */
    int gi;              /* what was there when the handle was given */
    unsigned ci, generation;
};
typedef struct handle *nvmlDevice_t;

/* What a handle means just now; `in` is NULL for a board. */
struct target {
    struct gpu *d;
    struct instance *in;
    int index, gi;
    unsigned ci;
};

typedef union {
    double dVal; unsigned uiVal; unsigned long ulVal; unsigned long long ullVal; long long sllVal; int siVal;
    unsigned short usVal;
} nvmlValue_t;

extern struct world *w;
extern int bad_frees;
int nvmlStubInitialised(void);

/* The door without a device: initialised, and no rule against it. */
nvmlReturn_t enter(const char *name);
/* The door with one: also there, not lost, of this generation. Boards only: NOT_SUPPORTED of a MIG device. */
nvmlReturn_t enter_board(const char *name, nvmlDevice_t handle, struct target *t);
nvmlReturn_t enter_either(const char *name, nvmlDevice_t handle, struct target *t);
nvmlReturn_t board_handle(int gpu, nvmlDevice_t *handle);
nvmlReturn_t mig_handle(int gpu, unsigned place, nvmlDevice_t *handle);
/* Counts what nvmlStubCalls tells. */
void tally(const char *name, unsigned long n);
/* Tells the event sets what has happened since the last call; see health.c. */
void happen(void);

#define DOOR(call) do { nvmlReturn_t r_ = (call); if (r_) return r_; } while (0)
#define ENTER() DOOR(enter(__func__))
#define ENTER_BOARD(h) struct target t; DOOR(enter_board(__func__, (h), &t)); struct gpu *d = t.d; (void)d
#define ENTER_EITHER(h) struct target t; DOOR(enter_either(__func__, (h), &t)); struct gpu *d = t.d; (void)d
#define NEED(p) do { if (!(p)) return INVALID_ARGUMENT; } while (0)

#endif
