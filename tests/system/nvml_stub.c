/* A stand-in for libnvidia-ml.so.1 whose GPUs are lines of a text file, read anew at each call.
 *
 * NVML_STUB_STATE names the file. Its lines are KEY=VALUE:
 *   init=CODE            what nvmlInitWithFlags answers (absent: success)
 *   epoch=N              after it changes every call answers "uninitialized" until the library is initialised anew
 *   driver=VERSION       count=N          gpm=1 (profiling is supported)
 *   I.NAME=NUMBER        the answer of GPU I to the question NAME; absent is "not supported", "!CODE" fails with CODE
 *   I.field.ID=NUMBER    the same for a field value; I.link.L.C a counter of a link
 *   I.uuid=TEXT, I.serial=TEXT, I.model=TEXT, I.pci=TEXT
 *   I.lost=CODE          GPU I answers CODE to everything    I.hang=1   a call about GPU I never returns
 *   xid=SEQ:I:NUMBER     an event that is delivered once, when SEQ exceeds the last one that this process has seen
 *   wait=CODE            what waiting for events fails with
 * NVML_STUB_PRINTS makes the library print on stdout, as careless libraries do.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MOST 16
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, SMALL = 7, TIMED_OUT = 10 };

typedef struct {
    int index;
} gpu_t;

static gpu_t gpus[MOST];
static long epoch_seen = -1;
static long xid_seen = -1;
static int registered[MOST];

static int lookup(const char *key, char *out, size_t size) {
    const char *path = getenv("NVML_STUB_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[256];
    size_t length = strlen(key);
    int found = 0;
    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, key, length) == 0 && line[length] == '=') {
            snprintf(out, size, "%s", line + length + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static long number_of(const char *key, long otherwise) {
    char text[256];
    return lookup(key, text, sizeof text) ? strtol(text, NULL, 10) : otherwise;
}

static int alive(void) {
    return epoch_seen >= 0 && number_of("epoch", 0) == epoch_seen ? OK : UNINITIALIZED;
}

/* What every call about a GPU begins with. */
static int reach(const gpu_t *gpu) {
    char key[64];
    int code = alive();
    if (code)
        return code;
    if (gpu < gpus || gpu >= gpus + MOST)
        return INVALID;
    snprintf(key, sizeof key, "%d.hang", gpu->index);
    while (number_of(key, 0))
        usleep(50000);
    snprintf(key, sizeof key, "%d.lost", gpu->index);
    return (int)number_of(key, 0);
}

static int text_of(const gpu_t *gpu, const char *name, char *out, unsigned size) {
    char key[64];
    int code = reach(gpu);
    if (code)
        return code;
    snprintf(key, sizeof key, "%d.%s", gpu->index, name);
    return lookup(key, out, size) ? OK : NOT_SUPPORTED;
}

static int ask(const gpu_t *gpu, const char *name, double *out) {
    char text[256];
    int code = text_of(gpu, name, text, sizeof text);
    if (code)
        return code;
    if (text[0] == '!')
        return atoi(text + 1);
    *out = strtod(text, NULL);
    return OK;
}

static int ask_unsigned(const gpu_t *gpu, const char *name, unsigned *out) {
    double value = 0;
    int code = ask(gpu, name, &value);
    if (code == OK)
        *out = (unsigned)value;
    return code;
}

static int ask_long(const gpu_t *gpu, const char *name, unsigned long long *out) {
    double value = 0;
    int code = ask(gpu, name, &value);
    if (code == OK)
        *out = (unsigned long long)value;
    return code;
}

int nvmlInitWithFlags(unsigned flags) {
    int index, code = (int)number_of("init", 0);
    (void)flags;
    if (getenv("NVML_STUB_PRINTS")) {
        puts("NVRM: a word from the library");
        fflush(stdout);
    }
    if (code)
        return code;
    for (index = 0; index < MOST; index++)
        gpus[index].index = index;
    if (epoch_seen < 0) {
        char text[64];
        xid_seen = lookup("xid", text, sizeof text) ? strtol(text, NULL, 10) : 0;
    }
    epoch_seen = number_of("epoch", 0);
    return OK;
}

int nvmlShutdown(void) {
    return alive();
}

const char *nvmlErrorString(int code) {
    (void)code;
    return "an error of the stand-in";
}

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    int code = alive();
    if (code)
        return code;
    return lookup("driver", out, size) ? OK : NOT_SUPPORTED;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = (unsigned)number_of("count", 0);
    return alive();
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, gpu_t **out) {
    if (index >= MOST || (long)index >= number_of("count", 0))
        return alive() ? UNINITIALIZED : INVALID;
    *out = &gpus[index];
    return reach(*out);
}

int nvmlDeviceGetUUID(gpu_t *gpu, char *out, unsigned size) { return text_of(gpu, "uuid", out, size); }
int nvmlDeviceGetSerial(gpu_t *gpu, char *out, unsigned size) { return text_of(gpu, "serial", out, size); }
int nvmlDeviceGetName(gpu_t *gpu, char *out, unsigned size) { return text_of(gpu, "model", out, size); }

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, identity, subsystem;
    char address[32];
} pci_t;

int nvmlDeviceGetPciInfo_v3(gpu_t *gpu, pci_t *out) { return text_of(gpu, "pci", out->address, sizeof out->address); }

typedef struct {
    unsigned field, scope;
    long long timestamp, latency;
    unsigned type, code;
    union {
        double real;
        unsigned short_number;
        unsigned long long number;
    } value;
} field_t;

int nvmlDeviceGetFieldValues(gpu_t *gpu, int count, field_t *fields) {
    int place, code = reach(gpu);
    if (code)
        return code;
    for (place = 0; place < count; place++) {
        char name[32];
        double value = 0;
        snprintf(name, sizeof name, "field.%u", fields[place].field);
        fields[place].code = (unsigned)ask(gpu, name, &value);
        /* Two of the types that the driver uses: a double for odd fields, 64 bits for even ones. */
        fields[place].type = fields[place].field % 2 ? 0 : 3;
        if (fields[place].field % 2)
            fields[place].value.real = value;
        else
            fields[place].value.number = (unsigned long long)value;
    }
    return OK;
}

int nvmlDeviceGetTemperature(gpu_t *gpu, unsigned sensor, unsigned *out) {
    (void)sensor;
    return ask_unsigned(gpu, "temperature", out);
}

typedef struct {
    unsigned version;
    int value;
} margin_t;

int nvmlDeviceGetMarginTemperature(gpu_t *gpu, margin_t *out) {
    double value = 0;
    int code = ask(gpu, "margin", &value);
    out->value = (int)value;
    return code;
}

int nvmlDeviceGetTemperatureThreshold(gpu_t *gpu, unsigned kind, unsigned *out) {
    return kind == 1 ? ask_unsigned(gpu, "slowdown", out) : INVALID;
}

int nvmlDeviceGetPowerUsage(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "power", out); }
int nvmlDeviceGetPowerManagementLimit(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "power_limit", out); }
int nvmlDeviceGetFanSpeed(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "fan", out); }
int nvmlDeviceGetPerformanceState(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "pstate", out); }
int nvmlDeviceGetCurrPcieLinkGeneration(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "pcie_gen", out); }
int nvmlDeviceGetCurrPcieLinkWidth(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "pcie_width", out); }
int nvmlDeviceGetPcieReplayCounter(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "pcie_replay", out); }
int nvmlDeviceGetRetiredPagesPendingStatus(gpu_t *gpu, unsigned *out) { return ask_unsigned(gpu, "pending", out); }

int nvmlDeviceGetClockInfo(gpu_t *gpu, unsigned kind, unsigned *out) {
    return ask_unsigned(gpu, kind == 1 ? "clock_sm" : "clock_memory", out);
}

int nvmlDeviceGetEncoderUtilization(gpu_t *gpu, unsigned *out, unsigned *period) {
    *period = 1000;
    return ask_unsigned(gpu, "encoder", out);
}

int nvmlDeviceGetDecoderUtilization(gpu_t *gpu, unsigned *out, unsigned *period) {
    *period = 1000;
    return ask_unsigned(gpu, "decoder", out);
}

int nvmlDeviceGetUtilizationRates(gpu_t *gpu, unsigned out[2]) {
    int code = ask_unsigned(gpu, "util", &out[0]);
    return code ? code : ask_unsigned(gpu, "util_memory", &out[1]);
}

int nvmlDeviceGetTotalEnergyConsumption(gpu_t *gpu, unsigned long long *out) { return ask_long(gpu, "energy", out); }

int nvmlDeviceGetCurrentClocksThrottleReasons(gpu_t *gpu, unsigned long long *out) {
    return ask_long(gpu, "reasons", out);
}

int nvmlDeviceGetViolationStatus(gpu_t *gpu, unsigned policy, unsigned long long out[2]) {
    char name[32];
    snprintf(name, sizeof name, "violation.%u", policy);
    return ask_long(gpu, name, &out[1]);
}

int nvmlDeviceGetMemoryInfo(gpu_t *gpu, unsigned long long out[3]) {
    int code = ask_long(gpu, "memory_total", &out[0]);
    code = code ? code : ask_long(gpu, "memory_free", &out[1]);
    return code ? code : ask_long(gpu, "memory_used", &out[2]);
}

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} memory_t;

int nvmlDeviceGetMemoryInfo_v2(gpu_t *gpu, memory_t *out) {
    int code = ask_long(gpu, "memory_reserved", &out->reserved);
    code = code ? code : ask_long(gpu, "memory_free", &out->free);
    return code ? code : ask_long(gpu, "memory_used", &out->used);
}

int nvmlDeviceGetTotalEccErrors(gpu_t *gpu, unsigned kind, unsigned since, unsigned long long *out) {
    char name[32];
    snprintf(name, sizeof name, "ecc.%u.%u", kind, since);
    return ask_long(gpu, name, out);
}

int nvmlDeviceGetMemoryErrorCounter(gpu_t *gpu, unsigned kind, unsigned since, unsigned place,
                                    unsigned long long *out) {
    char name[32];
    snprintf(name, sizeof name, "ecc.%u.%u.%u", kind, since, place);
    return ask_long(gpu, name, out);
}

typedef struct {
    unsigned version;
    unsigned long long aggregate[3], parity, secded, corrected, buckets[5];
    unsigned exceeded;
} sram_t;

int nvmlDeviceGetSramEccErrorStatus(gpu_t *gpu, sram_t *out) {
    int code = ask_long(gpu, "sram.parity", &out->parity);
    code = code ? code : ask_long(gpu, "sram.secded", &out->secded);
    code = code ? code : ask_long(gpu, "sram.corrected", &out->corrected);
    return code ? code : ask_unsigned(gpu, "sram.exceeded", &out->exceeded);
}

int nvmlDeviceGetRetiredPages(gpu_t *gpu, unsigned cause, unsigned *count, unsigned long long *pages) {
    char name[32];
    unsigned have = 0, room = *count;
    int code;
    snprintf(name, sizeof name, "retired.%u", cause);
    code = ask_unsigned(gpu, name, &have);
    *count = have;
    if (code || have == 0)
        return code;
    if (!pages || room < have)
        return SMALL;
    memset(pages, 0, have * sizeof *pages);
    return OK;
}

int nvmlDeviceGetRemappedRows(gpu_t *gpu, unsigned *corrected, unsigned *uncorrected, unsigned *pending,
                              unsigned *failure) {
    int code = ask_unsigned(gpu, "remap.corrected", corrected);
    code = code ? code : ask_unsigned(gpu, "remap.uncorrected", uncorrected);
    code = code ? code : ask_unsigned(gpu, "remap.pending", pending);
    return code ? code : ask_unsigned(gpu, "remap.failure", failure);
}

int nvmlDeviceGetNvLinkErrorCounter(gpu_t *gpu, unsigned link, unsigned counter, unsigned long long *out) {
    char name[32];
    snprintf(name, sizeof name, "link.%u.%u", link, counter);
    return ask_long(gpu, name, out);
}

typedef struct {
    unsigned version;
    unsigned char cluster[16];
    unsigned status, clique;
    unsigned char state;
    unsigned mask;
    unsigned char summary;
} fabric_t;

int nvmlDeviceGetGpuFabricInfoV(gpu_t *gpu, fabric_t *out) {
    unsigned value = 0;
    int code = ask_unsigned(gpu, "fabric", &value);
    out->summary = (unsigned char)value;
    out->state = 3;
    out->clique = 7;
    memset(out->cluster, 0xab, sizeof out->cluster);
    return code;
}

typedef struct {
    unsigned version, supported;
} gpm_support_t;

int nvmlGpmQueryDeviceSupport(gpu_t *gpu, gpm_support_t *out) {
    int code = reach(gpu);
    out->supported = number_of("gpm", 0) != 0;
    return code;
}

int nvmlGpmSampleAlloc(int **out) {
    *out = calloc(1, sizeof **out);
    return OK;
}

int nvmlGpmSampleFree(int *sample) {
    free(sample);
    return OK;
}

int nvmlGpmSampleGet(gpu_t *gpu, int *sample) {
    int code = reach(gpu);
    *sample = gpu->index;
    return code;
}

typedef struct {
    unsigned metric, code;
    double value;
    char *names[3];
} metric_t;

typedef struct {
    unsigned version, count;
    int *old_sample, *new_sample;
    metric_t metrics[];
} metrics_t;

int nvmlGpmMetricsGet(metrics_t *out) {
    unsigned place;
    for (place = 0; place < out->count; place++) {
        char name[32];
        double value = 0;
        snprintf(name, sizeof name, "gpm.%u", out->metrics[place].metric);
        out->metrics[place].code = (unsigned)ask(&gpus[*out->new_sample], name, &value);
        out->metrics[place].value = value;
    }
    return OK;
}

int nvmlEventSetCreate(int **out) {
    *out = calloc(1, sizeof **out);
    memset(registered, 0, sizeof registered);
    return alive();
}

int nvmlEventSetFree(int *set) {
    free(set);
    return OK;
}

int nvmlDeviceRegisterEvents(gpu_t *gpu, unsigned long long types, int *set) {
    double value = 0;
    int code = reach(gpu);
    (void)types;
    (void)set;
    if (code)
        return code;
    code = ask(gpu, "events", &value); /* absent: GPU supports them; "!3": it does not */
    if (code && code != NOT_SUPPORTED)
        return code;
    if (code == OK && value == 0)
        return NOT_SUPPORTED;
    registered[gpu->index] = 1;
    return OK;
}

typedef struct {
    gpu_t *gpu;
    unsigned long long type, data;
    unsigned instance, compute;
} event_t;

int nvmlEventSetWait_v2(int *set, event_t *out, unsigned timeout_ms) {
    unsigned waited;
    (void)set;
    for (waited = 0; waited < timeout_ms; waited += 20) {
        char text[64];
        long sequence = 0;
        int index = 0, xid = 0, code = alive();
        if (code)
            return code;
        if ((code = (int)number_of("wait", 0)))
            return code;
        if (lookup("xid", text, sizeof text) && sscanf(text, "%ld:%d:%d", &sequence, &index, &xid) == 3 &&
            sequence > xid_seen) {
            xid_seen = sequence;
            if (registered[index]) {
                out->gpu = &gpus[index];
                out->type = 8;
                out->data = (unsigned long long)xid;
                out->instance = out->compute = 0xffffffffu;
                return OK;
            }
        }
        for (index = 0; index < MOST; index++) {
            char key[64];
            snprintf(key, sizeof key, "%d.lost", index);
            if (registered[index] && (code = (int)number_of(key, 0)))
                return code;
        }
        usleep(20000);
    }
    return TIMED_OUT;
}
