/* A driver library with GPUs, for tests of what asks NVML: what pynvml calls, answered from the environment.
 *
 *   cc -shared -fPIC -o libnvidia-ml.so.1 tests/nvml_stub.c        (then LD_LIBRARY_PATH)
 *
 * STUB_SM_MHZ, STUB_WATTS, STUB_CELSIUS, STUB_REASONS and STUB_BUSY are lists, one entry for each sample and the last
 * for ever; a variable that is not set makes its function answer "not supported". STUB_ENERGY_MJ is what a call of the
 * energy counter adds. STUB_INIT is what nvmlInit returns. STUB_OLD=1 hides the event reasons behind their old name.
 *
 * STUB_GPUS is the number of GPUs (one if not set), STUB_NAME their name, STUB_MEMORY their bytes, STUB_USED the bytes
 * that processes have of each, STUB_CAPABILITY their compute capability (90: 9.0). The first has the UUID GPU-stub and the PCI address 00000000:10:00.0, the next GPU-stub1
 * and 00000000:11:00.0. STUB_SLICES divides each into so many MIG devices, MIG-stub0-0, MIG-stub0-1 and so on.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

enum { GPUS = 16, SLICES = 8 };
static char devices[GPUS], slices[GPUS][SLICES];

/* Entry number `call` of a list in the environment. */
static int entry(const char *name, int call, unsigned long long *value)
{
    const char *text = getenv(name);
    if (text == NULL)
        return NOT_SUPPORTED;
    while (call-- > 0 && strchr(text, ',') != NULL)
        text = strchr(text, ',') + 1;
    *value = strtoull(text, NULL, 0);
    return SUCCESS;
}

static int number(const char *name, int call, unsigned int *value)
{
    unsigned long long wide = 0;
    int status = entry(name, call, &wide);
    *value = (unsigned int)wide;
    return status;
}

int nvmlInitWithFlags(unsigned int flags)
{
    unsigned int status = 0;
    (void)flags;
    return number("STUB_INIT", 0, &status) == SUCCESS ? (int)status : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int status) { return status == NOT_SUPPORTED ? "not supported" : "another error"; }

static unsigned int gpus(void)
{
    unsigned int count = 1;
    const char *text = getenv("STUB_GPUS");
    return text == NULL ? count : (unsigned int)atoi(text);
}

static int is_slice(void *handle) { return (char *)handle >= &slices[0][0] && (char *)handle < &slices[0][0] + sizeof slices; }

static unsigned int gpu_of(void *handle)
{
    return is_slice(handle) ? (unsigned int)((char *)handle - &slices[0][0]) / SLICES : (unsigned int)((char *)handle - devices);
}

int nvmlDeviceGetCount_v2(unsigned int *count)
{
    *count = gpus();
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    if (index >= gpus())
        return NOT_FOUND;
    *handle = &devices[index];
    return SUCCESS;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned int size)
{
    unsigned int gpu = gpu_of(handle);
    if (is_slice(handle))
        snprintf(text, size, "MIG-stub%u-%d", gpu, (int)(((char *)handle - &slices[0][0]) % SLICES));
    else if (gpu == 0)
        snprintf(text, size, "GPU-stub");
    else
        snprintf(text, size, "GPU-stub%u", gpu);
    return SUCCESS;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    char text[96];
    for (unsigned int gpu = 0; gpu < gpus(); gpu++) {
        *handle = &devices[gpu];
        nvmlDeviceGetUUID(*handle, text, sizeof text);
        if (strcmp(uuid, text) == 0)
            return SUCCESS;
        for (unsigned int slice = 0; slice < SLICES; slice++) {
            *handle = &slices[gpu][slice];
            nvmlDeviceGetUUID(*handle, text, sizeof text);
            if (strcmp(uuid, text) == 0)
                return SUCCESS;
        }
    }
    return NOT_FOUND;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned int size)
{
    const char *name = getenv("STUB_NAME");
    snprintf(text, size, "%s%s", name == NULL ? "NVIDIA H100 80GB HBM3" : name, is_slice(handle) ? " MIG 1g.10gb" : "");
    return SUCCESS;
}

/* nvmlMemory_t */
int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *memory)
{
    int status = entry("STUB_MEMORY", 0, &memory[0]);
    if (is_slice(handle))
        memory[0] /= SLICES;
    memory[2] = 0;
    entry("STUB_USED", (int)gpu_of(handle), &memory[2]);
    memory[1] = memory[0] - memory[2];
    return status;
}

/* nvmlPciInfo_t */
struct pci {
    char short_name[16];
    unsigned int domain, bus, device, id, subsystem;
    char name[32];
};

int nvmlDeviceGetPciInfo_v3(void *handle, struct pci *info)
{
    memset(info, 0, sizeof *info);
    info->bus = 0x10 + gpu_of(handle);
    snprintf(info->name, sizeof info->name, "00000000:%02X:00.0", info->bus);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(void *handle, unsigned int *now, unsigned int *later)
{
    (void)handle;
    *now = *later = getenv("STUB_SLICES") != NULL;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned int *count)
{
    (void)handle;
    *count = SLICES;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned int index, void **slice)
{
    unsigned int made = 0;
    number("STUB_SLICES", 0, &made);
    *slice = &slices[gpu_of(handle)][index];
    return index < made ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor)
{
    unsigned int capability = 0;
    int status = number("STUB_CAPABILITY", 0, &capability);
    (void)handle;
    *major = (int)capability / 10;
    *minor = (int)capability % 10;
    return status;
}

int nvmlDeviceGetClockInfo(void *handle, int type, unsigned int *mhz)
{
    static int calls;
    (void)handle;
    return type == 1 ? number("STUB_SM_MHZ", calls++, mhz) : number("STUB_MEMORY_MHZ", 0, mhz);
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned int *milliwatts)
{
    static int calls;
    int status = number("STUB_WATTS", calls++, milliwatts);
    (void)handle;
    *milliwatts *= 1000;
    return status;
}

int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned int *celsius)
{
    static int calls;
    (void)handle;
    (void)sensor;
    return number("STUB_CELSIUS", calls++, celsius);
}

int nvmlDeviceGetUtilizationRates(void *handle, unsigned int *rates)
{
    static int calls;
    (void)handle;
    rates[1] = 0;
    return number("STUB_BUSY", calls++, rates);
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, unsigned long long *millijoules)
{
    static int calls;
    int status = entry("STUB_ENERGY_MJ", 0, millijoules);
    (void)handle;
    *millijoules *= (unsigned long long)++calls;
    return status;
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *reasons)
{
    static int calls;
    (void)handle;
    return entry("STUB_REASONS", calls++, reasons);
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons)
{
    return getenv("STUB_OLD") != NULL ? NOT_SUPPORTED : nvmlDeviceGetCurrentClocksThrottleReasons(handle, reasons);
}
