// Libraries that answer as NVIDIA's do, for cards that are not there: compiled by the tests, so that
// what Python says of the arguments' types is put to the test as well.
// With -DOLD it has the functions of a driver of 2021 only.
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

namespace {

struct State {
    std::map<std::string, long long> values;
    std::vector<unsigned> pids;
    int initialised = 0;
};

State& state() {
    static State one;
    return one;
}

// A function's own error code where one is set, else whether the library is initialised at all.
int answer(const std::string& name) {
    auto found = state().values.find("error:" + name);
    if (found != state().values.end() && found->second != 0) return static_cast<int>(found->second);
    return state().initialised > 0 ? 0 : 1;
}

long long value(const std::string& name) {
    auto found = state().values.find(name);
    return found == state().values.end() ? 0 : found->second;
}

struct Card {
    char magic[8];
    std::string prefix;
};

Card& card(int index) {
    static Card cards[2] = {{"card", "0:"}, {"card", "1:"}};
    return cards[index];
}

// A handle that was cut to 32 bits, or is no handle, does not pass.
bool is_card(void* handle) { return handle == &card(0) || handle == &card(1); }

long long of(void* handle, const std::string& name) {
    const std::string own = static_cast<Card*>(handle)->prefix + name;
    return state().values.count(own) ? value(own) : value(name);
}

template <typename T>
int give(void* handle, const char* name, T* out) {
    if (int code = answer(name)) return code;
    if (!is_card(handle)) return 2;
    *out = static_cast<T>(of(handle, name));
    return 0;
}

struct Process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

int processes(void* handle, unsigned* count, Process* out) {
    if (int code = answer("processes")) return code;
    if (!is_card(handle)) return 2;
    const auto& pids = state().pids;
    if (*count < pids.size()) {
        *count = static_cast<unsigned>(pids.size());
        return 7;
    }
    *count = static_cast<unsigned>(pids.size());
    for (size_t i = 0; i < pids.size(); ++i) out[i] = {pids[i], 1ull << 33, ~0u, ~0u};
    return 0;
}

}  // namespace

extern "C" {

void fake_reset() { state() = State(); }
void fake_set(const char* name, long long number) { state().values[name] = number; }
void fake_process(unsigned pid) { state().pids.push_back(pid); }
int fake_initialised() { return state().initialised; }

int nvmlInit_v2() {
    if (long long code = value("error:nvmlInit_v2")) return static_cast<int>(code);
    ++state().initialised;
    return 0;
}
int nvmlShutdown() {
    if (int code = answer("nvmlShutdown")) return code;
    --state().initialised;
    return 0;
}
const char* nvmlErrorString(int code) {
    switch (code) {
        case 3: return "Not Supported";
        case 6: return "Not Found";
        case 9: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        case 16: return "GPU requires reset";
        default: return "Unknown Error";
    }
}
int nvmlDeviceGetHandleByPciBusId_v2(const char* address, void** handle) {
    if (int code = answer("nvmlDeviceGetHandleByPciBusId_v2")) return code;
    for (int index = 0; index < 2; ++index) {
        if (std::strcmp(address, index ? "0000:3B:00.0" : "0000:18:00.0") == 0) {
            *handle = &card(index);
            return 0;
        }
    }
    return 6;
}
int nvmlDeviceGetName(void* handle, char* name, unsigned length) {
    if (int code = answer("nvmlDeviceGetName")) return code;
    if (!is_card(handle)) return 2;
    const char* text = handle == &card(0) ? "Fake card A" : "Fake card B";
    if (length <= std::strlen(text)) return 7;
    std::strcpy(name, text);
    return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(void* handle, unsigned long long* out) {
    return give(handle, "energy", out);
}
int nvmlDeviceGetPowerUsage(void* handle, unsigned* out) { return give(handle, "power", out); }
int nvmlDeviceGetEnforcedPowerLimit(void* handle, unsigned* out) {
    return give(handle, "limit", out);
}
int nvmlDeviceGetTemperature(void* handle, int sensor, unsigned* out) {
    return sensor == 0 ? give(handle, "temperature", out) : 2;
}
int nvmlDeviceGetClockInfo(void* handle, int kind, unsigned* out) {
    return kind == 1 ? give(handle, "sm", out) : kind == 2 ? give(handle, "memory", out) : 2;
}
int nvmlDeviceGetPersistenceMode(void* handle, int* out) { return give(handle, "persistence", out); }
int nvmlDeviceGetCurrentClocksThrottleReasons(void* handle, unsigned long long* out) {
    return give(handle, "reasons", out);
}
int nvmlDeviceGetViolationStatus(void* handle, int policy, unsigned long long* times) {
    if (policy != 1) return 2;
    times[0] = 1;
    return give(handle, "hot", &times[1]);
}
int nvmlDeviceGetComputeRunningProcesses_v2(void* handle, unsigned* count, Process* out) {
    return processes(handle, count, out);
}
#ifndef OLD
int nvmlDeviceGetCurrentClocksEventReasons(void* handle, unsigned long long* out) {
    return give(handle, "reasons", out);
}
int nvmlDeviceGetComputeRunningProcesses_v3(void* handle, unsigned* count, Process* out) {
    return processes(handle, count, out);
}
int nvmlDeviceGetMigMode(void* handle, unsigned* now, unsigned* pending) {
    *pending = 0;
    return give(handle, "mig", now);
}
#endif

// The CUDA driver, which counts the same cards in another order.
int cuInit(unsigned flags) { return flags == 0 ? static_cast<int>(value("error:cuInit")) : 1; }
int cuDeviceGetPCIBusId(char* out, int length, int device) {
    if (length < 13 || device < 0 || device > 1) return 101;
    std::strcpy(out, device == 0 ? "0000:3B:00.0" : "0000:18:00.0");
    return 0;
}
}
