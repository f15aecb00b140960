/* A driver library with one GPU, for tests of engine.profiling.gpu: what pynvml calls, answered from the environment.
 *
 *   cc -shared -fPIC -o libnvidia-ml.so.1 tests/nvml_stub.c        (then LD_LIBRARY_PATH)
 *
 * STUB_SM_MHZ, STUB_WATTS, STUB_CELSIUS, STUB_REASONS and STUB_BUSY are lists, one entry for each sample and the last
 * for ever; a variable that is not set makes its function answer "not supported". STUB_ENERGY_MJ is what a call of the
 * energy counter adds. STUB_INIT is what nvmlInit returns. STUB_OLD=1 hides the event reasons behind their old name.
 */
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6 };

static int device;

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

int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **handle)
{
    *handle = &device;
    return index == 0 ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle)
{
    *handle = &device;
    return strcmp(uuid, "GPU-stub") == 0 ? SUCCESS : NOT_FOUND;
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
