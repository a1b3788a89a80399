/* What each process used of a GPU, as the driver samples it; see library.h. */
#include "library.h"

#include <string.h>

typedef struct {
    unsigned pid;
    unsigned long long timeStamp;
    unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;
typedef struct {
    unsigned long long timeStamp;
    unsigned pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;
typedef struct {
    unsigned version, processSamplesCount;
    unsigned long long lastSeenTimeStamp;
    nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_v1_t;

/* One entry a process with some use since `last`: the mean over all samples since, and the time of its own last one. */
static void collect(const struct gpu *d, unsigned long long last, nvmlProcessUtilizationSample_t *out, unsigned *n) {
    unsigned long long sum[MAX_SAMPLES * MAX_USES], of = 0;
    unsigned long oldest = d->samples > MAX_SAMPLES ? d->samples - MAX_SAMPLES : 0;
    *n = 0;
    for (unsigned long i = oldest; i < d->samples; i++) {
        const struct sample *s = &d->sample[i % MAX_SAMPLES];
        if (s->us <= last && !d->stamped) continue;
        of++;
        for (unsigned u = 0; u < s->uses; u++) {
            unsigned at = 0;
            while (at < *n && out[at].pid != s->use[u].pid) at++;
            if (at == *n) out[(*n)++] = (nvmlProcessUtilizationSample_t){.pid = s->use[u].pid}, sum[at] = 0;
            out[at].timeStamp = d->stamped ? d->stamp : s->us;
            sum[at] += s->use[u].percent;
        }
    }
    for (unsigned i = 0; i < *n; i++) out[i].smUtil = (unsigned)(sum[i] / of);
}

static nvmlProcessUtilizationSample_t all[MAX_SAMPLES * MAX_USES];

/* Who asks without room is told that of the whole buffer, as drivers do. */
static nvmlReturn_t written(const struct gpu *d, unsigned long long last, bool room, unsigned *n) {
    if (d->mig) return NOT_SUPPORTED;
    unsigned have = *n;
    collect(d, last, all, n);
    if (!*n) return NOT_FOUND;
    if (room && have >= *n) return SUCCESS;
    *n = MAX_SAMPLES;
    return INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t h, nvmlProcessUtilizationSample_t *out, unsigned *n,
                                             unsigned long long last) {
    ENTER_BOARD(h);
    NEED(n);
    DOOR(written(d, last, out, n));
    memcpy(out, all, *n * sizeof *all);
    return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t h, nvmlProcessesUtilizationInfo_v1_t *info) {
    ENTER_BOARD(h);
    NEED(info);
    if (info->version != (sizeof *info | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    DOOR(written(d, info->lastSeenTimeStamp, info->procUtilArray, &info->processSamplesCount));
    for (unsigned i = 0; i < info->processSamplesCount; i++)
        info->procUtilArray[i] = (nvmlProcessUtilizationInfo_v1_t){
            .timeStamp = all[i].timeStamp, .pid = all[i].pid, .smUtil = all[i].smUtil};
    return SUCCESS;
}
