/* Critical errors as events, and the values asked by field id; see library.h. */
#include "library.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_SETS = 8, XID_CRITICAL_ERROR = 8, ULL = 3, UINT = 1 };

struct event { nvmlDevice_t device; unsigned xid; };
typedef struct set {
    bool live;
    nvmlDevice_t registered[MAX_GPUS];
    struct event event[MAX_GPUS * MAX_XIDS];
    unsigned events, told;
} *nvmlEventSet_t;

static struct set sets[MAX_SETS];

int nvmlStubLiveSets(void) {
    int n = 0;
    for (int i = 0; i < MAX_SETS; i++) n += sets[i].live;
    return n;
}

static void add_event(struct set *set, nvmlDevice_t device, unsigned xid) {
    if (set->events < MAX_GPUS * MAX_XIDS) set->event[set->events++] = (struct event){device, xid};
}

void happen(void) {
    for (int g = 0; g < MAX_GPUS; g++)
        for (struct gpu *d = &w->gpu[g]; d->happened < d->xids; d->happened++)
            for (int s = 0; s < MAX_SETS; s++) {
                nvmlDevice_t to = sets[s].registered[g];
                if (sets[s].live && to && to->generation == d->generation) add_event(&sets[s], to, d->xid[d->happened]);
            }
    for (; w->strayed < w->strays; w->strayed++)
        for (int s = 0; s < MAX_SETS; s++)
            if (sets[s].live) add_event(&sets[s], NULL, w->stray[w->strayed]);
}

nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) {
    ENTER();
    for (int i = 0; i < MAX_SETS; i++)
        if (!sets[i].live) {
            memset(&sets[i], 0, sizeof sets[i]);
            sets[i].live = true;
            *set = &sets[i];
            return SUCCESS;
        }
    return MEMORY;
}

nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) {
    if (!set || !set->live) return bad_frees++, INVALID_ARGUMENT;
    set->live = false;
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t h, unsigned long long types, nvmlEventSet_t set) {
    ENTER_BOARD(h);
    if (!set || !set->live) return INVALID_ARGUMENT;
    if (!d->events || types != XID_CRITICAL_ERROR) return NOT_SUPPORTED;
    set->registered[t.index] = h;
    return SUCCESS;
}

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

/* Whatever the time allowed, it comes back at once: nothing can happen before the next call. */
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned milliseconds) {
    (void)milliseconds;
    ENTER();
    if (!set || !set->live || !data) return INVALID_ARGUMENT;
    if (set->told == set->events) return set->told = set->events = 0, TIMEOUT;
    struct event e = set->event[set->told++];
    *data = (nvmlEventData_t){e.device, XID_CRITICAL_ERROR, e.xid, ~0u, ~0u};
    return SUCCESS;
}

typedef struct {
    unsigned fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;

static void throughput(const struct gpu *d, nvmlFieldValue_t *v) {
    double counter = d->counter[v->fieldId == 138 ? NVLINK_TX : NVLINK_RX];
    v->nvmlReturn = d->links && !d->vgpu ? SUCCESS : NOT_SUPPORTED;
    /* A scope other than UINT_MAX is one link only. */
    if (!v->nvmlReturn) v->value.ullVal = (unsigned long long)(counter * 1024) / (v->scopeId == ~0u ? 1 : d->links);
}

static bool of_a_link(unsigned id) { return (id >= 161 && id <= 163) || (id >= 201 && id <= 225); }

static void value(const struct gpu *d, nvmlFieldValue_t *v) {
    unsigned id = v->fieldId;
    bool partitioned = d->mig && d->places;
    v->valueType = id == 3 || id == 4 || of_a_link(id) ? ULL : UINT;
    v->nvmlReturn = id < MAX_FIELD && !d->vgpu ? d->field_code[id] : NOT_SUPPORTED;
    if (of_a_link(id) && !d->links) v->nvmlReturn = NOT_SUPPORTED;
    else if (of_a_link(id) && v->scopeId >= d->links) v->nvmlReturn = INVALID_ARGUMENT;
    if (partitioned && (id == 144 || id == 145)) v->nvmlReturn = NOT_SUPPORTED; /* rows are not told with instances */
    if (v->nvmlReturn) return;
    if (v->valueType == ULL) v->value.ullVal = d->field[id];
    else v->value.uiVal = (unsigned)d->field[id]; /* the rest of the union stays as it was */
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t h, int n, nvmlFieldValue_t *v) {
    ENTER_BOARD(h);
    tally("field values", (unsigned long)n);
    for (int i = 0; i < n; i++) {
        v[i].valueType = ULL;
        if (v[i].fieldId == 138 || v[i].fieldId == 139) throughput(d, &v[i]); /* NVLINK_THROUGHPUT_DATA_TX, _RX */
        else value(d, &v[i]);
    }
    return SUCCESS;
}
