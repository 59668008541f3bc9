/* Many threads on NVML, one GPU of its own to change: whatever is answered SUCCESS must be true.
 *
 * storm GPU THREADS CALLS UUIDS...: thread 0 creates and destroys instances of GPU, and reads after each what there is;
 * the others read what never changes. Ends after CALLS successes. It prints what it knows of its GPU, how often each code
 * was answered, and its memory after a fifth of the calls and at the end (KiB); a wrong answer ends it with exit code 2.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "nvml.h"

enum { ONE_G = 19, PLACES = 7 };

static unsigned own, threads, gpus;
static long calls_max;
static char **uuids;
static nvmlDevice_t handles[64];
static atomic_long calls, codes[1000];
static atomic_long early_kib;
static unsigned taken; /* a bit for each place of our GPU */

static void wrong(const char *format, ...)
{
    va_list words;
    va_start(words, format);
    printf("WRONG: ");
    vprintf(format, words);
    printf("\n");
    fflush(stdout);
    _exit(2);
}

static long memory_kib(void)
{
    long size = 0, resident = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file == NULL || fscanf(file, "%ld %ld", &size, &resident) != 2)
        resident = 0;
    if (file != NULL)
        fclose(file);
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

/* Count the answer; any but success, a fault of ours, and what a break or a server that is away may say is wrong. */
static nvmlReturn_t said(const char *name, nvmlReturn_t code)
{
    if (code == NVML_SUCCESS && atomic_fetch_add(&calls, 1) == calls_max / 5)
        atomic_store(&early_kib, memory_kib());
    if (code > 999)
        wrong("%s: %d", name, (int)code);
    atomic_fetch_add(&codes[code], 1);
    if (code != NVML_SUCCESS && code != NVML_ERROR_IN_USE && code != NVML_ERROR_UNKNOWN &&
        code != NVML_ERROR_DRIVER_NOT_LOADED)
        wrong("%s: %s", name, nvmlErrorString(code));
    if (code == NVML_ERROR_DRIVER_NOT_LOADED)
        usleep(20000); /* answered at once: nobody would ask without a pause */
    return code;
}

#define CALL(name, ...) said(#name, name(__VA_ARGS__))

/* What is on our GPU, asked until it is answered. */
static unsigned look(nvmlGpuInstance_t found[PLACES])
{
    for (;;) {
        nvmlGpuInstance_t instances[8];
        nvmlGpuInstanceInfo_t info;
        unsigned count = 99, at, mask = 0;
        if (CALL(nvmlDeviceGetGpuInstances, handles[own], ONE_G, instances, &count) != NVML_SUCCESS)
            continue;
        if (count > PLACES)
            wrong("%u instances", count);
        for (at = 0; at < count; at++) {
            memset(&info, 0xFF, sizeof info);
            if (CALL(nvmlGpuInstanceGetInfo, instances[at], &info) != NVML_SUCCESS)
                break;
            if (info.profileId != ONE_G || info.placement.start >= PLACES || info.placement.size != 1 ||
                mask & 1u << info.placement.start)
                wrong("an instance at %u+%u", info.placement.start, info.placement.size);
            mask |= 1u << info.placement.start;
            found[info.placement.start] = instances[at];
        }
        if (at == count)
            return mask;
    }
}

static void change(unsigned *seed)
{
    nvmlGpuInstance_t found[PLACES];
    unsigned place = (unsigned)rand_r(seed) % PLACES, bit = 1u << place, after, seen;
    nvmlReturn_t code;
    if (look(found) != taken)
        wrong("GPU %u has %02x, not %02x", own, look(found), taken);
    after = taken ^ bit;
    if (taken & bit) {
        code = CALL(nvmlGpuInstanceDestroy, found[place]);
    } else {
        nvmlGpuInstancePlacement_t where = {place, 1};
        nvmlGpuInstance_t made = NULL;
        code = CALL(nvmlDeviceCreateGpuInstanceWithPlacement, handles[own], ONE_G, &where, &made);
        if (code == NVML_SUCCESS && made == NULL)
            wrong("created nothing");
    }
    seen = look(found);
    if (seen != after && (code == NVML_SUCCESS || seen != taken))
        wrong("after %d GPU %u has %02x; it had %02x", (int)code, own, seen, taken);
    if (code == NVML_ERROR_DRIVER_NOT_LOADED && seen != taken)
        wrong("done, though there was no driver");
    taken = seen;
}

static void read_one(unsigned *seed)
{
    unsigned gpu = (unsigned)rand_r(seed) % gpus, number = 9999;
    char text[96] = "";
    nvmlDevice_t handle = NULL;
    nvmlFieldValue_t fields[2] = {{.fieldId = NVML_FI_DEV_IS_RESETLESS_MIG_SUPPORTED}, {.fieldId = 1}};
    nvmlEventSet_t set;
    nvmlEventData_t event;
    switch (rand_r(seed) % 8) {
    case 0:
        if (CALL(nvmlDeviceGetHandleByUUID, uuids[gpu], &handle) == NVML_SUCCESS && handle != handles[gpu])
            wrong("another handle of GPU %u", gpu);
        return;
    case 1:
        if (CALL(nvmlDeviceGetFieldValues, handles[gpu], 2, fields) == NVML_SUCCESS &&
            (fields[0].nvmlReturn != NVML_SUCCESS || fields[1].nvmlReturn != NVML_ERROR_NOT_SUPPORTED))
            wrong("fields of GPU %u", gpu);
        return;
    case 2:
        if (rand_r(seed) % 8 == 0 && CALL(nvmlEventSetCreate, &set) == NVML_SUCCESS) {
            nvmlReturn_t code = nvmlEventSetWait_v2(set, &event, 5);
            if (code != NVML_ERROR_TIMEOUT)
                said("nvmlEventSetWait_v2", code);
            CALL(nvmlEventSetFree, set);
        }
        return;
    case 3:
    case 4:
        if (CALL(nvmlDeviceGetUUID, handles[gpu], text, sizeof text) == NVML_SUCCESS && strcmp(text, uuids[gpu]) != 0)
            wrong("the UUID of GPU %u is %s", gpu, text);
        return;
    default:
        if (CALL(nvmlDeviceGetIndex, handles[gpu], &number) == NVML_SUCCESS && number != gpu)
            wrong("the index of GPU %u is %u", gpu, number);
    }
}

static void *work(void *argument)
{
    unsigned seed = (unsigned)(size_t)argument * 7919 + own;
    while (atomic_load(&calls) < calls_max)
        argument == NULL ? change(&seed) : read_one(&seed);
    return NULL;
}

int main(int count, char **words)
{
    pthread_t started[256];
    nvmlGpuInstance_t found[PLACES];
    unsigned at;
    if (count < 5)
        return 1;
    own = (unsigned)atoi(words[1]);
    threads = (unsigned)atoi(words[2]);
    calls_max = atol(words[3]);
    uuids = words + 4;
    gpus = (unsigned)count - 4;
    while (nvmlInit_v2() != NVML_SUCCESS) {
    }
    for (at = 0; at < gpus; at++)
        while (nvmlDeviceGetHandleByIndex_v2(at, &handles[at]) != NVML_SUCCESS) {
        }
    taken = look(found);
    for (at = 0; at < threads; at++)
        if (pthread_create(&started[at], NULL, work, (void *)(size_t)at) != 0)
            return 1;
    for (at = 0; at < threads; at++)
        pthread_join(started[at], NULL);
    printf("{\"taken\": %u, \"early_kib\": %ld, \"late_kib\": %ld, \"codes\": {", taken, early_kib, memory_kib());
    for (at = 0, count = 0; at < 1000; at++)
        if (codes[at] != 0)
            printf("%s\"%u\": %ld", count++ ? ", " : "", at, (long)codes[at]);
    printf("}}\n");
    return 0;
}
